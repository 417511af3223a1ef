#include "tests/simulator/reference_ranks.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <map>
#include <string>
#include <tuple>

#include "core/error.h"
#include "simulator/costs/contention.h"
#include "simulator/internal/engine_state.h"

namespace shardwright {
namespace {

using internal::Cost;
using internal::kNone;
using internal::kNotDone;

// The k-th collective of one group, on all its members.
struct Exchange {
  std::size_t member_count = 0;
  std::size_t arrived = 0;
  std::int64_t duration = 0;
  std::int64_t end_bound = 0;  // no earlier, because of the members' launches
  std::vector<std::pair<std::size_t, std::size_t>> members;  // rank, op number
};

// One op of one rank, in issue order over all bodies.
struct RankOp {
  Span span;
  Cost cost;
  std::vector<std::size_t> waits;  // op numbers its edges stand for
  std::size_t before_in_group = kNone;
  Exchange* exchange = nullptr;  // of a collective
  bool has_arrived = false;      // at its exchange
  std::int64_t end = kNotDone;
};

struct RunningOp {
  std::size_t op = 0;
  bool is_running = false;
  double remaining = 0;
  double speed = 0;
  std::int64_t since = 0;
  std::int64_t end_bound = 0;
  std::int64_t finish = kNotDone;
};

struct RankState {
  const RankProgram* input = nullptr;
  std::vector<RankOp> ops;
  std::size_t next_issue = 0;
  std::int64_t host = 0;
  std::map<std::uint32_t, std::size_t> collective_counts;     // by communicator
  std::array<std::vector<std::size_t>, kStreamCount> queues;  // issued ops
  std::array<std::size_t, kStreamCount> queue_heads{};
  std::array<RunningOp, kStreamCount> running;
  std::array<std::int64_t, kStreamCount> stream_free{};
};

class ReferenceRanks {
 public:
  ReferenceRanks(std::span<const RankProgram> ranks, const AllRanksOptions& options)
      : options_(options) {
    for (std::size_t r = 0; r < ranks.size(); ++r) {
      ranks_.emplace_back();
      ranks_.back().input = &ranks[r];
    }
    for (std::size_t r = 0; r < ranks.size(); ++r) {
      Unroll(r);
    }
  }

  AllRanksResult Run();

 private:
  void Unroll(std::size_t rank);
  void AppendBody(std::size_t rank, const Body& body, Span position,
                  std::vector<std::size_t>& slots, std::vector<std::size_t>& in_group);
  Exchange& ExchangeOf(std::size_t rank, const Group& group, std::uint32_t id, std::size_t number);
  bool IssueNext(RankState& rank);
  bool TryStart(std::size_t r, std::size_t stream);
  void BeginRunning(RankState& rank, std::size_t stream, std::int64_t duration,
                    std::int64_t end_bound);
  void UpdateSpeeds();
  bool FinishDue();
  void Advance();
  [[nodiscard]] AllRanksResult Result() const;

  AllRanksOptions options_;
  std::vector<RankState> ranks_;
  // (group, first member's rank, running number of the collective in the group).
  std::map<std::tuple<std::uint32_t, std::int64_t, std::size_t>, Exchange> exchanges_;
  std::int64_t now_ = 0;
};

Exchange& ReferenceRanks::ExchangeOf(std::size_t rank, const Group& group, std::uint32_t id,
                                     std::size_t number) {
  const auto r = static_cast<std::int64_t>(rank);
  const std::int64_t block = group.size * group.stride;
  const std::int64_t first = r / block * block + r % group.stride;
  Exchange& exchange = exchanges_[{id, first, number}];
  exchange.member_count = static_cast<std::size_t>(group.size);
  return exchange;
}

void ReferenceRanks::AppendBody(std::size_t r, const Body& body, Span position,
                                std::vector<std::size_t>& slots,
                                std::vector<std::size_t>& in_group) {
  RankState& rank = ranks_[r];
  const Program& program = *rank.input->program;
  std::vector<Cost> costs;
  internal::BuildCosts(program, *rank.input->prices, costs);
  const std::size_t base = rank.ops.size();
  for (std::uint32_t i = 0; i < body.size(); ++i) {
    RankOp op;
    op.cost = costs[body.ops[i].shape.value];
    op.span = position;
    op.span.op = OpId(i);
    op.span.stream = static_cast<Stream>(op.cost.stream);
    for (const Edge edge : body.EdgesOf(OpId(i))) {
      const std::size_t target = edge.is_carried() ? slots[edge.slot()] : base + edge.value;
      if (target != kNone) {
        op.waits.push_back(target);
      }
    }
    const std::size_t number = rank.ops.size();
    if (op.cost.group != kNone) {
      op.exchange = &ExchangeOf(r, program.groups[op.cost.group], op.cost.group,
                                rank.collective_counts[op.cost.group]++);
      op.exchange->duration = std::max(op.exchange->duration, op.cost.duration);
      op.exchange->members.emplace_back(r, number);
      op.before_in_group = in_group[op.cost.group];
      in_group[op.cost.group] = number;
    } else if (!op.cost.on_host) {
      op.cost.duration = std::llround(static_cast<double>(op.cost.duration) * rank.input->slowdown);
    }
    rank.ops.push_back(op);
  }
  for (std::size_t s = 0; s < body.carries.size(); ++s) {
    if (body.carries[s].valid()) {
      slots[s] = base + body.carries[s].value;
    }
  }
}

void ReferenceRanks::Unroll(std::size_t r) {
  const Program& program = *ranks_[r].input->program;
  std::vector<std::size_t> slots(program.carry_slot_count, kNone);
  std::vector<std::size_t> in_group(program.groups.size(), kNone);
  Span position;
  position.rank = Rank(r);
  position.body = BodyKind::kInit;
  AppendBody(r, program.init, position, slots, in_group);
  for (int step = 0; step < options_.steps; ++step) {
    const bool is_warmup = step == 0 && !program.warmup.ops.empty();
    position.step = static_cast<std::uint32_t>(step);
    position.body = is_warmup ? BodyKind::kWarmup : BodyKind::kStep;
    AppendBody(r, is_warmup ? program.warmup : program.step, position, slots, in_group);
  }
}

// Issues the next op; false when there is none or the host is blocked.
bool ReferenceRanks::IssueNext(RankState& rank) {
  if (rank.next_issue == rank.ops.size()) {
    return false;
  }
  const std::size_t number = rank.next_issue;
  RankOp& op = rank.ops[number];
  op.span.issue_begin = SimTime(rank.host);
  if (op.cost.on_host) {
    std::int64_t ready = internal::kNever;
    for (const std::size_t wait : op.waits) {
      if (rank.ops[wait].end == kNotDone) {
        return false;
      }
      ready = std::max(ready, rank.ops[wait].end);
    }
    op.span.issued = op.span.issue_end = SimTime(rank.host);
    op.span.ready = SimTime(std::max(rank.host, ready));
    op.span.start = op.span.arrival = SimTime(std::max(rank.host, ready + op.cost.first));
    rank.host = op.span.start.value + op.cost.duration;
    op.span.end = SimTime(rank.host);
    op.end = rank.host;
  } else {
    op.span.issued = SimTime(rank.host + op.cost.first);
    rank.host += op.cost.issue;
    op.span.issue_end = SimTime(rank.host);
    rank.queues[op.cost.stream].push_back(number);
  }
  ++rank.next_issue;
  return true;
}

void ReferenceRanks::BeginRunning(RankState& rank, std::size_t stream, std::int64_t duration,
                                  std::int64_t end_bound) {
  RunningOp& running = rank.running[stream];
  RankOp& op = rank.ops[running.op];
  op.span.start = SimTime(now_);
  running.is_running = true;
  running.remaining = static_cast<double>(duration);
  running.speed = 0;
  running.since = now_;
  running.end_bound = end_bound;
}

// Starts the oldest unfinished op of a stream if it can start now, or lets it arrive at its
// collective.
bool ReferenceRanks::TryStart(std::size_t r, std::size_t stream) {
  RankState& rank = ranks_[r];
  RunningOp& running = rank.running[stream];
  if (running.is_running || rank.queue_heads[stream] == rank.queues[stream].size()) {
    return false;
  }
  running.op = rank.queues[stream][rank.queue_heads[stream]];
  RankOp& op = rank.ops[running.op];
  std::int64_t ready = rank.stream_free[stream];
  for (const std::size_t wait : op.waits) {
    if (rank.ops[wait].end == kNotDone) {
      return false;
    }
    ready = std::max(ready, rank.ops[wait].end);
  }
  std::int64_t arrival = std::max(ready, op.span.issued.value);
  if (op.before_in_group != kNone) {
    const std::int64_t group_free = rank.ops[op.before_in_group].end;
    if (group_free == kNotDone) {
      return false;
    }
    arrival = std::max(arrival, group_free);
  }
  if (arrival > now_) {
    running.finish = arrival;  // look again then
    return false;
  }
  const std::int64_t end_bound = op.span.issue_end.value + op.cost.tail;
  running.finish = kNotDone;
  op.span.ready = SimTime(ready);
  if (op.exchange == nullptr) {
    op.span.arrival = SimTime(arrival);
    BeginRunning(rank, stream, op.cost.duration, end_bound);
    return true;
  }
  if (op.has_arrived) {
    return false;  // waits for others
  }
  Exchange& exchange = *op.exchange;
  op.has_arrived = true;
  op.span.arrival = SimTime(arrival);
  exchange.end_bound = std::max(exchange.end_bound, end_bound);
  if (++exchange.arrived < exchange.member_count) {
    return false;
  }
  for (const auto& [member, number] : exchange.members) {
    RankState& other = ranks_[member];
    BeginRunning(other, other.ops[number].cost.stream, exchange.duration, exchange.end_bound);
  }
  return true;
}

void ReferenceRanks::UpdateSpeeds() {
  std::vector<Speeds> speeds(ranks_.size());
  for (std::size_t r = 0; r < ranks_.size(); ++r) {
    RunningClasses classes{};
    for (std::size_t s = 0; s < kStreamCount; ++s) {
      const RunningOp& running = ranks_[r].running[s];
      classes[s] = running.is_running ? ranks_[r].ops[running.op].cost.contention_class : 0;
    }
    speeds[r].fill(1);
    if (options_.contention) {
      speeds[r] = SolveSpeeds(ranks_[r].input->prices->contention, classes);
    }
  }
  for (std::size_t r = 0; r < ranks_.size(); ++r) {
    for (std::size_t s = 0; s < kStreamCount; ++s) {
      RunningOp& running = ranks_[r].running[s];
      if (!running.is_running) {
        continue;
      }
      double speed = speeds[r][s];
      const RankOp& op = ranks_[r].ops[running.op];
      if (op.exchange != nullptr) {
        for (const auto& [member, number] : op.exchange->members) {
          speed = std::min(speed, speeds[member][ranks_[member].ops[number].cost.stream]);
        }
      }
      if (speed == running.speed) {
        continue;
      }
      const auto passed = static_cast<double>(now_ - running.since);
      running.remaining = std::max(0.0, running.remaining - passed * running.speed);
      running.since = now_;
      running.speed = speed;
      const auto left = static_cast<std::int64_t>(std::ceil(running.remaining / speed));
      running.finish = std::max(now_ + left, running.end_bound);
    }
  }
}

// Moves to the next event and ends what ends there; false when nothing is left.
bool ReferenceRanks::FinishDue() {
  std::int64_t next = kNotDone;
  for (const RankState& rank : ranks_) {
    for (const RunningOp& running : rank.running) {
      next = std::min(next, running.finish);
    }
  }
  if (next == kNotDone) {
    return false;
  }
  now_ = next;
  for (RankState& rank : ranks_) {
    for (std::size_t s = 0; s < kStreamCount; ++s) {
      RunningOp& running = rank.running[s];
      if (running.finish > now_) {
        continue;
      }
      running.finish = kNotDone;
      if (running.is_running) {
        running.is_running = false;
        rank.ops[running.op].end = now_;
        rank.ops[running.op].span.end = SimTime(now_);
        rank.stream_free[s] = now_;
        ++rank.queue_heads[s];
      }
    }
  }
  return true;
}

// Issues, starts and lets arrive all that can now.
void ReferenceRanks::Advance() {
  bool changed = true;
  while (changed) {
    changed = false;
    for (std::size_t r = 0; r < ranks_.size(); ++r) {
      while (IssueNext(ranks_[r])) {
        changed = true;
      }
      for (std::size_t s = 0; s < kStreamCount; ++s) {
        changed = TryStart(r, s) || changed;
      }
    }
  }
  UpdateSpeeds();
}

AllRanksResult ReferenceRanks::Run() {
  Advance();
  while (FinishDue()) {
    Advance();
  }
  return Result();
}

AllRanksResult ReferenceRanks::Result() const {
  AllRanksResult result;
  std::vector<std::int64_t> fronts(static_cast<std::size_t>(options_.steps) + 1, 0);
  for (const RankState& rank : ranks_) {
    SW_CHECK(rank.next_issue == rank.ops.size(), "a rank is blocked for ever; Verify rejects that");
    for (const RankOp& op : rank.ops) {
      SW_CHECK(op.end != kNotDone, "an op never ran; VerifyRanks rejects that");
      const std::size_t body = op.span.body == BodyKind::kInit ? 0 : op.span.step + 1;
      fronts[body] = std::max({fronts[body], op.end, op.span.issue_end.value});
      result.spans.push_back(op.span);
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

AllRanksResult RunReferenceRanks(std::span<const RankProgram> ranks,
                                 const AllRanksOptions& options) {
  return ReferenceRanks(ranks, options).Run();
}

}  // namespace shardwright
