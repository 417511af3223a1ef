#include <algorithm>
#include <string>
#include <vector>

#include <doctest/doctest.h>

#include "planner/emitters/emitters.h"
#include "schedule/wrap.h"
#include "tests/planner/run_files.h"

namespace shardwright {
namespace {

using testing::Base;
using testing::ErrorOf;
using testing::Imported;

TEST_CASE("what lives on the host in stage 3 is read") {
  const auto offload = [](const std::string& zero) {
    return Imported({{"d.json",
                      R"({"optimizer": {"type": "AdamW"}, "zero_optimization": )" + zero + "}"}})
        .plan.offload;
  };
  const Offload optimizer = {.optimizer = true};
  const Offload parameters = {.parameters = true};
  CHECK(offload(R"({"stage": 3, "offload_optimizer": {"device": "cpu", "buffer_count": 4}})") ==
        optimizer);
  CHECK(offload(R"({"stage": 3, "offload_optimizer": {"device": "cpu", "pin_memory": true},
                    "offload_param": {"device": "cpu", "nvme_path": "nvme"}})") == parameters);
  CHECK(offload(R"({"stage": 3, "offload_optimizer": {"device": "none"},
                    "offload_param": {"device": "auto", "pin_memory": false}})") == Offload());
  CHECK(offload(R"({"stage": 2, "offload_optimizer": {"device": "none"}, "cpu_offload": false})") ==
        Offload());
  CHECK(offload(R"({"stage": 3, "cpu_offload": true})") == optimizer);
  CHECK(offload(R"({"stage": 3, "cpu_offload": true, "cpu_offload_params": true})") == parameters);
  CHECK(offload(R"({"stage": 3, "offload_optimizer": {"device": "cpu"},
                    "cpu_offload_param": true})") == parameters);
  const auto accelerate = [](const std::string& keys) {
    return Imported({{"a.yaml", "distributed_type: DEEPSPEED\ndeepspeed_config:\n" + keys}})
        .plan.offload;
  };
  CHECK(accelerate("  zero_stage: 3\n  offload_optimizer_device: cpu\n") == optimizer);
  CHECK(accelerate("  zero_stage: 3\n  offload_optimizer_device: cpu\n"
                   "  offload_param_device: cpu\n") == parameters);
}

TEST_CASE("offload that is not simulated is refused") {
  const auto refused = [](const std::string& zero, const std::string& adam = "") {
    return ErrorOf({{"d.json", R"({"optimizer": {"type": "AdamW", "params": {)" + adam +
                                   R"(}}, "zero_optimization": {)" + zero + "}}"}});
  };
  const std::string zero = "d.json: zero_optimization.";
  const std::string optimizer = R"("stage": 3, "offload_optimizer": {"device": "cpu")";
  CHECK(refused(R"("stage": 3, "offload_optimizer": {"device": "nvme"})") ==
        zero +
            "offload_optimizer.device: got \"nvme\", expected \"cpu\" or \"none\", since nothing "
            "else is simulated");
  CHECK(refused(optimizer + R"(}, "offload_param": {"device": "nvme"})") ==
        zero +
            "offload_param.device: got \"nvme\", expected \"cpu\" or \"none\", since nothing else "
            "is simulated");
  CHECK(refused(R"("stage": 2, "offload_optimizer": {"device": "cpu"})") ==
        zero +
            "offload_optimizer.device: got \"cpu\", expected none, since offload below stage 3 is "
            "not simulated");
  CHECK(refused(R"("stage": 2, "cpu_offload": true)") ==
        zero +
            "cpu_offload: got true, expected none, since offload below stage 3 is not simulated");
  CHECK(refused(R"("stage": 3, "offload_param": {"device": "cpu"})") ==
        zero +
            "offload_param.device: got \"cpu\", expected the optimizer on the host, too, since "
            "offload of parameters alone is not simulated");
  CHECK(refused(optimizer + R"(}, "cpu_offload": true)") ==
        zero +
            "cpu_offload: got true, expected one of this and "
            "zero_optimization.offload_optimizer.device");
  CHECK(refused(optimizer + R"(, "pin_memory": false})") ==
        zero +
            "offload_optimizer.pin_memory: got false, expected true, since copies from pageable "
            "memory are not simulated");
  CHECK(refused(optimizer + R"(, "ratio": 0.3})") ==
        zero +
            "offload_optimizer.ratio: got 0.3, expected 1 or 1.0, since offload of a part of the "
            "optimizer cannot be predicted");
  CHECK(refused(optimizer + "}", R"("torch_adam": true)") ==
        "d.json: optimizer.params.torch_adam: got true, expected false beside offload_optimizer, "
        "since PyTorch's Adam is not simulated on the host");
  CHECK(ErrorOf({{"a.yaml",
                  "distributed_type: DEEPSPEED\ndeepspeed_config:\n  zero_stage: 3\n"
                  "  offload_optimizer_device: nvme\n"}}) ==
        "a.yaml: deepspeed_config.offload_optimizer_device: got \"nvme\", expected \"cpu\" or "
        "\"none\", since nothing else is simulated");
}

std::vector<std::string> FieldsLost(const PlanFile& file) {
  std::vector<std::string> fields;
  for (const Loss& loss : EmitDeepSpeed(file, EmitOptions()).losses) {
    fields.push_back(loss.field);
  }
  return fields;
}

TEST_CASE("DeepSpeed runs zero3 with its offload as planned, and that of other dialects nearly") {
  using Fields = std::vector<std::string>;
  PlanFile file = Base(2);
  Plan& plan = file.plan;
  plan.dialect = Dialect::kZero3;
  plan.units = Wrap(file.model, ParseWrap("module", "test"), {}, plan.dialect, "test");
  for (const OptimizerImpl impl : {OptimizerImpl::kFused, OptimizerImpl::kForeach}) {
    file.job.optimizer.impl = impl;  // on the host DeepSpeed takes one pass either way
    for (const Offload& offload : {Offload{.optimizer = true}, Offload{.parameters = true},
                                   Offload{.parameters = true, .optimizer = true}}) {
      plan.offload = offload;
      CHECK(FieldsLost(file) == Fields());
      const DeepSpeedSettings s = ToDeepSpeed(file);
      CHECK(s.offload_optimizer == "cpu");
      CHECK(s.offload_optimizer_pinned == true);
      CHECK(s.offload_param.has_value() == offload.parameters);
      CHECK(s.torch_adam == false);
    }
  }
  PlanFile second = Base(2);
  second.plan.dialect = Dialect::kZero2;
  second.plan.zero.allgather_bucket = 1000;
  const Fields lost = FieldsLost(second);
  CHECK(std::count(lost.begin(), lost.end(), "plan.zero.allgather_bucket") == 1);
  plan.offload = {.activations = true};
  CHECK(FieldsLost(file) == Fields{"plan.offload.activations"});
  CHECK_FALSE(ToDeepSpeed(file).offload_optimizer);
  CHECK(ToDeepSpeed(file).torch_adam == true);
  // FSDP2 updates on the host in the passes of foreach, DeepSpeed in one.
  plan = Base(2).plan;
  plan.offload = {.parameters = true};
  const auto loses = [&](const char* field) {
    const Fields fields = FieldsLost(file);
    return std::count(fields.begin(), fields.end(), field) == 1;
  };
  CHECK(loses("job.optimizer.impl"));
  CHECK_FALSE(loses("plan.offload.parameters"));
  plan.dialect = Dialect::kNative;
  plan.offload = {.optimizer = true};
  CHECK_FALSE(loses("job.optimizer.impl"));
  CHECK_FALSE(loses("plan.offload.optimizer"));
  plan.offload = {.moments = true};
  CHECK(loses("plan.offload.moments"));
  CHECK(EmitDeepSpeed(file, EmitOptions()).as_emitted.plan.offload == Offload());
}

TEST_CASE("a weight decay that the framework's files lose is told") {
  PlanFile planned = Base(2);
  planned.job.optimizer.weight_decay = true;
  PlanFile emitted = planned;
  emitted.job.optimizer.weight_decay = false;
  const std::vector<Loss> losses = FindLosses(planned, emitted, {});
  REQUIRE(losses.size() == 1);
  CHECK(losses[0].field == "job.optimizer.weight_decay");
  CHECK(losses[0].planned == "true");
  CHECK(losses[0].emitted == "false");
}

}  // namespace
}  // namespace shardwright
