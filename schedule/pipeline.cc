// Orders of actions, schedule by schedule. Each generator is torch's, without its idle slots.

#include "schedule/pipeline.h"

#include <map>
#include <set>
#include <span>
#include <tuple>
#include <utility>

#include "core/ranges.h"

namespace shardwright {
namespace {

using Kind = StageAction::Kind;

// Writes passes of the next micro-batch of a stage.
class Writer {
 public:
  explicit Writer(std::int64_t micro_batches) : micro_batches_(micro_batches) {}

  void Add(std::int64_t stage, Kind kind) {
    const Kind counted = kind == Kind::kInputGrads ? Kind::kBackward : kind;
    actions_.push_back({static_cast<std::int32_t>(stage), kind, next_[{stage, counted}]++});
    if (kind == Kind::kInputGrads) {
      pending_.push_back(actions_.back());
    }
  }
  // A forward and a backward pass that other ranks see as one.
  void AddPair(std::int64_t forward, std::int64_t backward) {
    Add(forward, Kind::kForward);
    actions_.back().joins_next = true;
    Add(backward, Kind::kBackward);
  }
  // The oldest weight gradients that are left out so far, if there are any.
  void AddWeights() {
    if (!pending_.empty()) {
      const StageAction& oldest = pending_.front();
      actions_.push_back({oldest.stage, Kind::kWeightGrads, oldest.micro_batch});
      pending_.erase(pending_.begin());
    }
  }
  // Without micro-batches that are not there.
  [[nodiscard]] std::vector<StageAction> Take() {
    std::erase_if(actions_, [&](const StageAction& a) { return a.micro_batch >= micro_batches_; });
    return std::move(actions_);
  }

 private:
  std::int64_t micro_batches_;
  std::map<std::pair<std::int64_t, Kind>, std::int32_t> next_;
  std::vector<StageAction> pending_, actions_;
};

bool HasOneStagePerRank(PipelineSchedule schedule) {
  return schedule == PipelineSchedule::kGPipe || schedule == PipelineSchedule::k1F1B;
}

bool HasRounds(PipelineSchedule schedule) {
  return schedule == PipelineSchedule::kInterleaved1F1B ||
         schedule == PipelineSchedule::kInterleavedZeroBubble;
}

std::int64_t RoundsOf(const Pipeline& p) {
  return std::max<std::int64_t>(1, p.micro_batches / p.ranks);
}

// Stage by stage; backward takes stages and micro-batches the other way round (LoopedBFS).
std::vector<StageAction> BreadthFirst(const Pipeline& p, std::int64_t rank) {
  std::vector<StageAction> actions;
  const auto add = [&](std::int64_t local, Kind kind, std::int64_t m) {
    actions.push_back(
        {static_cast<std::int32_t>(local * p.ranks + rank), kind, static_cast<std::int32_t>(m)});
  };
  for (std::int64_t k = 0; k < p.stages_per_rank; ++k) {
    for (std::int64_t m = 0; m < p.micro_batches; ++m) {
      add(k, Kind::kForward, m);
    }
  }
  for (std::int64_t k = p.stages_per_rank; k-- > 0;) {
    for (std::int64_t m = 0; m < p.micro_batches; ++m) {
      const bool is_gpipe = p.schedule == PipelineSchedule::kGPipe;
      add(k, Kind::kBackward, is_gpipe ? m : p.micro_batches - 1 - m);
    }
  }
  return actions;
}

// Warm-up, then a forward before each backward. With weight gradients apart these lag by as many
// as there are ranks before this one.
std::vector<StageAction> OneForwardOneBackward(const Pipeline& p, std::int64_t rank) {
  const bool is_split = p.schedule == PipelineSchedule::kInterleavedZeroBubble;
  const std::int64_t per_round = p.micro_batches / RoundsOf(p), v = p.stages_per_rank;
  const std::int64_t passes = v * p.micro_batches;
  const std::int64_t hops =
      (p.ranks - 1 - rank) * (p.schedule == PipelineSchedule::k1F1B || is_split ? 1 : 2);
  const std::int64_t warm_up = std::min((v - 1) * per_round + hops, passes);
  Writer writer(p.micro_batches);
  for (std::int64_t i = 0; i < warm_up + passes; ++i) {
    if (i < passes) {
      writer.Add(i / per_round % v * p.ranks + rank, Kind::kForward);
    }
    if (const std::int64_t back = i - warm_up; back >= 0) {
      const std::int64_t stage = (v - 1 - back / per_round % v) * p.ranks + rank;
      writer.Add(stage, is_split ? Kind::kInputGrads : Kind::kBackward);
      if (back >= rank) {
        writer.AddWeights();
      }
    }
  }
  for (std::int64_t i = 0; i < rank; ++i) {
    writer.AddWeights();
  }
  return writer.Take();
}

// ScheduleZBVZeroBubble. Passes of micro-batches that are not there are left out.
std::vector<StageAction> ZeroBubbleV(const Pipeline& p, std::int64_t rank) {
  const std::int64_t near = rank, far = 2 * p.ranks - 1 - rank;
  const std::int64_t count = std::max(2 * p.ranks - 1, p.micro_batches);
  Writer writer(p.micro_batches);
  const auto add = [&](std::int64_t times, std::int64_t stage, const std::vector<Kind>& kinds) {
    for (std::int64_t i = 0; i < times; ++i) {
      for (const Kind kind : kinds) {
        writer.Add(stage, kind);
      }
    }
  };
  add(far - near, near, {Kind::kForward});
  for (std::int64_t i = 0; i < rank; ++i) {
    writer.Add(far, Kind::kForward);
    writer.Add(near, Kind::kForward);
  }
  const std::vector<Kind> all = {Kind::kForward, Kind::kInputGrads, Kind::kWeightGrads};
  add(p.ranks - rank, far, all);
  for (std::int64_t i = 0; i < count - p.ranks; ++i) {
    add(i < count - far ? 1 : 0, near, {Kind::kForward});
    add(1, near, {Kind::kInputGrads, Kind::kWeightGrads});
    add(1, far, all);
  }
  for (std::int64_t i = 0; i < rank; ++i) {
    writer.Add(near, Kind::kInputGrads);
    writer.Add(far, Kind::kInputGrads);
  }
  add(p.ranks - rank, near, {Kind::kInputGrads, Kind::kWeightGrads});
  add(rank, far, {Kind::kWeightGrads});
  add(rank, near, {Kind::kWeightGrads});
  return writer.Take();
}

// ScheduleDualPipeV, in the steps that its comments count.
std::vector<StageAction> DualPipe(const Pipeline& p, std::int64_t rank) {
  const std::int64_t near = rank, far = 2 * p.ranks - 1 - rank, behind = p.ranks - 1 - rank;
  Writer writer(p.micro_batches);
  const auto repeat = [](std::int64_t times, const auto& step) {
    for (std::int64_t i = 0; i < times; ++i) {
      step(i);
    }
  };
  repeat(2 * behind, [&](std::int64_t) { writer.Add(near, Kind::kForward); });
  repeat(rank + 1, [&](std::int64_t) {
    writer.Add(near, Kind::kForward);
    writer.Add(far, Kind::kForward);
  });
  repeat(behind, [&](std::int64_t) {
    writer.Add(far, Kind::kInputGrads);
    writer.AddWeights();
    writer.Add(far, Kind::kForward);
  });
  repeat(p.micro_batches - far, [&](std::int64_t i) {
    if (i == 0 && behind == 0) {
      writer.Add(near, Kind::kForward);
      writer.Add(far, Kind::kBackward);
    } else {
      writer.AddPair(near, far);
    }
    writer.AddPair(far, near);
  });
  repeat(behind, [&](std::int64_t) {
    writer.Add(far, Kind::kBackward);
    writer.AddPair(far, near);
  });
  // The second half of what is left is split: of an odd rank from the far stage on.
  Kind kind = Kind::kBackward;
  repeat(rank + 1, [&](std::int64_t i) {
    const bool turns = i == (rank + 1) / 2;
    kind = turns && rank % 2 == 1 ? Kind::kInputGrads : kind;
    writer.Add(far, kind);
    kind = turns ? Kind::kInputGrads : kind;
    writer.Add(near, kind);
  });
  repeat(behind, [&](std::int64_t) {
    writer.AddWeights();
    writer.Add(near, kind);
  });
  repeat(rank + 1, [&](std::int64_t) { writer.AddWeights(); });
  return writer.Take();
}

// Gathers the next three stages that the rank runs, drops others, and reduces a stage's gradients
// behind its last backward pass (_add_unshard_reshard and _add_reduce_grad).
std::vector<StageAction> AddGathers(const Pipeline& p, const std::vector<StageAction>& passes) {
  constexpr std::size_t kMostStages = 3;
  std::vector<StageAction> actions;
  std::vector<std::int32_t> active;
  std::map<std::int32_t, std::int64_t> done;
  for (std::size_t i = 0; i < passes.size(); ++i) {
    std::vector<std::int32_t> next;
    for (std::size_t k = i; k < passes.size() && next.size() < kMostStages; ++k) {
      if (!IsIn(next, passes[k].stage)) {
        next.push_back(passes[k].stage);
      }
    }
    const auto lacks = [](const std::vector<std::int32_t>& list, std::int32_t stage) {
      return !IsIn(list, stage);
    };
    for (const std::int32_t stage : std::vector<std::int32_t>(active)) {
      if (lacks(next, stage)) {
        actions.push_back({stage, Kind::kDrop, 0});
        std::erase(active, stage);
      }
    }
    for (const std::int32_t stage : next) {
      if (lacks(active, stage)) {
        actions.push_back({stage, Kind::kGather, 0});
        active.push_back(stage);
      }
    }
    actions.push_back(passes[i]);
    if ((passes[i].kind == Kind::kBackward || passes[i].kind == Kind::kWeightGrads) &&
        ++done[passes[i].stage] == p.micro_batches) {
      actions.push_back({passes[i].stage, Kind::kReduceGrads, 0});
    }
  }
  for (const std::int32_t stage : active) {
    actions.push_back({stage, Kind::kDrop, 0});
  }
  return actions;
}

// _add_send_recv: ranks in turns take their next action once what it needs has come. A receive
// stands where its send was issued; a stage of the same rank needs neither.
std::vector<StageAction> AddTransfersInTurns(const Pipeline& p, std::int64_t rank) {
  using Key = std::tuple<Kind, std::int32_t, std::int32_t>;
  const auto ranks = static_cast<std::size_t>(p.ranks);
  const std::int64_t stages = p.ranks * p.stages_per_rank;
  std::vector<std::vector<StageAction>> todo(ranks), actions(ranks);
  std::set<Key> come;
  for (std::size_t r = 0; r < ranks; ++r) {
    todo[r] = AddGathers(p, ActionsOf(p, static_cast<std::int64_t>(r)));
  }
  const auto is_forward = [](const StageAction& a) { return a.kind == Kind::kForward; };
  const auto needs = [&](const StageAction& a) {
    return Key{is_forward(a) ? Kind::kReceiveActivation : Kind::kReceiveGradient, a.stage,
               a.micro_batch};
  };
  const auto is_ready = [&](const StageAction& a) {
    return a.kind > Kind::kInputGrads || a.stage == (is_forward(a) ? 0 : stages - 1) ||
           come.contains(needs(a));
  };
  const auto send = [&](std::size_t r, const StageAction& a) {
    const StageAction to = {a.stage + (is_forward(a) ? 1 : -1), a.kind, a.micro_batch};
    if (a.kind > Kind::kInputGrads || to.stage < 0 || to.stage >= stages) {
      return;
    }
    come.insert(needs(to));
    if (const auto other = static_cast<std::size_t>(RankOf(p, to.stage)); other != r) {
      actions[r].push_back(
          {a.stage, is_forward(a) ? Kind::kSendActivation : Kind::kSendGradient, a.micro_batch});
      actions[other].push_back({to.stage, std::get<0>(needs(to)), a.micro_batch});
    }
  };
  std::vector<std::size_t> next(ranks, 0);
  for (bool goes_on = true; goes_on;) {
    goes_on = false;
    for (std::size_t r = 0; r < ranks; ++r) {
      const std::span<const StageAction> left = std::span(todo[r]).subspan(next[r]);
      if (left.empty()) {
        continue;
      }
      const std::span<const StageAction> taken = left.first(left.front().joins_next ? 2 : 1);
      if (!std::all_of(taken.begin(), taken.end(), is_ready)) {
        continue;
      }
      goes_on = true;
      next[r] += taken.size();
      actions[r].insert(actions[r].end(), taken.begin(), taken.end());
      for (const StageAction& a : taken) {
        send(r, a);
      }
    }
  }
  std::vector<StageAction>& found = actions[static_cast<std::size_t>(rank)];
  found.push_back({static_cast<std::int32_t>(rank), Kind::kWaitForSends, 0});
  return std::move(found);
}

}  // namespace

std::int64_t RankOf(const Pipeline& p, std::int64_t stage) {
  const bool goes_up = IsVShaped(p.schedule) && stage / p.ranks % 2 == 1;
  return goes_up ? p.ranks - 1 - stage % p.ranks : stage % p.ranks;
}

std::int64_t StageAt(const Pipeline& p, std::int64_t rank, std::int64_t place) {
  return place * p.ranks + RankOf(p, place * p.ranks + rank);
}

std::string WhyNot(const Pipeline& p) {
  if (HasOneStagePerRank(p.schedule) && p.stages_per_rank != 1) {
    return "one stage per rank";
  }
  if (IsVShaped(p.schedule) && p.stages_per_rank != 2) {
    return "two stages per rank";
  }
  const std::int64_t least = p.schedule == PipelineSchedule::k1F1B        ? p.ranks
                             : p.schedule == PipelineSchedule::kDualPipeV ? 2 * p.ranks
                                                                          : 1;
  if (p.micro_batches < least) {
    return std::to_string(least) + " micro-batches or more";
  }
  if (HasRounds(p.schedule) && p.micro_batches % RoundsOf(p) != 0) {
    return "micro-batches that make " + std::to_string(RoundsOf(p)) + " equal rounds";
  }
  return "";
}

std::vector<StageAction> ActionsOf(const Pipeline& p, std::int64_t rank) {
  switch (p.schedule) {
    case PipelineSchedule::kGPipe:
    case PipelineSchedule::kLoopedBfs:
      return BreadthFirst(p, rank);
    case PipelineSchedule::k1F1B:
    case PipelineSchedule::kInterleaved1F1B:
    case PipelineSchedule::kInterleavedZeroBubble:
      return OneForwardOneBackward(p, rank);
    case PipelineSchedule::kZbvZeroBubble:
      return ZeroBubbleV(p, rank);
    case PipelineSchedule::kDualPipeV:
      return DualPipe(p, rank);
  }
  return {};
}

std::vector<StageAction> ActionsInTurn(std::int64_t micro_batches) {
  std::vector<StageAction> actions;
  for (std::int32_t m = 0; m < micro_batches; ++m) {
    actions.push_back({0, Kind::kForward, m});
    actions.push_back({0, Kind::kBackward, m});
  }
  return actions;
}

// GPipe sends behind each pass and waits for all sends when a direction ends. 1F1B joins what it
// sends to a rank with what it receives from there next, while the pipeline is full; while it fills
// or empties it waits for a send before the next one (_step_microbatches of both classes).
std::vector<StageAction> AddTransfers(const Pipeline& p, std::int64_t rank) {
  if (!HasOneStagePerRank(p.schedule)) {
    return AddTransfersInTurns(p, rank);
  }
  const std::vector<StageAction> passes = ActionsOf(p, rank);
  const bool in_turns = p.schedule == PipelineSchedule::k1F1B;
  std::vector<StageAction> actions;
  bool is_sending = false;
  const auto transfer = [&](const StageAction& pass, bool sends, bool joins_next = false) {
    const bool is_forward = pass.kind == Kind::kForward;
    if (is_forward == sends ? rank + 1 == p.ranks : rank == 0) {
      return;  // no rank there
    }
    const Kind kind = is_forward ? (sends ? Kind::kSendActivation : Kind::kReceiveActivation)
                                 : (sends ? Kind::kSendGradient : Kind::kReceiveGradient);
    actions.push_back({pass.stage, kind, pass.micro_batch, joins_next});
    is_sending = is_sending || (sends && !joins_next);
  };
  const auto wait = [&] {
    if (std::exchange(is_sending, false)) {
      actions.push_back({static_cast<std::int32_t>(rank), Kind::kWaitForSends, 0});
    }
  };
  for (std::size_t i = 0; i < passes.size(); ++i) {
    const bool is_last = i + 1 == passes.size();
    const bool turns = is_last || passes[i + 1].kind != passes[i].kind;
    transfer(passes[i], false);
    actions.push_back(passes[i]);
    const bool joins = in_turns && turns && !is_last;
    if (in_turns) {
      wait();
    }
    transfer(passes[i], true, joins);
    if (turns && (!in_turns || is_last)) {
      wait();
    }
  }
  actions.push_back({static_cast<std::int32_t>(rank), Kind::kReduceGrads, 0});
  return actions;
}

std::string ActionsText(const std::vector<StageAction>& actions) {
  constexpr std::array<std::string_view, 12> kNames = {
      "F",      "B",      "I",    "W",           "SEND_F",  "RECV_F",
      "SEND_B", "RECV_B", "WAIT", "REDUCE_GRAD", "UNSHARD", "RESHARD"};
  std::string text;
  for (const StageAction& action : actions) {
    text += std::to_string(action.stage);
    text += kNames[static_cast<std::size_t>(action.kind)];
    text += action.kind < Kind::kWaitForSends ? std::to_string(action.micro_batch) : "";
    text += action.joins_next ? "+" : ",";
  }
  text.pop_back();
  return text;
}

}  // namespace shardwright
