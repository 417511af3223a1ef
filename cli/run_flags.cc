#include "cli/run_flags.h"

#include <array>
#include <cstddef>
#include <string_view>

#include "cli/flag_values.h"
#include "core/error.h"
#include "core/json.h"

namespace shardwright {
namespace {

constexpr std::int64_t kMostSteps = std::int64_t{1} << 32;

void ReadLoopFlags(const Arguments& arguments, RunFlags& flags) {
  arguments.SetCount("--epochs", kMostSteps, flags.loop.epochs);
  arguments.SetText("--test-data", flags.test_data);
  arguments.SetText("--checkpoint", flags.checkpoint);
  arguments.SetText("--init", flags.init);
  arguments.SetCount("--every", kMostSteps, flags.loop.every);
  arguments.SetCount("--keep", kMostSteps, flags.keep);
  arguments.SetCount("--eval-every", kMostSteps, flags.loop.eval_every);
  arguments.SetCount("--resume-from", kMostSteps, flags.resume_step);
  flags.resume = arguments.Has("--resume") || flags.resume_step > 0;
  flags.saves_on_signal = !arguments.Has("--no-save-on-signal");
  static constexpr std::array<std::string_view, 2> kAtNan = {"stop", "continue"};
  std::size_t at_nan = 0;
  arguments.SetChoice("--nan", kAtNan, at_nan);
  flags.loop.stops_at_nan = at_nan == 0;
  const auto needs = [&](bool given, bool has, const char* flag, const char* other) {
    if (given && !has) {
      throw UsageError(std::string(flag) + " needs " + other);
    }
  };
  const bool has_checkpoint = !flags.checkpoint.empty();
  needs(flags.resume, has_checkpoint, flags.resume_step > 0 ? "--resume-from" : "--resume",
        "--checkpoint FOLDER");
  needs(arguments.Get("--every").is_given(), has_checkpoint, "--every", "--checkpoint FOLDER");
  needs(arguments.Get("--keep").is_given(), has_checkpoint, "--keep", "--checkpoint FOLDER");
  needs(flags.loop.eval_every > 0, !flags.test_data.empty(), "--eval-every", "--test-data SPEC");
  if (flags.loop.epochs > 0 && arguments.Get("--steps").is_given()) {
    throw UsageError("--steps and --epochs contradict each other");
  }
  flags.loop.prints_tests = !arguments.IsJson();
}

// What only one of the devices has.
void CheckDeviceFlags(const Arguments& arguments, RunFlags& flags) {
  static constexpr std::array<std::string_view, 2> kReductions = {"any", "ordered"};
  std::size_t reduction = 0;
  arguments.SetChoice("--reduce", kReductions, reduction);
  flags.is_ordered = reduction == 1;
  static constexpr std::array<std::string_view, 3> kGraphs = {"off", "on", "auto"};
  std::size_t graphs = 0;
  arguments.SetChoice("--graphs", kGraphs, graphs);
  flags.graphs = static_cast<Graphs>(graphs);
  if (!flags.device.on_gpu) {
    if (flags.graphs != Graphs::kOff) {
      throw UsageError("--graphs needs --device cuda");
    }
    return;
  }
  if (arguments.Get("--threads").is_given()) {
    throw UsageError("--threads is of --device host: a GPU computes by itself");
  }
  for (const bool delays : {true, false}) {
    const char* const flag = delays ? "--delays" : "--emulate-network";
    if (delays ? arguments.Get(flag).is_given() : arguments.Has(flag)) {
      throw UsageError(std::string(flag) +
                       " is of --device host: a GPU's streams cannot be told "
                       "to be late");
    }
  }
}

}  // namespace

RunFlags ReadRunFlags(const Arguments& arguments) {
  RunFlags flags;
  arguments.SetCount("--steps", kMostSteps, flags.loop.steps);
  ReadLoopFlags(arguments, flags);
  arguments.SetText("--data", flags.data);
  arguments.SetText("--trace", flags.trace);
  arguments.SetCount("--seed", std::int64_t{1} << 60, flags.seed);
  SetTimeouts(arguments, flags.host);
  arguments.Set("--memory-limit", flags.host.memory_limit, ReadBytes);
  constexpr std::int64_t kMostThreads = 1024;
  flags.host.threads = 0;  // as many as there are cores for
  arguments.SetCount("--threads", kMostThreads, flags.host.threads);
  std::int64_t delay_seed = 0;
  arguments.SetCount("--delays", std::int64_t{1} << 60, delay_seed);
  if (delay_seed > 0) {
    flags.host.delay_seed = static_cast<std::uint64_t>(delay_seed);
    flags.host.delay_percent = 30;
  }
  if (arguments.IsJson() && flags.trace == "-") {
    throw UsageError("--json and --trace - both want standard output");
  }
  flags.device = ReadDeviceFlags(arguments);
  CheckDeviceFlags(arguments, flags);
  return flags;
}

void ReadTraining(const Arguments& arguments, const Job& job, RunFlags& flags) {
  flags.training = DefaultTrainingOptions(job);
  if (const Flag file = arguments.Get("--training"); file.is_given()) {
    flags.training_json = ReadTextFile(file.text);
    flags.training =
        ReadTrainingOptions(JsonValue::Parse(flags.training_json, file.text), job, flags.training);
  } else {
    CheckTrainingOptions(flags.training, job, Path("--training"));
  }
  if (flags.seed > 0) {
    flags.training.seed = static_cast<std::uint64_t>(flags.seed);
  }
}

void CheckReduce(const RunFlags& flags) {
  if (flags.is_ordered && flags.device.on_gpu && !flags.device.is_loopback) {
    throw InputError(
        "--reduce: got ordered, expected any: NCCL sums in an order of its own; --device "
        "host and --loopback keep the order of the ranks");
  }
}

}  // namespace shardwright
