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
  CHECK(adapters(", target_modules: ['*.c_attn'], dropout: 0.1}\n").dropout == 0.1);
  CHECK(adapters("}\nquantization: {load_in_4bit: true, bnb_4bit_quant_type: nf4}\n").base ==
        FrozenFormat::kNf4);
}

TEST_CASE("Automodel: what cannot be predicted is said") {
  const std::string model = ModelNamed("gpt2");
  for (const auto& [text, end] : std::initializer_list<std::pair<std::string, const char*>>{
           {Distributed(", pp_size: 2"), "since pipeline parallelism cannot be predicted"},
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
           {"fp8: {enabled: true}", "since gathers in fp8 cannot be predicted"},
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
