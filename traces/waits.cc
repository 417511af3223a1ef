#include "traces/waits.h"

#include <algorithm>
#include <array>
#include <cstdint>
#include <map>
#include <tuple>
#include <vector>

#include "topologies/mesh.h"
#include "traces/internal/chrome_layout.h"

namespace shardwright {
namespace {

// When things were over on one rank.
class Ends {
 public:
  explicit Ends(const Program& program)
      : of_group_(program.groups.size()), of_slot_(program.carry_slot_count) {}

  void Begin(const Body& body) { of_op_.assign(body.size(), SimTime(0)); }
  void Set(const Span& span, const OpShape& shape) {
    of_op_[span.op.value] = span.end;
    of_stream_[static_cast<std::size_t>(span.stream)] = span.end;
    if (shape.group.valid()) {
      of_group_[shape.group.value] = span.end;
    }
  }
  // Its body has ended.
  void Carry(const Body& body) {
    for (std::size_t s = 0; s < body.carries.size(); ++s) {
      if (body.carries[s].valid()) {
        of_slot_[s] = of_op_[body.carries[s].value];
      }
    }
  }

  [[nodiscard]] SimTime Ready(const Span& span, const Body& body) const {
    SimTime time = of_stream_[static_cast<std::size_t>(span.stream)];
    for (const Edge edge : body.EdgesOf(span.op)) {
      time = std::max(time, edge.is_carried() ? of_slot_[edge.slot()] : of_op_[edge.value]);
    }
    return time;
  }
  [[nodiscard]] SimTime OfGroup(GroupId group) const { return of_group_[group.value]; }

 private:
  std::array<SimTime, kStreamCount> of_stream_{};
  std::vector<SimTime> of_group_, of_slot_, of_op_;
};

const OpShape& ShapeOf(const Program& program, const Span& span) {
  return program.ShapeOf(BodyOf(program, span.body).ops[span.op.value]);
}

bool IsCollective(const OpShape& shape) {
  return InfoOf(shape.code).is_collective && shape.group.valid();
}

// The latest of a time of collectives, by collective.
class Latest {
 public:
  Latest(const Program& program, const Trace& trace, SimTime Span::*time) : program_(program) {
    for (const Span& span : trace.spans) {
      if (IsMeant(span)) {
        SimTime& latest = times_[KeyOf(span)];
        latest = std::max(latest, span.*time);
      }
    }
  }

  [[nodiscard]] bool IsMeant(const Span& span) const {
    return span.stream != Stream::kHost && IsCollective(ShapeOf(program_, span));
  }
  [[nodiscard]] SimTime Of(const Span& span) const { return times_.at(KeyOf(span)); }

 private:
  // Group, its first member, step, body, op.
  using Key = std::tuple<std::uint32_t, std::int64_t, std::uint32_t, BodyKind, std::uint32_t>;
  [[nodiscard]] Key KeyOf(const Span& span) const {
    const GroupId group = ShapeOf(program_, span).group;
    const std::int64_t first = PlaceInGroup(program_.groups[group.value], span.rank).base;
    return {group.value, first, span.step, span.body, span.op.value};
  }

  const Program& program_;
  std::map<Key, SimTime> times_;
};

void Derive(Span& span, const OpShape& shape, const Body& body, const Ends& ends) {
  span.ready = ends.Ready(span, body);
  span.arrival = std::max(span.issued, span.ready);
  if (IsCollective(shape)) {
    span.arrival = std::max(span.arrival, ends.OfGroup(shape.group));
  }
  // The GPU's clock is not exactly the host's.
  span.start = span.end == SimTime(0) ? span.arrival : std::max(span.start, span.issued);
  span.end = std::max({span.end, span.start, span.issue_end});
  span.arrival = std::min(span.arrival, span.start);
}

}  // namespace

void DeriveWaits(const Program& program, Trace& trace) {
  Ends ends(program);
  const Span* before = nullptr;
  for (Span& span : trace.spans) {
    const Body& body = BodyOf(program, span.body);
    const bool same_rank = before != nullptr && before->rank == span.rank;
    if (!same_rank || before->step != span.step || before->body != span.body) {
      if (same_rank) {
        ends.Carry(BodyOf(program, before->body));
      } else {
        ends = Ends(program);
      }
      ends.Begin(body);
    }
    before = &span;
    const OpShape& shape = ShapeOf(program, span);
    if (span.stream != Stream::kHost) {
      Derive(span, shape, body, ends);
    }
    ends.Set(span, shape);
  }
  const Latest starts(program, trace, &Span::start);
  for (Span& span : trace.spans) {
    if (starts.IsMeant(span)) {
      span.start = std::min(starts.Of(span), span.end);
    }
  }
}

void EndTogether(const Program& program, Trace& trace) {
  const Latest ends(program, trace, &Span::end);
  for (Span& span : trace.spans) {
    if (ends.IsMeant(span)) {
      span.end = ends.Of(span);
    }
  }
}

}  // namespace shardwright
