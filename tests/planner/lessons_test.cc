// What users of FSDP found out by running it must come out of the predictions by itself.

#include <functional>
#include <string>

#include <doctest/doctest.h>

#include "core/json.h"
#include "models/loader.h"
#include "planner/baselines.h"
#include "planner/evaluate.h"
#include "schedule/wrap.h"

namespace shardwright {
namespace {

struct Case {
  std::string model, cluster;
  std::int64_t nodes = 1;
  std::int64_t sequence = 0;
  std::int64_t micro_batch = 1;
  Dialect dialect = Dialect::kFsdp1;
  Precision precision{DType::kFp32, DType::kBf16, DType::kFp32};
  bool recompute = true;
  std::string kernels = "torch-eager";
};

// One unit per block (DDP: one), fully sharded unless `change` says otherwise.
Outcome Run(const Case& c, const std::function<void(PlanFile&)>& change = {}) {
  PlanFile file;
  file.job.sequence_length = c.sequence;
  file.job.precision = c.precision;
  file.cluster = LoadCluster(c.cluster, c.nodes);
  file.kernels = FindKernelSet(c.kernels, "test");
  file.profile = DefaultProfile(file.cluster.gpu, file.kernels.name);
  file.model = LoadModelForJob(c.model, file.job, Path("test"));
  const std::int64_t ranks = file.cluster.RankCount();
  const bool is_ddp = c.dialect == Dialect::kDdp;
  file.plan.dialect = c.dialect;
  file.plan.shard_size = is_ddp ? 1 : ranks;
  file.plan.replicate_size = is_ddp ? ranks : 1;
  file.plan.micro_batch = c.micro_batch;
  file.job.global_batch = ranks * c.micro_batch;
  const Model& model = file.model;
  const std::string wrap = is_ddp || model.block_classes.empty() ? "root" : "block";
  file.plan.units = Wrap(model, ParseWrap(wrap, "test"), {}, c.dialect, "test");
  if (c.recompute) {
    file.plan.recompute = RecomputeBlocks(model, RecomputeKind::kFull, 1, "test");
  }
  if (change) {
    change(file);
  }
  return Evaluate(file, file.plan);
}

// a takes so many times as long as b.
double Slower(const Outcome& a, const Outcome& b) {
  return Ratio(a.step_time, b.step_time);
}

// pytorch #102434: FULL_SHARD is slow over several nodes, HYBRID_SHARD cures it. oumi #213: 55.3
// against 74.4 samples/s on four nodes.
TEST_CASE("Hybrid sharding wins where the network is slow, and does not matter in one node") {
  const auto hybrid = [](PlanFile& file) {
    file.plan.shard_size = 8;
    file.plan.replicate_size = file.cluster.node_count;
  };
  Case job{.model = "llama-2-7b",
           .cluster = "a100-80 x8, nic 100 Gbit/s",
           .nodes = 4,
           .sequence = 2048,
           .micro_batch = 2,
           .dialect = Dialect::kFsdp2};
  CHECK(Slower(Run(job), Run(job, hybrid)) > 1.1);
  job.nodes = 1;
  CHECK(Slower(Run(job), Run(job, hybrid)) == 1);
}

TEST_CASE("A small model is faster with DDP than sharded") {
  Case job{.model = "mnist-convnet", .cluster = "dgx-a100", .micro_batch = 64, .recompute = false};
  // Without the loop's own milliseconds, which are the same for both and hide the host's issuing.
  const auto without_loop = [](PlanFile& file) { file.profile.host.step.value = Seconds(0); };
  const Outcome sharded = Run(job, without_loop);
  job.dialect = Dialect::kDdp;
  CHECK(Slower(sharded, Run(job, without_loop)) > 1);
}

// FSDP paper, figure 6a: T5 of 611 M and 2.28 B parameters trains as fast as with DDP, which has no
// memory for more; sharded, 11 B fit.
TEST_CASE("Sharded T5 is as fast as DDP where that fits, and 11 B fit only sharded") {
  for (const char* model : {"t5-large", "t5-3b", "t5-11b"}) {
    CAPTURE(model);
    Case job{.model = model,
             .cluster = "dgx-a100",
             .sequence = 512,
             .micro_batch = 8,
             .precision = {DType::kBf16, DType::kBf16, DType::kBf16},
             .kernels = "hf-2023"};
    const Outcome sharded = Run(job);
    job.dialect = Dialect::kDdp;
    const Outcome replicated = Run(job);
    CHECK(sharded.Fits());
    CHECK(replicated.Fits() == (job.model != "t5-11b"));
    CHECK(Slower(replicated, sharded) == doctest::Approx(1).epsilon(0.1));
  }
}

// fairseq's documentation: a 13B model trains on one GPU with 32 GB once parameters live on the
// host.
TEST_CASE("13B parameters on one V100 with 32 GB need CPU offload") {
  for (const Dialect dialect : {Dialect::kFsdp2, Dialect::kNative}) {
    CAPTURE(NameOf(dialect));
    const Case job{.model = "gpt3-13b",
                   .cluster = "v100-32 x1, host 512 GiB",
                   .sequence = 2048,
                   .dialect = dialect,
                   .precision = {DType::kFp32, DType::kFp16, DType::kFp32}};
    CHECK_FALSE(Run(job).Fits());
    CHECK(Run(job, [](PlanFile& file) { file.plan.offload.parameters = true; }).Fits());
  }
}

// FSDP paper, figure 6b: backward prefetch makes GPT-175B about 18 % faster.
TEST_CASE("Backward prefetch pays for GPT-175B") {
  const Case job{.model = "gpt3-175b",
                 .cluster = "ndm-a100-v4",
                 .nodes = 16,
                 .sequence = 2048,
                 .precision = {DType::kBf16, DType::kBf16, DType::kBf16}};
  const auto without = [](PlanFile& file) {
    file.plan.backward_prefetch = BackwardPrefetch::kNone;
  };
  CHECK(Slower(Run(job, without), Run(job)) > 1.1);
}

// FSDP paper, figure 6c: without the rate limiter T5-11B runs out of memory and retries; RegNet-9B
// does not care. Transformers' T5 takes its softmax in fp32, so that batch 2 all but fills 80 GB.
TEST_CASE("The rate limiter matters for T5-11B and not for RegNet") {
  const auto unlimited = [](PlanFile& file) { file.plan.limit_all_gathers = false; };
  constexpr Precision kBf16{DType::kBf16, DType::kBf16, DType::kBf16};
  Case t5{.model = "t5-11b",
          .cluster = "dgx-a100",
          .nodes = 2,
          .sequence = 512,
          .micro_batch = 2,
          .precision = kBf16,
          .kernels = "hf-2023"};
  CHECK(Run(t5, unlimited).reserved > Run(t5).reserved * 4);
  t5.recompute = false;
  const Outcome limited = Run(t5);
  const Outcome free = Run(t5, unlimited);
  CHECK(limited.retries_per_step == 0);
  CHECK(free.retries_per_step > 1);
  CHECK(Slower(free, limited) > 1.1);
  const Case regnet{.model = "regnet-y-10b-seer",
                    .cluster = "dgx-a100",
                    .nodes = 2,
                    .micro_batch = 48,
                    .precision = kBf16,
                    .recompute = false};
  const auto by_size = [](PlanFile& file) {
    file.plan.units = Wrap(file.model, ParseWrap("size:1e8", "test"), {}, Dialect::kFsdp1, "test");
  };
  const Outcome other = Run(regnet, [&](PlanFile& file) {
    by_size(file);
    unlimited(file);
  });
  // 2.3 % since units are freed when their flat gradient is final; what makes it so is not traced.
  CHECK(Slower(other, Run(regnet, by_size)) == doctest::Approx(1).epsilon(0.03));
}

// minGPT at the size of GPT-3, as karpathy/minGPT's mingpt/model.py of 2022 builds it: the head is
// not tied, everything has dropout, and each attention keeps a causal mask in fp32.
void MakeMinGpt(PlanFile& file) {
  constexpr std::int64_t kPositions = 2048;
  const JsonValue config = JsonValue::Parse(
      R"({"model_type": "gpt2", "vocab_size": 50000, "n_positions": 2048, "n_embd": 12288,
          "n_layer": 96, "n_head": 96, "activation_function": "gelu_new",
          "tie_word_embeddings": false,
          "resid_pdrop": 0.1, "embd_pdrop": 0.1, "attn_pdrop": 0.1})",
      "test");
  Model& model = file.model;
  model = ModelFromJson(config, "mingpt-175b", {.sequence_length = file.job.sequence_length});
  for (Module& module : model.modules) {
    if (module.class_name == "GPT2Attention") {
      module.buffer_elements = kPositions * kPositions;
    }
  }
  file.plan.units = Wrap(model, ParseWrap("block", "test"), {}, Dialect::kFsdp1, "test");
  file.plan.recompute = RecomputeBlocks(model, RecomputeKind::kFull, 1, "test");
  file.plan.use_orig_params = false;
  file.profile.memory.first_communicator.value = Bytes(std::int64_t{2} << 30);
}

// FSDP paper, section 5.4: with batch 2 and the limiter the allocator retries on 128 GPUs, where
// memory is exhausted, not with batch 1, and not on 192. minGPT's GELU is written out and its
// logits outlive the loss (hf-2021). NCCL takes 1 to 2 GiB (stas00/ml-engineering); with the
// profile's 1.4 GiB the replay has 0.2 GiB left.
TEST_CASE("GPT-175B on 128 A100-80 with batch 2 meets allocator stalls") {
  Case job{.model = "gpt3-175b",
           .cluster = "dgx-a100",
           .nodes = 16,
           .sequence = 2048,
           .micro_batch = 2,
           .kernels = "hf-2021"};
  CHECK(Run(job, MakeMinGpt).retries_per_step > 0);
  job.micro_batch = 1;
  CHECK(Run(job, MakeMinGpt).retries_per_step == 0);
  job.micro_batch = 2;
  job.nodes = 24;
  CHECK(Run(job, MakeMinGpt).retries_per_step == 0);
}

}  // namespace
}  // namespace shardwright
