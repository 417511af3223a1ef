// When units begin and end, forward and backward: the events that the walker goes by.
//
// Example: the root holds ops 0 to 7, block A ops 1 to 3, block B ops 4 to 6.
//
//   forward    enter root before 0, A before 1, B before 4; leave A behind 3, B behind 6, root last
//   backward   enter root at 7, B at 6, A at 3; leave B behind 4, A behind 1, root behind 0
//
// Where two units begin with one op the outer one is first, and where they end with one op the
// inner one. Events lie in one array, sorted by op, with an index per op. Finding them costs O(n
// log n) for n stretches of units; asking for those of an op costs O(1).

#include <utility>

#include "core/ranges.h"
#include "schedule/lower/walker.h"

namespace shardwright {
namespace {

struct Stretch {
  std::uint32_t unit = 0;
  UnitSpans::Span span;
  UnitSpans::Ends ends;
  std::size_t index = 0;  // among the unit's backward stretches
};

// Sorts outer calls first: a call that begins before others, or ends behind them. Of calls that do
// so together the longest is first, and of equal ones the call of the module further out. A unit of
// several modules begins with a call of one and ends with a call of another, however far its
// stretch goes. Units that the end of the model ends come after the root, backwards in the order of
// modules
// (_force_complete_incomplete_states of _fsdp_state.py, torch 2.13).
void SortOuterFirst(std::vector<Stretch>& stretches, UnitSpans::Call UnitSpans::Ends::*at) {
  const bool ends = at == &UnitSpans::Ends::last;
  StableSort(stretches, [&](const Stretch& x, const Stretch& y) {
    const UnitSpans::Call &a = x.ends.*at, &b = y.ends.*at;
    if (ends && (x.ends.by_model || y.ends.by_model)) {
      return x.ends.by_model != y.ends.by_model ? x.ends.by_model : a.module < b.module;
    }
    if (ends && a.span.last != b.span.last) {
      return a.span.last > b.span.last;
    }
    if (!ends && a.span.first != b.span.first) {
      return a.span.first < b.span.first;
    }
    const std::uint32_t m = a.span.last - a.span.first, n = b.span.last - b.span.first;
    return m != n ? m > n : a.module < b.module;
  });
}

// The lowest op above this one that backward runs, or the op itself.
std::uint32_t NextInBackward(const ModelAnalysis& a, std::uint32_t op) {
  for (std::uint32_t i = op + 1; i < a.ops.size(); ++i) {
    if (a.ops[i].has_backward) {
      return i;
    }
  }
  return op;
}

}  // namespace

// Backward comes by later calls first: what a call returned has its gradient when the nodes of
// those behind it have run, and before the node in front of the call itself.
bool Walker::ComesFirst(const Event& x, const Event& y) {
  const auto moment = [](const Event& event) {
    return event.is_given ? 2 * event.call.last + 2 : 2 * event.call.first;
  };
  return moment(x) != moment(y) ? moment(x) > moment(y) : x.is_given < y.is_given;
}

void Walker::FindForwardEvents() {
  const std::size_t n = e_.in.model.ops.size();
  std::vector<Stretch> stretches;
  std::vector<Event> called, enter, leave;
  for (auto u = static_cast<std::uint32_t>(spans_.spans.size()); u-- > 0;) {
    for (std::size_t k = 0; k < spans_.spans[u].size(); ++k) {
      stretches.push_back({u, spans_.spans[u][k], spans_.ends[u][k]});
      forward_mark_[spans_.spans[u][k].first] = true;
    }
    for (const UnitSpans::Span& call : spans_.calls[u]) {
      called.push_back({call.first, UnitId(u), call, call});
    }
  }
  SortOuterFirst(stretches, &UnitSpans::Ends::last);
  for (const Stretch& s : stretches) {
    leave.push_back({s.span.last, UnitId(s.unit), s.span, s.ends.last.span});
  }
  SortOuterFirst(stretches, &UnitSpans::Ends::first);
  for (const Stretch& s : stretches) {
    enter.push_back({s.span.first, UnitId(s.unit), s.span, s.ends.first.span});
  }
  std::reverse(leave.begin(), leave.end());  // inner units leave first
  called_ = ToEvents(std::move(called), n);
  enter_ = ToEvents(std::move(enter), n);
  leave_ = ToEvents(std::move(leave), n);
}

void Walker::FindBackwardEvents() {
  const std::size_t n = e_.in.model.ops.size();
  std::vector<Stretch> stretches;
  for (auto u = static_cast<std::uint32_t>(spans_.spans.size()); u-- > 0;) {
    for (std::size_t k = 0; k < spans_.backward_spans[u].size(); ++k) {
      stretches.push_back({u, spans_.backward_from[u][k], spans_.backward_ends[u][k], k});
      backward_mark_[spans_.backward_spans[u][k].last] = true;
    }
  }
  // Nodes take their turn among those of other units, by the places of their calls. FSDP1 has hooks
  // on tensors instead.
  const bool in_turn = e_.in.plan.dialect != Dialect::kFsdp1;
  std::vector<Event> enter, leave, final, given;
  std::vector<Event>& returned = in_turn ? leave : given;
  const auto place = [&](const Stretch& s) {
    const UnitSpans::Span& back = spans_.backward_spans[s.unit][s.index];
    const bool is_given = spans_.backward_given[s.unit][s.index];
    return is_given && in_turn ? NextInBackward(e_.a, back.last) : back.first;
  };
  SortOuterFirst(stretches, &UnitSpans::Ends::first);
  std::reverse(stretches.begin(), stretches.end());
  for (const Stretch& s : stretches) {
    const bool is_given = spans_.backward_given[s.unit][s.index];
    (is_given ? returned : leave)
        .push_back({place(s), UnitId(s.unit), s.span, s.ends.first.span, false});
    const std::uint32_t last = spans_.grads_final[s.unit];
    if (last != kNoRegion && s.index == 0) {
      final.push_back({last, UnitId(s.unit), s.span, s.span});
    }
  }
  SortOuterFirst(stretches, &UnitSpans::Ends::last);
  for (const Stretch& s : stretches) {
    if (spans_.backward_given[s.unit][s.index]) {
      returned.push_back({place(s), UnitId(s.unit), s.span, s.ends.last.span, true});
    } else {
      enter.push_back(
          {spans_.backward_spans[s.unit][s.index].last, UnitId(s.unit), s.span, s.ends.last.span});
    }
  }
  StableSort(leave, ComesFirst);
  StableSort(given, ComesFirst);
  back_enter_ = ToEvents(std::move(enter), n);
  back_leave_ = ToEvents(std::move(leave), n);
  back_final_ = ToEvents(std::move(final), n);
  back_given_ = ToEvents(std::move(given), n);
}

// Sorts events into CSR form; events of one op keep their order.
Walker::Events Walker::ToEvents(std::vector<Event> events, std::size_t op_count) {
  StableSortBy(events, &Event::op);
  Events e;
  e.begin.assign(op_count + 1, 0);
  for (const Event& event : events) {
    ++e.begin[event.op + 1];
  }
  for (std::size_t i = 0; i < op_count; ++i) {
    e.begin[i + 1] += e.begin[i];
  }
  e.events = std::move(events);
  return e;
}

}  // namespace shardwright
