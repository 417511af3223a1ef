// BERT in three forms: BertModel (pooler, no loss), BertForMaskedLM (no pooler) and
// BertForSequenceClassification (pooler and classifier).

#include <cstdint>
#include <string>

#include "models/internal/builder.h"
#include "models/internal/hf_config.h"

namespace shardwright {
namespace {

enum class BertHead : std::uint8_t { kNone, kMaskedLm, kClassifier };

struct BertSizes {
  CommonSizes common;
  std::int64_t padding_row = -1;  // of the words' embedding
  std::int64_t tokens = 0;
  std::int64_t positions = 0;
  std::int64_t types = 0;
  std::int64_t intermediate = 0;
  std::int64_t head_dim = 0;
  std::int64_t classes = 0;
  WrittenActivation activation = {Activation::kGelu};
  double hidden_dropout = 0.0;
  double attention_dropout = 0.0;
  BertHead head = BertHead::kNone;
  std::string ignored_architecture;  // named by the file, not one of the three
};

BertSizes ReadBertSizes(const BuildInput& input) {
  const HfConfig& config = input.config;
  BertSizes s;
  s.common = ReadCommonSizes(config);
  s.padding_row = ReadPaddingRow(config, s.common.vocabulary);
  s.head_dim =
      DivideEvenly(config, "hidden_size", s.common.hidden, "num_attention_heads", s.common.heads);
  s.positions = config.Int("max_position_embeddings", 1, ModelLimits::kTokens);
  s.tokens = ChooseSequenceLength(input, s.positions, Positions::kLearned);
  s.types = config.Int("type_vocab_size", 1, ModelLimits::kVocabulary);
  s.intermediate = config.Int("intermediate_size", 1, ModelLimits::kFeatures);
  s.activation = config.ActivationOf("hidden_act");
  s.hidden_dropout = config.Probability("hidden_dropout_prob");
  s.attention_dropout = config.Probability("attention_probs_dropout_prob");
  s.classes = CountLabels(config);
  const std::string architecture = ReadArchitecture(config);
  if (architecture == "BertForMaskedLM") {
    s.head = BertHead::kMaskedLm;
  } else if (architecture == "BertForSequenceClassification") {
    s.head = BertHead::kClassifier;
  } else if (!architecture.empty() && architecture != "BertModel") {
    s.ignored_architecture = architecture;
  }
  return s;
}

// A sub-layer's output half: dense, dropout, residual sum and layer norm (BertSelfOutput and
// BertOutput).
struct OutputHalf {
  ModuleId module;
  Layer dense;
  Layer norm;
};

OutputHalf AddOutputHalf(ModelBuilder& builder, ModuleId parent, const char* class_name,
                         std::int64_t in, std::int64_t out) {
  OutputHalf half;
  half.module = builder.AddModule(parent, "output", class_name);
  half.dense = builder.AddLinear(half.module, "dense", in, out, true);
  half.norm = builder.AddNorm(half.module, "LayerNorm", out, true, "LayerNorm");
  return half;
}

TensorId Run(ModelBuilder& builder, const BertSizes& s, const OutputHalf& half, TensorId x,
             TensorId residual) {
  TensorId y = builder.Linear(half.dense, s.tokens, x);
  y = builder.Dropout(half.module, "dropout", s.tokens, s.common.hidden, s.hidden_dropout, y);
  y = builder.Add(half.module, "add", s.tokens, s.common.hidden, y, residual);
  return builder.LayerNorm(half.norm, s.tokens, y);
}

TensorId AddBertLayer(ModelBuilder& builder, const BertSizes& s, ModuleId layers, std::int64_t i,
                      TensorId x) {
  const std::int64_t hidden = s.common.hidden;
  const ModuleId layer = builder.AddModule(layers, std::to_string(i), "BertLayer");
  const ModuleId attention = builder.AddModule(layer, "attention", "BertAttention");
  const ModuleId self = builder.AddModule(attention, "self", "BertSelfAttention");
  const Layer query = builder.AddLinear(self, "query", hidden, hidden, true);
  const Layer key = builder.AddLinear(self, "key", hidden, hidden, true);
  const Layer value = builder.AddLinear(self, "value", hidden, hidden, true);
  const OutputHalf attention_out =
      AddOutputHalf(builder, attention, "BertSelfOutput", hidden, hidden);
  const ModuleId intermediate = builder.AddModule(layer, "intermediate", "BertIntermediate");
  const Layer up = builder.AddLinear(intermediate, "dense", hidden, s.intermediate, true);
  const OutputHalf mlp_out = AddOutputHalf(builder, layer, "BertOutput", s.intermediate, hidden);

  const TensorId q = builder.Linear(query, s.tokens, x);
  const TensorId k = builder.Linear(key, s.tokens, x);
  const TensorId v = builder.Linear(value, s.tokens, x);
  TensorId y = builder.AddOp(
      self, "attn", SelfAttention(s.tokens, s.common.heads, s.head_dim, s.attention_dropout),
      {q, k, v});
  x = Run(builder, s, attention_out, y, x);
  y = builder.Linear(up, s.tokens, x);
  y = builder.Activate(intermediate, "act", s.tokens, s.intermediate, s.activation, y);
  return Run(builder, s, mlp_out, y, x);
}

TensorId AddEmbeddings(ModelBuilder& builder, const BertSizes& s, ModuleId body, Layer& words) {
  const std::int64_t hidden = s.common.hidden;
  const ModuleId module = builder.AddModule(body, "embeddings", "BertEmbeddings");
  words = builder.AddEmbedding(module, "word_embeddings", s.common.vocabulary, hidden);
  words.padding_row = s.padding_row;
  const Layer positions = builder.AddEmbedding(module, "position_embeddings", s.positions, hidden);
  const Layer types = builder.AddEmbedding(module, "token_type_embeddings", s.types, hidden);
  const Layer norm = builder.AddNorm(module, "LayerNorm", hidden, true, "LayerNorm");
  TensorId x = builder.Embedding(words, s.tokens, AddTokenInput(builder, s.tokens));
  const TensorId type_ids = AddTokenInput(builder, s.tokens, InputKind::kTokenTypes);
  const TensorId typed = builder.Embedding(types, s.tokens, type_ids);
  x = builder.Add(module, "add_types", s.tokens, hidden, x, typed);
  const TensorId position_ids = AddPositionInput(builder, s.tokens);
  const TensorId placed = builder.Embedding(positions, s.tokens, position_ids);
  x = builder.Add(module, "add_positions", s.tokens, hidden, x, placed);
  x = builder.LayerNorm(norm, s.tokens, x);
  return builder.Dropout(module, "dropout", s.tokens, hidden, s.hidden_dropout, x);
}

void AddMaskedLmHead(ModelBuilder& builder, const BertSizes& s, bool is_tied, const Layer& words,
                     TensorId x) {
  const std::int64_t hidden = s.common.hidden;
  const std::int64_t vocabulary = s.common.vocabulary;
  const ModuleId head = builder.AddModule(ModelBuilder::Root(), "cls", "BertOnlyMLMHead");
  const ModuleId predictions = builder.AddModule(head, "predictions", "BertLMPredictionHead");
  const ParamId bias = builder.AddParam(predictions, "bias", {vocabulary});
  const ModuleId transform =
      builder.AddModule(predictions, "transform", "BertPredictionHeadTransform");
  const Layer dense = builder.AddLinear(transform, "dense", hidden, hidden, true);
  const Layer norm = builder.AddNorm(transform, "LayerNorm", hidden, true, "LayerNorm");
  Layer decoder =
      is_tied ? builder.AddTiedLinear(predictions, "decoder", hidden, vocabulary, words.weight)
              : builder.AddLinear(predictions, "decoder", hidden, vocabulary, false);
  decoder.bias = builder.AddTied(decoder.module, "bias", bias);
  x = builder.Linear(dense, s.tokens, x);
  x = builder.Activate(transform, "act", s.tokens, hidden, s.activation, x);
  x = builder.LayerNorm(norm, s.tokens, x);
  x = builder.Linear(decoder, s.tokens, x);
  AddUncastCrossEntropy(builder, s.tokens, vocabulary, x);
}

// The pooler reads the first token only.
TensorId AddPooler(ModelBuilder& builder, const BertSizes& s, ModuleId body, TensorId x) {
  const std::int64_t hidden = s.common.hidden;
  const ModuleId pooler = builder.AddModule(body, "pooler", "BertPooler");
  const Layer dense = builder.AddLinear(pooler, "dense", hidden, hidden, true);
  x = builder.AddOp(pooler, "first_token", {.kind = OpKind::kSelect, .rows = 1, .in = hidden}, {x});
  x = builder.Linear(dense, 1, x);
  return builder.Activate(pooler, "tanh", 1, hidden, {Activation::kTanh}, x);
}

}  // namespace

Model BuildBert(const BuildInput& input) {
  const HfConfig& config = input.config;
  const BertSizes s = ReadBertSizes(input);
  const std::int64_t hidden = s.common.hidden;
  const char* const class_name = s.head == BertHead::kMaskedLm     ? "BertForMaskedLM"
                                 : s.head == BertHead::kClassifier ? "BertForSequenceClassification"
                                                                   : "BertModel";
  ModelBuilder builder(config.file(), input.name, input.type, class_name);
  builder.SetNormConstants(config.Positive("layer_norm_eps", 1e-12));
  // A bare BertModel is the root itself; with a head it is the child "bert".
  const ModuleId root = ModelBuilder::Root();
  const ModuleId body =
      s.head == BertHead::kNone ? root : builder.AddModule(root, "bert", "BertModel");
  Layer words;
  TensorId x = AddEmbeddings(builder, s, body, words);
  const ModuleId encoder = builder.AddModule(body, "encoder", "BertEncoder");
  const ModuleId layers = builder.AddModule(encoder, "layer", "ModuleList");
  for (std::int64_t i = 0; i < s.common.layers; ++i) {
    x = AddBertLayer(builder, s, layers, i, x);
  }
  if (s.head == BertHead::kMaskedLm) {
    AddMaskedLmHead(builder, s, config.Flag("tie_word_embeddings"), words, x);
  } else {
    x = AddPooler(builder, s, body, x);
    if (s.head == BertHead::kClassifier) {
      x = builder.Dropout(root, "dropout", 1, hidden, s.hidden_dropout, x);
      x = builder.Linear(builder.AddLinear(root, "classifier", hidden, s.classes, true), 1, x);
      AddUncastCrossEntropy(builder, 1, s.classes, x);
    }
  }
  Model model = builder.Finish();
  model.block_classes = {"BertLayer"};
  model.sequence_length = s.tokens;
  model.tokens_per_sample = s.tokens;
  if (!s.ignored_architecture.empty()) {
    model.warnings.push_back(config.file() + ": " + s.ignored_architecture +
                             " is built as BertModel, without its head and loss");
  }
  return model;
}

}  // namespace shardwright
