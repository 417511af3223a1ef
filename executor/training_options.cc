#include "executor/training_options.h"

#include <cmath>

#include <nlohmann/json.hpp>

#include "core/error.h"
#include "schedule/plan_names.h"

namespace shardwright {
namespace {

constexpr std::int64_t kMaxUnits = std::int64_t{1} << 50;

template <class T>
std::string Shown(const T& value) {
  return nlohmann::json(value).dump();
}
template <class E>
std::string Shown(E value, NameList names) {
  return std::string(NameIn(names, value));
}

void Require(bool holds, const Path& where, const std::string& found, const char* rule) {
  if (!holds) {
    throw InputError(where.str(), found, rule);
  }
}

bool IsFinite(double value) {
  return std::isfinite(value);
}

// The update adds epsilon in fp16: it rounds after every operation.
bool KeepsEpsilonInFp16(const Job& job) {
  const OptimizerKind kind = job.optimizer.kind;
  return job.precision.master == DType::kFp16 && job.optimizer.impl != OptimizerImpl::kFused &&
         (kind == OptimizerKind::kAdam || kind == OptimizerKind::kAdamW ||
          kind == OptimizerKind::kAdadelta);
}

void CheckOptimizer(const OptimizerOptions& o, const Job& job, const Path& where) {
  const auto at_least_zero = [&](double value, const char* field) {
    Require(IsFinite(value) && value >= 0.0, where.Field(field), Shown(value),
            "a finite number, at least 0");
  };
  const auto fraction = [&](double value, const char* field) {
    Require(value >= 0.0 && value < 1.0, where.Field(field), Shown(value),
            "a number from 0 to below 1");
  };
  at_least_zero(o.learning_rate, "learning_rate");
  at_least_zero(o.weight_decay, "weight_decay");
  at_least_zero(o.momentum, "momentum");
  at_least_zero(o.epsilon, "epsilon");
  Require(IsFinite(o.dampening), where.Field("dampening"), Shown(o.dampening), "a finite number");
  fraction(o.beta1, "beta1");
  fraction(o.beta2, "beta2");
  Require(o.rho >= 0.0 && o.rho <= 1.0, where.Field("rho"), Shown(o.rho), "a number from 0 to 1");
  Require(!o.nesterov || (o.momentum > 0.0 && o.dampening == 0.0), where.Field("nesterov"),
          "true with momentum " + Shown(o.momentum) + " and dampening " + Shown(o.dampening),
          "momentum above 0 and dampening 0");
  // PyTorch's default is 0 there, and 0 / 0 where a gradient is 0.
  Require(o.epsilon > 0x1p-25 || !KeepsEpsilonInFp16(job), where.Field("epsilon"), Shown(o.epsilon),
          "more than 3e-08, since anything less is 0 in the plan's fp16 masters");
  Require(job.optimizer.weight_decay || o.weight_decay == 0.0, where.Field("weight_decay"),
          Shown(o.weight_decay), "0, since the plan's job has no weight decay");
}

void CheckSchedule(const ScheduleOptions& s, const Path& where) {
  Require(s.step_size >= 1, where.Field("step_size"), std::to_string(s.step_size), "at least 1");
  Require(IsFinite(s.gamma) && s.gamma >= 0.0, where.Field("gamma"), Shown(s.gamma),
          "a finite number, at least 0");
  Require(s.warmup >= 0, where.Field("warmup"), std::to_string(s.warmup), "at least 0");
  Require(IsFinite(s.final_fraction) && s.final_fraction >= 0.0, where.Field("final_fraction"),
          Shown(s.final_fraction), "a finite number, at least 0");
  const bool has_end = s.kind == ScheduleKind::kCosine || s.kind == ScheduleKind::kLinear;
  Require(!has_end || s.total > s.warmup, where.Field("total"), std::to_string(s.total),
          "more than the warm-up, since this schedule has an end");
}

void CheckLossScale(const LossScaleOptions& o, const Path& where) {
  Require(IsFinite(o.initial) && o.initial > 0.0, where.Field("initial"), Shown(o.initial),
          "a finite number above 0");
  Require(IsFinite(o.growth_factor) && o.growth_factor >= 1.0, where.Field("growth_factor"),
          Shown(o.growth_factor), "a finite number, at least 1");
  Require(o.backoff_factor > 0.0 && o.backoff_factor < 1.0, where.Field("backoff_factor"),
          Shown(o.backoff_factor), "a number between 0 and 1");
  Require(o.growth_interval >= 1, where.Field("growth_interval"), std::to_string(o.growth_interval),
          "at least 1");
}

void Read(const JsonValue& value, double& target) {
  target = value.AsDouble();
}
void Read(const JsonValue& value, std::optional<double>& target) {
  target = value.AsDouble();
}
void Read(const JsonValue& value, bool& target) {
  target = value.AsBool();
}
void Read(const JsonValue& value, std::int64_t& target) {
  target = value.AsInt(0, kMaxUnits);
}
void Read(const JsonValue& value, std::uint64_t& target) {
  target = static_cast<std::uint64_t>(value.AsInt(0, kMaxUnits));
}
void Read(const JsonValue& value, std::vector<std::string>& target) {
  target.clear();
  for (std::size_t i = 0; i < value.size(); ++i) {
    target.push_back(value[i].AsString());
  }
}
template <class E>
void Read(const JsonValue& value, E& target, NameList names) {
  target = static_cast<E>(value.AsChoice(names));
}

// Reads a field if it is there.
template <class T, class... Names>
void Read(const JsonValue& json, const char* key, T& target, Names... names) {
  if (const std::optional<JsonValue> value = json.Find(key)) {
    Read(*value, target, names...);
  }
}

// The same for a section.
template <class Part, class Fields>
void ReadSection(const JsonValue& json, const char* key, Part& part, Fields fields) {
  const std::optional<JsonValue> section = json.Find(key);
  if (!section) {
    return;
  }
  std::vector<std::string> keys;
  fields(part,
         [&](const char* name, auto& /*field*/, auto... /*names*/) { keys.emplace_back(name); });
  section->AllowOnly(keys);
  fields(part, [&](const char* name, auto& field, auto... names) {
    Read(*section, name, field, names...);
  });
}

}  // namespace

TrainingOptions DefaultTrainingOptions(const Job& job) {
  TrainingOptions options;
  const OptimizerKind kind = job.optimizer.kind;
  if (kind == OptimizerKind::kAdadelta) {
    options.optimizer.learning_rate = 1.0;
    options.optimizer.epsilon = 1e-6;
  }
  if (kind == OptimizerKind::kAdamW && job.optimizer.weight_decay) {
    options.optimizer.weight_decay = 0.01;
  }
  return options;
}

void CheckTrainingOptions(const TrainingOptions& options, const Job& job, const Path& where) {
  CheckOptimizer(options.optimizer, job, where.Field("optimizer"));
  CheckSchedule(options.schedule, where.Field("schedule"));
  CheckLossScale(options.loss_scale, where.Field("loss_scale"));
  Require(IsFinite(options.clip_norm) && options.clip_norm > 0.0, where.Field("clip_norm"),
          Shown(options.clip_norm), "a finite number above 0");
  const double init_std = options.init_std.value_or(0.0);
  Require(IsFinite(init_std) && init_std >= 0.0, where.Field("init_std"), Shown(init_std),
          "a finite number, at least 0");
}

TrainingOptions ReadTrainingOptions(const JsonValue& json, const Job& job,
                                    const TrainingOptions& defaults) {
  json.AllowOnly({"format", "version", "optimizer", "schedule", "loss_scale", "clip_norm",
                  "init_std", "seed", "shuffle", "epoch_tail", "loss_reduction"});
  static constexpr std::array<std::string_view, 1> kFormats = {"shardwright-training"};
  static constexpr std::array<std::string_view, 2> kReductions = {"mean", "sum"};
  (void)json.At("format").AsChoice(kFormats);
  (void)json.At("version").AsInt(1, 1);
  TrainingOptions options = defaults;
  ReadSection(json, "optimizer", options.optimizer, kOptimizerOptionsFields);
  ReadSection(json, "schedule", options.schedule, kScheduleOptionsFields);
  ReadSection(json, "loss_scale", options.loss_scale, kLossScaleOptionsFields);
  Read(json, "clip_norm", options.clip_norm);
  Read(json, "init_std", options.init_std);
  Read(json, "seed", options.seed);
  Read(json, "shuffle", options.shuffle);
  Read(json, "epoch_tail", options.epoch_tail, NameList(kTailNames));
  if (const std::optional<JsonValue> reduction = json.Find("loss_reduction")) {
    options.sum_loss = reduction->AsChoice(kReductions) == 1;
  }
  CheckTrainingOptions(options, job, json.path());
  return options;
}

std::vector<std::pair<std::string, std::string>> ShowTrainingOptions(
    const TrainingOptions& options) {
  std::vector<std::pair<std::string, std::string>> shown;
  const auto in = [&](const std::string& section) {
    return [&shown, section](const std::string& name, const auto& field, auto... names) {
      shown.emplace_back(section + name, Shown(field, names...));
    };
  };
  kOptimizerOptionsFields(options.optimizer, in("optimizer."));
  kScheduleOptionsFields(options.schedule, in("schedule."));
  kLossScaleOptionsFields(options.loss_scale, in("loss_scale."));
  // A run that goes on has a scale of its own.
  std::erase_if(shown, [](const auto& its) { return its.first == "loss_scale.initial"; });
  shown.emplace_back("clip_norm", Shown(options.clip_norm));
  shown.emplace_back("loss_reduction", options.sum_loss ? "sum" : "mean");
  return shown;
}

}  // namespace shardwright
