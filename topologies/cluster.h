#pragma once

// Cluster: what a job runs on. One node graph per node type plus fabric levels with multiplicity;
// nothing here is stored or computed per GPU of the cluster, only per component of one node.

#include <algorithm>
#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "core/units.h"
#include "topologies/number.h"

namespace shardwright {

class JsonValue;

// Arithmetic of the matrix units. kTf32 is fp32 data rounded on the way in.
enum class MathType : std::uint8_t { kFp32, kTf32, kFp16, kBf16, kFp8 };
inline constexpr std::size_t kMathTypeCount = 5;

// "fp32", "tf32", "fp16", "bf16", "fp8".
[[nodiscard]] const char* MathTypeName(MathType type);
// The unit that multiplies operands of `dtype`. PyTorch multiplies fp32 without TF32 unless it is
// told otherwise.
[[nodiscard]] MathType MathTypeOf(DType dtype);

// One GPU type: limits as its maker states them. What software achieves of them is in Profile.
struct GpuSpec {
  std::string name;       // "h100-80", the key in the catalog
  std::string full_name;  // "H100-SXM5-80GB"
  std::string vendor;     // "nvidia" or "amd"
  // Generation: "volta", "turing", "ampere", "ada", "hopper", "blackwell", "cdna2", "cdna3".
  std::string architecture;
  Number<Bytes> memory;         // nominal, as sold
  Number<Bytes> usable_memory;  // what all processes together can have
  Number<BytesPerSecond> memory_bandwidth;
  Number<std::int64_t> sm_count;  // streaming multiprocessors or compute units
  Number<Bytes> l2;
  // Dense peak rates by MathType; nothing where the GPU has no such unit.
  std::vector<std::optional<Number<FlopsPerSecond>>> peak_flops =
      std::vector<std::optional<Number<FlopsPerSecond>>>(kMathTypeCount);
  // Per direction, all links of one GPU together; nothing without such links.
  std::optional<Number<BytesPerSecond>> scale_up;
  Number<BytesPerSecond> host_link;  // PCIe or chip-to-chip link to the host, per direction

  bool operator==(const GpuSpec&) const = default;
};

// The dense peak of `gpu` in `type`, or nothing when its matrix units cannot do it (bf16 on V100).
[[nodiscard]] std::optional<FlopsPerSecond> PeakFlops(const GpuSpec& gpu, MathType type);

enum class ComponentKind : std::uint8_t {
  kGpu,
  kNvSwitch,
  kPcieSwitch,
  kCpu,
  kHostMemory,
  kNic,
};

struct Component {
  std::string name;  // "gpu3"
  ComponentKind kind = ComponentKind::kGpu;
  Bytes capacity;            // of a host memory, else 0
  BytesPerSecond bandwidth;  // of a NIC towards the fabric, per direction, else 0
  Origin origin;

  bool operator==(const Component&) const = default;
};

enum class LinkKind : std::uint8_t {
  kNvlink,  // GPU scale-up link of any maker
  kPcie,    // PCIe or a CPU-GPU chip-to-chip link
  kCpu,     // between CPU sockets
  kMemory,  // CPU to its DRAM
};

struct Link {
  std::int32_t from = 0;  // indexes into NodeType::components
  std::int32_t to = 0;
  LinkKind kind = LinkKind::kPcie;
  BytesPerSecond forward;   // from -> to
  BytesPerSecond backward;  // to -> from
  Seconds latency;          // one way; 0: contained in the profile's hop latency
  Origin origin;

  bool operator==(const Link&) const = default;
};

// A node: GPUs that share one scale-up domain and one set of NICs. A GB200 NVL72 rack is one node.
// GPU i of the node is the i-th component of kind kGpu.
struct NodeType {
  std::vector<Component> components;
  std::vector<Link> links;
  Bytes host_memory;   // sum over its host memories
  Bytes pinned_limit;  // most page-locked memory; all host memory when the file does not say

  bool operator==(const NodeType&) const = default;
};

// One tier of the network between nodes. Groups of `group_nodes` neighbouring nodes hang on one
// unit of the tier (a leaf pair, a pod); inside the group bandwidth is as the tier below gives it;
// all traffic that leaves the group shares `uplink` in each direction.
struct FabricLevel {
  std::string name;              // "leaf", "pod"
  std::int64_t group_nodes = 0;  // 0: all nodes (the outermost tier)
  double oversubscription = 1;   // node rate x group_nodes / uplink; unused when group_nodes is 0
  Seconds latency;               // added to a hop that crosses this tier, one way
  Origin origin;

  bool operator==(const FabricLevel&) const = default;
};

struct Cluster {
  std::string name;         // "dgx-h100", or "inline"
  std::string spec;         // what LoadCluster was given: a name, a path or an inline description
  std::string description;  // one line
  GpuSpec gpu;
  NodeType node;
  std::string network = "default";  // row of the profile's transports: "ib", "roce", "efa", ...
  // Maker of the hosts' processors, "intel" or "amd"; empty: not known, taken as Intel. NCCL's
  // choice of protocols between nodes depends on it.
  std::string cpu_vendor;
  std::vector<FabricLevel> fabric;  // from the nodes outwards; group_nodes ascending
  std::int64_t node_count = 1;
  std::int64_t gpus_per_node = 1;  // GPUs of each node in use, at most those of the node graph
  // Where ranks are threads and their ops run on cores: the cores of each node, or those of the
  // one machine on which all nodes are emulated. 0: devices compute by themselves.
  double node_cores = 0;
  double machine_cores = 0;  // not both
  // There: threads that share a rank's compute; 0: as many as it has whole cores for itself.
  std::int64_t rank_threads = 0;

  bool operator==(const Cluster&) const = default;

  [[nodiscard]] std::int64_t RankCount() const { return node_count * gpus_per_node; }

  // Of the machine that a rank runs on, and how many ranks share them; 0 without.
  [[nodiscard]] double SharedCores() const {
    return machine_cores > 0 ? machine_cores : node_cores;
  }
  [[nodiscard]] std::int64_t RanksOnCores() const {
    return machine_cores > 0 ? RankCount() : gpus_per_node;
  }
  // Some wait for a core while all compute.
  [[nodiscard]] bool RanksTakeTurns() const {
    return SharedCores() > 0 && SharedCores() < static_cast<double>(RanksOnCores());
  }
  // Threads that share a rank's compute.
  [[nodiscard]] std::int64_t ThreadsPerRank() const {
    if (rank_threads > 0) {
      return rank_threads;
    }
    return std::max<std::int64_t>(
        1, static_cast<std::int64_t>(SharedCores() / static_cast<double>(RanksOnCores())));
  }
};

// Loads a cluster. `spec` is a catalog name ("dgx-h100"), the path of a .json file, or an inline
// description such as
//   "h100-80 x8, nvlink 450 GB/s, nic 4x200 Gbit/s, pcie 55 GB/s, host 2 TiB, network roce,
//    level leaf 32 nodes, level pod 384 nodes 7:1"
// in which everything after the GPU is optional: GPUs with scale-up links are then joined by a
// switch at the rate of their data sheet ("nvlink none" for not at all), the host link is the
// GPU's, and host memory is not known (0). `nodes` and `gpus` (GPUs used of each node) replace what
// the description says; 0 keeps it. Throws InputError: unknown name (with the nearest), bad file,
// nodes or gpus out of range.
[[nodiscard]] Cluster LoadCluster(const std::string& spec, std::int64_t nodes = 0,
                                  std::int64_t gpus = 0);

// Reads a cluster from JSON text; `file` names it in errors.
[[nodiscard]] Cluster ParseCluster(std::string_view text, const std::string& file);

// A number of cores in such a file.
[[nodiscard]] double ReadCores(const JsonValue& value);
[[nodiscard]] std::int64_t ReadThreads(const JsonValue& value);

// The whole cluster as JSON that ParseCluster reads back to an equal value; every group expanded,
// the GPU embedded. Equal clusters give equal bytes, so that plans can hash it.
[[nodiscard]] std::string ClusterJson(const Cluster& cluster);

struct ClusterSummary {
  std::string name;
  std::string description;
  std::string gpu;
  std::int64_t gpus_per_node = 0;
  BytesPerSecond scale_up;      // ring rate inside a full node, per GPU and direction
  BytesPerSecond network_rate;  // of one node, all NICs together, per direction
  double cores = 0;             // Cluster::SharedCores
};

// "2 cores", "1.5 cores".
[[nodiscard]] std::string CoresText(double cores);

// The catalog, sorted by name.
[[nodiscard]] std::vector<ClusterSummary> ListClusters();
[[nodiscard]] std::vector<std::string> ListClusterNames();

// The GPU types of the catalog, in its order.
[[nodiscard]] const std::vector<GpuSpec>& GpuCatalog();
// Throws InputError with the nearest name; `where` is its place in the input.
[[nodiscard]] const GpuSpec& FindGpu(std::string_view name, std::string_view where);

}  // namespace shardwright
