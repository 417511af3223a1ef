#include "executor/internal/loss_book.h"

#include <algorithm>
#include <cmath>
#include <span>
#include <utility>

namespace shardwright {

void Runtime::LossBook::Open(std::int64_t step) {
  const std::lock_guard lock(mutex_);
  next_ = step;
  ends_ = false;
}

bool Runtime::LossBook::Begin(std::int64_t step) {
  const std::lock_guard lock(mutex_);
  if (step >= next_ && ends_) {
    return false;
  }
  next_ = std::max(next_, step + 1);
  return true;
}

std::int64_t Runtime::LossBook::NextStep() {
  const std::lock_guard lock(mutex_);
  return next_;
}

bool Runtime::LossBook::Ends() {
  const std::lock_guard lock(mutex_);
  return ends_;
}

void Runtime::LossBook::Enter(std::int64_t step, Rank rank, const RankReport& of_rank) {
  const std::lock_guard lock(mutex_);
  Page& page = open_[step];
  page.losses.resize(static_cast<std::size_t>(mesh_.RankCount()));
  page.losses[rank.value] = of_rank.losses;
  page.end = std::max(page.end, of_rank.end);
  if (!page.squared_norm.has_value()) {  // the same on all ranks
    page.squared_norm = of_rank.squared_norm;
  }
  ends_ = ends_ || of_rank.asks_to_stop;
  if (++page.entered < mesh_.RankCount()) {
    return;
  }
  StepReport report;
  report.step = step;
  report.end = page.end;
  std::int64_t count = 0;
  // In a fixed order: a fixed sum.
  const std::int64_t ranks = mesh_.StageRanks();
  for (const auto& its : std::span(page.losses).subspan(stage_ * ranks, ranks)) {
    for (const float loss : its) {
      report.loss += static_cast<double>(loss);
      ++count;
    }
  }
  report.loss /= static_cast<double>(std::max<std::int64_t>(count, 1));
  if (page.squared_norm.has_value()) {
    report.gradient_norm = std::sqrt(static_cast<double>(*page.squared_norm));
  }
  ends_ = ends_ || (options_.stops_at_nan && !std::isfinite(report.loss));
  open_.erase(step);
  reports_.push_back(report);
  if (options_.on_step) {
    options_.on_step(report);
  }
}

std::vector<StepReport> Runtime::LossBook::Take() {
  const std::lock_guard lock(mutex_);
  return std::exchange(reports_, {});
}

}  // namespace shardwright
