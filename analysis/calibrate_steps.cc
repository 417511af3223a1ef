#include "analysis/calibrate_steps.h"

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <optional>
#include <string>
#include <utility>

#include "analysis/confidence.h"
#include "analysis/predict_run.h"
#include "analysis/profile_numbers.h"
#include "core/error.h"
#include "schedule/lower.h"
#include "simulator/simulate.h"

namespace shardwright {
namespace {

struct StepRow {
  std::string id;
  double measured_s = 0;
  PlanFile plan;  // its profile has what the run's stack changes in it
  Program program;
};

// A number that may move, on logarithms.
struct MovingNumber {
  std::string path;
  double deviation = 0;
  double most = 0;  // the largest move, for fractions
  double moved = 0;
  bool is_at_end = false;
};

// A number may become this many times smaller or larger.
constexpr double kMostFactor = 8;

std::vector<StepRow> StepRowsOf(const std::vector<MeasuredRun>& runs, const Profile& start) {
  std::vector<StepRow> rows;
  for (const MeasuredRun& run : runs) {
    if (run.step_time_s <= 0) {
      throw InputError(run.id, "no step_time_s", "seconds per step");
    }
    PlanFile plan = run.plan;
    const std::string& gpu = plan.cluster.gpu.name;
    if (!rows.empty() && gpu != rows[0].plan.cluster.gpu.name) {
      throw InputError(run.id, "a run on " + gpu,
                       "one on " + rows[0].plan.cluster.gpu.name + ", as " + rows[0].id);
    }
    // What an old stack changes in the network and memory stays.
    const Profile own = std::exchange(plan.profile, start);
    if (own.name == start.name) {
      plan.profile.transports = own.transports;
      plan.profile.memory = own.memory;
    }
    Program program = Lower({plan, plan.plan});
    rows.push_back({run.id, run.step_time_s, std::move(plan), std::move(program)});
  }
  return rows;
}

void MoveNumbers(const std::vector<MovingNumber>& numbers, Profile& profile) {
  for (const MovingNumber& number : numbers) {
    *NumberAt(profile, number.path, "profile").value *= std::exp(number.moved);
  }
}

// Steps with moved numbers; the simulator is kept for its memory.
class Steps {
 public:
  explicit Steps(const std::vector<StepRow>& rows) : rows_(rows) {}

  [[nodiscard]] double Predict(std::size_t i, const std::vector<MovingNumber>& numbers) {
    Profile profile = rows_[i].plan.profile;
    MoveNumbers(numbers, profile);
    SimulateOptions options;
    options.reserved = false;
    if (simulator_) {
      simulator_->Use(rows_[i].plan.cluster, profile);
    } else {
      simulator_.emplace(rows_[i].plan.cluster, profile);
    }
    return ToSeconds(simulator_->Run(rows_[i].program, options).step_time).value;
  }

  [[nodiscard]] double Error(std::size_t i, const std::vector<MovingNumber>& numbers) {
    return std::log(Predict(i, numbers) / rows_[i].measured_s);
  }

 private:
  const std::vector<StepRow>& rows_;
  std::optional<Simulator> simulator_;
};

// Numbers with a spread, widened so that the band of the rows is that of ConfidenceOf.
std::vector<MovingNumber> NumbersToMove(const std::vector<StepRow>& rows, const Profile& start,
                                        double& band) {
  double of_numbers = 0;
  for (const StepRow& row : rows) {
    const auto count = static_cast<double>(rows.size());
    of_numbers += StepTimeBand(row.plan) / count;
    band += ConfidenceOf(row.plan).band / count;
  }
  const double widened = of_numbers > 0 ? band / of_numbers : 1;
  std::vector<MovingNumber> numbers;
  Profile profile = start;
  for (const std::string& path : NumberPaths(start)) {
    const NumberRef number = NumberAt(profile, path, "profile");
    if (*number.spread > 0 && *number.value > 0) {
      const bool is_fraction =
          !number.is_time && !path.starts_with("overlap.") && *number.value <= 1;
      const double most = is_fraction ? std::min(-std::log(*number.value), std::log(kMostFactor))
                                      : std::log(kMostFactor);
      numbers.push_back({path, widened * std::log1p(*number.spread) / kBandPerDeviation, most});
    }
  }
  return numbers;
}

// x of m x = b for a symmetric positive definite m: elimination needs no pivots.
std::vector<double> SolvePositive(std::vector<std::vector<double>> m, std::vector<double> b) {
  const std::size_t n = b.size();
  for (std::size_t k = 0; k < n; ++k) {
    for (std::size_t i = k + 1; i < n; ++i) {
      const double factor = m[i][k] / m[k][k];
      for (std::size_t j = k; j < n; ++j) {
        m[i][j] -= factor * m[k][j];
      }
      b[i] -= factor * b[k];
    }
  }
  for (std::size_t k = n; k-- > 0;) {
    for (std::size_t j = k + 1; j < n; ++j) {
      b[k] -= m[k][j] * b[j];
    }
    b[k] /= m[k][k];
  }
  return b;
}

// Slopes of the errors by number and row, at where the numbers are.
std::vector<std::vector<double>> StepSlopesOf(Steps& steps, const std::vector<double>& errors,
                                              std::vector<MovingNumber> numbers) {
  constexpr double kStep = 0.03;
  std::vector<std::vector<double>> slopes;
  for (MovingNumber& number : numbers) {
    number.moved -= kStep;  // downwards, so that no fraction passes 1
    std::vector<double> row;
    for (std::size_t i = 0; i < errors.size(); ++i) {
      row.push_back((errors[i] - steps.Error(i, numbers)) / kStep);
    }
    slopes.push_back(std::move(row));
    number.moved += kStep;
  }
  return slopes;
}

// One step to the most probable numbers, as if errors were straight lines. With n rows this solves
// n equations: moves = S G' (G S G' + noise)^-1 (G at - errors), S the numbers' variances.
void ApproachSteps(Steps& steps, std::size_t rows, std::vector<MovingNumber>& numbers) {
  std::vector<double> errors;
  for (std::size_t i = 0; i < rows; ++i) {
    errors.push_back(steps.Error(i, numbers));
  }
  const std::vector<std::vector<double>> slopes = StepSlopesOf(steps, errors, numbers);
  std::vector<std::vector<double>> m(rows, std::vector<double>(rows, 0));
  std::vector<double> rest(rows);
  for (std::size_t i = 0; i < rows; ++i) {
    m[i][i] = kStepNoise * kStepNoise;
    rest[i] = -errors[i];
    for (std::size_t k = 0; k < numbers.size(); ++k) {
      if (numbers[k].is_at_end) {
        continue;  // what it explains is in the errors
      }
      rest[i] += slopes[k][i] * numbers[k].moved;
      for (std::size_t j = 0; j < rows; ++j) {
        m[i][j] += slopes[k][i] * slopes[k][j] * numbers[k].deviation * numbers[k].deviation;
      }
    }
  }
  const std::vector<double> weights = SolvePositive(m, rest);
  for (std::size_t k = 0; k < numbers.size(); ++k) {
    MovingNumber& number = numbers[k];
    if (number.is_at_end) {
      continue;
    }
    double move = 0;
    for (std::size_t i = 0; i < rows; ++i) {
      move += number.deviation * number.deviation * slopes[k][i] * weights[i];
    }
    number.moved = std::clamp(move, -std::log(kMostFactor), number.most);
    number.is_at_end = number.moved != move;
  }
}

// The part of the band that is left once `rows` have been seen.
double LeftOfBand(double band, std::size_t rows) {
  if (band <= 0) {
    return 1;
  }
  const double before = band / kBandPerDeviation * (band / kBandPerDeviation);
  const double noise = kStepNoise * kStepNoise;
  const double known = before * noise / (static_cast<double>(rows) * before + noise);
  return std::min(1.0, std::sqrt((known + noise) / before));
}

double RoundedTo(double value, double digits) {
  const double scale = std::pow(10.0, std::floor(std::log10(value)) + 1 - digits);
  return std::round(value / scale) * scale;
}

}  // namespace

CalibrationResult CalibrateSteps(const std::vector<MeasuredRun>& runs, const Profile& start,
                                 const Origin& origin) {
  const std::vector<StepRow> rows = StepRowsOf(runs, start);
  SW_CHECK(!rows.empty(), "runs to calibrate by");
  Steps steps(rows);
  double band = 0;
  std::vector<MovingNumber> numbers = NumbersToMove(rows, start, band);
  CalibrationResult result{start, {}, {}, {}, {}};
  for (std::size_t i = 0; i < rows.size(); ++i) {
    result.runs.push_back(
        {rows[i].id, Seconds(rows[i].measured_s), Seconds(steps.Predict(i, numbers)), Seconds(0)});
  }
  constexpr int kRounds = 4;
  for (int round = 0; round < kRounds; ++round) {
    ApproachSteps(steps, rows.size(), numbers);
  }
  const double of_numbers = StepTimeBand(rows[0].plan);
  const double left = of_numbers > 0 ? LeftOfBand(band, rows.size()) * band / of_numbers : 1;
  constexpr double kDigits = 4;
  constexpr double kLeastMove = 1e-3;  // less is no news
  for (const MovingNumber& number : numbers) {
    NumberRef ref = NumberAt(result.profile, number.path, "profile");
    CalibratedNumber found{number.path, ref.is_time, *ref.value,
                           0,           0,           static_cast<std::int64_t>(rows.size())};
    *ref.spread = RoundedTo(*ref.spread * left, kDigits);
    if (std::abs(number.moved) > kLeastMove) {
      *ref.value = RoundedTo(*ref.value * std::exp(number.moved), kDigits);
      *ref.origin = origin;
      found.after = *ref.value;
      found.spread = *ref.spread;
      result.numbers.push_back(found);
    }
  }
  for (std::size_t i = 0; i < rows.size(); ++i) {
    result.runs[i].after = Seconds(steps.Predict(i, numbers));
  }
  return result;
}

}  // namespace shardwright
