#pragma once

// A GPU's profile from the kernels of any program that PyTorch's profiler saw, with shapes and
// without a plan. docs/compare.md, section "From the kernels of any trace".

#include <string>
#include <utility>
#include <vector>

#include "core/units.h"
#include "topologies/cluster.h"
#include "topologies/number.h"
#include "topologies/profile.h"
#include "traces/timed_calls.h"

namespace shardwright {

// One number that the calls tell. Shapes are divided into two halves: the number is chosen so that
// half of the first ones are priced too high and half too low, and judged by the others.
struct CallNumber {
  std::string field;  // "compute.gemm.bf16"
  double before = 0;
  double after = 0;
  std::size_t fitted = 0, held = 0;  // shapes that depend on it, of either half
  // Median absolute errors of the prices of the other half; of all where there is none.
  double error_before = 0, error_after = 0;
  bool is_kept = false;  // `after` is in the profile: it is no worse for the other half
};

// Calls of one kind.
struct CallCoverage {
  std::string kind;  // "products in bf16"
  std::size_t calls = 0, shapes = 0;
  Seconds time;
  double error_before = 0, error_after = 0;  // median absolute errors of the prices of all shapes
};

struct CallCalibration {
  Profile profile;
  std::vector<CallNumber> numbers;
  std::vector<CallCoverage> coverage;                   // the longest first
  Seconds total;                                        // of all kernels but collectives
  std::vector<std::pair<std::string, Seconds>> untold;  // TimedCalls::untold
};

// `start` with the numbers of kernels that `calls` tell; the others keep values and origins. Those
// that are told get `origin` and the error of the other half as their spread. All calls are of one
// GPU type. Throws InputError where no call has a shape.
[[nodiscard]] CallCalibration CalibrateCalls(const std::vector<TimedCalls>& calls,
                                             const GpuSpec& gpu, const Profile& start,
                                             const Origin& origin);

}  // namespace shardwright
