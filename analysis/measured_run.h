#pragma once

#include <string>

#include "schedule/plan_file.h"

namespace shardwright {

// A job that ran somewhere and what its step took.
struct MeasuredRun {
  std::string id;
  // What fits leave out together: where it was published, the name of its model, and what tells it
  // from other runs of that model on as many GPUs.
  std::string source;
  std::string model;
  std::string variant;
  double step_time_s = 0;  // 0: not measured
  PlanFile plan;
};

}  // namespace shardwright
