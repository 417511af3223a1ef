#include <array>
#include <cstdint>
#include <cstdio>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include <nlohmann/json.hpp>

#include "cli/collect_trace.h"
#include "cli/command.h"
#include "cli/device_flags.h"
#include "cli/evaluator.h"
#include "cli/flow.h"
#include "cli/forward_plan.h"
#include "cli/run_flags.h"
#include "cli/run_loop.h"
#include "cli/run_processes.h"
#include "cli/run_session.h"
#include "cli/table.h"
#include "core/error.h"
#include "core/json.h"
#include "core/writable.h"
#include "executor/checkpoint/checkpoint.h"
#include "executor/checkpoint/run_checkpoints.h"
#include "executor/checkpoint/save.h"
#include "executor/data/batch.h"
#include "executor/host/session.h"
#include "executor/host/together.h"
#include "planner/evaluate.h"
#include "schedule/plan_file.h"
#include "simulator/costs/pricer.h"
#include "traces/chrome_write.h"

namespace shardwright {
namespace {

using Json = nlohmann::ordered_json;

constexpr const char* kAbout = R"(Runs a plan for real: trains on this machine.

Every rank is a thread, or a process started by mpirun, torchrun or srun.

Examples:
  shardwright run plan.json --steps 20
  shardwright run plan.json --steps 100 --data train-images-idx3-ubyte.gz --trace run.json.gz
  shardwright run plan.json --steps 5 --emulate-network --json
  shardwright run plan.json --epochs 14 --data train-images-idx3-ubyte.gz \
    --test-data t10k-images-idx3-ubyte.gz --training mnist.json --checkpoint checkpoints

  mpirun -np 4 shardwright run plan.json --steps 20
  torchrun --no-python --nproc-per-node 4 shardwright run plan.json --steps 20
  shardwright run plan.json --device cuda
  torchrun --no-python --nnodes 2 --nproc-per-node 8 ... shardwright run plan.json --device cuda
  shardwright run plan.json --device cuda --loopback 4

The plan must be made with the device's kernel set: --kernel-set shardwright-host, or
shardwright-cuda-plain, -gelu or -fused for --device cuda. There every rank has a GPU and a process,
which the program starts itself on one machine and a launcher on several; --loopback runs all ranks
on one GPU. Exits with 5 when a rank fails, and with 4 when there is no GPU.)";

constexpr std::array<PositionalRow, 1> kPositionals = {
    {{"PLAN", "plan file or - (standard input)", "run needs a plan file, or - for standard input",
      false, FileRole::kRead}}};

constexpr std::array<FlagRow, 18> kFlags = {{
    {"--steps", "N", "optimizer steps, those before a resumed checkpoint included (default 10)"},
    {"--epochs", "N", "passes over the data, instead of --steps; prints a line for each"},
    {"--test-data", "SPEC", "with --epochs: data for loss and accuracy after each",
     FileRole::kRead},
    {"--checkpoint", "FOLDER", "save checkpoints into this folder, one at the end"},
    {"--every", "N", "with --checkpoint: also save every N steps"},
    {"--keep", "N", "with --checkpoint: how many to keep (default 3)"},
    kDeviceFlag,
    kLoopbackFlag,
    kRendezvousKeyFlag,
    {"--reduce", "any|ordered",
     "ordered: refuse a device that does not sum in the order of the ranks (host and --loopback "
     "do)"},
    {"--graphs", "off|on|auto",
     "with --device cuda: launch stretches of ops as CUDA graphs (default off; auto: where "
     "simulate says that launches cost 2 % of a step)"},
    {"--data", "SPEC",
     "IDX images, text, token file (.bin), or random (default); see docs/training.md",
     FileRole::kRead},
    {"--training", "FILE", "hyper-parameters, schedule and seeds; see docs/training.md",
     FileRole::kRead},
    {"--seed", "N", "initial weights, dropout, order of the samples (default 1)"},
    {"--trace", "FILE", "write a trace for Perfetto; compressed when FILE ends in .gz",
     FileRole::kWriteWhen},
    {"--timeout", "TIME", "how long a rank waits for the others (default \"60 s\")"},
    {"--memory-limit", "SIZE", "device memory of one rank (default: no limit)"},
    {"--delays", "SEED", "adversarial scheduling: random delays in every stream, by this seed"},
}};

constexpr std::array<SwitchRow, 4> kSwitches = {{
    {"--resume", "go on from the newest checkpoint in --checkpoint, if there is one"},
    {"--emulate-network", "collectives take as long as simulate predicts for the plan's cluster"},
    {"--poison", "fill memory with NaNs when it is allocated"},
    kInsecureNetworkSwitch,
}};

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

// What the steps of a run did, in figures.
struct Throughput {
  double tokens_per_second = 0.0;
  double gflop_per_second = 0.0;
};
Throughput MeanOver(const PlanFile& file, std::int64_t steps, Seconds time) {
  const Model& model = file.model.model;
  const double samples =
      static_cast<double>(file.job.global_batch) * static_cast<double>(steps) / time.value;
  const double passes = file.job.mode == JobMode::kTrain ? 1.0 : 1.0 / 3.0;
  return {samples * static_cast<double>(model.tokens_per_sample),
          samples * ConventionFlopsPerSample(model).value * passes / 1e9};
}

// One line per step on standard error, for people.
class Progress {
 public:
  Progress(const PlanFile& file, std::int64_t steps) : file_(file), steps_(steps) {}

  void operator()(const StepReport& report) {
    const Seconds time = ToSeconds(report.end - last_);
    last_ = report.end;
    const Throughput rate = MeanOver(file_, 1, time);
    std::fprintf(stderr, "step %lld/%lld  loss %.4f  %s  %.4g tokens/s  %.3g GFLOP/s\n",
                 static_cast<long long>(report.step) + 1, static_cast<long long>(steps_),
                 report.loss, Format(time).c_str(), rate.tokens_per_second, rate.gflop_per_second);
  }

 private:
  const PlanFile& file_;
  const std::int64_t steps_;
  SimTime last_;
};

// Before the first step, so that no run ends without what it was made for.
void CheckOutputs(const RunFlags& flags) {
  if (!flags.trace.empty()) {
    CheckWritable(flags.trace);
  }
  if (!flags.checkpoint.empty()) {
    MakeCheckpointFolder(flags.checkpoint);
  }
}

Json EpochsJson(const std::vector<EpochReport>& epochs) {
  Json list = Json::array();
  for (const EpochReport& epoch : epochs) {
    Json entry = {{"epoch", epoch.epoch + 1}, {"train_loss", epoch.train_loss}};
    if (epoch.has_test) {
      entry["test_loss"] = epoch.test.MeanLoss();
      entry["test_correct"] = epoch.test.correct;
      entry["test_count"] = epoch.test.counted;
    }
    list.push_back(std::move(entry));
  }
  return list;
}

std::string ReportJson(const PlanFile& file, const LoopReport& loop, const Throughput& rate,
                       RunSession& session, const Program& program) {
  Json json;
  json["schema"] = "shardwright-run";
  json["schema_version"] = 1;
  json["device"] = session.device();
  json["ranks"] = file.cluster.RankCount();
  json["tokens_per_s"] = rate.tokens_per_second;
  json["gflop_per_s"] = rate.gflop_per_second;
  json["memory"] = {{"arena_bytes", session.placement().device_size.value},
                    {"host_arena_bytes", session.placement().host_size.value},
                    {"predicted_peak_allocated_bytes", PeakAllocated(program).value}};
  if (session.is_on_gpu()) {
    const GpuMemory gpu = session.gpu_memory();
    json["memory"]["gpu"] = {{"total_bytes", gpu.total.value},
                             {"before_bytes", gpu.before.value},
                             {"arenas_bytes", gpu.arenas.value},
                             {"set_up_bytes", gpu.set_up.value},
                             {"since_bytes", gpu.since.value}};
  }
  json["steps"] = Json::array();
  for (const StepReport& step : loop.steps) {
    json["steps"].push_back(
        {{"step", step.step}, {"loss", step.loss}, {"end_s", ToSeconds(step.end).value}});
  }
  json["epochs"] = EpochsJson(loop.epochs);
  return json.dump(2) + "\n";
}

// The arena, and what it has to do with the peak that `simulate` tells for an allocator.
std::string MemoryText(RunSession& session, const Program& program) {
  const Bytes placed = session.placement().device_size;
  const Bytes peak = PeakAllocated(program);
  const Bytes aligned = PeakAllocated(program, PlaceOptions().alignment);
  const auto signed_text = [](Bytes size) {
    return size < Bytes(0) ? "-" + Format(Bytes(0) - size) : Format(size);
  };
  std::string text = "memory per rank   " + Format(placed) + " placed = allocated peak " +
                     Format(peak) + " + alignment " + Format(aligned - peak) + " + packing " +
                     signed_text(placed - aligned) + '\n';
  if (session.is_on_gpu()) {
    const GpuMemory gpu = session.gpu_memory();
    text += "memory of the GPU " + Format(gpu.total) + ": before " + signed_text(gpu.before) +
            ", arenas " + Format(gpu.arenas) + ", set-up " + signed_text(gpu.set_up) + ", since " +
            signed_text(gpu.since) + '\n';
  }
  return text;
}

std::string ReportText(const PlanFile& file, const std::vector<StepReport>& steps,
                       const Throughput& rate, RunSession& session, const Program& program) {
  char line[200];
  std::string text = TitleOf(file) + ": " + std::to_string(steps.size()) + " steps\n";
  if (steps.empty()) {
    return text + "nothing was left to do\n";
  }
  std::snprintf(line, sizeof line, "loss              %.6f -> %.6f\n", steps.front().loss,
                steps.back().loss);
  text += line;
  std::snprintf(line, sizeof line, "throughput        %.4g tokens/s, %.3g GFLOP/s over all ranks\n",
                rate.tokens_per_second, rate.gflop_per_second);
  text += line;
  text += "total time        " + Format(ToSeconds(steps.back().end)) + '\n';
  return text + MemoryText(session, program);
}

// The forward half of the plan on test data; null without test data.
struct TestSetUp {
  TestSetUp(const PlanFile& file, const RunFlags& flags, const RunPlace& place)
      : forward(file),
        data(OpenDataset(flags.test_data, file.model.model, flags.training.seed)),
        evaluator({file.model.model, file.kernels, forward.job, forward.plan, forward.program,
                   flags.training},
                  flags.host, place, *data, forward.job.global_batch) {
    EndProcessOnFault(evaluator.session(), flags.host.processes);
  }

  ForwardPlan forward;
  std::unique_ptr<Dataset> data;
  Evaluator evaluator;
};

void ResumeIfAsked(const PlanFile& file, const RunFlags& flags, const Sampler& sampler,
                   const RunProcesses& group, Runtime& runtime) {
  if (!flags.resume) {
    return;
  }
  const std::string latest = NewestCheckpoint(flags.checkpoint, group.get());
  if (latest.empty()) {
    return;
  }
  const Wait wait = WaitForFiles(file.model.model, file.job, "reading of the checkpoint");
  AllOrNone(group.get(), MessagePassing::kAll, wait, [&] {
    const Checkpoint checkpoint(latest);
    CheckFits(checkpoint, file.model.model, file.job.optimizer.kind);
    CheckContinues(checkpoint, sampler);
    VerifyShare(checkpoint, group.get());
    Resume(checkpoint, file.model.model, file.job, runtime, true);
  });
  if (group.is_first()) {
    std::fprintf(stderr, "resumed from %s\n", latest.c_str());
  }
}

void WriteReport(const PlanFile& file, const LoopReport& loop, RunSession& session,
                 const Program& program, bool as_json) {
  if (const std::string graphs = session.graphs(); !graphs.empty()) {
    std::fprintf(stderr, "graphs: %s\n", graphs.c_str());
  }
  const std::vector<StepReport>& steps = loop.steps;
  Throughput rate;
  if (!steps.empty()) {
    // The first step warms caches up; a run of one step has no other.
    const std::size_t skipped = steps.size() > 1 ? 1 : 0;
    const SimTime begin = skipped > 0 ? steps.front().end : SimTime(0);
    rate = MeanOver(file, std::ssize(steps) - static_cast<std::int64_t>(skipped),
                    ToSeconds(steps.back().end - begin));
  }
  WriteFileAtomically("-", as_json ? ReportJson(file, loop, rate, session, program)
                                   : ReportText(file, steps, rate, session, program));
}

void WriteTrace(const PlanFile& file, const Program& program, const RunSession& session,
                const Trace& trace, const std::string& path) {
  ChromeOptions chrome;
  chrome.source = "measured on " + session.device();
  chrome.plan = PlanFileJson(file);
  WriteChromeTrace(program, trace, chrome, path);
}

// By the plan's prices, whether steps are shorter by 2 % where launches take the host no time.
bool LaunchesCost(const PlanFile& file) {
  PlanFile without = file;
  without.profile.host.kernel_launch.value = Seconds(0);
  const EvaluateOptions options{.reserved = false};
  const Seconds plain = ToSeconds(Evaluate(file, options).step_time);
  const Seconds fast = ToSeconds(Evaluate(without, options).step_time);
  std::fprintf(stderr, "a step takes %s, predicted; %s if launches took no time\n",
               Format(plain).c_str(), Format(fast).c_str());
  return fast.value * 1.02 <= plain.value;
}

bool WantsGraphs(const PlanFile& file, const RunFlags& flags) {
  const bool wants =
      flags.graphs == Graphs::kOn || (flags.graphs == Graphs::kAuto && LaunchesCost(file));
  if (wants && !flags.trace.empty()) {
    std::fprintf(stderr, "warning: a traced run times every op by itself: no graphs\n");
  }
  return wants && flags.trace.empty();
}

int RunRun(const Arguments& arguments) {
  RunFlags flags = ReadRunFlags(arguments);
  const PlanFile file = ReadPlanFile(arguments.Get("PLAN").text, arguments.streams);
  ReadTraining(arguments, file.job, flags);
  const Launch launch = LaunchOf(arguments);
  CheckLoopback(flags.device, file.cluster.RankCount(), launch);
  CheckReduce(flags);
  flags.loop.sum_loss = flags.training.sum_loss;
  const Model& model = file.model.model;
  const Program program = LowerAndVerify(file);
  const SessionInput input{model, file.kernels, file.job, file.plan, program, flags.training};
  if (NeedsProcesses(launch, flags.device)) {
    return StartProcesses(input, arguments.Get("PLAN").text);
  }
  const std::unique_ptr<Dataset> data = OpenDataset(flags.data, model, flags.training.seed);
  const Sampler sampler{data->size(), file.job.global_batch, flags.training.seed,
                        flags.training.shuffle, flags.training.epoch_tail};
  CheckSampler(sampler, "--data");
  RunOptions run;
  run.trace = !flags.trace.empty();
  run.poison = arguments.Has("--poison");
  run.inputs = [&](const BatchKey& key, std::span<const View> views) {
    WriteBatch(model, *data, sampler, {key.step, key.first_sample, key.count}, views);
  };
  run.epoch_of = [&](std::int64_t step) { return EpochOf(sampler, step); };
  if (arguments.Has("--emulate-network")) {
    run.durations = NetworkDurations(file, program);
  }
  if (launch.rank == 0) {
    CheckOutputs(flags);
  }
  const RunProcesses group(launch, file.cluster.RankCount(), flags.host.timeout);
  MessagePassing* const processes = flags.host.processes = group.get();
  const bool is_first = group.is_first();
  if (processes != nullptr) {
    JoinRun(*processes, run);
  }
  flags.loop.prints_epochs = flags.loop.prints_epochs && is_first;
  if (is_first) {
    run.on_step = Progress(file, TotalSteps(flags.loop, sampler));
  }
  const RunPlace place{.gpu = flags.device.GpuOf(launch), .graphs = WantsGraphs(file, flags)};
  RunSession session(input, flags.host, run, place);
  EndProcessOnFault(session, processes);
  session.runtime().Initialize();
  ResumeIfAsked(file, flags, sampler, group, session.runtime());
  std::unique_ptr<TestSetUp> test;
  if (!flags.test_data.empty()) {
    test = std::make_unique<TestSetUp>(
        file, flags, RunPlace{.gpu = place.gpu, .beside = &session, .graphs = place.graphs});
  }
  std::unique_ptr<RunCheckpoints> checkpoints;
  if (!flags.checkpoint.empty()) {
    checkpoints = std::make_unique<RunCheckpoints>(flags.checkpoint, flags.keep, model, file.job,
                                                   program, sampler, processes);
  }
  const LoopReport loop =
      RunLoop(flags.loop, {model, sampler, session.runtime(),
                           session.runtime().rank_count() * file.plan.accumulation,
                           checkpoints.get(), test ? &test->evaluator : nullptr});
  const Trace trace = flags.trace.empty() ? Trace() : TakeWholeTrace(session, program, processes);
  FinishTogether(processes);  // nobody waits while process 0 writes
  if (is_first && !flags.trace.empty()) {
    WriteTrace(file, program, session, trace, flags.trace);
  }
  if (is_first && flags.trace != "-") {
    WriteReport(file, loop, session, program, arguments.IsJson());
  }
  return kExitOk;
}

}  // namespace

extern const Command kRunCommand;
const Command kRunCommand = {"run", kAbout, kPositionals, kFlags, kSwitches, RunRun};

}  // namespace shardwright
