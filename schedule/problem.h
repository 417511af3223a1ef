#pragma once

// A problem: everything that is known before there is a plan. Predictions, searches and reports of
// one job all start from one.

#include <cstdint>
#include <string>

#include "models/kernel_set.h"
#include "models/model.h"
#include "schedule/plan.h"
#include "topologies/cluster.h"
#include "topologies/profile.h"

namespace shardwright {

// A model that knows where it comes from.
struct LoadedModel : Model {
  std::string json = {};   // the user's file; empty: the zoo model of this name
  std::uint64_t hash = 0;  // HashModel before anything is frozen or adapted
};

struct Problem {
  LoadedModel model;  // built for job.sequence_length, with what the job freezes and adapts
  KernelSetOptions kernels;
  Cluster cluster;
  Profile profile;
  Job job;
};

}  // namespace shardwright
