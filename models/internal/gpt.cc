// GPT-2, GPT-NeoX, OPT and MPT: decoders with layer norms and a plain MLP. They share too little
// with the Llama-like table and with each other to be rows of one; each follows its class in
// Transformers (MPT: llm-foundry), modules in registration order and ops in execution order.

#include <cmath>
#include <cstdint>
#include <optional>
#include <string>

#include "core/error.h"
#include "models/internal/builder.h"
#include "models/internal/hf_config.h"

namespace shardwright {
namespace {

// What the four models have in common.
struct GptSizes {
  CommonSizes common;
  std::int64_t tokens = 0;
  std::int64_t positions = 0;  // rows of the learned position table
  std::int64_t intermediate = 0;
  std::int64_t kv_heads = 0;
  std::int64_t head_dim = 0;
  WrittenActivation activation = {Activation::kGelu};
  double hidden_dropout = 0.0;
  double attention_dropout = 0.0;
};

GptSizes ReadGptSizes(const BuildInput& input, Positions positions) {
  const HfConfig& config = input.config;
  GptSizes s;
  s.common = ReadCommonSizes(config);
  s.head_dim =
      DivideEvenly(config, "hidden_size", s.common.hidden, "num_attention_heads", s.common.heads);
  s.kv_heads = s.common.heads;
  s.positions = config.Int("max_position_embeddings", 1, ModelLimits::kTokens);
  s.tokens = ChooseSequenceLength(input, s.positions, positions);
  return s;
}

OpSpec AttentionSpec(const GptSizes& s) {
  OpSpec spec = SelfAttention(s.tokens, s.common.heads, s.head_dim, s.attention_dropout);
  spec.kv_heads = s.kv_heads;
  spec.causal = true;
  return spec;
}

Model FinishGpt(ModelBuilder& builder, const GptSizes& s, const char* block_class) {
  Model model = builder.Finish();
  model.block_classes = {block_class};
  model.sequence_length = s.tokens;
  model.tokens_per_sample = s.tokens;
  return model;
}

// The language-model head: its own matrix or the embedding's.
Layer AddHead(ModelBuilder& builder, const char* name, bool is_tied, const Layer& embedding) {
  const ModuleId root = ModelBuilder::Root();
  return is_tied ? builder.AddTiedLinear(root, name, embedding.out, embedding.in, embedding.weight)
                 : builder.AddLinear(root, name, embedding.out, embedding.in, false);
}

TensorId AddGpt2Block(ModelBuilder& builder, const GptSizes& s, ModuleId blocks, std::int64_t i,
                      TensorId x) {
  const std::int64_t hidden = s.common.hidden;
  const ModuleId block = builder.AddModule(blocks, std::to_string(i), "GPT2Block");
  const Layer norm_1 = builder.AddNorm(block, "ln_1", hidden, true, "LayerNorm");
  const ModuleId attention = builder.AddModule(block, "attn", "GPT2Attention");
  const Layer qkv = builder.AddConv1D(attention, "c_attn", hidden, 3 * hidden);
  const Layer projection = builder.AddConv1D(attention, "c_proj", hidden, hidden);
  const Layer norm_2 = builder.AddNorm(block, "ln_2", hidden, true, "LayerNorm");
  const ModuleId mlp = builder.AddModule(block, "mlp", "GPT2MLP");
  const Layer up = builder.AddConv1D(mlp, "c_fc", hidden, s.intermediate);
  const Layer down = builder.AddConv1D(mlp, "c_proj", s.intermediate, hidden);

  TensorId y = builder.LayerNorm(norm_1, s.tokens, x);
  y = builder.Linear(qkv, s.tokens, y);
  y = builder.AddOp(attention, "attn", AttentionSpec(s), {y});
  y = builder.Linear(projection, s.tokens, y);
  y = builder.Dropout(attention, "resid_dropout", s.tokens, hidden, s.hidden_dropout, y);
  x = builder.Add(block, "add_1", s.tokens, hidden, x, y);
  y = builder.LayerNorm(norm_2, s.tokens, x);
  y = builder.Linear(up, s.tokens, y);
  y = builder.Activate(mlp, "act", s.tokens, s.intermediate, s.activation, y);
  y = builder.Linear(down, s.tokens, y);
  y = builder.Dropout(mlp, "dropout", s.tokens, hidden, s.hidden_dropout, y);
  return builder.Add(block, "add_2", s.tokens, hidden, x, y);
}

struct NeoxOptions {
  bool is_parallel = true;  // attention and MLP read the same input
  bool has_bias = true;     // of the attention
  RopeAngles angles = {};
};

TensorId AddNeoxLayer(ModelBuilder& builder, const GptSizes& s, const NeoxOptions& options,
                      ModuleId layers, std::int64_t i, TensorId x) {
  const bool is_parallel = options.is_parallel;
  const std::int64_t hidden = s.common.hidden;
  const ModuleId layer = builder.AddModule(layers, std::to_string(i), "GPTNeoXLayer");
  const Layer norm_1 = builder.AddNorm(layer, "input_layernorm", hidden, true, "LayerNorm");
  const Layer norm_2 =
      builder.AddNorm(layer, "post_attention_layernorm", hidden, true, "LayerNorm");
  const ModuleId attention = builder.AddModule(layer, "attention", "GPTNeoXAttention");
  const Layer qkv =
      builder.AddLinear(attention, "query_key_value", hidden, 3 * hidden, options.has_bias);
  const Layer dense = builder.AddLinear(attention, "dense", hidden, hidden, options.has_bias);
  const ModuleId mlp = builder.AddModule(layer, "mlp", "GPTNeoXMLP");
  const Layer up = builder.AddLinear(mlp, "dense_h_to_4h", hidden, s.intermediate, true);
  const Layer down = builder.AddLinear(mlp, "dense_4h_to_h", s.intermediate, hidden, true);

  TensorId y = builder.LayerNorm(norm_1, s.tokens, x);
  const TensorId packed = builder.Linear(qkv, s.tokens, y);
  // Rotation writes new queries and keys; values stay a view of the packed projection.
  const auto [q, k] = builder.AddRope(attention,
                                      {.kind = OpKind::kRope,
                                       .rows = s.tokens,
                                       .heads = s.common.heads,
                                       .kv_heads = s.kv_heads,
                                       .head_dim = s.head_dim,
                                       .rope = options.angles,
                                       .packed_by_head = true},
                                      {packed});
  OpSpec attention_spec = AttentionSpec(s);
  attention_spec.packed_by_head = true;
  attention_spec.heads_first = true;
  y = builder.AddOp(attention, "attn", attention_spec, {q, k, packed});
  y = builder.Linear(dense, s.tokens, y);
  TensorId attention_out =
      builder.Dropout(layer, "post_attention_dropout", s.tokens, hidden, s.hidden_dropout, y);
  if (!is_parallel) {
    attention_out = builder.Add(layer, "add_1", s.tokens, hidden, attention_out, x);
  }
  y = builder.LayerNorm(norm_2, s.tokens, is_parallel ? x : attention_out);
  y = builder.Linear(up, s.tokens, y);
  y = builder.Activate(mlp, "act", s.tokens, s.intermediate, s.activation, y);
  y = builder.Linear(down, s.tokens, y);
  y = builder.Dropout(layer, "post_mlp_dropout", s.tokens, hidden, s.hidden_dropout, y);
  y = builder.Add(layer, is_parallel ? "add_1" : "add_2", s.tokens, hidden, y, attention_out);
  return is_parallel ? builder.Add(layer, "add_2", s.tokens, hidden, y, x) : y;
}

struct OptOptions {
  bool norm_first = true;  // do_layer_norm_before; false: norms after the residual sums (350M)
  bool has_bias = true;
  bool norm_affine = true;
};

TensorId AddOptLayer(ModelBuilder& builder, const GptSizes& s, const OptOptions& options,
                     ModuleId layers, std::int64_t i, TensorId x) {
  const std::int64_t hidden = s.common.hidden;
  const ModuleId layer = builder.AddModule(layers, std::to_string(i), "OPTDecoderLayer");
  const ModuleId attention = builder.AddModule(layer, "self_attn", "OPTAttention");
  const auto linear = [&](ModuleId parent, const char* name, std::int64_t in, std::int64_t out) {
    return builder.AddLinear(parent, name, in, out, options.has_bias);
  };
  const Layer k = linear(attention, "k_proj", hidden, hidden);
  const Layer v = linear(attention, "v_proj", hidden, hidden);
  const Layer q = linear(attention, "q_proj", hidden, hidden);
  const Layer out = linear(attention, "out_proj", hidden, hidden);
  const Layer norm_1 = builder.AddNorm(layer, "self_attn_layer_norm", hidden, true, "LayerNorm");
  const Layer up = linear(layer, "fc1", hidden, s.intermediate);
  const Layer down = linear(layer, "fc2", s.intermediate, hidden);
  const Layer norm_2 = builder.AddNorm(layer, "final_layer_norm", hidden, true, "LayerNorm");

  TensorId y = options.norm_first ? builder.LayerNorm(norm_1, s.tokens, x) : x;
  TensorId queries = builder.Linear(q, s.tokens, y);
  queries = builder.Scale(attention, "scale_q", {s.tokens, hidden},
                          1.0 / std::sqrt(static_cast<double>(s.head_dim)), queries);
  const TensorId keys = builder.Linear(k, s.tokens, y);
  const TensorId values = builder.Linear(v, s.tokens, y);
  OpSpec attention_spec = AttentionSpec(s);
  attention_spec.factor = 1.0;  // the queries are scaled already
  y = builder.AddOp(attention, "attn", attention_spec, {queries, keys, values});
  y = builder.Linear(out, s.tokens, y);
  y = builder.Dropout(layer, "dropout_1", s.tokens, hidden, s.hidden_dropout, y);
  x = builder.Add(layer, "add_1", s.tokens, hidden, x, y);
  if (!options.norm_first) {
    x = builder.LayerNorm(norm_1, s.tokens, x);
  }
  y = options.norm_first ? builder.LayerNorm(norm_2, s.tokens, x) : x;
  y = builder.Linear(up, s.tokens, y);
  y = builder.Activate(layer, "act", s.tokens, s.intermediate, s.activation, y);
  y = builder.Linear(down, s.tokens, y);
  y = builder.Dropout(layer, "dropout_2", s.tokens, hidden, s.hidden_dropout, y);
  x = builder.Add(layer, "add_2", s.tokens, hidden, x, y);
  return options.norm_first ? x : builder.LayerNorm(norm_2, s.tokens, x);
}

struct MptOptions {
  bool has_bias = false;
  bool has_rope = false;
  double alibi_max = 0.0;  // 0: no ALiBi
  RopeAngles angles = {};
};

TensorId AddMptBlock(ModelBuilder& builder, const GptSizes& s, const MptOptions& options,
                     ModuleId blocks, std::int64_t i, TensorId x) {
  const std::int64_t hidden = s.common.hidden;
  const std::int64_t packed_width = hidden + 2 * s.kv_heads * s.head_dim;
  const bool bias = options.has_bias;
  const ModuleId block = builder.AddModule(blocks, std::to_string(i), "MPTBlock");
  const Layer norm_1 = builder.AddNorm(block, "norm_1", hidden, bias, "LPLayerNorm");
  const ModuleId attention = builder.AddModule(block, "attn",
                                               s.kv_heads == s.common.heads ? "MultiheadAttention"
                                               : s.kv_heads == 1            ? "MultiQueryAttention"
                                                                 : "GroupedQueryAttention");
  const Layer qkv = builder.AddLinear(attention, "Wqkv", hidden, packed_width, bias);
  const Layer out = builder.AddLinear(attention, "out_proj", hidden, hidden, bias);
  const Layer norm_2 = builder.AddNorm(block, "norm_2", hidden, bias, "LPLayerNorm");
  const ModuleId mlp = builder.AddModule(block, "ffn", "MPTMLP");
  const Layer up = builder.AddLinear(mlp, "up_proj", hidden, s.intermediate, bias);
  const Layer down = builder.AddLinear(mlp, "down_proj", s.intermediate, hidden, bias);

  OpSpec attention_spec = AttentionSpec(s);
  attention_spec.alibi_max = options.alibi_max;
  TensorId y = builder.LayerNorm(norm_1, s.tokens, x);
  y = builder.Linear(qkv, s.tokens, y);
  if (options.has_rope) {
    const auto [q, k] = builder.AddRope(attention,
                                        {.kind = OpKind::kRope,
                                         .rows = s.tokens,
                                         .heads = s.common.heads,
                                         .kv_heads = s.kv_heads,
                                         .head_dim = s.head_dim,
                                         .rope = options.angles},
                                        {y});
    y = builder.AddOp(attention, "attn", attention_spec, {q, k, y});
  } else {
    y = builder.AddOp(attention, "attn", attention_spec, {y});
  }
  y = builder.Linear(out, s.tokens, y);
  y = builder.Dropout(block, "resid_attn_dropout", s.tokens, hidden, s.hidden_dropout, y);
  x = builder.Add(block, "add_1", s.tokens, hidden, x, y);
  y = builder.LayerNorm(norm_2, s.tokens, x);
  y = builder.Linear(up, s.tokens, y);
  y = builder.Activate(mlp, "act", s.tokens, s.intermediate, s.activation, y);
  y = builder.Linear(down, s.tokens, y);
  y = builder.Dropout(block, "resid_ffn_dropout", s.tokens, hidden, s.hidden_dropout, y);
  return builder.Add(block, "add_2", s.tokens, hidden, x, y);
}

// Key/value heads of MPT's attn_config.
std::int64_t ReadMptKvHeads(const HfConfig& attention, std::int64_t heads) {
  const std::string type = attention.Text("attn_type");
  if (type.empty() || type == "multihead_attention") {
    return heads;
  }
  if (type == "multiquery_attention") {
    return 1;
  }
  if (type == "grouped_query_attention") {
    return attention.Int("kv_n_heads", 1, heads);
  }
  throw attention.Find("attn_type")
      ->Error(
          "one of \"multihead_attention\", \"multiquery_attention\", \"grouped_query_attention\"");
}

}  // namespace

Model BuildGpt2(const BuildInput& input) {
  const HfConfig& config = input.config;
  GptSizes s = ReadGptSizes(input, Positions::kLearned);
  const std::int64_t hidden = s.common.hidden;
  s.intermediate = config.OptionalInt("n_inner", 1, ModelLimits::kFeatures).value_or(4 * hidden);
  s.activation = config.ActivationOf("activation_function");
  s.hidden_dropout = config.Probability("resid_pdrop");
  s.attention_dropout = config.Probability("attn_pdrop");

  ModelBuilder builder(config.file(), input.name, input.type, "GPT2LMHeadModel");
  builder.SetNormConstants(config.Positive("layer_norm_epsilon", 1e-5));
  const ModuleId body = builder.AddModule(ModelBuilder::Root(), "transformer", "GPT2Model");
  const Layer tokens = builder.AddEmbedding(body, "wte", s.common.vocabulary, hidden);
  const Layer positions = builder.AddEmbedding(body, "wpe", s.positions, hidden);
  const TensorId token_ids = AddTokenInput(builder, s.tokens);
  const TensorId position_ids = AddPositionInput(builder, s.tokens);
  const TensorId embedded = builder.Embedding(tokens, s.tokens, token_ids);
  TensorId x = builder.Embedding(positions, s.tokens, position_ids);
  x = builder.Add(body, "add_positions", s.tokens, hidden, embedded, x);
  x = builder.Dropout(body, "drop", s.tokens, hidden, config.Probability("embd_pdrop"), x);
  const ModuleId blocks = builder.AddModule(body, "h", "ModuleList");
  for (std::int64_t i = 0; i < s.common.layers; ++i) {
    x = AddGpt2Block(builder, s, blocks, i, x);
  }
  x = builder.LayerNorm(builder.AddNorm(body, "ln_f", hidden, true, "LayerNorm"), s.tokens, x);
  x = builder.Linear(AddHead(builder, "lm_head", config.Flag("tie_word_embeddings"), tokens),
                     s.tokens, x);
  AddCrossEntropy(builder, s.tokens, s.common.vocabulary, x);
  return FinishGpt(builder, s, "GPT2Block");
}

Model BuildGptNeox(const BuildInput& input) {
  const HfConfig& config = input.config;
  GptSizes s = ReadGptSizes(input, Positions::kRelative);
  const std::int64_t hidden = s.common.hidden;
  s.intermediate = config.Int("intermediate_size", 1, ModelLimits::kFeatures);
  s.activation = config.ActivationOf("hidden_act");
  s.hidden_dropout = config.Probability("hidden_dropout");
  s.attention_dropout = config.Probability("attention_dropout");
  const NeoxOptions options{
      .is_parallel = config.Flag("use_parallel_residual"),
      .has_bias = config.Flag("attention_bias"),
      .angles = ReadRopeAngles(config, "rotary_emb_base",
                               ReadRotaryDim(config, "rotary_pct", 0.25, s.head_dim))};

  ModelBuilder builder(config.file(), input.name, input.type, "GPTNeoXForCausalLM");
  builder.SetNormConstants(config.Positive("layer_norm_eps", 1e-5));
  const ModuleId body = builder.AddModule(ModelBuilder::Root(), "gpt_neox", "GPTNeoXModel");
  const Layer tokens = builder.AddEmbedding(body, "embed_in", s.common.vocabulary, hidden);
  TensorId x = builder.Embedding(tokens, s.tokens, AddTokenInput(builder, s.tokens));
  x = builder.Dropout(body, "emb_dropout", s.tokens, hidden, s.hidden_dropout, x);
  const ModuleId layers = builder.AddModule(body, "layers", "ModuleList");
  for (std::int64_t i = 0; i < s.common.layers; ++i) {
    x = AddNeoxLayer(builder, s, options, layers, i, x);
  }
  const Layer norm = builder.AddNorm(body, "final_layer_norm", hidden, true, "LayerNorm");
  x = builder.LayerNorm(norm, s.tokens, x);
  x = builder.Linear(AddHead(builder, "embed_out", config.Flag("tie_word_embeddings"), tokens),
                     s.tokens, x);
  AddCrossEntropy(builder, s.tokens, s.common.vocabulary, x);
  return FinishGpt(builder, s, "GPTNeoXLayer");
}

Model BuildOpt(const BuildInput& input) {
  const HfConfig& config = input.config;
  GptSizes s = ReadGptSizes(input, Positions::kLearned);
  const std::int64_t hidden = s.common.hidden;
  s.intermediate = config.Int("ffn_dim", 1, ModelLimits::kFeatures);
  s.activation = config.ActivationOf("activation_function");
  s.hidden_dropout = config.Probability("dropout");
  s.attention_dropout = config.Probability("attention_dropout");
  const std::int64_t width =
      config.OptionalInt("word_embed_proj_dim", 1, ModelLimits::kFeatures).value_or(hidden);
  const OptOptions options{.norm_first = config.Flag("do_layer_norm_before"),
                           .has_bias = config.Flag("enable_bias")};
  if (!config.Flag("layer_norm_elementwise_affine")) {
    throw InputError(config.Where("layer_norm_elementwise_affine"), "false",
                     "true (norms without parameters are not supported)");
  }

  ModelBuilder builder(config.file(), input.name, input.type, "OPTForCausalLM");
  const ModuleId model = builder.AddModule(ModelBuilder::Root(), "model", "OPTModel");
  const ModuleId body = builder.AddModule(model, "decoder", "OPTDecoder");
  Layer tokens = builder.AddEmbedding(body, "embed_tokens", s.common.vocabulary, width);
  tokens.padding_row = ReadPaddingRow(config, s.common.vocabulary);
  // Two rows more than positions: OPTLearnedPositionalEmbedding has an offset of 2.
  const Layer positions = builder.AddEmbedding(body, "embed_positions", s.positions + 2, hidden,
                                               "OPTLearnedPositionalEmbedding");
  Layer project_out;
  Layer project_in;
  if (width != hidden) {
    project_out = builder.AddLinear(body, "project_out", hidden, width, false);
    project_in = builder.AddLinear(body, "project_in", width, hidden, false);
  }
  const bool has_final_norm = options.norm_first && !config.Flag("_remove_final_layer_norm");
  Layer norm;
  if (has_final_norm) {
    norm = builder.AddNorm(body, "final_layer_norm", hidden, true, "LayerNorm");
  }
  TensorId x = builder.Embedding(tokens, s.tokens, AddTokenInput(builder, s.tokens));
  const TensorId position_ids = AddPositionInput(builder, s.tokens);
  const TensorId embedded_positions = builder.Embedding(positions, s.tokens, position_ids, 2);
  if (width != hidden) {
    x = builder.Linear(project_in, s.tokens, x);
  }
  x = builder.Add(body, "add_positions", s.tokens, hidden, x, embedded_positions);
  const ModuleId layers = builder.AddModule(body, "layers", "ModuleList");
  for (std::int64_t i = 0; i < s.common.layers; ++i) {
    x = AddOptLayer(builder, s, options, layers, i, x);
  }
  x = has_final_norm ? builder.LayerNorm(norm, s.tokens, x) : x;
  x = width != hidden ? builder.Linear(project_out, s.tokens, x) : x;
  x = builder.Linear(AddHead(builder, "lm_head", config.Flag("tie_word_embeddings"), tokens),
                     s.tokens, x);
  AddCrossEntropy(builder, s.tokens, s.common.vocabulary, x);
  return FinishGpt(builder, s, "OPTDecoderLayer");
}

Model BuildMpt(const BuildInput& input) {
  const HfConfig& config = input.config;
  // The position table is sized by max_seq_len, and llm-foundry sets that from the training
  // sequence length: a wanted length replaces it.
  GptSizes s = ReadGptSizes(input, Positions::kRelative);
  s.positions = input.options.sequence_length > 0 ? s.tokens : s.positions;
  const std::int64_t hidden = s.common.hidden;
  const std::optional<JsonValue> attention_json = config.Find("attn_config");
  if (!attention_json) {
    throw InputError(config.Where("attn_config"), "no value", "an object");
  }
  const HfConfig attention(*attention_json, *attention_json);
  s.kv_heads = ReadMptKvHeads(attention, s.common.heads);
  (void)DivideEvenly(config, "num_attention_heads", s.common.heads, "attn_config.kv_n_heads",
                     s.kv_heads);
  s.intermediate = hidden * config.Int("expansion_ratio", 1, 64);
  s.hidden_dropout = config.Probability("resid_pdrop");
  s.attention_dropout = attention.Probability("attn_pdrop");
  const MptOptions options{
      .has_bias = !config.Flag("no_bias"),
      .has_rope = attention.Flag("rope"),
      .alibi_max = attention.Flag("alibi") ? attention.Positive("alibi_bias_max", 8.0) : 0.0,
      .angles = ReadRopeAngles(attention, "rope_theta", s.head_dim)};
  const bool is_learned =
      config.Flag("learned_pos_emb") && !options.has_rope && !attention.Flag("alibi");

  ModelBuilder builder(config.file(), input.name, input.type, "MPTForCausalLM");
  const ModuleId body = builder.AddModule(ModelBuilder::Root(), "transformer", "MPTModel");
  const Layer tokens =
      builder.AddEmbedding(body, "wte", s.common.vocabulary, hidden, "SharedEmbedding");
  TensorId x;
  if (is_learned) {
    const Layer positions = builder.AddEmbedding(body, "wpe", s.positions, hidden);
    x = builder.Embedding(tokens, s.tokens, AddTokenInput(builder, s.tokens));
    const TensorId position_ids = AddPositionInput(builder, s.tokens);
    const TensorId embedded_positions = builder.Embedding(positions, s.tokens, position_ids);
    x = builder.Add(body, "add_positions", s.tokens, hidden, x, embedded_positions);
  } else {
    x = builder.Embedding(tokens, s.tokens, AddTokenInput(builder, s.tokens));
  }
  x = builder.Dropout(body, "emb_drop", s.tokens, hidden, config.Probability("emb_pdrop"), x);
  const ModuleId blocks = builder.AddModule(body, "blocks", "ModuleList");
  for (std::int64_t i = 0; i < s.common.layers; ++i) {
    x = AddMptBlock(builder, s, options, blocks, i, x);
  }
  const Layer norm = builder.AddNorm(body, "norm_f", hidden, options.has_bias, "LPLayerNorm");
  x = builder.LayerNorm(norm, s.tokens, x);
  if (config.Flag("tie_word_embeddings")) {
    // SharedEmbedding: the same module multiplies by its own table; there is no lm_head.
    const ParamId params[] = {tokens.weight};
    x = builder.AddOp(
        tokens.module, "unembed",
        {.kind = OpKind::kLinear, .rows = s.tokens, .in = hidden, .out = s.common.vocabulary}, {x},
        params);
  } else {
    x = builder.Linear(AddHead(builder, "lm_head", false, tokens), s.tokens, x);
  }
  AddCrossEntropy(builder, s.tokens, s.common.vocabulary, x);
  return FinishGpt(builder, s, "MPTBlock");
}

}  // namespace shardwright
