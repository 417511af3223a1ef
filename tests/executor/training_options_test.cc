#include "executor/training_options.h"

#include <string>

#include <doctest/doctest.h>

#include "core/error.h"

namespace shardwright {
namespace {

std::string ErrorOf(const std::string& text, const Job& job = {}) {
  try {
    (void)ReadTrainingOptions(JsonValue::Parse(text, "t.json"), job, DefaultTrainingOptions(job));
  } catch (const InputError& error) {
    return error.what();
  }
  return "no error";
}

std::string Document(const std::string& fields) {
  return R"({"format": "shardwright-training", "version": 1)" +
         (fields.empty() ? "" : ", " + fields) + "}";
}

// Expected: the signatures of torch.optim's classes.
TEST_CASE("defaults are PyTorch's") {
  Job job;
  job.optimizer.kind = OptimizerKind::kAdamW;
  CHECK(DefaultTrainingOptions(job).optimizer.learning_rate == 1e-3);
  CHECK(DefaultTrainingOptions(job).optimizer.weight_decay == 0.01);
  job.optimizer.weight_decay = false;
  CHECK(DefaultTrainingOptions(job).optimizer.weight_decay == 0.0);
  job.optimizer.kind = OptimizerKind::kAdadelta;
  CHECK(DefaultTrainingOptions(job).optimizer.learning_rate == 1.0);
  CHECK(DefaultTrainingOptions(job).optimizer.epsilon == 1e-6);
  CHECK(DefaultTrainingOptions(job).optimizer.weight_decay == 0.0);
}

TEST_CASE("every field is read") {
  TrainingOptions options;
  options.optimizer = {.learning_rate = 0.3,
                       .weight_decay = 0.2,
                       .momentum = 0.7,
                       .dampening = 0.0,
                       .nesterov = true,
                       .beta1 = 0.8,
                       .beta2 = 0.7,
                       .rho = 0.6,
                       .epsilon = 1e-5,
                       .decay_matrices_only = false,
                       .no_decay = {"*.bias", "x?"}};
  options.schedule = {ScheduleKind::kCosine, ScheduleUnit::kEpoch, 3, 0.5, 2, 100, 0.1};
  options.loss_scale = {1024.0, 4.0, 0.25, 10};
  options.clip_norm = 0.5;
  options.init_std = 0.01;
  options.seed = 77;
  options.shuffle = false;
  options.epoch_tail = EpochTail::kPad;
  options.sum_loss = true;
  const JsonValue json = JsonValue::Parse(Document(R"(
    "optimizer": {"learning_rate": 0.3, "weight_decay": 0.2, "momentum": 0.7, "dampening": 0.0, "nesterov": true,
                  "beta1": 0.8, "beta2": 0.7, "rho": 0.6, "epsilon": 1e-5, "decay_matrices_only": false,
                  "no_decay": ["*.bias", "x?"]},
    "schedule": {"kind": "cosine", "unit": "epoch", "step_size": 3, "gamma": 0.5, "warmup": 2, "total": 100,
                 "final_fraction": 0.1},
    "loss_scale": {"initial": 1024, "growth_factor": 4, "backoff_factor": 0.25, "growth_interval": 10},
    "clip_norm": 0.5, "init_std": 0.01, "seed": 77, "shuffle": false, "epoch_tail": "pad",
    "loss_reduction": "sum")"),
                                          "t.json");
  CHECK(ReadTrainingOptions(json, Job{}, TrainingOptions{}) == options);
}

TEST_CASE("absent fields keep their defaults") {
  const JsonValue json = JsonValue::Parse(Document(R"("optimizer": {"beta2": 0.95})"), "t.json");
  TrainingOptions defaults;
  defaults.seed = 5;
  TrainingOptions expected = defaults;
  expected.optimizer.beta2 = 0.95;
  CHECK(ReadTrainingOptions(json, Job{}, defaults) == expected);
}

TEST_CASE("an epsilon that is 0 in fp16 masters is refused") {
  Job job;
  job.precision = {DType::kFp16, DType::kFp16, DType::kFp16};
  CHECK(ErrorOf(Document(""), job) ==
        "t.json: optimizer.epsilon: got 1e-08, expected more than 3e-08, since anything less is 0 "
        "in the plan's fp16 masters");
  CHECK(ErrorOf(Document(R"("optimizer": {"epsilon": 1e-7})"), job) ==
        "no error");  // the smallest fp16 number above 0 is 2^-24
  job.optimizer.impl = OptimizerImpl::kFused;
  CHECK(ErrorOf(Document(""), job) == "no error");
}

TEST_CASE("wrong options are named with their field") {
  CHECK(ErrorOf(Document("")) == "no error");
  CHECK(ErrorOf(Document(R"("optimiser": {})")) ==
        "t.json: got unknown key \"optimiser\", expected one of \"format\", \"version\", "
        "\"optimizer\", \"schedule\", \"loss_scale\", \"clip_norm\", \"init_std\", \"seed\", "
        "\"shuffle\", \"epoch_tail\", \"loss_reduction\"; did you mean \"optimizer\"?");
  CHECK(ErrorOf(Document(R"("optimizer": {"beta1": 1})")) ==
        "t.json: optimizer.beta1: got 1.0, expected a number from 0 to below 1");
  CHECK(ErrorOf(Document(R"("optimizer": {"learning_rate": -0.5})")) ==
        "t.json: optimizer.learning_rate: got -0.5, expected a finite number, at least 0");
  CHECK(ErrorOf(Document(R"("optimizer": {"nesterov": true, "dampening": 0.5})")) ==
        "t.json: optimizer.nesterov: got true with momentum 0.9 and dampening 0.5, expected "
        "momentum above 0 and dampening 0");
  CHECK(ErrorOf(Document(R"("schedule": {"kind": "cosine", "warmup": 5, "total": 5})")) ==
        "t.json: schedule.total: got 5, expected more than the warm-up, since this schedule has an "
        "end");
  CHECK(ErrorOf(Document(R"("schedule": {"step_size": 0})")) ==
        "t.json: schedule.step_size: got 0, expected at least 1");
  CHECK(ErrorOf(Document(R"("clip_norm": 0)")) ==
        "t.json: clip_norm: got 0.0, expected a finite number above 0");
  CHECK(ErrorOf(Document(R"("loss_scale": {"backoff_factor": 1})")) ==
        "t.json: loss_scale.backoff_factor: got 1.0, expected a number between 0 and 1");
  Job job;
  job.optimizer.weight_decay = false;
  CHECK(ErrorOf(Document(R"("optimizer": {"weight_decay": 0.1})"), job) ==
        "t.json: optimizer.weight_decay: got 0.1, expected 0, since the plan's job has no weight "
        "decay");
}

}  // namespace
}  // namespace shardwright
