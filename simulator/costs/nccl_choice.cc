// NCCL's cost model, with the constants of its source, to learn which protocol it takes.
//
// Example: all-gather over 8 H100 in one node, 450 GB/s per direction, in microseconds.
//
//   bytes      LL       LL128    Simple    taken
//   1 MiB      17.3     30.1     34.7      LL
//   16 MiB     114.9    71.6     73.0      LL128
//   256 MiB    1,677    736      685       Simple
//
// LL at 1 MiB: 6.6 + 7 x 0.6 us of latency, and 7/8 MiB at 141 GB/s (its cap for Hopper). The
// numbers are NCCL's belief, not the truth: the time of the chosen protocol comes from the profile.

#include "simulator/costs/nccl_choice.h"

#include <array>
#include <cmath>
#include <cstddef>

#include "core/ranges.h"

namespace shardwright {
namespace {

// Constants of one protocol, in microseconds.
struct Latency {
  std::string_view protocol;
  double base;
  double nvlink_hop;
  double net_hop;
  double posts;  // network messages per step that the host posts
};
constexpr std::array<Latency, 3> kRingLatencies = {
    Latency{"LL", 6.6, 0.6, 2.7, 1},
    Latency{"LL128", 14.0, 1.9, 4.0, 1},
    Latency{"Simple", 8.4, 3.4, 14.0, 3},
};
constexpr std::array<Latency, 3> kTreeLatencies = {
    Latency{"LL", 6.8, 0.6, 5.0, 0},
    Latency{"LL128", 14.0, 1.25, 8.5, 0},
    Latency{"Simple", 8.4, 4.0, 14.0, 0},
};

// Factors on a tree's rate, from 64 bytes up, doubling.
struct TreeCorrection {
  std::string_view protocol;
  std::array<double, 23> factors;
};
constexpr std::array<TreeCorrection, 3> kTreeCorrections = {
    TreeCorrection{
        "LL", {1, 1, 1, 1, .9, .8, .7, .7, .7, .7, .6, .5, .4, .4, .5, .6, .7, .8, .9, 1, 1, 1, 1}},
    TreeCorrection{"LL128", {1,  1,  1,  1,  1,  .9, .8, .8, .8, .7, .6, .6,
                             .6, .6, .6, .6, .8, .9, .9, .9, .9, 1,  1}},
    TreeCorrection{"Simple", {.9, .9, .9, .9, .9, .9, .9, .8, .7, .6, .6, .5,
                              .5, .5, .5, .6, .7, .8, .7, .7, .8, .9, .9}},
};

// Bandwidth caps of one GPU generation, in GB/s, for 1, 2 and more nodes.
using Cap = std::array<double, 3>;
struct Caps {
  std::string_view architecture;
  Cap ll;  // of all channels together; the others of one channel
  Cap ring_ll128;
  Cap tree_ll128;
  Cap tree;
  Cap nvls_tree;
  double nvlink_channels;     // that the ring search finds inside a node
  double nvls_channels;       // thread blocks of NVLS; 0: there is none
  double nvls_tree_channels;  // over several nodes
  double nvls_share;          // of the links that NVLS is taken to reach
  double all_reduce_ll;       // part of the bus that LL is taken to reach
};
constexpr Cap kVoltaTree = {26.5, 18.5, 10};
constexpr Cap kAmpereTree = {24, 23.6, 17.8};
constexpr Cap kHopperTree = {38.7, 41.4, 36};
constexpr Cap kBlackwellTree = {70, 42.8, 24};
constexpr Cap kTwenty = {20, 20, 20};
constexpr Cap kAmpereLl = {87.7, 22.5, 19};
constexpr Cap kHopperLl = {141, 45, 35};
constexpr Cap kHopperRing = {36.7, 36.7, 36.7};
constexpr Cap kHopperLl128 = {36.7, 36.7, 29};
constexpr Cap kBlackwellLl = {282, 90, 70};
constexpr Cap kBlackwellRing = {73.4, 34.6, 73.4};
constexpr Cap kBlackwellLl128 = {55.6, 31.67, 20};
constexpr Cap kNoSuchTree = {0, 0, 0};
constexpr std::array<Caps, 6> kCaps = {
    Caps{"volta", {{39, 39, 20.4}}, kTwenty, kTwenty, kVoltaTree, kNoSuchTree, 6, 0, 0, 0, 0.25},
    Caps{"ampere", kAmpereLl, kTwenty, kTwenty, kAmpereTree, kNoSuchTree, 12, 0, 0, 0, 0.25},
    Caps{"ada", kAmpereLl, kTwenty, kTwenty, kAmpereTree, kNoSuchTree, 12, 0, 0, 0, 0.5},
    Caps{"hopper",
         kHopperLl,
         kHopperRing,
         kHopperLl128,
         kHopperTree,
         {{0, 57.7, 45.5}},
         12,
         16,
         16,
         0.85,
         0.5},
    Caps{"blackwell",
         kBlackwellLl,
         kBlackwellRing,
         kBlackwellLl128,
         kBlackwellTree,
         {{0, 96, 43.8}},
         8,
         24,
         32,
         0.74,
         0.5},
    Caps{"blackwell-rtx", kBlackwellLl, kBlackwellRing, kBlackwellLl128, kBlackwellTree,
         kNoSuchTree, 8, 0, 0, 0, 0.5},
};

template <class Rows, class Key>
const auto* FindRow(const Rows& rows, Key key, std::string_view name) {
  const auto* const row = FindIf(rows, [&](const auto& r) { return r.*key == name; });
  return row == rows.end() ? nullptr : row;
}

const Caps* FindCaps(std::string_view architecture) {
  return FindRow(kCaps, &Caps::architecture, architecture);
}

// Parts of the raw rates that NCCL's channel search reaches. NVLink counts 20 of 25 GB/s per link.
// Of a network adapter the next lower speed of a list is taken (48 of 50, 24 of 25 GB/s).
constexpr double kNvlinkShare = 0.8;
constexpr double kNicShare = 0.96;
// LL128 carries 120 of 128 bytes and is taken to lose a little more.
constexpr double kLl128Share = 0.92;

// The numbers that all estimates of one group begin with.
struct Search {
  const Caps* caps = nullptr;
  double n = 0;
  double nodes = 0;
  std::size_t scale = 0;  // index into a Cap
  double inside = 0;      // GB/s of all channels; 0: no such hops
  double network = 0;
  double channels = 0;
  double ll = 0;  // cap of LL: between nodes it follows the host's processor, not the GPU

  [[nodiscard]] bool HasNetwork() const { return nodes > 1; }
  [[nodiscard]] double Bus() const {
    return inside > 0 && network > 0 ? std::min(inside, network) : std::max(inside, network);
  }
};

std::optional<Search> SearchOf(const NcclPlace& place) {
  Search search;
  search.caps = FindCaps(place.architecture);
  if (search.caps == nullptr) {
    return std::nullopt;
  }
  search.n = static_cast<double>(place.rank_count);
  search.nodes = static_cast<double>(place.node_count);
  search.scale = static_cast<std::size_t>(std::min<std::int64_t>(place.node_count, 3) - 1);
  search.inside = 1e-9 * kNvlinkShare * place.intra_rate.value;
  search.channels = search.caps->nvlink_channels;
  const Caps* of_ll = search.caps;
  if (search.HasNetwork()) {
    search.network = 1e-9 * kNicShare * place.inter_rate.value;
    search.channels = place.nic_channels;
    of_ll = FindCaps(place.is_amd_host ? "ampere" : "volta");
  }
  search.ll = of_ll->ll[search.scale];
  return search;
}

// Microseconds per network message that the host posts, of Intel's and of AMD's.
double PostTime(const NcclPlace& place) {
  return place.is_amd_host ? 2 : 1;
}

double RingRate(const Search& search, std::string_view protocol, double ll_share) {
  const double bus = search.Bus();
  if (protocol == "LL") {
    return std::min(search.ll, bus * ll_share);
  }
  if (protocol == "LL128") {
    return std::min(kLl128Share * bus, search.channels * search.caps->ring_ll128[search.scale]);
  }
  return bus;
}

std::optional<Seconds> RingAllReduce(const Search& search, const NcclPlace& place,
                                     std::string_view protocol, double bytes) {
  const Latency* latency = FindRow(kRingLatencies, &Latency::protocol, protocol);
  if (latency == nullptr) {
    return std::nullopt;
  }
  const double between = search.HasNetwork() ? 2 * (search.nodes - 1) : 0;
  const double inside = 2 * (search.n - 1) - between;
  const double post = search.HasNetwork() ? PostTime(place) * latency->posts : 0;
  double micros = latency->base + inside * std::max(latency->nvlink_hop, post) +
                  between * (latency->net_hop + 1e6 * place.reported_latency.value);
  constexpr double kManyBytes = 64;
  if (protocol == "Simple" && search.HasNetwork() &&
      bytes >= kManyBytes * search.channels * search.n) {
    micros *= 1.4;
  }
  const double rate = RingRate(search, protocol, search.caps->all_reduce_ll);
  return Seconds(1e-6 * micros + 2 * bytes * (search.n - 1) / search.n / (rate * 1e9));
}

double Correction(std::string_view protocol, double bytes) {
  const TreeCorrection* row = FindRow(kTreeCorrections, &TreeCorrection::protocol, protocol);
  const double doublings = std::floor(std::log2(std::max(1.0, bytes / 64)));
  const auto index = static_cast<std::size_t>(doublings);
  return index < row->factors.size() ? row->factors[index] : 1;
}

std::optional<Seconds> TreeAllReduce(const Search& search, const NcclPlace& place,
                                     std::string_view protocol, double bytes) {
  const Latency* latency = FindRow(kTreeLatencies, &Latency::protocol, protocol);
  if (latency == nullptr) {
    return std::nullopt;
  }
  const double on_node = search.n / search.nodes;
  double bus = search.Bus();
  if (search.nodes == 2 && on_node > 1) {
    bus = std::min(search.inside, 2 * search.network);
  }
  bus = std::min(kLl128Share * bus, search.channels * search.caps->tree[search.scale]);
  if (protocol == "LL") {
    bus = std::min(bus / 3.8, search.ll);
  } else if (protocol == "LL128") {
    bus = std::min(bus * (search.HasNetwork() ? 120.0 / 128 : 7.0 / 9),
                   search.channels * search.caps->tree_ll128[search.scale]);
  }
  const double depth = search.HasNetwork() ? std::log2(search.nodes) : 0;
  const double micros =
      latency->base + 2 * ((on_node - 1) * latency->nvlink_hop +
                           depth * (latency->net_hop + 1e6 * place.reported_latency.value));
  return Seconds(1e-6 * micros + 2 * bytes / (bus * Correction(protocol, bytes) * 1e9));
}

std::optional<Seconds> NvlsAllReduce(const Search& search, const NcclPlace& place,
                                     NcclAlgorithm algorithm, double bytes) {
  const bool is_tree = algorithm == NcclAlgorithm::kNvlsTree;
  if (search.caps->nvls_channels == 0 || is_tree != search.HasNetwork() ||
      search.n == search.nodes) {
    return std::nullopt;
  }
  // Heads of the search, of which one is lost, and both directions of a link.
  constexpr double kHeads = 8;
  constexpr double kBase = 25;
  const double inside =
      2 * search.inside * search.caps->nvls_share * (kHeads - 1) / kHeads;  // of all channels
  if (!is_tree) {
    return Seconds(1e-6 * kBase + 2 * bytes * (search.n - 1) / search.n / (inside * 1e9));
  }
  double rate =
      std::min(inside / kHeads, search.network / search.channels * (search.nodes == 2 ? 2 : 1));
  rate = std::min(rate, search.caps->nvls_tree[search.scale]) * search.channels;
  if (place.architecture == "blackwell") {
    rate *= Correction("Simple", bytes);
  }
  constexpr double kNetHop = 20.9;
  const double hops = 2 * std::log2(search.nodes);
  return Seconds(1e-6 * (kBase + hops * (kNetHop + 1e6 * place.reported_latency.value)) +
                 2 * bytes / (rate * 1e9));
}

}  // namespace

std::optional<Seconds> NcclRingEstimate(const NcclPlace& place, std::string_view protocol,
                                        double bytes) {
  const std::optional<Search> search = SearchOf(place);
  const Latency* latency = FindRow(kRingLatencies, &Latency::protocol, protocol);
  if (!search || latency == nullptr) {
    return std::nullopt;
  }
  const double post = search->HasNetwork() ? PostTime(place) * latency->posts : 0;
  const double hops = (search->n - search->nodes) * std::max(latency->nvlink_hop, post) +
                      (search->nodes - 1) * latency->net_hop;
  constexpr double kLlShare = 0.5;
  const double rate = RingRate(*search, protocol, kLlShare);
  return Seconds(1e-6 * (latency->base + hops) +
                 bytes * (search->n - 1) / search->n / (rate * 1e9));
}

std::optional<Seconds> NcclAllReduceEstimate(const NcclPlace& place, NcclAlgorithm algorithm,
                                             std::string_view protocol, double bytes) {
  const std::optional<Search> search = SearchOf(place);
  if (!search) {
    return std::nullopt;
  }
  switch (algorithm) {
    case NcclAlgorithm::kRing:
      return RingAllReduce(*search, place, protocol, bytes);
    case NcclAlgorithm::kTree:
      return TreeAllReduce(*search, place, protocol, bytes);
    case NcclAlgorithm::kNvls:
    case NcclAlgorithm::kNvlsTree:
      break;
  }
  return NvlsAllReduce(*search, place, algorithm, bytes);
}

NvlsChunks NvlsChunksOf(const NcclPlace& place, double bytes) {
  constexpr double kKib = 1024;
  const Caps* caps = FindCaps(place.architecture);
  const bool is_tree = place.node_count > 1;
  double blocks = 0;
  if (caps != nullptr) {
    blocks = is_tree ? caps->nvls_tree_channels : caps->nvls_channels;
  }
  // Every block works for every GPU of the node in turn.
  const double at_once =
      blocks * static_cast<double>(place.rank_count) / static_cast<double>(place.node_count);
  double chunk = place.node_count >= 4 ? 64 * kKib : 128 * kKib;
  const auto shrink = [&](double rounds, double smaller) {
    if (bytes < rounds * at_once * chunk && chunk > smaller) {
      chunk = smaller;
    }
  };
  if (is_tree) {
    shrink(4, 64 * kKib);
    shrink(1, 32 * kKib);
  } else {
    shrink(64, 64 * kKib);
    shrink(8, 32 * kKib);
    shrink(2, 16 * kKib);
  }
  return {chunk, at_once * chunk};
}

}  // namespace shardwright
