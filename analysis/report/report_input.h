#pragma once

// What a report is made of. All of it outlives the report.

#include <string>

#include "analysis/compare.h"
#include "analysis/prediction.h"
#include "analysis/report/choices.h"
#include "schedule/plan_file.h"
#include "schedule/program.h"
#include "simulator/simulate.h"
#include "traces/recording.h"
#include "traces/trace.h"

namespace shardwright {

struct ReportInput {
  const std::string& title;  // "llama-3-8b on 2 x dgx-h100 (16 GPUs), fsdp2"
  const PlanFile& file;
  const std::string& plan_json;        // the plan file itself
  const std::string& prediction_json;  // what `simulate --exact --json` prints
  const Program& program;
  const SimulationResult& simulation;  // with its trace
  const Prediction& prediction;
  // Of a run of the same program, by us or in another profiler's recording (of one rank), and its
  // comparison with the simulation. Null: not measured.
  const Trace* measured = nullptr;
  const ProfilerRecording* recorded = nullptr;
  const Comparison* comparison = nullptr;
  std::string comparison_json{};     // what `compare --json` prints of it
  const Choices* choices = nullptr;  // null: nothing else was considered
  std::string page{};                // address of the planner's page; empty: not linked to
};

}  // namespace shardwright
