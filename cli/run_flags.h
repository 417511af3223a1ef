#pragma once

// The flags of `shardwright run` as values.

#include <cstdint>
#include <string>

#include "cli/command.h"
#include "cli/device_flags.h"
#include "cli/run_loop.h"

namespace shardwright {

enum class Graphs : std::uint8_t { kOff, kOn, kAuto };

struct RunFlags {
  LoopOptions loop;
  std::string data = "random";
  std::string test_data;
  std::string checkpoint;
  std::string init;  // weights of others to start from
  std::int64_t keep = 3;
  bool resume = false;
  std::int64_t resume_step = 0;  // of the checkpoint to resume from; 0: the newest
  bool saves_on_signal = true;
  std::string trace;
  std::int64_t seed = 0;  // 0: not given
  TrainingOptions training;
  std::string training_json;  // the document of --training; empty: none
  HostOptions host;
  DeviceFlags device;
  bool is_ordered = false;  // --reduce ordered
  Graphs graphs = Graphs::kOff;
};

// Throws UsageError for what is wrong whatever the plan is. `training` is left as it is.
[[nodiscard]] RunFlags ReadRunFlags(const Arguments& arguments);
// Hyper-parameters and seeds: the defaults of the job, --training, --seed.
void ReadTraining(const Arguments& arguments, const Job& job, RunFlags& flags);
// Throws InputError when --reduce asks for an order that the device does not keep.
void CheckReduce(const RunFlags& flags);

}  // namespace shardwright
