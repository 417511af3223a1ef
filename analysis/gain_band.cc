#include "analysis/gain_band.h"

#include <cmath>
#include <cstddef>
#include <deque>
#include <string>

#include "analysis/profile_numbers.h"
#include "schedule/lower.h"
#include "simulator/plan_programs.h"
#include "simulator/simulate.h"

namespace shardwright {
namespace {

// Step times of the plans of one job under any profile.
class Times {
 public:
  Times(const PlanFile& file, const std::vector<Plan>& plans)
      : file_(file), simulator_(file.cluster, file.profile) {
    options_.reserved = false;
    const auto add = [&](const Plan& plan) { programs_.emplace_back(LowerInput{file, plan}); };
    add(file.plan);
    for (const Plan& plan : plans) {
      add(plan);
    }
  }

  // Of each plan over that of the file's own.
  std::vector<double> Ratios(const Profile& profile) {
    simulator_.Use(file_.cluster, profile);
    std::vector<double> ratios;
    double own = 0;
    for (PlanPrograms& programs : programs_) {
      const double time =
          ToSeconds(SimulatePlan(simulator_, programs, options_, Telling::kRoughly).step_time)
              .value;
      if (&programs == &programs_.front()) {
        own = time;
      } else {
        ratios.push_back(time / own);
      }
    }
    return ratios;
  }

 private:
  const PlanFile& file_;
  Simulator simulator_;
  SimulateOptions options_;
  std::deque<PlanPrograms> programs_;
};

}  // namespace

std::vector<double> GainBands(const PlanFile& file, const std::vector<Plan>& plans,
                              double unexplained, const std::optional<Profile>& other) {
  if (plans.empty()) {
    return {};
  }
  Times times(file, plans);
  const std::vector<double> expected = times.Ratios(file.profile);
  std::vector<double> squares;
  for (const double ratio : expected) {
    // The two ends: all of it shrinks as the rest does, or none.
    const double open = unexplained / (1 + unexplained) * (1 - ratio) / 2;
    squares.push_back(open * open);
  }
  const auto add = [&](const Profile& profile) {
    const std::vector<double> ratios = times.Ratios(profile);
    for (std::size_t i = 0; i < squares.size(); ++i) {
      squares[i] += (ratios[i] - expected[i]) * (ratios[i] - expected[i]);
    }
  };
  if (other) {
    add(*other);
  }
  for (const std::string& path : NumberPaths(file.profile)) {
    Profile moved = file.profile;
    const NumberRef number = NumberAt(moved, path, "profile");
    if (*number.spread > 0 && *number.value > 0) {
      *number.value /= 1 + *number.spread;
      add(moved);
    }
  }
  for (double& value : squares) {
    value = std::sqrt(value);
  }
  return squares;
}

}  // namespace shardwright
