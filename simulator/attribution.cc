// Follows waits backwards: from an op to the op or the host that it waited for, and so on.
//
// Example: compute idles from 20 to 30 us before op C. C waited for gather G, which ran from 24 to
// 30. G waited for the host, which issued it from 18 to 24. The gap of 10 us is charged with 6 us
// to G and 4 us to the host's issuing of G. So the gap is not G's fault alone: a faster link saves
// 6 us at most.
//
// The critical path is the same walk from the op that ends last, over one whole period.

#include "simulator/attribution.h"

#include <array>
#include <map>
#include <tuple>

#include "core/error.h"
#include "core/ranges.h"
#include "core/threads.h"
#include "schedule/plan_names.h"

namespace shardwright {
namespace {

// An op of the explained step, or of one of the steps before it.
struct At {
  std::uint32_t op = OpId::kNoneValue;
  std::int32_t steps_back = 0;
  [[nodiscard]] bool valid() const { return op != OpId::kNoneValue; }
};

class Explainer {
 public:
  Explainer(const Program& program, std::span<const Span> spans, SimTime period)
      : program_(program), body_(program.step), spans_(spans), period_(period.value) {
    FindPredecessors();
  }

  Attribution Run();

 private:
  void FindPredecessors();
  [[nodiscard]] std::int64_t Shift(At at) const { return at.steps_back * period_; }
  [[nodiscard]] std::int64_t StartOf(At at) const { return spans_[at.op].start.value - Shift(at); }
  [[nodiscard]] std::int64_t EndOf(At at) const { return spans_[at.op].end.value - Shift(at); }
  [[nodiscard]] const OpShape& ShapeOf(At at) const { return program_.ShapeOf(body_.ops[at.op]); }
  [[nodiscard]] bool RunsOnHost(At at) const { return InfoOf(ShapeOf(at).code).runs_on_host; }
  [[nodiscard]] At IssuedBefore(At at) const {
    return at.op > 0 ? At{at.op - 1, at.steps_back}
                     : At{static_cast<std::uint32_t>(body_.size() - 1), at.steps_back + 1};
  }
  [[nodiscard]] At TargetOf(At at, Edge edge) const;
  [[nodiscard]] At BindingOp(At at, std::int64_t time) const;

  // Follows what bounds the start of an op back in time, from `time` to `until`, and hands each
  // stretch to `charge`, latest first.
  template <class Charge>
  void WalkBack(At at, std::int64_t time, std::int64_t until, const Charge& charge) const;

  [[nodiscard]] TimeShare KeyOf(const PathSegment& segment) const;
  // By what they have in common: all but their time and count.
  using Shares = std::map<std::tuple<TimeUse, OpCode, Phase, Stream, std::uint32_t>, TimeShare>;
  static void Add(Shares& shares, const TimeShare& key, std::int64_t time);
  [[nodiscard]] static std::vector<TimeShare> Sorted(const Shares& shares);

  const Program& program_;
  const Body& body_;
  std::span<const Span> spans_;  // of the step, by op
  std::int64_t period_;
  std::vector<At> before_on_stream_;
  std::vector<At> before_in_group_;
};

void Explainer::FindPredecessors() {
  const std::size_t n = body_.size();
  std::array<std::uint32_t, kStreamCount> stream;
  stream.fill(OpId::kNoneValue);
  std::vector<std::uint32_t> group(program_.groups.size(), OpId::kNoneValue);
  before_on_stream_.resize(n);
  before_in_group_.resize(n);
  // The first round finds the last op of each stream, which comes before the next step's first.
  for (int round = 0; round < 2; ++round) {
    std::array<std::int32_t, kStreamCount> stream_back;
    stream_back.fill(1);
    std::vector<std::int32_t> group_back(group.size(), 1);
    for (std::uint32_t i = 0; i < n; ++i) {
      ThrowIfStopped();
      const OpShape& shape = program_.ShapeOf(body_.ops[i]);
      const auto s = static_cast<std::size_t>(shape.stream);
      before_on_stream_[i] = {stream[s], stream_back[s]};
      stream[s] = i;
      stream_back[s] = 0;
      if (InfoOf(shape.code).is_collective) {
        const std::uint32_t g = shape.group.value;
        before_in_group_[i] = {group[g], group_back[g]};
        group[g] = i;
        group_back[g] = 0;
      }
    }
  }
}

At Explainer::TargetOf(At at, Edge edge) const {
  if (!edge.is_carried()) {
    return {edge.value, at.steps_back};
  }
  // A slot that the step does not set was set before the first step and holds nothing up.
  const bool is_set = edge.slot() < body_.carries.size() && body_.carries[edge.slot()].valid();
  return is_set ? At{body_.carries[edge.slot()].value, at.steps_back + 1} : At{};
}

// The op that ended last of all that `at` waited for, no later than `time`.
At Explainer::BindingOp(At at, std::int64_t time) const {
  At best;
  const auto consider = [&](At other) {
    if (other.valid() && EndOf(other) <= time && (!best.valid() || EndOf(other) > EndOf(best))) {
      best = other;
    }
  };
  for (const Edge edge : body_.EdgesOf(OpId(at.op))) {
    consider(TargetOf(at, edge));
  }
  if (!RunsOnHost(at)) {
    At before = before_on_stream_[at.op];
    before.steps_back += at.steps_back;
    consider(before);
    before = before_in_group_[at.op];
    before.steps_back += at.steps_back;
    consider(before);
  }
  return best;
}

template <class Charge>
void Explainer::WalkBack(At at, std::int64_t time, std::int64_t until, const Charge& charge) const {
  // Charges [begin, now) and returns the new present.
  const auto spend = [&](TimeUse use, At on, std::int64_t begin, std::int64_t now) {
    begin = std::max(begin, until);
    if (begin >= now) {
      return now;
    }
    charge(PathSegment{OpId(on.op), use, on.steps_back, SimTime(begin), SimTime(now)});
    return begin;
  };
  bool on_host = false;  // false: `at` started at `time`; true: the host was done with it then
  while (time > until) {
    const Span& span = spans_[at.op];
    At next;
    if (!on_host) {
      time = spend(TimeUse::kPeer, at, span.arrival.value - Shift(at), time);
      next = BindingOp(at, time);
      const std::int64_t issued = span.issued.value - Shift(at);
      on_host = !next.valid() || issued >= EndOf(next);
      time = spend(TimeUse::kOther, at, on_host ? issued : EndOf(next), time);
      if (on_host) {
        continue;
      }
    } else {
      const std::int64_t host_begin = span.issue_begin.value - Shift(at);
      const At waited = RunsOnHost(at) ? BindingOp(at, time) : At{};
      if (!waited.valid() || EndOf(waited) <= host_begin) {
        time = spend(TimeUse::kHostIssue, at, host_begin, time);
        at = IssuedBefore(at);
        continue;
      }
      // Its own work, or the wake-up after what it waited for.
      time = spend(TimeUse::kHostIssue, at, EndOf(waited), time);
      next = waited;
    }
    // Go on with an op that ended at `time`.
    at = next;
    on_host = RunsOnHost(at);
    if (!on_host) {
      time = spend(TimeUse::kRun, at, StartOf(at), time);
    }
  }
}

TimeShare Explainer::KeyOf(const PathSegment& segment) const {
  const Op& op = body_.ops[segment.op.value];
  const OpShape& shape = program_.ShapeOf(op);
  TimeShare share;
  share.use = segment.use;
  share.code = shape.code;
  share.phase = op.phase;
  share.stream = shape.stream;
  const bool is_model_op = shape.code == OpCode::kCompute || shape.code == OpCode::kAccumulateGrad;
  share.unit = is_model_op ? kNoSubject : op.subject;
  return share;
}

void Explainer::Add(Shares& shares, const TimeShare& key, std::int64_t time) {
  TimeShare& share =
      shares.try_emplace({key.use, key.code, key.phase, key.stream, key.unit}, key).first->second;
  share.time += SimTime(time);
  ++share.count;
}

std::vector<TimeShare> Explainer::Sorted(const Shares& by_key) {
  std::vector<TimeShare> shares;
  for (const auto& [key, share] : by_key) {
    shares.push_back(share);
  }
  SortByTime(shares);
  return shares;
}

Attribution Explainer::Run() {
  Attribution result;
  result.step_time = SimTime(period_);
  At last;  // the op that ends last
  Shares idle, critical;
  for (std::uint32_t i = 0; i < spans_.size(); ++i) {
    ThrowIfStopped();
    const At at{i, 0};
    if (!last.valid() || EndOf(at) > EndOf(last)) {
      last = at;
    }
    if (spans_[i].stream != Stream::kCompute) {
      continue;
    }
    result.compute_busy += spans_[i].end - spans_[i].start;
    const std::int64_t idle_since = EndOf(before_on_stream_[i]);
    WalkBack(at, StartOf(at), idle_since, [&](const PathSegment& segment) {
      Add(idle, KeyOf(segment), (segment.end - segment.begin).value);
    });
  }
  result.idle = Sorted(idle);

  const std::int64_t end = EndOf(last);
  std::vector<PathSegment>& path = result.critical_path;
  const auto charge = [&](const PathSegment& segment) { path.push_back(segment); };
  const std::int64_t begin = std::max(StartOf(last), end - period_);
  if (begin < end) {
    path.push_back({OpId(last.op), TimeUse::kRun, 0, SimTime(begin), SimTime(end)});
  }
  WalkBack(last, begin, end - period_, charge);
  std::reverse(path.begin(), path.end());
  for (const PathSegment& segment : path) {
    Add(critical, KeyOf(segment), (segment.end - segment.begin).value);
  }
  result.critical = Sorted(critical);
  return result;
}

}  // namespace

std::string_view NameOf(TimeUse use) {
  // In the order of TimeUse.
  constexpr std::array<std::string_view, 4> kNames = {"run", "host issue", "peer", "other"};
  return NameIn(kNames, use);
}

void SortByTime(std::vector<TimeShare>& shares) {
  SortAll(shares, [](const TimeShare& a, const TimeShare& b) {
    return std::tuple(-a.time.value, a.use, a.code, a.phase, a.stream, a.unit) <
           std::tuple(-b.time.value, b.use, b.code, b.phase, b.stream, b.unit);
  });
}

Attribution Explain(const Program& program, std::span<const Span> spans, SimTime period) {
  SW_CHECK(spans.size() >= program.step.size() && !program.step.ops.empty(), "no step to explain");
  return Explainer(program, spans.last(program.step.size()), period).Run();
}

}  // namespace shardwright
