#include "executor/training_options.h"

#include <cmath>

#include <nlohmann/json.hpp>

#include "core/error.h"
#include "schedule/plan_names.h"

namespace shardwright {
namespace {

constexpr std::array<std::string_view, 4> kScheduleNames = {"constant", "step", "cosine", "linear"};
constexpr std::array<std::string_view, 2> kUnitNames = {"step", "epoch"};
constexpr std::int64_t kMaxUnits = std::int64_t{1} << 50;

std::string Shown(double value) {
  return nlohmann::json(value).dump();
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

// Reads a field into `target` if it is there.
void Read(const JsonValue& json, const char* field, double& target) {
  if (const std::optional<JsonValue> value = json.Find(field)) {
    target = value->AsDouble();
  }
}
void Read(const JsonValue& json, const char* field, bool& target) {
  if (const std::optional<JsonValue> value = json.Find(field)) {
    target = value->AsBool();
  }
}
void Read(const JsonValue& json, const char* field, std::int64_t& target) {
  if (const std::optional<JsonValue> value = json.Find(field)) {
    target = value->AsInt(0, kMaxUnits);
  }
}
template <class E>
void ReadChoice(const JsonValue& json, const char* field, NameList names, E& target) {
  if (const std::optional<JsonValue> value = json.Find(field)) {
    target = static_cast<E>(value->AsChoice(names));
  }
}

void ReadOptimizer(const JsonValue& json, OptimizerOptions& o) {
  json.AllowOnly({"learning_rate", "weight_decay", "momentum", "dampening", "nesterov", "beta1",
                  "beta2", "rho", "epsilon", "decay_matrices_only", "no_decay"});
  Read(json, "learning_rate", o.learning_rate);
  Read(json, "weight_decay", o.weight_decay);
  Read(json, "momentum", o.momentum);
  Read(json, "dampening", o.dampening);
  Read(json, "nesterov", o.nesterov);
  Read(json, "beta1", o.beta1);
  Read(json, "beta2", o.beta2);
  Read(json, "rho", o.rho);
  Read(json, "epsilon", o.epsilon);
  Read(json, "decay_matrices_only", o.decay_matrices_only);
  if (const std::optional<JsonValue> globs = json.Find("no_decay")) {
    o.no_decay.clear();
    for (std::size_t i = 0; i < globs->size(); ++i) {
      o.no_decay.push_back((*globs)[i].AsString());
    }
  }
}

void ReadSchedule(const JsonValue& json, ScheduleOptions& s) {
  json.AllowOnly({"kind", "unit", "step_size", "gamma", "warmup", "total", "final_fraction"});
  ReadChoice(json, "kind", kScheduleNames, s.kind);
  ReadChoice(json, "unit", kUnitNames, s.unit);
  Read(json, "step_size", s.step_size);
  Read(json, "gamma", s.gamma);
  Read(json, "warmup", s.warmup);
  Read(json, "total", s.total);
  Read(json, "final_fraction", s.final_fraction);
}

void ReadLossScale(const JsonValue& json, LossScaleOptions& o) {
  json.AllowOnly({"initial", "growth_factor", "backoff_factor", "growth_interval"});
  Read(json, "initial", o.initial);
  Read(json, "growth_factor", o.growth_factor);
  Read(json, "backoff_factor", o.backoff_factor);
  Read(json, "growth_interval", o.growth_interval);
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
  if (const std::optional<JsonValue> optimizer = json.Find("optimizer")) {
    ReadOptimizer(*optimizer, options.optimizer);
  }
  if (const std::optional<JsonValue> schedule = json.Find("schedule")) {
    ReadSchedule(*schedule, options.schedule);
  }
  if (const std::optional<JsonValue> loss_scale = json.Find("loss_scale")) {
    ReadLossScale(*loss_scale, options.loss_scale);
  }
  Read(json, "clip_norm", options.clip_norm);
  if (const std::optional<JsonValue> init_std = json.Find("init_std")) {
    options.init_std = init_std->AsDouble();
  }
  if (const std::optional<JsonValue> seed = json.Find("seed")) {
    options.seed = static_cast<std::uint64_t>(seed->AsInt(0, kMaxUnits));
  }
  Read(json, "shuffle", options.shuffle);
  ReadChoice(json, "epoch_tail", kTailNames, options.epoch_tail);
  if (const std::optional<JsonValue> reduction = json.Find("loss_reduction")) {
    options.sum_loss = reduction->AsChoice(kReductions) == 1;
  }
  CheckTrainingOptions(options, job, json.path());
  return options;
}

std::vector<std::pair<std::string, std::string>> ShowTrainingOptions(
    const TrainingOptions& options) {
  const OptimizerOptions& o = options.optimizer;
  const ScheduleOptions& s = options.schedule;
  const LossScaleOptions& l = options.loss_scale;
  const auto yes_no = [](bool value) { return value ? "true" : "false"; };
  return {{"optimizer.learning_rate", Shown(o.learning_rate)},
          {"optimizer.weight_decay", Shown(o.weight_decay)},
          {"optimizer.momentum", Shown(o.momentum)},
          {"optimizer.dampening", Shown(o.dampening)},
          {"optimizer.nesterov", yes_no(o.nesterov)},
          {"optimizer.beta1", Shown(o.beta1)},
          {"optimizer.beta2", Shown(o.beta2)},
          {"optimizer.rho", Shown(o.rho)},
          {"optimizer.epsilon", Shown(o.epsilon)},
          {"optimizer.decay_matrices_only", yes_no(o.decay_matrices_only)},
          {"optimizer.no_decay", nlohmann::json(o.no_decay).dump()},
          {"schedule.kind", std::string(NameIn(kScheduleNames, s.kind))},
          {"schedule.unit", std::string(NameIn(kUnitNames, s.unit))},
          {"schedule.step_size", std::to_string(s.step_size)},
          {"schedule.gamma", Shown(s.gamma)},
          {"schedule.warmup", std::to_string(s.warmup)},
          {"schedule.total", std::to_string(s.total)},
          {"schedule.final_fraction", Shown(s.final_fraction)},
          {"loss_scale.growth_factor", Shown(l.growth_factor)},
          {"loss_scale.backoff_factor", Shown(l.backoff_factor)},
          {"loss_scale.growth_interval", std::to_string(l.growth_interval)},
          {"clip_norm", Shown(options.clip_norm)},
          {"loss_reduction", options.sum_loss ? "sum" : "mean"}};
}

}  // namespace shardwright
