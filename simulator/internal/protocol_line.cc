// Latency and rate of one NCCL protocol on one path, from the profile's fractions and the links'
// rates.
//
// Example: links of 300 GB/s of which Simple reaches 80 %: 240 GB/s. LL sends a flag of 4 bytes
// with every 4 bytes, so its framing is 2. A latency of 30 us beside a transfer of 40 us with
// overlap q = 2 takes sqrt(30^2 + 40^2) = 50 us; with q = 1 nothing overlaps and it takes 70 us.

#include "simulator/internal/protocol_line.h"

#include <algorithm>
#include <cmath>
#include <cstdint>

#include "core/error.h"

namespace shardwright::internal {

double ProtocolLine::Rate() const {
  return intra_rate > 0 && inter_rate > 0 ? std::min(intra_rate, inter_rate)
                                          : std::max(intra_rate, inter_rate);
}

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
namespace {

// The chunk that comes last goes over n-1 edges of the ring, of which N are between nodes, or all
// if every rank is a node. LL's and LL128's latencies were found on two nodes of several ranks
// each, as one for their two crossings; Simple's from the slope over N - 1.
double InterHops(const RingPath& ring, bool is_simple) {
  const auto nodes = static_cast<double>(ring.placement.node_count);
  if (is_simple || ring.inter_hops == 0) {
    return static_cast<double>(ring.inter_hops);
  }
  return std::min(nodes, static_cast<double>(ring.size - 1)) / 2;
}

}  // namespace

ProtocolLine LineOf(const CollectivePath& path, const ProtocolProfile& protocol) {
  const TransportProfile& outer = OuterOf(path);
  ProtocolLine line;
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
  line.inter_hops = InterHops(path.ring, protocol.name == "Simple");
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

Seconds Overlapped(Seconds latency, Seconds transfer, double q) {
  if (q <= 1 || latency.value <= 0 || transfer.value <= 0) {
    return latency + transfer;
  }
  // In terms of the larger, so that nothing overflows.
  const double larger = std::max(latency.value, transfer.value);
  const double ratio = std::min(latency.value, transfer.value) / larger;
  return Seconds(larger * std::pow(1 + std::pow(ratio, q), 1 / q));
}

double ShareWithGain(const TransportProfile& transport, double gain) {
  const double gathers = transport.efficiency.value;
  return std::min(gathers * gain, std::max(1.0, gathers));
}

Seconds RingHops(const ProtocolLine& line, double bytes, const RingPath& ring) {
  const double message = bytes / (static_cast<double>(ring.size) * line.channels) * line.framing;
  const bool is_split = line.split_above > 0 && message > line.split_above;
  const Seconds inter_hop = is_split ? line.inter_hop + line.split_hop : line.inter_hop;
  return line.intra_hop * static_cast<double>(ring.intra_hops) + inter_hop * line.inter_hops;
}

}  // namespace shardwright::internal
