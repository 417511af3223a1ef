// Readers of other frameworks' settings, and of tables of measurements.

#include <string>
#include <vector>

#include "analysis/csv.h"
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
constexpr const char* kFairseq =
    "fairseq-train data/bin --arch transformer_lm_gpt --ddp-backend fully_sharded --fp16 "
    "--update-freq 2 --optimizer adam --adam-betas '(0.9, 0.98)' --clip-norm 1.0";
constexpr const char* kFairseqYaml =
    "common:\n  fp16: true\ndistributed_training:\n  ddp_backend: fully_sharded\n"
    "  distributed_world_size: 8\noptimization:\n  update_freq: [2]\n  clip_norm: 1.0\n"
    "task:\n  tokens_per_sample: 512\nmodel:\n  _name: transformer_lm\n  checkpoint_activations: "
    "true\n";

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
      Settings("fairseq, command line", kFairseq, ".sh"),
      Settings("fairseq, YAML", kFairseqYaml, ".yaml"),
      {"CSV", "a,\"b\"\"c\",d\n1,\"x,\ny\",2.5\n\n3,,4\n",
       [](const std::string& text) { (void)ParseCsv(text, "fuzz.csv"); }},
  };
}

}  // namespace
}  // namespace shardwright

int main(int argc, char** argv) {
  return shardwright::testing::FuzzAll(shardwright::Targets(), argc, argv);
}
