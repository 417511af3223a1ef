#pragma once

// A small network with a loss, and plain-loop kernels for it, so that the runtime can be tested
// apart from the real kernels.

#include <cstdint>
#include <vector>

#include "executor/host/device.h"
#include "executor/model_op.h"
#include "executor/runtime.h"
#include "models/model.h"
#include "schedule/plan.h"

namespace shardwright::testing {

// Linear layers with bias: stem (in the root), `blocks` blocks of one or two, a head (in the root)
// and the mean cross-entropy against labels. Odd sizes, so that every layout needs padding.
// `tied`: all blocks share weight and bias of the first one's first layer. `gelu`: its tanh form
// between the two layers of a block, for which ReferenceKernel has no kernel.
[[nodiscard]] Model TinyNetwork(int blocks, bool tied = false, bool gelu = false);

// The same with `blocks` blocks of a layer norm, a linear layer, a sum with what the block got, an
// RMS norm, two linear layers with GELU between them, and another sum; and a layer norm behind
// them.
[[nodiscard]] Model TinyTransformer(int blocks);

// Forward and backward of kLinear and kCrossEntropy in fp32, bf16 or fp16 memory with fp32 sums in
// a fixed order.
void ReferenceKernel(const ModelOpCall& call, bool is_backward);

// Random normal inputs that depend on the step and the sample alone; the label is the largest one.
void FillTinyBatch(const BatchKey& key, std::span<const View> tensors);

}  // namespace shardwright::testing
