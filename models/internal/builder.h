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

// An activation and how the model's code writes it.
struct WrittenActivation {
  Activation function = Activation::kNone;
  GeluCode gelu_code = GeluCode::kOneOperator;
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

  // An input of the model.
  TensorId AddInput(TensorRole role, std::int64_t elements, InputKind kind, bool per_sample = true);
  // The next op in execution order; the number of outputs follows from the kind.
  ModelOpId AddOp(ModuleId module, std::string_view name, const OpSpec& spec,
                  std::vector<TensorId> inputs, std::vector<ParamId> params);

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
  Model model_;
  std::unordered_map<OpSpec, std::uint32_t, SpecHash> specs_;  // looked up, never iterated
};

}  // namespace shardwright
