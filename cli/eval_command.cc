#include <memory>
#include <optional>

#include <nlohmann/json.hpp>

#include "cli/command.h"
#include "cli/device_flags.h"
#include "cli/evaluator.h"
#include "cli/flow.h"
#include "cli/forward_plan.h"
#include "cli/rank_facts.h"
#include "cli/run_loop.h"
#include "cli/run_processes.h"
#include "core/error.h"
#include "executor/checkpoint/checkpoint.h"
#include "executor/checkpoint/run_checkpoints.h"
#include "executor/host/together.h"

namespace shardwright {
namespace {

std::string EvaluationJson(const Evaluation& result, std::int64_t step) {
  nlohmann::ordered_json json = ReportHead("shardwright-evaluation");
  json["step"] = step;
  json["mean_loss"] = result.MeanLoss();
  json["correct"] = result.correct;
  json["counted"] = result.counted;
  return json.dump(2) + "\n";
}

}  // namespace

int EvalCommand(const Arguments& arguments) {
  arguments.Require("--checkpoint");
  arguments.Require("--data");
  DeviceFlags device = ReadDeviceFlags(arguments);
  HostOptions host;
  SetTimeouts(arguments, host);
  const PlanFile file = ReadPlanFile(arguments.Get("PLAN").text, arguments.streams);
  const Model& model = file.model;
  const TrainingOptions training = DefaultTrainingOptions(file.job);
  const ForwardPlan forward(file);
  const SessionInput input{model, file.kernels, forward.job, forward.program, training};
  const Launch launch = LaunchOf(arguments);
  CheckLoopback(device, file.cluster.RankCount(), launch);
  if (NeedsProcesses(launch, device)) {
    return StartProcesses(input, arguments.Get("PLAN").text);
  }
  const std::unique_ptr<Dataset> data =
      OpenDataset(arguments.Get("--data").text, model, training.seed);
  const RunProcesses group(launch, file.cluster, host.set_up_timeout, [&] {
    return FactsOf(arguments, {{"PLAN", FieldsOf(PlanFileJson(file))}, {"--data", FactsOf(*data)}});
  });
  host.processes = group.get();
  host.threads = HostThreads(launch, file.cluster.RankCount());
  const std::string given = arguments.Get("--checkpoint").text;
  const std::string folder = NewestCheckpoint(given, group.get());
  if (folder.empty()) {
    throw InputError(given, "no finished checkpoint", "a checkpoint or a folder of checkpoints");
  }
  std::optional<Checkpoint> checkpoint;
  const Wait wait = WaitForFiles(model, file.job, "reading of the checkpoint");
  AllOrNone(group.get(), MessagePassing::kAll, wait, [&] {
    OpenOrOfferOlder(folder, "", [&] {
      checkpoint.emplace(folder);
      VerifyShare(*checkpoint, group.get());
    });
    CheckFits(*checkpoint, model, std::nullopt);
  });
  CheckAlike(group.get(), FactsOf(*checkpoint));
  DatasetEvaluator evaluator(input, host, {.gpu = device.GpuOf(launch)}, *data,
                             forward.job.global_batch);
  EndProcessOnFault(evaluator.session(), group.get());
  Resume(*checkpoint, evaluator.runtime(), false);
  EndSetUp(group.get(), host.timeout);
  const Evaluation result = evaluator.Run();
  FinishTogether(group.get());
  if (group.is_first()) {
    arguments.Print(arguments.IsJson() ? EvaluationJson(result, checkpoint->manifest().step)
                                       : TestLine(result) + '\n');
  }
  return kExitOk;
}

}  // namespace shardwright
