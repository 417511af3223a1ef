#pragma once

// Random jobs and plans over small models of several families, for property tests: every feature
// of every dialect, each combination legal by construction.

#include <random>
#include <string>

#include "models/kernel_set.h"
#include "models/model.h"
#include "schedule/plan.h"
#include "schedule/program.h"

namespace shardwright::testing {

struct RandomCase {
  Model model;
  Job job;
  Plan plan;
  std::string kernel_set;
  std::string description;  // for failure messages
};

// One draw. Models: chain, Llama-, GPT-2- and T5-like, and the MNIST ConvNet.
[[nodiscard]] RandomCase DrawCase(std::mt19937& random);

// One draw for a model as large as real ones: also units of several blocks, in stretches of equal
// and of unequal size, gathers any number of units early, checkpointing of a part of the blocks,
// and many micro-batches.
[[nodiscard]] RandomCase DrawDeepCase(std::mt19937& random, const Model& model);

// Lets Muon or SOAP update the matrices of a ddp case; the executor has neither.
void DrawMatrixRule(std::mt19937& random, RandomCase& c);

// Lower of the case.
[[nodiscard]] Program LowerCase(const RandomCase& c);

}  // namespace shardwright::testing
