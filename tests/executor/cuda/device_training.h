#pragma once

// Plans that the tests of the CUDA device train, on the GPU of test_gpu.h.

#include <cstdint>
#include <functional>
#include <vector>

#include "schedule/plan.h"
#include "schedule/program.h"
#include "tests/executor/harness.h"

namespace shardwright::testing {

inline constexpr const char* kPlainKernels = "shardwright-cuda-plain";

// LowerSetup with a kernel set of the CUDA device.
[[nodiscard]] Program LowerForCuda(const Setup& setup, const char* kernels = kPlainKernels);

// With poisoned memory and a trace. `seed`: see MakeTestGpu.
[[nodiscard]] Outcome TrainOnGpu(const Setup& setup, std::uint64_t seed,
                                 const char* kernels = kPlainKernels);

struct Variant {
  const char* name;
  Dialect dialect;
  std::int64_t ranks;
  std::function<void(Setup& s)> change;
  double bound;  // of the weights' relative difference from the host's
};

// Sums of other orders in three steps; measured below 1e-6.
inline constexpr double kFp32Bound = 1e-5;
// 8 bits in every weight, activation and gradient.
inline constexpr double kHalfBound = 0.05;

// Every dialect, and what changes the calls. The first three are one, two and four ranks of the
// native dialect.
[[nodiscard]] std::vector<Variant> Variants();
[[nodiscard]] Setup SetupOf(const Variant& variant);

}  // namespace shardwright::testing
