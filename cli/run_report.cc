#include "cli/run_report.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <cstdio>
#include <string>
#include <vector>

#include <nlohmann/json.hpp>

#include "cli/command.h"
#include "cli/flow.h"
#include "core/error.h"
#include "core/json.h"
#include "core/printable.h"
#include "core/text.h"
#include "executor/checkpoint/checkpoint.h"
#include "executor/checkpoint/run_checkpoints.h"

namespace shardwright {
namespace {

using Json = nlohmann::ordered_json;

// What the steps of a run did, in figures.
struct Throughput {
  double tokens_per_second = 0.0;
  double gflop_per_second = 0.0;
};
Throughput MeanOver(const PlanFile& file, std::int64_t steps, Seconds time) {
  const Model& model = file.model;
  const double samples =
      static_cast<double>(file.job.global_batch) * static_cast<double>(steps) / time.value;
  const double passes = file.job.mode == JobMode::kTrain ? 1.0 : 1.0 / 3.0;
  return {samples * static_cast<double>(model.tokens_per_sample),
          samples * ConventionFlopsPerSample(model).value * passes / 1e9};
}

double LearningRateOf(const TrainingOptions& training, const Sampler& sampler, std::int64_t step) {
  return LearningRateAt(training.schedule, training.optimizer.learning_rate, step,
                        EpochOf(sampler, step));
}

// One line per step on standard error, for people.
class Progress {
 public:
  Progress(const PlanFile& file, const TrainingOptions& training, const Sampler& sampler,
           std::int64_t steps)
      : file_(file), training_(training), sampler_(sampler), steps_(steps) {}

  void operator()(const StepReport& report) {
    const Seconds time = ToSeconds(report.end - last_);
    last_ = report.end;
    ++done_;
    const Throughput rate = MeanOver(file_, 1, time);
    std::array<char, 40> norm{};
    if (report.gradient_norm.has_value()) {
      std::snprintf(norm.data(), norm.size(), "  norm %.4g", *report.gradient_norm);
    }
    std::array<char, 256> line{};
    std::snprintf(line.data(), line.size(),
                  "step %lld/%lld  loss %.4f  lr %.4g%s  %s  %.4g tokens/s  %.3g GFLOP/s  %s left",
                  static_cast<long long>(report.step) + 1, static_cast<long long>(steps_),
                  report.loss, LearningRateOf(training_, sampler_, report.step), norm.data(),
                  Format(time).c_str(), rate.tokens_per_second, rate.gflop_per_second,
                  Format(Left(report)).c_str());
    Say(line.data());
  }

 private:
  // By the mean of the steps so far, the first aside, which warms caches up; what happens between
  // steps is in it.
  [[nodiscard]] Seconds Left(const StepReport& report) {
    if (done_ == 1) {
      first_ = report.end;
    }
    const Seconds so_far = ToSeconds(done_ == 1 ? report.end : report.end - first_);
    const auto steps = static_cast<double>(std::max<std::int64_t>(done_ - 1, 1));
    return Seconds(so_far.value / steps * static_cast<double>(steps_ - report.step - 1));
  }

  const PlanFile& file_;
  const TrainingOptions& training_;
  const Sampler& sampler_;
  const std::int64_t steps_;
  std::int64_t done_ = 0;
  SimTime first_, last_;
};

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

Json TestsJson(const std::vector<TestReport>& tests) {
  Json list = Json::array();
  for (const TestReport& test : tests) {
    list.push_back({{"step", test.step},
                    {"test_loss", test.test.MeanLoss()},
                    {"test_correct", test.test.correct},
                    {"test_count", test.test.counted}});
  }
  return list;
}

Json StepsJson(const std::vector<StepReport>& steps, const RunFlags& flags,
               const Sampler& sampler) {
  Json list = Json::array();
  for (const StepReport& step : steps) {
    Json entry = {{"step", step.step},
                  {"loss", step.loss},
                  {"learning_rate", LearningRateOf(flags.training, sampler, step.step)}};
    if (step.gradient_norm.has_value()) {
      entry["gradient_norm"] = *step.gradient_norm;
    }
    entry["end_s"] = ToSeconds(step.end).value;
    list.push_back(std::move(entry));
  }
  return list;
}

std::vector<FailedSave> FailedSaves(const Ran& ran) {
  return ran.checkpoints == nullptr ? std::vector<FailedSave>() : ran.checkpoints->failed();
}

std::string ReportJson(const Ran& ran, const Throughput& rate, RunSession& session) {
  Json json = ReportHead("shardwright-run");
  json["device"] = session.device();
  json["ranks"] = ran.file.cluster.RankCount();
  json["tokens_per_s"] = rate.tokens_per_second;
  json["gflop_per_s"] = rate.gflop_per_second;
  const ExecutorInput& largest = session.runtime().LargestInput();
  json["memory"] = {{"arena_bytes", largest.placement.device_size.value},
                    {"host_arena_bytes", largest.placement.host_size.value},
                    {"predicted_peak_allocated_bytes", PeakAllocated(largest.program).value}};
  if (session.is_on_gpu()) {
    const GpuMemory gpu = session.gpu_memory();
    json["memory"]["gpu"] = {{"total_bytes", gpu.total.value},
                             {"before_bytes", gpu.before.value},
                             {"arenas_bytes", gpu.arenas.value},
                             {"set_up_bytes", gpu.set_up.value},
                             {"since_bytes", gpu.since.value}};
  }
  json["steps"] = StepsJson(ran.loop.steps, ran.flags, ran.sampler);
  json["epochs"] = EpochsJson(ran.loop.epochs);
  json["tests"] = TestsJson(ran.loop.tests);
  json["interrupted"] = ran.loop.end == LoopEnd::kAsked;
  json["failed_checkpoints"] = Json::array();
  for (const FailedSave& failed : FailedSaves(ran)) {
    json["failed_checkpoints"].push_back({{"step", failed.step}, {"cause", failed.cause}});
  }
  return json.dump(2) + "\n";
}

// The arena, and what it has to do with the peak that `simulate` tells for an allocator.
std::string MemoryText(RunSession& session) {
  const auto& program = session.runtime().LargestInput().program;
  const Bytes placed = session.runtime().LargestInput().placement.device_size;
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
                       const Throughput& rate, RunSession& session) {
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
  return text + MemoryText(session);
}

// Throws RunError for a run that came to numbers which are none.
void CheckNumbers(const Ran& ran) {
  const LoopReport& loop = ran.loop;
  if (loop.end != LoopEnd::kNan && loop.end != LoopEnd::kNanState) {
    return;
  }
  std::string text = "step " + std::to_string(loop.end_step);
  if (loop.end == LoopEnd::kNan) {
    const auto step = std::find_if(loop.steps.begin(), loop.steps.end(), [&](const auto& report) {
      return report.step == loop.end_step;
    });
    text += ": the loss is " + std::string(std::isnan(step->loss) ? "not a number" : "infinite");
  } else {
    text += ": weights are no finite numbers";
  }
  const std::string good =
      ran.flags.checkpoint.empty() ? "" : FindLatestCheckpoint(ran.flags.checkpoint);
  throw RunError(text +
                 (good.empty() ? "; no checkpoint was saved before"
                               : "; the newest checkpoint before is " + good) +
                 "; --nan continue goes on in such a case");
}

// What became of the checkpoints. Throws EnvironmentError when the last one could not be saved.
void CheckSaved(const Ran& ran) {
  const std::vector<FailedSave> failed = FailedSaves(ran);
  if (failed.empty()) {
    return;
  }
  const std::string newest = FindLatestCheckpoint(ran.flags.checkpoint);
  const std::string text = "no checkpoint could be saved of step " +
                           Listed(failed, &FailedSave::step) + ": " + failed.back().cause +
                           (newest.empty() ? "; there is none" : "; the newest is " + newest);
  if (!ran.checkpoints->has_saved_last()) {
    throw EnvironmentError(text);
  }
  Say("warning: " + text);
}

}  // namespace

std::function<void(const StepReport& report)> MakeProgress(const PlanFile& file,
                                                           const TrainingOptions& training,
                                                           const Sampler& sampler,
                                                           std::int64_t steps) {
  return Progress(file, training, sampler, steps);
}

void WriteReport(const Ran& ran, RunSession& session, bool as_json) {
  if (const std::string graphs = session.graphs(); !graphs.empty()) {
    Say("graphs: " + graphs);
  }
  const std::vector<StepReport>& steps = ran.loop.steps;
  Throughput rate;
  if (!steps.empty()) {
    // The first step warms caches up; a run of one step has no other.
    const std::size_t skipped = steps.size() > 1 ? 1 : 0;
    const SimTime begin = skipped > 0 ? steps.front().end : SimTime(0);
    rate = MeanOver(ran.file, std::ssize(steps) - static_cast<std::int64_t>(skipped),
                    ToSeconds(steps.back().end - begin));
  }
  WriteFileAtomically(
      "-", as_json ? ReportJson(ran, rate, session) : ReportText(ran.file, steps, rate, session));
}

void CheckOutcome(const Ran& ran) {
  CheckNumbers(ran);
  CheckSaved(ran);
}

void SayInterrupted(const Ran& ran) {
  const std::string step = std::to_string(ran.loop.end_step);
  if (ran.checkpoints == nullptr) {
    Say("interrupted after step " + step);
  } else {
    Say("interrupted after step " + step + ", saved in " + ran.checkpoints->newest() +
        "; --resume goes on from there");
  }
}

}  // namespace shardwright
