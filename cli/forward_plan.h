#pragma once

#include "schedule/plan.h"
#include "schedule/plan_file.h"
#include "schedule/program.h"

namespace shardwright {

// The forward half of a training plan: same model, units, dialect and ranks, one micro-batch per
// step, and nothing that only training has.
struct ForwardPlan {
  explicit ForwardPlan(const PlanFile& file);

  Job job;
  Plan plan;
  Program program;
};

}  // namespace shardwright
