#pragma once

// Random programs with prices, for comparing engines. They follow the rules of
// docs/execution_model.md but stand for no real training.

#include <cstdint>
#include <random>

#include "schedule/program.h"
#include "simulator/costs/price.h"

namespace shardwright {

struct RandomProgram {
  Program program;
  PriceTable prices;
};

struct RandomProgramOptions {
  int layers = 4;           // most layers in forward and in backward; at least 1
  int micro_batches = 2;    // most micro-batches; at least 1
  int ops_per_layer = 6;    // most ops of one layer; at least 1
  bool contention = false;  // gives the ops random contention classes
  int kinds = 1;            // kinds of layers, in stretches of any length; at least 1
};

// Micro-batches of layers: forward, then backward with edges into forward; in half of the programs
// also host waits, carried edges, a warm-up body and an init body. Equal seeds give equal programs.
[[nodiscard]] RandomProgram MakeRandomProgram(std::uint64_t seed,
                                              const RandomProgramOptions& options);

}  // namespace shardwright
