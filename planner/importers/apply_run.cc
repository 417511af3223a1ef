// From settings to job and plan, by the functions that emitters check themselves with.

#include <algorithm>
#include <array>
#include <set>
#include <type_traits>
#include <variant>

#include "core/error.h"
#include "planner/emitters/emission.h"
#include "planner/emitters/hf_fsdp.h"
#include "planner/emitters/unit_classes.h"
#include "planner/importers/run_settings.h"
#include "schedule/wrap.h"

namespace shardwright {
namespace {

// Settings that name no choice of a plan.
constexpr std::array<std::string_view, 14> kSilent = {
    "output_dir",          "machine_rank",
    "rdzv_backend",        "main_process_ip",
    "main_process_port",   "optimizer.lr",
    "model.name",          "model.flavor",
    "task._name",          "criterion._name",
    "model._name",         "compute_environment",
    "optimizer.params.lr", "fsdp_config.fsdp_state_dict_type"};

void ApplyDdp(const std::string& mixed_precision, PlanFile& file) {
  file.plan = WithDialect(file.plan, Dialect::kDdp);
  file.plan.shard_size = 1;
  file.plan.replicate_size = file.cluster.RankCount();
  file.plan.units = {RootUnitOf(Reshard::Kind::kNever)};
  file.plan.offload = {};
  const DType param = mixed_precision == "bf16"   ? DType::kBf16
                      : mixed_precision == "fp16" ? DType::kFp16
                                                  : DType::kFp32;
  file.job.precision = {.master = DType::kFp32, .param = param, .reduce = DType::kFp32};
}

void RecomputeBlocks(PlanFile& file) {
  const Model& model = file.model.model;
  if (!model.block_class.empty()) {
    file.plan.recompute = FullRecompute(model, BlocksOf(model));
  }
}

// What the Trainer fills in where DeepSpeed's file says "auto" or nothing.
DeepSpeedSettings Merged(const RunSettings& run) {
  DeepSpeedSettings s = *run.deepspeed;
  const auto fill = [](auto& slot, const auto& value) {
    if (!slot && value) {
      slot = value;
    }
  };
  if (run.trainer) {
    const TrainerSettings& t = *run.trainer;
    fill(s.train_micro_batch_size_per_gpu,
         std::optional<std::int64_t>(t.per_device_train_batch_size.value_or(8)));
    fill(s.gradient_accumulation_steps,
         std::optional<std::int64_t>(t.gradient_accumulation_steps.value_or(1)));
    fill(s.gradient_clipping, std::optional<double>(t.max_grad_norm.value_or(1.0)));
    fill(s.bf16, t.bf16);
    fill(s.fp16, t.fp16);
  }
  if (run.accelerate && run.accelerate->mixed_precision) {
    fill(s.bf16, std::optional<bool>(*run.accelerate->mixed_precision == "bf16"));
    fill(s.fp16, std::optional<bool>(*run.accelerate->mixed_precision == "fp16"));
  }
  return s;
}

void ApplyMergedDeepSpeed(const RunSettings& run, PlanFile& file) {
  DeepSpeedSettings s = Merged(run);
  const std::int64_t ranks = file.cluster.RankCount();
  // Of the three sizes two may be given; DeepSpeed works out the third.
  if (s.train_batch_size) {
    const std::int64_t given = *s.train_batch_size;
    if (!s.train_micro_batch_size_per_gpu && !s.gradient_accumulation_steps) {
      s.train_micro_batch_size_per_gpu = given / ranks;
    } else if (!s.train_micro_batch_size_per_gpu) {
      s.train_micro_batch_size_per_gpu = given / ranks / *s.gradient_accumulation_steps;
    } else if (!s.gradient_accumulation_steps) {
      s.gradient_accumulation_steps = given / ranks / *s.train_micro_batch_size_per_gpu;
    }
    const std::int64_t micro = *s.train_micro_batch_size_per_gpu;
    const std::int64_t steps = s.gradient_accumulation_steps.value_or(1);
    if (micro < 1 || steps < 1 || micro * steps * ranks != given) {
      throw InputError(run.files.back() + ": train_batch_size", std::to_string(given),
                       std::to_string(ranks) + " ranks x train_micro_batch_size_per_gpu " +
                           std::to_string(micro) + " x gradient_accumulation_steps " +
                           std::to_string(steps));
    }
  }
  const std::int64_t stage = s.stage.value_or(0);
  if (stage < 0 || stage > 3) {
    throw InputError(run.files.back() + ": zero_optimization.stage", std::to_string(stage),
                     "0, 1, 2 or 3");
  }
  const std::int64_t mics = s.mics_shard_size.value_or(-1);
  if (mics == 0 || mics < -1 || (mics > 0 && ranks % mics != 0)) {
    throw InputError(run.files.back() + ": zero_optimization.mics_shard_size", std::to_string(mics),
                     "-1 or a divisor of the " + std::to_string(ranks) + " ranks");
  }
  ApplyDeepSpeed(s, file);
}

void ApplyHf(const RunSettings& run, PlanFile& file) {
  const std::string& where = run.files.front();
  if (run.deepspeed) {
    ApplyMergedDeepSpeed(run, file);
  } else if (run.accelerate && run.accelerate->distributed_type == "FSDP") {
    ApplyHfFsdp(FromAccelerate(*run.accelerate, where), file);
  } else if (run.trainer && run.trainer->fsdp.value_or(false)) {
    ApplyHfFsdp(FromTrainer(*run.trainer, where), file);
  } else {
    const bool bf16 = run.trainer && run.trainer->bf16.value_or(false);
    const bool fp16 = run.trainer && run.trainer->fp16.value_or(false);
    ApplyDdp(bf16             ? "bf16"
             : fp16           ? "fp16"
             : run.accelerate ? run.accelerate->mixed_precision.value_or("no")
                              : "no",
             file);
  }
  if (!run.trainer) {
    return;
  }
  if (!run.deepspeed) {
    ApplyTrainer(*run.trainer, file);
  }
  if (run.trainer->gradient_checkpointing.value_or(false)) {
    RecomputeBlocks(file);
  }
}

void CheckCounts(const RunSettings& run, const PlanFile& file) {
  const std::int64_t ranks = file.cluster.RankCount();
  const auto check = [&](const std::optional<std::int64_t>& given, const char* key) {
    if (given && *given != ranks) {
      throw InputError(run.files.front() + ": " + key, std::to_string(*given),
                       "the " + std::to_string(ranks) + " GPUs of the cluster");
    }
  };
  if (run.accelerate) {
    check(run.accelerate->num_processes, "num_processes");
  }
  if (run.fairseq) {
    check(run.fairseq->distributed_world_size, "distributed_training.distributed_world_size");
  }
  if (run.accelerate && run.accelerate->dp_shard_size) {
    check(*run.accelerate->dp_shard_size * run.accelerate->dp_replicate_size.value_or(1),
          "parallelism_config: product of the sizes");
  }
}

// Before anything is multiplied or divided by them: ranks x samples x steps stay inside 64 bits.
void CheckSizes(const RunSettings& run) {
  constexpr std::int64_t kMostSamples = std::int64_t{1} << 20;
  constexpr std::int64_t kMostSteps = 65535;
  constexpr std::int64_t kMostRanks = std::int64_t{1} << 24;
  constexpr std::int64_t kMostMib = std::int64_t{1} << 20;
  const auto check = [&](const std::optional<std::int64_t>& given, std::int64_t most,
                         const char* key) {
    if (given && (*given < 1 || *given > most)) {
      throw InputError(run.files.front() + ": " + key, std::to_string(*given),
                       "an integer in [1, " + std::to_string(most) + "]");
    }
  };
  if (const auto& t = run.torchtitan) {
    check(t->local_batch_size, kMostSamples, "training.local_batch_size");
  }
  if (const auto& d = run.deepspeed) {
    check(d->train_micro_batch_size_per_gpu, kMostSamples, "train_micro_batch_size_per_gpu");
    check(d->gradient_accumulation_steps, kMostSteps, "gradient_accumulation_steps");
  }
  if (const auto& t = run.trainer) {
    check(t->per_device_train_batch_size, kMostSamples, "per_device_train_batch_size");
    check(t->gradient_accumulation_steps, kMostSteps, "gradient_accumulation_steps");
  }
  if (const auto& a = run.accelerate) {
    check(a->dp_shard_size, kMostRanks, "parallelism_config.parallelism_config_dp_shard_size");
    check(a->dp_replicate_size, kMostRanks,
          "parallelism_config.parallelism_config_dp_replicate_size");
  }
  if (const auto& f = run.fairseq) {
    check(f->batch_size, kMostSamples, "dataset.batch_size");
    check(f->bucket_cap_mb, kMostMib, "distributed_training.bucket_cap_mb");
    for (const std::int64_t steps : f->update_freq.value_or(std::vector<std::int64_t>())) {
      check(steps, kMostSteps, "optimization.update_freq");
    }
  }
}

std::string ValueText(const SettingValue& value) {
  std::string text = SettingsAsJson({{"v", value}});
  const std::size_t begin = text.find(':') + 2;
  text = text.substr(begin, text.rfind('}') - begin);
  text.erase(std::remove(text.begin(), text.end(), '\n'), text.end());
  return text;
}

// What the nearest settings of the plan say and the given ones do not.
template <class S>
void AppendUnset(std::span<const SettingRow<S>> rows, const S& given, const S& nearest,
                 std::vector<Assumption>& list) {
  std::set<std::string> set;
  for (const Setting& setting : ListSettings<S>(rows, given)) {
    set.insert(setting.key);
  }
  for (const Setting& setting : ListSettings<S>(rows, nearest)) {
    const bool silent = std::find(kSilent.begin(), kSilent.end(), setting.key) != kSilent.end();
    if (!silent && set.count(setting.key) == 0) {
      list.push_back({setting.key, ValueText(setting.value)});
    }
  }
}

}  // namespace

void ApplyRun(const RunSettings& run, PlanFile& file) {
  CheckSizes(run);
  CheckCounts(run, file);
  if (run.torchtitan) {
    ApplyTorchtitan(*run.torchtitan, run.files.front(), file);
  } else if (run.fairseq) {
    ApplyFairseq(*run.fairseq, file);
  } else {
    ApplyHf(run, file);
  }
}

std::vector<Assumption> AssumptionsOf(const RunSettings& run, const PlanFile& file) {
  std::vector<Assumption> list;
  if (run.torchtitan) {
    AppendUnset(TorchtitanRows(), *run.torchtitan, ToTorchtitan(file), list);
  } else if (run.fairseq) {
    AppendUnset(FairseqRows(), *run.fairseq, ToFairseq(file), list);
  } else if (run.deepspeed) {
    AppendUnset(DeepSpeedRows(), Merged(run), ToDeepSpeed(file), list);
  } else if (run.trainer) {
    AppendUnset(TrainerRows(), *run.trainer, ToTrainer(HfFsdpOf(file), file), list);
  } else if (run.accelerate && run.accelerate->distributed_type == "FSDP") {
    AppendUnset(AccelerateRows(), *run.accelerate, ToAccelerate(HfFsdpOf(file), file.cluster),
                list);
  }
  return list;
}

}  // namespace shardwright
