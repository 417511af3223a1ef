// Recipes of NeMo Automodel. What is expected is its code's, commit of 2026-08-22: units and what
// they keep (components/distributed/parallelizer.py, apply_fsdp2_sharding_recursively), those of
// mixtures (components/moe/parallelizer.py, apply_fsdp), checkpoints
// (activation_checkpointing.py, apply_submodule_checkpointing), defaults (config.py, FSDP2Config).

#include <algorithm>
#include <string>

#include <doctest/doctest.h>

#include "planner/importers/run_settings.h"
#include "tests/planner/run_files.h"

namespace shardwright {
namespace {

using testing::Base;
using testing::ErrorOf;
using testing::Folder;
using testing::Read;

constexpr const char* kRecipe = R"(recipe: TrainFinetuneRecipeForNextTokenPrediction
step_scheduler: {global_batch_size: 48, local_batch_size: 2, num_epochs: 1}
optimizer: {_target_: torch.optim.Adam, lr: 1.0e-5, weight_decay: 0}
loss_fn: {_target_: nemo_automodel.components.loss.masked_ce.MaskedCrossEntropy}
)";

std::string ModelNamed(const std::string& name, const std::string& more = "") {
  return "model: {_target_: nemo_automodel.NeMoAutoModelForCausalLM.from_pretrained, "
         "pretrained_model_name_or_path: " +
         name + more + "}\n";
}

std::string Distributed(const std::string& more = "") {
  return "distributed: {strategy: fsdp2, dp_size: none, tp_size: 1, cp_size: 1" + more + "}\n";
}

RunSettings ReadRecipe(const std::string& text) {
  return Read(Folder(), {{"r.yaml", kRecipe + text}});
}

PlanFile Applied(const std::string& model, const std::string& text) {
  PlanFile file = Base(2);
  if (model != "gpt2") {
    file.model = LoadModelForJob(model, file.job, Path("test"));
  }
  ApplyRun(ReadRecipe(text), file);
  CheckPlan(file, file.plan, "test");
  return file;
}

std::ptrdiff_t Kept(const Plan& plan) {
  return std::count_if(plan.units.begin(), plan.units.end(), [](const UnitPlan& unit) {
    return unit.reshard.kind == Reshard::Kind::kNever;
  });
}

// components/quantization/fp8.py.
TEST_CASE("Automodel: products and gathers in fp8") {
  const auto fp8 = [](const std::string& keys) {
    PlanFile file = Base(2);
    ApplyRun(ReadRecipe(ModelNamed("openai-community/gpt2") + Distributed() +
                        "fp8: {enabled: true, filter_fqns: [lm_head]" + keys + "}\n"),
             file);
    return file.kernels.fp8;
  };
  const std::string gathers = ", enable_fsdp_float8_all_gather: true";
  const std::string precomputes = ", precompute_float8_dynamic_scale_for_fsdp: true";
  CHECK(fp8(gathers + precomputes) == Fp8Products::kPrecomputed);
  CHECK(fp8(gathers + ", recipe_name: tensorwise") == Fp8Products::kGathered);
  CHECK(fp8(precomputes) == Fp8Products::kPerTensor);
  CHECK(fp8(gathers + ", recipe_name: rowwise") == Fp8Products::kPerRow);
  CHECK_THROWS_WITH_AS((void)fp8(", recipe_name: rowwise_with_gw_hp"),
                       doctest::Contains("other products in fp8 cannot be predicted"), InputError);
}

TEST_CASE("Automodel: layers and the root under FSDP2") {
  const PlanFile file = Applied("gpt2", ModelNamed("openai-community/gpt2") + Distributed());
  CHECK(file.plan.dialect == Dialect::kFsdp2);
  CHECK(file.plan.units.size() == 13);
  CHECK(Kept(file.plan) == 2);  // the last layer and the root
  CHECK(file.plan.units[11].reshard.kind == Reshard::Kind::kNever);
  CHECK(file.plan.micro_batch == 2);
  CHECK(file.plan.accumulation == 3);  // of 48 samples on 8 GPUs
  CHECK(file.plan.sync == SyncMode::kLast);
  CHECK(file.plan.recompute.empty());
  CHECK(file.job.precision == Precision{DType::kBf16, DType::kBf16, DType::kFp32});
  CHECK(file.job.optimizer.kind == OptimizerKind::kAdam);
  CHECK_FALSE(file.job.optimizer.weight_decay);
  CHECK(file.job.clip_gradients);
  const PlanFile other =
      Applied("gpt2", ModelNamed("gpt2", ", torch_dtype: float32") +
                          Distributed(", defer_fsdp_grad_sync: false, enable_fsdp2_prefetch: true, "
                                      "activation_checkpointing: true, dp_replicate_size: 2"));
  CHECK(other.job.precision.master == DType::kFp32);
  CHECK(other.plan.sync == SyncMode::kEvery);
  CHECK(other.plan.replicate_size == 2);
  CHECK(other.plan.shard_size == 4);
  CHECK(other.plan.recompute.size() == 12);
  CHECK(other.plan.units[3].forward_prefetch == std::vector{other.plan.units[4].name});
  CHECK(other.plan.units[3].backward_prefetch ==
        std::vector{other.plan.units[2].name, other.plan.units[1].name});
}

// FusedAdam's masters are whole: 16 bits of each are the weight, the others are kept beside it.
TEST_CASE("Automodel: Transformer Engine's FusedAdam") {
  const auto fused = [](const std::string& more) {
    std::string text = kRecipe;
    const std::size_t at = text.find("torch.optim.Adam, lr: 1.0e-5, weight_decay: 0");
    text.replace(at, 45, "transformer_engine.pytorch.optimizers.FusedAdam" + more);
    return text + ModelNamed("gpt2") + Distributed();
  };
  PlanFile file = Base(2);
  ApplyRun(Read(Folder(), {{"r.yaml", fused(", master_weights: true, weight_decay: 0.1")}}), file);
  CHECK(file.job.optimizer.kind == OptimizerKind::kAdamW);
  CHECK(file.job.optimizer.impl == OptimizerImpl::kFused);
  CHECK(file.job.optimizer.weight_decay);
  CHECK(file.job.precision == Precision{DType::kFp32, DType::kBf16, DType::kFp32});
  ApplyRun(Read(Folder(), {{"r.yaml", fused(", master_weights: true, adam_w_mode: false")}}), file);
  CHECK(file.job.optimizer.kind == OptimizerKind::kAdam);
  CHECK_FALSE(file.job.optimizer.weight_decay);
  CHECK(file.job.optimizer.states == StateFormat::kMaster);
  ApplyRun(Read(Folder(), {{"r.yaml", fused("")}}), file);
  CHECK(file.job.optimizer.states == StateFormat::kFp32);
  CHECK(file.job.precision.master == DType::kBf16);
  std::string flash = fused(", weight_decay: 0, master_weight_bits: 24");
  flash.replace(flash.find("transformer_engine.pytorch.optimizers.FusedAdam"), 47,
                "flashoptim.FlashAdamW");
  ApplyRun(Read(Folder(), {{"r.yaml", flash}}), file);
  CHECK(file.job.optimizer.states == StateFormat::kAo8);
  CHECK(file.job.optimizer.kind == OptimizerKind::kAdamW);
  CHECK_FALSE(file.job.optimizer.weight_decay);
  CHECK(file.job.precision.master == DType::kFp32);
  CHECK(ErrorOf({{"r.yaml", fused(", master_weights: true, master_weight_dtype: bfloat16")}})
            .ends_with("since states of FusedAdam in 16 bits cannot be predicted"));
  CHECK(ErrorOf({{"r.yaml", fused(", quantize: false")}})
            .ends_with("since FlashAdamW without 8 bits cannot be predicted"));
  CHECK(ErrorOf({{"r.yaml", fused(", master_weights: true, exp_avg_dtype: torch.bfloat16")}})
            .ends_with("since states of FusedAdam in 16 bits cannot be predicted"));
}

TEST_CASE("Automodel: losses") {
  const auto run = [](const std::string& name) {
    std::string text = kRecipe;
    const std::string given = "masked_ce.MaskedCrossEntropy";
    text.replace(text.find(given), given.size(), name);
    return Read(Folder(), {{"r.yaml", text + ModelNamed("gpt2") + Distributed()}});
  };
  const RunSettings te = run("te_parallel_ce.TEParallelCrossEntropy");
  CHECK(FactsOf(te).loss_chunks == 1);
  CHECK(te.script.assumed.back().value == "MaskedCrossEntropy, which keeps more");
  CHECK(FactsOf(run("linear_ce.FusedLinearCrossEntropy")).loss_chunks > 1);
}

// FSDP2Manager leaves the model of a single rank as it is.
TEST_CASE("Automodel: one GPU") {
  PlanFile file = Base(1);
  file.cluster = LoadCluster("dgx-a100", 1, 1);
  ApplyRun(ReadRecipe(ModelNamed("gpt2", ", torch_dtype: float32") +
                      Distributed(", activation_checkpointing: true").replace(40, 4, "1")),
           file);
  CheckPlan(file, file.plan, "test");
  CHECK(file.plan.dialect == Dialect::kDdp);
  CHECK(file.job.precision == Precision{DType::kFp32, DType::kFp32, DType::kFp32});
  CHECK(file.plan.recompute.size() == 12);
  CHECK(file.plan.accumulation == 24);
}

TEST_CASE("Automodel: its own models and others") {
  const std::string own = ModelNamed("meta-llama/Llama-3.2-1B");
  const std::string recompute = Distributed(", activation_checkpointing: true");
  // 16 layers: mixer, products and two norms each by itself.
  CHECK(Applied("llama-3.2-1b", own + recompute).plan.recompute.size() == 64);
  const std::string forced = ModelNamed("meta-llama/Llama-3.2-1B", ", force_hf: true");
  CHECK(Applied("llama-3.2-1b", forced + recompute).plan.recompute.size() == 16);
  CHECK(FactsOf(ReadRecipe(own)).kernel_set == "torch-eager");
  CHECK(FactsOf(ReadRecipe(forced)).kernel_set == "hf-liger");
  CHECK(FactsOf(ReadRecipe(forced)).loss_chunks == 1);  // its logits are whole
  CHECK(FactsOf(ReadRecipe(ModelNamed("gpt2", ", use_liger_kernel: false"))).kernel_set ==
        "hf-eager");
}

TEST_CASE("Automodel: experts that ranks share out") {
  const std::string model = ModelNamed("Qwen/Qwen3-30B-A3B", ", backend: {dispatcher: deepep}");
  const PlanFile file = Applied("qwen3-30b-a3b", model + Distributed(", ep_size: 4"));
  CHECK(file.plan.expert_size == 4);
  // Embedding, experts and the rest of 48 layers, head, root; none is freed.
  CHECK(file.plan.units.size() == 1 + 2 * 48 + 1 + 1);
  CHECK(Kept(file.plan) == 99);
  CHECK(file.plan.units[97].name == "lm_head");
  const PlanFile freed =
      Applied("qwen3-30b-a3b", model + Distributed(", ep_size: 8, activation_checkpointing: true, "
                                                   "moe: {reshard_after_forward: true}"));
  CHECK(Kept(freed.plan) == 0);
  CHECK(freed.plan.recompute.size() == 48);
}

// recipes/llm/train_ft.py: prepare_for_grad_accumulation and prepare_for_final_backward (moe/
// fsdp_mixin.py) keep what is gathered, get_sync_ctx of the outermost module defers reductions.
TEST_CASE("Automodel: what mixtures keep over micro-batches, and when they reduce") {
  const auto plan = [](const std::string& model, const char* name, const std::string& backend,
                       const std::string& more) {
    return Applied(name, ModelNamed(model, ", backend: {dispatcher: torch" + backend + "}") +
                             Distributed(more))
        .plan;
  };
  const std::string mixture = "Qwen/Qwen3-30B-A3B", on = ", enable_fsdp_optimizations: true";
  const std::string ep = ", ep_size: 4", inner = ep + ", moe: {wrap_outer_model: false}";
  const auto of_mixture = [&](const std::string& backend, const std::string& more) {
    return plan(mixture, "qwen3-30b-a3b", backend, more);
  };
  CHECK_FALSE(of_mixture("", ep).keeps_gathered);
  CHECK(of_mixture("", ep).sync == SyncMode::kLast);
  CHECK(of_mixture("", inner).sync == SyncMode::kEvery);
  CHECK(of_mixture(on, inner).keeps_gathered);
  CHECK(of_mixture(on, inner).sync == SyncMode::kLast);
  CHECK(of_mixture(on, ep).keeps_gathered);
  CHECK(of_mixture(on, ep + ", defer_fsdp_grad_sync: false").sync == SyncMode::kEvery);
  CHECK(of_mixture(on, "").keeps_gathered);
  // Pipelines do so anyway; models without experts, and those of transformers, have no such hooks.
  CHECK_FALSE(of_mixture(on, ep + ", pp_size: 2").keeps_gathered);
  CHECK_FALSE(plan("Qwen/Qwen3-8B", "qwen3-8b", on, "").keeps_gathered);
  CHECK_FALSE(plan("mistralai/Mixtral-8x7B-v0.1", "mixtral-8x7b", on, "").keeps_gathered);
}

// components/loss/masked_ce.py upcasts logits unless told otherwise, and FSDP's root does if told.
TEST_CASE("Automodel: logits in the loss") {
  const auto upcasts = [](const std::string& loss, const std::string& more) {
    std::string text = kRecipe;
    text.insert(text.find("MaskedCrossEntropy}") + std::string("MaskedCrossEntropy").size(), loss);
    PlanFile file = Base(2);
    ApplyRun(Read(Folder(), {{"r.yaml", text + ModelNamed("gpt2") + Distributed(more)}}), file);
    return file.kernels.fp32_logits;
  };
  CHECK(upcasts("", ""));
  CHECK(upcasts(", fp32_upcast: true", ""));
  CHECK_FALSE(upcasts(", fp32_upcast: false", ""));
  CHECK(upcasts(", fp32_upcast: false", ", mp_policy: {output_dtype: float32}"));
}

// What FactsOf and the plan say a key is taken for; empty: not in the list.
std::string Said(const std::string& model, const std::string& text, const std::string& key) {
  const RunSettings run = ReadRecipe(text);
  PlanFile file = Base(2);
  file.model = LoadModelForJob(model, file.job, Path("test"));
  ApplyRun(run, file);
  for (const Assumption& one : AssumptionsOf(run, file)) {
    if (one.key == key) {
      return one.value;
    }
  }
  return "";
}

std::string RefusalOf(const std::string& model, const std::string& text) {
  try {
    Applied(model, text);
  } catch (const InputError& e) {
    return e.what();
  }
  return "";
}

// 8 GPUs: 2 stages of 4 data-parallel ranks. A step of 48 samples has 6 passes of 2 micro-batches;
// with one stage a rank, 1F1B's bubble is as long as one micro-batch: 5 more than in one pass of
// 12, which takes as long as 13.
TEST_CASE("Automodel: pipelines") {
  const std::string llama = ModelNamed("meta-llama/Meta-Llama-3-8B");
  const Plan plan = Applied("llama-3-8b", llama + Distributed(", pp_size: 2")).plan;
  CHECK(plan.pipeline_size == 2);
  CHECK(plan.pipeline_stages == 1);
  CHECK(plan.pipeline_edge_layers == 0);  // split_model_into_stages: divmod of the layers alone
  CHECK(plan.pipeline_schedule == PipelineSchedule::k1F1B);
  CHECK(plan.shard_size == 4);
  CHECK(plan.micro_batch == 1);
  CHECK(plan.accumulation == 12);
  CHECK(plan.sync == SyncMode::kLast);
  CHECK(Kept(plan) == 33);  // no stage frees what it gathered
  CHECK(
      Said("llama-3-8b", llama + Distributed(", pp_size: 2"), "step_scheduler.global_batch_size") ==
      "as one pass of the pipeline; 6 passes take about 38 % longer");
  CHECK(Said("llama-3-8b", llama + Distributed(), "step_scheduler.global_batch_size").empty());
  CHECK(Said("llama-3-8b", llama + Distributed(", pp_size: 2"), "distributed.pp_size").empty());
  const auto pipeline = [&](const std::string& more) {
    return llama +
           Distributed(", pp_size: 2, pipeline: {pp_schedule: Interleaved1f1b" + more + "}");
  };
  const auto stages = [&](const std::string& more) {
    return Applied("llama-3-8b", pipeline(more)).plan.pipeline_stages;
  };
  CHECK(stages("") == 2);
  CHECK(stages(", layers_per_stage: 4") == 4);
  // 32 layers by 5 are 7 stages: 6 or 8 for 2 ranks.
  CHECK(stages(", layers_per_stage: 5, round_virtual_stages_to_pp_multiple: down") == 3);
  CHECK(stages(", layers_per_stage: 5, round_virtual_stages_to_pp_multiple: up") == 4);
  for (const auto& [text, end] : std::initializer_list<std::pair<std::string, const char*>>{
           {pipeline(", layers_per_stage: 5"), "several stages for each of 2 ranks"},
           {pipeline(", layers_per_stage: 5, round_virtual_stages_to_pp_multiple: near"),
            "several stages for each of 2 ranks"},
           {pipeline(", layers_per_stage: 16"), "several stages for each of 2 ranks"},
           {pipeline(", pp_microbatch_size: 2"),
            "local_batch_size: got 2, expected 2 micro-batches of 2 or more"},
           {llama + Distributed(", pp_size: 'two'"), "pp_size: got \"two\", expected an integer"},
           {pipeline(", pp_microbatch_size: 4"),
            "8, which one pass of all ranks has in "
            "micro-batches of 4"},
           {llama + Distributed(", pp_size: 3"),
            "distributed.*_size: got 3, expected a divisor of "
            "the 8 GPUs of the cluster"},
           {llama + Distributed(", pp_size: 2, defer_fsdp_grad_sync: false"), "with sync last"},
           {llama + Distributed(", pp_size: 2, reshard_after_forward: true"),
            "with reshard never"}}) {
    CAPTURE(text);
    const std::string said = RefusalOf("llama-3-8b", text);
    CHECK_MESSAGE(said.find(end) != std::string::npos, said);
  }
  std::string recipe = kRecipe;
  recipe.replace(recipe.find("local_batch_size: 2"), 19, "local_batch_size: 4");
  PlanFile file = Base(2);
  file.model = LoadModelForJob("llama-3-8b", file.job, Path("test"));
  ApplyRun(Read(Folder(), {{"r.yaml", recipe + pipeline(", pp_microbatch_size: 2")}}), file);
  CHECK(file.plan.micro_batch == 2);
  CHECK(file.plan.accumulation == 6);  // 3 passes of 2
  // Its head is its embedding, which another stage has.
  const std::string tied = RefusalOf(
      "llama-3.2-1b", ModelNamed("meta-llama/Llama-3.2-1B") + Distributed(", pp_size: 2"));
  CHECK_MESSAGE(tied.find("distributed.pp_size: got 2") != std::string::npos, tied);
}

TEST_CASE("Automodel: cut layers and tokens") {
  const std::string llama = ModelNamed("meta-llama/Meta-Llama-3-8B");
  const auto cut = [](const std::string& sizes) {
    return "distributed: {strategy: fsdp2, " + sizes + "}\n";
  };
  const PlanFile tensor = Applied("llama-3-8b", llama + cut("tp_size: 4, dp_size: 2"));
  CHECK(tensor.plan.tensor_size == 4);
  CHECK(tensor.plan.shard_size == 2);
  CHECK(tensor.plan.accumulation == 12);
  CHECK(tensor.model.tensor_ranks == 4);
  CHECK(Said("llama-3-8b", llama + cut("tp_size: 4"), "distributed.tp_size")
            .starts_with("as sequence parallel"));
  CHECK(Said("llama-3-8b",
             llama + cut("tp_size: 4, sequence_parallel: true, enable_async_tensor_parallel: true"),
             "distributed.enable_async_tensor_parallel") ==
        "as products whose transfers nothing hides");
  CHECK(Said("llama-3-8b", llama + cut("cp_size: 2"), "distributed.cp_size") ==
        "as torch's context_parallel");
  const Plan tokens = Applied("llama-3-8b", llama + cut("cp_size: 2")).plan;
  CHECK(tokens.context_size == 2);
  CHECK(tokens.context_method == ContextMethod::kRingGather);
  CHECK(tokens.shard_size == 8);
  CHECK(tokens.accumulation == 6);
  const Plan all =
      Applied("qwen3-30b-a3b", ModelNamed("Qwen/Qwen3-30B-A3B", ", backend: {attn: te}") +
                                   cut("ep_size: 4, cp_size: 2, pp_size: 2"))
          .plan;
  CHECK(all.context_method == ContextMethod::kRing);
  CHECK(all.expert_size == 4);
  CHECK(all.shard_size == 4);
  CHECK(all.accumulation == 24);
  CHECK(RefusalOf("llama-3-8b", llama + cut("tp_size: 4, dp_size: 4"))
            .ends_with("got 16, expected the 8 GPUs of the cluster"));
  CHECK(RefusalOf("phi-4", ModelNamed("microsoft/phi-4") + cut("tp_size: 2"))
            .ends_with("since no plan of Automodel's cuts attention without q_proj"));
}

TEST_CASE("Automodel: adapters") {
  const std::string lora =
      ModelNamed("gpt2") + Distributed() +
      "peft: {_target_: nemo_automodel.components._peft.lora.PeftConfig, dim: 16";
  const auto adapters = [&](const std::string& more) {
    return FactsOf(ReadRecipe(lora + more)).adapters;
  };
  CHECK(adapters("}\n").targets == std::vector<std::string>{"*_proj"});
  CHECK(adapters("}\n").alpha == 32.0);
  CHECK(adapters("}\n").base == FrozenFormat::kParam);
  CHECK(adapters(", match_all_linear: true}\n").targets == std::vector<std::string>{"*"});
  using Globs = std::vector<std::string>;
  CHECK(adapters(", exclude_modules: '*.out_proj'}\n").targets ==
        Globs{"*", "!*.out_proj", "!*.*.out_proj"});
  CHECK(adapters(", target_modules: ['*'], moe_rank_scaling: true}\n").targets == Globs{"*"});
  const auto own = [&](const std::string& more) {  // Automodel's own code stacks experts
    return FactsOf(
               ReadRecipe(ModelNamed("Qwen/Qwen3-30B-A3B") + lora.substr(lora.find("dist")) + more))
        .adapters.targets;
  };
  CHECK(own(", target_modules: ['*'], moe_rank_scaling: true}\n") == Globs{"*", "*@16/k"});
  CHECK(own(", target_modules: ['*']}\n") == Globs{"*", "*@16"});
  CHECK(own(", exclude_modules: ['a', 'b']}\n") == Globs{"*", "!a", "!*.a", "!b", "!*.b"});
  CHECK(own(", match_all_linear: true}\n") == Globs{"*"});
  CHECK(adapters(", target_modules: ['*.c_attn'], dropout: 0.1}\n").dropout == 0.1);
  CHECK(adapters("}\nquantization: {load_in_4bit: true, bnb_4bit_quant_type: nf4}\n").base ==
        FrozenFormat::kNf4);
}

TEST_CASE("Automodel: what cannot be predicted is said") {
  const std::string model = ModelNamed("gpt2");
  for (const auto& [text, end] : std::initializer_list<std::pair<std::string, const char*>>{
           {Distributed(", pp_size: 2, pipeline: {pp_schedule: zero_bubble}"),
            "distributed.pipeline.pp_schedule: got \"zero_bubble\", expected GPipe, 1F1B, "
            "Interleaved1F1B, LoopedBFS, InterleavedZeroBubble, ZBVZeroBubble or DualPipeV"},
           {Distributed(", pipeline: {pp_schedule_csv: a.csv}"),
            "since a pipeline by a file of its schedule cannot be predicted"},
           {Distributed(", pipeline: {module_fqns_per_model_part: [[a], [b]]}"),
            "since stages by names of modules cannot be predicted"},
           {Distributed(", tp_plan: {lm_head: colwise}"),
            "since layers cut by a plan of one's own cannot be predicted"},
           {"distributed: {strategy: ddp}",
            "since a strategy other than fsdp2 cannot be predicted"},
           {Distributed(", activation_checkpointing: selective"),
            "since selective recomputation by Automodel's list cannot be predicted"},
           {"distributed: {strategy: fsdp2, dp_size: 4}",
            "got 4, expected the 8 GPUs of the cluster"},
           {Distributed(", dp_replicate_size: 3"),
            "expected a divisor of the 8 GPUs of the cluster"},
           {ModelNamed("gpt2", ", torch_dtype: float16"), "since weights in float16 cannot be"},
           {ModelNamed("gpt2", ", attn_implementation: magi"), "since attention by magi cannot be"},
           {"fp8: {enabled: true}", "since other products in fp8 cannot be predicted"},
           {"kd_ratio: 0.5", "since a teacher cannot be predicted"},
           {"quantization: {load_in_4bit: true}",
            "since quantized weights without adapters cannot be predicted"}}) {
    CAPTURE(text);
    const std::string said =
        ErrorOf({{"r.yaml", kRecipe + (text.starts_with("model") ? "" : model) + text + "\n"}});
    CHECK_MESSAGE(said.find(end) != std::string::npos, said);
  }
  const std::string said = ErrorOf({{"r.yaml", "recipe: FinetuneRecipeForVLM\n" + model}});
  CHECK_MESSAGE(said.find("a recipe of another kind of model or loss") != std::string::npos, said);
}

}  // namespace
}  // namespace shardwright
