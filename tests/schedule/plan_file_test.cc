#include "schedule/plan_file.h"

#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include <doctest/doctest.h>

#include "core/error.h"
#include "schedule/wrap.h"

namespace shardwright {
namespace {

PlanFile SmallPlan(const std::string& model = "gpt2") {
  PlanFile file;
  file.job.sequence_length = 128;
  file.cluster = LoadCluster("dgx-a100", 2, 4);
  file.kernels = FindKernelSet("torch-eager", "test");
  file.profile = DefaultProfile(file.cluster.gpu, file.kernels.name);
  file.model = LoadModelForJob(model, file.job, Path("test"));
  file.plan.shard_size = 8;
  file.job.global_batch = 8;
  file.plan.units = Wrap(file.model, ParseWrap("block", "test"), {}, file.plan.dialect, "test");
  return file;
}

// Writes, reads and writes again.
void CheckRoundTrip(const PlanFile& file) {
  const std::string text = PlanFileJson(file);
  const PlanFile read = ParsePlanFile(text, "p.json");
  CHECK(read.job == file.job);
  CHECK(read.plan == file.plan);
  CHECK(read.kernels == file.kernels);
  CHECK(ClusterJson(read.cluster) == ClusterJson(file.cluster));
  CHECK(read.profile == file.profile);
  CHECK(read.model.hash == file.model.hash);
  CHECK(HashModel(read.model) == HashModel(file.model));
  CHECK(PlanFileJson(read) == text);
}

TEST_CASE("A plan keeps the cores of the machine where it was made") {
  PlanFile file = SmallPlan();
  file.cluster = LoadCluster("host", 1, 8);
  file.cluster.machine_cores = 1234;
  CHECK(PlanFileJson(file).find("\"machine_cores\": 1234") != std::string::npos);
  CHECK(PlanFileJson(file).find("\"format\": \"shardwright-cluster\"") == std::string::npos);
  CheckRoundTrip(file);
  file.cluster.rank_threads = 3;  // of a run with --threads 3
  CHECK(PlanFileJson(file).find("\"rank_threads\": 3") != std::string::npos);
  CHECK(PlanFileJson(file).find("\"format\": \"shardwright-cluster\"") == std::string::npos);
  CheckRoundTrip(file);
  CHECK(ParsePlanFile(PlanFileJson(file), "p.json").cluster.ThreadsPerRank() == 3);
  file.cluster.rank_threads = 0;
  // Plans from before there was such a number: every thread has a core.
  file.cluster.machine_cores = 0;
  CheckRoundTrip(file);
  CHECK(ParsePlanFile(PlanFileJson(file), "p.json").cluster.SharedCores() == 0);
}

// Published test vectors of FNV-1a, 64 bits (draft-eastlake-fnv, appendix C).
TEST_CASE("Fnv1a64: published vectors") {
  CHECK(Fnv1a64("") == 0xcbf29ce484222325U);
  CHECK(Fnv1a64("a") == 0xaf63dc4c8601ec8cU);
  CHECK(Fnv1a64("foobar") == 0x85944171f73967e8U);
  CHECK(HashText(0x0123456789abcdefU) == "fnv1a64:0123456789abcdef");
  CHECK(HashText(1) == "fnv1a64:0000000000000001");
}

TEST_CASE("HashModel: every part counts") {
  Job job;
  job.sequence_length = 16;
  const Model model = LoadModelForJob("gpt2", job, Path("test"));
  const std::vector<std::function<void(Model&)>> changes = {
      [](Model& m) { m.type = "x"; },
      [](Model& m) { m.block_classes = {"x"}; },
      [](Model& m) { m.modules[3].fqn += "x"; },
      [](Model& m) { m.modules[3].class_name += "x"; },
      [](Model& m) { m.modules[3].buffer_elements += 1; },
      [](Model& m) { m.params[2].shape[0] += 1; },
      [](Model& m) { m.params[2].trainable = false; },
      [](Model& m) { m.params[2].full_precision = true; },
      [](Model& m) { m.tensors[4].elements += 1; },
      [](Model& m) { m.tensors[4].per_sample = false; },
      [](Model& m) { m.ops[5].name += "x"; },
      [](Model& m) { m.ops[5].inputs.pop_back(); },
      [](Model& m) { m.specs[0].rows += 1; },
      [](Model& m) { m.specs[0].dropout_p += 0.01; },
      [](Model& m) { m.specs[0].epsilon += 1e-7; },
      [](Model& m) { m.specs[0].transposed = true; },
      [](Model& m) { m.specs[0].rope.theta += 1.0; },
      [](Model& m) { m.tensors[0].input = InputKind::kLabels; },
  };
  for (const auto& change : changes) {
    Model changed = model;
    change(changed);
    CHECK(HashModel(changed) != HashModel(model));
  }
  job.sequence_length = 17;
  CHECK(LoadModelForJob("gpt2", job, Path("test")).hash != HashModel(model));
}

TEST_CASE("PlanFile: defaults come back") {
  CheckRoundTrip(SmallPlan());
  CheckRoundTrip(SmallPlan("vit-b-16"));
  CheckRoundTrip(SmallPlan("t5-small"));
}

TEST_CASE("PlanFile: options of the ZeRO stages and ddp come back") {
  PlanFile zero = SmallPlan();
  zero.plan.zero.reduce_bucket = 1;
  zero.plan.zero.contiguous_gradients = false;
  zero.plan.zero.overlap_comm = Overlap::kOff;
  for (UnitPlan& unit : zero.plan.units) {
    unit.reshard = Reshard();
  }
  PlanFile second = zero;
  second.plan.dialect = Dialect::kZero2;
  second.plan.zero.gradient_reduction = GradientReduction::kReduceScatter;
  second.plan.zero.allgather_bucket = 2;
  CheckRoundTrip(second);
  zero.plan.dialect = Dialect::kZero3;
  zero.plan.zero.gradient_reduction = GradientReduction::kAllReduce;
  zero.plan.zero.before_deepspeed_0_6 = true;
  zero.plan.offload.optimizer = true;
  zero.plan.zero.prefetch_bucket = 3;
  zero.plan.zero.max_live_parameters = 4;
  zero.plan.zero.max_reuse_distance = 5;
  zero.plan.zero.persistence_threshold = 6;
  zero.plan.zero.sub_group = 7;
  CheckRoundTrip(zero);
  PlanFile ddp = SmallPlan();
  ddp.plan.dialect = Dialect::kDdp;
  std::swap(ddp.plan.shard_size, ddp.plan.replicate_size);
  ddp.plan.units.erase(ddp.plan.units.begin(), ddp.plan.units.end() - 1);
  ddp.job.optimizer.matrices = MatrixRule::kSoap;
  ddp.job.allocator = {.expandable_segments = true,
                       .max_split_size = 512 * kMiB,
                       .garbage_collection_threshold = 0.75};
  CheckRoundTrip(ddp);
}

TEST_CASE("PlanFile: every field comes back") {
  PlanFile file = SmallPlan("llama-3.2-1b");
  file.job = {.mode = JobMode::kForward,
              .sequence_length = 128,
              .global_batch = 8 * 3 * 5,
              .precision = {DType::kBf16, DType::kFp16, DType::kBf16},
              .optimizer = {OptimizerKind::kAdadelta, OptimizerImpl::kForLoop, false},
              .clip_gradients = false,
              .frozen = {},
              .lora_rank = 4,
              .lora_alpha = 12.5,
              .lora_targets = {"q_proj"},
              .lora_saved = {},
              .rollout = {},
              .fp32_masters = {},
              .memory_margin = 0.125,
              .allocator = {}};
  file.model = LoadModelForJob("llama-3.2-1b", file.job, Path("test"));
  file.kernels.attention = AttentionImpl::kMaterialized;
  file.kernels.moe_dispatch = MoeDispatch::kDense;
  file.kernels.fused_elementwise = true;
  file.kernels.fused_rope = true;
  file.kernels.fused_norm = false;
  file.kernels.fp32_logits = false;
  file.kernels.loss_chunks = 8;
  file.kernels.autocast_weights = true;
  Plan& plan = file.plan;
  plan.dialect = Dialect::kNative;
  plan.shard_size = 4;
  plan.replicate_size = 2;
  plan.micro_batch = 3;
  plan.accumulation = 5;
  plan.sync = SyncMode::kReplicateLast;
  plan.recompute = {{"model.layers.0", RecomputeKind::kSelective, 3},
                    {"model.layers.1.mlp", RecomputeKind::kFull, 1}};
  plan.offload = {true, true, true};
  plan.in_flight = 7;
  plan.units[0].reshard = {Reshard::Kind::kToGroup, 2};
  plan.units[1].reshard.kind = Reshard::Kind::kNever;
  plan.units[2].gap = Gap::kRegather;
  plan.units[3].forward_prefetch = {"model.layers.4", "model.layers.5"};
  plan.units[3].backward_prefetch = {"model.layers.2"};
  CheckRoundTrip(file);
  plan.offload = {.moments = true};
  plan.moments_piece = Bytes(1000001);
  CheckRoundTrip(file);
  PlanFile fsdp1 = SmallPlan();
  fsdp1.plan.dialect = Dialect::kFsdp1;
  fsdp1.plan.backward_prefetch = BackwardPrefetch::kPost;
  fsdp1.plan.forward_prefetch = true;
  fsdp1.plan.limit_all_gathers = false;
  fsdp1.plan.use_orig_params = false;
  fsdp1.plan.bounded_memory = true;
  fsdp1.plan.torch = TorchRelease::k2_6;
  CheckRoundTrip(fsdp1);
  PlanFile ddp = SmallPlan();
  ddp.plan.dialect = Dialect::kDdp;
  ddp.plan.units = {ddp.plan.units.back()};
  ddp.plan.shard_size = 1;
  ddp.plan.replicate_size = 8;
  ddp.plan.first_bucket = Bytes(1000001);
  ddp.plan.bucket = 3 * kMiB;
  ddp.plan.find_unused_parameters = ddp.plan.static_graph = true;
  CheckRoundTrip(ddp);
}

TEST_CASE("PlanFile: what does not ship is embedded") {
  PlanFile file = SmallPlan("data/models/tiny-llama");
  CHECK(!file.model.json.empty());
  file.cluster = LoadCluster("h100-80 x8, nvlink 450 GB/s, nic 8x400 Gbit/s, host 1 TiB");
  file.profile.host.kernel_launch.value = Seconds(1e-6);
  const std::string text = PlanFileJson(file);
  CHECK(text.find("\"format\": \"shardwright-cluster\"") != std::string::npos);
  CheckRoundTrip(file);
  // A cluster that only shares its name with the catalog is embedded too.
  PlanFile renamed = SmallPlan();
  renamed.cluster.gpu.memory_bandwidth.value = BytesPerSecond(1e12);
  CHECK(PlanFileJson(renamed).find("\"format\": \"shardwright-cluster\"") != std::string::npos);
  CheckRoundTrip(renamed);
}

// Spaces are put behind commas and colons, but not inside of strings, wherever those end.
TEST_CASE("PlanFile: a string with quotes in it comes back as it is") {
  PlanFile file = SmallPlan();
  file.profile.description = "by \"x,y\": a:b,c \\";
  file.profile.host.kernel_launch.value = Seconds(1e-6);  // so that it does not ship
  CHECK(ParsePlanFile(PlanFileJson(file), "p.json").profile.description ==
        file.profile.description);
  CheckRoundTrip(file);
}

TEST_CASE("CheckPlan: the plan uses all ranks") {
  PlanFile file = SmallPlan();
  file.plan.shard_size = 4;
  file.job.global_batch = 4;
  CHECK_THROWS_WITH_AS(
      CheckPlan(file, file.plan, "p.json: plan"),
      "p.json: plan: got shard_size 4 x replicate_size 1 = 4 ranks, expected 8, the "
      "GPUs of 2 x dgx-a100",
      InputError);
}

}  // namespace
}  // namespace shardwright
