// What ops lose while others keep the machine's cores busy: equal ops of runs with more and with
// fewer ranks are compared. And what they gain by several threads.

#include <array>
#include <cmath>
#include <cstddef>
#include <limits>
#include <optional>
#include <span>
#include <utility>
#include <vector>

#include "analysis/calibrate.h"
#include "analysis/piecewise_fit.h"
#include "core/ranges.h"
#include "simulator/costs/contention.h"

namespace shardwright {
namespace {

// Cores but one that a run's ranks keep busy while all of them compute, as SolveSpeeds counts them.
double OthersBusy(const Cluster& cluster, const Profile& profile) {
  const double cores = ShareAmongThreads(Seconds(1), cluster, profile).cores;  // of a long op
  const double wanted = static_cast<double>(cluster.RanksOnCores()) * cores;
  const double used = std::min(cluster.SharedCores(), wanted);
  return std::max(0.0, used - 1);
}

bool HaveEqualKernels(const Program& a, const OpShape& x, const Program& b, const OpShape& y) {
  const auto first = a.KernelsOf(x);
  const auto second = b.KernelsOf(y);
  return x.code == y.code && !first.empty() &&
         std::equal(first.begin(), first.end(), second.begin(), second.end());
}

// A number that something measured stands for.
struct Evidence {
  double number = 0;
  double weight = 0;
};

// What number_of(ratio, cluster of many, cluster of few) says of the times of equal ops. Ranks have
// as many threads: what several of one rank lose says how well they share its work, too.
template <class F>
std::vector<Evidence> Compare(const std::vector<CalibrationRun>& runs,
                              const CalibrationSamples& samples, const F& number_of) {
  std::vector<Evidence> found;
  for (const ShapeSample& busy : samples.shapes) {
    for (const ShapeSample& quiet : samples.shapes) {
      const CalibrationRun& many = runs[busy.run];
      const CalibrationRun& few = runs[quiet.run];
      if (many.cluster.RanksOnCores() <= few.cluster.RanksOnCores() ||
          many.cluster.ThreadsPerRank() != few.cluster.ThreadsPerRank() || busy.seconds <= 0 ||
          quiet.seconds <= 0 ||
          !HaveEqualKernels(many.program, many.program.shapes[busy.shape.value], few.program,
                            few.program.shapes[quiet.shape.value])) {
        continue;
      }
      const std::optional<double> number =
          number_of(busy.seconds / quiet.seconds, many.cluster, few.cluster);
      if (number.has_value()) {
        found.push_back({std::max(0.0, *number), static_cast<double>(busy.ops) * busy.seconds});
      }
    }
  }
  return found;
}

double WeightedMedian(std::vector<Evidence> found) {
  SortBy(found, &Evidence::number);
  const double total = Summed<double>(found, &Evidence::weight);
  double sum = 0;
  for (const Evidence& e : found) {
    sum += e.weight;
    if (sum >= total / 2) {
      return e.number;
    }
  }
  return 0;
}

void StoreLoss(const char* field, const std::vector<Evidence>& found, const Origin& origin,
               Number<double>& number, std::vector<CalibratedNumber>& numbers) {
  if (found.empty()) {
    return;
  }
  constexpr double kMost = 10;  // of such factors in profiles
  constexpr double kDigits = 1e4;
  const double loss = std::min(kMost, std::round(WeightedMedian(found) * kDigits) / kDigits);
  std::vector<double> errors = Mapped<double>(
      found, [&](const Evidence& e) { return std::abs((1 + loss) / (1 + e.number) - 1); });
  const double spread = std::round(MedianOf(std::move(errors)) * kDigits) / kDigits;
  numbers.push_back(
      {field, false, number.value, loss, spread, static_cast<std::int64_t>(found.size())});
  number = {loss, origin, spread};
}

}  // namespace

void CalibrateBusyCores(const std::vector<CalibrationRun>& runs, CalibrationSamples& samples,
                        const Origin& origin, Profile& profile,
                        std::vector<CalibratedNumber>& numbers) {
  // With t = own (1 + b others), b of two times of one op.
  Number<double>& busy = profile.overlap.busy_cores;
  const auto busy_of = [&](double ratio, const Cluster& many,
                           const Cluster& few) -> std::optional<double> {
    const double more = OthersBusy(many, profile);
    const double less = OthersBusy(few, profile);
    const bool tells = !many.RanksTakeTurns() && more > less && more - ratio * less > 0;
    return tells ? std::optional((ratio - 1) / (more - ratio * less)) : std::nullopt;
  };
  StoreLoss("overlap.busy_cores", Compare(runs, samples, busy_of), origin, busy, numbers);
  for (ShapeSample& sample : samples.shapes) {
    sample.seconds /= 1 + busy.value * OthersBusy(runs[sample.run].cluster, profile);
  }
  Number<double>& turns = profile.overlap.core_turns;
  const auto turns_of = [](double ratio, const Cluster& many, const Cluster& few) {
    return many.RanksTakeTurns() && !few.RanksTakeTurns() ? std::optional(ratio - 1) : std::nullopt;
  };
  StoreLoss("overlap.core_turns", Compare(runs, samples, turns_of), origin, turns, numbers);
  for (ShapeSample& sample : samples.shapes) {
    sample.seconds /= runs[sample.run].cluster.RanksTakeTurns() ? 1 + turns.value : 1;
  }
}

namespace {

// Where ops of several threads have an equal one in a run of one thread, of the fewest ranks, that
// tells what they compute: their own time contains that threads looked for work. Then they tell
// nothing about kernels.
void PreferOneThread(const std::vector<CalibrationRun>& runs, CalibrationSamples& samples) {
  for (ShapeSample& sample : samples.shapes) {
    const CalibrationRun& run = runs[sample.run];
    std::int64_t ranks = std::numeric_limits<std::int64_t>::max();
    for (const ShapeSample& other : samples.shapes) {
      const CalibrationRun& alone = runs[other.run];
      if (run.cluster.ThreadsPerRank() > 1 && alone.cluster.ThreadsPerRank() == 1 &&
          other.computed > 0 && alone.cluster.RanksOnCores() < ranks &&
          HaveEqualKernels(run.program, run.program.shapes[sample.shape.value], alone.program,
                           alone.program.shapes[other.shape.value])) {
        sample.computed = other.computed;
        sample.seconds = 0;
        ranks = alone.cluster.RanksOnCores();
      }
    }
  }
}

}  // namespace

// What takes `cpu` seconds on one core, in k kernels, takes cpu / t + (1 - s) cpu (1 - 1 / t) + k a
// on t threads: linear in what is not shared and in what a start costs. An op that is not worth
// that is one thread's and tells nothing.
void CalibrateSharedWork(const std::vector<CalibrationRun>& runs, CalibrationSamples& samples,
                         const Origin& origin, Profile& profile,
                         std::vector<CalibratedNumber>& numbers) {
  PreferOneThread(runs, samples);
  enum Column : std::size_t { kUnshared, kStart };
  OverlapProfile& overlap = profile.overlap;
  const RowsAt rows_at = [&](std::span<const double> values) {
    std::vector<FitRow> rows;
    for (const ShapeSample& sample : samples.shapes) {
      const CalibrationRun& run = runs[sample.run];
      const auto threads = static_cast<double>(run.cluster.ThreadsPerRank());
      const auto kernels = static_cast<double>(run.program.shapes[sample.shape.value].kernel_count);
      const double others = sample.computed * (1 - 1 / threads);  // they may save as much
      if (values[kUnshared] * others + values[kStart] * kernels >= others) {
        continue;
      }
      // Errors count by their time, not as a part of what is small at best.
      const double rest = std::max(sample.lasted - sample.computed / threads, 0.01 * others);
      rows.push_back(
          {{{kUnshared, others}, {kStart, kernels}}, rest, static_cast<double>(sample.ops) * rest});
    }
    return rows;
  };
  // Not from the profile's: with nothing shared no op would tell.
  constexpr std::array<FitColumn, 2> columns = {{{0.1, 0.1, 0}, {20e-6, 20e-6, 0}}};
  const std::vector<FittedValue> found = FitPiecewise(columns, rows_at);
  constexpr double kDigits = 1e4;
  const auto rounded = [](double value) { return std::round(value * kDigits) / kDigits; };
  if (const FittedValue& unshared = found[kUnshared]; unshared.is_found) {
    const double shared = 1 - std::min(1.0, rounded(unshared.value));
    const double spread = rounded(unshared.spread * unshared.value);  // of what is shared
    numbers.push_back(
        {"overlap.shared_work", false, overlap.shared_work.value, shared, spread, unshared.rows});
    overlap.shared_work = {shared, origin, spread};
  }
  if (const FittedValue& start = found[kStart]; start.is_found) {
    const double spread = rounded(start.spread);
    const double seconds = std::round(start.value * 1e9) / 1e9;
    numbers.push_back(
        {"overlap.loop_start", true, overlap.loop_start.value.value, seconds, spread, start.rows});
    overlap.loop_start = {Seconds(seconds), origin, spread};
  }
}

}  // namespace shardwright
