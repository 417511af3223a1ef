#pragma once

// Steps of a foreign recording: where their time went, and which op of a program each collective
// is. docs/import.md, section "Measurements".

#include <array>
#include <cstdint>
#include <string>
#include <vector>

#include "analysis/step_breakdown.h"
#include "core/units.h"
#include "schedule/program.h"
#include "traces/recording.h"

namespace shardwright {

[[nodiscard]] OpClass ClassOf(const Activity& activity);
// Of a program's streams the one that does such work.
[[nodiscard]] Stream StreamOf(const Activity& activity);
// Activity::queue of the one that computes most. Throws InputError when none does.
[[nodiscard]] std::uint32_t BusiestQueue(const ProfilerRecording& recording);

// A stretch in which the compute queue waited for other work.
struct RecordedWait {
  std::size_t activity = 0;  // ProfilerRecording::activities: what it waited for
  double seconds = 0;
  bool began_late = false;  // the awaited work began no earlier than the wait
};

// Idle time of the compute queue that nothing it waited for explains: what the host did around a
// collective, where one ran meanwhile, else before a piece of the queue's own work.
struct RecordedIdle {
  std::size_t activity = 0;  // ProfilerRecording::activities: the collective, or that work
  double seconds = 0;
};

// One step that has work and, unless the recording holds no other, one recorded before it.
struct RecordingStep {
  std::uint32_t step = 0;                    // ProfilerRecording::steps
  std::array<double, kOpClassCount> busy{};  // seconds, whatever the queue
  std::array<std::int64_t, kOpClassCount> pieces{};
  StepBreakdown parts;              // seen from the queue that computes most
  std::vector<RecordedWait> waits;  // what parts.wait adds up
  std::vector<RecordedIdle>
      idle;                 // but for the step's first work; with it parts.host_issue + other
  double before_first = 0;  // idle before the step's first work; part of host_issue or other
};

// By step. From the end of the last work of the compute queue in the step before to that of its
// own. Idle time is charged to the host while the next piece was not issued, then to copies or
// collectives that ran meanwhile, then to `other`. Throws InputError when no step has compute work.
[[nodiscard]] std::vector<RecordingStep> FindSteps(const ProfilerRecording& recording);

// Compute of one unit in one pass of one micro-batch. Recomputation counts as backward.
struct SegmentKey {
  std::uint32_t unit = kNoSubject;  // Program::units; kNoSubject: all, or the optimizer
  std::uint32_t micro_batch = 0;
  Phase phase = Phase::kForward;

  auto operator<=>(const SegmentKey&) const = default;
};

// How the work of a recording's steps is joined with a program's step.
struct RecordingJoin {
  // A collective and the op it is, mean over the steps that count.
  struct Collective {
    OpId op;
    double seconds = 0;
    double idle = 0;  // around it
    std::int64_t count = 0;
    Bytes bytes;  // 0: not recorded
  };
  std::vector<Collective> collectives;  // by op; those found in at least one step
  struct Kernels {
    SegmentKey segment;
    OpClass op_class = OpClass::kGemm;
    double seconds = 0;  // of one step, mean
    double idle = 0;     // of one step, mean: before them
  };
  std::vector<Kernels> kernels;  // by segment, class; copies within the device, too
  bool by_unit = false;          // segments have units
  std::int64_t recorded = 0;     // collectives of all steps that count
  std::int64_t matched = 0;
  std::vector<std::string> findings;  // where the recording contradicts the program
  std::vector<std::string> notes;     // what else is in it
};

// Collectives join by (kind, unit, phase, micro-batch) and order, where the recording names units;
// what is left, and recordings without units, by kind and order, when there are as many.
[[nodiscard]] RecordingJoin JoinRecording(const Program& program,
                                          const ProfilerRecording& recording,
                                          const std::vector<RecordingStep>& steps);

// The segment of each op of the step body; of the optimizer for what belongs to no pass.
[[nodiscard]] std::vector<SegmentKey> SegmentsOf(const Program& program, bool by_unit);

}  // namespace shardwright
