#pragma once

// Small plans that Shardwright brings along, run on a device to calibrate its profile.

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "analysis/calibration_samples.h"
#include "executor/host/message_passing.h"
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

// Where the plans for `shardwright calibrate --device` run.
struct CalibrationDevice {
  std::string cluster = "host";
  std::int64_t nodes = 1, ranks = 1;  // of the plans that run on all of them
  std::string kernel_set = "shardwright-host";
  Precision precision = {DType::kFp32, DType::kFp32, DType::kFp32};
  std::int64_t width = 64;              // of the narrowest transformer, and its tokens per sample
  bool copies = false;                  // whether a plan moves activations to the host and back
  bool large = false;                   // whether a plan has weights that no cache holds
  bool one_core = false;                // of the host, whatever the machine has
  std::optional<int> gpu;               // none: the host device
  MessagePassing* processes = nullptr;  // null: ranks are threads
};

// Runs a plan with random data. In processes: all of them call it, and the first one gets the
// trace. Throws RunError.
[[nodiscard]] TracedRun RunTraced(const CalibrationDevice& device, PlanFile file, std::string name,
                                  std::int64_t steps);

// Transformers of three widths or four on all ranks, two on twice as many as cores, and all on one
// rank, where the host has more cores with a single thread, too. No convolutions: they have no
// number of their own in a profile, so a network with them is calibrated by its own trace. In
// processes, all of them call it once; the first one gets the runs, and they have nothing more to
// say to each other.
[[nodiscard]] std::vector<TracedRun> RunCalibrationPlans(const CalibrationDevice& device);

// For GPU number `gpu` of this machine, one of those of `cluster`: transformers as wide as fill it.
[[nodiscard]] CalibrationDevice CudaCalibration(const std::string& cluster, std::int64_t nodes,
                                                int gpu);

// What /proc/cpuinfo calls the processor, and how many threads it runs: "AMD EPYC 9554, 2 threads".
[[nodiscard]] std::string MachineName();

}  // namespace shardwright
