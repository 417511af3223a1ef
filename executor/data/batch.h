#pragma once

// Micro-batches: the sampler's choice of the data's samples, written into a model's input tensors.

#include <cstdint>
#include <span>
#include <vector>

#include "executor/data/dataset.h"
#include "executor/data/sampler.h"
#include "executor/model_op.h"
#include "models/model.h"

namespace shardwright {

// The input tensors that the model's ops read, in tensor order: what WriteBatch expects views of.
// Those of a pipeline's stage are what it reads of the data.
[[nodiscard]] std::vector<TensorId> InputTensors(const Model& model);

struct BatchRange {
  std::int64_t step = 0;
  std::int64_t first = 0;  // first place in the step's global batch
  std::int64_t count = 0;  // samples of the micro-batch
  CutPlace cut = {};       // which of their tokens
};

// Fills `views`, one per input tensor: samples one after the other, shared inputs (positions) once.
// Empty places get zeros and the label -100, which no loss counts. May run in several threads.
void WriteBatch(const Model& model, const Dataset& data, const Sampler& sampler,
                const BatchRange& range, std::span<const View> views);

}  // namespace shardwright
