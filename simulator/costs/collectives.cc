#include "simulator/costs/collectives.h"

#include <algorithm>
#include <cmath>
#include <limits>

#include "core/error.h"

namespace shardwright {
namespace {

// One protocol on a path: what a message pays once, per hop and per byte of bus traffic.
struct Line {
  Seconds base;
  Seconds intra_hop;
  Seconds inter_hop;
  BytesPerSecond rate;  // of the ring
};

const ProtocolProfile* FindProtocol(const TransportProfile* transport, const std::string& name) {
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

// With both kinds of hop, base latency and efficiency are the network's, each hop pays its own.
Line LineOf(const CollectivePath& path, const TransportProfile& outer,
            const ProtocolProfile& protocol) {
  Line line;
  line.base = protocol.base_latency.value;
  line.rate = path.ring.Rate() * (outer.efficiency.value * protocol.bandwidth.value);
  if (path.network != nullptr) {
    line.inter_hop = protocol.hop_latency.value + path.ring.inter_latency;
  }
  if (path.intra != nullptr) {
    const ProtocolProfile* inner = FindProtocol(path.intra, protocol.name);
    line.intra_hop = inner != nullptr ? inner->hop_latency.value : protocol.hop_latency.value;
  }
  return line;
}

double Log2Ceil(std::int64_t n) {
  return n <= 1 ? 0 : std::ceil(std::log2(static_cast<double>(n)));
}

// S: the full array; n: ranks; N: nodes; g: ranks on a node; h: hops of the ring.
Seconds TimeOn(const Line& line, OpCode code, double bytes, const RingPath& ring) {
  const auto n = static_cast<double>(ring.size);
  const Seconds ring_hops = line.intra_hop * static_cast<double>(ring.intra_hops) +
                            line.inter_hop * static_cast<double>(ring.inter_hops);
  const auto sent = [&](double bus_bytes) { return Seconds(bus_bytes / line.rate.value); };
  switch (code) {
    case OpCode::kAllReduce:
    case OpCode::kBarrier: {
      // Ring: base + 2 h + 2 S (n-1)/n / B.   Tree: base + 2 (hops down one chain) + 2 S / B.
      const Seconds by_ring = 2.0 * ring_hops + sent(2 * bytes * (n - 1) / n);
      const auto chain = static_cast<double>(std::max<std::int64_t>(
          ring.placement.ranks_per_node - 1, ring.placement.node_count > 1 ? 0 : 1));
      const Seconds tree_hops =
          line.intra_hop * chain + line.inter_hop * Log2Ceil(ring.placement.node_count);
      return line.base + std::min(by_ring, 2.0 * tree_hops + sent(2 * bytes));
    }
    case OpCode::kBroadcast:
      return line.base + ring_hops + sent(bytes);  // pipelined along the ring
    case OpCode::kAllToAll: {
      // Every rank sends S/n to each other rank: to those of its own node at the rate inside, to
      // the others through its share of the node's NICs.
      const auto on_node =
          static_cast<double>(std::max<std::int64_t>(ring.placement.ranks_per_node, 1));
      const double scale = line.rate.value / ring.Rate().value;  // what software achieves
      Seconds time;
      if (ring.intra_rate.value > 0) {
        time = Seconds(bytes * (on_node - 1) / n / (ring.intra_rate.value * scale));
      }
      if (ring.inter_rate.value > 0) {
        const double share = ring.inter_rate.value / on_node;
        time = std::max(time, Seconds(bytes * (n - on_node) / n / (share * scale)));
      }
      return line.base + line.intra_hop + line.inter_hop + time;
    }
    default:
      // All-gather, reduce-scatter: base + h + S (n-1)/n / B.
      return line.base + ring_hops + sent(bytes * (n - 1) / n);
  }
}

}  // namespace

CollectivePath FindCollectivePath(const Cluster& cluster, const Profile& profile,
                                  GroupShape shape) {
  CollectivePath path;
  path.ring = FindRing(cluster, shape);
  path.memory = cluster.gpu.memory_bandwidth.value * profile.compute.elementwise.value;
  if (path.ring.intra_hops > 0) {
    path.intra =
        &FindTransport(profile, path.ring.intra_kind == ScaleUpKind::kNvlink ? "nvlink" : "pcie");
  }
  if (path.ring.inter_hops > 0) {
    path.network = &FindTransport(profile, cluster.network);
  }
  return path;
}

Seconds CollectiveTime(OpCode code, Bytes bytes, const CollectivePath& path) {
  if (path.ring.size <= 1) {
    // Nothing to exchange. What is not done in place is one copy: a read and a write.
    const bool is_copied = code == OpCode::kReduceScatter || code == OpCode::kAllToAll;
    return is_copied ? 2 * bytes / path.memory : Seconds(0);
  }
  const TransportProfile* outer = path.network != nullptr ? path.network : path.intra;
  SW_CHECK(outer != nullptr && !outer->protocols.empty(), "a ring without a transport");
  // A barrier is an all-reduce of one element.
  const double size = code == OpCode::kBarrier ? 8 : static_cast<double>(bytes.value);
  Seconds best(std::numeric_limits<double>::infinity());
  for (const ProtocolProfile& protocol : outer->protocols) {
    best = std::min(best, TimeOn(LineOf(path, *outer, protocol), code, size, path.ring));
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
