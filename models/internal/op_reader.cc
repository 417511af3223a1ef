#include "models/internal/op_reader.h"

#include <array>
#include <optional>

#include "core/error.h"
#include "core/json.h"
#include "core/ranges.h"
#include "core/text.h"

namespace shardwright {

std::int64_t ElementsOf(const std::vector<std::int64_t>& dims) {
  std::int64_t n = 1;
  for (const std::int64_t d : dims) {
    n *= d;
  }
  return n;
}

const std::vector<std::int64_t>& OpReader::ShapeOf(std::size_t param) const {
  return builder_.model().params[op_.params[param].value].shape;
}

std::int64_t OpReader::Int(std::string_view key, std::int64_t min, std::int64_t max) const {
  return EvaluateSize(op_.json.At(key), sizes(), min, max);
}

std::int64_t OpReader::Int(std::string_view key, std::int64_t fallback, std::int64_t min,
                           std::int64_t max) const {
  const std::optional<JsonValue> value = op_.json.Find(key);
  return value ? EvaluateSize(*value, sizes(), min, max) : fallback;
}

std::vector<std::int64_t> OpReader::Shape(const JsonValue& list) const {
  constexpr std::size_t kMostDimensions = 16;
  if (list.size() > kMostDimensions) {
    throw list.Error("at most " + std::to_string(kMostDimensions) + " dimensions");
  }
  std::vector<std::int64_t> dims;
  std::int64_t elements = 1;
  for (std::size_t i = 0; i < list.size(); ++i) {
    const std::int64_t size = EvaluateSize(list[i], sizes(), 1, ModelLimits::kTensorElements);
    if (__builtin_mul_overflow(elements, size, &elements) ||
        elements > ModelLimits::kTensorElements) {
      throw list.Error("at most 2^56 elements");
    }
    dims.push_back(size);
  }
  return dims;
}

bool OpReader::Flag(std::string_view key) const {
  const std::optional<JsonValue> value = op_.json.Find(key);
  return value && value->AsBool();
}

double OpReader::Positive(std::string_view key, double fallback) const {
  const std::optional<JsonValue> value = op_.json.Find(key);
  if (!value) {
    return fallback;
  }
  const double number = value->AsDouble();
  if (number != fallback && !(number > 0.0 && number < 1e18)) {  // 0 where it says "none"
    throw value->Error("a positive number below 1e18");
  }
  return number;
}

void OpReader::MarkLabels(std::size_t i) {
  Tensor& tensor = builder_.model().tensors[In(i).id.value];
  if (tensor.input == InputKind::kTokens) {
    tensor.input = InputKind::kLabels;
  }
}

bool OpReader::MakeTokens(std::size_t i) {
  return builder_.MakeTokens(In(i).id);
}

double OpReader::Probability() const {
  const std::optional<JsonValue> value = op_.json.Find("p");
  return value ? value->AsProbability() : 0.0;
}

WrittenActivation OpReader::Function() const {
  constexpr std::array<WrittenActivation, 8> kFunctions = {
      {{Activation::kRelu},
       {Activation::kGelu},
       {Activation::kGeluTanh},
       {Activation::kGeluTanh, GeluCode::kNew},
       {Activation::kGeluTanh, GeluCode::kFast},
       {Activation::kSilu},
       {Activation::kTanh},
       {Activation::kSigmoid}}};
  return kFunctions[op_.json.At("function")
                        .AsChoice({"relu", "gelu", "gelu_tanh", "gelu_new", "gelu_fast", "silu",
                                   "tanh", "sigmoid"})];
}

std::pair<std::int64_t, std::int64_t> OpReader::Matrix(std::size_t i) const {
  if (In(i).is_index || In(i).dims.size() != 2) {
    Fail(i, "(rows, features); put a flatten or tokens op before");
  }
  return {In(i).dims[0], In(i).dims[1]};
}

const std::vector<std::int64_t>& OpReader::Image(std::size_t i) const {
  if (In(i).is_index || In(i).dims.size() != 3) {
    Fail(i, "(channels, height, width)");
  }
  return In(i).dims;
}

std::pair<std::int64_t, std::int64_t> OpReader::Elements(std::size_t i) const {
  const std::vector<std::int64_t>& dims = In(i).dims;
  if (In(i).is_index) {
    Fail(i, "an activation, not ids");
  }
  const std::int64_t features = dims.size() == 3 ? dims.front() : dims.back();
  return {ElementsOf(dims) / features, features};
}

void OpReader::RequireDims(std::size_t i, const std::vector<std::int64_t>& dims) const {
  if (In(i).dims != dims) {
    Fail(i, ShapeText(dims));
  }
}

void OpReader::RequireShape(std::size_t param, const std::vector<std::int64_t>& shape) const {
  if (ShapeOf(param) != shape) {
    FailParam(param, ShapeText(shape));
  }
}

void OpReader::RequireRank(std::size_t param, std::size_t rank) const {
  if (ShapeOf(param).size() != rank) {
    FailParam(param, std::to_string(rank) + " dimensions");
  }
}

void OpReader::Fail(std::size_t i, const std::string& expected) const {
  throw InputError(op_.json.path().Field("inputs").Index(i).str(),
                   "a tensor of shape " + ShapeText(In(i).dims), expected);
}

void OpReader::FailParam(std::size_t param, const std::string& expected) const {
  const Parameter& p = builder_.model().params[op_.params[param].value];
  throw InputError(op_.json.path().str(), "parameter " + p.fqn + " of shape " + ShapeText(p.shape),
                   expected);
}

std::vector<FileTensor> OpReader::Emit(const OpSpec& spec, const std::vector<std::int64_t>& dims) {
  std::vector<TensorId> inputs = Mapped<TensorId>(op_.inputs, &FileTensor::id);
  std::optional<OpSpec> stopped;
  if (Flag("stops_gradient")) {
    stopped = spec;
    stopped->other.stops_gradient = true;
  }
  const ModelOpId id = builder_.AddOp(op_.module, op_.name, stopped ? *stopped : spec,
                                      std::move(inputs), op_.params);
  std::vector<FileTensor> outputs;
  for (const TensorId output : builder_.model().ops[id.value].outputs) {
    outputs.push_back({.id = output, .dims = dims, .is_index = false});
  }
  return outputs;
}

}  // namespace shardwright
