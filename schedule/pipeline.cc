// Orders of actions, schedule by schedule. Each generator is torch's, without its idle slots.

#include "schedule/pipeline.h"

#include <algorithm>
#include <map>
#include <utility>

namespace shardwright {
namespace {

using Kind = StageAction::Kind;

// Writes passes of the next micro-batch of a stage.
class Writer {
 public:
  explicit Writer(std::int64_t micro_batches) : micro_batches_(micro_batches) {}

  void Add(std::int64_t stage, Kind kind, bool joins_next = false) {
    const Kind counted = kind == Kind::kForward ? kind : Kind::kBackward;
    actions_.push_back(
        {static_cast<std::int32_t>(stage), kind, next_[{stage, counted}]++, joins_next});
    if (kind == Kind::kInputGrads) {
      pending_.push_back(actions_.back());
    }
  }
  // The oldest weight gradients that are left out so far, of any stage or of one; if there are any.
  void AddWeights(std::int64_t stage = -1) {
    const auto found = std::find_if(pending_.begin(), pending_.end(), [&](const StageAction& a) {
      return stage < 0 || a.stage == stage;
    });
    if (found != pending_.end()) {
      actions_.push_back({found->stage, Kind::kWeightGrads, found->micro_batch});
      pending_.erase(found);
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

// Two stages per rank. A phase is so many times the passes in its text: F forward, B backward, I of
// inputs, V of weights, the oldest left out so far; of the rank's second stage in small letters. W:
// the oldest V or v; "(": the next two are one.
struct Phase {
  std::int64_t count = 0;
  std::string_view passes;
};
std::vector<StageAction> WritePhases(const Pipeline& p, std::int64_t rank,
                                     const std::vector<Phase>& phases) {
  Writer writer(p.micro_batches);
  bool joins = false;
  const auto write = [&](char pass) {
    const bool is_second = pass >= 'a';
    const std::int64_t stage = is_second ? 2 * p.ranks - 1 - rank : rank;
    const char kind = static_cast<char>(is_second ? pass - 'a' + 'A' : pass);
    if (pass == '(') {
      joins = true;
    } else if (kind == 'W' || kind == 'V') {
      writer.AddWeights(kind == 'W' ? -1 : stage);
    } else {
      writer.Add(stage,
                 kind == 'F'   ? Kind::kForward
                 : kind == 'B' ? Kind::kBackward
                               : Kind::kInputGrads,
                 std::exchange(joins, false));
    }
  };
  for (const Phase& phase : phases) {
    for (std::int64_t i = 0; i < phase.count; ++i) {
      std::for_each(phase.passes.begin(), phase.passes.end(), write);
    }
  }
  return writer.Take();
}

bool IsV(PipelineSchedule schedule) {
  return schedule == PipelineSchedule::kZbv || schedule == PipelineSchedule::kDualPipeV;
}

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
  const std::int64_t hops = (p.ranks - 1 - rank) * (v == 1 || is_split ? 1 : 2);
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

std::vector<StageAction> Zbv(const Pipeline& p, std::int64_t rank) {
  const std::int64_t full = std::max(2 * p.ranks - 1, p.micro_batches), left = p.ranks - rank;
  return WritePhases(p, rank,
                     {{2 * left - 1, "F"},
                      {rank, "fF"},
                      {left, "fiW"},
                      {full - (2 * p.ranks - 1 - rank), "FIWfiW"},
                      {left - 1, "IWfiW"},
                      {rank, "Ii"},
                      {left, "IV"},
                      {p.ranks, "v"},
                      {p.ranks, "V"}});
}

std::vector<StageAction> DualPipeV(const Pipeline& p, std::int64_t rank) {
  const std::int64_t left = p.ranks - rank - 1;  // ranks behind this one
  const std::int64_t both = p.micro_batches - 2 * p.ranks + rank + 1;
  // Of the last backwards half is without weights, from the first stage on where rank is even.
  const std::int64_t half = (rank + 1) / 2;
  const bool is_even = rank % 2 == 0;
  return WritePhases(p, rank,
                     {{2 * left, "F"},
                      {rank + 1, "Ff"},
                      {left, "iWf"},
                      {1, left > 0 ? "(Fb(fB" : "Fb(fB"},
                      {both - 1, "(Fb(fB"},
                      {left, "b(fB"},
                      {half, "bB"},
                      {is_even ? 1 : 0, "bI"},
                      {rank + 1 - half - (is_even ? 1 : 0), "iI"},
                      {left, "WI"},
                      {rank + 1, "W"}});
}

}  // namespace

std::string WhyNot(const Pipeline& p) {
  if (HasOneStagePerRank(p.schedule) && p.stages_per_rank != 1) {
    return "one stage per rank";
  }
  if (IsV(p.schedule) && p.stages_per_rank != 2) {
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

std::int64_t RankOfStage(const Pipeline& p, std::int64_t stage) {
  const std::int64_t place = stage % p.ranks;
  return IsV(p.schedule) && stage >= p.ranks ? p.ranks - 1 - place : place;
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
    case PipelineSchedule::kZbv:
      return Zbv(p, rank);
    case PipelineSchedule::kDualPipeV:
      return DualPipeV(p, rank);
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
  constexpr std::array<std::string_view, 10> kNames = {
      "F", "B", "I", "W", "SEND_F", "RECV_F", "SEND_B", "RECV_B", "WAIT", "REDUCE_GRAD"};
  std::string text;
  bool is_second = false;  // of a pair of passes
  for (const StageAction& action : actions) {
    const bool is_first = action.joins_next && action.kind == Kind::kForward;
    text += is_first ? "(" : "";
    text += std::to_string(action.stage);
    text += kNames[static_cast<std::size_t>(action.kind)];
    text += action.kind < Kind::kWaitForSends ? std::to_string(action.micro_batch) : "";
    text += is_second ? ")OVERLAP_F_B" : "";
    text += is_first ? ";" : (action.joins_next ? "+" : ",");
    is_second = is_first;
  }
  text.pop_back();
  return text;
}

}  // namespace shardwright
