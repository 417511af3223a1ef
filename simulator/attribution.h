#pragma once

// Why a step takes as long as it does: what the compute stream waits for, and the chain of ops that
// bounds the period.

#include <cstdint>
#include <span>
#include <string_view>
#include <vector>

#include "core/units.h"
#include "schedule/program.h"
#include "traces/trace.h"

namespace shardwright {

// How a stretch of time was spent.
enum class TimeUse : std::uint8_t {
  kRun,        // the op ran
  kHostIssue,  // the host was issuing this op, or was busy with it (host ops)
  kPeer,       // a collective waited for another rank
  kOther,      // nothing that the spans show; rounding of contended durations
};
[[nodiscard]] std::string_view NameOf(TimeUse use);

// One link of the critical path.
struct PathSegment {
  OpId op;  // of the step body
  TimeUse use = TimeUse::kRun;
  std::int32_t steps_back = 0;  // 1: the op ran in the step before
  SimTime begin;
  SimTime end;

  bool operator==(const PathSegment&) const = default;
};

// Time charged to all ops that agree in these fields. A unit's ops have the unit as subject; model
// ops are charged to the model as a whole (kNoSubject).
struct TimeShare {
  TimeUse use = TimeUse::kRun;
  OpCode code = OpCode::kCompute;
  Phase phase = Phase::kForward;
  Stream stream = Stream::kCompute;
  std::uint32_t unit = kNoSubject;
  SimTime time;
  std::int64_t count = 0;  // stretches

  bool operator==(const TimeShare&) const = default;
};

// The longest first; of equal ones by what they are.
void SortByTime(std::vector<TimeShare>& shares);

struct Attribution {
  SimTime step_time;
  SimTime compute_busy;
  // While the compute stream was idle: what it waited for in the end. Each gap is followed
  // backwards through the ops it waited for, so that waiting for a collective that itself waited
  // for the host is charged to the host. compute_busy + sum(idle) = step_time.
  std::vector<TimeShare> idle;
  // Ops and waits that follow one another without a gap over one period, in order of time. Making
  // anything else faster does not make the step faster. The lengths add up to step_time.
  std::vector<PathSegment> critical_path;
  std::vector<TimeShare> critical;  // critical_path, summed up
};

// Explains the last step in `spans` (as from RunEngineWithSpans), whose period is `period`: what
// came before it is taken to be the same step one period earlier. Shares are sorted by time, the
// longest first. Requires a step with at least one op on the compute stream. O(ops + edges).
[[nodiscard]] Attribution Explain(const Program& program, std::span<const Span> spans,
                                  SimTime period);

}  // namespace shardwright
