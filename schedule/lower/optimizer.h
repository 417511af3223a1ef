#pragma once

// Kernels and temporaries of one optimizer step, as PyTorch's implementations run it.

#include <cstdint>
#include <optional>
#include <string_view>
#include <vector>

#include "core/units.h"
#include "models/kernel_set.h"
#include "schedule/plan.h"

namespace shardwright {

// Persistent state tensors per parameter: momentum 1, Adam and Adadelta 2.
[[nodiscard]] int StateCount(OptimizerKind kind);

// Bytes of one state of a tensor of `elements` elements whose parameter has `dtype`. Small tensors,
// and those of embeddings under bitsandbytes (the Trainer says so), keep whole numbers; sources are
// beside the table. One state is codes and scales, which are two tensors.
struct StateSize {
  Bytes codes{0};
  Bytes scales{0};
};
[[nodiscard]] StateSize SizeOfState(StateFormat format, std::int64_t elements, bool is_embedding,
                                    DType dtype);

// Pages leave the device when others need the room.
[[nodiscard]] bool IsPaged(StateFormat format);
// Adafactor's state of a parameter: one element per row and one per column of a matrix, in two
// tensors, and one per element where it is no matrix.
[[nodiscard]] std::vector<std::int64_t> FactoredState(const std::vector<std::int64_t>& shape);

// An optimizer that people name by a word: "adamw_8bit", "paged_adamw_32bit", "adamw_torch_fused",
// as Transformers' `optim` has them. Null for other words. The last function is the way back; empty
// where no word says the optimizer.
[[nodiscard]] std::optional<OptimizerSpec> OptimizerNamed(std::string_view word);
[[nodiscard]] std::vector<std::string_view> OptimizerWords();
[[nodiscard]] std::string_view WordOf(const OptimizerSpec& spec);

// Adam and AdamW by PyTorch's one kernel (fused=True) in place of its loop over lists, which holds
// a second copy of the parameters that it updates. Other optimizers stay.
[[nodiscard]] OptimizerSpec FusedFormOf(OptimizerSpec spec);

struct OptimizerStep {
  std::vector<Kernel> kernels;
  Bytes temporaries{0};
};

// The update of `elements` sharded elements in `tensors` tensors, the largest of which has
// `largest` elements, with states in `dtype`. Temporaries and passes: fsdp-semantics 3.4 and the
// foreach, fused and single-tensor paths of torch/optim.
[[nodiscard]] OptimizerStep LowerOptimizer(const OptimizerSpec& spec, std::int64_t elements,
                                           std::int64_t tensors, std::int64_t largest, DType dtype);

// The update with packed states of `states` bytes in all: a kernel per tensor, without temporaries.
[[nodiscard]] OptimizerStep LowerPackedUpdate(std::int64_t elements, std::int64_t tensors,
                                              Bytes states, DType dtype);

// The optimizer as it updates offloaded states on the host: our own executor and DeepSpeed do so in
// one pass, PyTorch as the job says.
[[nodiscard]] OptimizerSpec OnHost(OptimizerSpec spec, Dialect dialect);

// Multi-tensor kernels over `bytes_read` and `bytes_written` of `elements` elements in `tensors`
// tensors: as many launches as PyTorch's multi_tensor_apply needs.
[[nodiscard]] std::vector<Kernel> MultiTensorKernels(std::int64_t elements, std::int64_t tensors,
                                                     Bytes read, Bytes written, DType dtype);

}  // namespace shardwright
