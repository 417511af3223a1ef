// Time of one collective alone on its links: latency, and bytes over the slowest hop of the ring.
//
// Example: all-gather of 1 GiB over 8 GPUs at 200 GB/s. Each link carries 7/8 GiB, 4.7 ms; with 10
// us for the launch and 7 hops of 1 us each the time is 4.71 ms. Of 64 KiB the transfer takes 0.3
// us and the latency decides: 17 us.
//
// Which protocol runs is either the cheapest one or NCCL's own choice (nccl_choice.cc), as the
// profile says.

#include "simulator/costs/collectives.h"

#include <cmath>
#include <limits>
#include <optional>

#include "core/ranges.h"
#include "simulator/costs/kernels.h"
#include "simulator/internal/protocol_line.h"

namespace shardwright {
namespace {

using internal::AllReduceTime;
using internal::kNvls;
using internal::LineOf;
using internal::OuterOf;
using internal::Overlapped;
using internal::ProtocolLine;
using internal::RingHops;

// Every rank sends S/n to each other rank: to those of its own node at the rate inside, to the
// others through its share of the node's NICs. In a permutation each sends S to the next one.
Seconds AllToAllTime(const CollectivePath& path, double bytes, bool is_permute = false) {
  const RingPath& ring = path.ring;
  const auto n = static_cast<double>(ring.size);
  const auto on_node =
      static_cast<double>(std::max<std::int64_t>(ring.placement.ranks_per_node, 1));
  const auto rate = [](const TransportProfile& transport, BytesPerSecond raw) {
    return raw.value * internal::ShareWithGain(transport, transport.p2p_gain.value);
  };
  double transfer = 0;
  if (path.intra != nullptr) {
    const double share = is_permute ? 1 : (on_node - 1) / n;
    transfer = bytes * share / rate(*path.intra, ring.intra_rate);
  }
  if (path.network != nullptr) {
    const double share = is_permute ? 1 : (n - on_node) / n;
    transfer = std::max(transfer, bytes * share / (rate(*path.network, ring.inter_rate) / on_node));
  }
  const TransportProfile& outer = OuterOf(path);
  double latency = outer.p2p_latency.value.value;
  if (latency == 0) {
    latency = std::numeric_limits<double>::infinity();
    for (const ProtocolProfile& protocol : outer.protocols) {
      const ProtocolLine line = LineOf(path, protocol);
      if (protocol.name != kNvls) {
        latency = std::min(latency, (line.base + line.intra_hop + line.inter_hop).value);
      }
    }
  }
  return Seconds(latency + transfer + std::sqrt(outer.p2p_drift.value.value * transfer));
}

// S: the full array; n: ranks; N: nodes; g: ranks on a node; h: hops of the ring.
Seconds TimeOn(const ProtocolLine& line, OpCode code, double bytes, const RingPath& ring) {
  const auto n = static_cast<double>(ring.size);
  const Seconds hops = RingHops(line, bytes, ring);
  const double rate = line.Rate();
  if (code == OpCode::kBroadcast) {  // pipelined along the ring
    return Overlapped(line.base + hops, Seconds(bytes / rate), line.overlap);
  }
  // All-gather, reduce-scatter: base + h and S (n-1)/n / B.
  const double share = code == OpCode::kReduceScatter ? line.reduce_share : 1;
  return Overlapped(line.base + hops, Seconds(bytes * (n - 1) / n / (rate * share)), line.overlap);
}

// The protocol that NCCL's own cost model takes for a ring; null when it has no opinion.
const ProtocolProfile* ChosenByNccl(const CollectivePath& path, double bytes) {
  const ProtocolProfile* chosen = nullptr;
  Seconds least(std::numeric_limits<double>::infinity());
  for (const ProtocolProfile& protocol : OuterOf(path).protocols) {
    const std::optional<Seconds> estimate = NcclRingEstimate(path.nccl, protocol.name, bytes);
    if (estimate && *estimate < least) {
      least = *estimate;
      chosen = &protocol;
    }
  }
  return chosen;
}

bool HasNvSwitch(const Cluster& cluster) {
  return IsIn(cluster.node.components, ComponentKind::kNvSwitch, &Component::kind);
}

NcclPlace NcclPlaceOf(const Cluster& cluster, const RingPath& ring) {
  NcclPlace place;
  place.architecture = cluster.gpu.architecture;
  place.is_amd_host = cluster.cpu_vendor == "amd";
  place.rank_count = ring.size;
  place.node_count = ring.placement.node_count;
  place.intra_rate = ring.intra_hops > 0 ? ring.intra_rate : BytesPerSecond(0);
  if (ring.inter_hops > 0) {
    place.inter_rate = ring.inter_rate;
    const auto nics = static_cast<double>(
        CountOf(cluster.node.components, ComponentKind::kNic, &Component::kind));
    place.nic_channels = nics * Ratio(ring.inter_rate, NodeNetworkRate(cluster));
  }
  return place;
}

}  // namespace

CollectivePath FindCollectivePath(const Cluster& cluster, const Profile& profile,
                                  GroupShape shape) {
  CollectivePath path;
  path.ring = FindRing(cluster, shape);
  path.memory = FindKernelRates(cluster.gpu, profile.compute).copies;
  if (path.ring.intra_hops > 0) {
    path.intra =
        &FindTransport(profile, path.ring.intra_kind == ScaleUpKind::kNvlink ? "nvlink" : "pcie");
    path.has_nvswitch = path.ring.intra_kind == ScaleUpKind::kNvlink && HasNvSwitch(cluster);
  }
  if (path.ring.inter_hops > 0) {
    path.network = &FindTransport(profile, cluster.network);
  }
  path.nccl = NcclPlaceOf(cluster, path.ring);
  if (path.network != nullptr) {
    path.nccl.reported_latency = path.network->reported_latency.value;
  }
  path.is_gloo = profile.overlap.gloo.value > 0;
  return path;
}

Seconds CollectiveTime(OpCode code, Bytes bytes, const CollectivePath& path) {
  if (path.ring.size <= 1) {
    // Nothing to exchange. A collective that is not in place is one copy: a read and a write.
    const bool is_copied = code == OpCode::kReduceScatter || code == OpCode::kAllToAll;
    return is_copied ? 2 * bytes / path.memory : Seconds(0);
  }
  if (path.is_gloo && code == OpCode::kReduceScatter) {
    code = OpCode::kAllReduce;
  }
  const TransportProfile& outer = OuterOf(path);
  // A barrier is an all-reduce of one element.
  const double size = code == OpCode::kBarrier ? 8 : static_cast<double>(bytes.value);
  if (code == OpCode::kAllReduce || code == OpCode::kBarrier) {
    return AllReduceTime(path, size);
  }
  const bool is_to_one = code == OpCode::kPermute || IsTransfer(code);
  if (code == OpCode::kAllToAll || is_to_one) {
    return AllToAllTime(path, size, is_to_one);
  }
  const bool is_gather = code == OpCode::kAllGather || code == OpCode::kReduceScatter;
  if (is_gather && outer.choice == CollectiveChoice::kNccl) {
    if (const ProtocolProfile* chosen = ChosenByNccl(path, size)) {
      return TimeOn(LineOf(path, *chosen), code, size, path.ring);
    }
  }
  Seconds best(std::numeric_limits<double>::infinity());
  for (const ProtocolProfile& protocol : outer.protocols) {
    if (protocol.name != kNvls) {
      best = std::min(best, TimeOn(LineOf(path, protocol), code, size, path.ring));
    }
  }
  return best;
}

double BusBytesPerByte(OpCode code, std::int64_t ranks) {
  if (ranks <= 1) {
    return 0;
  }
  const double share = static_cast<double>(ranks - 1) / static_cast<double>(ranks);
  if (code == OpCode::kAllReduce || code == OpCode::kBarrier) {
    return 2 * share;
  }
  return code == OpCode::kBroadcast || code == OpCode::kPermute || IsTransfer(code) ? 1 : share;
}

std::int64_t ChannelsOf(const CollectivePath& path) {
  std::int64_t channels = 0;
  if (path.intra != nullptr) {
    channels = path.intra->channels.value;
  }
  if (path.network != nullptr) {
    channels = std::max(channels, path.network->channels.value);
  }
  return channels;
}

}  // namespace shardwright
