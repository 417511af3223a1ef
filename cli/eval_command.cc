#include <array>
#include <memory>
#include <optional>
#include <string>

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
#include "core/json.h"
#include "executor/checkpoint/checkpoint.h"
#include "executor/checkpoint/run_checkpoints.h"
#include "executor/host/together.h"

namespace shardwright {
namespace {

constexpr const char* kEvalAbout =
    R"(Loss and accuracy of a checkpoint over a data set, under a plan.

Examples:
  shardwright eval plan.json --checkpoint checkpoints --data t10k-images-idx3-ubyte.gz
  shardwright eval plan.json --checkpoint checkpoints/step-00000100 --data text:book.txt --json
  shardwright eval plan.json --checkpoint checkpoints --data text:book.txt --device cuda

Runs the plan forward only: units are gathered and freed as in training, nothing is kept for
backward. The plan may differ from the one that made the checkpoint in all but the model. Ranks are
threads, or processes started by mpirun, torchrun or srun; on GPUs as for run.)";

constexpr std::array<PositionalRow, 1> kEvalPositionals = {
    {{"PLAN", "plan file or - (standard input)", "eval needs a plan file, or - for standard input",
      false, FileRole::kRead}}};

constexpr std::array<FlagRow, 6> kEvalFlags = {{
    {"--checkpoint", "FOLDER", "a checkpoint, or a folder whose newest one counts (required)",
     FileRole::kNone, Ranks::kGiven},
    {"--data", "SPEC", "as for run (required); every sample counts once", FileRole::kRead},
    kDeviceFlag,
    kLoopbackFlag,
    kRendezvousKeyFlag,
    {"--timeout", "TIME",
     "how long a rank waits for the others (default \"60 s\", before the first step 10 min)",
     FileRole::kNone, Ranks::kAny},
}};

constexpr std::array<SwitchRow, 1> kEvalSwitches = {{kInsecureNetworkSwitch}};

std::string EvaluationJson(const Evaluation& result, std::int64_t step) {
  nlohmann::ordered_json json = ReportHead("shardwright-evaluation");
  json["step"] = step;
  json["mean_loss"] = result.MeanLoss();
  json["correct"] = result.correct;
  json["counted"] = result.counted;
  return json.dump(2) + "\n";
}

int RunEval(const Arguments& arguments) {
  arguments.Require("--checkpoint");
  arguments.Require("--data");
  DeviceFlags device = ReadDeviceFlags(arguments);
  HostOptions host;
  SetTimeouts(arguments, host);
  const PlanFile file = ReadPlanFile(arguments.Get("PLAN").text, arguments.streams);
  const Model& model = file.model.model;
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
  Resume(*checkpoint, model, forward.job, evaluator.runtime(), false);
  EndSetUp(group.get(), host.timeout);
  const Evaluation result = evaluator.Run();
  FinishTogether(group.get());
  if (group.is_first()) {
    arguments.Print(arguments.IsJson() ? EvaluationJson(result, checkpoint->manifest().step)
                                       : TestLine(result) + '\n');
  }
  return kExitOk;
}

}  // namespace

extern const Command kEvalCommand;
const Command kEvalCommand = {"eval",     kEvalAbout,    kEvalPositionals,
                              kEvalFlags, kEvalSwitches, RunEval};

}  // namespace shardwright
