#pragma once

// The costs of a protocol on a path, for the collectives of simulator/costs/collectives.cc and the
// all-reduces of all_reduce.cc.

#include <string_view>

#include "core/units.h"
#include "simulator/costs/collectives.h"
#include "topologies/profile.h"
#include "topologies/routing.h"

namespace shardwright::internal {

// One protocol on a path: what a message pays once, per hop and per byte of bus traffic.
struct ProtocolLine {
  Seconds base;
  Seconds intra_hop;
  Seconds inter_hop;
  double intra_rate = 0;  // that software reaches inside a node and between nodes, in B/s; 0: no
  double inter_rate = 0;  // such hops
  double overlap = 1;     // exponent q of TransportProfile::overlap
  double inter_hops = 0;  // between nodes in going round once, as its latency counts them
  Seconds split_hop;      // more per hop between nodes for messages above split_above
  double split_above = 0;
  double channels = 1;
  double framing = 1;  // bytes sent per byte of data
  double reduce_share = 1;

  // Of the ring: its slowest hop's.
  [[nodiscard]] double Rate() const;
};

inline constexpr std::string_view kNvls = "NVLS";

// The row of this name; null without one or without a transport.
[[nodiscard]] const ProtocolProfile* FindProtocol(const TransportProfile* transport,
                                                  std::string_view name);
// The network where there is one.
[[nodiscard]] const TransportProfile& OuterOf(const CollectivePath& path);
[[nodiscard]] ProtocolLine LineOf(const CollectivePath& path, const ProtocolProfile& protocol);
// Part of the raw rate that is `gain` times what gathers reach: all of it at most, if they do not
// reach more.
[[nodiscard]] double ShareWithGain(const TransportProfile& transport, double gain);
// Latency of going round the ring once with `bytes` in the full array.
[[nodiscard]] Seconds RingHops(const ProtocolLine& line, double bytes, const RingPath& ring);
// Latency L of which a part hides behind the transfer X: (L^q + X^q)^(1/q).
[[nodiscard]] Seconds Overlapped(Seconds latency, Seconds transfer, double q);

// Of an all-reduce of `bytes` among two or more ranks, by the algorithm and protocol that the
// library takes.
[[nodiscard]] Seconds AllReduceTime(const CollectivePath& path, double bytes);

}  // namespace shardwright::internal
