#include "simulator/costs/nccl_choice.h"

#include <algorithm>
#include <array>
#include <cstddef>
#include <utility>

namespace shardwright {
namespace {

// Ring constants of one protocol, in microseconds.
struct RingLatency {
  std::string_view protocol;
  double base;
  double nvlink_hop;
  double net_hop;
  double posts;  // network messages per step that the host posts
};
constexpr std::array<RingLatency, 3> kLatencies = {
    RingLatency{"LL", 6.6, 0.6, 2.7, 1},
    RingLatency{"LL128", 14.0, 1.9, 4.0, 1},
    RingLatency{"Simple", 8.4, 3.4, 14.0, 3},
};

// Bandwidth caps of one GPU generation, in GB/s, for 1, 2 and more nodes.
struct RingCaps {
  std::string_view architecture;
  std::array<double, 3> ll;                 // all channels together
  std::array<double, 3> ll128_per_channel;  // one channel
  double nvlink_channels;                   // that the ring search finds inside a node
  double nvls_channels;                     // thread blocks of NVLS; 0: there is none
};
constexpr std::array<RingCaps, 6> kCaps = {
    RingCaps{"volta", {39, 39, 20.4}, {20, 20, 20}, 6, 0},
    RingCaps{"ampere", {87.7, 22.5, 19}, {20, 20, 20}, 12, 0},
    RingCaps{"ada", {87.7, 22.5, 19}, {20, 20, 20}, 12, 0},
    RingCaps{"hopper", {141, 45, 35}, {36.7, 36.7, 36.7}, 12, 16},
    RingCaps{"blackwell", {282, 90, 70}, {73.4, 34.6, 73.4}, 8, 24},
    RingCaps{"blackwell-rtx", {282, 90, 70}, {73.4, 34.6, 73.4}, 8, 0},
};

const RingCaps* FindCaps(std::string_view architecture) {
  const auto* const caps = std::find_if(kCaps.begin(), kCaps.end(), [&](const RingCaps& row) {
    return row.architecture == architecture;
  });
  return caps == kCaps.end() ? nullptr : caps;
}

// Parts of the raw rates that NCCL's channel search reaches: NVLink counts 20 of 25 GB/s per link,
// and of a network adapter the next lower speed of a list is taken (48 of 50, 24 of 25 GB/s).
constexpr double kNvlinkShare = 0.8;
constexpr double kNicShare = 0.96;
// LL128 carries 120 of 128 bytes and is taken to lose a little more.
constexpr double kLl128Share = 0.92;

}  // namespace

std::optional<Seconds> NcclRingEstimate(const NcclPlace& place, std::string_view protocol,
                                        double bytes) {
  const RingCaps* caps = FindCaps(place.architecture);
  const auto* const latency =
      std::find_if(kLatencies.begin(), kLatencies.end(),
                   [&](const RingLatency& row) { return row.protocol == protocol; });
  if (caps == nullptr || latency == kLatencies.end()) {
    return std::nullopt;
  }
  const auto n = static_cast<double>(place.rank_count);
  const auto nodes = static_cast<double>(place.node_count);
  const bool has_network = place.node_count > 1;
  const auto scale = static_cast<std::size_t>(std::min<std::int64_t>(place.node_count, 3) - 1);

  // The host posts messages to the network in 1 us (Intel) or 2 us (AMD).
  const double post = has_network ? (place.is_amd_host ? 2.0 : 1.0) * latency->posts : 0;
  const double hops =
      (n - nodes) * std::max(latency->nvlink_hop, post) + (nodes - 1) * latency->net_hop;

  double bus = 1e-9 * kNvlinkShare * place.intra_rate.value;  // GB/s
  double channels = caps->nvlink_channels;
  if (has_network) {
    const double network = 1e-9 * kNicShare * place.inter_rate.value;
    bus = bus > 0 ? std::min(bus, network) : network;
    channels = place.nic_channels;
  }
  double rate = bus;
  if (protocol == "LL") {
    // Between nodes the cap follows the host's processor, not the GPU.
    const RingCaps* row = has_network ? FindCaps(place.is_amd_host ? "ampere" : "volta") : caps;
    rate = std::min(row->ll[scale], bus / 2);
  } else if (protocol == "LL128") {
    rate = std::min(kLl128Share * bus, channels * caps->ll128_per_channel[scale]);
  }
  return Seconds(1e-6 * (latency->base + hops) + bytes * (n - 1) / n / (rate * 1e9));
}

double NvlsChunk(const NcclPlace& place, double bytes) {
  constexpr double kKib = 1024;
  const RingCaps* caps = FindCaps(place.architecture);
  const double blocks = caps != nullptr ? caps->nvls_channels : 0;
  // Every block works for every GPU of the node in turn.
  const double at_once =
      blocks * static_cast<double>(place.rank_count) / static_cast<double>(place.node_count);
  double chunk = 128 * kKib;
  for (const auto& [rounds, smaller] :
       {std::pair{64.0, 64 * kKib}, {8.0, 32 * kKib}, {2.0, 16 * kKib}}) {
    if (bytes < rounds * at_once * chunk) {
      chunk = smaller;
    }
  }
  return chunk;
}

}  // namespace shardwright
