// Skipping of repeats in the engine without contention; see LinearCopies.

#include <algorithm>

#include "core/error.h"
#include "simulator/internal/engine_linear.h"

namespace shardwright::internal {
namespace {

// One term of a maximum: its value in copy B and how much it grows from copy to copy.
struct Term {
  std::int64_t value = 0;
  std::int64_t increment = 0;
};

// The comparison of one copy with the one before, op by op.
class Comparison {
 public:
  Comparison(const LinearState& state, const CopyPair& pair, std::int64_t limit)
      : state_(state), pair_(pair), body_(*state.body), limit_(limit) {}

  std::int64_t Run() {
    const auto& a = pair_.a->simulated;
    const auto& b = pair_.b->simulated;
    if (pair_.a_end - pair_.a_begin != pair_.b_end - pair_.b_begin) {
      return 0;  // the copies skipped different inner repeats
    }
    is_first_ = true;
    for (std::size_t r = 0; r < pair_.b_end - pair_.b_begin && limit_ > 0; ++r) {
      const OpRange range = b[pair_.b_begin + r];
      const OpRange other = a[pair_.a_begin + r];
      if (other.begin + pair_.shift != range.begin || other.end + pair_.shift != range.end) {
        return 0;
      }
      for (std::uint32_t i = range.begin; i < range.end && limit_ > 0; ++i) {
        CompareOp(i);
      }
    }
    return limit_;
  }

 private:
  // The maximum of several terms is `result` in this copy and has to stay linear.
  void Begin(Term result) {
    result_ = result;
    is_attained_ = false;
  }
  void Add(Term term) {
    if (term.value == result_.value) {
      // A tie with a term that falls back would change what the op waits for: not yet periodic.
      if (term.increment == result_.increment) {
        is_attained_ = true;
      } else {
        limit_ = 0;
      }
    } else if (term.increment > result_.increment) {
      const std::int64_t gap = result_.value - term.value;
      limit_ = std::min(limit_, (gap - 1) / (term.increment - result_.increment));
    }
  }
  void End() {
    if (!is_attained_) {
      limit_ = 0;
    }
  }
  void Require(bool condition) {
    if (!condition) {
      limit_ = 0;
    }
  }

  [[nodiscard]] std::int64_t EndB(std::uint32_t op) const { return pair_.b->end[op]; }
  [[nodiscard]] std::int64_t EndOf(Edge edge) const {
    return edge.is_carried() ? state_.slots[edge.slot()] : EndB(edge.value);
  }
  [[nodiscard]] std::int64_t IncrementOf(std::uint32_t op) const {
    return pair_.b->end[op] - pair_.a->end[op - pair_.shift];
  }

  void AddEdge(std::uint32_t i, std::size_t index, Edge edge, std::int64_t extra);
  void AddFarEdge(std::uint32_t i, std::size_t index, std::int64_t extra);
  void CompareOp(std::uint32_t i);
  void CompareHostOp(std::uint32_t i, const Cost& cost, Term host);
  void CompareDeviceOp(std::uint32_t i, const Cost& cost, Term issued);
  void CompareGap(const OpRecord& record, Term issued, Term stream, std::int64_t increment);

  const LinearState& state_;
  const CopyPair& pair_;
  const Body& body_;
  std::int64_t limit_ = 0;
  Term result_;
  bool is_attained_ = false;
  bool is_first_ = true;
  std::uint32_t seen_streams_ = 0;  // bit s: copy B already had an op on stream s
  std::uint32_t seen_groups_ = 0;
};

void Comparison::AddEdge(std::uint32_t i, std::size_t index, Edge edge, std::int64_t extra) {
  if (edge.is_carried()) {
    if (pair_.shift != 0) {
      AddFarEdge(i, index, extra);
      return;
    }
    const std::int64_t before = (*pair_.slots_before)[edge.slot()];
    Add({before + extra, (*pair_.slots_after)[edge.slot()] - before});
    return;
  }
  const std::uint32_t target = edge.value;
  if (pair_.shift == 0) {
    Add({EndB(target) + extra, IncrementOf(target)});
    return;
  }
  const std::uint32_t twin = EdgesOf(body_, i - pair_.shift)[index].value;
  if (twin + pair_.shift != target) {
    AddFarEdge(i, index, extra);
    return;
  }
  if (target < pair_.run_begin) {
    limit_ = 0;  // the copies before this one are still a different part of the program
    return;
  }
  // The coming copies meet the target's twins in the copies up to B, which must be linear already.
  const std::uint32_t copy_begin = pair_.b->simulated[pair_.b_begin].begin;
  if (target >= copy_begin) {
    Add({EndB(target) + extra, IncrementOf(target)});
    return;
  }
  const std::int64_t increment = EndB(target + pair_.shift) - EndB(target);
  for (std::uint32_t t = target + pair_.shift; t < copy_begin; t += pair_.shift) {
    Require(EndB(t + pair_.shift) - EndB(t) == increment);
  }
  Add({EndB(target) + extra, increment});
}

// An edge that reaches ever further back, or to before the body, has known targets: look at each of
// them.
void Comparison::AddFarEdge(std::uint32_t i, std::size_t index, std::int64_t extra) {
  for (std::int64_t m = 0; m <= limit_; ++m) {
    const auto copy = static_cast<std::uint32_t>(i + m * pair_.shift);
    const Edge edge = EdgesOf(body_, copy)[index];
    const bool is_known = edge.is_carried() || edge.value < pair_.run_begin;
    if (!is_known || EndOf(edge) + extra >= result_.value + m * result_.increment) {
      limit_ = std::max<std::int64_t>(m - 1, 0);
      return;
    }
  }
}

void Comparison::CompareOp(std::uint32_t i) {
  const Cost& cost = state_.costs[body_.ops[i].shape.value];
  const OpRecord& b = pair_.b->records[i];
  const OpRecord& a = pair_.a->records[i - pair_.shift];
  const Term issued{b.issued, b.issued - a.issued};
  if (is_first_) {
    // The next copy's first op is issued when this copy's last one has been.
    Require(pair_.after->host - pair_.before->host == issued.increment);
    is_first_ = false;
  }
  if (cost.on_host) {
    CompareHostOp(i, cost, issued);
  } else {
    CompareDeviceOp(i, cost, issued);
  }
}

void Comparison::CompareHostOp(std::uint32_t i, const Cost& cost, Term host) {
  const std::int64_t start = pair_.b->records[i].start;
  Begin({start, start - pair_.a->records[i - pair_.shift].start});
  Require(result_.increment == host.increment);  // so that the time blocked stays the same
  Require(IncrementOf(i) == result_.increment);
  Add(host);
  const auto edges = EdgesOf(body_, i);
  for (std::size_t e = 0; e < edges.size() && limit_ > 0; ++e) {
    AddEdge(i, e, edges[e], cost.first);
  }
  End();
}

void Comparison::CompareDeviceOp(std::uint32_t i, const Cost& cost, Term issued) {
  const OpRecord& b = pair_.b->records[i];
  const OpRecord& a = pair_.a->records[i - pair_.shift];
  const std::uint8_t s = cost.stream;
  // The first op of a stream follows the last one of the copy before.
  Term stream{b.stream_free, b.stream_free - a.stream_free};
  if ((seen_streams_ >> s & 1u) == 0) {
    stream.increment = pair_.after->stream[s] - pair_.before->stream[s];
    seen_streams_ |= 1u << s;
  }
  Begin({b.start, b.start - a.start});
  Add(issued);
  Add(stream);
  if (cost.group != kNone) {
    Term group{b.group_free, b.group_free - a.group_free};
    if ((seen_groups_ >> cost.group & 1u) == 0) {
      group.increment = pair_.after->group[cost.group] - pair_.before->group[cost.group];
      seen_groups_ |= 1u << cost.group;
    }
    Add(group);
  }
  const auto edges = EdgesOf(body_, i);
  for (std::size_t e = 0; e < edges.size() && limit_ > 0; ++e) {
    AddEdge(i, e, edges[e], 0);
  }
  End();
  const Term start = result_;
  if (s == static_cast<std::uint8_t>(Stream::kCompute)) {
    CompareGap(b, issued, stream, start.increment);
  }
  Begin({EndB(i), IncrementOf(i)});
  Require(result_.increment == start.increment);  // so that busy times stay the same
  Add({start.value + cost.duration, start.increment});
  Add({issued.value - cost.first + cost.issue + cost.tail, issued.increment});
  End();
}

// Keeps the idle time of the compute stream before an op, and its split, the same.
void Comparison::CompareGap(const OpRecord& record, Term issued, Term stream,
                            std::int64_t increment) {
  Require(stream.increment == increment);
  const std::int64_t lead = record.stream_free - record.issued;
  if (lead < 0) {
    Require(issued.increment == stream.increment);
  } else if (issued.increment > stream.increment) {
    limit_ = std::min(limit_, lead / (issued.increment - stream.increment));
  }
}

// Writes the ends of `copies` copies of [begin, begin + period) behind it: each op grows by what it
// grew from the copy before.
void FillEnds(std::vector<std::int64_t>& ends, std::uint32_t begin, std::uint32_t period,
              std::int64_t copies) {
  const std::int64_t* const a = ends.data() + begin - period;
  const std::int64_t* const b = ends.data() + begin;
  for (std::int64_t m = 0; m < copies; ++m) {
    const std::int64_t* const row = b + m * period;
    std::int64_t* const next = ends.data() + begin + (m + 1) * period;
    for (std::uint32_t j = 0; j < period; ++j) {
      next[j] = row[j] + (b[j] - a[j]);
    }
  }
}

void RunRange(LinearState& state, std::uint32_t begin, std::uint32_t end);

// Runs the copies of `repeat`, skipping all that follow linearly except the last one: a later
// comparison of whole micro-batches then sees both ends of what was skipped, and whatever holds at
// both ends of a linear stretch holds inside.
void RunRepeat(LinearState& state, const Repeat& repeat) {
  const std::vector<Repeat>& repeats = *state.repeats;
  std::size_t previous_log = 0;
  int comparable = 0;  // copies run one after another
  for (std::uint32_t c = 0; c < repeat.count; ++c) {
    const std::uint32_t begin = repeat.first + c * repeat.period;
    const std::size_t log = state.times.simulated.size();
    const Clock before = state.clock;
    const Totals totals_before = state.totals;
    RunRange(state, begin, begin + repeat.period);
    ++comparable;
    const std::int64_t left = static_cast<std::int64_t>(repeat.count) - 1 - c;
    if (comparable >= 2 && left >= 2) {
      CopyPair pair;
      pair.a = pair.b = &state.times;
      pair.shift = repeat.period;
      pair.a_begin = previous_log;
      pair.a_end = pair.b_begin = log;
      pair.b_end = state.times.simulated.size();
      pair.before = &before;
      pair.after = &state.clock;
      pair.run_begin = repeat.first;
      const std::int64_t copies = LinearCopies(state, pair, left - 1);
      if (copies > 0) {
        FillEnds(state.times.end, begin, repeat.period, copies);
        const Clock after = state.clock;
        const Totals totals_after = state.totals;
        AddScaled(state.clock, before, after, copies);
        AddScaled(state.totals, totals_before, totals_after, copies);
        c += static_cast<std::uint32_t>(copies);
        const std::uint32_t next = repeat.first + (c + 1) * repeat.period;
        while (state.repeat_cursor < repeats.size() && repeats[state.repeat_cursor].first < next) {
          ++state.repeat_cursor;
        }
        comparable = 0;
      }
    }
    previous_log = log;
  }
}

void RunRange(LinearState& state, std::uint32_t begin, std::uint32_t end) {
  const std::vector<Repeat>& repeats = *state.repeats;
  std::uint32_t position = begin;
  while (state.repeat_cursor < repeats.size() && repeats[state.repeat_cursor].first < end) {
    const Repeat& repeat = repeats[state.repeat_cursor++];
    AdvanceLinear(state, position, repeat.first);
    RunRepeat(state, repeat);
    position = repeat.first + repeat.period * repeat.count;
  }
  AdvanceLinear(state, position, end);
}

}  // namespace

std::int64_t LinearCopies(const LinearState& state, const CopyPair& pair, std::int64_t limit) {
  return Comparison(state, pair, limit).Run();
}

void RunBodyLinear(LinearState& state) {
  const auto size = static_cast<std::uint32_t>(state.body->size());
  state.repeat_cursor = 0;
  RunRange(state, 0, size);
}

}  // namespace shardwright::internal
