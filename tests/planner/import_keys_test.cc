// Which keys of a framework's settings mean what: setting_keys.json, and the doors that keep every
// other reading out.

#include <algorithm>
#include <span>
#include <string>
#include <string_view>
#include <utility>

#include <doctest/doctest.h>

#include "planner/emitters/accelerate.h"
#include "planner/emitters/deepspeed.h"
#include "planner/emitters/torchtitan.h"
#include "planner/emitters/trainer.h"
#include "planner/importers/document.h"
#include "planner/importers/run_settings.h"
#include "planner/importers/setting_keys.h"
#include "tests/planner/run_files.h"

namespace shardwright {
namespace {

using testing::Base;
using testing::ErrorOf;
using testing::Files;
using testing::Folder;
using testing::Imported;
using testing::Read;

constexpr const char* kTrainer = "output_dir: o\nper_device_train_batch_size: 1\nbf16: true\n";
constexpr const char* kAxolotl = "base_model: gpt2\nmicro_batch_size: 1\nbf16: true\n";
constexpr const char* kAccelerate =
    "distributed_type: FSDP\nfsdp_config: {fsdp_version: 2}\nnum_processes: 8\nnum_machines: 2\n"
    "mixed_precision: bf16\n";
constexpr const char* kDeepSpeed =
    R"({"train_micro_batch_size_per_gpu": 1, "bf16": {"enabled": true}, "zero_optimization": {"stage": 2})";

template <class S>
bool HasRow(std::span<const SettingRow<S>> rows, std::string_view key) {
  return std::any_of(rows.begin(), rows.end(),
                     [&](const SettingRow<S>& row) { return row.key == key; });
}

TEST_CASE("Keys: each used one is a key of a settings struct, or says who takes it") {
  const std::pair<const char*, bool (*)(std::string_view)> kFrameworks[] = {
      {"torchtitan", [](std::string_view key) { return HasRow(TorchtitanRows(), key); }},
      {"accelerate", [](std::string_view key) { return HasRow(AccelerateRows(), key); }},
      {"accelerate.deepspeed_config",
       [](std::string_view key) { return HasRow(DeepSpeedRows(), key); }},
      {"trainer", [](std::string_view key) { return HasRow(TrainerRows(), key); }},
      {"axolotl", [](std::string_view key) { return HasRow(TrainerRows(), key); }},
      {"deepspeed", [](std::string_view key) { return HasRow(DeepSpeedRows(), key); }},
  };
  for (const auto& [name, has_row] : kFrameworks) {
    std::size_t nothing = 0;
    for (const auto& [key, row] : SettingKeys::Of(name).all()) {
      CAPTURE(std::string(name) + ": " + key);
      CHECK(!row.meaning.empty());
      nothing += row.kind == SettingKey::Kind::kNothing ? 1 : 0;
      if (row.kind == SettingKey::Kind::kUsed && row.meaning[0] != '(') {
        CHECK(has_row(row.meaning));
      }
    }
    CHECK(nothing >= 9);
  }
}

// As each framework's files would have it, beside what makes a run of them.
TEST_CASE("Keys: degrees, second models and quantization are refused by their names everywhere") {
  const std::pair<const char*, const char*> kFeatures[] = {
      {"tensor_model_parallel_size: 8", "tensor parallelism"},
      {"tensor_parallel_degree: 2", "tensor parallelism"},
      {"tp_size: 2", "tensor parallelism"},
      {"pipeline_model_parallel_size: 4", "pipeline parallelism"},
      {"pipeline_parallel_size: 2", "pipeline parallelism"},
      {"pp_size: 2", "pipeline parallelism"},
      {"expert_model_parallel_size: 2", "expert parallelism"},
      {"expert_parallel_size: 2", "expert parallelism"},
      {"cp_size: 2", "context parallelism"},
      {"ulysses_degree: 2", "context parallelism"},
      {"ulysses_size: 2", "context parallelism"},
      {"sp_size: 2", "sequence parallelism"},
      {"use_asft_loss: true", "a reference model"},
      {"process_reward_model: true", "a reward head"},
      {"num_labels: 2", "a reward head"},
      {"simpo_gamma: 2", "training on preferences or rewards"},
  };
  for (const auto& [line, feature] : kFeatures) {
    for (const std::string text : {kTrainer, kAxolotl, kAccelerate}) {
      CAPTURE(text + line);
      CHECK(ErrorOf({{"a.yaml", text + line + "\n"}})
                .ends_with(", since " + std::string(feature) + " cannot be predicted"));
    }
    const std::string word(line, std::string(line).find(':'));
    const std::string json = std::string(line).substr(word.size() + 2);
    CHECK(ErrorOf({{"d.json", kDeepSpeed + (", \"" + word + "\": ") + json + "}"}})
              .ends_with(", since " + std::string(feature) + " cannot be predicted"));
    if (word == "tensor_parallel_degree") {
      continue;  // torchtitan's, which is read
    }
    CHECK(ErrorOf({{"t.toml", "[training]\nseq_len = 128\n" + word + " = " + json + "\n"}})
              .ends_with(", since " + std::string(feature) + " cannot be predicted"));
  }
  // Where adapters are read, weights in 4 bits need some.
  for (const auto& [text, what] : {std::pair(kTrainer, "quantized weights without adapters"),
                                   std::pair(kAxolotl, "quantized weights without adapters"),
                                   std::pair(kAccelerate, "weights in 4 bits")}) {
    CHECK(ErrorOf({{"a.yaml", std::string(text) + "load_in_4bit: true\n"}})
              .ends_with(", since " + std::string(what) + " cannot be predicted"));
  }
  // Off is off, at any depth.
  CHECK(ErrorOf({{"a.yaml", std::string(kTrainer) + "tp_size: 1\nmine: {pp_size: 1}\n"}}) ==
        "no error");
  CHECK(ErrorOf({{"a.yaml", std::string(kTrainer) + "mine: {pp_size: 2}\n"}}) ==
        "a.yaml: mine.pp_size: got 2, expected 0 or 1, since pipeline parallelism cannot be "
        "predicted");
  CHECK(ErrorOf({{"a.yaml", std::string(kAxolotl) + "qat: {group_size: 32}\n"}})
            .ends_with(", since quantization-aware training cannot be predicted"));
}

TEST_CASE("Keys: an unknown one with a word of plans refuses, any other is listed") {
  for (const char* word : {"parallel", "size", "degree", "rank", "offload", "quant", "adapter",
                           "optim", "loss", "kernel"}) {
    const std::string key = "my_" + std::string(word) + "_x";
    CAPTURE(key);
    for (const std::string text : {kTrainer, kAxolotl}) {
      CHECK(ErrorOf({{"a.yaml", text + key + ": 7\n"}})
                .starts_with("a.yaml: " + key +
                             ": got 7, expected a known key, since the name of this one says that "
                             "a plan depends on it"));
      CHECK(ErrorOf({{"a.yaml", text + key + ": false\n"}}) == "no error");
    }
  }
  const Folder folder;
  const RunSettings run =
      Read(folder, {{"a.yaml", std::string(kTrainer) + "colour: red\nmy_loss: none\n"}});
  REQUIRE(run.unknown.size() == 2);
  CHECK(run.unknown[0].ends_with("a.yaml: colour"));
}

TEST_CASE("Keys: a dot in a name is no table") {
  const auto deepspeed = [](const std::string& more) {
    return ErrorOf({{"d.json", kDeepSpeed + more + "}"}});
  };
  const std::string error =
      ", expected a table for each dot of this key, which no framework takes apart";
  CHECK(deepspeed(", \"zero_optimization.stage\": 1").ends_with("got 1" + error));
  CHECK(deepspeed(", \"bf16.enabled\": false").ends_with("got false" + error));
  CHECK(deepspeed(", \"\": {\"train_batch_size\": 64}}") != "no error");
  CHECK(ErrorOf({{"t.yaml", std::string(kTrainer) + "fsdp_config.fsdp_version: 1\n"}})
            .ends_with("got 1" + error));
  CHECK(ErrorOf({{"a.yaml", std::string(kAccelerate) + "fsdp_config.fsdp_version: 1\n"}})
            .ends_with("got 1" + error));
  CHECK(ErrorOf({{"t.toml", "[training]\nseq_len = 128\n[\"training.seq_len\"]\nx = 1\n"}}) !=
        "no error");
  // Names of columns and samples have dots as they like.
  CHECK(ErrorOf({{"t.yaml", std::string(kTrainer) + "dataset: {\"a.b\": 1}\n"}}) == "no error");
}

TEST_CASE("Documents: one text, one document") {
  CHECK(ErrorOf({{"d.json", std::string("\0", 1) + kDeepSpeed + "}"}}) ==
        "d.json: got a NUL byte, expected text in UTF-8");
  CHECK(ErrorOf({{"t.yaml", std::string(kTrainer) + std::string("\0", 1)}}) ==
        "t.yaml: got a NUL byte, expected text in UTF-8");
  CHECK(ErrorOf({{"t.yaml", std::string(kTrainer) + "---\nbf16: false\n"}}) ==
        "t.yaml: got 2 YAML documents or more, expected one");
  CHECK(ErrorOf({{"t.yaml", "---\n" + std::string(kTrainer) + "...\n"}}) == "no error");
  // A bracket that nothing opened is no document, and no end of documents.
  CHECK(ErrorOf({{"t.yaml", "&a b]\n\xe4\n"}}) ==
        "t.yaml: got 2 YAML documents or more, expected one");
}

TEST_CASE("Keys: nothing that is said counts as not said") {
  CHECK(ErrorOf({{"t.toml", "[training]\nseq_len = 0\n"}}) ==
        "t.toml: training.seq_len: got 0, expected an integer in [1, 1073741824]");
  CHECK(ErrorOf({{"a.yaml", "distributed_type: MULTI_GPU\nnum_processes: 0\n"}}) ==
        "a.yaml: num_processes: got 0, expected an integer in [1, 16777216]");
  CHECK(
      ErrorOf({{"d.json", R"({"zero_optimization": {"stage": "auto"}, "train_batch_size": 8})"}}) ==
      "d.json: zero_optimization.stage: got \"auto\", expected 0, 1, 2 or 3, since no other file "
      "of the run says it");
  // DeepSpeedPlugin takes stage 2.
  const Files both = {{"t.yaml", std::string(kTrainer) + "deepspeed: d.json\n"},
                      {"d.json", R"({"zero_optimization": {"stage": "auto"}})"}};
  CHECK(Imported(both).plan.dialect == Dialect::kZero2);
  // What nobody fills in.
  CHECK(ErrorOf({{"d.json", R"({"zero_optimization": {"stage": 3, "overlap_comm": "auto"}})"}}) ==
        "d.json: zero_optimization.overlap_comm: got \"auto\", expected a boolean");
}

TEST_CASE("Keys: fsdp_config is a table, a text of one, or a file beside its own") {
  const Folder folder;
  (void)folder.Write("fsdp.json", R"({"transformer_layer_cls_to_wrap": "GPT2Block"})");
  const std::string run =
      "torchrun --nproc-per-node 4 --nnodes 2 train.py --model_name_or_path gpt2 --bf16 True "
      "--per_device_train_batch_size 1 --fsdp \"full_shard auto_wrap\" --fsdp_config ";
  for (const char* config : {"fsdp.json", "elsewhere/fsdp.json",
                             R"('{"transformer_layer_cls_to_wrap": "GPT2Block"}')"}) {
    CAPTURE(std::string(config));
    PlanFile file = Base(2);
    ApplyRun(Read(folder, {{"run.sh", run + config}}), file);
    CHECK(file.plan.dialect == Dialect::kFsdp1);
    CHECK(file.plan.units.size() == 13);
  }
  (void)folder.Write("fsdp.json", R"({}, "output_dir": {})");  // would close the table around it
  CHECK_THROWS(Read(folder, {{"run.sh", run + "fsdp.json"}}));
  (void)folder.Write("fsdp.json", R"({"transformer_layer_cls_to_wrap": "Block"})");
  PlanFile file = Base(2);
  CHECK_THROWS(ApplyRun(Read(folder, {{"run.sh", run + "fsdp.json"}}), file));
}

TEST_CASE("torchtitan: components say what is compiled") {
  const std::string text = "[training]\nseq_len = 128\n[compile]\nenable = true\n";
  const auto kernels = [&](const std::string& more) {
    const Folder folder;
    return FactsOf(Read(folder, {{"t.toml", text + more}})).kernel_set;
  };
  CHECK(kernels("") == "torch-compile");
  CHECK(kernels("components = [\"model\", \"loss\"]\n") == "torch-compile");
  CHECK(kernels("components = [\"model\"]\n") == "torch-compile-2024");
  CHECK(kernels("components = [\"loss\"]\n") == "torch-eager");
  const auto assumed = [&](const std::string& more) {
    const Folder folder;
    std::vector<std::string> keys;
    for (const Assumption& one : Read(folder, {{"t.toml", text + more}}).script.assumed) {
      keys.push_back(one.key + " " + one.value);
    }
    return keys;
  };
  CHECK(assumed("components = [\"model\"]\n").empty());
  CHECK(assumed("components = [\"loss\"]\n") ==
        std::vector<std::string>{"compile.components as nothing compiled, the loss neither"});
}

TEST_CASE("Scripts: heads and losses in chunks, by what files say of their version") {
  const auto facts = [](const std::string& name, const std::string& text) {
    const Folder folder;
    return FactsOf(Read(folder, {{name, text}}));
  };
  const std::string trl =
      "output_dir: o\nmodel_name_or_path: gpt2\nper_device_train_batch_size: 2\n";
  CHECK(facts("t.yaml", trl + "max_length: 1024\n").loss_chunks == 8);  // of 256 rows
  CHECK(facts("t.yaml", trl + "max_length: 1024\nloss_type: nll\n").loss_chunks == 0);
  CHECK(facts("t.yaml", trl + "max_length: 1024\nuse_liger_kernel: true\n").loss_chunks == 0);
  CHECK(facts("t.yaml", trl + "max_seq_length: 1024\npacking: true\n").loss_chunks == 0);  // older
  CHECK(facts("t.yaml", trl + "block_size: 1024\n").loss_chunks == 0);  // the Trainer's own
  const Folder folder;
  const RunSettings run = Read(folder, {{"t.yaml", trl + "max_length: 1024\n"}});
  CHECK(run.script.assumed[0].key == "loss_type");
  CHECK(ErrorOf({{"t.yaml", trl + "max_length: 1024\nloss_type: dft\n"}}) ==
        "t.yaml: loss_type: got \"dft\", expected nll or chunked_nll, since dft training cannot be "
        "predicted");
  const std::string plugin =
      "plugins: [axolotl.integrations.cut_cross_entropy.CutCrossEntropyPlugin]\n";
  const std::string axolotl = std::string(kAxolotl) + "sequence_len: 1024\n";
  CHECK(facts("a.yaml", axolotl + plugin).loss_chunks == 4);
  CHECK(facts("a.yaml", axolotl + plugin + "cut_cross_entropy: false\n").loss_chunks == 0);
  CHECK(facts("a.yaml", axolotl).loss_chunks == 0);
  CHECK(facts("a.yaml", kAxolotl).sequence_length == 512);
  CHECK(ErrorOf({{"a.yaml", axolotl + "plugins: [mine.Plugin]\n"}})
            .ends_with("since the plugin mine.Plugin cannot be predicted"));
  CHECK(ErrorOf({{"a.yaml", axolotl + "chunked_cross_entropy: true\n"}})
            .ends_with("since a cross-entropy in chunks of whole logits cannot be predicted"));
}

TEST_CASE("Scripts: Liger's layers are all or none, its head and loss a switch of their own") {
  const std::string text =
      std::string(kAxolotl) +
      "sequence_len: 1024\nplugins: [axolotl.integrations.liger.LigerPlugin]\n";
  const std::string layers = "liger_rope: true\nliger_rms_norm: true\nliger_glu_activation: true\n";
  const std::string loss = "liger_fused_linear_cross_entropy: true\n";
  const auto facts = [&](const std::string& more) {
    const Folder folder;
    const RunFacts read = FactsOf(Read(folder, {{"a.yaml", text + more}}));
    return std::pair(read.kernel_set, read.loss_chunks);
  };
  CHECK(facts(layers + loss) == std::pair<std::string, std::int64_t>("hf-liger", 16));
  CHECK(facts(layers) == std::pair<std::string, std::int64_t>("hf-liger", 1));
  CHECK(facts(loss) == std::pair<std::string, std::int64_t>("hf-eager", 16));
  CHECK(ErrorOf({{"a.yaml", text + "liger_rms_norm: true\n"}})
            .ends_with("since some of Liger's kernels alone cannot be predicted"));
  CHECK(ErrorOf({{"a.yaml", text + layers + "liger_cross_entropy: true\n"}})
            .ends_with("since Liger's cross-entropy over whole logits cannot be predicted"));
  CHECK(ErrorOf({{"t.yaml", std::string(kTrainer) +
                                "use_liger_kernel: true\nliger_kernel_config: {rope: false}\n"}})
            .ends_with("since some of Liger's kernels alone cannot be predicted"));
}

TEST_CASE("Scripts: a file that may be TRL's is taken for it aloud") {
  const Folder folder;
  const std::string text = "model_name_or_path: gpt2\ndataset_name: a/b\noutput_dir: o\n";
  const RunSettings run = Read(folder, {{"t.yaml", text}});
  CHECK(run.script.assumed[0].key == "script");
  CHECK(run.script.sequence_length == 1024);
  CHECK(run.trainer->bf16 == true);
  const RunSettings clm = Read(folder, {{"c.yaml", text + "dataset_config_name: x\n"}});
  CHECK(!clm.trainer->bf16);
}

TEST_CASE("axolotl: offload beside recomputation, and its mesh") {
  const std::string text = std::string(kAxolotl) + "sequence_len: 128\n";
  for (const char* line : {"gradient_checkpointing: offload", "activation_offloading: true",
                           "gradient_checkpointing: true\nactivation_offloading: legacy"}) {
    CAPTURE(std::string(line));
    const PlanFile file = Imported({{"a.yaml", text + line + "\n"}});
    CHECK(file.plan.offload.activations);
    CHECK(file.plan.recompute.size() == 12);
  }
  CHECK(ErrorOf({{"a.yaml", text + "activation_offloading: disk\n"}}) != "no error");
  CHECK(ErrorOf({{"a.yaml", text + "gradient_checkpointing: unsloth\n"}}) != "no error");
  const std::string fsdp =
      text + "fsdp_version: 2\nfsdp_config: {transformer_layer_cls_to_wrap: GPT2Block}\n";
  const PlanFile mesh = Imported({{"a.yaml", fsdp + "dp_shard_size: 4\n"}});
  CHECK(mesh.plan.shard_size == 4);
  CHECK(mesh.plan.replicate_size == 2);
  CHECK(Imported({{"a.yaml", fsdp + "dp_replicate_size: 4\n"}}).plan.shard_size == 2);
  CHECK(ErrorOf({{"a.yaml", fsdp + "dp_shard_size: 4\ndp_replicate_size: 4\n"}})
            .find("got 4 x 4, expected a product of the 8 GPUs") != std::string::npos);
  CHECK(ErrorOf({{"a.yaml", text + "dp_shard_size: 2\n"}}) ==
        "a.yaml: dp_shard_size: got 2, expected an fsdp_config beside it, as axolotl demands");
}

TEST_CASE("What trains nothing is named") {
  const std::string inference = "model_name_or_path: gpt2\ntemplate: default\n";
  const std::string adapters = "adapter_name_or_path: saves/lora\n";  // refused elsewhere
  const std::string expected =
      " is not read; estimate MODEL CLUSTER --mode forward is about forwards";
  CHECK(ErrorOf({{"i.yaml", inference + adapters + "infer_backend: huggingface\n"}}) ==
        "i.yaml: do_train: got no value, expected true, since inference" + expected);
  CHECK(ErrorOf({{"e.yaml", inference + adapters + "export_dir: out\nexport_size: 5\n"}}) ==
        "e.yaml: do_train: got no value, expected true, since merging of adapters" + expected);
  CHECK(ErrorOf({{"p.yaml", inference + adapters + "do_predict: true\n"}}) ==
        "p.yaml: do_train: got no value, expected true, since evaluation" + expected);
  CHECK(ErrorOf({{"i.yaml", inference + "do_train: false\nlearning_rate: 1.0e-5\n"}})
            .find("do_train: got false") != std::string::npos);
  CHECK(ErrorOf({{"t.yaml", inference + adapters + "do_train: true\n"}})
            .ends_with(", since adapters cannot be predicted"));
}

TEST_CASE("Keys: what is taken for something simpler is said, where it is on") {
  const auto assumed = [](const std::string& line) {
    const Folder folder;
    std::string all;
    for (const auto& [key, value] : Read(folder, {{"a.yaml", line + "\n"}}).script.assumed) {
      all += key + ": " + value + '\n';
    }
    return all;
  };
  const std::string own = ": as transformers' own operations\n";
  const std::string axolotl = std::string(kAxolotl) + "sequence_len: 128\n";
  CHECK(assumed(axolotl + "use_kernels: true").ends_with("use_kernels" + own));
  CHECK(assumed(axolotl + "use_kernels: false").find("use_kernels") == std::string::npos);
  CHECK(assumed(axolotl + "model_config: {output_router_logits: true}")
            .find("model_config.output_router_logits: without the router's loss") !=
        std::string::npos);
  CHECK(assumed(axolotl + "adapter: lora\nlora_r: 8\nlora_mlp_kernel: true")
            .find("lora_mlp_kernel: as PEFT's own operations\n") != std::string::npos);
  CHECK(ErrorOf({{"a.yaml", axolotl + "use_kernel: true\n"}})
            .ends_with("did you mean \"use_kernels\"?"));
  const std::string factory = std::string(kTrainer) + "template: default\ndo_train: true\n";
  CHECK(assumed(factory + "pissa_init: true").find("pissa_init: as LoRA") != std::string::npos);
  CHECK(assumed(factory + "use_v1_kernels: true").find("use_v1") == std::string::npos);
}

}  // namespace
}  // namespace shardwright
