#pragma once

// Runs one host kernel in exactly the memory that LowerOp declares for it, between guard bytes, and
// compares with plain fp64 loops: outputs directly, gradients with finite differences of them.

#include <cstddef>
#include <cstdint>
#include <functional>
#include <vector>

#include "core/units.h"
#include "executor/model_op.h"
#include "models/kernel_set.h"
#include "models/model.h"

namespace shardwright::testing {

using Numbers = std::vector<double>;

inline constexpr double kU = 0x1p-24;  // half a unit in the last place of 1 in fp32
inline constexpr DType kAllDTypes[] = {DType::kFp32, DType::kBf16, DType::kFp16};

[[nodiscard]] inline std::size_t S(std::int64_t i) {
  return static_cast<std::size_t>(i);
}

// A kernel's operands. Ids and labels are inputs of whole numbers whose index is in `index_inputs`.
struct KernelCase {
  OpSpec spec;
  std::int64_t batch = 1;
  std::vector<Numbers> inputs;
  std::vector<Numbers> params;
  std::vector<std::int64_t> index_inputs;
  std::vector<std::int64_t> output_elements;  // the loss ops: {1}
  std::vector<float> buffers;                 // Module::buffer_elements, if the op has any
  KernelSetOptions options;                   // shardwright-host unless changed
  DropoutKey dropout;
  LossReduction reduction = LossReduction::kMean;
  bool is_training = true;
  DType grad_dtype = DType::kFp32;  // of parameter gradients
  bool accumulate = false;          // parameter gradients add to ones
  std::size_t shift = 0;            // of every tensor's address from a multiple of 64 bytes
};
[[nodiscard]] KernelCase MakeCase(const OpSpec& spec, std::int64_t batch);

struct KernelRun {
  std::vector<Numbers> outputs;
  std::vector<Numbers> output_grads;  // what backward was given: random
  std::vector<Numbers> input_grads;
  std::vector<Numbers> param_grads;
  std::vector<std::uint8_t> bits;  // of everything the kernel wrote, to compare runs
  std::vector<float> buffers;      // after forward
};
// Forward, then backward with only what the kernel set keeps (the rest is poisoned with NaNs).
// Fails the running test when a guard byte or an operand has changed.
[[nodiscard]] KernelRun RunKernel(const KernelCase& c, DType compute);

// The operands as the dtype rounds them, which is what an oracle must see.
[[nodiscard]] KernelCase Rounded(const KernelCase& c, DType compute);

// outputs = f(inputs, params).
using Oracle =
    std::function<std::vector<Numbers>(const std::vector<Numbers>&, const std::vector<Numbers>&)>;

struct Tolerance {
  // Of an fp32 result: |error| <= absolute + relative * |exact|.
  double absolute = 0.0;
  double relative = 0.0;
};
// Compares outputs and every gradient; large tensors in random directions. 16-bit results may be
// off by half a unit in the last place on top, and gradients by what follows from 16-bit outputs
// that the kernel reads again (`kept_error`, absolute).
void CheckKernel(const KernelCase& c, DType compute, const Oracle& oracle,
                 const Tolerance& fp32_tolerance, double kept_error = 0.0);

// The kernels under test: which set LowerOp lowers for, and how they run.
struct Subject {
  const char* kernel_set;
  void (*run)(const ModelOpCall& call, bool is_backward);
  // Relative error of products whose operands are rounded to 16 bits inside a kernel (the
  // probabilities of a flash attention): 0 where everything is fp32.
  double inner_rounding;
  // Of sums of products in fp8, relative to their terms' magnitudes: 0 where they are fp32.
  double fp8_sums = 0.0;
};
[[nodiscard]] const Subject& SubjectUnderTest();

// Random normal numbers; equal seeds give equal numbers.
[[nodiscard]] Numbers Normal(std::int64_t n, std::uint64_t seed, double deviation = 1.0);
// Random whole numbers in [0, limit).
[[nodiscard]] Numbers Integers(std::int64_t n, std::int64_t limit, std::uint64_t seed);

}  // namespace shardwright::testing
