// Vision Transformer: ViTForImageClassification, and ViTModel with its pooler.

#include <cstdint>
#include <string>

#include "core/error.h"
#include "models/internal/builder.h"
#include "models/internal/hf_config.h"

namespace shardwright {
namespace {

struct VitSizes {
  std::int64_t layers = 0;
  std::int64_t hidden = 0;
  std::int64_t heads = 0;
  std::int64_t head_dim = 0;
  std::int64_t intermediate = 0;
  std::int64_t image = 0;
  std::int64_t patch = 0;
  std::int64_t channels = 0;
  std::int64_t patches = 0;  // per image
  std::int64_t tokens = 0;   // patches and the class token
  std::int64_t classes = 0;  // 0: no classifier
  bool qkv_bias = true;
  WrittenActivation activation = {Activation::kGelu};
  double hidden_dropout = 0.0;
  double attention_dropout = 0.0;
};

VitSizes ReadVitSizes(const BuildInput& input) {
  const HfConfig& config = input.config;
  VitSizes s;
  s.layers = config.Int("num_hidden_layers", 1, ModelLimits::kLayers);
  s.hidden = config.Int("hidden_size", 1, ModelLimits::kFeatures);
  s.heads = config.Int("num_attention_heads", 1, ModelLimits::kHeads);
  s.head_dim = DivideEvenly(config, "hidden_size", s.hidden, "num_attention_heads", s.heads);
  s.intermediate = config.Int("intermediate_size", 1, ModelLimits::kFeatures);
  s.image = config.Int("image_size", 1, ModelLimits::kPixels);
  s.patch = config.Int("patch_size", 1, s.image);
  s.channels = config.Int("num_channels", 1, ModelLimits::kFeatures);
  s.qkv_bias = config.Flag("qkv_bias");
  s.activation = config.ActivationOf("hidden_act");
  s.hidden_dropout = config.Probability("hidden_dropout_prob");
  s.attention_dropout = config.Probability("attention_probs_dropout_prob");
  const std::int64_t wanted = input.options.image_size;
  if (wanted != 0 && wanted != s.image) {
    throw InputError(config.Where("image_size"), std::to_string(s.image),
                     "the wanted image size " + std::to_string(wanted),
                     "the position table fixes the image size; change it in the file");
  }
  const std::int64_t side = s.image / s.patch;
  s.patches = side * side;
  s.tokens = s.patches + 1;
  if (ReadArchitecture(config) != "ViTModel") {
    s.classes = CountLabels(config);
  }
  return s;
}

TensorId AddEmbeddings(ModelBuilder& builder, const VitSizes& s, ModuleId body) {
  const ModuleId module = builder.AddModule(body, "embeddings", "ViTEmbeddings");
  const ParamId class_token = builder.AddParam(module, "cls_token", {1, 1, s.hidden});
  const ParamId positions =
      builder.AddParam(module, "position_embeddings", {1, s.tokens, s.hidden});
  const ModuleId patches = builder.AddModule(module, "patch_embeddings", "ViTPatchEmbeddings");
  const ModuleId projection = builder.AddModule(patches, "projection", "Conv2d");
  const ParamId conv_params[] = {
      builder.AddParam(projection, "weight", {s.hidden, s.channels, s.patch, s.patch}),
      builder.AddParam(projection, "bias", {s.hidden})};

  const TensorId image = builder.AddInput(TensorRole::kActivation, s.channels * s.image * s.image,
                                          InputKind::kFeatures);
  const std::int64_t side = s.image / s.patch;
  TensorId x = builder.AddOp(projection, "projection",
                             {.kind = OpKind::kConv2d,
                              .in = s.channels,
                              .out = s.hidden,
                              .has_bias = true,
                              .height = s.image,
                              .width = s.image,
                              .height_out = side,
                              .width_out = side,
                              .kernel = s.patch,
                              .stride = s.patch,
                              .tokens_out = true},
                             {image}, conv_params);
  const ParamId token_params[] = {class_token};
  x = builder.AddOp(module, "concat_class_token",
                    {.kind = OpKind::kConcat, .rows = s.tokens, .in = s.hidden}, {x}, token_params);
  // The second operand is a parameter, which has_bias says.
  const ParamId position_params[] = {positions};
  x = builder.AddOp(module, "add_positions",
                    {.kind = OpKind::kAdd, .rows = s.tokens, .in = s.hidden, .has_bias = true}, {x},
                    position_params);
  return builder.Dropout(module, "dropout", s.tokens, s.hidden, s.hidden_dropout, x);
}

TensorId AddVitLayer(ModelBuilder& builder, const VitSizes& s, ModuleId layers, std::int64_t i,
                     TensorId x) {
  const ModuleId layer = builder.AddModule(layers, std::to_string(i), "ViTLayer");
  const ModuleId attention = builder.AddModule(layer, "attention", "ViTAttention");
  const ModuleId self = builder.AddModule(attention, "attention", "ViTSelfAttention");
  const Layer query = builder.AddLinear(self, "query", s.hidden, s.hidden, s.qkv_bias);
  const Layer key = builder.AddLinear(self, "key", s.hidden, s.hidden, s.qkv_bias);
  const Layer value = builder.AddLinear(self, "value", s.hidden, s.hidden, s.qkv_bias);
  const ModuleId attention_out = builder.AddModule(attention, "output", "ViTSelfOutput");
  const Layer dense = builder.AddLinear(attention_out, "dense", s.hidden, s.hidden, true);
  const ModuleId intermediate = builder.AddModule(layer, "intermediate", "ViTIntermediate");
  const Layer up = builder.AddLinear(intermediate, "dense", s.hidden, s.intermediate, true);
  const ModuleId mlp_out = builder.AddModule(layer, "output", "ViTOutput");
  const Layer down = builder.AddLinear(mlp_out, "dense", s.intermediate, s.hidden, true);
  const Layer norm_1 = builder.AddNorm(layer, "layernorm_before", s.hidden, true, "LayerNorm");
  const Layer norm_2 = builder.AddNorm(layer, "layernorm_after", s.hidden, true, "LayerNorm");

  TensorId y = builder.LayerNorm(norm_1, s.tokens, x);
  const TensorId k = builder.Linear(key, s.tokens, y);
  const TensorId v = builder.Linear(value, s.tokens, y);
  const TensorId q = builder.Linear(query, s.tokens, y);
  y = builder.AddOp(self, "attn", SelfAttention(s.tokens, s.heads, s.head_dim, s.attention_dropout),
                    {q, k, v});
  y = builder.Linear(dense, s.tokens, y);
  y = builder.Dropout(attention_out, "dropout", s.tokens, s.hidden, s.hidden_dropout, y);
  x = builder.Add(layer, "add", s.tokens, s.hidden, y, x);
  y = builder.LayerNorm(norm_2, s.tokens, x);
  y = builder.Linear(up, s.tokens, y);
  y = builder.Activate(intermediate, "act", s.tokens, s.intermediate, s.activation, y);
  y = builder.Linear(down, s.tokens, y);
  y = builder.Dropout(mlp_out, "dropout", s.tokens, s.hidden, s.hidden_dropout, y);
  return builder.Add(mlp_out, "add", s.tokens, s.hidden, y, x);
}

}  // namespace

Model BuildVit(const BuildInput& input) {
  const VitSizes s = ReadVitSizes(input);
  const bool is_classifier = s.classes > 0;
  ModelBuilder builder(input.config.file(), input.name, input.type,
                       is_classifier ? "ViTForImageClassification" : "ViTModel");
  builder.SetNormConstants(input.config.Positive("layer_norm_eps", 1e-12));
  const ModuleId root = ModelBuilder::Root();
  const ModuleId body = is_classifier ? builder.AddModule(root, "vit", "ViTModel") : root;
  TensorId x = AddEmbeddings(builder, s, body);
  const ModuleId encoder = builder.AddModule(body, "encoder", "ViTEncoder");
  const ModuleId layers = builder.AddModule(encoder, "layer", "ModuleList");
  for (std::int64_t i = 0; i < s.layers; ++i) {
    x = AddVitLayer(builder, s, layers, i, x);
  }
  const Layer norm = builder.AddNorm(body, "layernorm", s.hidden, true, "LayerNorm");
  x = builder.LayerNorm(norm, s.tokens, x);
  const OpSpec select{.kind = OpKind::kSelect, .rows = 1, .in = s.hidden};
  if (is_classifier) {
    const Layer classifier = builder.AddLinear(root, "classifier", s.hidden, s.classes, true);
    x = builder.AddOp(root, "class_token", select, {x});
    x = builder.Linear(classifier, 1, x);
    AddCrossEntropy(builder, 1, s.classes, x);
  } else {
    const ModuleId pooler = builder.AddModule(body, "pooler", "ViTPooler");
    const Layer dense = builder.AddLinear(pooler, "dense", s.hidden, s.hidden, true);
    x = builder.AddOp(pooler, "class_token", select, {x});
    x = builder.Linear(dense, 1, x);
    (void)builder.Activate(pooler, "tanh", 1, s.hidden, {Activation::kTanh}, x);
  }
  Model model = builder.Finish();
  model.block_classes = {"ViTLayer"};
  model.tokens_per_sample = 1;
  return model;
}

}  // namespace shardwright
