#pragma once

// Small plans that Shardwright brings along, run on the host device to calibrate its profile.

#include <cstdint>
#include <string>
#include <vector>

#include "analysis/calibration_samples.h"
#include "schedule/plan_file.h"
#include "schedule/program.h"
#include "traces/recording.h"
#include "traces/trace.h"

namespace shardwright {

struct TracedRun {
  std::string name;
  PlanFile file;
  Program program;
  Trace trace;
  // Instead of `trace`: of foreign profilers, or collectives measured one by one.
  std::vector<ProfilerRecording> recordings = {};
  std::vector<ShapeSample> shapes = {};
};

// Runs a plan on the host device with random data, every rank a thread. Throws RunError.
[[nodiscard]] TracedRun RunTraced(PlanFile file, std::string name, std::int64_t steps);

// The plans for `shardwright calibrate --device host`: transformers of three widths on one rank and
// on `ranks`, on the catalog's cluster "host". No convolutions: they have no number of their own in
// a profile, so a network with them is calibrated by its own trace.
[[nodiscard]] std::vector<TracedRun> RunHostPlans(std::int64_t ranks);

// What /proc/cpuinfo calls the processor, and how many threads it runs: "AMD EPYC 9554, 2 threads".
[[nodiscard]] std::string MachineName();

}  // namespace shardwright
