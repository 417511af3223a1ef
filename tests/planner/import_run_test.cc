#include <algorithm>
#include <random>
#include <string>
#include <utility>
#include <vector>

#include <doctest/doctest.h>

#include "core/error.h"
#include "planner/emitters/emitters.h"
#include "planner/importers/document.h"
#include "planner/importers/run_settings.h"
#include "schedule/plan_names.h"
#include "schedule/wrap.h"
#include "tests/planner/run_files.h"

namespace shardwright {
namespace {

using testing::Base;
using testing::ErrorOf;
using testing::Files;
using testing::Folder;
using testing::Imported;
using testing::Read;

// As torchtitan 0.2.2's llama3_8b.toml, with two ranks per copy.
constexpr const char* kTorchtitan = R"(
[job]
dump_folder = "./outputs"
[model]
name = "llama3"
flavor = "8B"
[optimizer]
name = "AdamW"
lr = 3e-4
eps = 1e-8
[training]
local_batch_size = 2
global_batch_size = 48
seq_len = 128
steps = 1000
[parallelism]
data_parallel_replicate_degree = 4
data_parallel_shard_degree = 2
fsdp_reshard_after_forward = "never"
tensor_parallel_degree = 1
[activation_checkpoint]
mode = "selective"
selective_ac_option = '3'
)";

TEST_CASE("torchtitan: what its TOML says and what it takes by default") {
  const PlanFile file = Imported({{"run.toml", kTorchtitan}});
  CHECK(file.plan.dialect == Dialect::kFsdp2);
  CHECK(file.plan.shard_size == 2);
  CHECK(file.plan.replicate_size == 4);
  CHECK(file.plan.micro_batch == 2);
  CHECK(file.plan.accumulation == 3);      // 48 = 8 ranks x 2 x 3
  CHECK(file.plan.recompute.size() == 4);  // every third of 12 blocks
  CHECK(file.plan.recompute[0].module == "transformer.h.2");
  CHECK(file.plan.units[1].reshard.kind == Reshard::Kind::kNever);
  CHECK(file.job.optimizer.impl == OptimizerImpl::kFused);
  CHECK(file.job.precision.param == DType::kBf16);
  const Folder folder;
  const RunSettings run = Read(folder, {{"run.toml", kTorchtitan}});
  CHECK(run.framework == "torchtitan");
  CHECK(FactsOf(run).model == "llama-3.1-8b");
  CHECK(FactsOf(run).sequence_length == 128);
  CHECK(run.left_out.size() == 3);  // dump_folder, eps, steps
  PlanFile applied = Base(2);
  ApplyRun(run, applied);
  std::string keys;
  for (const Assumption& assumption : AssumptionsOf(run, applied)) {
    keys += assumption.key + "=" + assumption.value + " ";
  }
  CHECK(keys ==
        "optimizer.weight_decay=0.1 optimizer.implementation=\"fused\" training.max_norm=1.0 "
        "training.dtype=\"float32\" training.mixed_precision_param=\"bfloat16\" "
        "training.mixed_precision_reduce=\"float32\" training.enable_cpu_offload=false "
        "compile.enable=false PYTORCH_ALLOC_CONF=expandable_segments:True ");
}

// As `accelerate config` writes it: most strings unquoted, mixed_precision not.
constexpr const char* kAccelerate = R"(compute_environment: LOCAL_MACHINE
debug: false
distributed_type: FSDP
downcast_bf16: 'no'
enable_cpu_affinity: false
fsdp_config:
  fsdp_activation_checkpointing: true
  fsdp_auto_wrap_policy: TRANSFORMER_BASED_WRAP
  fsdp_backward_prefetch: BACKWARD_POST
  fsdp_cpu_ram_efficient_loading: true
  fsdp_forward_prefetch: true
  fsdp_offload_params: false
  fsdp_reshard_after_forward: HYBRID_SHARD
  fsdp_state_dict_type: FULL_STATE_DICT
  fsdp_sync_module_states: true
  fsdp_transformer_layer_cls_to_wrap: GPT2Block
  fsdp_use_orig_params: true
  fsdp_version: 1
machine_rank: 0
main_training_function: main
mixed_precision: bf16
num_machines: 2
num_processes: 8
rdzv_backend: static
same_network: true
tpu_env: []
use_cpu: false
)";

// `line` behind "fsdp_config:".
std::string WithFsdpLine(std::string text, const std::string& line) {
  const std::string table = "fsdp_config:\n";
  return text.insert(text.find(table) + table.size(), "  " + line + "\n");
}

TEST_CASE("Accelerate: FSDP 1 takes its strategy by its own key only") {
  const PlanFile hybrid =
      Imported({{"a.yaml", WithFsdpLine(kAccelerate, "fsdp_sharding_strategy: HYBRID_SHARD")}});
  CHECK(hybrid.plan.shard_size == 4);  // inside a node
  CHECK(hybrid.plan.replicate_size == 2);
  const PlanFile file = Imported({{"a.yaml", kAccelerate}});
  CHECK(file.plan.dialect == Dialect::kFsdp1);
  // `accelerate launch` passes FULL_SHARD on, which goes before fsdp_reshard_after_forward.
  CHECK(file.plan.shard_size == 8);
  CHECK(file.plan.backward_prefetch == BackwardPrefetch::kPost);
  CHECK(file.plan.forward_prefetch);
  CHECK(file.plan.units.size() == 13);
  CHECK(file.plan.recompute.size() == 12);
  const Folder folder;
  const RunFacts facts = FactsOf(Read(folder, {{"a.yaml", kAccelerate}}));
  CHECK(facts.nodes == 2);
  CHECK(facts.gpus_per_node == 4);
  CHECK_FALSE(facts.has_micro_batch);
  // What `accelerate config` writes without FSDP; an unquoted "no" is a boolean.
  const PlanFile ddp = Imported(
      {{"a.yaml", "distributed_type: MULTI_GPU\nmixed_precision: no\nnum_processes: 8\n"}});
  CHECK(ddp.plan.dialect == Dialect::kDdp);
  CHECK(ddp.job.precision.param == DType::kFp32);
  const PlanFile zero = Imported({{"a.yaml",
                                   "distributed_type: DEEPSPEED\nmixed_precision: bf16\n"
                                   "deepspeed_config:\n  zero_stage: 2\n"
                                   "  gradient_accumulation_steps: 4\n  gradient_clipping: 0.0\n"
                                   "  offload_optimizer_device: none\n"}});
  CHECK(zero.plan.dialect == Dialect::kZero2);
  CHECK(zero.plan.accumulation == 4);
  CHECK(zero.job.precision.param == DType::kBf16);
  CHECK_FALSE(zero.job.clip_gradients);
}

TEST_CASE("Accelerate: what its launcher takes for keys that are not there") {
  const auto with = [](const std::string& fsdp) {
    return Files{{"a.yaml",
                  "distributed_type: FSDP\nnum_machines: 2\nnum_processes: 8\n"
                  "fsdp_config:\n  fsdp_activation_checkpointing: true\n" +
                      fsdp}};
  };
  // The model's _no_split_modules, whatever the version.
  for (const char* version : {"1", "2"}) {
    CAPTURE(version);
    const PlanFile file = Imported(with(std::string("  fsdp_version: ") + version +
                                        "\n  fsdp_auto_wrap_policy: TRANSFORMER_BASED_WRAP\n"));
    CHECK(file.plan.units[0].name == "transformer.h.0");
    CHECK(file.plan.recompute.size() == 12);
  }
  // Units of 1e8 parameters and more, which would part GPT-2's table from its head.
  CHECK_THROWS_WITH_AS((void)Imported(with("  fsdp_auto_wrap_policy: SIZE_BASED_WRAP\n")),
                       doctest::Contains("tied parameters"), InputError);
  CHECK(Imported(with("")).plan.use_orig_params);
  CHECK(
      ErrorOf(with("  fsdp_auto_wrap_policy: TRANSFORMER_BASED_WRAP\n"
                   "  fsdp_transformer_layer_cls_to_wrap: LlamaDecoderLayer\n")) ==
      "a.yaml: fsdp_config.fsdp_transformer_layer_cls_to_wrap: got \"LlamaDecoderLayer\", expected "
      "a class of gpt2's modules, such as GPT2Block");
  CHECK(
      ErrorOf(with("  fsdp_version: 2\n  fsdp_reshard_after_forward: FULL_SHARD\n")) ==
      "a.yaml: fsdp_config.fsdp_reshard_after_forward: got \"FULL_SHARD\", expected true or false "
      "with fsdp_version 2");
  // DeepSpeed without a stage is stage 2 and clips.
  const PlanFile zero = Imported({{"a.yaml",
                                   "distributed_type: DEEPSPEED\nmixed_precision: bf16\n"
                                   "num_processes: 8\nnum_machines: 2\n"
                                   "deepspeed_config:\n  gradient_accumulation_steps: 1\n"}});
  CHECK(zero.plan.dialect == Dialect::kZero2);
  CHECK(zero.job.clip_gradients);
}

// As in Transformers' DeepSpeed guide.
constexpr const char* kAutoDeepSpeed = R"({
  "bf16": {"enabled": "auto"},
  "optimizer": {"type": "AdamW", "params": {"lr": "auto", "betas": "auto", "weight_decay": "auto"}},
  "scheduler": {"type": "WarmupLR", "params": {"warmup_min_lr": "auto"}},
  "zero_optimization": {"stage": 3, "overlap_comm": true, "contiguous_gradients": true,
    "sub_group_size": 1e9, "reduce_bucket_size": "auto", "stage3_prefetch_bucket_size": "auto",
    "stage3_max_live_parameters": 1e9, "stage3_gather_16bit_weights_on_model_save": true,
    "offload_optimizer": {"device": "none", "pin_memory": true}},
  "gradient_accumulation_steps": "auto", "gradient_clipping": "auto", "steps_per_print": 2000,
  "train_batch_size": "auto", "train_micro_batch_size_per_gpu": "auto",
  "wall_clock_breakdown": false})";

TEST_CASE("DeepSpeed: alone, and with the Trainer that fills in what is \"auto\"") {
  const Files both = {{"args.json",
                       R"({"output_dir": "o", "per_device_train_batch_size": 4, "bf16": true,
                           "gradient_accumulation_steps": 2, "max_grad_norm": 0,
                           "gradient_checkpointing": true, "deepspeed": "ds.json",
                           "num_train_epochs": 3})"},
                      {"ds.json", kAutoDeepSpeed}};
  const PlanFile file = Imported(both);
  CHECK(file.plan.dialect == Dialect::kZero3);
  CHECK(file.plan.micro_batch == 4);
  CHECK(file.plan.accumulation == 2);
  CHECK(file.job.precision.param == DType::kBf16);
  CHECK_FALSE(file.job.clip_gradients);
  CHECK(file.plan.recompute.size() == 12);
  CHECK(file.plan.zero.overlap_comm == Overlap::kOn);
  // By the hidden size of GPT-2, 768; the threshold does not say "auto".
  CHECK(file.plan.zero.reduce_bucket == 768 * 768);
  CHECK(file.plan.zero.prefetch_bucket == 530841);  // int(0.9 * 768 * 768)
  CHECK(file.plan.zero.persistence_threshold == 100'000);
  // The third of the three batch sizes follows: 64 / 8 ranks / 2.
  const PlanFile alone =
      Imported({{"ds.json", R"({"train_batch_size": 64, "gradient_accumulation_steps": 2, "fp16":
                       {"enabled": true, "loss_scale": 0}, "zero_optimization": {"stage": 1}})"}});
  CHECK(alone.plan.dialect == Dialect::kZero1);
  CHECK(alone.plan.micro_batch == 4);
  CHECK(alone.job.precision.param == DType::kFp16);
}

TEST_CASE("Trainer: the words of version 4, and plain data parallelism") {
  const PlanFile words = Imported(
      {{"t.json", R"({"output_dir": "o", "fsdp": "shard_grad_op auto_wrap offload", "bf16": true,
                      "fsdp_config": {"transformer_layer_cls_to_wrap": ["GPT2Block"],
                                      "backward_prefetch": "backward_pre"}})"}});
  CHECK(words.plan.dialect == Dialect::kFsdp1);
  CHECK(words.plan.units.size() == 13);
  CHECK(words.plan.units[0].reshard.kind == Reshard::Kind::kNever);
  CHECK(words.plan.offload.parameters);
  CHECK(words.plan.micro_batch == 8);  // per_device_train_batch_size
  const PlanFile ddp = Imported({{"t.json", R"({"output_dir": "o", "fp16": true})"}});
  CHECK(ddp.plan.dialect == Dialect::kDdp);
  CHECK(ddp.job.precision.param == DType::kFp16);
}

// trainer.py of transformers: DDP looks for unused parameters unless the file says otherwise or
// recomputes; distributed.py of torch 2.13: bucket_cap_mb is that of the first bucket, too.
TEST_CASE("Trainer: what DDP is told") {
  const auto plan_of = [](const std::string& more) {
    return Imported({{"t.json", R"({"output_dir": "o")" + more + "}"}}).plan;
  };
  const Plan plain = plan_of("");
  CHECK(plain.find_unused_parameters);
  CHECK(plain.first_bucket == kMiB);
  CHECK(plain.bucket == 25 * kMiB);
  CHECK(!plan_of(R"(, "gradient_checkpointing": true)").find_unused_parameters);
  CHECK(!plan_of(R"(, "ddp_find_unused_parameters": false)").find_unused_parameters);
  CHECK(plan_of(R"(, "ddp_find_unused_parameters": true, "gradient_checkpointing": true)")
            .find_unused_parameters);
  PlanFile adapted;  // a model that PEFT has wrapped is no PreTrainedModel
  adapted.plan.dialect = Dialect::kDdp;
  adapted.job.lora_rank = 8;
  TrainerSettings recomputes;
  recomputes.gradient_checkpointing = true;
  ApplyTrainer(recomputes, adapted);
  CHECK(adapted.plan.find_unused_parameters);
  const Plan large = plan_of(R"(, "ddp_bucket_cap_mb": 100)");
  CHECK(large.first_bucket == 100 * kMiB);
  CHECK(large.bucket == 100 * kMiB);
  CHECK(ErrorOf({{"t.json", R"({"output_dir": "o", "ddp_bucket_cap_mb": 0})"}})
            .ends_with("t.json: ddp_bucket_cap_mb: got 0, expected an integer in [1, 1048576]"));
}

TEST_CASE("DeepSpeed: a sub-group of 0 elements is one of each parameter") {
  const auto sub_group_of = [](const std::string& size) {
    return Imported({{"ds.json", R"({"train_micro_batch_size_per_gpu": 1, "bf16": {"enabled": true},
        "zero_optimization": {"stage": 3, "sub_group_size": )" +
                                     size + "}}"}})
        .plan.zero.sub_group;
  };
  CHECK(sub_group_of("0") == 1);
  CHECK(sub_group_of("5") == 5);
}

TEST_CASE("Trainer: whose kernels") {
  const auto facts = [](const std::string& more) {
    const Folder folder;
    const RunSettings run =
        Read(folder, {{"t.json", R"({"per_device_train_batch_size": 1)" + more + "}"}});
    return std::pair(FactsOf(run).kernel_set, run.left_out.size());
  };
  CHECK(facts("") == std::pair(std::string("hf-eager"), std::size_t{0}));
  CHECK(facts(R"(, "use_liger_kernel": true)").first == "hf-liger");
  CHECK(facts(R"(, "torch_compile": true)").first == "torch-compile");
  CHECK(facts(R"(, "torch_compile": true, "use_liger_kernel": true)") ==
        std::pair(std::string("hf-liger"), std::size_t{1}));
}

std::string AssumedOf(const Files& files) {
  const Folder folder;
  const RunSettings run = Read(folder, files);
  PlanFile file = Base(2);
  ApplyRun(run, file);
  std::string keys;
  for (const Assumption& assumption : AssumptionsOf(run, file)) {
    keys += assumption.key + "=" + assumption.value + " ";
  }
  return keys;
}

TEST_CASE("what no file says is listed") {
  const char* deepspeed = R"({"bf16": {"enabled": "auto"}, "zero_optimization": {"stage": 1}})";
  CHECK(
      AssumedOf({{"ds.json", deepspeed}}) ==
      "train_micro_batch_size_per_gpu=1 gradient_accumulation_steps=1 gradient_clipping=0.0 "
      "bf16.enabled=true communication_data_type=\"bf16\" optimizer.type=\"AdamW\" "
      "optimizer.params.weight_decay=0.01 optimizer.params.torch_adam=true "
      "zero_optimization.contiguous_gradients=true zero_optimization.reduce_bucket_size=500000000 "
      "zero_optimization.allgather_bucket_size=248879616 ");
  const Folder folder;
  CHECK_FALSE(FactsOf(Read(folder, {{"ds.json", deepspeed}})).has_precision);
  CHECK(
      AssumedOf({{"a.yaml", "distributed_type: MULTI_GPU\nnum_processes: 8\nnum_machines: 2\n"}}) ==
      "mixed_precision=\"no\" ");
  CHECK(AssumedOf({{"t.json", R"({"output_dir": "o", "optim": "sgd"})"}}) ==
        "gradient_checkpointing=false fsdp=false per_device_train_batch_size=8 "
        "gradient_accumulation_steps=1 weight_decay=0.0 max_grad_norm=1.0 bf16=false ");
}

// Plans of every dialect that a framework has, with each option away from its default once.
std::vector<PlanFile> Variants() {
  std::vector<PlanFile> list;
  const auto add = [&](Dialect dialect, const char* wrap, auto change) {
    PlanFile file = Base(2);
    file.plan = {};
    file.plan.dialect = dialect;
    file.plan.shard_size = dialect == Dialect::kDdp ? 1 : 8;
    file.plan.replicate_size = dialect == Dialect::kDdp ? 8 : 1;
    file.plan.micro_batch = 2;
    file.plan.accumulation = 3;
    file.plan.units = Wrap(file.model, ParseWrap(wrap, "test"), {}, dialect, "test");
    change(file);
    const Plan& plan = file.plan;
    file.job.global_batch = 8 * plan.micro_batch * plan.accumulation;
    CheckPlan(file, file.plan, "test");
    list.push_back(file);
  };
  const auto nothing = [](PlanFile&) {};
  const auto recompute = [](PlanFile& file) {
    file.plan.recompute = RecomputeBlocks(file.model, RecomputeKind::kFull, 1, "test");
    file.plan.sync = SyncMode::kLast;
  };
  const auto mesh = [](PlanFile& file) {
    file.plan.shard_size = 4;
    file.plan.replicate_size = 2;
    file.job.optimizer.impl = OptimizerImpl::kFused;
    file.job.clip_gradients = false;
    file.job.precision = {DType::kFp32, DType::kFp16, DType::kFp16};
  };
  for (const Dialect dialect : {Dialect::kFsdp2, Dialect::kFsdp1}) {
    add(dialect, "block", nothing);
    add(dialect, "block", recompute);
    add(dialect, "block", mesh);
    add(dialect, "root", [](PlanFile& file) {
      file.plan.offload.parameters = true;
      if (file.plan.dialect == Dialect::kFsdp1) {
        file.plan.sync = SyncMode::kLast;  // all that it can
      }
    });
  }
  add(Dialect::kFsdp2, "torchtitan", mesh);
  add(Dialect::kFsdp1, "block", [](PlanFile& file) {
    file.plan.backward_prefetch = BackwardPrefetch::kPost;
    file.plan.forward_prefetch = true;
    file.plan.use_orig_params = false;
    file.plan.limit_all_gathers = false;
  });
  add(Dialect::kDdp, "root", nothing);
  for (bool Offload::*part : {&Offload::parameters, &Offload::optimizer}) {
    const auto offload = [&](PlanFile& file) { file.plan.offload.*part = true; };
    add(Dialect::kNative, "block", offload);
    add(Dialect::kZero3, "module", offload);
  }
  add(Dialect::kZero1, "root", nothing);
  add(Dialect::kZero2, "root", [](PlanFile& file) { file.plan.zero.reduce_bucket = 1000000; });
  add(Dialect::kZero3, "module", [](PlanFile& file) {
    file.plan.zero.prefetch_bucket = 12345;
    file.plan.zero.max_reuse_distance = 777;
    file.plan.zero.sub_group = 100000;
    file.plan.shard_size = 4;
    file.plan.replicate_size = 2;
    file.job.optimizer.kind = OptimizerKind::kMomentum;
  });
  return list;
}

// What the files of a target cannot hold: Accelerate's and DeepSpeed's leave some to the script.
void CopyWhatTheScriptSays(std::string_view target, const PlanFile& from, PlanFile& to) {
  if (target == "accelerate" && !IsZero(from.plan.dialect)) {
    to.plan.micro_batch = from.plan.micro_batch;
    to.plan.accumulation = from.plan.accumulation;
    to.plan.sync = from.plan.sync;
    to.job.optimizer = from.job.optimizer;
    to.job.clip_gradients = from.job.clip_gradients;
  }
  if (target == "deepspeed" || IsZero(from.plan.dialect) ||
      (target == "accelerate" && from.plan.dialect == Dialect::kDdp)) {
    to.plan.recompute = from.plan.recompute;
  }
}

TEST_CASE("a plan with Muon is not emitted") {
  PlanFile file;
  CheckEmittable(file, "plan.json");
  file.job.optimizer.matrices = MatrixRule::kMuon;
  CHECK_THROWS_WITH_AS(CheckEmittable(file, "plan.json"),
                       "plan.json: job.optimizer.matrices: got \"muon\", expected none, since no "
                       "target's settings name such an optimizer",
                       InputError);
}

TEST_CASE("emit, then import: the plan as emitted comes back from every target") {
  int compared = 0;
  for (const PlanFile& file : Variants()) {
    for (const std::string_view target : {"accelerate", "trainer", "deepspeed", "torchtitan"}) {
      const auto emitter = std::find_if(Emitters().begin(), Emitters().end(),
                                        [&](const Emitter& e) { return e.name == target; });
      REQUIRE(emitter != Emitters().end());
      const Emission emission = emitter->emit(file, EmitOptions());
      Files files;
      for (const EmittedFile& emitted : emission.files) {
        if (!emitted.name.ends_with(".py")) {
          files.emplace_back(emitted.name, emitted.text);
        }
      }
      CAPTURE(std::string(target) + " of a plan of dialect " +
              std::string(NameOf(file.plan.dialect)) + "\n" + files[0].second);
      PlanFile back = Base(2);
      CopyWhatTheScriptSays(target, emission.as_emitted, back);
      const Folder folder;
      const RunSettings run = Read(folder, files);
      ApplyRun(run, back);
      PlanFile expected = emission.as_emitted;
      expected.job.global_batch = back.job.global_batch = 0;  // the product of what is compared
      CHECK(PlanFileJson(back) == PlanFileJson(expected));
      ++compared;
    }
  }
  CHECK(compared == 4 * 18);
}

TEST_CASE("sizes that nothing can be divided by, or whose products have no room, are refused") {
  const std::string samples = ", expected an integer in [1, 1048576]";
  CHECK(ErrorOf({{"r.toml", "[training]\nlocal_batch_size = 0\nglobal_batch_size = 8\n"}}) ==
        "r.toml: training.local_batch_size: got 0" + samples);
  CHECK(ErrorOf({{"d.json", R"({"train_batch_size": 8, "gradient_accumulation_steps": 0})"}}) ==
        "d.json: gradient_accumulation_steps: got 0, expected an integer in [1, 65535]");
  CHECK(ErrorOf({{"d.json", R"({"train_batch_size": 8, "train_micro_batch_size_per_gpu": 0})"}}) ==
        "d.json: train_micro_batch_size_per_gpu: got 0" + samples);
  CHECK(ErrorOf(
            {{"t.json", R"({"output_dir": "o", "per_device_train_batch_size": 5000000000000})"}}) ==
        "t.json: per_device_train_batch_size: got 5000000000000" + samples);
  CHECK(ErrorOf({{"r.toml",
                  "[training]\nseq_len = 8\n[parallelism]\n"
                  "data_parallel_replicate_degree = 4\n"
                  "data_parallel_shard_degree = 4611686018427388\n"}}) ==
        "r.toml: parallelism: got replicate degree 4, shard degree 4611686018427388, expected a "
        "product of 8 ranks");
}

TEST_CASE("errors name file, key, value, rule and the nearest key") {
  const auto toml = [](const std::string& text) { return ErrorOf({{"r.toml", text}}); };
  CHECK(toml("[training]\nlocal_batchsize = 4\n") ==
        "r.toml: training.local_batchsize: got 4, expected a key of this file to be known; did you "
        "mean \"training.local_batch_size\"?");
  CHECK(toml("[trainin]\nlocal_batch_size = 4\n[parallelism]\n") ==
        "r.toml: trainin.local_batch_size: got 4, expected a key of this file to be known; did you "
        "mean \"training.local_batch_size\"?");
  CHECK(toml("[training]\nlocal_batch_size = \"4\"\n") ==
        "r.toml: training.local_batch_size: got \"4\", expected an integer");
  CHECK(toml("[parallelism]\npipeline_parallel_degree = 2\n"
             "pipeline_parallel_last_stage_less_layers = 2\n") ==
        "r.toml: parallelism.pipeline_parallel_last_stage_less_layers: got 2, expected that of the "
        "first stage (1), 0 or 1 for both");
  CHECK(toml("[training\n").starts_with("r.toml: line 1: got "));
  CHECK(
      toml("[parallelism]\ndata_parallel_shard_degree = 3\n") ==
      "r.toml: parallelism: got replicate degree 1, shard degree 3, expected a product of 8 ranks");
  const auto yaml = [](const std::string& text) { return ErrorOf({{"a.yaml", text}}); };
  CHECK(yaml("num_machines: 2\nnum_processes: 6\n") ==
        "a.yaml: num_processes: got 6, expected the 8 GPUs of the cluster");
  CHECK(yaml("num_machines: 2\nparallelism_config:\n  parallelism_config_dp_shard_size: 3\n"
             "  parallelism_config_dp_replicate_size: 2\n") ==
        "a.yaml: parallelism_config: product of the sizes: got 6, expected the 8 GPUs of the "
        "cluster");
  CHECK(yaml("distributed_type: FSDP\nfsdp_config: {fsdp_version: 3}\n") ==
        "a.yaml: fsdp_config.fsdp_version: got \"3\", expected 1 or 2");
  CHECK(yaml("distributed_type: TPU\n") ==
        "a.yaml: distributed_type: got \"TPU\", expected FSDP, MULTI_GPU, DEEPSPEED or NO, since "
        "TPU cannot be predicted");
  CHECK(yaml("a: [1, 2\n").starts_with("a.yaml: line "));
  CHECK(yaml("a: 1\na: 2\n") == "a.yaml: a: got the key twice, expected each key once");
  const auto json = [](const std::string& text) { return ErrorOf({{"d.json", text}}); };
  CHECK(json(R"({"train_batch_size": 24, "train_micro_batch_size_per_gpu": 2})") ==
        "d.json: train_batch_size: got 24, expected 8 ranks x train_micro_batch_size_per_gpu 2 x "
        "gradient_accumulation_steps 1");
  CHECK(json(R"({"zero_optimization": {"stage": 4}})") ==
        "d.json: zero_optimization.stage: got 4, expected 0, 1, 2 or 3");
  CHECK(json(R"({"output_dir": "o", "bf16": true, "fp16": true})") ==
        "d.json: fp16: got true, expected false beside bf16");
  CHECK(json(R"({"hello": 1})").starts_with("d.json: got no key that tells the framework"));
  CHECK(ErrorOf({{"a.json", R"({"output_dir": "o", "gradient_accumulation_steps": 2})"},
                 {"d.json", R"({"zero_optimization": {}, "gradient_accumulation_steps": 4})"}}) ==
        "d.json: gradient_accumulation_steps: got 4, expected 2, as a.json says");
  CHECK(ErrorOf({{"a.json", R"({"output_dir": "o", "deepspeed": "none.json"})"}}) ==
        "a.json: got a DeepSpeed file \"none.json\" that is not there, expected that file as a "
        "further "
        "argument");
  CHECK(ErrorOf({{"r.toml", kTorchtitan}, {"d.json", R"({"zero_optimization": {}})"}})
            .starts_with("d.json: got settings of a second framework"));
}

TEST_CASE("documents: bombs and depth are refused") {
  std::string bomb = "a0: &a0 [x, x, x, x, x, x, x, x, x, x]\n";
  for (int i = 1; i < 10; ++i) {
    const std::string last = "*a" + std::to_string(i - 1);
    bomb += "a" + std::to_string(i) + ": &a" + std::to_string(i) + " [";
    for (int k = 0; k < 10; ++k) {
      bomb += last + (k < 9 ? ", " : "]\n");
    }
  }
  CHECK_THROWS_AS((void)ParseDocument(bomb, "b.yaml"), InputError);
  CHECK_THROWS_AS((void)ParseDocument(std::string(5000, '['), "b.yaml"), InputError);
  CHECK_THROWS_AS((void)ParseDocument("a = " + std::string(5000, '['), "b.toml"), InputError);
  CHECK_THROWS_AS((void)ParseDocument("{\"a\":" + std::string(5000, '['), "b.json"), InputError);
  CHECK_THROWS_AS((void)ParseDocument(std::string(2000000, ' '), "b.yaml"), InputError);
  CHECK_THROWS_AS((void)ParseDocument("- 1\n- 2\n", "b.yaml"), InputError);
  CHECK(ParseDocument("a = nan\n", "b.toml").At("a").IsString());  // fits no number
  CHECK_THROWS_AS((void)ParseDocument("", "b.yaml"), InputError);
  // The file, its key and 49 lists are 50 levels; one list more is refused.
  const auto lists = [](std::size_t n) { return std::string(n, '[') + std::string(n, ']'); };
  for (const auto& [name, between] : {std::pair("b.toml", "a = "), {"b.yaml", "a: "}}) {
    CHECK(ParseDocument(between + lists(50), name).At("a").size() == 1);
    CHECK_THROWS_AS((void)ParseDocument(between + lists(51), name), InputError);
  }
  // Dots of many keys are not those of one, whatever stands behind the values.
  std::string keys;
  for (int i = 0; i < 100; ++i) {
    keys += "a" + std::to_string(i) + ".b = 1  # one\n";
  }
  CHECK(ParseDocument(keys, "b.toml").At("a99").At("b").AsInt() == 1);
  // PyYAML's reading of scalars.
  const JsonValue json =
      ParseDocument("a: no\nb: 'no'\nc: 5e8\nd: 010\ne: ~\nf: 1.5e+3\ng: 12\n", "p.yaml");
  CHECK(json.At("a").AsBool() == false);
  CHECK(json.At("b").AsString() == "no");
  CHECK(json.At("c").AsString() == "5e8");
  CHECK(json.At("d").IsString());
  CHECK_FALSE(json.Find("e"));
  CHECK(json.At("f").AsDouble() == 1500.0);
  CHECK(json.At("g").AsInt() == 12);
  const JsonValue numbers = ParseDocument(
      "a: 1_000_000.0\nb: 1.0e+999\nc: +.\nd: .e+5\ne: +1_0.5\nf: .\ng: 1.0e-320\n", "p.yaml");
  CHECK(numbers.At("a").AsDouble() == 1e6);
  CHECK(numbers.At("e").AsDouble() == 10.5);
  CHECK(numbers.At("g").AsDouble() == 1.0e-320);
  for (const char* text : {"b", "c", "d", "f"}) {  // no double stands for them
    CHECK(numbers.At(text).IsString());
  }
  const std::string deep = "train.py --x " + std::string(400000, '[');
  CHECK(ParseDocument(deep, "run.txt").At("x").IsString());
}

TEST_CASE("random damage of every format never does worse than an error") {
  const std::vector<std::pair<std::string, std::string>> samples = {
      {"r.toml", kTorchtitan},
      {"a.yaml", kAccelerate},
      {"d.json", kAutoDeepSpeed},
      {"t.json", R"({"output_dir": "o", "fsdp": "full_shard auto_wrap", "weight_decay": 0.1,
                     "fsdp_config": {"version": 1, "transformer_layer_cls_to_wrap": ["GPT2Block"]}})"},
      {"f.sh",
       "torchrun train.py --output_dir o --bf16 --fsdp \"full_shard auto_wrap\" --optim sgd"}};
  std::mt19937 random(17);
  const PlanFile base = Base(2);
  int read = 0;
  for (int i = 0; i < 1200; ++i) {
    auto [name, text] = samples[static_cast<std::size_t>(i) % samples.size()];
    for (int flips = 0; flips < 1 + i % 4; ++flips) {
      const std::size_t at = random() % text.size();
      switch (random() % 3) {
        case 0:
          text[at] = static_cast<char>(random());
          break;
        case 1:
          text.erase(at, 1 + random() % 5);
          break;
        default:
          text.insert(at, text.substr(random() % text.size(), random() % 20));
      }
      if (text.empty()) {
        text = " ";
      }
    }
    const Folder folder;
    try {
      PlanFile file = base;
      const RunSettings run = Read(folder, {{name, text}});
      (void)FactsOf(run);
      ApplyRun(run, file);
      (void)AssumptionsOf(run, file);
      CheckPlan(file, file.plan, "test");
      ++read;
    } catch (const InputError&) {
    }
  }
  CHECK(read > 20);
  CHECK(read < 1100);
}

}  // namespace
}  // namespace shardwright
