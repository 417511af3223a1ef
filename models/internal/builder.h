#pragma once

// Assembles a Model: modules and parameters in registration order, ops in execution order. Keeps
// the invariants of model.h by construction, derives tensor sizes from op specs and stores equal
// specs once.

#include <cstdint>
#include <initializer_list>
#include <span>
#include <string>
#include <string_view>
#include <unordered_map>
#include <utility>
#include <vector>

#include "core/units.h"
#include "models/model.h"

namespace shardwright {

// Limits that hold for every model, whatever its source. They keep every product of sizes inside
// 63 bits and refuse absurd files before anything is allocated for them.
struct ModelLimits {
  static constexpr std::int64_t kLayers = 10'000;
  static constexpr std::int64_t kFeatures = std::int64_t{1} << 22;  // hidden, intermediate
  static constexpr std::int64_t kHeads = std::int64_t{1} << 14;
  static constexpr std::int64_t kVocabulary = std::int64_t{1} << 28;
  static constexpr std::int64_t kTokens = std::int64_t{1} << 24;             // per sample
  static constexpr std::int64_t kPixels = std::int64_t{1} << 14;             // height or width
  static constexpr std::int64_t kExperts = std::int64_t{1} << 12;            // per layer
  static constexpr std::int64_t kParameters = std::int64_t{1} << 20;         // tensors in one model
  static constexpr std::int64_t kParameterElements = std::int64_t{1} << 40;  // of one tensor
  static constexpr std::int64_t kTensorElements = std::int64_t{1} << 56;  // activation, per sample
};

// Elements of output `i` of an op, per sample (in all for kPositionBias and what kOther shares).
[[nodiscard]] std::int64_t OutputElements(const OpSpec& spec, std::size_t i);
// kRope has two, kOther as many as it says, all others one.
[[nodiscard]] std::size_t OutputCount(const OpSpec& spec);

// A module with a weight and perhaps a bias: a linear layer, a norm or an embedding.
struct Layer {
  ModuleId module;
  ParamId weight;
  ParamId bias;         // none when the layer has no bias
  std::int64_t in = 0;  // Embedding: rows of the table.
  std::int64_t out = 0;
  bool is_transposed = false;     // Conv1D: the weight is [in, out]
  std::int64_t padding_row = -1;  // Embedding: see OpSpec
};

// An activation and how the model's code writes it.
struct WrittenActivation {
  Activation function = Activation::kNone;
  GeluCode gelu_code = GeluCode::kOneOperator;
};

// Attention of a sequence to itself; every head of queries has keys and values of its own.
[[nodiscard]] OpSpec SelfAttention(std::int64_t tokens, std::int64_t heads, std::int64_t head_dim,
                                   double dropout);

struct ScaleSize {
  std::int64_t rows = 0;
  std::int64_t features = 0;
};

class ModelBuilder {
 public:
  // `where` names the source in errors.
  ModelBuilder(std::string where, std::string name, std::string type, std::string root_class);

  [[nodiscard]] static ModuleId Root() { return ModuleId(0); }

  // The next module in registration order. Modules of one subtree must be added before the next
  // sibling of that subtree, so that the list is pre-order.
  ModuleId AddModule(ModuleId parent, std::string_view name, std::string_view class_name);
  // Throws InputError when a size is not positive or the product is above the limit.
  ParamId AddParam(ModuleId module, std::string_view name, std::vector<std::int64_t> shape);
  // A second name of `target`'s storage.
  ParamId AddTied(ModuleId module, std::string_view name, ParamId target);
  void AddBuffer(ModuleId module, std::int64_t elements);

  // Common layers. Weight shapes are those of PyTorch's modules of these classes.
  Layer AddLinear(ModuleId parent, std::string_view name, std::int64_t in, std::int64_t out,
                  bool bias, std::string_view class_name = "Linear");
  // Conv1D of GPT-2 stores its weight transposed: [in, out].
  Layer AddConv1D(ModuleId parent, std::string_view name, std::int64_t in, std::int64_t out);
  Layer AddEmbedding(ModuleId parent, std::string_view name, std::int64_t rows, std::int64_t out,
                     std::string_view class_name = "Embedding");
  Layer AddNorm(ModuleId parent, std::string_view name, std::int64_t features, bool bias,
                std::string_view class_name);
  // A linear layer whose weight is another parameter's storage (a tied language-model head).
  Layer AddTiedLinear(ModuleId parent, std::string_view name, std::int64_t in, std::int64_t out,
                      ParamId target);

  // An input of the model.
  TensorId AddInput(TensorRole role, std::int64_t elements, InputKind kind, bool per_sample = true);
  // The next op in execution order with its single output.
  TensorId AddOp(ModuleId module, std::string_view name, const OpSpec& spec,
                 std::initializer_list<TensorId> inputs, std::span<const ParamId> params = {});
  // kRope: rotated q and k.
  std::pair<TensorId, TensorId> AddRope(ModuleId module, const OpSpec& spec,
                                        std::initializer_list<TensorId> inputs);
  // The general form; the number of outputs follows from the kind.
  ModelOpId AddOpWith(ModuleId module, std::string_view name, const OpSpec& spec,
                      std::vector<TensorId> inputs, std::vector<ParamId> params);

  // Ops of the common layers, each owned by the layer's module and named after it.
  TensorId Linear(const Layer& layer, std::int64_t rows, TensorId x);
  // `index_offset` is added to every id.
  TensorId Embedding(const Layer& layer, std::int64_t rows, TensorId ids,
                     std::int64_t index_offset = 0);
  // What norms add to the variance, and Gemma's RMS norms to the weight. 1e-5 and 0 until set.
  void SetNormConstants(double epsilon, double weight_offset = 0.0, bool scales_input = false);
  TensorId LayerNorm(const Layer& layer, std::int64_t rows, TensorId x);
  TensorId RmsNorm(const Layer& layer, std::int64_t rows, TensorId x);
  // Element-wise ops on (rows, features).
  TensorId Add(ModuleId module, std::string_view name, std::int64_t rows, std::int64_t features,
               TensorId a, TensorId b);
  TensorId Scale(ModuleId module, std::string_view name, const ScaleSize& size, double factor,
                 TensorId x);
  TensorId Activate(ModuleId module, std::string_view name, std::int64_t rows,
                    std::int64_t features, const WrittenActivation& activation, TensorId x);
  // Returns x itself when p is 0: such a module launches nothing.
  TensorId Dropout(ModuleId module, std::string_view name, std::int64_t rows, std::int64_t features,
                   double p, TensorId x);

  // The convolution that makes `image` writes (pixels, channels) instead. False when no convolution
  // makes it.
  bool MakeTokens(TensorId image);

  [[nodiscard]] Model& model() { return model_; }
  [[nodiscard]] const Model& model() const { return model_; }
  // Ends the construction; the builder is empty afterwards.
  [[nodiscard]] Model Finish();

 private:
  struct SpecHash {
    std::size_t operator()(const OpSpec& spec) const noexcept;
  };

  [[nodiscard]] std::string ChildName(ModuleId module, std::string_view name) const;
  std::uint32_t Intern(const OpSpec& spec);

  std::string where_;
  double norm_epsilon_ = 1e-5;
  double norm_weight_offset_ = 0.0;
  bool norm_scales_input_ = false;
  Model model_;
  std::unordered_map<OpSpec, std::uint32_t, SpecHash> specs_;  // looked up, never iterated
};

}  // namespace shardwright
