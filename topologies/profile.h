#pragma once

// Profile: what software achieves on one GPU type, and what it costs besides. Every number carries
// its origin. `calibrate` and `fit` write profiles; the ones shipped come from published facts.

#include <array>
#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "core/units.h"
#include "topologies/cluster.h"
#include "topologies/number.h"

namespace shardwright {

// Attention kernels of one library that do not materialise the score matrix.
struct AttentionProfile {
  // Fraction of the dense peak that they reach on tiles of head dimension 128 that see many keys.
  Number<double> forward, backward;
  // Share of that time which does not grow with the head dimension: the softmax.
  Number<double> softmax;
  // Queries that a multiprocessor works on at a time in forward, where the tiles with most keys
  // begin first so that the last one to end is a short one; 0: 128, in any order. Optional in
  // files.
  Number<double> group;
  // What a tile of queries costs beside its keys, in keys. 0: unknown, and the fractions above are
  // those of every shape.
  Number<double> start;
  // How many times longer backward takes with more than 128 features per head, whose tiles do not
  // fit into a multiprocessor as those of 128 do; 0: not longer. Optional in files.
  Number<double> wide;

  bool operator==(const AttentionProfile&) const = default;
};

// Kernels on the GPU.
struct ComputeProfile {
  // Fraction of the dense peak that a large matrix product reaches, by MathType; nothing: no such
  // unit.
  std::array<std::optional<Number<double>>, kMathTypeCount> gemm;
  // Of gemm[fp8], what products reach whose operands have a scale per row and column, which the
  // kernel applies; 0: as much. Optional in files.
  Number<double> fp8_rowwise;
  // Fraction of the dense peak that the executor's own CUDA kernels reach for the products of
  // experts; 0: as gemm. Optional in files.
  Number<double> own_grouped;
  // Of grouped products, whose operands and results are many per operation: the part of the shorter
  // of multiplying and moving bytes that hides behind the longer. Optional in files.
  Number<double> grouped_overlap{1, {}, 0};
  // Time per product of the host, where a library asks for grouped products one by one
  // (Transformer Engine). Optional in files.
  Number<Seconds> grouped_call;
  // Time a matrix product loses to filling and draining the GPU: t = flops / (gemm * peak) +
  // gemm_ramp.
  Number<Seconds> gemm_ramp;
  AttentionProfile attention;  // the usual library
  // forward 0: as the usual one. Optional in files.
  AttentionProfile cudnn_attention;
  AttentionProfile flash3_attention;  // FlashAttention-3
  AttentionProfile triton_attention;  // Triton's of 2023: two fractions for all shapes
  AttentionProfile ck_attention;      // AMD's Composable Kernel
  AttentionProfile own_attention;     // the executor's own CUDA kernels, with heads of 128 features
  // Fractions of the memory bandwidth: bytes read and written / time.
  Number<double> elementwise;
  Number<double> reduction;  // norms, softmax, loss
  Number<double> optimizer;  // multi-tensor (foreach, fused) optimizer kernels
  // The least time a kernel occupies its stream, however small.
  Number<Seconds> kernel_floor;
  // Of the norm of all gradients and of scaling them by it; 0: as `optimizer`. Optional in files.
  Number<double> grad_norm;
  Number<double> grad_clip;
  // Of copies on the device; 0: as `elementwise`. Optional in files.
  Number<double> copies;
  // Of kernels that go through long rows, what they read again counted (Kernel::reread); 0: as
  // `elementwise`. Optional in files.
  Number<double> rows;
  // Of lookups of rows in tables and their gradients; 0: as `elementwise`. Optional in files.
  Number<double> gather;
  // Time of a load that nothing hides. Optional in files.
  Number<Seconds> load;
  // Of the operands of matrix products where the device does not bring them while it multiplies, as
  // a core does not: t = flops / (gemm * peak) + bytes / (gemm_operands * bandwidth) + gemm_ramp.
  // 0: it does, and the longer of the two counts. Optional in files.
  Number<double> gemm_operands;
  // Of matrix products whose bytes take longer than their operations (few rows, columns or depth);
  // 0: as `elementwise`. Optional in files.
  Number<double> gemm_memory;
  // Idle time of a stream between two kernels that are both ready.
  Number<Seconds> kernel_gap;
  // Standard deviation of the speed of GPUs of one type, relative to the mean: clocks differ with
  // silicon and cooling, and everybody waits for the slowest. The rates above are those of a mean
  // GPU. Optional in files.
  Number<double> rank_spread;
  // Time per column of a QR decomposition besides its operations: columns depend on each other.
  // Optional in files.
  Number<Seconds> qr_column;

  bool operator==(const ComputeProfile&) const = default;
};

// Work of the host thread that issues ops.
struct HostProfile {
  Number<Seconds> kernel_launch;     // per kernel, in the driver
  Number<Seconds> op_issue;          // per framework op, besides its launches (dispatch, autograd)
  Number<Seconds> collective_issue;  // per collective, everything
  Number<Seconds> unit_hook;         // per FSDP unit hook (pre/post forward/backward) in Python
  Number<Seconds> wake;              // until the host goes on after an event it waited for
  Number<Seconds> malloc;            // one cudaMalloc of a segment
  Number<Seconds> free;              // one cudaFree of a segment (synchronises the device besides)
  Number<Seconds> copy_issue;        // per host-device copy
  // Least time between two collectives that compiled code issues back to back: nccl-tests prints
  // no shorter times. 0: not known to matter. Optional in files.
  Number<Seconds> library_call;
  // The same per peer of an all-to-all, in addition. Optional in files.
  Number<Seconds> library_peer;
  // Time per optimizer step in which the device idles, because the training loop waits for results
  // (the loss, to log it) and then fetches data and starts anew. Optional in files.
  Number<Seconds> step;

  bool operator==(const HostProfile&) const = default;
};

// Host-device copies, as fractions of the link rate that FindHostCopyRates gives.
struct CopyProfile {
  Number<double> to_device;  // pinned memory
  Number<double> to_host;
  Number<double> both_ways;  // fraction of each direction's rate that remains when both are busy
  Number<Seconds> latency;   // per copy, on the copy stream

  bool operator==(const CopyProfile&) const = default;
};

// One of the library's protocols on one transport. A ring collective costs, per protocol,
//   base_latency + hops * hop_latency + bytes / (rate * efficiency * bandwidth)
// and the library picks one (CollectiveChoice). With both kinds of hop, base and efficiency are the
// network's (and the slower rate counts), each hop pays its own transport's latency. The row
// "NVLS", reduction inside the NVSwitch, serves all-reduce only.
struct ProtocolProfile {
  std::string name;  // "LL", "LL128", "Simple", "NVLS"
  Number<Seconds> base_latency;
  Number<Seconds> hop_latency;
  Number<double> bandwidth;  // fraction of the Simple protocol's rate
  // Part of it that remains when data are reduced on the way. Optional in files.
  Number<double> reduce_bandwidth{1, {}, 0};
  // NVLS: what could have been sent in the time that handing on a chunk takes (NvlsChunk), and the
  // rounds of chunks until all stages work at a time. Optional in files.
  Number<Bytes> chunk_overhead;
  Number<double> fill;
  // Per hop of a tree between nodes; 0: hop_latency. Optional in files.
  Number<Seconds> tree_latency;
  // What an all-reduce by ring pays once beside the latencies of two gathers, and the exponent q
  // with which its latency hides behind its transfer, as TransportProfile::overlap. Optional in
  // files.
  Number<Seconds> turn_latency;
  Number<double> turn_overlap{1, {}, 0};

  bool operator==(const ProtocolProfile&) const = default;
};

// How the library chooses algorithm and protocol of a collective.
enum class CollectiveChoice : std::uint8_t {
  kCheapest,  // the one that is fastest, as tuned tables do (AWS, Google plugins)
  kNccl,      // the one that NCCL's own cost model prefers, which is not always the fastest
};

// "cheapest", "nccl".
[[nodiscard]] const char* CollectiveChoiceName(CollectiveChoice choice);

// A way data travels between ranks: "nvlink", "pcie" inside a node; "ib", "roce", "efa", "tcpx",
// "tcpxo", "ethernet" between nodes (Cluster::network).
struct TransportProfile {
  std::string name;
  Number<double> efficiency;      // bus bandwidth of large all-gathers / raw link rate
  Number<std::int64_t> channels;  // thread blocks of a collective = multiprocessors it occupies
  CollectiveChoice choice = CollectiveChoice::kCheapest;
  // Of all-reduces; nothing: as of gathers. Optional in files.
  std::optional<CollectiveChoice> all_reduce_choice;
  // Names of the protocols that all-reduces may use ("NVLS" with them); empty: all. What a provider
  // switches off (NCCL_PROTO, NCCL_NVLS_ENABLE) or a plugin cannot do. Optional in files.
  std::vector<std::string> all_reduce_protocols;
  // Latency of the network that its plugin reports to NCCL's estimates. Optional in files.
  Number<Seconds> reported_latency;
  // Times the rate of gathers that all-reduces reach: between nodes by ring or tree, inside a node
  // by ring; the link's rate at most. Optional in files.
  Number<double> all_reduce_gain{1, {}, 0};
  // Bytes that a channel of a Simple tree hands on at a time: an eighth of NCCL_BUFFSIZE. 0: the
  // time until all hops work at a time is not counted. Optional in files.
  Number<Bytes> tree_chunk;
  // All-to-all, which is a send to and a receive from every peer: times the rate of gathers that it
  // reaches, latency of all of it (0: a ring's base and hops), and the time s by which peers drift
  // apart: t = latency + X + sqrt(s X). Optional in files.
  Number<double> p2p_gain{1, {}, 0};
  Number<Seconds> p2p_latency;
  Number<Seconds> p2p_drift;
  // How much of the Simple protocol's latency L hides behind its transfer X, since several chunks
  // are in flight: t = (L^q + X^q)^(1/q). From 1 (nothing hides) to 10. Optional in files.
  Number<double> overlap{1, {}, 0};
  // LL and LL128 messages of one channel above this size are sent as two, which costs
  // `split_latency` per hop (adaptive routing on InfiniBand). 0: never. Optional in files.
  Number<Bytes> split_above;
  Number<Seconds> split_latency;
  std::vector<ProtocolProfile> protocols;

  bool operator==(const TransportProfile&) const = default;
};

// What compute and communication do to each other while both run.
struct OverlapProfile {
  // Bytes of GPU memory traffic per byte of bus traffic: reading, staging, writing.
  Number<double> gather_memory_traffic;
  Number<double> reduce_memory_traffic;  // reduce-scatter; all-reduce counts both
  // Fraction of its rate a collective keeps beside compute (its blocks wait for multiprocessors).
  Number<double> collective_rate;
  // Part of the ideal slowdown (multiprocessors and memory bandwidth lost) that compute-bound
  // kernels see: 1 means a kernel on 108 of 132 multiprocessors runs 132/108 times longer.
  Number<double> compute_sensitivity;
  // Where ops run on cores: how much longer they take, as a part of their time, for every other
  // core of the machine that is busy at that moment, since cores share caches and memory. Optional
  // in files.
  Number<double> busy_cores;
  // Where ops run on cores: how much longer they take where there are more ranks than cores, since
  // whoever ran before has left its data in the caches. Optional in files.
  Number<double> core_turns;
  // Where ops run on cores: the part of an op's work that a rank's threads share; one of them does
  // the rest while the others wait. Optional in a file: 0.
  Number<double> shared_work;
  // What it costs to share a kernel: the others have to be told, and waited for. Optional likewise.
  Number<Seconds> loop_start;
  // Not 0: PyTorch where the host computes and gloo carries its collectives: ops of all streams run
  // one after another, in the order of issue, and a reduce-scatter is an all-reduce (torch 2.13).
  // Optional in a file: 0.
  Number<double> gloo;

  bool operator==(const OverlapProfile&) const = default;
};

// Device memory that the framework's allocator does not see, and library workspaces that it does.
struct MemoryProfile {
  Number<Bytes> context;             // CUDA context with the kernels loaded lazily
  Number<Bytes> first_communicator;  // NCCL's global state and the first communicator
  Number<Bytes> next_communicator;   // every further one
  Number<Bytes> blas_workspace;      // per (handle, stream), inside the allocator in PyTorch

  bool operator==(const MemoryProfile&) const = default;
};

struct Profile {
  std::string name;          // "h100-torch-eager"
  std::string description;   // one line
  std::string architecture;  // GpuSpec::architecture or ::name it is meant for; empty: any
  std::string kernel_set;    // KernelSet it is meant for; empty: any
  ComputeProfile compute;
  HostProfile host;
  CopyProfile copy;
  std::vector<TransportProfile> transports;  // names are unique
  OverlapProfile overlap;
  MemoryProfile memory;

  bool operator==(const Profile&) const = default;
};

// `spec` is a shipped name or the path of a .json file. Throws InputError.
[[nodiscard]] Profile LoadProfile(const std::string& spec);
// The shipped profile for a GPU and a kernel set: of this GPU for it, else of its architecture,
// else the same two of its family ("torch" of PyTorch's kernels, "shardwright-cuda"), then of
// "torch-eager", which is what microbenchmarks say, else "generic".
[[nodiscard]] Profile DefaultProfile(const GpuSpec& gpu, std::string_view kernel_set);
// From now on the shipped profiles are those of `folder`, its *.json files: to ask what predictions
// would be without some of them. For a program's beginning, before any other function of this
// header, and for one thread. Throws InputError for a folder without such files.
void ShipProfilesOf(const std::string& folder);
// Names of the shipped profiles, sorted.
[[nodiscard]] std::vector<std::string> ListProfiles();

// Reads a profile; `file` names it in errors. A file may say "extends": "<shipped name>" and then
// gives only what differs.
[[nodiscard]] Profile ParseProfile(std::string_view text, const std::string& file);
// The whole profile as JSON without "extends"; ParseProfile reads it back to an equal value.
[[nodiscard]] std::string ProfileJson(const Profile& profile);

// The row named `name`, or the row "default" when there is none. Throws InputError without either.
[[nodiscard]] const TransportProfile& FindTransport(const Profile& profile, std::string_view name);

}  // namespace shardwright
