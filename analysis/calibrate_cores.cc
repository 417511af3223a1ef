// What ops lose while other ranks keep the machine's cores busy: equal ops of runs with more and
// with fewer ranks are compared.

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <string>
#include <utility>
#include <vector>

#include "analysis/calibrate.h"
#include "analysis/piecewise_fit.h"

namespace shardwright {
namespace {

// Cores but one that a run's ranks keep busy while all of them compute, as SolveSpeeds counts them.
double OthersBusy(const Cluster& cluster) {
  const double used = std::min(cluster.SharedCores(), static_cast<double>(cluster.RanksOnCores()));
  return std::max(0.0, used - 1);
}

bool HaveEqualKernels(const Program& a, const OpShape& x, const Program& b, const OpShape& y) {
  const auto first = a.KernelsOf(x);
  const auto second = b.KernelsOf(y);
  return x.code == y.code && !first.empty() &&
         std::equal(first.begin(), first.end(), second.begin(), second.end());
}

// With t = own (1 + b others): b of two times of one op.
struct Evidence {
  double loss = 0;
  double weight = 0;
};

std::vector<Evidence> Compare(const std::vector<CalibrationRun>& runs,
                              const CalibrationSamples& samples) {
  std::vector<Evidence> found;
  for (const ShapeSample& busy : samples.shapes) {
    for (const ShapeSample& quiet : samples.shapes) {
      const CalibrationRun& many = runs[busy.run];
      const CalibrationRun& few = runs[quiet.run];
      const double more = OthersBusy(many.cluster);
      const double less = OthersBusy(few.cluster);
      if (more <= less || busy.seconds <= 0 || quiet.seconds <= 0 ||
          !HaveEqualKernels(many.program, many.program.shapes[busy.shape.value], few.program,
                            few.program.shapes[quiet.shape.value])) {
        continue;
      }
      const double ratio = busy.seconds / quiet.seconds;
      if (more - ratio * less > 0) {
        found.push_back({std::max(0.0, (ratio - 1) / (more - ratio * less)),
                         static_cast<double>(busy.ops) * busy.seconds});
      }
    }
  }
  return found;
}

double WeightedMedian(std::vector<Evidence> found) {
  std::sort(found.begin(), found.end(),
            [](const Evidence& a, const Evidence& b) { return a.loss < b.loss; });
  double total = 0;
  for (const Evidence& e : found) {
    total += e.weight;
  }
  double sum = 0;
  for (const Evidence& e : found) {
    sum += e.weight;
    if (sum >= total / 2) {
      return e.loss;
    }
  }
  return 0;
}

}  // namespace

void CalibrateBusyCores(const std::vector<CalibrationRun>& runs, CalibrationSamples& samples,
                        const Origin& origin, Profile& profile,
                        std::vector<CalibratedNumber>& numbers) {
  const std::vector<Evidence> found = Compare(runs, samples);
  Number<double>& number = profile.overlap.busy_cores;
  if (!found.empty()) {
    constexpr double kMost = 10;  // of such factors in profiles
    constexpr double kDigits = 1e4;
    const double loss = std::min(kMost, std::round(WeightedMedian(found) * kDigits) / kDigits);
    std::vector<double> errors;
    errors.reserve(found.size());
    for (const Evidence& e : found) {
      errors.push_back(std::abs((1 + loss) / (1 + e.loss) - 1));
    }
    const double spread = std::round(MedianOf(std::move(errors)) * kDigits) / kDigits;
    numbers.push_back({"overlap.busy_cores", false, number.value, loss, spread,
                       static_cast<std::int64_t>(found.size())});
    number = {loss, origin, spread};
  }
  for (ShapeSample& sample : samples.shapes) {
    sample.seconds /= 1 + number.value * OthersBusy(runs[sample.run].cluster);
  }
}

}  // namespace shardwright
