#pragma once

// What a trace tells about the price of each op shape of its program.

#include <cstdint>
#include <string>
#include <vector>

#include "core/units.h"
#include "schedule/program.h"
#include "topologies/cluster.h"
#include "traces/recording.h"
#include "traces/trace.h"

namespace shardwright {

// Medians over all steps that count, all ranks and all ops of one shape. The first step, which
// warms up, counts only when there is no other.
struct ShapeSample {
  std::size_t run = 0;  // index into the runs
  ShapeId shape;
  double seconds = 0;    // on its stream; 0: not measured
  double issue = 0;      // host time to issue it; 0: whenever it did, the queue was full
  std::int64_t ops = 0;  // spans behind the medians
  // Of ops on cores beside which nothing ran: how long they lasted, and what their threads computed
  // meanwhile. 0: not measured.
  double lasted = 0;
  double computed = 0;
};

// A run that was traced. All of it outlives the samples.
struct CalibrationRun {
  std::string name;  // of the trace, for messages
  const Program& program;
  const Cluster& cluster;
  const Trace& trace;
  // Of foreign profilers, one per rank, instead of `trace`; null: none.
  const std::vector<ProfilerRecording>* recordings = nullptr;
  // Times of shapes that were measured one by one (nccl-tests), instead of `trace`; null: none. The
  // program has shapes and groups then, and no ops.
  const std::vector<ShapeSample>* shapes = nullptr;
};

// Kernels that cannot be told apart: those of one class in one segment of a step.
struct KernelSample {
  std::size_t run = 0;
  std::vector<Kernel> kernels;
  double seconds = 0;  // all of them together
};

struct CalibrationSamples {
  std::vector<ShapeSample> shapes;    // by run, then shape
  std::vector<KernelSample> kernels;  // of recordings
  std::vector<double> wakes;          // host, from the end of what it waited for until it went on
};

// Throws InputError for a trace without a complete step. O(spans log spans).
[[nodiscard]] CalibrationSamples CollectSamples(const std::vector<CalibrationRun>& runs);

// Appends what the recordings of runs[index] tell: collectives by shape, kernels by segment. Throws
// InputError for a recording without a step. In recording_samples.cc.
void AddRecordings(const std::vector<CalibrationRun>& runs, std::size_t index,
                   CalibrationSamples& samples);
[[nodiscard]] Seconds RecordedStepTime(const std::vector<ProfilerRecording>& recordings);

// Median over the steps that count, of all ranks.
[[nodiscard]] Seconds MeasuredStepTime(const CalibrationRun& run);

}  // namespace shardwright
