#include "cli/pipeline_print.h"

#include <cmath>
#include <vector>

#include <nlohmann/json.hpp>

#include "cli/flow.h"
#include "cli/table.h"
#include "core/json.h"
#include "core/text.h"
#include "planner/evaluate.h"
#include "schedule/print.h"
#include "simulator/stages.h"
#include "traces/chrome_write.h"

namespace shardwright {
namespace {

using Json = nlohmann::ordered_json;
using enum Table::Align;

struct Answer {
  const PlanFile& file;
  PipelineResult result;
  Rates rates = {};
  Bytes most = {}, usable = {};  // of the stage that needs most; of a device
  double bubble = 0.0;           // part of the step, in the mean of the stages
};

Seconds ComputeOf(const StepTiming& stage) {
  return ToSeconds(stage.busy[static_cast<std::size_t>(Stream::kCompute)]);
}

// `trace`: where to write the spans of all stages; empty: nowhere.
Answer Find(const PlanFile& file, bool contention, const std::string& trace) {
  const std::vector<Program> programs = LowerAndVerifyStages(file, file.plan);
  Answer answer = {file, MemoryOfStages(programs, file.cluster, file.profile)};
  std::vector<Trace> traces;
  answer.result.timing = TimeOfStages(programs, file.cluster, file.profile, contention,
                                      trace.empty() ? nullptr : &traces);
  if (!trace.empty()) {
    ChromeOptions chrome;
    chrome.plan = PlanFileJson(file);
    chrome.step_time = answer.result.timing.step_time;
    WriteChromeTraces(programs, traces, chrome, trace);
  }
  const SimulationResult sum = SumOf(answer.result);
  const Seconds step = ToSeconds(sum.step_time);
  answer.rates = RatesOf(file, file.plan, step);
  answer.usable = UsableMemory(file);
  answer.most = sum.memory.Needs();
  answer.bubble = ToSeconds(sum.bubble).value / step.value;
  return answer;
}

std::string Text(const Answer& a) {
  const PipelineTiming& timing = a.result.timing;
  Table time({kLeft, kLeft});
  time.Row({"step time", Format(ToSeconds(timing.step_time)) +
                             (timing.is_steady ? "" : ", and the step before took another")});
  time.Row({"tokens/s per GPU", WithCommas(std::llround(a.rates.tokens_per_second_per_gpu))});
  time.Row({"MFU", Percent(a.rates.mfu) + " of " + Format(a.rates.peak) + " dense"});
  time.Row({"bubble", Percent(a.bubble) + " of the step, in the mean of the stages"});
  Table stages({kLeft, kRight, kRight, kRight, kRight});
  stages.Row({"stage", "computes", "waits for stages", "waits for others", "memory"});
  for (std::size_t s = 0; s < timing.last.size(); ++s) {
    std::string own = std::to_string(s);
    for (std::int64_t k = 1; k < a.file.plan.pipeline_stages; ++k) {
      own += ", " + std::to_string(k * a.file.plan.pipeline_size + static_cast<std::int64_t>(s));
    }
    stages.Row({own, Format(ComputeOf(timing.last[s])), Format(ToSeconds(a.result.Bubble(s))),
                Format(ToSeconds(timing.last[s].ExposedCommunication())),
                Format(a.result.memory[s].Needs())});
  }
  return TitleOf(a.file) + "\n" + MeshText(a.file.plan) + ", micro-batch " +
         WithCommas(a.file.plan.micro_batch) + " x " + WithCommas(a.file.plan.accumulation) +
         "\n\nTime of one step\n" + time.Text(2) + "\nStages\n" + stages.Text(2) +
         "\nWhat the caching allocator keeps beside buffers is not told of a pipeline.\n" +
         (a.most > a.usable ? "does not fit: the largest stage needs " + Format(a.most) + " of " +
                                  Format(a.usable)
                            : "fits: " + Format(a.usable - a.most) +
                                  " to spare on the largest "
                                  "stage") +
         "\n";
}

Json ToJson(const Answer& a) {
  const PipelineTiming& timing = a.result.timing;
  Json json = ReportHead("shardwright-pipeline");
  json["model"] = a.file.model.name;
  AddMesh(a.file.plan, json);
  json["step_time_s"] = ToSeconds(timing.step_time).value;
  json["is_steady"] = timing.is_steady;
  json["tokens_per_second_per_gpu"] = a.rates.tokens_per_second_per_gpu;
  json["mfu"] = a.rates.mfu;
  json["bubble_fraction"] = a.bubble;
  json["fits"] = a.most <= a.usable;
  json["stages"] = Json::array();
  for (std::size_t s = 0; s < timing.last.size(); ++s) {
    json["stages"].push_back(
        {{"compute_s", ComputeOf(timing.last[s]).value},
         {"bubble_s", ToSeconds(a.result.Bubble(s)).value},
         {"exposed_communication_s", ToSeconds(timing.last[s].ExposedCommunication()).value},
         {"peak_bytes", a.result.memory[s].Needs().value}});
  }
  return json;
}

}  // namespace

void RefuseWithPipeline(const Arguments& arguments, const Plan& plan,
                        std::initializer_list<const char*> flags) {
  for (const char* flag : flags) {
    if (plan.pipeline_size > 1 && (arguments.Get(flag).is_given() || arguments.Has(flag))) {
      throw UsageError(std::string(flag) + ": not known of plans with a pipeline so far");
    }
  }
}

int SimulatePipeline(const Arguments& arguments, const PlanFile& file, bool contention,
                     const std::string& trace) {
  RefuseWithPipeline(
      arguments, file.plan,
      {"--trace-profile", "--allocator", "--jitter", "--rank-jitter", "--slow-rank", "--lengths"});
  const Answer answer = Find(file, contention, trace);
  if (trace != "-") {  // then standard output is the trace and nothing else
    arguments.Print(arguments.IsJson() ? ToJson(answer).dump(2) + "\n" : Text(answer));
  }
  return answer.most <= answer.usable ? kExitOk : kExitNo;
}

std::string StagesText(const PlanFile& file, bool whole) {
  const Plan& plan = file.plan;
  const Pipeline pipeline = PipelineOf(plan);
  std::string text;
  for (const Program& program : LowerAndVerifyStages(file, file.plan)) {
    text += "rank " + std::to_string(program.pipeline_rank) +
            " of the pipeline: " + ActionsText(AddTransfers(pipeline, program.pipeline_rank)) +
            "\n" + (whole ? Print(program) : PrintSummary(program)) + "\n";
  }
  return text;
}

}  // namespace shardwright
