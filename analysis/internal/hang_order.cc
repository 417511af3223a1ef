#include "analysis/internal/hang_order.h"

#include <limits>
#include <string>

#include "analysis/internal/hang_calls.h"
#include "core/ranges.h"
#include "schedule/plan_names.h"

namespace shardwright::internal {
namespace {

constexpr std::size_t kMostPlaceWork = 20'000'000;

bool IsGroupOf(const Group& group, const std::vector<std::int64_t>& ranks) {
  return group.size == std::ssize(ranks) && group.stride == ranks[1] - ranks[0] &&
         ranks.back() - ranks.front() == group.stride * (group.size - 1);
}

HangPhase PhaseOf(Phase phase) {
  return phase == Phase::kInit        ? HangPhase::kUnknown
         : phase == Phase::kForward   ? HangPhase::kForward
         : phase == Phase::kOptimizer ? HangPhase::kOptimizer
                                      : HangPhase::kBackward;
}

std::string HangOpOf(OpCode code) {
  switch (code) {
    case OpCode::kAllGather:
      return "all-gather";
    case OpCode::kReduceScatter:
      return "reduce-scatter";
    case OpCode::kAllReduce:
      return "all-reduce";
    case OpCode::kBroadcast:
      return "broadcast";
    case OpCode::kAllToAll:
    case OpCode::kPermute:
      return "all_to_all";
    default:
      return "barrier";
  }
}

}  // namespace

std::vector<HangCall> StepOf(const Program& program, const std::vector<std::int64_t>& ranks) {
  std::vector<HangCall> step;
  for (const Op& op : program.step.ops) {
    const OpShape& shape = program.ShapeOf(op);
    if (!InfoOf(shape.code).is_collective || !IsGroupOf(program.groups[shape.group.value], ranks)) {
      continue;
    }
    HangCall call;
    call.op = HangOpOf(shape.code);
    call.place = &op - program.step.ops.data();
    if (shape.code == OpCode::kAllGather || shape.code == OpCode::kReduceScatter ||
        shape.code == OpCode::kAllReduce) {
      call.elements = shape.bytes.value / SizeOf(shape.dtype);
      const auto dtype = static_cast<std::size_t>(shape.dtype);
      call.dtype = dtype < kTrainingDTypeNames.size() ? kTrainingDTypeNames[dtype] : "";
    }
    call.phase = PhaseOf(op.phase);
    call.micro_batch = op.phase == Phase::kOptimizer ? -1 : op.micro_batch;
    if (op.subject != kNoSubject && op.subject < program.units.size() &&
        shape.code != OpCode::kCompute) {
      call.units = {program.units[op.subject].name};
    }
    step.push_back(std::move(call));
  }
  return step;
}

bool IsInStep(const std::vector<HangCall>& step, const HangCall& call) {
  return AnyOf(step, [&](const HangCall& planned) { return AreAlike(planned, call); });
}

std::vector<StepPlace> PlacesAfter(const std::vector<HangCall>& step,
                                   std::span<const HangCall> calls, bool from_start) {
  constexpr int kNotPlanned = 2;  // a call that the program does not have
  constexpr int kNotMade = 3;     // a call of the program that was not made
  struct State {
    int cost = 0;
    std::int64_t step = 0;
  };
  const std::size_t most = kMostPlaceWork / step.size();
  if (calls.size() > most) {
    calls = calls.subspan(calls.size() - most);
    from_start = false;
  }
  std::vector<State> now(step.size(), State{from_start ? kNotMade : 0, from_start ? -1 : 0});
  now[0] = State{0, 0};
  std::vector<State> next(step.size());
  const auto pass_on = [&](std::size_t from, const State& state, int cost, std::vector<State>& to) {
    const bool wraps = from + 1 == step.size();
    State moved = state;
    moved.cost += cost;
    moved.step += wraps && state.step >= 0 ? 1 : 0;
    State& there = to[wraps ? 0 : from + 1];
    if (moved.cost < there.cost || (moved.cost == there.cost && moved.step > there.step)) {
      there = moved;
      return true;
    }
    return false;
  };
  for (const HangCall& call : calls) {
    for (std::size_t i = 0; i < step.size(); ++i) {
      next[i] = now[i];
      next[i].cost += kNotPlanned;
    }
    for (std::size_t i = 0; i < step.size(); ++i) {
      if (AreAlike(step[i], call)) {
        (void)pass_on(i, now[i], 0, next);
      }
    }
    // Twice around: a gap may reach over the end of the step.
    for (std::size_t i = 0, without = 0; i < 2 * step.size() && without < step.size(); ++i) {
      const std::size_t at = i % step.size();
      without = pass_on(at, next[at], kNotMade, next) ? 0 : without + 1;
    }
    now.swap(next);
  }
  int least = std::numeric_limits<int>::max();
  for (const State& state : now) {
    least = std::min(least, state.cost);
  }
  std::vector<StepPlace> places;
  for (std::size_t i = 0; i < now.size(); ++i) {
    if (now[i].cost == least) {
      places.push_back({i, from_start ? now[i].step : -1});
    }
  }
  return places;
}

std::vector<HangCall> ContinuationOf(std::span<const HangCall> calls, std::size_t count) {
  // Numbers for calls, so that they are compared once.
  std::vector<HangCall> kinds;
  std::vector<std::size_t> reversed;
  for (std::size_t i = calls.size(); i-- > 0;) {
    const auto known = FindIf(kinds, [&](const HangCall& kind) {
      return AreAlike(kind, calls[i]) && kind.site == calls[i].site;
    });
    reversed.push_back(static_cast<std::size_t>(known - kinds.begin()));
    if (known == kinds.end()) {
      constexpr std::size_t kMostKinds = 2000;
      if (kinds.size() == kMostKinds) {
        return {};
      }
      kinds.push_back(calls[i]);
    }
  }
  // match[i]: how much of the beginning stands at i once more (the Z algorithm).
  const std::size_t size = reversed.size();
  std::vector<std::size_t> match(size, 0);
  std::size_t best = 0, left = 0, right = 0;
  for (std::size_t i = 1; i < size; ++i) {
    match[i] = i < right ? std::min(right - i, match[i - left]) : 0;
    while (i + match[i] < size && reversed[match[i]] == reversed[i + match[i]]) {
      ++match[i];
    }
    if (i + match[i] > right) {
      left = i;
      right = i + match[i];
    }
    if (match[i] > match[best]) {
      best = i;
    }
  }
  std::vector<HangCall> result;
  if (best == 0) {
    return result;
  }
  for (std::size_t k = 0; k < count; ++k) {
    HangCall call = calls[size - best + k % best];
    call.created = 0;
    call.is_over = false;
    result.push_back(std::move(call));
  }
  return result;
}

}  // namespace shardwright::internal
