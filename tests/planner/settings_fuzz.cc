// Readers of other frameworks' settings, and of tables of measurements.

#include <string>
#include <vector>

#include "planner/importers/run_settings.h"
#include "tests/traces/fuzz.h"

namespace shardwright {
namespace {

using testing::FuzzTarget;
using testing::OfFile;

constexpr const char* kTorchtitan =
    "[model]\nname = \"llama3\"\nflavor = \"8B\"\n[optimizer]\nlr = 3e-4\n[training]\n"
    "local_batch_size = 2\nglobal_batch_size = 48\nseq_len = 128\n[parallelism]\n"
    "data_parallel_replicate_degree = 4\ndata_parallel_shard_degree = "
    "2\nfsdp_reshard_after_forward = \"never\"\n"
    "[activation_checkpoint]\nmode = \"selective\"\nselective_ac_option = '3'\n";
constexpr const char* kAccelerate =
    "distributed_type: FSDP\nmixed_precision: 'bf16'\nnum_machines: 2\nnum_processes: 8\n"
    "fsdp_config: &a\n  fsdp_version: 2\n  fsdp_auto_wrap_policy: TRANSFORMER_BASED_WRAP\n"
    "  fsdp_transformer_layer_cls_to_wrap: GPT2Block\n  fsdp_reshard_after_forward: true\n"
    "tpu_env: []\n";
constexpr const char* kDeepSpeed =
    R"({"train_batch_size": 64, "gradient_accumulation_steps": 2, "bf16": {"enabled": true},)"
    R"("zero_optimization": {"stage": 3, "offload_optimizer": {"device": "cpu"},)"
    R"("cpu_offload_param": true, "stage3_prefetch_bucket_size": 5e7, "overlap_comm": null}})";
constexpr const char* kTrainer =
    R"({"output_dir": "o", "fsdp": "full_shard auto_wrap", "bf16": true, "per_device_train_batch_size": 4,)"
    R"("fsdp_config": {"transformer_layer_cls_to_wrap": ["GPT2Block"]}})";
constexpr const char* kRecipe =
    "model_name_or_path: gpt2\ntorch_dtype: bfloat16\nattn_implementation: eager\nbf16: true\n"
    "max_length: 512\npacking: true\noptim: adamw_torch\nper_device_train_batch_size: 2\n"
    "gradient_checkpointing: true\nfsdp: [full_shard, auto_wrap]\nfsdp_config:\n"
    "  fsdp_version: 2\n  fsdp_transformer_layer_cls_to_wrap: GPT2Block\nmine: {a: [1, x]}\n";
constexpr const char* kLlamaFactory =
    "model_name_or_path: gpt2\nstage: sft\nfinetuning_type: full\ncutoff_len: 256\n"
    "flash_attn: disabled\nenable_liger_kernel: true\ndisable_gradient_checkpointing: true\n"
    "per_device_train_batch_size: 8\nlearning_rate: 1.0e-5\nbf16: true\n";
constexpr const char* kAxolotl =
    "base_model: gpt2\nsequence_len: 512\nmicro_batch_size: 2\nbf16: auto\nadapter:\n"
    "plugins: [axolotl.integrations.liger.LigerPlugin]\noptimizer: adamw_torch_fused\n"
    "fsdp: [shard_grad_op, auto_wrap]\nfsdp_config:\n  fsdp_offload_params: true\n";
constexpr const char* kAutomodel =
    "recipe: TrainFinetuneRecipeForNextTokenPrediction\nmodel: {torch_dtype: bf16, "
    "pretrained_model_name_or_path: gpt2}\npeft: {dim: 8, target_modules: '*_attn'}\n"
    "step_scheduler: {global_batch_size: 64, local_batch_size: 2}\ndistributed:\n"
    "  strategy: fsdp2\n  tp_size: 1\n  dp_replicate_size: 2\n  activation_checkpointing: true\n"
    "  enable_fsdp2_prefetch: true\noptimizer: {_target_: torch.optim.AdamW, lr: 1e-4}\n"
    "dataset: {seq_len: 128}\n";
constexpr const char* kTorchrun =
    "# --no 1\ntorchrun --nproc_per_node=4 --nnodes 2 train.py --bf16 True --optim sgd "
    "--per_device_train_batch_size 2 --fsdp \"full_shard auto_wrap\" --model_max_length 64";

// GPT-2 on two nodes, on which what was read is applied.
PlanFile Base() {
  PlanFile file;
  file.job.sequence_length = 128;
  file.cluster = LoadCluster("dgx-a100", 2, 4);
  file.kernels = FindKernelSet("torch-eager", "fuzz");
  file.profile = DefaultProfile(file.cluster.gpu, file.kernels.name);
  file.model = LoadModelForJob("gpt2", file.job, Path("fuzz"));
  file.plan.shard_size = file.cluster.RankCount();
  return file;
}

FuzzTarget Settings(const std::string& name, const std::string& good, const std::string& ending) {
  return {name, good,
          OfFile(
              [](const std::string& file) {
                static const PlanFile base = Base();
                PlanFile applied = base;
                ApplyRun(ReadRun(std::vector{file}), applied);
              },
              ending)};
}

std::vector<FuzzTarget> Targets() {
  return {
      Settings("torchtitan, TOML", kTorchtitan, ".toml"),
      Settings("Accelerate, YAML", kAccelerate, ".yaml"),
      Settings("DeepSpeed, JSON", kDeepSpeed, ".json"),
      Settings("Trainer, JSON", kTrainer, ".json"),
      Settings("recipe, YAML", kRecipe, ".yaml"),
      Settings("LLaMA-Factory, YAML", kLlamaFactory, ".yaml"),
      Settings("axolotl, YAML", kAxolotl, ".yml"),
      Settings("NeMo Automodel, YAML", kAutomodel, ".yaml"),
      Settings("torchrun, command line", kTorchrun, ".sh"),
  };
}

}  // namespace
}  // namespace shardwright

int main(int argc, char** argv) {
  return shardwright::testing::FuzzAll(shardwright::Targets(), argc, argv);
}
