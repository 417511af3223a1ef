// When units begin and end, forward and backward: the events that the walker goes by.

#include <algorithm>
#include <utility>

#include "schedule/lower/walker.h"

namespace shardwright {
namespace {

struct Stretch {
  std::uint32_t unit = 0;
  UnitSpans::Span span;
  UnitSpans::Ends ends;
  std::size_t index = 0;  // among the unit's backward stretches
};

// Outer calls first: the longest; of equal ones that of the module further out. A unit of several
// modules begins with a call of one and ends with one of another, however far its stretch goes.
// What the end of the model ends does so after the root, backwards in the order of modules
// (_force_complete_incomplete_states of _fsdp_state.py, torch 2.13).
void SortOuterFirst(std::vector<Stretch>& stretches, UnitSpans::Call UnitSpans::Ends::*at) {
  std::stable_sort(stretches.begin(), stretches.end(), [&](const Stretch& x, const Stretch& y) {
    const UnitSpans::Call &a = x.ends.*at, &b = y.ends.*at;
    if (at == &UnitSpans::Ends::last && x.ends.by_model != y.ends.by_model) {
      return x.ends.by_model;
    }
    const std::uint32_t m = a.span.last - a.span.first, n = b.span.last - b.span.first;
    return m != n ? m > n : a.module < b.module;
  });
}

}  // namespace

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
  std::vector<Event> enter, leave, final, given;
  SortOuterFirst(stretches, &UnitSpans::Ends::last);
  for (const Stretch& s : stretches) {
    std::vector<Event>& events = spans_.backward_given[s.unit][s.index] ? given : enter;
    events.push_back(
        {spans_.backward_spans[s.unit][s.index].last, UnitId(s.unit), s.span, s.ends.last.span});
  }
  SortOuterFirst(stretches, &UnitSpans::Ends::first);
  for (const Stretch& s : stretches) {
    if (!spans_.backward_given[s.unit][s.index]) {
      leave.push_back({spans_.backward_spans[s.unit][s.index].first, UnitId(s.unit), s.span,
                       s.ends.first.span});
    }
    const std::uint32_t last = spans_.grads_final[s.unit];
    if (last != kNoRegion && s.index == 0) {
      final.push_back({last, UnitId(s.unit), s.span, s.span});
    }
  }
  std::reverse(leave.begin(), leave.end());
  // The later ones come first, and those around others.
  std::stable_sort(given.begin(), given.end(), [](const Event& x, const Event& y) {
    return x.call.last != y.call.last ? x.call.last > y.call.last : x.call.first < y.call.first;
  });
  back_enter_ = ToEvents(std::move(enter), n);
  back_leave_ = ToEvents(std::move(leave), n);
  back_final_ = ToEvents(std::move(final), n);
  back_given_ = ToEvents(std::move(given), n);
}

// Sorts events into CSR form; events of one op keep their order.
Walker::Events Walker::ToEvents(std::vector<Event> events, std::size_t op_count) {
  std::stable_sort(events.begin(), events.end(),
                   [](const Event& x, const Event& y) { return x.op < y.op; });
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
