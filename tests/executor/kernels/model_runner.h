#pragma once

// Runs a whole model with the host kernels in one thread, without plan or program: forward,
// backward, fp32. For comparisons with PyTorch.

#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "models/model.h"

namespace shardwright::testing {

struct ModelRun {
  double loss = 0.0;
  std::vector<float> result;                    // the last op's output (the loss, if it is one)
  std::vector<std::vector<float>> param_grads;  // per parameter; empty for tied ones
};

struct ModelInputs {
  std::int64_t batch = 1;
  // Element `i` of parameter `fqn`, and of an input.
  std::function<float(const std::string& fqn, std::int64_t i)> weight;
  std::function<std::int64_t(InputKind kind, std::int64_t i)> index;
  std::function<float(std::int64_t i)> feature;
};

// A model without a loss gets a gradient of ones for its last output.
[[nodiscard]] ModelRun RunModel(const Model& model, const ModelInputs& inputs);

}  // namespace shardwright::testing
