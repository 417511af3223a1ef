#pragma once

// Which protocol NCCL chooses. The library prices every protocol with constants of its own
// (src/graph/tuning.cc) and takes the one it believes cheapest; that belief is off by 1.5 to 4
// times for small messages, so its choice is not always the fastest. Here are its constants and
// formula, for the choice only; what the chosen protocol costs is the profile's business.

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>

#include "core/units.h"

namespace shardwright {

// What NCCL knows of a group's place.
struct NcclPlace {
  std::string architecture;  // GpuSpec::architecture
  bool is_amd_host = false;
  std::int64_t rank_count = 1;
  std::int64_t node_count = 1;
  double nic_channels = 1;    // NICs of a node that the group's ring uses; may be a share of one
  BytesPerSecond intra_rate;  // raw rate of the ring inside a node; 0 without such hops
  BytesPerSecond inter_rate;  // raw rate between nodes, all NICs of the group; 0 without such hops
};

// NCCL's estimate for a ring all-gather or reduce-scatter of `bytes` in the full array with
// `protocol` ("LL", "LL128" or "Simple"):
//   base + (n - N) max(hop, o) + (N - 1) net_hop + S (n-1)/n / bandwidth
// with o the host's work per network message. Nothing for other protocols and for GPUs that NCCL
// has no constants for. Source: NVIDIA/nccl src/graph/tuning.cc, tag v2.28.9-1, read 2026-11-21.
[[nodiscard]] std::optional<Seconds> NcclRingEstimate(const NcclPlace& place,
                                                      std::string_view protocol, double bytes);

// Bytes that a thread block of an NVLS all-reduce hands on at a time: 128 KiB, or less for arrays
// that are few rounds of chunks for all blocks and GPUs of a node. Source: NVIDIA/nccl
// src/enqueue.cc (calcCollChunking) and src/transport/nvls.cc (NVLS_NCHANNELS_SM90 = 16,
// NVLS_NCHANNELS_SM100_NVL = 24), read 2026-11-23.
[[nodiscard]] double NvlsChunk(const NcclPlace& place, double bytes);

}  // namespace shardwright
