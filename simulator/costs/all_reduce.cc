// All-reduce: what each algorithm and protocol costs, and which one is taken.
//
// Example of a ring, 64 MiB over 8 GPUs at 200 GB/s: each link carries 7/8 x 64 MiB to reduce and
// as much to hand the sums on. These 112 MiB take 587 us. Latency: the launch, two hops for each of
// 7 neighbours, and the turn between both halves.
//
//   ring        2 S (n-1)/n bytes per link; latency grows with the number n of GPUs
//   tree        between nodes: latency grows with log2 of the nodes; 4 nodes have a depth of 2
//   NVLS        the NVSwitch adds: a GPU sends its 64 MiB once and receives the sum once
//   NVLSTree    NVLS in each node, a tree between nodes
//
// Time is that of the fastest way, or of the one that NCCL's own model prefers (nccl_choice.cc).

#include <cmath>
#include <cstdint>
#include <limits>
#include <optional>
#include <string>
#include <vector>

#include "core/ranges.h"
#include "simulator/costs/collectives.h"
#include "simulator/costs/nccl_choice.h"
#include "simulator/internal/protocol_line.h"
#include "topologies/profile.h"

namespace shardwright::internal {
namespace {

double Log2Ceil(std::int64_t n) {
  return n <= 1 ? 0 : std::ceil(std::log2(static_cast<double>(n)));
}

// Bytes that the busiest node of the double binary tree sends per byte of the array. Half of the
// array goes up and down each of the two trees. Of two nodes each is the root of one tree and the
// leaf of the other. Of four and more nodes some node is in the middle of one tree, with a parent
// and two children, and a leaf of the other.
double TreeBytesPerByte(std::int64_t nodes) {
  if (nodes <= 2) {
    return 1;
  }
  return nodes == 3 ? 1.5 : 2;
}

// The rate that all-reduces reach between nodes, in B/s. Gathers may be held up by other things.
double NetworkRate(const CollectivePath& path, const ProtocolProfile& protocol) {
  return path.ring.inter_rate.value *
         ShareWithGain(*path.network, path.network->all_reduce_gain.value) *
         protocol.bandwidth.value;
}

// Ring: base + 2 h + turn and 2 S (n-1)/n / B, of which a half reduces.
Seconds ByRing(const CollectivePath& path, const ProtocolProfile& protocol, double bytes) {
  ProtocolLine line = LineOf(path, protocol);
  if (path.network != nullptr) {
    line.inter_rate = NetworkRate(path, protocol);
  }
  if (path.intra != nullptr && path.intra->efficiency.value > 0) {
    line.intra_rate *= ShareWithGain(*path.intra, path.intra->all_reduce_gain.value) /
                       path.intra->efficiency.value;
  }
  const auto n = static_cast<double>(path.ring.size);
  const Seconds latency =
      line.base + 2.0 * RingHops(line, bytes, path.ring) + protocol.turn_latency.value;
  const double passes = 1 + 1 / line.reduce_share;
  const Seconds transfer(passes * bytes * (n - 1) / n / line.Rate());
  // Of all protocols several chunks are in flight.
  const double overlap = path.network != nullptr ? path.network->overlap.value : 1;
  return Overlapped(latency, transfer, std::max(overlap, protocol.turn_overlap.value));
}

// Of LL and LL128 in a tree, split messages (TransportProfile::split_above): a channel sends its
// part in four. Half of what a ring pays, whose hop stands for two crossings of the network.
Seconds SplitHop(const CollectivePath& path, const ProtocolProfile& protocol, double bytes) {
  const ProtocolLine line = LineOf(path, protocol);
  const double message = bytes / (4 * line.channels) * line.framing;
  return line.split_above > 0 && message > line.split_above ? 0.5 * line.split_hop : Seconds(0);
}

// The costs of a tree over the nodes: hops between nodes, each way, and the time of its busiest
// node.
struct NodeTree {
  double depth = 0;     // hops from the farthest leaf to the root
  Seconds hops;         // latency of going up and down
  double per_byte = 0;  // seconds per byte of the array
  double rate = 0;      // B/s into and out of a node
};

// Requires a network.
NodeTree NodeTreeOf(const CollectivePath& path, const ProtocolProfile& protocol, double bytes) {
  NodeTree tree;
  const std::int64_t nodes = path.ring.placement.node_count;
  tree.rate = NetworkRate(path, protocol);
  const Seconds hop = protocol.tree_latency.value > Seconds(0) ? protocol.tree_latency.value
                                                               : protocol.hop_latency.value;
  tree.depth = Log2Ceil(nodes);
  tree.hops = 2 * tree.depth * (hop + SplitHop(path, protocol, bytes) + path.ring.inter_latency);
  tree.per_byte = TreeBytesPerByte(nodes) / tree.rate;
  return tree;
}

// A launch: the base of the node's own transport, without what a network's rings pay besides.
Seconds TreeBase(const CollectivePath& path, const ProtocolProfile& protocol) {
  if (const ProtocolProfile* inner = FindProtocol(path.intra, protocol.name)) {
    return inner->base_latency.value;
  }
  Seconds least(std::numeric_limits<double>::infinity());
  for (const ProtocolProfile& row : OuterOf(path).protocols) {
    if (row.name != kNvls) {
      least = std::min(least, row.base_latency.value);
    }
  }
  return least;
}

// A tree over two or more nodes with a chain through each.
Seconds ByTree(const CollectivePath& path, const ProtocolProfile& protocol, double bytes) {
  const ProtocolLine line = LineOf(path, protocol);
  const NodeTree tree = NodeTreeOf(path, protocol, bytes);
  const auto g = static_cast<double>(std::max<std::int64_t>(path.ring.placement.ranks_per_node, 1));
  // The channels' chains begin at different GPUs, so that each sends its part of 2 (g-1) hops.
  const double inside = line.intra_rate > 0 ? 1 / line.intra_rate : 0;
  double seconds = bytes * std::max(2 * (g - 1) / g * inside, tree.per_byte);
  if (protocol.name == "Simple") {
    // Until the first chunks have passed all hops, over links that idle; each of the two trees has
    // half of them, and they go up and down.
    const double in_flight =
        std::min(bytes, line.channels * static_cast<double>(path.network->tree_chunk.value.value));
    seconds += in_flight * (2 * (g - 1) * inside + tree.depth / tree.rate);
  }
  return TreeBase(path, protocol) + 2 * (g - 1) * line.intra_hop + tree.hops + Seconds(seconds);
}

// Reduction in the NVSwitches: a GPU's links carry its S bytes to the switch and the sum back, and
// wait for every chunk. That the sum of its own part goes to the switch once more, S/g, is not seen
// in the times of 4, 8 and 72 GPUs. Between nodes a tree over the nodes, of which NCCL runs one per
// GPU of a node; its blocks add and send what comes from there as well.
std::optional<Seconds> ByNvls(const CollectivePath& path, double bytes) {
  const RingPath& ring = path.ring;
  const ProtocolProfile* nvls = FindProtocol(path.intra, kNvls);
  const std::int64_t on_node = ring.placement.ranks_per_node;
  if (nvls == nullptr || on_node < 2 || !path.has_nvswitch) {
    return std::nullopt;
  }
  const double rate = ring.intra_rate.value * path.intra->efficiency.value * nvls->bandwidth.value;
  const NvlsChunks chunks = NvlsChunksOf(path.nccl, bytes);
  const double waits = static_cast<double>(nvls->chunk_overhead.value.value) / chunks.chunk;
  double in_switch = bytes / rate;
  if (ring.inter_hops > 0) {
    in_switch /= nvls->reduce_bandwidth.value;
  }
  double transfer = in_switch * (1 + waits);
  double to_fill = in_switch;
  Seconds latency = nvls->base_latency.value + nvls->hop_latency.value;
  if (ring.inter_hops > 0) {
    const ProtocolProfile* simple = FindProtocol(path.network, "Simple");
    if (simple == nullptr) {
      return std::nullopt;
    }
    const NodeTree tree = NodeTreeOf(path, *simple, bytes);
    transfer = std::max(transfer, bytes * tree.per_byte);
    to_fill = transfer;
    latency += tree.hops;
  }
  const double share = bytes > 0 ? std::min(1.0, chunks.round / bytes) : 0;
  return latency + Seconds(transfer + nvls->fill.value * share * to_fill);
}

constexpr Seconds kForEver(std::numeric_limits<double>::infinity());

// Of the ways that are considered the fastest, and the one that NCCL believes to be it.
struct Choice {
  Seconds best = kForEver;
  Seconds least_estimate = kForEver;
  Seconds believed = kForEver;

  void Consider(Seconds time, std::optional<Seconds> estimate) {
    best = std::min(best, time);
    if (estimate && *estimate < least_estimate) {
      least_estimate = *estimate;
      believed = time;
    }
  }
};

bool MayUse(const TransportProfile& outer, std::string_view protocol) {
  const std::vector<std::string>& names = outer.all_reduce_protocols;
  return names.empty() || IsIn(names, protocol);
}

Choice ChoiceOf(const CollectivePath& path, double bytes) {
  const TransportProfile& outer = OuterOf(path);
  Choice choice;
  for (const ProtocolProfile& protocol : outer.protocols) {
    if (protocol.name == kNvls || !MayUse(outer, protocol.name)) {
      continue;
    }
    const auto estimate = [&](NcclAlgorithm algorithm) {
      return NcclAllReduceEstimate(path.nccl, algorithm, protocol.name, bytes);
    };
    choice.Consider(ByRing(path, protocol, bytes), estimate(NcclAlgorithm::kRing));
    // Inside a node a tree is a chain and never the better.
    if (path.network != nullptr) {
      choice.Consider(ByTree(path, protocol, bytes), estimate(NcclAlgorithm::kTree));
    }
  }
  if (MayUse(outer, kNvls)) {
    if (const std::optional<Seconds> nvls = ByNvls(path, bytes)) {
      const NcclAlgorithm algorithm =
          path.network != nullptr ? NcclAlgorithm::kNvlsTree : NcclAlgorithm::kNvls;
      choice.Consider(*nvls, NcclAllReduceEstimate(path.nccl, algorithm, "Simple", bytes));
    }
  }
  return choice;
}

}  // namespace

Seconds AllReduceTime(const CollectivePath& path, double bytes) {
  const TransportProfile& outer = OuterOf(path);
  const bool is_nccl = outer.all_reduce_choice.value_or(outer.choice) == CollectiveChoice::kNccl;
  const Choice choice = ChoiceOf(path, bytes);
  return is_nccl && choice.believed < kForEver ? choice.believed : choice.best;
}

}  // namespace shardwright::internal
