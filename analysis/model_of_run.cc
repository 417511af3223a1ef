#include "analysis/model_of_run.h"

#include <cctype>
#include <cmath>

#include <nlohmann/json.hpp>

#include "core/error.h"
#include "core/json.h"
#include "core/text.h"
#include "models/loader.h"
#include "models/model.h"

namespace shardwright {
namespace {

using Json = nlohmann::ordered_json;

// Decoders with gated MLPs and rotary positions.
Json LlamaConfig(const MeasuredRun& run) {
  const std::string name = LowerCase(run.model_name);
  Json json;
  json["model_type"] = Contains(name, "qwen3")   ? "qwen3"
                       : Contains(name, "qwen2") ? "qwen2"
                                                 : "llama";
  json["vocab_size"] = run.vocabulary;
  json["hidden_size"] = run.hidden;
  json["intermediate_size"] = run.ffn_hidden;
  json["num_hidden_layers"] = run.layers;
  json["num_attention_heads"] = run.heads;
  json["num_key_value_heads"] = run.kv_heads > 0 ? run.kv_heads : run.heads;
  json["max_position_embeddings"] = run.sequence_length;
  json["tie_word_embeddings"] = run.tied_embedding == "y";
  if (json["model_type"] == "llama" && run.hidden % run.heads != 0) {
    throw InputError("hidden", std::to_string(run.hidden), "a multiple of n_heads");
  }
  return json;
}

Json MptConfig(const MeasuredRun& run) {
  if (run.ffn_hidden % run.hidden != 0) {
    throw InputError("ffn_hidden", std::to_string(run.ffn_hidden), "a multiple of hidden");
  }
  Json json;
  json["model_type"] = "mpt";
  json["vocab_size"] = run.vocabulary;
  json["d_model"] = run.hidden;
  json["n_layers"] = run.layers;
  json["n_heads"] = run.heads;
  json["expansion_ratio"] = run.ffn_hidden / run.hidden;
  json["max_seq_len"] = run.sequence_length;
  json["no_bias"] = false;
  json["attn_config"] = {{"attn_type", "multihead_attention"}, {"alibi", false}};
  return json;
}

Json Gpt2Config(const MeasuredRun& run, const std::string& activation, const Stack& stack) {
  Json json;
  json["model_type"] = "gpt2";
  json["vocab_size"] = run.vocabulary;
  json["n_positions"] = run.sequence_length;
  json["n_embd"] = run.hidden;
  json["n_layer"] = run.layers;
  json["n_head"] = run.heads;
  json["n_inner"] = run.ffn_hidden;
  json["activation_function"] = activation;
  json["resid_pdrop"] = stack.dropout;
  json["embd_pdrop"] = stack.dropout;
  json["attn_pdrop"] = stack.dropout;
  json["tie_word_embeddings"] =
      run.tied_embedding.empty() ? !stack.has_own_head : run.tied_embedding != "n";
  return json;
}

Json MixtralConfig(const MeasuredRun& run) {
  Json json = LlamaConfig(run);
  json["model_type"] = "mixtral";
  json["num_local_experts"] = 8;
  json["num_experts_per_tok"] = 2;
  return json;
}

Json ConfigOf(const MeasuredRun& run, const Stack& stack, std::vector<std::string>& notes) {
  if (run.ffn_kind == "swiglu" || run.ffn_kind == "geglu") {
    return LlamaConfig(run);
  }
  if (run.ffn_kind == "gelu") {
    return Contains(run.framework, "llm-foundry") ? MptConfig(run) : Gpt2Config(run, "gelu", stack);
  }
  if (run.ffn_kind == "relu" || run.ffn_kind == "relu^2") {
    if (run.ffn_kind != "relu") {
      notes.push_back("ffn_kind " + run.ffn_kind + " taken as a GPT-2 block with relu");
    }
    return Gpt2Config(run, "relu", stack);
  }
  if (run.ffn_kind == "moe-swiglu 8 experts top2") {
    return MixtralConfig(run);
  }
  throw InputError("ffn_kind", '"' + run.ffn_kind + '"',
                   "swiglu, geglu, gelu, relu, relu^2 or moe-swiglu 8 experts top2");
}

// "Llama3.2-3B" and the zoo's "llama-3.2-3b" are the same letters and digits.
std::string Letters(const std::string& text) {
  std::string letters;
  for (const char c : LowerCase(text)) {
    if (std::isalnum(static_cast<unsigned char>(c)) != 0 || c == '.') {
      letters += c;
    }
  }
  return letters;
}

std::string ZooNameOf(const std::string& model_name) {
  const std::string wanted = Letters(model_name.substr(0, model_name.find(" (")));
  for (const std::string& name : ZooNames()) {
    if (Letters(name) == wanted) {
      return name;
    }
  }
  throw InputError("model_name", '"' + model_name + '"',
                   "dimensions in n_layers, hidden, n_heads and ffn_hidden, or a model of the zoo");
}

// The row's own count tells whether the columns describe the whole model.
void CompareCounts(const MeasuredRun& run, const Model& model, std::vector<std::string>& notes) {
  constexpr double kSame = 0.02;
  const auto built = static_cast<double>(CountParameters(model));
  const auto given = static_cast<double>(run.parameters);
  if (run.parameters > 0 && std::abs(built / given - 1) > kSame) {
    notes.push_back("the model built has " + std::to_string(CountParameters(model)) +
                    " parameters, the row says " + std::to_string(run.parameters));
  }
}

}  // namespace

LoadedModel ModelOfRun(const MeasuredRun& run, const Job& job, const Stack& stack,
                       std::vector<std::string>& notes) {
  LoadedModel loaded;
  const LoadOptions options{.sequence_length = job.sequence_length};
  const bool has_dims = run.layers > 0 && run.hidden > 0 && run.heads > 0 && run.ffn_hidden > 0;
  if (!has_dims) {
    const std::string name = ZooNameOf(run.model_name);
    notes.push_back("no dimensions given: " + name + " of the zoo");
    loaded.model = LoadModel(name, options);
  } else {
    MeasuredRun complete = run;
    if (complete.vocabulary == 0) {
      complete.vocabulary = 50257;
      notes.emplace_back("no vocabulary given: 50257 as GPT-2");
    }
    loaded.json = ConfigOf(complete, stack, notes).dump();
    loaded.model =
        ModelFromJson(JsonValue::Parse(loaded.json, run.model_name), run.model_name, options);
  }
  CompareCounts(run, loaded.model, notes);
  loaded.hash = HashModel(loaded.model);
  return loaded;
}

}  // namespace shardwright
