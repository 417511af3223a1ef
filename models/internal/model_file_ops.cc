#include "models/internal/model_file_ops.h"

#include <array>
#include <optional>

#include "core/error.h"
#include "core/ranges.h"
#include "models/internal/op_reader.h"
#include "models/internal/other_op.h"

namespace shardwright {
namespace {

constexpr std::int64_t kLargestHeadDim = std::int64_t{1} << 16;
constexpr std::size_t kMany = 1 << 16;
constexpr std::size_t kManyBits = 32;  // inputs, of which OpKernels has a bit each

using Result = std::vector<FileTensor>;

std::vector<std::int64_t> ReadInputShape(const JsonValue& shape, FileSizes& sizes) {
  constexpr std::size_t kMostDimensions = 8;
  std::vector<std::int64_t> dims;
  for (std::size_t i = 0; i < shape.size(); ++i) {
    // (channels, height, width) or (rows, features).
    const bool is_image = shape.size() == 3;
    dims.push_back(EvaluateSize(shape[i], sizes, 1,
                                is_image && i > 0 ? ModelLimits::kPixels : ModelLimits::kFeatures));
  }
  if (dims.size() == 1) {
    dims.insert(dims.begin(), 1);
  }
  if (dims.empty() || dims.size() > kMostDimensions) {
    throw shape.Error("[features], [rows, features], [channels, height, width] or up to " +
                      std::to_string(kMostDimensions) + " dimensions");
  }
  return dims;
}

Result AddInput(OpReader& r) {
  return {AddFileInput(r.builder(), r.op().json, r.sizes())};
}

Result AddLinear(OpReader& r) {
  const auto [rows, features] = r.Matrix(0);
  r.RequireRank(0, 2);
  const bool is_transposed = r.Flag("transposed");
  const std::int64_t in = r.ShapeOf(0)[is_transposed ? 0 : 1];
  const std::int64_t out = r.ShapeOf(0)[is_transposed ? 1 : 0];
  r.RequireDims(0, {rows, in});
  if (r.HasBias()) {
    r.RequireShape(1, {out});
  }
  return r.Emit({.kind = OpKind::kLinear,
                 .rows = rows,
                 .in = features,
                 .out = out,
                 .has_bias = r.HasBias(),
                 .transposed = is_transposed},
                {rows, out});
}

Result AddEmbedding(OpReader& r) {
  if (!r.In(0).is_index) {
    r.Fail(0, "ids");
  }
  r.RequireRank(0, 2);
  const std::int64_t rows = r.In(0).dims[0];
  const std::int64_t out = r.ShapeOf(0)[1];
  const std::int64_t vocab = r.ShapeOf(0)[0];
  return r.Emit({.kind = OpKind::kEmbedding,
                 .rows = rows,
                 .out = out,
                 .vocab = vocab,
                 .index_offset = r.Int("index_offset", 0, 0, vocab - 1),
                 .padding_row = r.Int("padding_row", -1, 0, vocab - 1)},
                {rows, out});
}

Result AddNorm(OpReader& r, OpKind kind) {
  const auto [rows, features] = r.Matrix(0);
  r.RequireRank(0, 1);
  // A norm narrower than the features is one per head.
  const std::int64_t width = r.ShapeOf(0)[0];
  const bool is_of_first = r.Flag("first_features") && width <= features;
  if (!is_of_first && features % width != 0) {
    r.Fail(0, "features that " + std::to_string(width) + " divides, the size of the norm");
  }
  if (r.HasBias()) {
    r.RequireShape(1, {width});
  }
  return r.Emit({.kind = kind,
                 .rows = is_of_first ? rows : rows * (features / width),
                 .in = width,
                 .has_bias = r.HasBias(),
                 .epsilon = r.Positive("epsilon", kind == OpKind::kRmsNorm ? 1e-6 : 1e-5),
                 .weight_offset = r.Positive("weight_offset", 0.0),
                 .scales_input = r.Flag("scales_input")},
                is_of_first ? std::vector<std::int64_t>{rows, width} : r.In(0).dims);
}

// Gate and up side by side in each row of one input.
Result AddPackedGate(OpReader& r, OpSpec spec) {
  const auto [rows, features] = r.Matrix(0);
  if (features % 2 != 0) {
    r.Fail(0, "an even number of features: gate, then up");
  }
  spec.in = features / 2;
  spec.packed_gate = true;
  return r.Emit(spec, {rows, spec.in});
}

Result AddElementwise(OpReader& r, OpKind kind) {
  const auto [rows, in] = r.Elements(0);
  OpSpec spec{.kind = kind, .rows = rows, .in = in};
  if (kind == OpKind::kActivation || kind == OpKind::kGatedActivation) {
    const WrittenActivation written = r.Function();
    spec.activation = written.function;
    spec.gelu_code = written.gelu_code;
  }
  if (kind == OpKind::kDropout) {
    spec.dropout_p = r.Probability();
  }
  if (kind == OpKind::kScale) {
    spec.factor = r.Positive("factor", 1.0);
  }
  if (kind == OpKind::kGatedActivation && r.op().inputs.size() == 1) {
    return AddPackedGate(r, spec);
  }
  const bool has_param = !r.op().params.empty();
  if (r.op().inputs.size() == 2) {
    // A product may scale whole channels (squeeze and excitation).
    const std::vector<std::int64_t>& a = r.In(0).dims;
    const bool is_channel_scale = kind == OpKind::kMul && a.size() == 3 &&
                                  r.In(1).dims == std::vector<std::int64_t>{a[0], 1, 1};
    if (!is_channel_scale) {
      r.RequireDims(1, a);
    }
  }
  if (kind == OpKind::kAdd) {
    // The second operand is a tensor or a parameter (a position table), which has_bias says.
    if (has_param == (r.op().inputs.size() == 2)) {
      throw InputError(r.op().json.path().str(),
                       std::to_string(r.op().inputs.size()) + " inputs and " +
                           std::to_string(r.op().params.size()) + " parameters",
                       "two operands: two inputs, or one input and one parameter");
    }
    if (has_param && ElementsOf(r.ShapeOf(0)) != rows * in) {
      r.RequireShape(0, r.In(0).dims);
    }
    spec.has_bias = has_param;
  }
  return r.Emit(spec, r.In(0).dims);
}

OpSpec ReadHeads(const OpReader& r, OpKind kind) {
  OpSpec spec{.kind = kind};
  spec.heads = r.Int("heads", 1, ModelLimits::kHeads);
  spec.kv_heads = r.Int("kv_heads", spec.heads, 1, spec.heads);
  spec.head_dim = r.Int("head_dim", 1, kLargestHeadDim);
  return spec;
}

// q and k; one packed tensor; or q and the two parts of k, each beside other features (DeepSeek).
void CheckRopeInputs(const OpReader& r, const OpSpec& spec) {
  const std::int64_t query = spec.heads * spec.head_dim;
  const std::int64_t key = spec.kv_heads * spec.head_dim;
  if (spec.rope.dim % 2 != 0) {
    throw InputError(r.op().json.path().str(), std::to_string(spec.rope.dim) + " rotated features",
                     "an even number");
  }
  if (r.op().inputs.size() == 1) {
    r.RequireDims(0, {spec.rows, query + 2 * key});
    return;
  }
  r.RequireDims(0, {spec.rows, query});
  if (r.op().inputs.size() == 2) {
    r.RequireDims(1, {spec.rows, key});
  }
}

Result AddRope(OpReader& r) {
  OpSpec spec = ReadHeads(r, OpKind::kRope);
  spec.rows = r.Matrix(0).first;
  spec.packed_by_head = r.Flag("packed_by_head");
  spec.rope = {.dim = r.Int("rotary_dim", spec.head_dim, 2, spec.head_dim),
               .theta = r.Positive("theta", 10'000.0),
               .interleaved = r.Flag("interleaved")};
  if (r.op().angles != nullptr && !r.Flag("unscaled")) {
    const RopeAngles own = spec.rope;
    spec.rope = (*r.op().angles)(own.dim);
    spec.rope.theta = own.theta;
    spec.rope.interleaved = own.interleaved;
  }
  CheckRopeInputs(r, spec);
  Result outputs = r.Emit(spec, {spec.rows, spec.heads * spec.head_dim});
  outputs[1].dims = {spec.rows, spec.kv_heads * spec.head_dim};
  return outputs;
}

Result AddAttention(OpReader& r) {
  OpSpec spec = ReadHeads(r, OpKind::kAttention);
  spec.value_dim = r.Int("value_dim", spec.head_dim, 1, kLargestHeadDim);
  spec.rows = r.Matrix(0).first;
  spec.seq_q = spec.rows;
  spec.seq_k = spec.rows;
  spec.causal = r.Flag("causal");
  spec.window = r.Int("window", 0, 0, ModelLimits::kTokens);
  spec.dropout_p = r.Probability();
  spec.factor = r.Positive("factor", 0.0);
  spec.soft_cap = r.Positive("soft_cap", 0.0);
  spec.alibi_max = r.Positive("alibi_max", 0.0);
  spec.packed_by_head = r.Flag("packed_by_head");
  spec.materialized = r.Flag("materialized");
  spec.native_groups = r.Flag("native_groups");
  spec.heads_first = r.Flag("heads_first");
  const std::int64_t query = spec.heads * spec.head_dim;
  const std::int64_t key = spec.kv_heads * spec.head_dim;
  const std::int64_t value = spec.kv_heads * spec.value_dim;
  if (r.op().inputs.size() == 1) {
    r.RequireDims(0, {spec.rows, query + key + value});
  } else if (r.op().inputs.size() == 2) {
    throw InputError(r.op().json.path().Field("inputs").str(), "2 tensors",
                     "one packed tensor, or queries, keys, values and perhaps a position bias");
  } else {
    r.RequireDims(0, {spec.rows, query});
    spec.seq_k = r.Matrix(1).first;
    r.RequireDims(1, {spec.seq_k, key});
    if (!r.Flag("values_beside") || r.Matrix(2).second < value) {
      r.RequireDims(2, {spec.seq_k, value});
    }
    spec.has_bias = r.op().inputs.size() == 4;
  }
  return r.Emit(spec, {spec.rows, spec.heads * spec.value_dim});
}

Result AddPositionBias(OpReader& r) {
  r.RequireRank(0, 2);
  r.sizes().reads_sequence_length = true;
  const std::int64_t tokens = r.sizes().sequence_length;
  const std::int64_t heads = r.ShapeOf(0)[1];
  if (tokens == 0 || heads > ModelLimits::kHeads) {
    throw InputError(r.op().json.path().str(), "no sequence_length or too many heads",
                     "a sequence_length in the file and at most " +
                         std::to_string(ModelLimits::kHeads) + " heads");
  }
  return r.Emit({.kind = OpKind::kPositionBias,
                 .vocab = r.ShapeOf(0)[0],
                 .heads = heads,
                 .seq_q = tokens,
                 .seq_k = tokens,
                 .causal = r.Flag("causal"),
                 .max_distance = r.Int("max_distance", 128, 1, ModelLimits::kTokens)},
                {heads * tokens, tokens});
}

// Output size of a convolution or pool along one axis. Zero or less: the kernel does not fit.
std::int64_t SlidingSize(std::int64_t size, const OpSpec& spec) {
  const std::int64_t span = size + 2 * spec.padding - spec.kernel;
  return span < 0 ? 0 : span / spec.stride + 1;
}

void SetOutputSize(const OpReader& r, OpSpec& spec) {
  spec.height_out = SlidingSize(spec.height, spec);
  spec.width_out = SlidingSize(spec.width, spec);
  if (spec.height_out < 1 || spec.width_out < 1) {
    r.Fail(0, "at least the kernel size " + std::to_string(spec.kernel));
  }
}

Result AddConv2d(OpReader& r) {
  const std::vector<std::int64_t>& image = r.Image(0);
  r.RequireRank(0, 4);
  const std::vector<std::int64_t>& weight = r.ShapeOf(0);
  OpSpec spec{.kind = OpKind::kConv2d,
              .in = image[0],
              .out = weight[0],
              .has_bias = r.HasBias(),
              .height = image[1],
              .width = image[2],
              .kernel = weight[2],
              .stride = r.Int("stride", 1, 1, ModelLimits::kPixels),
              .padding = r.Int("padding", 0, 0, ModelLimits::kPixels),
              .groups = r.Int("groups", 1, 1, ModelLimits::kFeatures)};
  if (spec.in % spec.groups != 0 || spec.out % spec.groups != 0) {
    r.Fail(0, "channels that groups (" + std::to_string(spec.groups) + ") divides");
  }
  r.RequireShape(0, {spec.out, spec.in / spec.groups, spec.kernel, spec.kernel});
  if (r.HasBias()) {
    r.RequireShape(1, {spec.out});
  }
  SetOutputSize(r, spec);
  spec.tokens_out = r.Flag("tokens_out");
  if (spec.tokens_out) {
    return r.Emit(spec, {spec.height_out * spec.width_out, spec.out});
  }
  return r.Emit(spec, {spec.out, spec.height_out, spec.width_out});
}

Result AddBatchNorm(OpReader& r) {
  const std::vector<std::int64_t>& image = r.Image(0);
  r.RequireShape(0, {image[0]});
  r.RequireShape(1, {image[0]});
  return r.Emit({.kind = OpKind::kBatchNorm,
                 .in = image[0],
                 .has_bias = true,
                 .synchronized = r.Flag("synchronized"),
                 .height = image[1],
                 .width = image[2],
                 .epsilon = r.Positive("epsilon", 1e-5)},
                image);
}

Result AddPool(OpReader& r, OpKind kind) {
  const std::vector<std::int64_t>& image = r.Image(0);
  OpSpec spec{.kind = kind, .in = image[0], .height = image[1], .width = image[2]};
  if (r.Flag("global")) {
    spec.kernel = image[1];
    spec.stride = image[1];
    spec.height_out = 1;
    spec.width_out = 1;
  } else {
    spec.kernel = r.Int("kernel", 1, ModelLimits::kPixels);
    spec.stride = r.Int("stride", spec.kernel, 1, ModelLimits::kPixels);
    spec.padding = r.Int("padding", 0, 0, spec.kernel / 2);
    SetOutputSize(r, spec);
  }
  return r.Emit(spec, {spec.in, spec.height_out, spec.width_out});
}

Result AddConcat(OpReader& r) {
  const std::int64_t features = r.Matrix(0).second;
  std::int64_t rows = 0;
  for (std::size_t i = 0; i < r.op().inputs.size(); ++i) {
    rows += r.Matrix(i).first;
    r.RequireDims(i, {r.Matrix(i).first, features});
  }
  for (std::size_t i = 0; i < r.op().params.size(); ++i) {
    const std::int64_t elements = ElementsOf(r.ShapeOf(i));
    if (elements % features != 0) {
      r.RequireShape(i, {1, features});
    }
    rows += elements / features;
  }
  return r.Emit({.kind = OpKind::kConcat, .rows = rows, .in = features}, {rows, features});
}

Result AddSelect(OpReader& r) {
  const auto [rows, features] = r.Matrix(0);
  const std::int64_t selected = r.Int("rows", 1, 1, rows);
  return r.Emit({.kind = OpKind::kSelect, .rows = selected, .in = features}, {selected, features});
}

Result AddRouter(OpReader& r) {
  const auto [rows, features] = r.Matrix(0);
  r.RequireRank(0, 2);
  const std::int64_t experts = r.ShapeOf(0)[0];
  r.RequireShape(0, {experts, features});
  return r.Emit({.kind = OpKind::kRouter,
                 .rows = rows,
                 .in = features,
                 .groups = r.Int("groups", 1, 1, experts),
                 .experts = experts,
                 .experts_per_token = r.Int("experts_per_token", 1, experts),
                 .factor = r.Flag("unscaled") ? 0.0 : r.Positive("factor", 1.0),
                 .normalizes_top_k = !r.Flag("unnormalized"),
                 .scores_by_sigmoid = r.Flag("sigmoid"),
                 .groups_per_token = r.Int("groups_per_token", 0, 0, experts)},
                {rows, experts});
}

// The experts' intermediate size. One weight per projection for all experts, as Transformers 5 has
// them: gate and up in one.
std::int64_t IntermediateOfFused(const OpReader& r, std::int64_t experts, std::int64_t features,
                                 bool is_gated) {
  r.RequireRank(1, 3);
  const std::int64_t intermediate =
      r.ShapeOf(1)[r.ShapeOf(1)[1] == features ? std::size_t{2} : std::size_t{1}];
  const std::int64_t in = (is_gated ? 2 : 1) * intermediate;
  const std::vector<std::int64_t> other_in = {experts, features, in};  // stored as (in, out)
  const std::vector<std::int64_t> other_out = {experts, intermediate, features};
  if (r.ShapeOf(0) != other_in) {
    r.RequireShape(0, {experts, in, features});
  }
  if (r.ShapeOf(1) != other_out) {
    r.RequireShape(1, {experts, features, intermediate});
  }
  return intermediate;
}

// One weight per projection and expert.
std::int64_t IntermediateOfSeparate(const OpReader& r, std::int64_t experts, std::int64_t features,
                                    bool is_gated) {
  const std::size_t matrices = is_gated ? 3 : 2;
  if (r.op().params.size() != matrices * static_cast<std::size_t>(experts)) {
    throw InputError(
        r.op().json.path().str(), std::to_string(r.op().params.size()) + " parameters",
        std::to_string(matrices) + " for each of " + std::to_string(experts) + " experts");
  }
  r.RequireRank(0, 2);
  const std::int64_t intermediate = r.ShapeOf(0)[0];
  const std::vector<std::int64_t> in_shape = {intermediate, features};
  const std::vector<std::int64_t> out_shape = {features, intermediate};
  for (std::size_t i = 0; i < r.op().params.size(); ++i) {
    if (r.ShapeOf(i) != in_shape) {
      r.RequireShape(i, out_shape);
    }
  }
  return intermediate;
}

Result AddExperts(OpReader& r) {
  const auto [rows, features] = r.Matrix(0);
  const std::int64_t experts = r.Matrix(1).second;
  r.RequireDims(1, {rows, experts});
  const bool is_gated = r.Flag("gated");
  const bool is_fused = r.op().params.size() == 2 && r.ShapeOf(0).size() == 3;
  const std::int64_t intermediate = is_fused
                                        ? IntermediateOfFused(r, experts, features, is_gated)
                                        : IntermediateOfSeparate(r, experts, features, is_gated);
  const WrittenActivation activation = r.Function();
  return r.Emit({.kind = OpKind::kExperts,
                 .rows = rows,
                 .in = features,
                 .out = intermediate,
                 .gated = is_gated,
                 .activation = activation.function,
                 .gelu_code = activation.gelu_code,
                 .experts = experts,
                 .experts_per_token = r.Int("experts_per_token", 1, experts),
                 .up_last = r.Flag("up_last")},
                {rows, features});
}

Result AddLoss(OpReader& r, OpKind kind) {
  const auto [rows, classes] = r.Matrix(0);
  if (!r.In(1).is_index) {
    r.Fail(1, "ids");
  }
  r.RequireDims(1, {rows});
  r.MarkLabels(1);
  return r.Emit({.kind = kind, .rows = rows, .in = classes}, {1, 1});
}

// Views: another shape of the same storage, no op.
Result Flatten(OpReader& r) {
  const FileTensor& x = r.In(0);
  return {{.id = x.id, .dims = {1, ElementsOf(x.dims)}, .is_index = x.is_index}};
}

Result View(OpReader& r) {
  const FileTensor& x = r.In(0);
  std::vector<std::int64_t> dims = r.Shape(r.op().json.At("shape"));
  if (ElementsOf(dims) != ElementsOf(x.dims)) {
    r.Fail(0, std::to_string(ElementsOf(dims)) + " elements, as the shape of the view has");
  }
  return {{.id = x.id, .dims = std::move(dims), .is_index = x.is_index}};
}

Result Tokens(OpReader& r) {
  const std::vector<std::int64_t>& image = r.Image(0);
  if (!r.MakeTokens(0)) {
    r.Fail(0, "the output of a conv2d op");
  }
  return {{.id = r.In(0).id, .dims = {image[1] * image[2], image[0]}, .is_index = false}};
}

struct Kind {
  std::string_view name;
  std::function<Result(OpReader&)> add;
  std::size_t min_inputs;
  std::size_t max_inputs;
  std::size_t min_params;
  std::size_t max_params;
  std::vector<std::string> keys;
};

std::vector<Kind> WithCommonKeys(std::vector<Kind> kinds) {
  for (Kind& kind : kinds) {
    kind.keys.insert(kind.keys.begin(), {"op", "module", "name", "inputs", "output", "outputs",
                                         "params", "called_again", "returns_input"});
  }
  return kinds;
}

std::vector<std::string> AttentionKeys() {
  return {"heads",        "kv_heads",       "head_dim",    "value_dim",
          "causal",       "window",         "p",           "factor",
          "soft_cap",     "stops_gradient", "alibi_max",   "packed_by_head",
          "materialized", "native_groups",  "heads_first", "values_beside"};
}

std::vector<std::string> OtherKeys() {
  return {"function",
          "results",
          "forward",
          "backward_data",
          "backward_weight",
          "backward_workspace",
          "saves_inputs",
          "saves_outputs",
          "saves_inputs_for_weights",
          "saved",
          "cast",
          "stops_gradient"};
}

const std::vector<Kind>& Kinds() {
  using K = OpKind;
  const auto norm = [](K kind) { return [kind](OpReader& r) { return AddNorm(r, kind); }; };
  const auto element = [](K kind) {
    return [kind](OpReader& r) { return AddElementwise(r, kind); };
  };
  const auto pool = [](K kind) { return [kind](OpReader& r) { return AddPool(r, kind); }; };
  const auto loss = [](K kind) { return [kind](OpReader& r) { return AddLoss(r, kind); }; };
  static const std::vector<Kind> kinds = WithCommonKeys({
      {"input", AddInput, 0, 0, 0, 0, {"shape", "ids", "positions", "kind"}},
      {"embedding", AddEmbedding, 1, 1, 1, 1, {"padding_row", "index_offset"}},
      {"linear", AddLinear, 1, 1, 1, 2, {"transposed"}},
      {"layer_norm", norm(K::kLayerNorm), 1, 1, 1, 2, {"epsilon"}},
      {"rms_norm",
       norm(K::kRmsNorm),
       1,
       1,
       1,
       1,
       {"epsilon", "weight_offset", "scales_input", "first_features"}},
      {"rope",
       AddRope,
       1,
       3,
       0,
       0,
       {"heads", "kv_heads", "head_dim", "rotary_dim", "theta", "interleaved", "packed_by_head",
        "unscaled"}},
      {"attention", AddAttention, 1, 4, 0, 0, AttentionKeys()},
      {"activation", element(K::kActivation), 1, 1, 0, 0, {"function"}},
      {"gated_activation", element(K::kGatedActivation), 1, 2, 0, 0, {"function"}},
      {"add", element(K::kAdd), 1, 2, 0, 1, {}},
      {"mul", element(K::kMul), 2, 2, 0, 0, {}},
      {"scale", element(K::kScale), 1, 1, 0, 0, {"factor"}},
      {"dropout", element(K::kDropout), 1, 1, 0, 0, {"p", "stops_gradient"}},
      {"position_bias", AddPositionBias, 0, 0, 1, 1, {"causal", "max_distance"}},
      {"conv2d", AddConv2d, 1, 1, 1, 2, {"stride", "padding", "groups", "tokens_out"}},
      {"batch_norm", AddBatchNorm, 1, 1, 2, 2, {"epsilon", "synchronized"}},
      {"max_pool", pool(K::kMaxPool), 1, 1, 0, 0, {"kernel", "stride", "padding"}},
      {"avg_pool", pool(K::kAvgPool), 1, 1, 0, 0, {"kernel", "stride", "padding", "global"}},
      {"concat", AddConcat, 1, kManyBits, 0, kMany, {}},
      {"select", AddSelect, 1, 1, 0, 0, {"rows"}},
      {"router",
       AddRouter,
       1,
       1,
       1,
       1,
       {"experts_per_token", "factor", "unnormalized", "unscaled", "sigmoid", "groups",
        "groups_per_token", "stops_gradient"}},
      {"experts",
       AddExperts,
       2,
       2,
       2,
       kMany,
       {"function", "gated", "experts_per_token", "up_last", "stops_gradient"}},
      {"log_softmax", element(K::kLogSoftmax), 1, 1, 0, 0, {}},
      {"nll_loss", loss(K::kNllLoss), 2, 2, 0, 0, {}},
      {"cross_entropy", loss(K::kCrossEntropy), 2, 2, 0, 0, {}},
      {"flatten", Flatten, 1, 1, 0, 0, {}},
      {"tokens", Tokens, 1, 1, 0, 0, {}},
      {"view", View, 1, 1, 0, 0, {"shape"}},
      {"other", AddOther, 0, kManyBits, 0, kMany, OtherKeys()},
  });
  return kinds;
}

const Kind* FindKind(std::string_view name) {
  const auto found = FindIn(Kinds(), name, &Kind::name);
  return found == Kinds().end() ? nullptr : &*found;
}

std::string CountText(std::size_t min, std::size_t max) {
  if (max == kMany) {
    return "at least " + std::to_string(min);
  }
  return min == max ? std::to_string(min) : std::to_string(min) + " to " + std::to_string(max);
}

}  // namespace

bool IsKnownOp(std::string_view kind) {
  return FindKind(kind) != nullptr;
}

std::vector<std::string> KnownOps() {
  return Mapped<std::string>(Kinds(), &Kind::name);
}

bool TakesParams(std::string_view kind) {
  const Kind* found = FindKind(kind);
  return found != nullptr && found->min_params > 0;
}

FileTensor AddFileInput(ModelBuilder& builder, const JsonValue& entry, FileSizes& sizes) {
  FileTensor tensor;
  const std::optional<JsonValue> ids = entry.Find("ids");
  const std::optional<JsonValue> positions = entry.Find("positions");
  if (ids || positions) {
    tensor.is_index = true;
    tensor.dims = {EvaluateSize(ids ? *ids : *positions, sizes, 1, ModelLimits::kTokens)};
    // A loss that reads ids makes them labels, see AddLoss.
    constexpr std::array<InputKind, 3> kKinds = {InputKind::kTokens, InputKind::kTokenTypes,
                                                 InputKind::kDecoderTokens};
    const std::optional<JsonValue> kind = entry.Find("kind");
    const InputKind of_ids =
        kKinds[kind ? kind->AsChoice({"tokens", "token_types", "decoder_tokens"}) : 0];
    tensor.id = builder.AddInput(TensorRole::kIndex, tensor.dims[0],
                                 ids ? of_ids : InputKind::kPositions, ids.has_value());
  } else {
    tensor.dims = ReadInputShape(entry.At("shape"), sizes);
    tensor.id =
        builder.AddInput(TensorRole::kActivation, ElementsOf(tensor.dims), InputKind::kFeatures);
  }
  return tensor;
}

std::vector<FileTensor> AddFileOp(ModelBuilder& builder, const FileOp& op) {
  const Kind* kind = FindKind(op.json.At("op").AsString());
  SW_CHECK(kind != nullptr, "the caller has checked the kind");
  op.json.AllowOnly(kind->keys);
  if (op.inputs.size() < kind->min_inputs || op.inputs.size() > kind->max_inputs) {
    throw InputError(op.json.path().Field("inputs").str(),
                     std::to_string(op.inputs.size()) + " tensors",
                     CountText(kind->min_inputs, kind->max_inputs));
  }
  if (op.params.size() < kind->min_params || op.params.size() > kind->max_params) {
    throw InputError(op.json.path().str(), std::to_string(op.params.size()) + " parameters",
                     CountText(kind->min_params, kind->max_params) + " for op \"" +
                         std::string(kind->name) + '"');
  }
  OpReader reader(builder, op);
  return kind->add(reader);
}

}  // namespace shardwright
