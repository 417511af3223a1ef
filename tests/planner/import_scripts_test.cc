// Files of scripts around the Trainer, as their repositories have them, with GPT-2 in the place of
// the model.

#include <algorithm>
#include <string>
#include <utility>
#include <vector>

#include <doctest/doctest.h>

#include "core/error.h"
#include "core/ranges.h"
#include "models/trainable.h"
#include "planner/emitters/emitters.h"
#include "planner/importers/read_adapters.h"
#include "planner/importers/run_settings.h"
#include "tests/planner/run_files.h"
#include "topologies/mesh.h"

namespace shardwright {
namespace {

using Strings = std::vector<std::string>;

using testing::Base;
using testing::ErrorOf;
using testing::Files;
using testing::Folder;
using testing::Imported;
using testing::Read;

// As `accelerate config` writes it, and as the alignment handbook ships it.
constexpr const char* kAccelerate = R"(compute_environment: LOCAL_MACHINE
distributed_type: FSDP
fsdp_config:
  fsdp_auto_wrap_policy: TRANSFORMER_BASED_WRAP
  fsdp_backward_prefetch: BACKWARD_PRE
  fsdp_forward_prefetch: true
  fsdp_offload_params: false
  fsdp_sharding_strategy: FULL_SHARD
  fsdp_use_orig_params: true
mixed_precision: bf16
num_machines: 2
num_processes: 8
)";

// The alignment handbook's and TRL's.
constexpr const char* kRecipe = R"(model_name_or_path: openai-community/gpt2
model_revision: main
torch_dtype: bfloat16
attn_implementation: flash_attention_2
chat_template: "{% for message in messages %}\n{{ message['content'] }}\n{% endfor %}"
dataset_mixture:
  datasets:
    - id: HuggingFaceH4/ultrachat_200k
      columns:
        - messages
bf16: true
gradient_accumulation_steps: 2
gradient_checkpointing: true
gradient_checkpointing_kwargs:
  use_reentrant: False
learning_rate: 2.0e-05
max_seq_length: 512
per_device_train_batch_size: 16
report_to:
- wandb
my_own_switch: 3
)";

std::string Assumed(const RunSettings& run, const PlanFile& file) {
  std::string text;
  for (const Assumption& assumption : AssumptionsOf(run, file)) {
    text += assumption.key + "=" + assumption.value + " ";
  }
  return text;
}

TEST_CASE("Scripts: a recipe of the alignment handbook beside Accelerate's file") {
  const Files files = {{"fsdp.yaml", kAccelerate}, {"sft.yaml", kRecipe}};
  const PlanFile file = Imported(files);
  CHECK(file.plan.dialect == Dialect::kFsdp1);
  CHECK(file.plan.shard_size == 8);
  CHECK(file.plan.micro_batch == 16);
  CHECK(file.plan.accumulation == 2);
  CHECK(file.plan.recompute.size() == 12);
  // Accelerate makes fp32 of what the script loads as bf16.
  CHECK(file.job.precision.master == DType::kFp32);
  CHECK(file.job.precision.param == DType::kBf16);
  const Folder folder;
  const RunSettings run = Read(folder, files);
  const RunFacts facts = FactsOf(run);
  CHECK(facts.sequence_length == 512);
  CHECK(facts.model == "openai-community/gpt2");
  CHECK(facts.attention.empty());
  REQUIRE(run.unknown.size() == 1);
  CHECK(run.unknown[0].ends_with("sft.yaml: my_own_switch"));
}

TEST_CASE("Scripts: TRL's defaults are not the Trainer's") {
  const std::string recipe =
      "model_name_or_path: gpt2\nmax_length: 256\nper_device_train_batch_size: 1\n";
  const Folder folder;
  const RunSettings run = Read(folder, {{"sft.yaml", recipe}});
  PlanFile file = Base(2);
  ApplyRun(run, file);
  CHECK(file.plan.recompute.size() == 12);
  CHECK(file.job.precision.param == DType::kBf16);
  const std::string assumed = Assumed(run, file);
  CHECK(assumed.find(
            "loss_type=\"chunked_nll\" (TRL since 1.7) gradient_checkpointing=true bf16=true ") ==
        0);
  // Transformers' own run_clm.py has no such words.
  const PlanFile plain =
      Imported({{"clm.yaml",
                 "model_name_or_path: gpt2\nblock_size: 256\nper_device_train_batch_size: 1\n"}});
  CHECK(plain.plan.recompute.empty());
  CHECK(plain.job.precision.param == DType::kFp32);
}

TEST_CASE("Scripts: weights that are loaded as bf16 stay so without FSDP and DeepSpeed") {
  const std::string recipe = "per_device_train_batch_size: 1\nbf16: true\ntorch_dtype: bfloat16\n";
  const PlanFile file = Imported({{"ddp.yaml", recipe}});
  CHECK(file.plan.dialect == Dialect::kDdp);
  CHECK(file.job.precision.master == DType::kBf16);
  CHECK(file.job.precision.reduce == DType::kBf16);
}

TEST_CASE("Scripts: LLaMA-Factory recomputes by default") {
  const std::string common =
      "model_name_or_path: gpt2\nstage: sft\nfinetuning_type: full\ntemplate: default\n"
      "per_device_train_batch_size: 8\nbf16: true\n";
  const PlanFile told = Imported({{"fsdp.yaml", kAccelerate},
                                  {"sft.yaml", common + "disable_gradient_checkpointing: true\n"}});
  CHECK(told.plan.recompute.empty());
  const Folder folder;
  const RunSettings run = Read(folder, {{"fsdp.yaml", kAccelerate}, {"sft.yaml", common}});
  PlanFile file = Base(2);
  ApplyRun(run, file);
  CHECK(file.plan.recompute.size() == 12);
  CHECK(FactsOf(run).sequence_length == 2048);
  CHECK(Assumed(run, file).find("gradient_checkpointing=true cutoff_len=2048 ") !=
        std::string::npos);
  const RunSettings liger = Read(folder, {{"sft.yaml", common + "enable_liger_kernel: true\n"}});
  CHECK(FactsOf(liger).kernel_set == "hf-liger");
}

constexpr const char* kAxolotl = R"(base_model: openai-community/gpt2
model_type: GPT2LMHeadModel
load_in_8bit: false
datasets:
  - path: mhenrichsen/alpaca_2k_test
    type: alpaca
sequence_len: 1024
sample_packing: true
adapter:
gradient_accumulation_steps: 4
micro_batch_size: 3
optimizer: adamw_torch_fused
bf16: auto
fp16:
gradient_checkpointing: true
weight_decay: 0.1
fsdp:
  - shard_grad_op
  - auto_wrap
fsdp_config:
  fsdp_limit_all_gathers: true
  fsdp_offload_params: true
  fsdp_transformer_layer_cls_to_wrap: GPT2Block
special_tokens:
  bos_token: "<s>"
)";

TEST_CASE("Scripts: axolotl's words are the Trainer's settings") {
  const Folder folder;
  const RunSettings run = Read(folder, {{"lora.yml", kAxolotl}});
  PlanFile file = Base(2);
  ApplyRun(run, file);
  CHECK(file.plan.dialect == Dialect::kFsdp1);
  CHECK(file.plan.micro_batch == 3);
  CHECK(file.plan.accumulation == 4);
  CHECK(file.plan.offload.parameters);
  CHECK(file.plan.units[1].reshard.kind == Reshard::Kind::kNever);
  CHECK(file.plan.recompute.size() == 12);
  CHECK(file.job.precision.param == DType::kBf16);
  CHECK(file.job.optimizer.impl == OptimizerImpl::kFused);
  CHECK(file.job.optimizer.weight_decay);
  CHECK(FactsOf(run).model == "openai-community/gpt2");
  CHECK(FactsOf(run).sequence_length == 1024);
  CHECK(run.unknown.empty());
  const PlanFile newer = Imported({{"fft.yml",
                                    "base_model: gpt2\nfsdp_version: 2\nbf16: true\n"
                                    "fsdp_config:\n  reshard_after_forward: false\n"
                                    "  auto_wrap_policy: TRANSFORMER_BASED_WRAP\n"}});
  CHECK(newer.plan.dialect == Dialect::kFsdp2);
  CHECK(newer.plan.micro_batch == 1);
  CHECK(newer.plan.units[1].reshard.kind == Reshard::Kind::kNever);
}

TEST_CASE("Scripts: a command line of torchrun") {
  const std::string script = R"(#!/bin/bash
export CUDA_VISIBLE_DEVICES=2,3
# --load_in_4bit True
torchrun --nproc_per_node=4 --nnodes 2 --master_port=37462 train.py \
    --model_name_or_path gpt2 --bf16 True \
    --per_device_train_batch_size 2 --gradient_accumulation_steps 32 \
    --evaluation_strategy "no" --model_max_length 640 \
    --fsdp "full_shard auto_wrap" --fsdp_transformer_layer_cls_to_wrap 'GPT2Block'
)";
  const Folder folder;
  const RunSettings run = Read(folder, {{"train.sh", script}});
  const RunFacts facts = FactsOf(run);
  CHECK(facts.nodes == 2);
  CHECK(facts.gpus_per_node == 4);
  CHECK(facts.sequence_length == 640);
  PlanFile file = Base(2);
  ApplyRun(run, file);
  CHECK(file.plan.dialect == Dialect::kFsdp1);
  CHECK(file.plan.micro_batch == 2);
  CHECK(file.plan.accumulation == 32);
  CHECK(file.job.precision.param == DType::kBf16);
}

TEST_CASE("Scripts: the file that accelerate launch is told to read") {
  const std::string line =
      "accelerate launch --config_file elsewhere/fsdp.yaml train.py --per_device_train_batch_size "
      "2";
  CHECK(ErrorOf({{"train.sh", line}}) ==
        "train.sh: got an Accelerate file \"elsewhere/fsdp.yaml\" that is not there, expected that "
        "file as a further argument");
  const Folder folder;
  (void)folder.Write("fsdp.yaml", kAccelerate);
  const RunSettings run = Read(folder, {{"train.sh", line}});
  CHECK(run.framework == "Accelerate + Trainer");
  CHECK(FactsOf(run).nodes == 2);
  // What the launcher is told counts more than its file.
  const RunSettings told =
      Read(folder, {{"train.sh", line + " --num_processes 12 --num_machines 3"}});
  CHECK(FactsOf(told).nodes == 3);
  CHECK(FactsOf(told).gpus_per_node == 4);
}

TEST_CASE("Scripts: flags of accelerate launch that stand for its file are not passed over") {
  for (const char* flag : {"--mixed_precision bf16", "--use_fsdp", "--zero_stage 3",
                           "--fsdp_sharding_strategy FULL_SHARD"}) {
    CAPTURE(std::string(flag));
    const std::string error =
        ErrorOf({{"train.sh", "accelerate launch " + std::string(flag) +
                                  " train.py --per_device_train_batch_size 2"}});
    CHECK((error.find("expected a known key; leave this one out") != std::string::npos ||
           error.ends_with("since precision by a flag of accelerate launch cannot be predicted")));
  }
}

TEST_CASE("Scripts: recomputation that both would do is refused as the Trainer refuses it") {
  std::string accelerate = kAccelerate;
  accelerate.insert(accelerate.find("  fsdp_offload"), "  fsdp_activation_checkpointing: true\n");
  CHECK(ErrorOf({{"fsdp.yaml", accelerate}, {"sft.yaml", kRecipe}}) ==
        "sft.yaml: gradient_checkpointing: got true, expected false beside "
        "fsdp_activation_checkpointing, as the Trainer demands");
  // LLaMA-Factory does it behind the Trainer's back, to the same layers.
  const PlanFile file = Imported({{"fsdp.yaml", accelerate},
                                  {"sft.yaml",
                                   "model_name_or_path: gpt2\nfinetuning_type: full\n"
                                   "per_device_train_batch_size: 1\nbf16: true\n"}});
  CHECK(file.plan.recompute.size() == 12);
}

TEST_CASE("Scripts: axolotl's older words for precision and accumulation") {
  const PlanFile file = Imported(
      {{"a.yml", "base_model: gpt2\nbfloat16: true\nbatch_size: 12\nmicro_batch_size: 4\n"}});
  CHECK(file.job.precision.param == DType::kBf16);
  CHECK(file.plan.micro_batch == 4);
  CHECK(file.plan.accumulation == 3);
}

// What would be planned as something else than it is.
TEST_CASE("Scripts: what cannot be predicted is refused") {
  const auto error = [](const std::string& line) {
    return ErrorOf({{"a.yaml", "per_device_train_batch_size: 1\n" + line + "\n"}});
  };
  const std::string no_adapter =
      "expected false, since adapters of this script are not read: plan --lora-rank N makes such a "
      "plan";
  for (const char* key : {"use_peft", "lora_enable", "use_lora"}) {
    CHECK(error(std::string(key) + ": true") ==
          "a.yaml: " + std::string(key) + ": got true, " + no_adapter);
  }
  CHECK(error("use_peft: false") == "no error");
  CHECK(error("load_in_4bit: true") ==
        "a.yaml: load_in_4bit: got true, expected no such key, since quantized weights without "
        "adapters cannot be predicted");
  CHECK(error("parallelism_config:\n  tp_size: 2")
            .starts_with("a.yaml: parallelism_config.tp_size: got 2"));
  CHECK(error("finetuning_type: oft") ==
        "a.yaml: finetuning_type: got \"oft\", expected full, lora or freeze, since oft training "
        "cannot be predicted");
  CHECK(error("finetuning_type: full\nstage: rm") ==
        "a.yaml: stage: got \"rm\", expected pt, sft, dpo or kto, since rm training cannot be "
        "predicted");
  CHECK(error("beta: 0.1\nloss_type: bradley_terry") ==
        "a.yaml: loss_type: got \"bradley_terry\", expected a loss of pairs, since bradley_terry "
        "training cannot be predicted");
  for (const char* optim : {"apollo_adamw", "galore_adamw", "lomo", "muon"}) {
    const std::string said = error("optim: " + std::string(optim));
    CAPTURE(said);
    CHECK(said.starts_with("a.yaml: optim: got \"" + std::string(optim) +
                           "\", expected one of adamw_torch, adamw_torch_fused, "));
    CHECK(said.ends_with("since the optimizer " + std::string(optim) + " cannot be predicted"));
  }
  CHECK(error("fsdp_config: fsdp.json") ==
        "a.yaml: got an fsdp_config file \"fsdp.json\" that is not there, expected that file as a "
        "further argument");
  CHECK(error("deepspeed:\n  zero_optimization:\n    stage: 3")
            .starts_with("a.yaml: deepspeed.zero_optimization.stage: got 3"));
  // One letter off is no key of somebody's own.
  CHECK(error("gradient_checkpointin: true") ==
        "a.yaml: gradient_checkpointin: got true, expected a key of this file to be known; did you "
        "mean \"gradient_checkpointing\"?");
  CHECK(
      ErrorOf({{"a.yml", "base_model: gpt2\nadapter: llama-adapter\n"}}) ==
      "a.yml: adapter: got \"llama-adapter\", expected lora or qlora, since llama-adapter training "
      "cannot be predicted");
  CHECK(
      ErrorOf({{"a.yml", "base_model: gpt2\nbf16: full\ndeepspeed: d.json\n"}}) ==
      "a.yml: bf16: got \"full\", expected true, false or auto, since weights in bf16 alone below "
      "adapters or under DeepSpeed cannot be predicted");
  CHECK(ErrorOf({{"a.yml", "base_model: gpt2\nfloat16: true\n"}}) ==
        "a.yml: float16: got true, expected false, since weights in 16 bits alone cannot be "
        "predicted");
  CHECK(ErrorOf({{"a.yml", "base_model: gpt2\noptimizer: muon\n"}})
            .starts_with("a.yml: optimizer: got \"muon\", expected one of adamw_torch, "));
}

// PEFT's settings in the words of three scripts.
TEST_CASE("Scripts: adapters and the base below them") {
  const Folder folder;
  const auto adapters = [&](const std::string& text) {
    return FactsOf(Read(folder, {{"a.yml", text}})).adapters;
  };
  const std::string axolotl = "base_model: gpt2\nbf16: true\nlora_r: 16\nlora_alpha: 8\n";
  const Adapters plain = adapters(axolotl + "adapter: lora\nlora_target_linear: true\n");
  CHECK(plain.rank == 16);
  CHECK(plain.alpha == 8.0);
  CHECK(plain.dropout == 0.0);
  CHECK(plain.targets == Strings{"all-linear"});
  CHECK(plain.base == FrozenFormat::kParam);
  const Adapters small = adapters(axolotl +
                                  "adapter: qlora\nload_in_4bit: true\nlora_dropout: 0.05\n"
                                  "peft_use_rslora: true\nlora_target_modules: [q_proj, "
                                  "self_attn.k_proj]\n");
  CHECK(small.alpha == 32.0);  // 8 / sqrt(16) = 32 / 16
  CHECK(small.dropout == 0.05);
  CHECK(small.targets == Strings{"q_proj", "*.self_attn.k_proj"});
  CHECK(small.base == FrozenFormat::kNf4Double);
  CHECK(adapters(axolotl + "adapter: lora\nload_in_8bit: true\n").base == FrozenFormat::kInt8);
  CHECK(adapters(axolotl + "adapter:\nlora_target_linear: true\n") == Adapters());
  // The text part of a model with a vision tower stands alone here.
  CHECK(adapters(axolotl +
                 "adapter: lora\nlora_target_modules: 'model.language_model.layers.[\\d]+.mlp.(up|"
                 "down)_proj'\n")
            .targets ==
        Strings{"model.language_model.layers.*.mlp.up_proj", "model.layers.*.mlp.up_proj",
                "model.language_model.layers.*.mlp.down_proj", "model.layers.*.mlp.down_proj"});

  const std::string factory =
      "model_name_or_path: gpt2\ntemplate: default\nper_device_train_batch_size: 1\n";
  const Adapters by_default = adapters(factory);
  CHECK(by_default.rank == 8);
  CHECK(by_default.alpha == 16.0);
  CHECK(by_default.targets == Strings{"all-linear"});
  const Adapters told = adapters(factory +
                                 "finetuning_type: lora\nlora_target: q_proj, v_proj\n"
                                 "quantization_bit: 4\ndouble_quantization: false\n");
  CHECK(told.targets == Strings{"q_proj", "v_proj"});
  CHECK(told.base == FrozenFormat::kNf4);

  const std::string trl = "model_name_or_path: gpt2\nmax_length: 512\nuse_peft: true\n";
  const Adapters handbook = adapters(trl + "torch_dtype: bfloat16\nload_in_4bit: true\n");
  CHECK(handbook.rank == 16);
  CHECK(handbook.alpha == 32.0);
  CHECK(handbook.dropout == 0.05);
  CHECK(handbook.targets.empty());
  CHECK(handbook.base == FrozenFormat::kNf4);
  CHECK(adapters(trl).base == FrozenFormat::kMaster);  // loaded in fp32
}

// A checkpoint says by its name how its weights are stored, whatever the other keys say.
TEST_CASE("Scripts: names of checkpoints in few bits") {
  const Folder folder;
  const auto text = [](const std::string& name) {
    return "base_model: " + name + "\nbf16: true\nlora_r: 8\nlora_alpha: 16\nadapter: lora\n";
  };
  const Adapters unsloth =
      FactsOf(Read(folder, {{"a.yml", text("unsloth/gpt2-bnb-4bit")}})).adapters;
  CHECK(unsloth.base == FrozenFormat::kNf4Double);
  for (const char* name : {"a/gpt2-GPTQ", "a/gpt2-AWQ", "a/gpt2-AQLM-2Bit", "a/gpt2-GGUF"}) {
    const std::string said = ErrorOf({{"a.yml", text(name)}});
    CAPTURE(said);
    CHECK(said.starts_with("a.yml: base_model: got \"" + std::string(name) + "\""));
    CHECK(said.ends_with("since quantized weights of this kind cannot be predicted"));
  }
  CHECK(ErrorOf({{"a.yml", "base_model: a/gpt2-bnb-4bit\nbf16: true\n"}})
            .ends_with("since quantized weights without adapters cannot be predicted"));
  // gpt-oss comes in 4 bits and is made whole.
  const std::string oss = "base_model: gpt2\nmodel_quantization_config: Mxfp4Config\n";
  CHECK(FactsOf(Read(folder, {{"a.yml", oss + "model_quantization_config_kwargs:\n"
                                              "  dequantize: true\n"}}))
            .model == "gpt2");
  CHECK(ErrorOf({{"a.yml", oss}})
            .ends_with("since quantized weights of this kind cannot be predicted"));
}

// LLaMA-Factory's own trainer: units by its FSDP2 plugin, nothing upcast, every pass reduced.
TEST_CASE("Scripts: version 1 of LLaMA-Factory") {
  const std::string run = "model: gpt2\nmodel_class: llm\ncutoff_len: 128\n";
  const Folder folder;
  const auto applied = [&](const std::string& more) {
    PlanFile file = Base(2);
    ApplyRun(Read(folder, {{"v1.yaml", run + more}}), file);
    return file;
  };
  const PlanFile file = applied(
      "dist_config: {name: fsdp2}\nmicro_batch_size: 2\n"
      "global_batch_size: " +
      std::to_string(3 * 2 * Base(2).cluster.RankCount()));
  CHECK(file.plan.dialect == Dialect::kFsdp2);
  CHECK(file.plan.micro_batch == 2);
  CHECK(file.plan.accumulation == 3);
  CHECK(file.plan.sync == SyncMode::kEvery);
  CHECK(file.job.precision == Precision{DType::kBf16, DType::kBf16, DType::kFp32});
  // GPT-2's head is its embedding, which stays in the root.
  CHECK(file.plan.units.size() == 13);
  for (const UnitPlan& unit : file.plan.units) {
    CHECK(unit.reshard.kind == Reshard::Kind::kAlways);
  }
  CHECK(file.plan.recompute.size() == 12);
  CHECK(applied("dist_config: {name: fsdp2}\nenable_activation_checkpointing: false\n")
            .plan.recompute.empty());
  CHECK(applied("").plan.dialect == Dialect::kDdp);
  CHECK(Read(folder, {{"v1.yaml", run}}).target.empty());  // no emitter writes such a file
  const std::string lora =
      "dist_config: {name: fsdp2}\npeft_config: {name: lora, r: 4, target_modules: all}\n";
  const Adapters adapters = FactsOf(Read(folder, {{"v1.yaml", run + lora}})).adapters;
  CHECK(adapters.rank == 4);
  CHECK(adapters.alpha == 16.0);
  CHECK(adapters.dropout == 0.05);
  CHECK(adapters.base == FrozenFormat::kParam);
  const std::string quant = "quant_config: {name: bnb, quantization_bit: 4}\n";
  CHECK(applied(lora + quant).job.frozen_format == FrozenFormat::kNf4Double);
  for (const auto& [more, end] : std::initializer_list<std::pair<std::string, const char*>>{
           {"optim_config: {name: muon}", "the optimizer muon cannot be predicted"},
           {"peft_config: {name: oft}", "expected lora or freeze, since oft cannot be predicted"},
           {"dist_config: {name: fsdpturbo}",
            "expected fsdp2 or deepspeed, since fsdpturbo cannot be predicted"},
           {"peft_config: {name: freeze}\n" + quant,
            "expected adapters above it, since bnb cannot be predicted"},
           {quant, "expected a peft_config beside it, since bnb cannot be predicted"},
           {"cp_size: 2\ncp_mode: ring",
            "since context parallelism by another method cannot be predicted"},
           {"global_batch_size: 3\nmicro_batch_size: 2", "which one pass of all ranks has"}}) {
    CAPTURE(more);
    CHECK(ErrorOf({{"v1.yaml", run + more + "\n"}}).ends_with(end));
  }
}

TEST_CASE("Scripts: the plan of a run with adapters") {
  const std::string run =
      "base_model: gpt2\nbf16: true\nadapter: qlora\nload_in_4bit: true\nlora_r: 8\n"
      "lora_alpha: 16\nlora_target_modules: [c_attn]\noptimizer: paged_adamw_8bit\n";
  const Folder folder;
  const auto applied = [&](const std::string& text) {
    PlanFile file = Base(2);  // without the adapters, which import-run makes of the facts
    ApplyRun(Read(folder, {{"a.yml", text}}), file);
    return file;
  };
  const PlanFile file = applied(run);
  CHECK(file.plan.dialect == Dialect::kDdp);
  CHECK(file.job.frozen_format == FrozenFormat::kNf4Double);
  CHECK(file.job.optimizer.states == StateFormat::kBnb8Paged);
  CHECK(file.job.precision == Precision{DType::kFp32, DType::kBf16, DType::kFp32});
  const std::string fsdp = "fsdp_config:\n  auto_wrap_policy: TRANSFORMER_BASED_WRAP\n";
  CHECK(applied(run + "fsdp_version: 2\n" + fsdp).job.frozen_format == FrozenFormat::kNf4Double);
  CHECK(applied(run + "fsdp_version: 1\n" + fsdp).job.frozen_format == FrozenFormat::kNf4Double);
  // The script names both formats; DeepSpeed's file has no script.
  for (const Emitter& emitter : Emitters()) {
    const std::string name(emitter.name);
    CAPTURE(name);
    if (name == "accelerate" || name == "trainer") {
      const std::vector<std::string> duties = Emit(emitter, file, {}).by_hand;
      const std::string duty =
          "load the frozen weights in the format nf4_double (transformers: BitsAndBytesConfig)";
      CHECK(std::find(duties.begin(), duties.end(), duty) != duties.end());
      const bool says_states = std::any_of(duties.begin(), duties.end(), [](const auto& text) {
        return text.find("optimizer paged_adamw_8bit") != std::string::npos;
      });
      CHECK(says_states == (name == "accelerate"));
    } else {
      CHECK_THROWS_AS((void)Emit(emitter, file, {}), InputError);
    }
  }
  // Accelerate's FSDP2 upcasts what learns alone (fsdp2_prepare_model, 1.15).
  std::string whole = run + "fsdp_version: 2\n" + fsdp;
  whole.replace(whole.find("load_in_4bit: true"), 18, "load_in_4bit: false");
  CHECK(applied(whole).job.frozen_format == FrozenFormat::kParam);
}

// Whole modules beside adapters, DoRA, experts in few bits, by each reader's names.
TEST_CASE("Scripts: what trains beside low ranks") {
  const Folder folder;
  const auto adapters = [&](const std::string& text) {
    return FactsOf(Read(folder, {{"a.yml", text}})).adapters;
  };
  const std::string axolotl =
      "base_model: gpt2\nbf16: true\nadapter: qlora\nload_in_4bit: true\nlora_r: 8\n"
      "lora_alpha: 16\n";
  const std::string factory = "model_name_or_path: gpt2\ntemplate: default\nlearning_rate: 1\n";
  const std::string trl = "model_name_or_path: gpt2\nmax_length: 512\nuse_peft: true\n";
  const std::string v1 = "model: gpt2\nmodel_class: llm\npeft_config:\n  name: lora\n";
  for (const std::string& text :
       {axolotl + "lora_modules_to_save: [wte, lm_head]\npeft_use_dora: true\n",
        factory + "additional_target: wte,lm_head\nuse_dora: true\n",
        trl + "lora_modules_to_save: [wte, lm_head]\nuse_dora: true\n",
        v1 + "  modules_to_save: [wte, lm_head]\n  use_dora: true\n"}) {
    CAPTURE(text);
    CHECK(adapters(text).saved == Strings{"wte", "lm_head"});
    CHECK(adapters(text).has_magnitudes);
  }
  CHECK_FALSE(adapters(axolotl).has_magnitudes);
  CHECK(adapters(axolotl + "quantize_moe_experts: true\n").quantizes_experts);
  CHECK(
      ErrorOf({{"a.yml", axolotl + "quantize_moe_experts: true\nlora_target_linear: true\n"}}) ==
      "a.yml: lora_target_linear: got true, expected false beside quantize_moe_experts, as axolotl "
      "demands");
  PlanFile file = Base(2);
  const std::string saved = axolotl + "lora_modules_to_save: [lm_head]\n";
  ApplyRun(Read(folder, {{"a.yml", saved}}), file);  // PEFT makes fp32 of the adapters alone
  CHECK(file.job.fp32_masters == Strings{"*.lora_*"});
  CHECK(file.job.precision.master == DType::kBf16);
  std::string halves = saved;
  halves.replace(halves.find("bf16: true"), 4, "fp16");
  CHECK(
      ErrorOf({{"a.yml", halves}})
          .ends_with("since whole modules in 16 bits beside adapters in fp32 cannot be predicted"));
  const std::string fsdp =
      "peft_use_dora: true\nfsdp_version: 1\nfsdp_config:\n  auto_wrap_policy: "
      "TRANSFORMER_BASED_WRAP\n";
  CHECK(ErrorOf({{"a.yml", axolotl + fsdp}})
            .ends_with("since DoRA under FSDP1 or ZeRO-3 cannot be predicted"));
}

// 8 GPUs, 2 of which share out each sample: FSDP has 8 ranks, the batch 4 samples. Shards of
// axolotl and Accelerate are counted without them.
TEST_CASE("Scripts: tokens that ranks cut") {
  const Folder folder;
  const auto applied = [&](const std::string& name, const std::string& text) {
    PlanFile file = Base(2);
    file.model = LoadModelForJob("llama-3.2-1b", file.job, Path("test"));
    ApplyRun(Read(folder, {{name, text}}), file);
    CheckPlan(file, file.plan, "test");
    CHECK(file.plan.context_size == 2);
    CHECK(file.job.global_batch == 4);
    CHECK(MeshOf(file.plan).RankCount() == 8);
    return file.plan;
  };
  const std::string axolotl =
      "base_model: meta-llama/Llama-3.2-1B\nsequence_len: 2048\nfsdp_version: 2\nfsdp_config:\n"
      "  auto_wrap_policy: TRANSFORMER_BASED_WRAP\n";
  const std::string two = "context_parallel_size: 2\n";
  const Plan packed = applied("a.yml", axolotl + two + "sample_packing: true\n");
  CHECK(packed.shard_size == 8);
  CHECK(packed.context_method == ContextMethod::kGather);
  CHECK(applied("a.yml", axolotl + two).context_method == ContextMethod::kRing);
  const Plan hybrid = applied("a.yml", axolotl + two +
                                           "sample_packing: true\ndp_shard_size: 2\n"
                                           "dp_replicate_size: 2\n");
  CHECK(hybrid.shard_size == 4);
  CHECK(hybrid.replicate_size == 2);
  CHECK(applied("a.yml", axolotl + "sequence_parallel_degree: 2\n").shard_size == 8);
  CHECK(Read(folder, {{"a.yml", axolotl + two + "heads_k_stride: 2\n"}})
            .script.assumed.back()
            .value == "as all-gathers of whole keys and values");
  const std::string v1 =
      "model: meta-llama/Llama-3.2-1B\nmodel_class: llm\ndist_config: {name: fsdp2}\ncp_size: 2\n";
  CHECK(applied("v1.yaml", v1).context_method == ContextMethod::kUlysses);
  const std::string accelerate =
      "compute_environment: LOCAL_MACHINE\ndistributed_type: FSDP\nmixed_precision: bf16\n"
      "fsdp_config: {fsdp_version: 2, fsdp_auto_wrap_policy: TRANSFORMER_BASED_WRAP}\n"
      "num_processes: 8\nparallelism_config:\n  parallelism_config_cp_size: 2\n"
      "  parallelism_config_dp_shard_size: 4\n";
  CHECK(applied("f.yaml", accelerate).context_method == ContextMethod::kRingGather);
  for (const auto& [text, end] : std::initializer_list<std::pair<std::string, const char*>>{
           {axolotl + "context_parallel_size: 0\n",
            "a.yml: context_parallel_size: got 0, expected an integer in [1, 16777216]"},
           {accelerate + "  parallelism_config_cp_comm_strategy: alltoall\n",
            "since context parallelism by alltoall cannot be predicted"},
           {axolotl + two + "ring_attn_func: batch_zigzag\n",
            "since context parallelism by another ring cannot be predicted"}}) {
    CHECK_MESSAGE(ErrorOf({{"a.yml", text}}).ends_with(end), ErrorOf({{"a.yml", text}}));
  }
}

// PEFT's own file beside one of the run.
TEST_CASE("Scripts: adapter_config.json") {
  const Folder folder;
  const std::string run = "per_device_train_batch_size: 1\nmodel_name_or_path: gpt2\n";
  const auto text = [](const std::string& more) {
    return R"({"peft_type": "LORA", "task_type": "CAUSAL_LM", "r": 4, "lora_alpha": 16, "bias": "none",
      "modules_to_save": null, "rank_pattern": {}, "alpha_pattern": {}, "loftq_config": {},
      "layers_to_transform": null, "use_rslora": false, "inference_mode": true, "target_modules": )" +
           more + "}";
  };
  const auto adapters = [&](const std::string& more) {
    return FactsOf(Read(folder, {{"run.yaml", run}, {"adapter_config.json", text(more)}})).adapters;
  };
  const Adapters plain = adapters(R"(["c_attn"])");
  CHECK(plain.rank == 4);
  CHECK(plain.alpha == 16.0);
  CHECK(plain.dropout == 0.0);
  CHECK(plain.targets == Strings{"c_attn"});
  CHECK(plain.saved.empty());
  CHECK(plain.base == FrozenFormat::kMaster);
  CHECK(adapters("null").targets.empty());
  CHECK(adapters(R"("all-linear", "use_dora": true)").has_magnitudes);
  const auto error = [&](const std::string& more) {
    return ErrorOf({{"run.yaml", run}, {"adapter_config.json", text(more)}});
  };
  CHECK(error(R"(["c_attn"], "lora_bias": true)")
            .ends_with("since biases trained beside adapters cannot be predicted"));
  CHECK(error(R"(["c_attn"], "target_parameters": ["experts.up"])")
            .ends_with("since adapters of the experts' tensors cannot be predicted"));
  CHECK(
      ErrorOf({{"adapter_config.json", text("null")}})
          .ends_with("got adapters alone, expected files of Accelerate, DeepSpeed, the Trainer or "
                     "a script beside it"));
  CHECK(ErrorOf({{"run.yaml", run + "max_length: 512\nuse_peft: true\n"},
                 {"adapter_config.json", text("null")}})
            .ends_with("got adapters, expected none beside those of run.yaml"));
}

TEST_CASE("Scripts: weights that are loaded in bf16 stay so without mixed precision") {
  const std::string run =
      "model_name_or_path: gpt2\nper_device_train_batch_size: 2\noutput_dir: out\nfsdp: true\n"
      "fsdp_config: {version: 2}\n";
  const Folder folder;
  const auto precision = [&](const std::string& more) {
    PlanFile file = Base(2);
    ApplyRun(Read(folder, {{"a.yml", run + more}}), file);
    return file.job.precision;
  };
  const std::string mesh = "base_model: gpt2\nfsdp_config: {version: 2}\ndp_shard_size: 4\n";
  CHECK(Read(folder, {{"a.yml", mesh}}).target == "accelerate");  // the Trainer's have no mesh
  CHECK(precision("") == Precision{DType::kFp32, DType::kFp32, DType::kFp32});
  CHECK(precision("dtype: bfloat16\n") == Precision{DType::kBf16, DType::kBf16, DType::kBf16});
  CHECK(precision("dtype: bfloat16\nbf16: true\n") ==
        Precision{DType::kFp32, DType::kBf16, DType::kBf16});
  // Without FSDP: axolotl's word, LLaMA-Factory's key.
  for (const char* text : {"base_model: gpt2\nbf16: full\n",
                           "model_name_or_path: gpt2\ntemplate: default\nlearning_rate: 1\n"
                           "finetuning_type: full\npure_bf16: true\n"}) {
    PlanFile file = Base(2);
    ApplyRun(Read(folder, {{"a.yml", text}}), file);
    CHECK(file.plan.dialect == Dialect::kDdp);
    CHECK(file.job.precision == Precision{DType::kBf16, DType::kBf16, DType::kBf16});
  }
}

TEST_CASE("Scripts: what else people do with adapters is refused by name") {
  const std::string run =
      "base_model: gpt2\nadapter: lora\nlora_r: 8\nlora_alpha: 16\nlora_target_linear: true\n";
  for (const auto& [line, feature] : std::initializer_list<std::pair<const char*, const char*>>{
           {"lora_target_parameters: [mlp.experts]", "adapters of the experts' tensors"},
           {"lora_bias: all", "biases trained beside adapters"},
           {"peft_layer_replication: [[0, 4]]", "replicated layers"},
           {"peft_trainable_token_indices: [1]", "tokens trained beside adapters"},
           {"peft_trainable_token_indices:\n  embed_tokens: [1]", "tokens trained beside adapters"},
           {"peft_autocast_adapter_dtype: true", "adapters in the base's dtype by a key"},
           {"bnb_4bit_quant_storage: bfloat16",
            "quantized weights stored in another dtype by a key"},
           {"loftq_config:\n  loftq_bits: 4", "LoftQ"},
           {"lora_alpha_pattern:\n  q_proj: 4", "several alphas by pattern"},
           {"lora_rank_pattern:\n  q_proj: 4", "several ranks by pattern"}}) {
    CAPTURE(std::string(line));
    CHECK(ErrorOf({{"a.yml", run + line + "\n"}})
              .ends_with("since " + std::string(feature) + " cannot be predicted"));
  }
}

TEST_CASE("torchtitan: names and degrees of its first versions") {
  const std::string old =
      "[model]\nname = \"llama3\"\nflavor = \"8B\"\nnorm_type = \"rmsnorm\"\n"
      "[optimizer]\nname = \"AdamW\"\nfused = true\n[training]\n"
      "batch_size = 2\nseq_len = 128\ncompile = true\ndata_parallel_shard_degree = 4\n"
      "data_parallel_replicate_degree = 2\n[float8]\nfilter_fqns = \"output\"\n"
      "[activation_checkpoint]\nmode = \"full\"\n";
  const PlanFile file = Imported({{"a.toml", old}});
  CHECK(file.plan.micro_batch == 2);
  CHECK(file.plan.shard_size == 4);
  CHECK(file.plan.replicate_size == 2);
  CHECK(file.job.optimizer.impl == OptimizerImpl::kFused);
  // On other GPUs than GPT-2's A100 the converter's old name plans fp8.
  CHECK(ErrorOf({{"a.toml",
                  "[training]\nseq_len = 128\n[experimental]\n"
                  "pipeline_parallel_degree = 2\n"}}) ==
        "a.toml: experimental.pipeline_parallel_degree: got 2, expected 1, since "
        "pipelines of before 0.2 cannot be predicted");
  const Folder folder;
  PlanFile fp8 = Base(2);
  ApplyRun(Read(folder, {{"a.toml", "[model]\nconverters = \"float8\"\n" +
                                        old.substr(old.find("[optimizer]"))}}),
           fp8);
  CHECK(fp8.kernels.fp8 == Fp8Products::kPerTensor);
  // Their compiler took the blocks alone.
  CHECK(FactsOf(Read(folder, {{"a.toml", old}})).kernel_set == "torch-compile-2024");
}

TEST_CASE("Accelerate: letters of any case, and no compiler without a word") {
  const std::string text = "distributed_type: MULTI_GPU\nnum_processes: 8\nnum_machines: 2\n";
  CHECK(Imported({{"a.yaml", text + "mixed_precision: BF16\n"}}).job.precision.param ==
        DType::kBf16);
  CHECK(ErrorOf({{"a.yaml", text + "dynamo_config:\n  dynamo_backend: INDUCTOR\n"}}) ==
        "a.yaml: dynamo_config.dynamo_backend: got \"INDUCTOR\", expected \"no\" or \"NO\" or "
        "false, since torch.compile under Accelerate cannot be predicted");
}

TEST_CASE("DeepSpeed: optimizers by any case, and none by the name of another") {
  const auto text = [](const std::string& type) {
    return R"({"train_micro_batch_size_per_gpu": 2, "bf16": {"enabled": true}, "my_config": {"a": 1},
      "optimizer": {"type": ")" +
           type + R"("}, "zero_optimization": {"stage": 3}})";
  };
  CHECK(Imported({{"ds.json", text("adamw")}}).job.optimizer.impl == OptimizerImpl::kFused);
  CHECK(Imported({{"ds.json", text("Adam")}}).job.optimizer.kind == OptimizerKind::kAdam);
  // FusedLion: one state.
  const OptimizerSpec lion = Imported({{"ds.json", text("lion")}}).job.optimizer;
  CHECK(lion.kind == OptimizerKind::kLion);
  CHECK(lion.impl == OptimizerImpl::kFused);
  CHECK(lion.states == StateFormat::kMaster);
  for (const char* type : {"Lamb", "OneBitAdam", "Muon", "Adagrad"}) {
    CHECK(ErrorOf({{"ds.json", text(type)}}) ==
          "ds.json: optimizer.type: got \"" + std::string(type) +
              "\", expected AdamW, Adam, Lion, SGD or Adadelta, since the optimizer " + type +
              " cannot be predicted");
  }
  const Folder folder;
  const RunSettings run = Read(folder, {{"ds.json", text("AdamW")}});
  REQUIRE(run.unknown.size() == 1);
  CHECK(run.unknown[0].ends_with("ds.json: my_config.a"));
}

// Files count pairs, plans their answers.
TEST_CASE("Scripts: pairs, by what their trainer compares") {
  const auto facts = [](const std::string& text) {
    const Folder folder;
    return FactsOf(Read(folder, {{"a.yaml", text}}));
  };
  const std::string trl = "output_dir: o\nmax_length: 256\nper_device_train_batch_size: 2\n";
  CHECK(facts(trl).trains_by == TrainsBy::kOwn);
  const std::string dpo = trl + "beta: 0.1\nloss_type: sigmoid\n";
  CHECK(facts(dpo).trains_by == TrainsBy::kDpo);
  CHECK(facts(dpo + "precompute_ref_log_probs: true\n").trains_by == TrainsBy::kDpoPrecomputed);
  CHECK(facts(trl + "beta: 0.1\nloss_type: ipo\n").loss_chunks == 4);  // 2 pairs of 256 in 256
  CHECK(facts(dpo + "max_prompt_length: 64\n").loss_chunks == 0);      // older
  const std::string expected =
      ", expected dpo, kto or orpo in the file's name or its folder's, or loss_type, such as "
      "sigmoid "
      "for dpo";
  CHECK(ErrorOf({{"dpo.yaml", trl + "beta: 0.1\n"}}) == "no error");
  CHECK(ErrorOf({{"a.yaml", trl + "beta: 0.1\n"}}) ==
        "a.yaml: got keys that several scripts of TRL have, and none that tells which" + expected);
  CHECK(ErrorOf({{"kto.yaml", trl + "beta: 0.1\nloss_type: sigmoid\n"}}) ==
        "kto.yaml: got a script of TRL that compares no answers with a reference" + expected);
  const std::string axolotl = "base_model: gpt2\nmicro_batch_size: 2\nlora_r: 8\n";
  const std::string lora = axolotl + "adapter: lora\nlora_dropout: 0.1\nlora_alpha: 8\n";
  CHECK(facts(lora + "rl: ipo\n").trains_by == TrainsBy::kDpo);
  CHECK(facts(lora).adapters.dropout == 0.1);
  CHECK(facts(lora + "rl: ipo\n").adapters.dropout == 0.0);
  CHECK(facts(axolotl + "rl: orpo\n").trains_by == TrainsBy::kOrpo);
  CHECK(facts(lora + "reward_model: true\nnum_labels: 1\n").adapters.saved == Strings{"score"});
  const RunFacts kto = facts(lora + "rl: kto\nkto_desirable_weight: 0.2\n");
  CHECK(kto.trains_by == TrainsBy::kKto);
  CHECK(kto.adapters.dropout == 0.0);
  const std::string factory =
      "output_dir: o\nper_device_train_batch_size: 2\nstage: dpo\npref_loss: simpo\n"
      "finetuning_type: full\n";
  CHECK(facts(factory).trains_by == TrainsBy::kOrpo);
  const std::string singles =
      "output_dir: o\nper_device_train_batch_size: 2\nstage: kto\nfinetuning_type: full\n";
  CHECK(facts(singles).trains_by == TrainsBy::kKto);
  CHECK(ErrorOf({{"a.yaml", singles + "precompute_ref_log_probs: true\n"}}) ==
        "a.yaml: precompute_ref_log_probs: got true, expected false, since KTO without its "
        "reference cannot be predicted");
  CHECK(
      ErrorOf({{"a.yaml", axolotl + "rl: bco\n"}}) ==
      "a.yaml: rl: got \"bco\", expected dpo, ipo, orpo, kto or grpo, since bco training cannot be "
      "predicted");
  PlanFile file = Base(2);
  file.job.trains_by = TrainsBy::kDpo;
  const Folder folder;
  ApplyRun(Read(folder, {{"a.yaml", dpo + "gradient_accumulation_steps: 3\n"}}), file);
  CHECK(file.plan.micro_batch == 4);
  CHECK(file.job.global_batch == file.cluster.RankCount() * 2 * 3 * 2);
}

// Which of TRL's scripts a file is for: keys that one has, or the file's own name.
TEST_CASE("TRL: KTO and rewards by their keys or by the name") {
  const auto facts = [](const std::string& name, const std::string& text) {
    const Folder folder;
    const bool is_command = name == "run.txt";
    return FactsOf(
        Read(folder, {{name, (is_command ? "" : "output_dir: o\nmax_length: 256\n") + text}}));
  };
  CHECK(facts("a.yaml", "beta: 0.1\nloss_type: kto\n").trains_by == TrainsBy::kKto);
  CHECK(facts("kto.yaml", "beta: 0.1\n").trains_by == TrainsBy::kKto);
  CHECK(facts("kto.yaml", "desirable_weight: 2.0\n").trains_by == TrainsBy::kKto);
  CHECK(facts("kto.yaml", "").trains_by == TrainsBy::kOwn);
  CHECK(facts("reward.yaml", "").trains_by == TrainsBy::kReward);
  CHECK(facts("a.yaml", "center_rewards_coefficient: 0.01\n").trains_by == TrainsBy::kReward);
  CHECK(facts("a.yaml", "center_rewards_coefficient: 0.01\n").loss_chunks == 0);
  const Folder folder_of_one;
  const RunSettings one =
      Read(folder_of_one, {{"reward.yaml", "output_dir: o\ndataset_name: d\n"}});
  CHECK(std::count_if(one.script.assumed.begin(), one.script.assumed.end(),
                      [](const Assumption& a) { return a.key == "script"; }) == 1);
  CHECK(ErrorOf({{"kto.yaml", "output_dir: o\nbeta: 0.1\nloss_type: apo_zero_unpaired\n"}})
            .find("compares no answers with a reference") != std::string::npos);
  const std::string lora = "use_peft: true\nlora_r: 8\nlora_task_type: ";
  CHECK(facts("reward.yaml", lora + "SEQ_CLS\n").adapters.saved == Strings{"score"});
  CHECK(ErrorOf({{"reward.yaml", "output_dir: o\nmax_length: 256\n" + lora + "CAUSAL_LM\n"}}) ==
        "reward.yaml: lora_task_type: got CAUSAL_LM, expected SEQ_CLS, since a score that does not "
        "learn cannot be predicted");
  // A command line says it by its script.
  const auto by = [&](const std::string& command) {
    return facts("run.txt", command + " --output_dir o --max_length 256").trains_by;
  };
  CHECK(by("accelerate launch --multi_gpu trl/scripts/kto.py") == TrainsBy::kKto);
  CHECK(by("trl dpo") == TrainsBy::kDpo);
  CHECK(by("python examples/scripts/orpo.py") == TrainsBy::kOrpo);
  CHECK(by("python examples/scripts/reward_modeling.py") == TrainsBy::kReward);
  CHECK(by("trl sft") == TrainsBy::kOwn);
  CHECK(by("python examples/scripts/sft_gpt_oss.py") == TrainsBy::kOwn);
  CHECK(ErrorOf({{"run.txt", "python examples/scripts/dpo_vlm.py --output_dir o"}})
            .ends_with("since the script dpo_vlm cannot be predicted"));
  CHECK(by("python my/kto.py") == TrainsBy::kOwn);  // nobody's that is known
  CHECK(by("trl grpo --max_completion_length 64") == TrainsBy::kGrpo);
  CHECK(by("python examples/scripts/gspo.py") == TrainsBy::kGrpo);
  CHECK(ErrorOf({{"run.txt", "trl rloo --output_dir o"}}) ==
        "run.txt: script: got \"trl/rloo\", expected TRL's sft, dpo, kto, orpo, reward or grpo, "
        "since the script rloo cannot be predicted");
  CHECK(ErrorOf({{"run.txt", "trl kto --output_dir o --loss_type apo_zero_unpaired"}})
            .ends_with("expected kto, since apo_zero_unpaired training cannot be predicted"));
  // A batch counts answers, of which no two belong together.
  PlanFile file = Base(2);
  file.job.trains_by = TrainsBy::kKto;
  const Folder folder;
  ApplyRun(Read(folder, {{"kto.yaml",
                          "output_dir: o\nmax_length: 256\nbeta: 0.1\n"
                          "per_device_train_batch_size: 2\ntorch_dtype: bfloat16\n"
                          "fsdp: full_shard auto_wrap\n"}}),
           file);
  CHECK(file.plan.micro_batch == 2);
  CHECK(file.job.frozen_format == FrozenFormat::kParam);  // nobody upcasts the reference
}

// Accelerate carves out the embedding and the norm; a score is no output embedding.
TEST_CASE("TRL: a score stays in the root under FSDP2") {
  const Folder folder;
  const RunSettings run =
      Read(folder, {{"reward.yaml",
                     "output_dir: o\nmax_length: 256\nfsdp: true\n"
                     "fsdp_config: {fsdp_version: 2, transformer_layer_cls_to_wrap: "
                     "GPT2Block}\n"}});
  PlanFile file = Base(2);
  file.job.trains_by = TrainsBy::kReward;
  ApplyTrainable(file.model, {.trains_by = TrainsBy::kReward}, Path("job"));
  ApplyRun(run, file);
  Strings ends;
  for (const UnitPlan& unit : file.plan.units) {
    for (const std::string& fqn : unit.modules) {
      if (fqn.find(".h.") == std::string::npos) {
        ends.push_back(fqn);
      }
    }
  }
  CHECK(ends == Strings{"transformer.wte", "transformer.ln_f", ""});
  CHECK(file.plan.micro_batch == 16);  // 8 pairs
}

// TRL's GRPOConfig; axolotl's tables trl and vllm.
TEST_CASE("Scripts: GRPO, with who generates and what is forwarded") {
  const auto rollout = [](const std::string& text) {
    const Folder folder;
    const RunFacts facts = FactsOf(Read(folder, {{"a.yaml", "output_dir: o\n" + text}}));
    CHECK(facts.trains_by == TrainsBy::kGrpo);
    CHECK(facts.sequence_length == facts.rollout.completion + 512);
    return facts.rollout;
  };
  const std::string trl = "num_generations: 4\nper_device_train_batch_size: 2\n";
  Rollout expected = {.completion = 512, .generations = 4, .by_trainer = true};
  CHECK(rollout(trl) == expected);
  expected.updates = 2;
  expected.has_old = true;  // of the policy before the first update
  CHECK(rollout(trl + "num_iterations: 2\n") == expected);
  // Where four micro-batches make a step, one generation of two is over before it.
  const std::string four = trl + "gradient_accumulation_steps: 4\n";
  CHECK_FALSE(rollout(four + "steps_per_generation: 2\n").has_old);
  CHECK(rollout(four + "steps_per_generation: 8\n").has_old);
  CHECK(rollout(four + "steps_per_generation: 8\n").batches == 8);
  expected = {.completion = 64, .generations = 4, .has_old = true, .has_reference = true};
  expected.engine = 0.3;
  const std::string vllm = trl + "max_completion_length: 64\nbeta: 0.04\nuse_vllm: true\n";
  CHECK(rollout(vllm) == expected);
  expected.engine = 0.5;
  expected.sleeps = true;
  CHECK(rollout(vllm + "vllm_gpu_memory_utilization: 0.5\nvllm_enable_sleep_mode: true\n") ==
        expected);
  CHECK(rollout(vllm + "vllm_mode: server\n").engine == 0.0);
  CHECK_FALSE(rollout(vllm + "vllm_importance_sampling_correction: false\n").has_old);
  const auto error = [](const std::string& text) {
    return ErrorOf({{"a.yaml", "output_dir: o\nnum_generations: 4\n" + text}});
  };
  CHECK(error("generation_batch_size: 64\n")
            .ends_with("since a generation in samples (steps_per_generation says it in "
                       "micro-batches) cannot be predicted"));
  CHECK(error("reward_model_name_or_path: m\n")
            .ends_with("since a reward model cannot be predicted"));
  CHECK(error("vllm_tensor_parallel_size: 2\n").find("vllm_tensor_parallel_size") !=
        std::string::npos);
  CHECK(ErrorOf({{"rloo.yaml", "output_dir: o\nnum_generations: 4\n"}})
            .find("since sft that generates cannot be predicted") != std::string::npos);
  const std::string axolotl =
      "base_model: b\nmicro_batch_size: 2\nsequence_len: 4096\nrl: grpo\n"
      "trl:\n  max_completion_length: 64\n  num_generations: 4\n  beta: 0.04\n  use_vllm: true\n";
  expected = {.completion = 64, .generations = 4, .has_old = true, .has_reference = true};
  expected.engine = 0.9;
  CHECK(rollout(axolotl + "  vllm_mode: colocate\n") == expected);
  expected.engine = 0.25;
  CHECK(rollout(axolotl + "  vllm_mode: colocate\nvllm:\n  gpu_memory_utilization: 0.25\n") ==
        expected);
  CHECK(ErrorOf({{"a.yaml", axolotl + "  use_data_producer: true\n"}}).find("use_data_producer") !=
        std::string::npos);
}

}  // namespace
}  // namespace shardwright
