#pragma once

// Prices of ops. A price depends on an op's shape only, so it is computed once per shape and read
// once per op. docs/cost_model.md explains every formula.

#include <cstdint>
#include <vector>

#include "core/units.h"
#include "simulator/costs/contention.h"

namespace shardwright {

// The costs of one op when nothing runs beside it.
struct Price {
  SimTime duration;      // on its stream; of a host op: time the host is occupied
  SimTime issue;         // host time to issue all of it (0 for host ops)
  SimTime first_launch;  // host time until its first launch; <= issue
  SimTime tail;          // duration / kernels: the op ends no earlier than issue end + tail
  std::uint8_t contention_class = 0;  // index into ContentionModel::classes

  bool operator==(const Price&) const = default;
};

struct PriceTable {
  std::vector<Price> prices;  // by ShapeId
  SimTime wake_up;  // from the end of what a kHostWait waits for to the host's next action
  // The training loop's own work behind the updates, part of their durations, while which the host
  // has read the loss and the device idles; 0: it reads nothing and runs ahead.
  SimTime loop_work;
  ContentionModel contention;
  bool in_turn = false;  // OverlapProfile::gloo
};

}  // namespace shardwright
