#pragma once

// Which protocol NCCL chooses. The library prices every protocol with constants of its own
// (src/graph/tuning.cc) and takes the one it believes cheapest. That belief is off by 1.5 to 4
// times for small messages, so its choice is not always the fastest. Here are its constants and
// formula, for the choice only. The time of the chosen protocol comes from the profile.

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>

#include "core/units.h"

namespace shardwright {

// How an all-reduce goes round. NVLS adds inside the NVSwitches, NVLSTree does so in each node
// under a tree over the nodes.
enum class NcclAlgorithm : std::uint8_t { kRing, kTree, kNvls, kNvlsTree };

// A group's place, as NCCL knows it.
struct NcclPlace {
  std::string architecture;  // GpuSpec::architecture
  bool is_amd_host = false;
  std::int64_t rank_count = 1;
  std::int64_t node_count = 1;
  double nic_channels = 1;    // NICs of a node that the group's ring uses; may be a share of one
  BytesPerSecond intra_rate;  // raw rate of the ring inside a node; 0 without such hops
  BytesPerSecond inter_rate;  // raw rate between nodes, all NICs of the group; 0 without such hops
  Seconds reported_latency;   // of the network, by its plugin
};

// NCCL's estimate for a ring all-gather or reduce-scatter of `bytes` in the full array with
// `protocol` ("LL", "LL128" or "Simple"):
//   base + (n - N) max(hop, o) + (N - 1) net_hop + S (n-1)/n / bandwidth
// with o the host's work per network message. Nothing for other protocols and for GPUs that NCCL
// has no constants for. Source: NVIDIA/nccl src/graph/tuning.cc, tag v2.28.9-1, read 2026-11-21.
[[nodiscard]] std::optional<Seconds> NcclRingEstimate(const NcclPlace& place,
                                                      std::string_view protocol, double bytes);

// NCCL's estimate for an all-reduce. Ring as above with twice the steps; between nodes Simple's
// latency counts 1.4 times from 64 bytes per channel and rank. Tree:
//   base + 2 ((g-1) hop + log2(N) net_hop) + 2 S / (bandwidth correction(S))
// with the correction table of the source; NVLS: 25 us and the rate of the switch; NVLSTree: 25 us
// + 2 log2(N) 20.9 us. Trees between two nodes count the rate inside the nodes, here at least twice
// the adapters'. Volta's and Ampere's LL counts a quarter of the bus, as up to v2.18, which their
// published sweeps show; half since. Nothing where NCCL has no such algorithm or no constants. The
// same source; v2.18.1 for the quarter, read 2026-11-28.
[[nodiscard]] std::optional<Seconds> NcclAllReduceEstimate(const NcclPlace& place,
                                                           NcclAlgorithm algorithm,
                                                           std::string_view protocol, double bytes);

// `chunk`: bytes that a thread block of an NVLS or NVLSTree all-reduce hands on at a time. It is
// smaller for arrays of few rounds. `round`: bytes of one chunk for all blocks and GPUs of a node.
// In one node 128 KiB at most; over four and more nodes 64 KiB. Source: NVIDIA/nccl src/enqueue.cc
// (calcCollChunking) and src/transport/nvls.cc (NVLS_NCHANNELS_SM90 = 16, NVLS_NCHANNELS_SM100_NVL
// = 24, NVLS_NCHANNELS_SM100 = 32 over several nodes), read 2026-11-23 and 2026-11-28.
struct NvlsChunks {
  double chunk = 0;
  double round = 0;
};
[[nodiscard]] NvlsChunks NvlsChunksOf(const NcclPlace& place, double bytes);

}  // namespace shardwright
