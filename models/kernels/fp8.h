#pragma once

// Which products run in fp8, and in which of its two formats: what LowerOp prices and what the
// executor's kernels do. The recipes are those of torchao's float8 training.

#include <cstdint>

#include "core/units.h"
#include "models/kernel_set.h"
#include "models/model.h"

namespace shardwright {

// e4m3: 4 exponent bits, 3 fraction bits, no infinity, at most 448. e5m2: 5 and 2, at most 57,344.
enum class Fp8Format : std::uint8_t { kE4m3, kE5m2 };

// Of the operands of one product.
struct Fp8Formats {
  Fp8Format a = Fp8Format::kE4m3, b = Fp8Format::kE4m3;
};

// Of the output's gradient; inputs and weights are e4m3.
[[nodiscard]] constexpr Fp8Format GradientFormat(Fp8Products products) {
  return products == Fp8Products::kPerRow ? Fp8Format::kE4m3 : Fp8Format::kE5m2;
}

// The vocabulary projection stays in the compute dtype, which no recipe converts: blocks widen at
// most fivefold or so. So do layers whose sizes are no multiples of 16, which tensor cores do not
// multiply in fp8 (torchtitan leaves them out, too).
inline constexpr std::int64_t kMostFp8Widening = 6;
inline constexpr std::int64_t kFp8Multiple = 16;
[[nodiscard]] inline bool MultipliesFp8(const OpSpec& spec, DType compute,
                                        const KernelSetOptions& options) {
  return options.fp8 != Fp8Products::kNone && spec.kind == OpKind::kLinear && SizeOf(compute) > 1 &&
         spec.out <= kMostFp8Widening * spec.in && spec.in % kFp8Multiple == 0 &&
         spec.out % kFp8Multiple == 0;
}

}  // namespace shardwright
