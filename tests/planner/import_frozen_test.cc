// Parts of models that learn: patterns of names, and layers by number.

#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include <doctest/doctest.h>

#include "core/error.h"
#include "core/ranges.h"
#include "models/trainable.h"
#include "planner/importers/read_adapters.h"
#include "planner/importers/run_settings.h"
#include "tests/planner/run_files.h"

namespace shardwright {
namespace {

using Strings = std::vector<std::string>;

using testing::Base;
using testing::ErrorOf;
using testing::Folder;
using testing::Read;

TEST_CASE("Scripts: PEFT's patterns of names as globs") {
  CHECK(GlobsOfPattern("layers.[\\d]+.(mlp|self_attn).(up|q)_proj") ==
        Strings{"layers.*.mlp.up_proj", "layers.*.mlp.q_proj", "layers.*.self_attn.up_proj",
                "layers.*.self_attn.q_proj"});
  CHECK(GlobsOfPattern(R"(.*\.layers\.(3|7)\.x)") == Strings{"*.layers.3.x", "*.layers.7.x"});
  CHECK(GlobsOfPattern(R"(a.\d+.(_wrapped.)?b|^c$)") == Strings{"a.*._wrapped.b", "a.*.b", "c"});
  CHECK(GlobsOfPattern("x4[4-5]") == Strings{"x44", "x45"});
  CHECK(GlobsOfPattern("x4[4-5]+") == Strings{"x44", "x45", "x444", "x445", "x454", "x455"});
  CHECK(GlobsOfPattern("x[1-1]*y") == Strings{"x1y", "x11y", "xy"});
  CHECK(GlobsOfPattern(R"(x\d)").size() == 10);
  CHECK(GlobsOfPattern(R"(x\d+)").size() == 10 + 100);
  CHECK(GlobsOfPattern("(?:a|(b|c)d)") == Strings{"a", "bd", "cd"});
  for (const char* pattern : {"a{2}", "(a", "a)", "ab*", "[ab]", "(a|b)+", "(?!x)a"}) {
    CAPTURE(std::string(pattern));
    CHECK(GlobsOfPattern(pattern).empty());
  }
  std::string many;
  for (int i = 0; i < 13; ++i) {
    many += "(a|b)";
  }
  CHECK(GlobsOfPattern(many).empty());  // 8,192
}

TEST_CASE("axolotl: parameters frozen by patterns of names") {
  const std::string text = "base_model: gpt2\nmicro_batch_size: 2\nunfrozen_parameters:\n";
  const auto frozen = [&](const std::string& list) {
    const Folder folder;
    PlanFile file = Base(2);
    file.model = LoadModelForJob("llama-3-8b", file.job, Path("test"));
    ApplyRun(Read(folder, {{"a.yaml", text + list}}), file);
    std::int64_t learning = 0;
    for (const Parameter& param : file.model.params) {
      learning += param.trainable ? 1 : 0;
    }
    return std::pair(file.job.frozen, learning);
  };
  // 3 of 9 parameters of each layer learn, and the head; of layers that are frozen one name is
  // left.
  CHECK(frozen("- model.layers.1.mlp\n- ^lm_head.weight$\n").second == 4);
  const Strings others = frozen("- model.layers.1.mlp\n- ^lm_head.weight$\n").first;
  CHECK(others.front() == "model.embed_tokens.*");
  CHECK(IsIn(others, std::string("model.layers.0.*")));
  CHECK(IsIn(others, std::string("model.layers.1.self_attn.*")));
  CHECK(frozen("- ^model.language_model.*\n- lm_head\n").first.empty());
  CHECK(frozen("- model.layers.(0|1)\n").second == 9 + 11 * 9);  // 0, 1, and 10 to 19
  CHECK(frozen("- model.layers.1.self_attn.(q|k)_proj\n- embed_tokens\n").second == 2);
  CHECK(frozen("- model.layers.[0-9]+.mlp.up_proj.weight$\n").second == 32);
  CHECK(frozen("- model.layers..+.mlp.up_proj\n").second == 32);
  CHECK(frozen("- model.layers.[4-6].mlp\n").second == 3 * 3);
  // 10 to 19, and not layer 1; 20 to 24; 22 to 24, which "[2-4]" has as one digit.
  CHECK(frozen("- model.layers.1[0-9]+.mlp.up_proj\n").second == 10);
  CHECK(frozen("- model.layers.2[0-4]+.mlp.up_proj\n").second == 5);
  CHECK(frozen("- model.layers.2[2-4].mlp.up_proj\n- model.layers.2[3-4].mlp.up_proj\n").second ==
        3);
  // Rows learn by zeros in the gradients of the others: the whole tensor has states.
  CHECK(frozen("- lm_head.weight$[:32000]\n").second == 1);
  CHECK(frozen("- lm_head[7]\n- model.norm[2:]\n").second == 2);
  for (const char* list : {"- model.layers.99\n", "- embed_tokens\n"}) {  // no name begins so
    CHECK_THROWS_WITH_AS((void)frozen(list),
                         doctest::Contains("expected a pattern of names of parameters of"),
                         InputError);
  }
  for (const char* list : {"- model.layers.[4-9a]\n", "- model.layers.[9-4]\n", "- lm_head[x]\n",
                           "- layers.(1\n", "- model.*.mlp\n"}) {
    CHECK(ErrorOf({{"a.yaml", text + list}})
              .ends_with("parameters frozen by such patterns cannot be predicted"));
  }
  const std::string adapter = "- ^model.language_model.*\nadapter: lora\nlora_r: 8\n";
  CHECK(ErrorOf({{"a.yaml", text + adapter}}).find("nothing would learn") != std::string::npos);
}

// Of Llama 3's 32 layers of 9 parameters. LLaMA-Factory takes parts of names.
TEST_CASE("LLaMA-Factory: the last layers learn, or the first ones") {
  const std::string text = "model_name_or_path: m\nfinetuning_type: freeze\ndo_train: true\n";
  const auto applied = [](const std::string& settings) {
    const Folder folder;
    PlanFile file = Base(2);
    file.model = LoadModelForJob("llama-3-8b", file.job, Path("test"));
    ApplyRun(Read(folder, {{"a.yaml", settings}}), file);
    return file;
  };
  const auto learning = [&](const std::string& more) {
    Strings names;
    for (const Parameter& param : applied(text + more).model.params) {
      if (param.trainable) {
        names.push_back(param.fqn);
      }
    }
    return names;
  };
  const Strings last = learning("");
  CHECK(last.size() == 2 * 9);
  CHECK(last.front().starts_with("model.layers.30."));
  CHECK(learning("freeze_trainable_layers: 3\n").size() == 3 * 9);
  const Strings first = learning("freeze_trainable_layers: -1\nfreeze_trainable_modules: mlp\n");
  CHECK(first == Strings{"model.layers.0.mlp.gate_proj.weight", "model.layers.0.mlp.up_proj.weight",
                         "model.layers.0.mlp.down_proj.weight"});
  CHECK(learning("freeze_trainable_modules: mlp,self_attn\nfreeze_extra_modules: norm, lm_head\n")
            .size() == 2 * 9 + 30 * 2 + 2);  // "norm" is a part of each layer's two
  CHECK(learning("freeze_trainable_layers: 99\n").size() == 32 * 9);
  // What learns is upcast, the rest stays as it was loaded.
  const PlanFile ddp = applied(text + "bf16: true\n");
  CHECK(ddp.plan.dialect == Dialect::kDdp);
  CHECK(ddp.job.precision == Precision{DType::kFp32, DType::kBf16, DType::kFp32});
  CHECK(ddp.job.frozen_format == FrozenFormat::kParam);
  CHECK(ddp.job.frozen.front() == "model.embed_tokens.*");
  const PlanFile bf16 = applied(text + "bf16: true\npure_bf16: true\n");
  CHECK(bf16.job.precision == Precision{DType::kBf16, DType::kBf16, DType::kBf16});
  CHECK_THROWS_WITH_AS((void)applied(text + "freeze_trainable_modules: mpl\n"),
                       doctest::Contains("what learns: got \"mpl\""), InputError);
  const PlanFile v1 = applied(
      "model: m\nmodel_class: llm\ndist_config: {name: fsdp2}\npeft_config: {name: freeze, "
      "freeze_trainable_layers: 1, freeze_extra_modules: [lm_head]}\n");
  CHECK(v1.job.frozen.size() == 1 + 31 + 1);  // the embedding, 31 layers and the norm
  CHECK(v1.job.precision == Precision{DType::kFp32, DType::kBf16, DType::kFp32});
  CHECK(v1.job.frozen_format == FrozenFormat::kParam);
}

}  // namespace
}  // namespace shardwright
