#pragma once

// Time of collectives that run alone. docs/cost_model.md, section "Collectives".

#include <cstdint>

#include "core/units.h"
#include "schedule/program.h"
#include "simulator/costs/nccl_choice.h"
#include "topologies/cluster.h"
#include "topologies/profile.h"
#include "topologies/routing.h"

namespace shardwright {

// A family of groups on a cluster with the software that serves it. Pointers into the profile.
struct CollectivePath {
  RingPath ring;
  const TransportProfile* intra = nullptr;    // between GPUs of a node; null without such hops
  const TransportProfile* network = nullptr;  // between nodes; null without such hops
  BytesPerSecond memory;      // device memory bandwidth that copies reach, for groups of one rank
  bool has_nvswitch = false;  // the switches inside a node can reduce (where the profile has NVLS)
  NcclPlace nccl;             // for CollectiveChoice::kNccl
  bool is_gloo = false;       // OverlapProfile::gloo
};
// Throws InputError when the groups do not tile the ranks or the profile lacks a transport.
[[nodiscard]] CollectivePath FindCollectivePath(const Cluster& cluster, const Profile& profile,
                                                GroupShape shape);

// Time from the arrival of the last rank to the end, for `bytes` in the full array. Requires a
// collective `code`. With CollectiveChoice::kCheapest it never falls when a rate rises or a latency
// falls; NCCL's own choice can change for the worse with the links' raw rates, as it does in
// reality.
[[nodiscard]] Seconds CollectiveTime(OpCode code, Bytes bytes, const CollectivePath& path);

// Bytes that one rank sends (and receives) per byte of the full array: (n-1)/n for all-gather and
// reduce-scatter, twice that for all-reduce, 1 for broadcast.
[[nodiscard]] double BusBytesPerByte(OpCode code, std::int64_t ranks);

// Thread blocks, and so multiprocessors, that a collective on this path occupies.
[[nodiscard]] std::int64_t ChannelsOf(const CollectivePath& path);

}  // namespace shardwright
