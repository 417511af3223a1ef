#include "analysis/judge.h"

#include <array>
#include <cmath>
#include <functional>
#include <string_view>
#include <utility>

#include "analysis/confidence.h"
#include "core/error.h"
#include "core/json.h"
#include "core/ranges.h"
#include "core/text.h"
#include "planner/emitters/unit_classes.h"
#include "planner/evaluate.h"
#include "planner/search.h"
#include "schedule/wrap.h"
#include "topologies/mesh.h"
#include "topologies/scale_links.h"

namespace shardwright {
namespace {

// Two runs of one job differ by as much.
constexpr double kNoise = 0.03;
// Of the difference; what explains less is no cause.
constexpr double kLeastExplained = 1.0 / 3;

struct JudgedStep {
  Seconds time;
  Bytes memory;
};

// The plan's job under changes, as the log counts it.
class SimulatedRun {
 public:
  SimulatedRun(const PlanFile& file, const StepLog& log) : file_(file), log_(log) {}

  // For the plan's tokens: a step of half the samples counts twice where the log says a rate.
  [[nodiscard]] JudgedStep Whole(const PlanFile& file) const {
    const Outcome outcome = Evaluate(file, file.plan, {.telling = Telling::kOnAverage});
    const Seconds time = outcome.step_time * SharesOf(file);
    return {time > Seconds(0) ? time : Time(file), Counted(outcome)};  // 0: it does not fit
  }
  [[nodiscard]] Seconds Time(const PlanFile& file) const {
    const EvaluateOptions rough = {.reserved = false, .telling = Telling::kRoughly};
    return Evaluate(file, file.plan, rough).step_time * SharesOf(file);
  }
  [[nodiscard]] const PlanFile& file() const { return file_; }
  [[nodiscard]] const StepLog& log() const { return log_; }

 private:
  [[nodiscard]] Bytes Counted(const Outcome& outcome) const {
    return log_.is_reserved ? std::max(outcome.reserved, outcome.device_peak.total)
                            : outcome.device_peak.total;
  }
  [[nodiscard]] double SharesOf(const PlanFile& file) const {
    return log_.step_time ? 1.0
                          : static_cast<double>(file_.job.global_batch) /
                                static_cast<double>(file.job.global_batch);
  }

  const PlanFile& file_;
  const StepLog& log_;
};

// The step time that the log means, for a step of the plan's tokens.
Seconds MeasuredStep(const PlanFile& file, const StepLog& log, Seconds predicted,
                     std::string& assumed) {
  const auto ranks = static_cast<double>(MeshOf(file.plan).RankCount());
  const auto samples = static_cast<double>(file.job.global_batch);
  const double tokens =
      samples * static_cast<double>(std::max<std::int64_t>(file.model.sequence_length, 1));
  if (log.tokens_per_second_per_gpu) {
    return Seconds(tokens / ranks / *log.tokens_per_second_per_gpu);
  }
  if (log.tokens_per_second) {
    const Seconds of_all(tokens / *log.tokens_per_second);
    const auto distance = [&](Seconds step) { return std::abs(std::log(Ratio(step, predicted))); };
    const bool is_one = distance(of_all / ranks) < distance(of_all) && ranks > 1;
    assumed = ranks == 1 ? ""
              : is_one   ? "tokens per second are of one GPU"
                         : "tokens per second are of all GPUs";
    return is_one ? of_all / ranks : of_all;
  }
  if (log.step_time) {
    const bool is_micro = log.framework == "progress bar" && file.plan.accumulation > 1;
    assumed = is_micro ? "an iteration of the progress bar is an optimizer step" : "";
    return *log.step_time;
  }
  return Seconds(samples / *log.samples_per_second);
}

// A way in which the run may differ. `make` changes the file; false: that cannot be here.
struct RunChange {
  const char* name;
  const char* check;
  std::function<bool(PlanFile&)> make;
};
// The same of any strength from 1 (none) to `most`. One meets strengths around `usual`, most of
// them within a factor of `spread`: one network card of eight, TCP instead of RDMA, a power limit.
struct Slowing {
  const char* name;  // "the network runs at %s of its rate"
  const char* check;
  double usual, spread, most;
  bool is_share;  // told as 1 / strength
  std::function<bool(PlanFile&, double strength)> make;
};

bool Recompute(PlanFile& file, bool is_on) {
  std::vector<RecomputeRegion> regions =
      is_on ? FullRecompute(file.model, BlocksOf(file.model)) : std::vector<RecomputeRegion>();
  const bool changes = regions != file.plan.recompute;
  file.plan.recompute = std::move(regions);
  return changes;
}

// Of the same global batch.
bool Split(PlanFile& file, bool is_finer) {
  Plan& plan = file.plan;
  std::int64_t& from = is_finer ? plan.micro_batch : plan.accumulation;
  std::int64_t& to = is_finer ? plan.accumulation : plan.micro_batch;
  if (from % 2 != 0) {
    return false;
  }
  from /= 2;
  to *= 2;
  return true;
}

bool SetSync(PlanFile& file, SyncMode sync) {
  const bool changes = file.plan.accumulation > 1 && file.plan.sync != sync;
  file.plan.sync = sync;
  return changes;
}

// The stack without or with torch.compile, whose attention and loss stay the plan's.
bool Recompile(PlanFile& file, bool is_compiled) {
  KernelSetOptions set = FindKernelSet(is_compiled ? "torch-compile" : "torch-eager", "judge");
  set.attention = file.kernels.attention;
  set.loss_chunks = file.kernels.loss_chunks;
  std::swap(set, file.kernels);
  return set.fused_elementwise != is_compiled && !set.host_kernels && !set.cuda_kernels;
}

const std::array<RunChange, 12>& Changes() {
  static const std::array<RunChange, 12> changes = {{
      {"every block is recomputed", "look for activation checkpointing in the run's settings",
       [](PlanFile& f) { return Recompute(f, true); }},
      {"nothing is recomputed", "look for activation checkpointing in the run's settings",
       [](PlanFile& f) { return Recompute(f, false); }},
      {"attention runs unfused, with the matrix of scores in memory",
       "print the model's attention implementation; a trace shows softmax kernels",
       [](PlanFile& f) {
         return std::exchange(f.kernels.attention, AttentionImpl::kMaterialized) !=
                AttentionImpl::kMaterialized;
       }},
      {"element-wise kernels are not fused (torch.compile is off or falls back)",
       "run with TORCH_LOGS=graph_breaks,recompiles",
       [](PlanFile& f) { return Recompile(f, false); }},
      {"element-wise kernels are fused (torch.compile is on)",
       "look for compile in the run's settings", [](PlanFile& f) { return Recompile(f, true); }},
      {"the loss runs in chunks or in one fused kernel",
       "look for Liger, cut cross-entropy or a chunked loss",
       [](PlanFile& f) {
         const std::int64_t chunks = std::exchange(f.kernels.loss_chunks, 8);
         return chunks == 1 && f.job.mode == JobMode::kTrain;
       }},
      {"gradients are reduced in every micro-batch",
       "look for no_sync or set_requires_gradient_sync in the loop",
       [](PlanFile& f) { return SetSync(f, SyncMode::kEvery); }},
      {"gradients are reduced in the last micro-batch alone",
       "look for no_sync or set_requires_gradient_sync in the loop",
       [](PlanFile& f) { return SetSync(f, SyncMode::kLast); }},
      {"micro-batches are half as large, and twice as many",
       "print the shape of a batch in the loop", [](PlanFile& f) { return Split(f, true); }},
      {"micro-batches are twice as large, and half as many",
       "print the shape of a batch in the loop", [](PlanFile& f) { return Split(f, false); }},
      {"units are gathered again in backward", "look for reshard_after_forward",
       [](PlanFile& f) {
         bool gathers = false;
         for (UnitPlan& unit : f.plan.units) {
           gathers |= unit.reshard.kind == Reshard::Kind::kNever && unit.name != "root";
           unit.reshard.kind = unit.name == "root" ? unit.reshard.kind : Reshard::Kind::kAlways;
         }
         return gathers;
       }},
      {"a step has one micro-batch: gradients are not accumulated",
       "print the accumulation that the loop uses",
       [](PlanFile& f) {
         f.job.global_batch /= f.plan.accumulation;
         return std::exchange(f.plan.accumulation, 1) > 1;
       }},
  }};
  return changes;
}

bool SlowLinks(PlanFile& file, std::string_view level, double strength) {
  const std::vector<std::string> levels = LinkLevels(file.cluster);
  const bool is_there = IsIn(levels, level);
  if (is_there) {
    ScaleLinks(file.cluster, level, 1 / strength, "judge");
  }
  return is_there;
}

bool SlowChip(PlanFile& file, double strength) {
  ComputeProfile& compute = file.profile.compute;
  for (auto& rate : compute.gemm) {
    if (rate) {
      rate->value /= strength;
    }
  }
  for (AttentionProfile* attention : {&compute.attention, &compute.cudnn_attention,
                                      &compute.flash3_attention, &compute.own_attention}) {
    attention->forward.value /= strength;
    attention->backward.value /= strength;
  }
  for (Number<double>* rate : {&compute.elementwise, &compute.reduction, &compute.optimizer}) {
    rate->value /= strength;
  }
  return true;
}

bool SlowHost(PlanFile& file, double strength) {
  HostProfile& host = file.profile.host;
  for (Number<Seconds>* cost :
       {&host.kernel_launch, &host.op_issue, &host.collective_issue, &host.unit_hook}) {
    cost->value = cost->value * strength;
  }
  return true;
}

const std::array<Slowing, 4>& Slowings() {
  static const std::array<Slowing, 4> slowings = {{
      {"the network runs at %s of its rate",
       "run nccl-tests (all_gather_perf -b 64M) over the nodes", 8, 2.5, 60, true,
       [](PlanFile& f, double s) { return SlowLinks(f, "network", s); }},
      {"links between GPUs of a node run at %s of their rate",
       "run nccl-tests in one node, and nvidia-smi topo -m", 8, 2.5, 60, true,
       [](PlanFile& f, double s) { return SlowLinks(f, "nvlink", s) || SlowLinks(f, "pcie", s); }},
      {"the GPUs, or one of them, work at %s of their rate",
       "nvidia-smi -q -d CLOCK,PERFORMANCE on every node: power limit, heat", 1.3, 1.15, 4, true,
       SlowChip},
      {"the host issues kernels %s times slower",
       "py-spy, CPU clocks and pinning; a trace shows gaps between kernels", 6, 2.5, 40, false,
       SlowHost},
  }};
  return slowings;
}

// The strength at which the step takes `target`; 0 where none up to `most` does, or it cannot be.
double FindStrength(const SimulatedRun& simulated, const Slowing& slowing, Seconds target) {
  const auto time = [&](double strength) {
    PlanFile file = simulated.file();
    return slowing.make(file, strength) ? simulated.Time(file) : Seconds(0);
  };
  double low = 0;  // logarithms
  double high = std::log(slowing.most);
  if (time(slowing.most) < target) {
    return 0;
  }
  for (int i = 0; i < 12; ++i) {
    const double middle = (low + high) / 2;
    (time(std::exp(middle)) < target ? low : high) = middle;
  }
  return std::exp(high);
}

std::string NameOf(const Slowing& slowing, double strength) {
  const std::string text = slowing.name;
  return std::string(text).replace(
      text.find("%s"), 2,
      slowing.is_share ? Fixed(100 / strength, "%.2g %%") : Fixed(strength, "%.2g"));
}

double SquareOf(double x) {
  return x * x;
}

double Unlikelihood(const Slowing& slowing, double strength) {
  return SquareOf(std::log(strength / slowing.usual) / std::log(slowing.spread));
}

double Mismatch(const Judgement& judgement, const JudgedStep& step) {
  const double time = std::log(Ratio(step.time, judgement.measured)) / kNoise;
  const double memory = judgement.measured_memory ? Ratio(step.memory - *judgement.measured_memory,
                                                          judgement.memory_error)
                                                  : 0.0;
  return SquareOf(time) + SquareOf(memory);
}

bool Explains(const Judgement& judgement, const JudgedStep& step) {
  const double whole = std::log(Ratio(judgement.measured, judgement.predicted));
  const double part = std::log(Ratio(step.time, judgement.predicted));
  constexpr double kWrongWay = -0.05;  // what makes a slow step faster is at most a part of a pair
  if (!judgement.IsTimeAsPredicted() && part / whole < kWrongWay) {
    return false;
  }
  const bool time = !judgement.IsTimeAsPredicted() && part / whole > kLeastExplained;
  if (judgement.IsMemoryAsPredicted()) {
    return time;
  }
  const Bytes missing = *judgement.measured_memory - judgement.predicted_memory;
  return time || Ratio(step.memory - judgement.predicted_memory, missing) > kLeastExplained;
}

void AddChanges(const SimulatedRun& simulated, Judgement& judgement) {
  for (const RunChange& change : Changes()) {
    PlanFile file = simulated.file();
    if (!change.make(file)) {
      continue;
    }
    try {
      const JudgedStep step = simulated.Whole(file);
      if (Explains(judgement, step)) {
        judgement.causes.push_back(
            {change.name, change.check, step.time, step.memory, Mismatch(judgement, step) + 1});
      }
    } catch (const InputError&) {
      continue;  // the dialect has no such plan, so the run has none either
    }
  }
}

void AddSlowings(const SimulatedRun& simulated, Judgement& judgement) {
  if (judgement.measured < judgement.predicted || judgement.IsTimeAsPredicted()) {
    return;
  }
  const JudgedStep step = {judgement.measured, judgement.predicted_memory};
  const double memory = Mismatch(judgement, step);
  // What simulations of memory and rough ones differ by is not the cause's.
  const Seconds target =
      simulated.Time(simulated.file()) * Ratio(judgement.measured, judgement.predicted);
  for (const Slowing& slowing : Slowings()) {
    if (const double strength = FindStrength(simulated, slowing, target); strength > 1) {
      judgement.causes.push_back({NameOf(slowing, strength), slowing.check, step.time, std::nullopt,
                                  memory + Unlikelihood(slowing, strength)});
    }
  }
  const Seconds extra = judgement.measured - judgement.predicted;
  judgement.causes.push_back(
      {"the loop waits " + Format(extra) + " per step for data, logging or checkpoints",
       "run with data made in memory, and without saving", step.time, std::nullopt,
       memory + 1 + SquareOf(Ratio(extra, judgement.predicted) / 0.25)});
}

// Time and memory are the measured ones, as far as a log tells.
bool IsExplained(const Judgement& judgement, const JudgedStep& step) {
  return Mismatch(judgement, step) <= SquareOf(2);
}

// Two changes, or a change and a slowing, where no single cause explains time and memory. A pair is
// less likely than each of its causes.
void AddPairs(const SimulatedRun& simulated, Judgement& judgement) {
  const auto add = [&](const std::string& name, const std::string& check, const RunChange& one,
                       const JudgedStep& step, double unlikelihood) {
    judgement.causes.push_back({name + ", and " + one.name, check + "; " + one.check, step.time,
                                step.memory, Mismatch(judgement, step) + unlikelihood});
  };
  for (std::size_t i = 0; i < Changes().size(); ++i) {
    const RunChange& one = Changes()[i];
    PlanFile file = simulated.file();
    if (!one.make(file)) {
      continue;
    }
    try {
      const JudgedStep step = simulated.Whole(file);
      const JudgedStep slowed = {judgement.measured, step.memory};
      const SimulatedRun changed(file, simulated.log());
      const Seconds target = changed.Time(file) * Ratio(judgement.measured, step.time);
      for (const Slowing& slowing : Slowings()) {
        const bool may_be = step.time < judgement.measured && IsExplained(judgement, slowed);
        const double strength = may_be ? FindStrength(changed, slowing, target) : 0;
        if (strength > 1) {
          add(NameOf(slowing, strength), slowing.check, one, slowed,
              4 + Unlikelihood(slowing, strength));
        }
      }
      for (std::size_t j = i + 1; j < Changes().size(); ++j) {
        PlanFile both = file;
        const RunChange& other = Changes()[j];
        const JudgedStep at = other.make(both) ? simulated.Whole(both) : step;
        if (!(both.plan == file.plan && both.kernels == file.kernels) &&
            IsExplained(judgement, at)) {
          add(other.name, other.check, one, at, 4);
        }
      }
    } catch (const InputError&) {
      continue;  // the dialect has no such plan
    }
  }
}

}  // namespace

bool Judgement::IsTimeAsPredicted() const {
  return std::abs(Difference()) <= band;
}

bool Judgement::IsMemoryAsPredicted() const {
  return !measured_memory ||
         std::abs(Ratio(*measured_memory - predicted_memory, memory_error)) <= 1;
}

Judgement JudgeLog(const PlanFile& file, const StepLog& log) {
  const SimulatedRun simulated(file, log);
  const JudgedStep step = simulated.Whole(file);
  Judgement judgement;
  judgement.predicted = step.time;
  judgement.predicted_memory = step.memory;
  judgement.measured = MeasuredStep(file, log, step.time, judgement.assumed);
  judgement.measured_memory = log.memory;
  judgement.band = ConfidenceOf(file).band;
  const auto whole = static_cast<double>(file.cluster.gpu.usable_memory.value.value);
  judgement.memory_error =
      Bytes(static_cast<std::int64_t>(DefaultMargin(file.cluster, file.profile) * whole));
  if (!judgement.IsTimeAsPredicted() || !judgement.IsMemoryAsPredicted()) {
    AddChanges(simulated, judgement);
    AddSlowings(simulated, judgement);
    const auto is_whole = [&](const Cause& cause) {
      return IsExplained(judgement,
                         {cause.step_time, cause.memory.value_or(judgement.predicted_memory)});
    };
    if (NoneOf(judgement.causes, is_whole)) {
      AddPairs(simulated, judgement);
    }
    StableSortBy(judgement.causes, &Cause::mismatch);
  }
  return judgement;
}

}  // namespace shardwright
