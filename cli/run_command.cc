#include <memory>
#include <optional>
#include <utility>

#include "cli/collect_trace.h"
#include "cli/command.h"
#include "cli/device_flags.h"
#include "cli/evaluator.h"
#include "cli/first_weights.h"
#include "cli/flow.h"
#include "cli/forward_plan.h"
#include "cli/pipeline_print.h"
#include "cli/rank_facts.h"
#include "cli/run_flags.h"
#include "cli/run_loop.h"
#include "cli/run_processes.h"
#include "cli/run_report.h"
#include "cli/run_session.h"
#include "cli/stop_signals.h"
#include "core/error.h"
#include "core/json.h"
#include "core/printable.h"
#include "core/text.h"
#include "core/writable.h"
#include "executor/checkpoint/adapters.h"
#include "executor/checkpoint/checkpoint.h"
#include "executor/checkpoint/run_checkpoints.h"
#include "executor/checkpoint/run_folder.h"
#include "executor/checkpoint/save.h"
#include "executor/data/batch.h"
#include "executor/host/session.h"
#include "executor/host/together.h"
#include "models/cut_stage.h"
#include "planner/evaluate.h"
#include "schedule/lower.h"
#include "schedule/plan_file.h"
#include "schedule/plan_names.h"
#include "simulator/costs/pricer.h"
#include "traces/chrome_write.h"

namespace shardwright {
namespace {

// Predicted times of collectives; everything else takes what it takes here.
DurationTable NetworkDurations(const PlanFile& file, const Program& program) {
  const PriceTable prices = PriceProgram(program, file.cluster, file.profile);
  const auto of_body = [&](const Body& body) {
    std::vector<SimTime> durations;
    for (const Op& op : body.ops) {
      const bool is_collective = InfoOf(program.ShapeOf(op).code).is_collective;
      durations.push_back(is_collective ? prices.prices[op.shape.value].duration : SimTime(0));
    }
    return durations;
  };
  return {of_body(program.init), of_body(program.warmup), of_body(program.step)};
}

// Process 0 keeps other runs out of the folder of checkpoints.
std::unique_ptr<RunFolder> TakeFolder(const RunFlags& flags, const RunProcesses& group) {
  std::unique_ptr<RunFolder> folder;
  AllOrNone(group.get(), MessagePassing::kAll, {"folder of checkpoints"}, [&] {
    if (group.is_first() && !flags.checkpoint.empty()) {
      folder = std::make_unique<RunFolder>(flags.checkpoint, flags.resume);
    }
  });
  if (!flags.checkpoint.empty()) {
    CheckAlike(group.get(), {{"lock in --checkpoint", RunFolder::LockIn(flags.checkpoint)}});
    AllOrNone(group.get(), MessagePassing::kAll, {"folder of checkpoints"},
              [&] { CheckCheckpointFolder(flags.checkpoint); });
  }
  return folder;
}

// The forward half of the plan on test data; null without test data.
struct TestSetUp {
  TestSetUp(const PlanFile& file, const RunFlags& flags, const Dataset& data, const RunPlace& place)
      : forward(file),
        evaluator({file.model, file.kernels, forward.job, forward.program, flags.training},
                  flags.host, place, data, forward.job.global_batch) {
    EndProcessOnFault(evaluator.session(), flags.host.processes);
  }

  ForwardPlan forward;
  DatasetEvaluator evaluator;
};

// What the run is told, as far as a resumed run may be told otherwise.
std::vector<SavedSetting> SettingsOf(const PlanFile& file, const RunFlags& flags,
                                     const Dataset& data) {
  std::vector<SavedSetting> settings = ShowTrainingOptions(flags.training);
  if (!file.job.clip_gradients) {
    std::erase_if(settings,
                  [](const SavedSetting& setting) { return setting.first == "clip_norm"; });
    settings.emplace_back("clip_norm", "none");
  }
  const Precision& precision = file.job.precision;
  if (file.job.lora_rank > 0) {
    const auto rank = static_cast<double>(file.job.lora_rank);
    const double scale = file.job.lora_alpha > 0.0 ? file.job.lora_alpha / rank : 1.0;
    settings.emplace_back(kAdapterScaleSetting, Fixed(scale, "%.17g"));
  }
  settings.emplace_back("data", flags.data);
  settings.emplace_back("data.crc32", std::to_string(data.Checksum()));
  settings.emplace_back("ranks", std::to_string(file.cluster.RankCount()));
  settings.emplace_back("micro_batch", std::to_string(file.plan.micro_batch));
  settings.emplace_back("dtypes", std::string(NameIn(kTrainingDTypeNames, precision.param)) +
                                      ", masters " +
                                      std::string(NameIn(kTrainingDTypeNames, precision.master)));
  return settings;
}

// The checkpoint that the run goes on from, the same in all processes; empty: it begins anew.
std::string CheckpointToResume(const RunFlags& flags, const RunProcesses& group) {
  if (!flags.resume) {
    return {};
  }
  return flags.resume_step > 0 ? CheckpointFolder(flags.checkpoint, flags.resume_step)
                               : NewestCheckpoint(flags.checkpoint, group.get());
}

// Gives the run the id of the one that it goes on with. Process 0 says what is different now.
// False: the run begins anew.
bool ResumeIfAsked(const PlanFile& file, const RunFlags& flags, const Sampler& sampler,
                   const RunProcesses& group, RunIdentity& identity, Runtime& runtime) {
  const std::string from = CheckpointToResume(flags, group);
  if (from.empty()) {
    return false;
  }
  const Wait wait = WaitForFiles(file.model, file.job, "reading of the checkpoint");
  std::optional<Checkpoint> checkpoint;
  AllOrNone(group.get(), MessagePassing::kAll, wait, [&] {
    OpenOrOfferOlder(from, "; --resume-from %STEP goes on from it", [&] {
      checkpoint.emplace(from);
      VerifyShare(*checkpoint, group.get());
    });
    CheckFits(*checkpoint, file.model, file.job.optimizer.kind);
    CheckContinues(*checkpoint, sampler);
  });
  CheckAlike(group.get(), FactsOf(*checkpoint));
  AllOrNone(group.get(), MessagePassing::kAll, wait, [&] {
    Resume(*checkpoint, runtime, true);
    identity.id = checkpoint->manifest().run;
    if (!group.is_first()) {
      return;
    }
    Say("resumed from " + from);
    for (const std::string& line :
         Differences(checkpoint->manifest().settings, identity.settings)) {
      Say("resumed with " + line);
    }
    if (flags.resume_step > 0) {
      SetLaterAside(flags.checkpoint, flags.resume_step);
    }
  });
  return true;
}

// `threads` shared each rank's compute.
void WriteTrace(PlanFile file, std::int64_t threads, const Program& program,
                const RunSession& session, const Trace& trace, const std::string& path) {
  ChromeOptions chrome;
  chrome.source = "measured on " + session.device();
  if (file.cluster.SharedCores() > 0 && file.cluster.ThreadsPerRank() != threads) {
    file.cluster.rank_threads = threads;
  }
  chrome.plan = PlanFileJson(file);
  WriteChromeTrace(program, trace, chrome, path);
}

// By the plan's prices, whether steps are shorter by 2 % where launches take the host no time.
bool LaunchesCost(const PlanFile& file) {
  PlanFile without = file;
  without.profile.host.kernel_launch.value = Seconds(0);
  const EvaluateOptions options{.reserved = false};
  const Seconds plain = Evaluate(file, file.plan, options).step_time;
  const Seconds fast = Evaluate(without, without.plan, options).step_time;
  Say("a step takes " + Format(plain) + ", predicted; " + Format(fast) +
      " if launches took no time");
  return fast.value * 1.02 <= plain.value;
}

bool WantsGraphs(const PlanFile& file, const RunFlags& flags) {
  const bool wants =
      flags.graphs == Graphs::kOn || (flags.graphs == Graphs::kAuto && LaunchesCost(file));
  if (wants && !flags.trace.empty()) {
    Warn("a traced run times every op by itself: no graphs");
  }
  return wants && flags.trace.empty();
}

// What a run is of.
struct RunParts {
  const PlanFile& file;
  const Program& program;                // of a pipeline that of its first stage
  std::span<const SessionInput> inputs;  // by stage; one without a pipeline
  const Launch& launch;
  const Dataset& data;
  const Sampler& sampler;
  const HubWeights* weights;  // to start from; null: none
  const Dataset* test_data;   // null: none
};

// What all ranks must be given alike, beside the flags.
Contents ContentsOf(const RunFlags& flags, const RunParts& parts) {
  Contents contents = {{"PLAN", FieldsOf(PlanFileJson(parts.file))}};
  if (!flags.training_json.empty()) {
    contents.emplace_back("--training", FieldsOf(flags.training_json));
  }
  if (parts.weights != nullptr) {
    contents.push_back({"--init", {{"content", std::to_string(parts.weights->Checksum())}}});
  }
  contents.emplace_back("--data", FactsOf(parts.data));
  if (parts.test_data != nullptr) {
    contents.emplace_back("--test-data", FactsOf(*parts.test_data));
  }
  return contents;
}

RunOptions OptionsOf(const Arguments& arguments, const RunFlags& flags, const RunParts& parts) {
  RunOptions run;
  run.trace = !flags.trace.empty();
  run.poison = arguments.Has("--poison");
  run.inputs = [&parts](const BatchKey& key, std::span<const View> views) {
    WriteBatch(*key.model, parts.data, parts.sampler,
               {key.step, key.first_sample, key.count, key.cut}, views);
  };
  run.epoch_of = [&parts](std::int64_t step) { return EpochOf(parts.sampler, step); };
  if (arguments.Has("--emulate-network")) {
    run.durations = NetworkDurations(parts.file, parts.program);
  }
  run.stops_at_nan = flags.loop.stops_at_nan;
  run.asks_to_stop = StopSignals::Asked;
  return run;
}

// Before the first step, so that no run ends without its trace, or with one in the place of a file
// that has been read so far.
void CheckTrace(const RunFlags& flags, bool is_first) {
  if (is_first && !flags.trace.empty()) {
    CheckWritable(flags.trace);
  }
}

// From the weights that --init names, if there are any. Nobody begins before all have read theirs.
void StartTogether(const RunParts& parts, const std::string& init, const RunProcesses& group,
                   Runtime& runtime) {
  if (parts.weights == nullptr) {
    return;
  }
  AllOrNone(group.get(), MessagePassing::kAll,
            WaitForFiles(parts.file.model, parts.file.job, "reading of the first weights"),
            [&] { StartFrom(*parts.weights, runtime); });
  if (group.is_first()) {
    Say("first weights from " + init);
  }
}

void RefuseAdafactor(OptimizerKind kind) {
  if (kind == OptimizerKind::kAdafactor) {
    throw InputError("plan: job.optimizer.kind", "\"adafactor\" with --checkpoint",
                     "another one, since no checkpoint has the states of Adafactor");
  }
}

int Train(const Arguments& arguments, RunFlags& flags, const RunParts& parts) {
  const PlanFile& file = parts.file;
  RunOptions run = OptionsOf(arguments, flags, parts);
  const RunProcesses group(parts.launch, file.cluster, flags.host.set_up_timeout,
                           [&] { return FactsOf(arguments, ContentsOf(flags, parts)); });
  MessagePassing* const processes = flags.host.processes = group.get();
  if (flags.host.threads == 0) {
    flags.host.threads = HostThreads(parts.launch, file.cluster.RankCount());
  }
  const bool is_first = group.is_first();
  const std::unique_ptr<RunFolder> folder = TakeFolder(flags, group);
  if (processes != nullptr) {
    JoinRun(*processes, run);
  }
  flags.loop.prints_tests = flags.loop.prints_tests && is_first;
  if (is_first) {
    run.on_step =
        MakeProgress(file, flags.training, parts.sampler, TotalSteps(flags.loop, parts.sampler));
  }
  const RunPlace place{.gpu = flags.device.GpuOf(parts.launch), .graphs = WantsGraphs(file, flags)};
  RunSession session(parts.inputs, flags.host, run, place);
  EndProcessOnFault(session, processes);
  session.runtime().Initialize();
  RunIdentity identity{NewRunId()};
  if (!flags.checkpoint.empty()) {
    identity.settings = SettingsOf(file, flags, parts.data);
  }
  if (!ResumeIfAsked(file, flags, parts.sampler, group, identity, session.runtime())) {
    StartTogether(parts, flags.init, group, session.runtime());
  }
  std::unique_ptr<TestSetUp> test;
  if (parts.test_data != nullptr) {
    test = std::make_unique<TestSetUp>(
        file, flags, *parts.test_data,
        RunPlace{.gpu = place.gpu, .beside = &session, .graphs = place.graphs});
  }
  std::unique_ptr<RunCheckpoints> checkpoints;
  if (!flags.checkpoint.empty()) {
    RefuseAdafactor(file.job.optimizer.kind);
    checkpoints = std::make_unique<RunCheckpoints>(flags.checkpoint, folder.get(), flags.keep,
                                                   identity, file.model, file.job, parts.program,
                                                   parts.sampler, processes);
  }
  AllOrNone(processes, MessagePassing::kAll, {"trace"}, [&] { CheckTrace(flags, is_first); });
  EndSetUp(processes, flags.host.timeout);
  const LoopReport loop =
      RunLoop(flags.loop, {parts.sampler, session.runtime(),
                           session.runtime().mesh().CopyCount() * file.plan.accumulation,
                           checkpoints.get(), test ? &test->evaluator : nullptr});
  const Trace trace =
      flags.trace.empty() ? Trace() : TakeWholeTrace(session, parts.program, processes);
  FinishTogether(processes);  // nobody waits while process 0 writes
  if (is_first && !flags.trace.empty()) {
    WriteTrace(file, flags.host.threads, parts.program, session, trace, flags.trace);
  }
  const Ran ran{file, flags, parts.sampler, loop, checkpoints.get()};
  CheckOutcome(ran);
  if (is_first && flags.trace != "-") {
    WriteReport(ran, session, arguments.IsJson());
  }
  if (loop.end != LoopEnd::kAsked) {
    return kExitOk;
  }
  if (is_first) {
    SayInterrupted(ran);
  }
  return kExitInterrupted;
}

// What --init names, checked against the model; null: nothing. `plan`: the plan's file.
std::unique_ptr<HubWeights> OpenWeights(const RunFlags& flags, const Model& model,
                                        const Launch& launch, const std::string& plan) {
  if (flags.init.empty()) {
    if (launch.rank == 0 && !flags.resume) {
      NoteWeightsBeside(plan);
    }
    return nullptr;
  }
  auto weights = std::make_unique<HubWeights>(flags.init, model);
  if (launch.rank == 0) {
    WarnOfUnused(flags.init, *weights);
  }
  return weights;
}

}  // namespace

int RunCommand(const Arguments& arguments) {
  RunFlags flags = ReadRunFlags(arguments);
  const std::string plan = arguments.Get("PLAN").text;
  PlanFile file = ReadPlanFile(plan, arguments.streams);
  ReadTraining(arguments, file.job, flags);
  const Launch launch = LaunchOf(arguments);
  CheckLoopback(flags.device, file.cluster.RankCount(), launch);
  CheckReduce(flags);
  flags.loop.sum_loss = flags.training.sum_loss;
  const Model& model = file.model;
  RefuseWithPipeline(arguments, file.plan, {"--trace", "--emulate-network", "--test-data"});
  const std::vector<Program> programs = LowerAndVerifyStages(file, file.plan);
  if (auto trained = WithoutMissingGradients({model, file.kernels, file.job, file.plan})) {
    static_cast<Model&>(file.model) = std::move(*trained);
  }
  std::vector<Model> stages(programs.size(), model);
  std::vector<SessionInput> inputs;
  for (std::size_t s = 0; s < stages.size(); ++s) {
    CutStage(stages[s], std::ssize(stages) * file.plan.pipeline_stages,
             static_cast<std::int64_t>(s), std::ssize(stages), plan, file.plan.pipeline_edge_layers,
             IsVShaped(file.plan.pipeline_schedule));
    inputs.push_back({stages[s], file.kernels, file.job, programs[s], flags.training});
  }
  if (NeedsProcesses(launch, flags.device)) {
    return StartProcesses(inputs.front(), plan);
  }
  const std::unique_ptr<Dataset> data = OpenDataset(flags.data, model, flags.training.seed);
  const Sampler sampler{data->size(), file.job.global_batch, flags.training.seed,
                        flags.training.shuffle, flags.training.epoch_tail};
  CheckSampler(sampler, "--data");
  const std::unique_ptr<HubWeights> weights = OpenWeights(flags, model, launch, plan);
  CheckTrace(flags, launch.rank == 0);
  const std::unique_ptr<Dataset> test_data =
      flags.test_data.empty() ? nullptr : OpenDataset(flags.test_data, model, flags.training.seed);
  std::optional<StopSignals> signals;
  if (flags.saves_on_signal && !(flags.checkpoint.empty() && flags.trace.empty())) {
    signals.emplace();
  }
  return Train(
      arguments, flags,
      {file, programs.front(), inputs, launch, *data, sampler, weights.get(), test_data.get()});
}

}  // namespace shardwright
