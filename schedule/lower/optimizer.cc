// Kernels, temporaries and state sizes of optimizer updates, as PyTorch runs them. The three
// implementations move very different amounts of memory for the same result.
//
// Example: AdamW with weight decay on 262,144 fp32 elements (1 MiB) in 4 equal tensors.
//
//   implementation  kernels  bytes read  bytes written  temporaries
//   foreach               8      12 MiB          8 MiB  1 MiB, one tensor per parameter
//   for_loop             32      12 MiB          8 MiB  0.25 MiB, of the largest tensor
//   fused                 1       4 MiB          3 MiB  none
//
// The fused kernel reads parameter, gradient and both moments once and writes all but the gradient.
// The foreach path makes one pass over memory per line of the Python source. The pricer turns bytes
// into time, so a wrong pass shows up as a wrong duration of the update, and a wrong temporary as a
// wrong peak at the end of the step.

#include "schedule/lower/optimizer.h"

#include <array>

#include "core/ranges.h"
#include "schedule/dialect_facts.h"

namespace shardwright {
namespace {

// One element-wise pass over all parameters: tensors read and written.
struct ElementPass {
  int read = 0;
  int written = 0;
};

// How one optimizer kind updates: its states, the passes of its foreach and for_loop paths, the
// live temporaries in parameter-sized tensors, and its single fused pass.
struct Recipe {
  int states = 0;
  std::vector<ElementPass> foreach_passes;
  int foreach_temporaries = 0;  // parameter-sized
  ElementPass fused;
};

// Transformers 5.23, optimization.py (Adafactor.step) of a matrix; the states are a row and a
// column.
constexpr std::array<ElementPass, 12> kAdafactorPasses = {{
    {1, 0},  // rms of the parameter
    {1, 1},  // grad ** 2
    {1, 1},  // + eps
    {1, 0},  // its mean over columns
    {1, 0},  // over rows
    {0, 1},  // update = row * column
    {2, 1},  // update *= grad
    {1, 0},  // its rms
    {1, 1},  // update /= that
    {1, 1},  // update *= lr
    {1, 1},  // -update
    {2, 1},  // param += that
}};

Recipe AdadeltaRecipe(bool decay) {
  Recipe r;
  r.states = 2;
  if (decay) {
    r.foreach_passes.push_back({2, 1});
  }
  r.foreach_passes.push_back({1, 1});  // square_avg *= rho
  r.foreach_passes.push_back({2, 1});  // square_avg += (1 - rho) grad^2
  r.foreach_passes.push_back({1, 1});  // std = square_avg + eps
  r.foreach_passes.push_back({1, 1});  // std = sqrt(std)
  r.foreach_passes.push_back({1, 1});  // delta = acc_delta + eps
  r.foreach_passes.push_back({1, 1});  // delta = sqrt(delta)
  r.foreach_passes.push_back({2, 1});  // delta /= std
  r.foreach_passes.push_back({2, 1});  // delta *= grad
  r.foreach_passes.push_back({1, 1});  // acc_delta *= rho
  r.foreach_passes.push_back({2, 1});  // acc_delta += (1 - rho) delta^2
  r.foreach_passes.push_back({2, 1});  // param -= lr * delta
  r.foreach_temporaries = decay ? 3 : 2;
  r.fused = {4, 3};
  return r;
}

// Passes of the foreach paths of torch/optim/{sgd,adam,adamw,adadelta}.py, in order; the fused
// kernels read and write each tensor once.
Recipe RecipeOf(const OptimizerSpec& spec) {
  const bool decay = spec.weight_decay;
  Recipe r;
  switch (spec.kind) {
    case OptimizerKind::kSgd:
      if (decay) {
        r.foreach_passes.push_back({2, 1});  // grad + wd * param, out of place
      }
      r.foreach_passes.push_back({2, 1});  // param -= lr * grad
      r.foreach_temporaries = decay ? 1 : 0;
      r.fused = {2, 1};
      break;
    case OptimizerKind::kMomentum:
      r.states = 1;
      if (decay) {
        r.foreach_passes.push_back({2, 1});
      }
      r.foreach_passes.push_back({1, 1});  // buf *= momentum
      r.foreach_passes.push_back({2, 1});  // buf += grad
      r.foreach_passes.push_back({2, 1});  // param -= lr * buf
      r.foreach_temporaries = decay ? 1 : 0;
      r.fused = {3, 2};
      break;
    case OptimizerKind::kAdam:
    case OptimizerKind::kAdamW:
      r.states = 2;
      r.foreach_temporaries = 1;
      if (decay && spec.kind == OptimizerKind::kAdam) {
        r.foreach_passes.push_back({2, 1});  // grad + wd * param, out of place
        r.foreach_temporaries = 2;
      } else if (decay) {
        r.foreach_passes.push_back({1, 1});  // param *= 1 - lr * wd
      }
      r.foreach_passes.push_back({2, 1});  // m = lerp(m, grad)
      r.foreach_passes.push_back({1, 1});  // v *= beta2
      r.foreach_passes.push_back({2, 1});  // v += (1 - beta2) grad^2
      r.foreach_passes.push_back({1, 1});  // tmp = sqrt(v)
      r.foreach_passes.push_back({1, 1});  // tmp /= bias correction
      r.foreach_passes.push_back({1, 1});  // tmp += eps
      r.foreach_passes.push_back({3, 1});  // param += step * m / tmp
      r.fused = {4, 3};
      break;
    case OptimizerKind::kAdadelta:
      return AdadeltaRecipe(decay);
    case OptimizerKind::kLion:
      r.states = 1;
      if (decay) {
        r.foreach_passes.push_back({1, 1});  // param *= 1 - lr * wd
      }
      r.foreach_passes.push_back({2, 1});  // update = beta1 m + (1 - beta1) grad
      r.foreach_passes.push_back({2, 1});  // param -= lr * sign(update)
      r.foreach_passes.push_back({2, 1});  // m = beta2 m + (1 - beta2) grad
      r.foreach_temporaries = 1;
      r.fused = {3, 2};
      break;
    case OptimizerKind::kAdafactor:
      r = {1, {kAdafactorPasses.begin(), kAdafactorPasses.end()}, 2, {3, 2}};
      if (decay) {
        r.foreach_passes.push_back({1, 1});  // param += -lr * wd * param
      }
      break;
  }
  return r;
}

// bitsandbytes 0.50, optim/optimizer.py (init_state);
// torchao 0.18, optim/adam.py (_new_buffer) and subclass_{8,4}bit.py. Scales are fp32.
struct FormatRow {
  std::int64_t bits = 0;           // per element; 0: as `otherwise`
  std::int64_t block = 1;          // elements per scale
  std::int64_t least = 0;          // smaller tensors are not packed
  bool whole_blocks = false;       // nor those that are no multiple of the block
  bool keeps_embeddings = false;   // nor embeddings
  bool is_fp32_otherwise = false;  // else the parameter's dtype
};
// The rows follow the order of StateFormat.
constexpr std::array<FormatRow, 7> kFormats = {{
    {},
    {8, 256, 4096, false, true, true},
    {8, 256, 4096, false, true, true},
    {0, 1, 0, false, false, true},
    {8, 256, 4096, true, false, false},
    {4, 128, 4096, true, false, false},
    {0, 1, 0, false, false, true},
}};

const FormatRow& RowOf(StateFormat format) {
  return kFormats[static_cast<std::size_t>(format)];
}

struct WordRow {
  std::string_view word;
  OptimizerSpec spec;
};

// Transformers 5.23, training_args.py (OptimizerNames); the first of equal rows is the way back.
constexpr OptimizerSpec Packed(StateFormat states, OptimizerKind kind = OptimizerKind::kAdamW) {
  return {kind, OptimizerImpl::kFused, true, MatrixRule::kNone, states};
}
constexpr OptimizerSpec Whole(OptimizerKind kind, OptimizerImpl impl) {
  return {kind, impl, true, MatrixRule::kNone, StateFormat::kMaster};
}
constexpr std::array<WordRow, 17> kWords = {{
    {"adamw_torch", Whole(OptimizerKind::kAdamW, OptimizerImpl::kForeach)},
    {"adamw_torch_fused", Whole(OptimizerKind::kAdamW, OptimizerImpl::kFused)},
    {"adamw_apex_fused", Whole(OptimizerKind::kAdamW, OptimizerImpl::kFused)},
    {"adamw_hf", Whole(OptimizerKind::kAdamW, OptimizerImpl::kForLoop)},
    {"sgd", Whole(OptimizerKind::kSgd, OptimizerImpl::kForeach)},
    {"adamw_bnb_8bit", Packed(StateFormat::kBnb8)},
    {"adamw_8bit", Packed(StateFormat::kBnb8)},
    {"paged_adamw_8bit", Packed(StateFormat::kBnb8Paged)},
    {"paged_adamw_32bit", Packed(StateFormat::kBnb32Paged)},
    {"paged_adamw", Packed(StateFormat::kBnb32Paged)},
    {"adamw_torch_8bit", Packed(StateFormat::kAo8)},
    {"adamw_torch_4bit", Packed(StateFormat::kAo4)},
    {"lion_32bit", Packed(StateFormat::kFp32, OptimizerKind::kLion)},
    {"lion_8bit", Packed(StateFormat::kBnb8, OptimizerKind::kLion)},
    {"paged_lion_32bit", Packed(StateFormat::kBnb32Paged, OptimizerKind::kLion)},
    {"paged_lion_8bit", Packed(StateFormat::kBnb8Paged, OptimizerKind::kLion)},
    {"adafactor",
     {OptimizerKind::kAdafactor, OptimizerImpl::kForLoop, true, MatrixRule::kNone,
      StateFormat::kFp32}},
}};

}  // namespace

// Example: a tensor of 1,000,000 elements in kBnb8 takes 1,000,000 bytes of codes and 3,907 fp32
// scales. In kAo4 a tensor of 4,096 elements takes 2,048 bytes and 32 scales. One of 4,100 elements
// is no multiple of 128, so kAo4 keeps it in the parameter's dtype.
StateSize SizeOfState(StateFormat format, std::int64_t elements, bool is_embedding, DType dtype) {
  const FormatRow& row = RowOf(format);
  const bool is_packed = row.bits > 0 && elements >= row.least &&
                         !(row.whole_blocks && elements % row.block != 0) &&
                         !(row.keeps_embeddings && is_embedding);
  if (!is_packed) {
    return {Bytes(elements * SizeOf(row.is_fp32_otherwise ? DType::kFp32 : dtype)), Bytes(0)};
  }
  return {Bytes(CeilDiv(elements * row.bits, 8)),
          Bytes(CeilDiv(elements, row.block) * SizeOf(DType::kFp32))};
}

bool IsPaged(StateFormat format) {
  return format == StateFormat::kBnb8Paged || format == StateFormat::kBnb32Paged;
}

// Example: a matrix of 1,000 x 2,000 keeps 1,000 numbers for its rows and 2,000 for its columns. A
// bias of 1,000 keeps 1,000. A stack of 8 matrices of 10 x 20 keeps 80 and 160.
std::vector<std::int64_t> FactoredState(const std::vector<std::int64_t>& shape) {
  std::int64_t elements = 1;
  for (const std::int64_t n : shape) {
    elements *= n;
  }
  if (shape.size() < 2 || elements == 0) {
    return {elements};
  }
  return {elements / shape.back(), elements / shape[shape.size() - 2]};
}

std::optional<OptimizerSpec> OptimizerNamed(std::string_view word) {
  const auto row = FindIn(kWords, word, &WordRow::word);
  return row == kWords.end() ? std::nullopt : std::optional(row->spec);
}

std::vector<std::string_view> OptimizerWords() {
  return Mapped<std::string_view>(kWords, &WordRow::word);
}

std::string_view WordOf(const OptimizerSpec& spec) {
  OptimizerSpec sought = spec;
  sought.weight_decay = true;
  const auto row = FindIn(kWords, sought, &WordRow::spec);
  return row == kWords.end() ? "" : row->word;
}

int StateCount(OptimizerKind kind) {
  return RecipeOf({kind, OptimizerImpl::kFused, true}).states;
}

OptimizerSpec FusedFormOf(OptimizerSpec spec) {
  const bool is_adam = spec.kind == OptimizerKind::kAdam || spec.kind == OptimizerKind::kAdamW;
  if (is_adam && spec.impl == OptimizerImpl::kForeach && spec.states == StateFormat::kMaster) {
    spec.impl = OptimizerImpl::kFused;
  }
  return spec;
}

OptimizerSpec OnHost(OptimizerSpec spec, Dialect dialect) {
  spec.impl = FactsOf(dialect).updates_host_at_once ? OptimizerImpl::kFused : spec.impl;
  return spec;
}

// Returns equal kernels, since only their sum and their number matter. Example: 50,000,000 elements
// in 100 tensors are 763 chunks. Chunks ask for 3 launches and tensors for 4, so there are 4
// kernels, and each moves a quarter of the bytes.
std::vector<Kernel> MultiTensorKernels(std::int64_t elements, std::int64_t tensors, Bytes read,
                                       Bytes written, DType dtype) {
  // multi_tensor_apply.cuh: chunks of 65,536 elements, at most 320 chunks and about 30 tensors
  // (fewer for kernels with more tensor lists) per launch.
  constexpr std::int64_t kChunkElements = 65536;
  constexpr std::int64_t kChunksPerLaunch = 320;
  constexpr std::int64_t kTensorsPerLaunch = 30;
  const std::int64_t launches =
      std::max({std::int64_t{1}, CeilDiv(CeilDiv(elements, kChunkElements), kChunksPerLaunch),
                CeilDiv(tensors, kTensorsPerLaunch)});
  Kernel kernel;
  kernel.kind = KernelClass::kOptimizer;
  kernel.dtype = dtype;
  kernel.read = read / launches;
  kernel.written = written / launches;
  return std::vector<Kernel>(static_cast<std::size_t>(launches), kernel);
}

OptimizerStep LowerPackedUpdate(std::int64_t elements, std::int64_t tensors, Bytes states,
                                DType dtype) {
  const std::int64_t launches = std::max<std::int64_t>(tensors, 1);
  const Bytes whole(elements * SizeOf(dtype));
  Kernel kernel;
  kernel.kind = KernelClass::kOptimizer;
  kernel.dtype = dtype;
  kernel.read = (2 * whole + states) / launches;  // parameter, gradient
  kernel.written = (whole + states) / launches;
  OptimizerStep step;
  step.kernels.assign(static_cast<std::size_t>(launches), kernel);
  return step;
}

OptimizerStep LowerOptimizer(const OptimizerSpec& spec, std::int64_t elements, std::int64_t tensors,
                             std::int64_t largest, DType dtype) {
  const Recipe recipe = RecipeOf(spec);
  const Bytes whole(elements * SizeOf(dtype));
  OptimizerStep step;
  const auto add = [&](ElementPass pass, std::int64_t launches_of) {
    const auto kernels =
        MultiTensorKernels(elements, launches_of, pass.read * whole, pass.written * whole, dtype);
    step.kernels.insert(step.kernels.end(), kernels.begin(), kernels.end());
  };
  switch (spec.impl) {
    case OptimizerImpl::kFused:
      add(recipe.fused, tensors);
      break;
    case OptimizerImpl::kForeach:
      for (const ElementPass& pass : recipe.foreach_passes) {
        add(pass, tensors);
      }
      step.temporaries = recipe.foreach_temporaries * whole;
      break;
    case OptimizerImpl::kForLoop:
      for (const ElementPass& pass : recipe.foreach_passes) {
        Kernel kernel;
        kernel.kind = KernelClass::kOptimizer;
        kernel.dtype = dtype;
        kernel.read = pass.read * whole / std::max<std::int64_t>(tensors, 1);
        kernel.written = pass.written * whole / std::max<std::int64_t>(tensors, 1);
        step.kernels.insert(step.kernels.end(), static_cast<std::size_t>(tensors), kernel);
      }
      step.temporaries = recipe.foreach_temporaries * Bytes(largest * SizeOf(dtype));
      break;
  }
  return step;
}

}  // namespace shardwright
