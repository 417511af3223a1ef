#include "models/loader.h"

#include <cstdint>
#include <fstream>
#include <string>
#include <vector>

#include <doctest/doctest.h>
#include <nlohmann/json.hpp>

#include "core/error.h"
#include "core/json.h"
#include "models/model.h"

namespace shardwright {
namespace {

std::string ErrorOf(const std::string& spec, const LoadOptions& options = {}) {
  try {
    (void)LoadModel(spec, options);
  } catch (const InputError& e) {
    return e.what();
  }
  return "loaded";
}

Model FromText(const std::string& text, const LoadOptions& options = {}) {
  return ModelFromJson(JsonValue::Parse(text, "config.json"), "test", options);
}

TEST_CASE("Loader.FindsFilesFoldersAndZooNames") {
  // 2 * 96 * 16 + 2 * (2*16*16 + 2*16*8 + 3*16*40 + 2*16) + 16, by hand.
  constexpr std::int64_t kTiny = 2 * 96 * 16 + 2 * (512 + 256 + 1920 + 32) + 16;
  const Model folder = LoadModel("data/models/tiny-llama");
  CHECK(CountParameters(folder) == kTiny);
  CHECK(folder.name == "tiny-llama");
  CHECK(folder.type == "llama");
  CHECK(folder.sequence_length == 64);
  const Model file = LoadModel("data/models/tiny-llama/config.json");
  CHECK(CountParameters(file) == kTiny);
  CHECK(file.name == "tiny-llama");
  CHECK(LoadModel("gpt2").name == "gpt2");
  CHECK(LoadModel("data/models/tiny-encoder.json").name == "tiny-encoder");
}

// The hub's names of models whose config.json has the zoo's sizes.
TEST_CASE("Loader.NamesAsTheHubWritesThem") {
  for (const auto& row : std::vector<std::pair<const char*, const char*>>{
           {"meta-llama/Llama-3.1-8B-Instruct", "llama-3.1-8b"},
           {"meta-llama/Llama-3.3-70B-Instruct", "llama-3.1-70b"},
           {"meta-llama/Meta-Llama-3-8B", "llama-3-8b"},
           {"meta-llama/Llama-2-7b-chat-hf", "llama-2-7b"},
           {"Qwen/Qwen3-8B", "qwen3-8b"},
           {"Qwen/Qwen2.5-7B-Instruct", "qwen2.5-7b"},
           {"google/gemma-2-9b-it", "gemma-2-9b"},
           {"mistralai/Mistral-7B-v0.1", "mistral-7b"},
           {"mistralai/Mistral-7B-Instruct-v0.3", "mistral-7b-v0.3"},
           {"mistralai/Mixtral-8x7B-Instruct-v0.1", "mixtral-8x7b"},
           {"deepseek-ai/DeepSeek-R1", "deepseek-v3"},
           {"deepseek-ai/DeepSeek-R1-Distill-Llama-8B", "llama-3.1-8b"},
           {"deepseek-ai/DeepSeek-R1-Distill-Qwen-7B", "qwen2.5-7b"},
           {"deepseek-ai/DeepSeek-R1-Distill-Qwen-1.5B", ""},  // its head is not tied
           {"Qwen/Qwen2.5-Coder-32B-Instruct", "qwen2.5-32b"},
           {"Qwen/Qwen2.5-Math-7B", "qwen2.5-7b"},
           {"Qwen/QwQ-32B", "qwen2.5-32b"},
           {"Qwen/Qwen3-4B-Thinking-2507", "qwen3-4b"},
           {"Qwen/Qwen3-Coder-30B-A3B-Instruct", "qwen3-30b-a3b"},
           {"Qwen/Qwen3-235B-A22B-Instruct-2507", "qwen3-235b-a22b"},
           {"EleutherAI/pythia-2.8b-deduped", "pythia-2.8b"},
           {"lmsys/vicuna-7b-v1.5", "llama-2-7b"},
           {"nvidia/Llama-3.1-Nemotron-70B-Instruct-HF", "llama-3.1-70b"},
           {"mistralai/Mistral-7B-Instruct-v0.2", ""},  // it has no window
           {"openai/gpt-oss-20b", "gpt-oss-20b"},
           {"google/gemma-3-27b-it", "gemma-3-27b"},
           {"mistralai/Mistral-Nemo-Instruct-2407", "mistral-nemo-12b"},
           {"mistralai/Mistral-Small-24B-Base-2501", "mistral-small-24b"},
           {"allenai/OLMo-2-1124-7B-Instruct", "olmo-2-7b"},
           {"HuggingFaceTB/SmolLM3-3B-Base", "smollm3-3b"},
           {"TinyLlama/TinyLlama-1.1B-Chat-v1.0", "tinyllama-1.1b"},
           {"zai-org/GLM-4-9B-0414", "glm-4-9b-0414"},
           {"llama3.1-8b", "llama-3.1-8b"},
           {"qwen-2.5-7b-instruct", "qwen2.5-7b"},
           {"phi4", "phi-4"},
           {"llama-27b", ""},
           {"google-bert/bert-base-uncased", "bert-base-uncased"},
           {"microsoft/Phi-3-mini-4k-instruct", "phi-3-mini-4k"},
           {"GPT2", "gpt2"}}) {
    const std::string spelled = row.first;
    CAPTURE(spelled);
    CHECK(ZooModelOf(spelled) == row.second);
    if (*row.second != '\0') {
      CHECK(ModelFile(spelled).empty());
    }
  }
  const Model model = LoadModel("Qwen/Qwen3-0.6B");
  CHECK(model.name == "qwen3-0.6b");
  CHECK(model.warnings.back() == "model Qwen/Qwen3-0.6B is taken as qwen3-0.6b of the zoo");
  for (const char* spelled : {"acme/Large-9B", "Qwen/Qwen2.5-VL-7B-Instruct", "instruct", "a/b", "",
                              "meta-llama/Llama-3.2-11B-Vision", "Qwen/Qwen3-8B-FP8"}) {
    CAPTURE(std::string(spelled));
    CHECK(ZooModelOf(spelled).empty());
  }
}

TEST_CASE("Loader.ErrorsOfNamesThatAreNothing") {
  CHECK(ErrorOf("llama-3-80b") ==
        "model: got \"llama-3-80b\", expected a zoo name (shardwright list models), a config.json, "
        "a folder with one, or a model.json; did you mean \"llama-3-70b\"?");
  for (const auto& [spelled, meant] : {std::pair{"lama-3-8b", "llama-3-8b"},
                                       {"qwen3-31b", "qwen3-32b"},
                                       {"qwen3.5-27b", ""},  // another generation is another model
                                       {"gemma-4-27b", ""},
                                       {"gpt22", "gpt2"}}) {
    CAPTURE(std::string(spelled));
    const std::string said = ErrorOf(spelled);
    CHECK((*meant == '\0' ? said.find("did you mean") == std::string::npos
                          : said.ends_with("did you mean \"" + std::string(meant) + "\"?")));
  }
  CHECK(ErrorOf("acme/Large-9B") ==
        "model: got \"acme/Large-9B\", which is no file here but looks like a hub id, "
        "expected a local file or a zoo name; download its configuration with: hf "
        "download acme/Large-9B config.json --local-dir Large-9B");
  CHECK(ErrorOf("data/models/none.json") ==
        "data/models/none.json: got no such file, expected a config.json or a model.json");
  CHECK(ErrorOf("data/models") == "data/models/config.json: got no such file, expected a file");
}

TEST_CASE("Loader.AbsentKeysTakeTheDefaultsOfTheirClass") {
  // Transformers' LlamaConfig() is Llama-2-7B; Gemma ties its embedding, Llama does not.
  CHECK(CountParameters(FromText(R"({"model_type": "llama"})")) == 6738415616);
  CHECK(CountParameters(FromText(R"({"model_type": "gpt2"})")) == 124439808);
  CHECK(CountParameters(FromText(R"({"model_type": "bert"})")) == 109482240);
  CHECK(CountParameters(FromText(R"({"model_type": "t5"})")) == 60506624);
  CHECK(CountParameters(FromText(R"({"model_type": "mixtral"})")) == 46702792704);
  CHECK(CountParameters(FromText(R"({"model_type": "deepseek_v3"})")) == 671026404352);
  CHECK(CountParameters(FromText(R"({"model_type": "gemma2"})")) == 2614341888);
  CHECK(CountParameters(FromText(R"({"model_type": "gpt_neox"})")) == 20554567680);
  CHECK(CountParameters(FromText(R"({"model_type": "opt"})")) == 125239296);
  CHECK(CountParameters(FromText(R"({"model_type": "gemma3_text", "vocab_size": 262144,
      "hidden_size": 1152, "intermediate_size": 6912, "num_attention_heads": 4,
      "num_key_value_heads": 1})")) == 999885952);
}

TEST_CASE("Loader.AliasesAndNullsAreUnderstood") {
  // A null n_inner means 4 * n_embd; hidden_size is n_embd.
  const Model gpt2 = FromText(R"({"model_type": "gpt2", "hidden_size": 64, "num_hidden_layers": 1,
      "num_attention_heads": 4, "n_inner": null})");
  CHECK(CountParameters(gpt2) == (50257 + 1024) * 64 + 12 * 64 * 64 + 13 * 64 + 2 * 64);
  // Null key/value heads mean as many as heads.
  const Model llama = FromText(R"({"model_type": "llama", "num_key_value_heads": null})");
  CHECK(CountParameters(llama) == 6738415616);
  // Gemma's files write hidden_activation null for its default.
  CHECK_NOTHROW((void)FromText(R"({"model_type": "gemma", "hidden_activation": null})"));
  // num_experts and num_local_experts are one key.
  const Model moe = FromText(R"({"model_type": "mixtral", "num_experts": 4})");
  CHECK(CountParameters(moe) == 46702792704 - 32L * 4 * (3L * 4096 * 14336 + 4096));
}

TEST_CASE("Loader.AGeluIsWrittenAsTransformersWritesIt") {
  const auto code_of = [](const std::string& config) {
    const Model model = FromText(config);
    for (const ModelOp& op : model.ops) {
      const OpSpec& spec = model.SpecOf(op);
      if (spec.activation == Activation::kGeluTanh) {
        return spec.gelu_code;
      }
    }
    throw InputError(config, "no GELU", "one");
  };
  const std::string small = R"(, "num_hidden_layers": 1)";
  const std::string gpt = R"({"model_type": "gpt2", "activation_function": ")";
  CHECK(code_of(gpt + "gelu_new\"" + small + "}") == GeluCode::kNew);
  CHECK(code_of(gpt + "gelu_fast\"" + small + "}") == GeluCode::kFast);
  CHECK(code_of(gpt + "gelu_pytorch_tanh\"" + small + "}") == GeluCode::kOneOperator);
  CHECK(code_of(R"({"model_type": "t5", "feed_forward_proj": "gated-gelu", "num_layers": 1})") ==
        GeluCode::kNew);
  CHECK(code_of(R"({"model_type": "gemma")" + small + "}") == GeluCode::kOneOperator);
  // By templates.
  CHECK(code_of(R"({"model_type": "phi")" + small + "}") == GeluCode::kNew);
  CHECK(code_of(R"({"model_type": "starcoder2")" + small + "}") == GeluCode::kOneOperator);
}

TEST_CASE("Loader.BiasesFollowTheConfig") {
  const std::int64_t plain = 6738415616;
  CHECK(CountParameters(FromText(R"({"model_type": "llama", "attention_bias": true})")) ==
        plain + 32 * 4 * 4096);
  CHECK(CountParameters(FromText(R"({"model_type": "llama", "mlp_bias": true})")) ==
        plain + 32 * (2 * 11008 + 4096));
  // Qwen3-MoE: every second layer sparse, layer 1 dense after all.
  const std::string config = R"({"model_type": "qwen3_moe", "num_hidden_layers": 4,
      "decoder_sparse_step": 2, "mlp_only_layers": [1]})";
  std::size_t routers = 0;
  const Model moe = FromText(config);
  for (const ModelOp& op : moe.ops) {
    routers += moe.SpecOf(op).kind == OpKind::kRouter ? 1 : 0;
  }
  CHECK(routers == 1);
}

TEST_CASE("Loader.SequenceLengthDefaultsAndLimits") {
  CHECK(LoadModel("llama-3.1-8b").sequence_length == 2048);
  CHECK(LoadModel("gpt2").sequence_length == 1024);
  CHECK(LoadModel("llama-3-8b", {.sequence_length = 16384}).sequence_length == 16384);
  CHECK(LoadModel("t5-small").tokens_per_sample == 2 * 512);
  CHECK(LoadModel("vit-b-16").tokens_per_sample == 1);
  CHECK(ErrorOf("gpt2", {.sequence_length = 1025}) ==
        "models/zoo/gpt2.json: n_positions: got 1024 learned positions, expected at least the "
        "sequence length 1025");
  CHECK(ErrorOf("opt-125m", {.sequence_length = 4096}) ==
        "models/zoo/opt-125m.json: max_position_embeddings: got 2048 learned positions, expected "
        "at least the sequence length 4096");
  CHECK(ErrorOf("llama-3-8b", {.sequence_length = -1}) ==
        "sequence length: got -1, expected 1 to 16777216");
  CHECK(ErrorOf("vit-b-16", {.image_size = 384}) ==
        "models/zoo/vit-b-16.json: image_size: got 224, expected the wanted image size 384; the "
        "position table fixes the image size; change it in the file");
}

TEST_CASE("Loader.ImageSizeOfAConvNetIsFree") {
  const Model small = LoadModel("regnet-y-16gf", {.image_size = 128});
  CHECK(CountParameters(small) == 83590140);
  CHECK(ConventionFlopsPerSample(small).value <
        0.4 * ConventionFlopsPerSample(LoadModel("regnet-y-16gf")).value);
}

TEST_CASE("Loader.HeadsOfBertAndViT") {
  const auto last_kind = [](const Model& model) { return model.SpecOf(model.ops.back()).kind; };
  CHECK(last_kind(LoadModel("bert-base")) == OpKind::kActivation);
  // BertForMaskedLM calls CrossEntropyLoss on its bf16 logits: no fp32 copy, as LlamaForCausalLM
  // has.
  CHECK(last_kind(LoadModel("bert-base-uncased")) == OpKind::kNllLoss);
  const Model classifier = FromText(
      R"({"model_type": "bert", "architectures": ["BertForSequenceClassification"], "num_labels": 3})");
  CHECK(CountParameters(classifier) == 109482240 + 3 * 768 + 3);
  CHECK(last_kind(classifier) == OpKind::kNllLoss);
  const Model other = FromText(R"({"model_type": "bert", "architectures": ["BertForTokens"]})");
  REQUIRE(other.warnings.size() == 1);
  CHECK(other.warnings[0] ==
        "config.json: BertForTokens is built as BertModel; shardwright export writes the class "
        "itself");
  const Model labelled =
      FromText(R"({"model_type": "vit", "id2label": {"0": "cat", "1": "dog", "2": "owl"}})");
  CHECK(labelled.params.back().fqn == "classifier.bias");
  CHECK(labelled.params.back().shape == std::vector<std::int64_t>{3});
}

TEST_CASE("Loader.AMisspeltKeyIsNamed") {
  const Model model = FromText(
      R"({"model_type": "llama", "hiden_size": 512, "num_attention_heads": 32, "my_own_key": 1,
          "num_hidden_layer": 2, "hidden_act": "silu"})");
  CHECK(model.warnings ==
        std::vector<std::string>{
            "config.json: hiden_size is not read; did you mean \"hidden_size\"?",
            "config.json: num_hidden_layer is not read; did you mean \"num_hidden_layers\"?"});
  for (const std::string& name : ZooNames()) {
    CAPTURE(name);
    for (const std::string& warning : LoadModel(name).warnings) {
      CHECK(warning.find("did you mean") == std::string::npos);
    }
  }
}

TEST_CASE("Loader.NestedTextConfigBuildsTheLanguageModelAndSaysSo") {
  const Model model = LoadModel("gemma-3-4b");
  CHECK(model.type == "gemma3_text");
  REQUIRE(model.warnings.size() == 1);
  CHECK(model.warnings[0] ==
        "models/zoo/gemma-3-4b.json: gemma3 also has a vision tower; only its language model is "
        "built, under the names of the text-only class");
}

TEST_CASE("Loader.ANewDecoderTypeIsOneTableRow") {
  // By hand: 40 * (2*2048*2048 + 2*2048*512 + 3*2048*8192 + 2*2048) + 49155*2048 + 2048.
  const LoadOptions options{.model_types_file = "data/model_types/granite.json"};
  const Model model = LoadModel("data/models/granite-3.0-2b.json", options);
  CHECK(CountParameters(model) == 2533531648);
  CHECK(model.block_classes == std::vector<std::string>{"GraniteDecoderLayer"});
  CHECK(model.type == "granite");
  // The program's own row is a template, which says the same.
  const Model own = LoadModel("data/models/granite-3.0-2b.json");
  CHECK(CountParameters(own) == 2533531648);
  CHECK(own.block_classes == std::vector<std::string>{"GraniteDecoderLayer"});
}

// The whole error line of each bad file.
TEST_CASE("Loader.BadFilesGetOneClearLine") {
  struct Bad {
    const char* file;
    const char* error;
  };
  const Bad bad[] = {
      {"huge_layers", "num_hidden_layers: got 1e+30, expected an integer from 1 to 10000"},
      {"many_layers", "num_hidden_layers: got 10001, expected an integer from 1 to 10000"},
      {"negative_hidden", "hidden_size: got -64, expected an integer from 1 to 4194304"},
      {"text_size", "hidden_size: got \"64\", expected an integer from 1 to 4194304"},
      {"null_hidden", "hidden_size: got no value, expected an integer from 1 to 4194304"},
      {"uneven_heads", "hidden_size: got 66, expected a multiple of num_attention_heads (4)"},
      {"uneven_kv_heads",
       "num_attention_heads: got 4, expected a multiple of num_key_value_heads (3)"},
      {"huge_table",
       "got a parameter model.embed_tokens.weight of shape [268435456, 1048576], expected positive "
       "sizes and at most 2^40 elements"},
      {"many_experts",
       "num_experts: got 4096 experts in each of 10000 layers, expected at most 1048576 expert "
       "matrices in all"},
      {"no_type", "got no key \"model_type\", expected one"},
      {"no_text_config", "got no key \"text_config\", expected one"},
      {"not_object", "got [1,2], expected an object"},
      {"bad_activation",
       "hidden_act: got \"sillu\", expected one of \"silu\", \"swish\", \"gelu\", \"gelu_python\", "
       "\"gelu_new\", \"gelu_fast\", \"gelu_accurate\", \"gelu_pytorch_tanh\", \"relu\", \"tanh\", "
       "\"sigmoid\"; did "
       "you mean \"silu\"?"},
      {"bad_dropout",
       "resid_pdrop: got 1.5, expected a probability from 0 up to, but not including, 1"},
      {"layer_types", "layer_types: got 1 layer types, expected 2, one per layer"},
      {"vit_patch", "patch_size: got 32, expected an integer from 1 to 16"},
      {"mpt_attention",
       "attn_config.attn_type: got \"sparse\", expected one of \"multihead_attention\", "
       "\"multiquery_attention\", \"grouped_query_attention\""},
      {"t5_projection",
       "feed_forward_proj: got \"gated-relu\", expected one of \"relu\", \"gelu\", "
       "\"gated-gelu\", \"gated-silu\""},
  };
  for (const Bad& b : bad) {
    CAPTURE(b.file);
    const std::string file = "data/bad_models/" + std::string(b.file) + ".json";
    CHECK(ErrorOf(file) == file + ": " + b.error);
  }
  CHECK(ErrorOf("data/bad_models/truncated.json") ==
        "data/bad_models/truncated.json:1:43: got end of input, expected string literal");
  CHECK(ErrorOf("data/bad_models/double_key.json") ==
        "data/bad_models/double_key.json:1:56: got the key \"hidden_size\" a second time, expected "
        "each key once in an object");
  CHECK(ErrorOf("data/bad_models/unknown_type.json") ==
        "data/bad_models/unknown_type.json: model_type: got \"lama\", expected one of 81 "
        "known types, or the model.json that \"shardwright export "
        "data/bad_models/unknown_type.json --seq 2048 -o model.json\" writes (of images: "
        "--image 224); did you mean \"llama\"?");
}

// A template reads no other key than its row's, under its own name here, and a few that all read.
bool ReadsKey(const nlohmann::json& row, const std::string& key) {
  const nlohmann::json& known = row.at("defaults");
  return known.contains(key) ||
         (known.contains("text_config") && known.at("text_config").contains(key)) ||
         key == "architectures" || key == "id2label" || key == "rope_parameters";
}

// Every key of one config per type, replaced by values of every kind: the loader either builds a
// valid model or throws InputError, and never allocates for absurd sizes.
TEST_CASE("Loader.MutatedConfigsLoadOrFailCleanly") {
  const std::vector<std::string> values = {"null",  "-1",  "0",       "1",        "3",
                                           "1e30",  "0.5", "true",    "{}",       "[]",
                                           "\"x\"", "[1]", "4194304", "268435456"};
  std::size_t loaded = 0;
  std::size_t refused = 0;
  const std::vector<std::string> none;
  std::ifstream table("../models/model_types.json");
  const nlohmann::json rows = nlohmann::json::parse(table).at("types");
  for (const auto& [type, row] : rows.items()) {
    if (type == "gemma3") {
      continue;
    }
    const std::string base = "{\"model_type\": \"" + type +
                             "\", \"num_hidden_layers\": 2, \"vision_config\": {\"depth\": 1, "
                             "\"num_hidden_layers\": 1}";
    for (const char* key : {"vocab_size",
                            "hidden_size",
                            "intermediate_size",
                            "num_attention_heads",
                            "num_key_value_heads",
                            "head_dim",
                            "hidden_act",
                            "activation_function",
                            "max_position_embeddings",
                            "attention_bias",
                            "sliding_window",
                            "layer_types",
                            "num_local_experts",
                            "num_experts_per_tok",
                            "moe_intermediate_size",
                            "mlp_only_layers",
                            "decoder_sparse_step",
                            "q_lora_rank",
                            "partial_rotary_factor",
                            "rotary_pct",
                            "rope_parameters",
                            "resid_pdrop",
                            "kv_lora_rank",
                            "tie_word_embeddings",
                            "attn_config",
                            "expansion_ratio",
                            "num_decoder_layers",
                            "architectures",
                            "id2label",
                            "image_size",
                            "patch_size",
                            "num_labels",
                            "word_embed_proj_dim",
                            "attention_dropout"}) {
      for (const std::string& value : ReadsKey(row, key) ? values : none) {
        const std::string text = base + ", \"" + key + "\": " + value + "}";
        CAPTURE(text);
        try {
          // The longest sequence that any model accepts, so that products of sizes are largest.
          const bool is_long = value == "4194304";
          const Model model = FromText(text, {.sequence_length = is_long ? 16777216 : 0});
          ValidateModel(model, "mutant");
          ++loaded;
        } catch (const InputError& e) {
          CHECK(std::string(e.what()).find(": got ") != std::string::npos);
          ++refused;
        }
      }
    }
  }
  // Both happen: neither a loader that refuses all nor one that checks nothing passes.
  CHECK(loaded > 1000);
  CHECK(refused > 1000);
}

}  // namespace
}  // namespace shardwright
