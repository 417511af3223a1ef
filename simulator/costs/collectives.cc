#include "simulator/costs/collectives.h"

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>
#include <optional>
#include <string_view>

#include "core/error.h"
#include "simulator/costs/kernels.h"

namespace shardwright {
namespace {

// One protocol on a path: what a message pays once, per hop and per byte of bus traffic.
struct Line {
  Seconds base;
  Seconds intra_hop;
  Seconds inter_hop;
  double intra_rate = 0;  // that software reaches inside a node and between nodes, in B/s; 0: no
  double inter_rate = 0;  // such hops
  double overlap = 1;     // exponent q of TransportProfile::overlap
  Seconds split_hop;      // more per hop between nodes for messages above split_above
  double split_above = 0;
  double channels = 1;
  double framing = 1;  // bytes sent per byte of data
  double reduce_share = 1;

  // Of the ring: its slowest hop's.
  [[nodiscard]] double Rate() const {
    return intra_rate > 0 && inter_rate > 0 ? std::min(intra_rate, inter_rate)
                                            : std::max(intra_rate, inter_rate);
  }
};

constexpr std::string_view kNvls = "NVLS";

const ProtocolProfile* FindProtocol(const TransportProfile* transport, std::string_view name) {
  if (transport == nullptr) {
    return nullptr;
  }
  for (const ProtocolProfile& protocol : transport->protocols) {
    if (protocol.name == name) {
      return &protocol;
    }
  }
  return nullptr;
}

const TransportProfile& OuterOf(const CollectivePath& path) {
  const TransportProfile* outer = path.network != nullptr ? path.network : path.intra;
  SW_CHECK(outer != nullptr && !outer->protocols.empty(), "a ring without a transport");
  return *outer;
}

// With both kinds of hop the base latency is the network's; each hop has its own latency and rate.
Line LineOf(const CollectivePath& path, const ProtocolProfile& protocol) {
  const TransportProfile& outer = OuterOf(path);
  Line line;
  line.base = protocol.base_latency.value;
  line.reduce_share = protocol.reduce_bandwidth.value;
  line.channels = static_cast<double>(std::max<std::int64_t>(outer.channels.value, 1));
  if (path.network != nullptr) {
    line.inter_hop = protocol.hop_latency.value + path.ring.inter_latency;
    line.inter_rate =
        path.ring.inter_rate.value * outer.efficiency.value * protocol.bandwidth.value;
  }
  if (path.intra != nullptr) {
    const ProtocolProfile* found = FindProtocol(path.intra, protocol.name);
    const ProtocolProfile& inner = found != nullptr ? *found : protocol;
    line.intra_hop = inner.hop_latency.value;
    line.intra_rate =
        path.ring.intra_rate.value * path.intra->efficiency.value * inner.bandwidth.value;
  }
  if (protocol.name == "Simple") {
    line.overlap = outer.overlap.value;
  } else {
    line.split_above = static_cast<double>(outer.split_above.value.value);
    line.split_hop = outer.split_latency.value;
    // LL sends a flag with every 4 bytes, LL128 with every 120.
    line.framing = protocol.name == "LL" ? 2 : 128.0 / 120;
  }
  return line;
}

double Log2Ceil(std::int64_t n) {
  return n <= 1 ? 0 : std::ceil(std::log2(static_cast<double>(n)));
}

// Latency L of which a part hides behind the transfer X.
Seconds Overlapped(Seconds latency, Seconds transfer, double q) {
  if (q <= 1 || latency.value <= 0 || transfer.value <= 0) {
    return latency + transfer;
  }
  // In terms of the larger, so that nothing overflows.
  const double larger = std::max(latency.value, transfer.value);
  const double ratio = std::min(latency.value, transfer.value) / larger;
  return Seconds(larger * std::pow(1 + std::pow(ratio, q), 1 / q));
}

// Latency of going round the ring once.
Seconds RingHops(const Line& line, double bytes, const RingPath& ring) {
  const double message = bytes / (static_cast<double>(ring.size) * line.channels) * line.framing;
  const bool is_split = line.split_above > 0 && message > line.split_above;
  const Seconds inter_hop = is_split ? line.inter_hop + line.split_hop : line.inter_hop;
  return line.intra_hop * static_cast<double>(ring.intra_hops) +
         inter_hop * static_cast<double>(ring.inter_hops);
}

// Of a tree over the nodes with a chain inside each: S goes up and down the chains, and a node of
// the double binary tree sends 2 (N-1)/N S.
Seconds TreeAllReduce(const Line& line, double bytes, const RingPath& ring) {
  const GroupPlacement& place = ring.placement;
  const auto chain = static_cast<double>(
      std::max<std::int64_t>(place.ranks_per_node - 1, place.node_count > 1 ? 0 : 1));
  const Seconds hops = line.intra_hop * chain + line.inter_hop * Log2Ceil(place.node_count);
  double transfer = 0;
  if (ring.intra_hops > 0) {
    transfer = 2 * bytes / line.intra_rate;
  }
  if (ring.inter_hops > 0) {
    const auto nodes = static_cast<double>(place.node_count);
    transfer = std::max(transfer, 2 * (nodes - 1) / nodes * bytes / line.inter_rate);
  }
  return line.base + 2.0 * hops + Seconds(transfer);
}

Seconds AllToAll(const Line& line, double bytes, const RingPath& ring) {
  // Every rank sends S/n to each other rank: to those of its own node at the rate inside, to
  // the others through its share of the node's NICs.
  const auto n = static_cast<double>(ring.size);
  const auto on_node =
      static_cast<double>(std::max<std::int64_t>(ring.placement.ranks_per_node, 1));
  Seconds time;
  if (line.intra_rate > 0) {
    time = Seconds(bytes * (on_node - 1) / n / line.intra_rate);
  }
  if (line.inter_rate > 0) {
    time = std::max(time, Seconds(bytes * (n - on_node) / n / (line.inter_rate / on_node)));
  }
  return line.base + line.intra_hop + line.inter_hop + time;
}

// S: the full array; n: ranks; N: nodes; g: ranks on a node; h: hops of the ring.
Seconds TimeOn(const Line& line, OpCode code, double bytes, const RingPath& ring) {
  const auto n = static_cast<double>(ring.size);
  const Seconds hops = RingHops(line, bytes, ring);
  const double rate = line.Rate();
  switch (code) {
    case OpCode::kAllReduce:
    case OpCode::kBarrier: {
      // Ring: base + 2 h and 2 S (n-1)/n / B.
      const Seconds by_ring =
          Overlapped(line.base + 2.0 * hops, Seconds(2 * bytes * (n - 1) / n / rate), line.overlap);
      return std::min(by_ring, TreeAllReduce(line, bytes, ring));
    }
    case OpCode::kBroadcast:  // pipelined along the ring
      return Overlapped(line.base + hops, Seconds(bytes / rate), line.overlap);
    case OpCode::kAllToAll:
      return AllToAll(line, bytes, ring);
    default: {
      // All-gather, reduce-scatter: base + h and S (n-1)/n / B.
      const double share = code == OpCode::kReduceScatter ? line.reduce_share : 1;
      return Overlapped(line.base + hops, Seconds(bytes * (n - 1) / n / (rate * share)),
                        line.overlap);
    }
  }
}

// All-reduce with reduction in the NVSwitches: a GPU's links carry its S bytes to the switch and
// the sum of its g-th part back to all, S (1 + 1/g), and wait for every chunk. Between nodes a tree
// over the nodes, of which NCCL runs one per GPU of a node.
std::optional<Seconds> NvlsAllReduce(const CollectivePath& path, double bytes) {
  const RingPath& ring = path.ring;
  const ProtocolProfile* nvls = FindProtocol(path.intra, kNvls);
  const std::int64_t on_node = ring.placement.ranks_per_node;
  if (nvls == nullptr || on_node < 2 || !path.has_nvswitch) {
    return std::nullopt;
  }
  const double share = path.intra->efficiency.value * nvls->bandwidth.value;
  const double waits =
      static_cast<double>(nvls->chunk_overhead.value.value) / NvlsChunk(path.nccl, bytes);
  double transfer = bytes * (1 + 1 / static_cast<double>(on_node)) * (1 + waits) /
                    (ring.intra_rate.value * share);
  Seconds latency = nvls->base_latency.value + nvls->hop_latency.value;
  if (ring.inter_hops > 0) {
    const ProtocolProfile* simple = FindProtocol(path.network, "Simple");
    if (simple == nullptr) {
      return std::nullopt;
    }
    const Line line = LineOf(path, *simple);
    const auto nodes = static_cast<double>(ring.placement.node_count);
    transfer = std::max(transfer, 2 * (nodes - 1) / nodes * bytes / line.inter_rate);
    latency += line.base + line.inter_hop * (2 * Log2Ceil(ring.placement.node_count));
    return Overlapped(latency, Seconds(transfer), line.overlap);
  }
  return latency + Seconds(transfer);
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
  return std::any_of(cluster.node.components.begin(), cluster.node.components.end(),
                     [](const Component& c) { return c.kind == ComponentKind::kNvSwitch; });
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
        std::count_if(cluster.node.components.begin(), cluster.node.components.end(),
                      [](const Component& c) { return c.kind == ComponentKind::kNic; }));
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
  path.is_gloo = profile.overlap.gloo.value > 0;
  return path;
}

Seconds CollectiveTime(OpCode code, Bytes bytes, const CollectivePath& path) {
  if (path.ring.size <= 1) {
    // Nothing to exchange. What is not done in place is one copy: a read and a write.
    const bool is_copied = code == OpCode::kReduceScatter || code == OpCode::kAllToAll;
    return is_copied ? 2 * bytes / path.memory : Seconds(0);
  }
  if (path.is_gloo && code == OpCode::kReduceScatter) {
    code = OpCode::kAllReduce;
  }
  const TransportProfile& outer = OuterOf(path);
  // A barrier is an all-reduce of one element.
  const double size = code == OpCode::kBarrier ? 8 : static_cast<double>(bytes.value);
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
  if (code == OpCode::kAllReduce || code == OpCode::kBarrier) {
    best = std::min(best, NvlsAllReduce(path, size).value_or(best));
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
  return code == OpCode::kBroadcast ? 1 : share;
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
