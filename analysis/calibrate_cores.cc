// What ops lose while others keep the machine's cores busy: equal ops of runs with more and with
// fewer ranks are compared. And what they gain by several threads.

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <string>
#include <utility>
#include <vector>

#include "analysis/calibrate.h"
#include "analysis/piecewise_fit.h"
#include "simulator/costs/contention.h"

namespace shardwright {
namespace {

// Cores but one that a run's ranks keep busy while all of them compute, as SolveSpeeds counts them.
double OthersBusy(const Cluster& cluster, const Profile& profile) {
  const double wanted = static_cast<double>(cluster.RanksOnCores()) * CoresAtWork(cluster, profile);
  const double used = std::min(cluster.SharedCores(), wanted);
  return std::max(0.0, used - 1);
}

bool HaveEqualKernels(const Program& a, const OpShape& x, const Program& b, const OpShape& y) {
  const auto first = a.KernelsOf(x);
  const auto second = b.KernelsOf(y);
  return x.code == y.code && !first.empty() &&
         std::equal(first.begin(), first.end(), second.begin(), second.end());
}

// A number that something measured stands for: with t = own (1 + b others), b of two times of one
// op; or the part of its work that a run shared.
struct Evidence {
  double number = 0;
  double weight = 0;
};

std::vector<Evidence> Compare(const std::vector<CalibrationRun>& runs,
                              const CalibrationSamples& samples, const Profile& profile) {
  std::vector<Evidence> found;
  for (const ShapeSample& busy : samples.shapes) {
    for (const ShapeSample& quiet : samples.shapes) {
      const CalibrationRun& many = runs[busy.run];
      const CalibrationRun& few = runs[quiet.run];
      const double more = OthersBusy(many.cluster, profile);
      const double less = OthersBusy(few.cluster, profile);
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
            [](const Evidence& a, const Evidence& b) { return a.number < b.number; });
  double total = 0;
  for (const Evidence& e : found) {
    total += e.weight;
  }
  double sum = 0;
  for (const Evidence& e : found) {
    sum += e.weight;
    if (sum >= total / 2) {
      return e.number;
    }
  }
  return 0;
}

}  // namespace

void CalibrateBusyCores(const std::vector<CalibrationRun>& runs, CalibrationSamples& samples,
                        const Origin& origin, Profile& profile,
                        std::vector<CalibratedNumber>& numbers) {
  const std::vector<Evidence> found = Compare(runs, samples, profile);
  Number<double>& number = profile.overlap.busy_cores;
  if (!found.empty()) {
    constexpr double kMost = 10;  // of such factors in profiles
    constexpr double kDigits = 1e4;
    const double loss = std::min(kMost, std::round(WeightedMedian(found) * kDigits) / kDigits);
    std::vector<double> errors;
    errors.reserve(found.size());
    for (const Evidence& e : found) {
      errors.push_back(std::abs((1 + loss) / (1 + e.number) - 1));
    }
    const double spread = std::round(MedianOf(std::move(errors)) * kDigits) / kDigits;
    numbers.push_back({"overlap.busy_cores", false, number.value, loss, spread,
                       static_cast<std::int64_t>(found.size())});
    number = {loss, origin, spread};
  }
  for (ShapeSample& sample : samples.shapes) {
    sample.seconds /= 1 + number.value * OthersBusy(runs[sample.run].cluster, profile);
  }
}

// With Amdahl's law: an op of `cpu` seconds on one core takes cpu (1 - s + s / threads).
void CalibrateSharedWork(const std::vector<CalibrationRun>& runs, const Origin& origin,
                         Profile& profile, std::vector<CalibratedNumber>& numbers) {
  std::vector<Evidence> found;
  for (const CalibrationRun& run : runs) {
    const auto threads = static_cast<double>(run.cluster.ThreadsPerRank());
    double cpu = 0;
    double lasted = 0;
    for (const Span& span : run.trace.spans) {
      // The first step warms up.
      if (span.stream == Stream::kCompute && span.step > 0 && span.cpu > SimTime(0)) {
        cpu += ToSeconds(span.cpu).value;
        lasted += ToSeconds(span.end - span.start).value;
      }
    }
    if (threads > 1 && run.recordings == nullptr && run.shapes == nullptr && cpu > 0) {
      found.push_back({std::clamp((1 - lasted / cpu) / (1 - 1 / threads), 0.0, 1.0), cpu});
    }
  }
  if (found.empty()) {
    return;
  }
  constexpr double kDigits = 1e4;
  const double shared = std::round(WeightedMedian(found) * kDigits) / kDigits;
  std::vector<double> errors;
  errors.reserve(found.size());
  for (const Evidence& e : found) {
    errors.push_back(std::abs(e.number - shared));
  }
  const double spread = std::round(MedianOf(std::move(errors)) * kDigits) / kDigits;
  Number<double>& number = profile.overlap.shared_work;
  numbers.push_back({"overlap.shared_work", false, number.value, shared, spread,
                     static_cast<std::int64_t>(found.size())});
  number = {shared, origin, spread};
}

}  // namespace shardwright
