#include "tests/simulator/all_ranks.h"

#include <algorithm>
#include <cmath>
#include <map>
#include <memory>
#include <string>
#include <utility>

#include "core/error.h"
#include "simulator/internal/engine_state.h"
#include "simulator/internal/event_loop.h"
#include "topologies/mesh.h"

namespace shardwright {
namespace {

using internal::BodyRun;
using internal::Cost;
using internal::EventLoop;
using internal::kNotDone;

// The last collective of one group that a member has come to. Members of one communicator run their
// collectives one at a time, so there is no other.
struct Exchange {
  std::size_t member_count = 0;
  std::int64_t duration = 0;
  std::int64_t end_bound = 0;  // no earlier, because of the members' launches
  std::vector<std::pair<std::size_t, std::size_t>> members;  // rank, stream
};

struct RankState {
  const RankProgram* input = nullptr;
  internal::EventState events;
  std::vector<std::int64_t> arrivals;  // by op number; of collectives
  std::vector<Exchange*> exchanges;    // by communicator
  std::unique_ptr<EventLoop> loop;
};

class AllRanks final : public internal::Peers {
 public:
  AllRanks(std::span<const RankProgram> inputs, const AllRanksOptions& options);
  AllRanksResult Run();
  void Arrive(std::size_t rank, std::size_t stream) override;

 private:
  Exchange* ExchangeOf(std::size_t rank, const Group& group, std::uint32_t id);
  [[nodiscard]] Exchange* ExchangeAt(const RankState& rank, std::size_t stream) const;
  void UpdateSpeeds();
  [[nodiscard]] AllRanksResult Result() const;

  EngineOptions options_;
  std::vector<RankState> ranks_;
  std::map<std::pair<std::uint32_t, std::int64_t>, Exchange> exchanges_;  // group, first member
  std::int64_t now_ = 0;
};

AllRanks::AllRanks(std::span<const RankProgram> inputs, const AllRanksOptions& options)
    : ranks_(inputs.size()) {
  options_.contention = options.contention;
  options_.max_steps = options.steps;
  for (std::size_t r = 0; r < inputs.size(); ++r) {
    RankState& rank = ranks_[r];
    rank.input = &inputs[r];
    const Program& program = *rank.input->program;
    internal::BuildCosts(program, *rank.input->prices, rank.events.costs);
    for (Cost& cost : rank.events.costs) {
      if (cost.group == internal::kNone && !cost.on_host) {
        cost.duration = std::llround(static_cast<double>(cost.duration) * rank.input->slowdown);
      }
    }
    for (std::uint32_t g = 0; g < program.groups.size(); ++g) {
      rank.exchanges.push_back(ExchangeOf(r, program.groups[g], g));
    }
    rank.loop =
        std::make_unique<EventLoop>(program, *rank.input->prices, options_, rank.events, this, r);
  }
}

Exchange* AllRanks::ExchangeOf(std::size_t rank, const Group& group, std::uint32_t id) {
  Exchange& exchange = exchanges_[{id, PlaceInGroup(group, Rank(rank)).base}];
  exchange.member_count = static_cast<std::size_t>(group.size);
  return &exchange;
}

// Of the head of a stream; null where that is no collective.
Exchange* AllRanks::ExchangeAt(const RankState& rank, std::size_t stream) const {
  const std::uint32_t group = rank.loop->HeadOf(stream).cost->group;
  return group == internal::kNone ? nullptr : rank.exchanges[group];
}

void AllRanks::Arrive(std::size_t r, std::size_t stream) {
  RankState& rank = ranks_[r];
  const internal::StreamHead& head = rank.loop->HeadOf(stream);
  rank.arrivals.resize(rank.events.records.size());
  rank.arrivals[head.op] = now_;
  Exchange& exchange = *ExchangeAt(rank, stream);
  if (exchange.members.size() == exchange.member_count) {  // the one before is over
    exchange.members.clear();
    exchange.duration = exchange.end_bound = 0;
  }
  exchange.members.emplace_back(r, stream);
  exchange.duration = std::max(exchange.duration, head.cost->duration);
  exchange.end_bound =
      std::max(exchange.end_bound, rank.loop->RecordOf(head.op).issue_end + head.cost->tail);
  if (exchange.members.size() == exchange.member_count) {
    for (const auto& [member, of_member] : exchange.members) {
      ranks_[member].loop->Start(of_member, exchange.duration, exchange.end_bound);
    }
  }
}

// A collective is as slow as on its slowest member.
void AllRanks::UpdateSpeeds() {
  if (std::none_of(ranks_.begin(), ranks_.end(),
                   [](const RankState& rank) { return rank.loop->SpeedsMayChange(); })) {
    return;
  }
  std::vector<const Speeds*> speeds;
  for (const RankState& rank : ranks_) {
    speeds.push_back(&rank.loop->FindSpeeds());
  }
  for (std::size_t r = 0; r < ranks_.size(); ++r) {
    for (const std::size_t stream : ranks_[r].loop->Running()) {
      double speed = (*speeds[r])[stream];
      if (const Exchange* exchange = ExchangeAt(ranks_[r], stream)) {
        for (const auto& [member, of_member] : exchange->members) {
          speed = std::min(speed, (*speeds[member])[of_member]);
        }
      }
      ranks_[r].loop->SetSpeed(stream, speed);
    }
  }
}

AllRanksResult AllRanks::Run() {
  while (now_ != kNotDone) {
    for (const RankState& rank : ranks_) {
      rank.loop->StartDue();
    }
    UpdateSpeeds();
    std::int64_t next = kNotDone;
    for (const RankState& rank : ranks_) {
      next = std::min(next, rank.loop->NextEvent());
    }
    now_ = next;
    for (const RankState& rank : ranks_) {
      if (next != kNotDone) {
        rank.loop->FinishDue(next);
      }
    }
  }
  return Result();
}

AllRanksResult AllRanks::Result() const {
  AllRanksResult result;
  std::vector<std::int64_t> fronts(static_cast<std::size_t>(options_.max_steps) + 1, 0);
  for (std::size_t r = 0; r < ranks_.size(); ++r) {
    const RankState& rank = ranks_[r];
    const std::vector<BodyRun>& runs = rank.events.runs;
    SW_CHECK(runs.size() == fronts.size() &&
                 std::all_of(runs.begin(), runs.end(),
                             [](const BodyRun& run) { return run.IsComplete(); }),
             "a rank is blocked for ever; VerifyRanks rejects that");
    std::size_t number = result.spans.size();
    rank.loop->AppendSpans(result.spans, [](const BodyRun&) { return true; });
    for (std::size_t b = 0; b < runs.size(); ++b) {
      fronts[b] = std::max({fronts[b], runs[b].last_end, runs[b].host_end});
      for (std::uint32_t i = 0; i < runs[b].body->size(); ++i, ++number) {
        Span& span = result.spans[number];
        span.rank = Rank(r);
        if (rank.loop->CostOf(runs[b], runs[b].base + i).group != internal::kNone) {
          span.arrival = SimTime(rank.arrivals[runs[b].base + i]);
        }
      }
    }
  }
  result.init = SimTime(fronts[0]);
  for (std::size_t b = 1; b < fronts.size(); ++b) {
    fronts[b] = std::max(fronts[b], fronts[b - 1]);
    result.step_times.emplace_back(fronts[b] - fronts[b - 1]);
  }
  return result;
}

}  // namespace

AllRanksResult RunAllRanks(std::span<const RankProgram> ranks, const AllRanksOptions& options) {
  if (ranks.empty() || ranks.size() > kMostSimulatedRanks) {
    throw InputError("ranks", std::to_string(ranks.size()),
                     "1 to " + std::to_string(kMostSimulatedRanks) + " ranks simulated one by one");
  }
  for (const RankProgram& rank : ranks) {
    for (const Group& group : rank.program->groups) {
      if (!Tiles(group, std::ssize(ranks))) {
        throw InputError(
            "group " + group.name,
            std::to_string(group.size) + " ranks, " + std::to_string(group.stride) + " apart",
            "groups that tile " + std::to_string(ranks.size()) + " ranks");
      }
    }
  }
  return AllRanks(ranks, options).Run();
}

}  // namespace shardwright
