#include "models/internal/builder.h"

#include <optional>

#include "core/error.h"
#include "core/text.h"

namespace shardwright {
namespace {

// a * b, or nothing when it passes `limit`. Requires non-negative factors.
std::optional<std::int64_t> Product(std::int64_t a, std::int64_t b, std::int64_t limit) {
  if (a != 0 && b > limit / a) {
    return std::nullopt;
  }
  return a * b;
}

TensorRole RoleOf(const OpSpec& spec, std::size_t output) {
  switch (spec.kind) {
    case OpKind::kNllLoss:
    case OpKind::kCrossEntropy:
      return TensorRole::kLoss;
    case OpKind::kOther:
      switch (spec.other.outputs[output].type) {
        case OtherOutput::Type::kFp32:
          return TensorRole::kFp32;
        case OtherOutput::Type::kInt64:
          return TensorRole::kIndex;
        case OtherOutput::Type::kBool:
          return TensorRole::kBool;
        case OtherOutput::Type::kCompute:
          break;
      }
      return TensorRole::kActivation;
    default:
      return TensorRole::kActivation;
  }
}

// Has every sample an output of its own? An embedding of ids that are the same for every sample
// (0, 1, 2, ...) is computed once for the whole batch.
bool IsPerSample(const OpSpec& spec, std::size_t output, const Tensor* first_input) {
  switch (spec.kind) {
    case OpKind::kPositionBias:
      return false;
    case OpKind::kOther:
      return !spec.other.outputs[output].is_shared;
    case OpKind::kEmbedding:
      return first_input == nullptr || first_input->per_sample;
    default:
      return true;
  }
}

}  // namespace

std::int64_t OutputElements(const OpSpec& spec, std::size_t i) {
  switch (spec.kind) {
    case OpKind::kEmbedding:
    case OpKind::kLinear:
      return spec.rows * spec.out;
    case OpKind::kRope:
      return spec.rows * (i == 0 ? spec.heads : spec.kv_heads) * spec.head_dim;
    case OpKind::kAttention:
      return spec.rows * spec.heads * spec.value_dim;
    case OpKind::kPositionBias:
      return spec.heads * spec.seq_q * spec.seq_k;
    case OpKind::kConv2d:
      return spec.out * spec.height_out * spec.width_out;
    case OpKind::kBatchNorm:
      return spec.in * spec.height * spec.width;
    case OpKind::kMaxPool:
    case OpKind::kAvgPool:
      return spec.in * spec.height_out * spec.width_out;
    case OpKind::kRouter:
      return spec.rows * spec.experts;
    case OpKind::kDispatch:
      return spec.rows * spec.experts_per_token * spec.in;
    case OpKind::kNllLoss:
    case OpKind::kCrossEntropy:
      return 1;
    case OpKind::kLayerNorm:
    case OpKind::kRmsNorm:
    case OpKind::kActivation:
    case OpKind::kGatedActivation:
    case OpKind::kAdd:
    case OpKind::kMul:
    case OpKind::kScale:
    case OpKind::kDropout:
    case OpKind::kConcat:
    case OpKind::kSelect:
    case OpKind::kExperts:
    case OpKind::kExchange:
    case OpKind::kGatherTokens:
    case OpKind::kCombine:
    case OpKind::kLogSoftmax:
      return spec.rows * spec.in;
    case OpKind::kScatterTokens:
      return spec.rows / spec.tensor_ranks * spec.in;
    case OpKind::kOther:
      return spec.other.outputs[i].elements;
  }
  return 0;
}

std::size_t OutputCount(const OpSpec& spec) {
  switch (spec.kind) {
    case OpKind::kRope:
      return 2;
    case OpKind::kOther:
      return spec.other.outputs.size();
    default:
      return 1;
  }
}

std::size_t ModelBuilder::SpecHash::operator()(const OpSpec& spec) const noexcept {
  // Mixes the fields that tell the ops of one model apart; equality decides.
  std::uint64_t h =
      static_cast<std::uint64_t>(spec.kind) ^ std::hash<std::string>{}(spec.other.function);
  if (spec.kind == OpKind::kOther && !spec.other.outputs.empty()) {
    h += static_cast<std::uint64_t>(spec.other.outputs.front().elements);
  }
  for (const std::int64_t v : {spec.rows, spec.in, spec.out, spec.heads, spec.window, spec.height,
                               spec.stride, static_cast<std::int64_t>(spec.activation)}) {
    h = (h ^ static_cast<std::uint64_t>(v)) * 0x9e3779b97f4a7c15ULL;
    h ^= h >> 32;
  }
  return static_cast<std::size_t>(h);
}

ModelBuilder::ModelBuilder(std::string where, std::string name, std::string type,
                           std::string root_class)
    : where_(std::move(where)) {
  model_.name = std::move(name);
  model_.type = std::move(type);
  Module root;
  root.class_name = std::move(root_class);
  model_.modules.push_back(std::move(root));
}

std::string ModelBuilder::ChildName(ModuleId module, std::string_view name) const {
  const std::string& parent = model_.modules[module.value].fqn;
  std::string fqn;
  fqn.reserve(parent.size() + 1 + name.size());
  fqn += parent;
  if (!parent.empty()) {
    fqn += '.';
  }
  fqn += name;
  return fqn;
}

ModuleId ModelBuilder::AddModule(ModuleId parent, std::string_view name,
                                 std::string_view class_name) {
  const ModuleId id(model_.modules.size());
  Module module;
  module.name = name;
  module.fqn = ChildName(parent, name);
  module.class_name = class_name;
  module.parent = parent;
  model_.modules.push_back(std::move(module));
  model_.modules[parent.value].children.push_back(id);
  return id;
}

ParamId ModelBuilder::AddParam(ModuleId module, std::string_view name,
                               std::vector<std::int64_t> shape) {
  std::string fqn = ChildName(module, name);
  std::optional<std::int64_t> elements = 1;
  for (const std::int64_t size : shape) {
    elements = size < 1 ? std::nullopt : Product(*elements, size, ModelLimits::kParameterElements);
    if (!elements) {
      throw InputError(where_, "a parameter " + fqn + " of shape " + ShapeText(shape),
                       "positive sizes and at most 2^40 elements");
    }
  }
  if (static_cast<std::int64_t>(model_.params.size()) >= ModelLimits::kParameters) {
    throw InputError(where_,
                     "more than " + std::to_string(ModelLimits::kParameters) + " parameters",
                     "a model with fewer");
  }
  const ParamId id(model_.params.size());
  Parameter param;
  param.fqn = std::move(fqn);
  param.shape = std::move(shape);
  param.module = module;
  model_.params.push_back(std::move(param));
  model_.modules[module.value].params.push_back(id);
  return id;
}

ParamId ModelBuilder::AddTied(ModuleId module, std::string_view name, ParamId target) {
  const Parameter& original = model_.params[target.value];
  const ParamId storage = original.tied_to.valid() ? original.tied_to : target;
  const ParamId id = AddParam(module, name, original.shape);
  model_.params[id.value].tied_to = storage;
  return id;
}

void ModelBuilder::AddBuffer(ModuleId module, std::int64_t elements) {
  model_.modules[module.value].buffer_elements += elements;
}

TensorId ModelBuilder::AddInput(TensorRole role, std::int64_t elements, InputKind kind,
                                bool per_sample) {
  const TensorId id(model_.tensors.size());
  model_.tensors.push_back({.role = role,
                            .elements = elements,
                            .per_sample = per_sample,
                            .producer = {},
                            .input = kind});
  return id;
}

std::uint32_t ModelBuilder::Intern(const OpSpec& spec) {
  const auto [it, inserted] =
      specs_.try_emplace(spec, static_cast<std::uint32_t>(model_.specs.size()));
  if (inserted) {
    model_.specs.push_back(spec);
  }
  return it->second;
}

ModelOpId ModelBuilder::AddOp(ModuleId module, std::string_view name, const OpSpec& spec,
                              std::vector<TensorId> inputs, std::vector<ParamId> params) {
  const ModelOpId id(model_.ops.size());
  const std::size_t output_count = OutputCount(spec);
  ModelOp op;
  op.spec = Intern(spec);
  op.module = module;
  op.name = name;
  op.outputs.reserve(output_count);
  for (std::size_t i = 0; i < output_count; ++i) {
    const std::int64_t elements = OutputElements(spec, i);
    if (elements < 1 || elements > ModelLimits::kTensorElements) {
      throw InputError(where_,
                       "an output of " + std::to_string(elements) + " elements per sample from " +
                           ChildName(module, name),
                       "1 to 2^56");
    }
    const bool per_sample =
        IsPerSample(spec, i, inputs.empty() ? nullptr : &model_.tensors[inputs[0].value]);
    op.outputs.push_back(TensorId(model_.tensors.size()));
    model_.tensors.push_back(
        {.role = RoleOf(spec, i), .elements = elements, .per_sample = per_sample, .producer = id});
  }
  op.inputs = std::move(inputs);
  op.params = std::move(params);
  model_.ops.push_back(std::move(op));
  return id;
}

bool ModelBuilder::MakeTokens(TensorId image) {
  const ModelOpId producer = model_.tensors[image.value].producer;
  if (!producer.valid()) {
    return false;
  }
  ModelOp& op = model_.ops[producer.value];
  OpSpec spec = model_.SpecOf(op);
  if (spec.kind != OpKind::kConv2d) {
    return false;
  }
  spec.tokens_out = true;
  op.spec = Intern(spec);
  return true;
}

Model ModelBuilder::Finish() {
  specs_.clear();
  return std::move(model_);
}

}  // namespace shardwright
