#pragma once

// Kernels and temporaries of one optimizer step, as PyTorch's implementations run it.

#include <cstdint>
#include <vector>

#include "core/units.h"
#include "models/kernel_set.h"
#include "schedule/plan.h"

namespace shardwright {

// Persistent state tensors per parameter: momentum 1, Adam and Adadelta 2.
[[nodiscard]] int StateCount(OptimizerKind kind);

struct OptimizerStep {
  std::vector<Kernel> kernels;
  Bytes temporaries{0};
};

// The update of `elements` sharded elements in `tensors` tensors, the largest of which has
// `largest` elements, with states in `dtype`. Temporaries and passes: fsdp-semantics 3.4 and the
// foreach, fused and single-tensor paths of torch/optim.
[[nodiscard]] OptimizerStep LowerOptimizer(const OptimizerSpec& spec, std::int64_t elements,
                                           std::int64_t tensors, std::int64_t largest, DType dtype);

// The optimizer as it updates offloaded states on the host: our own executor and DeepSpeed do so in
// one pass, PyTorch as the job says.
[[nodiscard]] OptimizerSpec OnHost(OptimizerSpec spec, Dialect dialect);

// Multi-tensor kernels over `bytes_read` and `bytes_written` of `elements` elements in `tensors`
// tensors: as many launches as PyTorch's multi_tensor_apply needs.
[[nodiscard]] std::vector<Kernel> MultiTensorKernels(std::int64_t elements, std::int64_t tensors,
                                                     Bytes read, Bytes written, DType dtype);

}  // namespace shardwright
