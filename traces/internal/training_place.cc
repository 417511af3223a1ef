#include "traces/internal/training_place.h"

#include <iterator>
#include <tuple>

#include "core/ranges.h"

namespace shardwright::internal {
namespace {

constexpr std::string_view kFsdp = "FSDP::";
constexpr std::string_view kStep = "ProfilerStep#";
constexpr std::string_view kAutogradRange = "autograd::engine::evaluate_function";
constexpr std::string_view kOptimizerRange = "Optimizer.";

}  // namespace

bool IsMarker(std::string_view name) {
  return name.starts_with(kFsdp) || name.starts_with(kStep) || name.starts_with(kAutogradRange) ||
         name.starts_with(kOptimizerRange);
}

PlaceFinder::PlaceFinder(const RawRecording& raw) : raw_(raw) {
  FindSteps();
  AddEdges();
}

// "FSDP::pre_forward (layers.0)" -> kPreForward, "layers.0"; the root has no parentheses, or empty
// ones.
PlaceFinder::Mark PlaceFinder::MarkOf(std::string_view name, std::string_view& unit) {
  unit = {};
  if (name.starts_with(kAutogradRange)) {
    return Mark::kAutograd;
  }
  if (name.starts_with(kOptimizerRange)) {
    return Mark::kOptimizer;
  }
  if (!name.starts_with(kFsdp)) {
    return Mark::kNone;
  }
  name.remove_prefix(kFsdp.size());
  const std::size_t open = name.find(" (");
  if (open != std::string_view::npos && name.ends_with(')')) {
    unit = name.substr(open + 2, name.size() - open - 3);
    name = name.substr(0, open);
  }
  static constexpr std::pair<std::string_view, Mark> kMarks[] = {
      {"root_pre_forward", Mark::kRootPreForward},
      {"pre_forward", Mark::kPreForward},
      {"post_forward", Mark::kPostForward},
      {"pre_backward", Mark::kPreBackward},
      {"post_backward_accumulate", Mark::kPostBackward},
      {"post_backward_reshard", Mark::kPostBackward},
      {"post_backward_reduce", Mark::kPostBackward},
      {"root_post_backward_callback", Mark::kRootPostBackward},
      {"all_gather", Mark::kInside},
      {"all_gather_copy_out", Mark::kInside}};
  const auto* const found = FindIf(kMarks, [&](const auto& row) { return row.first == name; });
  return found == std::end(kMarks) ? Mark::kNone : found->second;
}

std::uint32_t PlaceFinder::UnitNumber(std::string_view name) {
  const auto [found, is_new] =
      unit_numbers_.emplace(name, static_cast<std::uint32_t>(units_.size()));
  if (is_new) {
    units_.emplace_back(name);
    is_on_stack_.push_back(false);
  }
  return found->second;
}

void PlaceFinder::FindSteps() {
  std::vector<RawSpan> optimizers;
  for (const RawSpan& range : raw_.ranges) {
    const std::string& name = raw_.names.names()[range.name];
    if (name.starts_with(kStep)) {
      steps_.push_back(range);
    } else if (name.starts_with("Optimizer.step")) {
      optimizers.push_back(range);
    }
  }
  const auto by_time = [](const RawSpan& a, const RawSpan& b) {
    return std::tie(a.begin, a.end) < std::tie(b.begin, b.end);
  };
  SortAll(steps_, by_time);
  if (!steps_.empty()) {
    return;
  }
  std::int64_t first = INT64_MAX, last = INT64_MIN;
  const auto widen = [&](const RawSpan& span) {
    first = std::min(first, span.begin);
    last = std::max(last, span.end);
  };
  std::for_each(raw_.ranges.begin(), raw_.ranges.end(), widen);
  std::for_each(raw_.host.begin(), raw_.host.end(), widen);
  for (const RawLaunch& launch : raw_.launches) {
    widen({launch.begin, launch.end});
  }
  for (const RawWork& work : raw_.work) {
    widen(work.span);
  }
  SortAll(optimizers, by_time);
  std::int64_t begin = first;
  for (const RawSpan& range : optimizers) {
    if (range.end > begin) {
      steps_.push_back({begin, range.end, range.name, range.thread});
      begin = range.end;
    }
  }
  note_ = steps_.empty() ? "no ProfilerStep and no Optimizer.step: all is taken as one step"
                         : "no ProfilerStep: a step ends with its Optimizer.step";
  if (steps_.empty() && first <= last) {
    steps_.push_back({first, last, 0, 0});
  }
}

void PlaceFinder::AddEdges() {
  std::uint32_t order = 0;
  // Texts are few, ranges many.
  std::vector<std::pair<Mark, std::uint32_t>> known(raw_.names.names().size(),
                                                    {Mark::kNone, kNoSubject});
  for (std::size_t i = 0; i < known.size(); ++i) {
    std::string_view unit;
    known[i].first = MarkOf(raw_.names.names()[i], unit);
    const bool has_unit = known[i].first < Mark::kAutograd;
    if (has_unit) {
      known[i].second = UnitNumber(unit);
      has_units_ = true;
    }
  }
  root_ = has_units_ ? UnitNumber("") : kNoSubject;
  for (const RawSpan& range : raw_.ranges) {
    const auto [mark, unit] = known[range.name];
    if (mark != Mark::kNone) {
      edges_.push_back({range.begin, order, unit, mark, true});
      edges_.push_back({range.end, order, unit, mark, false});
      ++order;
    }
  }
  SortAll(edges_, [](const Edge& a, const Edge& b) {
    return std::tie(a.time, a.is_begin, a.order) < std::tie(b.time, b.is_begin, b.order);
  });
}

void PlaceFinder::BeginStep(std::uint32_t step) {
  step_ = step;
  in_step_ = true;
  micro_batch_ = 0;
  after_backward_ = in_backward_ = false;
  ClearUnits();
  inside_.clear();
}

void PlaceFinder::BeginForward() {
  micro_batch_ += after_backward_ ? 1 : 0;
  after_backward_ = false;
}

void PlaceFinder::EndBackward() {
  in_backward_ = false;
  after_backward_ = true;
  ClearUnits();
}

void PlaceFinder::PushUnit(std::uint32_t unit) {
  if (!is_on_stack_[unit]) {
    is_on_stack_[unit] = true;
    stack_.push_back(unit);
  }
}

void PlaceFinder::PopUnit(std::uint32_t unit) {
  is_on_stack_[unit] = false;
  while (!stack_.empty() && !is_on_stack_[stack_.back()]) {
    stack_.pop_back();
  }
}

void PlaceFinder::ClearUnits() {
  for (const std::uint32_t unit : stack_) {
    is_on_stack_[unit] = false;
  }
  stack_.clear();
}

void PlaceFinder::Apply(const Edge& edge) {
  switch (edge.mark) {
    case Mark::kRootPreForward:
      if (edge.is_begin && !in_backward_) {
        BeginForward();
        ClearUnits();
      }
      return;
    case Mark::kPreForward:
      if (edge.is_begin) {
        PushUnit(edge.unit);
      }
      return;
    case Mark::kPostForward:
      if (!edge.is_begin) {
        PopUnit(edge.unit);
      }
      return;
    case Mark::kPreBackward:
      if (edge.is_begin) {
        in_backward_ = true;
        PushUnit(edge.unit);
      }
      return;
    case Mark::kPostBackward:
      if (edge.is_begin) {
        inside_.push_back(edge.unit);
      } else if (!inside_.empty()) {
        inside_.pop_back();
        PopUnit(edge.unit);
      }
      return;
    case Mark::kRootPostBackward:
      if (!edge.is_begin) {
        EndBackward();
      }
      return;
    case Mark::kInside:
      if (edge.is_begin) {
        inside_.push_back(edge.unit);
      } else if (!inside_.empty()) {
        inside_.pop_back();
      }
      return;
    case Mark::kAutograd:
      autograd_ = edge.is_begin ? autograd_ + 1 : std::max(autograd_, 1U) - 1;
      return;
    case Mark::kOptimizer:
      optimizer_ = edge.is_begin ? optimizer_ + 1 : std::max(optimizer_, 1U) - 1;
      return;
    case Mark::kNone:
      return;
  }
}

TrainingPlace PlaceFinder::At(std::int64_t time) {
  const auto next_step = [&] { return in_step_ ? step_ + 1 : 0; };
  // Steps begin before anything else that happens at their first moment.
  while (next_ < edges_.size() && edges_[next_].time <= time) {
    while (next_step() < steps_.size() && steps_[next_step()].begin <= edges_[next_].time) {
      BeginStep(next_step());
    }
    Apply(edges_[next_++]);
  }
  while (next_step() < steps_.size() && steps_[next_step()].begin <= time) {
    BeginStep(next_step());
  }
  TrainingPlace place;
  place.step = in_step_ && time <= steps_[step_].end ? step_ : kNoSubject;
  place.unit = !inside_.empty() ? inside_.back() : !stack_.empty() ? stack_.back() : root_;
  if (optimizer_ > 0) {
    place.phase = Phase::kOptimizer;
    place.unit = kNoSubject;
  } else if (has_units_) {
    place.phase = in_backward_      ? Phase::kBackward
                  : after_backward_ ? Phase::kOptimizer
                                    : Phase::kForward;
  } else {
    if (autograd_ > 0 && !after_backward_) {
      after_backward_ = true;
    } else if (autograd_ == 0) {
      BeginForward();
    }
    place.phase = autograd_ > 0 ? Phase::kBackward : Phase::kForward;
  }
  place.micro_batch = static_cast<std::uint16_t>(std::min<std::uint32_t>(micro_batch_, UINT16_MAX));
  return place;
}

}  // namespace shardwright::internal
