#include <algorithm>
#include <cmath>
#include <numbers>

#include "executor/optimizer.h"

namespace shardwright {

double LearningRateAt(const ScheduleOptions& schedule, double learning_rate, std::int64_t step,
                      std::int64_t epoch) {
  const std::int64_t unit = schedule.unit == ScheduleUnit::kStep ? step : epoch;
  if (unit < schedule.warmup) {
    return learning_rate * static_cast<double>(unit + 1) / static_cast<double>(schedule.warmup + 1);
  }
  const std::int64_t done = unit - schedule.warmup;
  const std::int64_t length = std::max<std::int64_t>(schedule.total - schedule.warmup, 1);
  const double fraction =
      static_cast<double>(std::min(done, length)) / static_cast<double>(length);  // in [0, 1]
  const double final_fraction = schedule.final_fraction;
  switch (schedule.kind) {
    case ScheduleKind::kConstant:
      return learning_rate;
    case ScheduleKind::kStep: {
      // StepLR multiplies once per decay; a power would differ from it in the last bits.
      double rate = learning_rate;
      for (std::int64_t k = done / schedule.step_size; k > 0 && rate > 0.0; --k) {
        const double decayed = rate * schedule.gamma;
        if (decayed == rate) {
          break;  // gamma is 1, or the smallest number is reached
        }
        rate = decayed;
      }
      return rate;
    }
    case ScheduleKind::kCosine:
      return learning_rate *
             (final_fraction +
              (1.0 - final_fraction) * (1.0 + std::cos(std::numbers::pi * fraction)) / 2.0);
    case ScheduleKind::kLinear:
      return learning_rate * (1.0 - (1.0 - final_fraction) * fraction);
  }
  return learning_rate;
}

}  // namespace shardwright
