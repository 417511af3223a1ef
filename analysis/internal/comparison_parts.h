#pragma once

// What comparisons of our own traces and of foreign recordings share.

#include <algorithm>
#include <array>
#include <cmath>
#include <functional>
#include <span>
#include <vector>

#include "analysis/compare.h"
#include "analysis/step_breakdown.h"
#include "schedule/program.h"
#include "simulator/costs/price.h"
#include "simulator/engine.h"

namespace shardwright::internal {

// Rows with `simulated` and `measured`: largest difference first.
template <class T>
void SortByDifference(std::vector<T>& rows) {
  std::stable_sort(rows.begin(), rows.end(), [](const T& a, const T& b) {
    return std::abs(a.measured.value - a.simulated.value) >
           std::abs(b.measured.value - b.simulated.value);
  });
}

[[nodiscard]] std::vector<StepPart> PartsOf(const StepBreakdown& simulated,
                                            const StepBreakdown& measured);
// The largest sum over the device's categories, and its split.
void FindPeak(const Trace& trace, Bytes& peak, std::array<Bytes, kCategoryCount>& at_peak);
// Profile numbers that price a class (topologies/profile.h).
[[nodiscard]] const char* FieldsOf(OpClass op_class);
// The one that brings the simulation nearest to the measurement first.
void SortCalibrations(Comparison& comparison);

// Simulates again with scaled prices.
class Recalibration {
 public:
  struct Input {
    const Program& program;
    const PriceTable& prices;
    EngineOptions engine;
  };
  // How many times longer a shape takes, when the classes take `factors` times longer.
  using FactorOf = std::function<double(const OpShape&, std::span<const double> factors)>;

  Recalibration(const Input& input, FactorOf factor_of)
      : input_(input), factor_of_(std::move(factor_of)) {}

  [[nodiscard]] Seconds StepTime(std::span<const double> factors, double issue_factor);

 private:
  Input input_;
  FactorOf factor_of_;
  EngineWorkspace workspace_;
};

}  // namespace shardwright::internal
