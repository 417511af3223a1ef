// T5ForConditionalGeneration: encoder and decoder of equal length, relative position biases that
// the first block of each stack computes and all of its blocks read.

#include <cmath>
#include <cstdint>
#include <optional>
#include <string>

#include "core/error.h"
#include "models/internal/builder.h"
#include "models/internal/hf_config.h"

namespace shardwright {
namespace {

struct T5Sizes {
  std::int64_t layers = 0;
  std::int64_t decoder_layers = 0;
  std::int64_t hidden = 0;
  std::int64_t heads = 0;
  std::int64_t head_dim = 0;
  std::int64_t intermediate = 0;
  std::int64_t vocabulary = 0;
  std::int64_t buckets = 0;
  std::int64_t max_distance = 0;
  std::int64_t tokens = 0;
  double dropout = 0.0;
  bool is_gated = false;
  WrittenActivation activation;
};

T5Sizes ReadT5Sizes(const BuildInput& input) {
  const HfConfig& config = input.config;
  T5Sizes s;
  const CommonSizes common = ReadCommonSizes(config);
  s.layers = common.layers;
  s.hidden = common.hidden;
  s.heads = common.heads;
  s.vocabulary = common.vocabulary;
  s.decoder_layers =
      config.OptionalInt("num_decoder_layers", 1, ModelLimits::kLayers).value_or(s.layers);
  s.head_dim = config.Int("d_kv", 1, std::int64_t{1} << 16);
  s.intermediate = config.Int("d_ff", 1, ModelLimits::kFeatures);
  s.buckets = config.Int("relative_attention_num_buckets", 1, ModelLimits::kVocabulary);
  s.max_distance =
      config.OptionalInt("relative_attention_max_distance", 1, ModelLimits::kTokens).value_or(128);
  s.dropout = config.Probability("dropout_rate");
  s.tokens = ChooseSequenceLength(input, config.Int("n_positions", 1, ModelLimits::kTokens),
                                  Positions::kRelative);
  // "relu", "gated-gelu" or "gated-silu"; gated-gelu means "gelu_new", as T5Config says.
  const std::string projection = config.Text("feed_forward_proj");
  if (projection == "relu" || projection == "gelu") {
    s.activation.function = projection == "relu" ? Activation::kRelu : Activation::kGelu;
  } else if (projection == "gated-gelu" || projection == "gated-silu") {
    s.is_gated = true;
    s.activation = projection == "gated-gelu"
                       ? WrittenActivation{Activation::kGeluTanh, GeluCode::kNew}
                       : WrittenActivation{Activation::kSilu};
  } else {
    throw InputError(config.Where("feed_forward_proj"), '"' + projection + '"',
                     "one of \"relu\", \"gelu\", \"gated-gelu\", \"gated-silu\"");
  }
  return s;
}

class T5Builder {
 public:
  T5Builder(const BuildInput& input, const T5Sizes& sizes)
      : sizes_(sizes),
        builder_(input.config.file(), input.name, input.type, "T5ForConditionalGeneration"),
        is_tied_(input.config.Flag("tie_word_embeddings")) {
    builder_.SetNormConstants(input.config.Positive("layer_norm_epsilon", 1e-6), 0.0,
                              /*scales_input=*/true);
  }

  Model Build() {
    const ModuleId root = ModelBuilder::Root();
    const std::int64_t tokens = sizes_.tokens;
    const Layer shared = builder_.AddEmbedding(root, "shared", sizes_.vocabulary, sizes_.hidden);
    const TensorId encoded = AddStack("encoder", sizes_.layers, shared, std::nullopt);
    TensorId x = AddStack("decoder", sizes_.decoder_layers, shared, encoded);
    if (is_tied_) {
      // Tied weights are rescaled: sequence_output * d_model^-0.5.
      x = builder_.Scale(root, "scale_output", {tokens, sizes_.hidden},
                         1.0 / std::sqrt(static_cast<double>(sizes_.hidden)), x);
    }
    const Layer head =
        is_tied_ ? builder_.AddTiedLinear(root, "lm_head", sizes_.hidden, sizes_.vocabulary,
                                          shared.weight)
                 : builder_.AddLinear(root, "lm_head", sizes_.hidden, sizes_.vocabulary, false);
    x = builder_.Linear(head, tokens, x);
    AddUncastCrossEntropy(builder_, tokens, sizes_.vocabulary, x);
    Model model = builder_.Finish();
    model.block_classes = {"T5Block"};
    model.sequence_length = tokens;
    // Both sides are trained on: a sample has encoder and decoder tokens.
    model.tokens_per_sample = 2 * tokens;
    return model;
  }

 private:
  struct Attention {
    ModuleId layer;   // T5LayerSelfAttention or T5LayerCrossAttention
    ModuleId module;  // T5Attention
    Layer q, k, v, o, norm;
    ParamId bias_table;
  };

  [[nodiscard]] TensorId Dropout(ModuleId module, std::int64_t features, TensorId x) {
    return builder_.Dropout(module, "dropout", sizes_.tokens, features, sizes_.dropout, x);
  }

  // `encoded` makes it the decoder, which also attends to the encoder's output.
  TensorId AddStack(const char* name, std::int64_t layers, const Layer& shared,
                    std::optional<TensorId> encoded) {
    const std::int64_t tokens = sizes_.tokens;
    const ModuleId stack = builder_.AddModule(ModelBuilder::Root(), name, "T5Stack");
    Layer embedding = shared;
    embedding.module = builder_.AddModule(stack, "embed_tokens", "Embedding");
    embedding.weight = builder_.AddTied(embedding.module, "weight", shared.weight);
    const InputKind kind = encoded ? InputKind::kDecoderTokens : InputKind::kTokens;
    TensorId x = builder_.Embedding(embedding, tokens, AddTokenInput(builder_, tokens, kind));
    x = Dropout(stack, sizes_.hidden, x);
    const ModuleId blocks = builder_.AddModule(stack, "block", "ModuleList");
    std::optional<TensorId> position_bias;
    for (std::int64_t i = 0; i < layers; ++i) {
      const ModuleId block = builder_.AddModule(blocks, std::to_string(i), "T5Block");
      const ModuleId list = builder_.AddModule(block, "layer", "ModuleList");
      Attention self = AddAttention(list, "0", "SelfAttention", "T5LayerSelfAttention");
      if (i == 0) {
        const ModuleId table =
            builder_.AddModule(self.module, "relative_attention_bias", "Embedding");
        self.bias_table = builder_.AddParam(table, "weight", {sizes_.buckets, sizes_.heads});
      }
      FinishAttention(self);
      x = RunAttention(self, x, x, /*is_self=*/true, encoded.has_value(), position_bias);
      if (encoded) {
        Attention cross = AddAttention(list, "1", "EncDecAttention", "T5LayerCrossAttention");
        FinishAttention(cross);
        std::optional<TensorId> no_bias;
        x = RunAttention(cross, x, *encoded, /*is_self=*/false, false, no_bias);
      }
      x = AddFeedForward(list, encoded ? "2" : "1", x);
    }
    const Layer norm =
        builder_.AddNorm(stack, "final_layer_norm", sizes_.hidden, false, "T5LayerNorm");
    x = builder_.RmsNorm(norm, tokens, x);
    return builder_.Dropout(stack, "dropout_2", tokens, sizes_.hidden, sizes_.dropout, x);
  }

  Attention AddAttention(ModuleId list, const char* index, const char* name,
                         const char* layer_class) {
    const std::int64_t inner = sizes_.heads * sizes_.head_dim;
    Attention a;
    a.layer = builder_.AddModule(list, index, layer_class);
    a.module = builder_.AddModule(a.layer, name, "T5Attention");
    a.q = builder_.AddLinear(a.module, "q", sizes_.hidden, inner, false);
    a.k = builder_.AddLinear(a.module, "k", sizes_.hidden, inner, false);
    a.v = builder_.AddLinear(a.module, "v", sizes_.hidden, inner, false);
    a.o = builder_.AddLinear(a.module, "o", inner, sizes_.hidden, false);
    return a;
  }

  // The norm is registered behind the attention and its bias table.
  void FinishAttention(Attention& a) {
    a.norm = builder_.AddNorm(a.layer, "layer_norm", sizes_.hidden, false, "T5LayerNorm");
  }

  TensorId RunAttention(const Attention& a, TensorId x, TensorId memory, bool is_self,
                        bool is_causal, std::optional<TensorId>& position_bias) {
    const std::int64_t tokens = sizes_.tokens;
    TensorId y = builder_.RmsNorm(a.norm, tokens, x);
    const TensorId source = is_self ? y : memory;
    const TensorId q = builder_.Linear(a.q, tokens, y);
    const TensorId k = builder_.Linear(a.k, tokens, source);
    const TensorId v = builder_.Linear(a.v, tokens, source);
    if (a.bias_table.valid()) {
      const ParamId params[] = {a.bias_table};
      position_bias = builder_.AddOp(a.module, "position_bias",
                                     {.kind = OpKind::kPositionBias,
                                      .vocab = sizes_.buckets,
                                      .heads = sizes_.heads,
                                      .seq_q = tokens,
                                      .seq_k = tokens,
                                      .causal = is_causal,
                                      .max_distance = sizes_.max_distance},
                                     {}, params);
    }
    OpSpec spec = SelfAttention(tokens, sizes_.heads, sizes_.head_dim, sizes_.dropout);
    spec.causal = is_causal;
    spec.has_bias = position_bias.has_value();
    spec.factor = 1.0;
    y = position_bias ? builder_.AddOp(a.module, "attn", spec, {q, k, v, *position_bias})
                      : builder_.AddOp(a.module, "attn", spec, {q, k, v});
    y = builder_.Linear(a.o, tokens, y);
    y = Dropout(a.layer, sizes_.hidden, y);
    return builder_.Add(a.layer, "add", tokens, sizes_.hidden, x, y);
  }

  TensorId AddFeedForward(ModuleId list, const char* index, TensorId x) {
    const std::int64_t tokens = sizes_.tokens;
    const std::int64_t hidden = sizes_.hidden;
    const std::int64_t intermediate = sizes_.intermediate;
    const ModuleId layer = builder_.AddModule(list, index, "T5LayerFF");
    const ModuleId dense = builder_.AddModule(
        layer, "DenseReluDense", sizes_.is_gated ? "T5DenseGatedActDense" : "T5DenseActDense");
    const Layer first =
        builder_.AddLinear(dense, sizes_.is_gated ? "wi_0" : "wi", hidden, intermediate, false);
    Layer second;
    if (sizes_.is_gated) {
      second = builder_.AddLinear(dense, "wi_1", hidden, intermediate, false);
    }
    const Layer out = builder_.AddLinear(dense, "wo", intermediate, hidden, false);
    const Layer norm = builder_.AddNorm(layer, "layer_norm", hidden, false, "T5LayerNorm");

    TensorId y = builder_.RmsNorm(norm, tokens, x);
    if (sizes_.is_gated) {
      const TensorId gate = builder_.Linear(first, tokens, y);
      const TensorId up = builder_.Linear(second, tokens, y);
      y = builder_.AddOp(dense, "gated_act",
                         {.kind = OpKind::kGatedActivation,
                          .rows = tokens,
                          .in = intermediate,
                          .activation = sizes_.activation.function,
                          .gelu_code = sizes_.activation.gelu_code},
                         {gate, up});
    } else {
      y = builder_.Linear(first, tokens, y);
      y = builder_.Activate(dense, "act", tokens, intermediate, sizes_.activation, y);
    }
    y = Dropout(dense, intermediate, y);
    y = builder_.Linear(out, tokens, y);
    y = Dropout(layer, hidden, y);
    return builder_.Add(layer, "add", tokens, hidden, x, y);
  }

  const T5Sizes& sizes_;
  ModelBuilder builder_;
  bool is_tied_;
};

}  // namespace

Model BuildT5(const BuildInput& input) {
  const T5Sizes sizes = ReadT5Sizes(input);
  return T5Builder(input, sizes).Build();
}

}  // namespace shardwright
