#include "planner/baselines.h"

#include <algorithm>
#include <string>
#include <vector>

#include <doctest/doctest.h>

#include "core/error.h"

namespace shardwright {
namespace {

PlanFile ProblemOf(const std::string& model, const std::string& cluster, std::int64_t nodes,
                   std::int64_t samples_per_rank) {
  PlanFile file;
  file.job.sequence_length = 128;
  file.cluster = LoadCluster(cluster, nodes);
  file.kernels = FindKernelSet("torch-eager", "test");
  file.profile = DefaultProfile(file.cluster.gpu, file.kernels.name);
  file.model = LoadModelForJob(model, file.job, Path("test"));
  file.job.global_batch = samples_per_rank * file.cluster.RankCount();
  return file;
}

std::vector<std::string> UnitNames(const Plan& plan) {
  std::vector<std::string> names;
  for (const UnitPlan& unit : plan.units) {
    names.push_back(unit.name);
  }
  return names;
}

std::int64_t Keeping(const Plan& plan) {
  return std::count_if(plan.units.begin(), plan.units.end(), [](const UnitPlan& unit) {
    return unit.reshard.kind == Reshard::Kind::kNever;
  });
}

// Defaults of torch 2.13's FullyShardedDataParallel.__init__: FULL_SHARD, no CPU offload,
// BACKWARD_PRE, forward_prefetch False, limit_all_gathers True, use_orig_params False.
void CheckFsdp1Defaults(const Plan& plan, std::int64_t ranks) {
  CHECK(plan.dialect == Dialect::kFsdp1);
  CHECK(plan.shard_size == ranks);
  CHECK(plan.replicate_size == 1);
  CHECK(plan.backward_prefetch == BackwardPrefetch::kPre);
  CHECK_FALSE(plan.forward_prefetch);
  CHECK(plan.limit_all_gathers);
  CHECK_FALSE(plan.use_orig_params);
  CHECK(plan.offload == Offload());
  CHECK(plan.sync == SyncMode::kEvery);
  CHECK(plan.recompute.empty());
}

// pythia-160m: 12 blocks of 7.1 M and two tables of 38.6 M. Of all modules below the root only
// gpt_neox, with all but the head, has 1e8 parameters.
TEST_CASE("BaselinePlan: FSDP1 by size") {
  const PlanFile small = ProblemOf("pythia-160m", "dgx-a100", 1, 1);
  const Plan one = BaselinePlan(Baseline::kFsdp1Size, small.model, 8, {2, 3, {}});
  CheckFsdp1Defaults(one, 8);
  CHECK(one.micro_batch == 2);
  CHECK(one.accumulation == 3);
  CHECK(UnitNames(one) == std::vector<std::string>{"gpt_neox", "root"});
  // llama-3-8b: a block has 218 M parameters and no part of at least 1e8 (gate, up and down are
  // 58.7 M each, so mlp is 176 M: that is one). mlp is wrapped; what is left of the block, 42 M, is
  // not. The table and the head have 525 M each. What is left of all blocks is 1.3 G, which makes
  // a unit of model.
  const PlanFile large = ProblemOf("llama-3-8b", "dgx-a100", 1, 1);
  const Plan plan = BaselinePlan(Baseline::kFsdp1Size, large.model, 8, {});
  CheckFsdp1Defaults(plan, 8);
  const std::vector<std::string> names = UnitNames(plan);
  REQUIRE(names.size() == 1 + 32 + 1 + 1 + 1);
  CHECK(names[0] == "model.embed_tokens");
  CHECK(names[1] == "model.layers.0.mlp");
  CHECK(names[32] == "model.layers.31.mlp");
  CHECK(names[33] == "model");
  CHECK(names[34] == "lm_head");
  CHECK(names[35] == "root");
}

TEST_CASE("BaselinePlan: FSDP1 by transformer policy") {
  const PlanFile file = ProblemOf("gpt2", "dgx-a100", 1, 1);
  const Plan plan =
      BaselinePlan(Baseline::kFsdp1Transformer, file.model, 8, {1, 1, RecomputeKind::kFull});
  CHECK(plan.units.size() == 12 + 1);
  CHECK(plan.units[0].name == "transformer.h.0");
  CHECK(plan.recompute.size() == 12);
  // FULL_SHARD everywhere; that torch keeps the root after forward is lowering's business.
  CHECK(Keeping(plan) == 0);
  PlanFile adapted = file;
  adapted.job.lora_rank = 8;
  adapted.job.lora_targets = {"transformer.h.*.attn.c_attn"};
  adapted.model = LoadModelForJob("gpt2", adapted.job, Path("test"));
  // Flat parameters cannot mix frozen and trainable ones: PyTorch demands use_orig_params.
  CHECK(BaselinePlan(Baseline::kFsdp1Transformer, adapted.model, 8, {}).use_orig_params);
}

// torchtitan: tok_embeddings, every layer, [norm, output] without reshard, root.
TEST_CASE("BaselinePlan: FSDP2 as torchtitan and Accelerate apply it") {
  const PlanFile file = ProblemOf("llama-3-8b", "dgx-h100", 2, 1);
  for (const Baseline baseline : {Baseline::kTorchtitan, Baseline::kAccelerate}) {
    const Plan plan = BaselinePlan(baseline, file.model, 16, {1, 4, {}});
    CHECK(plan.dialect == Dialect::kFsdp2);
    CHECK(plan.shard_size == 16);
    REQUIRE(plan.units.size() == 1 + 32 + 1 + 1);
    const auto tail = std::find_if(plan.units.begin(), plan.units.end(),
                                   [](const UnitPlan& unit) { return unit.modules.size() == 2; });
    REQUIRE(tail != plan.units.end());
    CHECK(tail->modules == std::vector<std::string>{"model.norm", "lm_head"});
    CHECK(tail->reshard.kind == Reshard::Kind::kNever);
    CHECK(Keeping(plan) == 2);  // and the root
    // torchtitan's loop reduces each micro-batch; accelerator.accumulate() enters no_sync.
    CHECK(plan.sync == (baseline == Baseline::kAccelerate ? SyncMode::kLast : SyncMode::kEvery));
  }
}

// "zero_optimization" of DeepSpeed 0.19 (deepspeed/runtime/zero/config.py).
TEST_CASE("BaselinePlan: ZeRO-3 and DDP") {
  const PlanFile file = ProblemOf("gpt2", "dgx-a100", 1, 1);
  const Plan zero = BaselinePlan(Baseline::kZero3, file.model, 8, {});
  CHECK(zero.dialect == Dialect::kZero3);
  CHECK(zero.zero.prefetch_bucket == 50'000'000);
  CHECK(zero.zero.reduce_bucket == 500'000'000);
  CHECK(zero.zero.max_live_parameters == 1'000'000'000);
  CHECK(zero.zero.max_reuse_distance == 1'000'000'000);
  CHECK(zero.zero.persistence_threshold == 100'000);
  CHECK(zero.zero.sub_group == 1'000'000'000);
  CHECK(zero.zero.overlap_comm == Overlap::kDefault);
  const Plan ddp = BaselinePlan(Baseline::kDdp, file.model, 8, {});
  CHECK(ddp.dialect == Dialect::kDdp);
  CHECK(ddp.shard_size == 1);
  CHECK(ddp.replicate_size == 8);
  CHECK(ddp.first_bucket == kMiB);  // torch.distributed._DEFAULT_FIRST_BUCKET_BYTES
  CHECK(ddp.bucket == 25 * kMiB);
}

TEST_CASE("UserChoices: powers of two that divide, without and with recomputation") {
  const std::vector<UserChoice> six = UserChoices(Baseline::kDdp, JobMode::kTrain, 6);
  const std::vector<UserChoice> expected = {
      {1, 6, {}}, {1, 6, RecomputeKind::kFull}, {2, 3, {}}, {2, 3, RecomputeKind::kFull}};
  CHECK(six == expected);
  CHECK(UserChoices(Baseline::kTorchtitan, JobMode::kTrain, 4).size() == 9);
  CHECK(UserChoices(Baseline::kDdp, JobMode::kForward, 6) == std::vector<UserChoice>{{6, 1, {}}});
}

// torchtitan's optimizer.implementation is "fused" by default; the others take the job's.
OptimizerImpl ImplOf(Baseline baseline) {
  return baseline == Baseline::kTorchtitan ? OptimizerImpl::kFused : OptimizerImpl::kForeach;
}

TEST_CASE("EvaluateBaselines: the fastest that fits, as each plan by itself") {
  const PlanFile problem = ProblemOf("pythia-160m", "dgx-a100", 1, 4);
  const std::vector<BaselineResult> results = EvaluateBaselines(problem);
  REQUIRE(results.size() == kBaselines.size());
  for (const BaselineResult& result : results) {
    CAPTURE(NameOf(result.baseline));
    REQUIRE(result.Fits());
    CHECK(result.plan.micro_batch * result.plan.accumulation == 4);
    for (const UserChoice& choice : UserChoices(result.baseline, JobMode::kTrain, 4)) {
      PlanFile file = problem;
      file.job.optimizer.impl = ImplOf(result.baseline);
      file.plan = BaselinePlan(result.baseline, problem.model, 8, choice);
      const Outcome other = Evaluate(file, file.plan);
      if (choice == result.choice) {
        CHECK(other.step_time == result.outcome->step_time);
      } else if (other.Fits() && other.retries_per_step == 0) {
        CHECK(other.step_time >= result.outcome->step_time);
      }
    }
  }
}

// Those of many micro-batches are looked at roughly, and larger ones than one that fails are not.
TEST_CASE("EvaluateBaselines: with many micro-batches and little memory no choice is better") {
  constexpr std::int64_t kSamples = 64;
  const PlanFile problem = ProblemOf("pythia-70m", "dgx-a100", 1, kSamples);
  PlanFile file = problem;
  file.plan = BaselinePlan(Baseline::kFsdp1Transformer, problem.model, 8, {8, 8, {}});
  const Bytes limit = Evaluate(file, file.plan, {.reserved = false}).DeviceTotal();
  int failing = 0;
  for (const BaselineResult& result : EvaluateBaselines(problem, {}, limit)) {
    CAPTURE(NameOf(result.baseline));
    REQUIRE(result.outcome);
    for (const UserChoice& choice : UserChoices(result.baseline, JobMode::kTrain, kSamples)) {
      CAPTURE(choice.micro_batch);
      file.job.optimizer.impl = ImplOf(result.baseline);
      file.plan = BaselinePlan(result.baseline, problem.model, 8, choice);
      const Outcome other = Evaluate(file, file.plan, {.reserved = false, .memory_limit = limit});
      failing += other.Fits() ? 0 : 1;
      if (choice == result.choice) {
        CHECK(other.step_time == result.outcome->step_time);
      } else if (result.Fits()) {
        CHECK((!other.Fits() || other.step_time >= result.outcome->step_time));
      } else {
        CHECK(!other.Fits());
        CHECK(other.Excess() >= result.outcome->Excess());
      }
    }
  }
  CHECK(failing > 10);  // not vacuous
}

TEST_CASE("FindMisfits: a native plan needs its arena, others need their buffers") {
  PlanFile file = ProblemOf("gpt2", "dgx-a100", 1, 1);
  const Bytes usable = UsableMemory(file);
  SimulationResult result;
  result.memory.outside = Bytes(1000);
  result.memory.allocated.device_steady.total = usable - Bytes(1000);
  file.plan.dialect = Dialect::kFsdp2;
  CHECK(FindMisfits(file, file.plan, usable, usable, result).empty());
  file.plan.dialect = Dialect::kNative;
  const std::vector<Misfit> misfits =
      FindMisfits(file, file.plan, usable, usable - Bytes(999), result);
  REQUIRE(misfits.size() == 1);
  CHECK(misfits[0].Excess() == Bytes(1));
  result.memory.allocated.device_steady.total = usable;
  CHECK(FindMisfits(file, file.plan, usable, usable - Bytes(1000), result).empty());
}

// 8.03e9 parameters x 16 bytes = 120 GiB of weights, gradients and states on every GPU.
TEST_CASE("EvaluateBaselines: what does not fit says why and by how much") {
  const PlanFile problem = ProblemOf("llama-3-8b", "dgx-a100", 1, 1);
  const std::vector<BaselineResult> results = EvaluateBaselines(problem);
  const BaselineResult& ddp = results.back();
  REQUIRE(ddp.outcome);
  CHECK_FALSE(ddp.Fits());
  CHECK(ddp.refusal.starts_with("does not fit: peak allocated "));
  const auto states = static_cast<double>(CountParameters(problem.model)) * 16.0;
  const auto usable = static_cast<double>(ddp.outcome->usable.value);
  CHECK(static_cast<double>(ddp.outcome->Excess().value) > states - usable);
  CHECK(static_cast<double>(ddp.outcome->Excess().value) < 2 * states - usable);
  CHECK(results[1].Fits());
  // A convolutional net has no blocks to wrap.
  const PlanFile images = ProblemOf("mnist-convnet", "dgx-a100", 1, 2);
  for (const BaselineResult& result : EvaluateBaselines(images)) {
    CAPTURE(NameOf(result.baseline));
    const bool needs_blocks = result.baseline != Baseline::kFsdp1Size &&
                              result.baseline != Baseline::kZero3 &&
                              result.baseline != Baseline::kDdp;
    CHECK(result.Fits() == !needs_blocks);
    CHECK(result.outcome.has_value() == !needs_blocks);
    if (needs_blocks) {
      CHECK(result.refusal.find("without repeated blocks") != std::string::npos);
    }
  }
  // By size, transformer (124 M parameters) is a unit, and the root has the head that is tied to
  // it.
  const BaselineResult tied = EvaluateBaselines(ProblemOf("gpt2", "dgx-a100", 1, 1))[0];
  CHECK(tied.refusal.find("got tied parameters") != std::string::npos);
  PlanFile uneven = problem;
  uneven.job.global_batch = 12;
  CHECK_THROWS_WITH_AS((void)EvaluateBaselines(uneven),
                       "global batch: got 12, expected a multiple of the 8 ranks", InputError);
}

}  // namespace
}  // namespace shardwright
