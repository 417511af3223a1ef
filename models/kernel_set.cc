#include "models/kernel_set.h"

#include <array>
#include <utility>

#include "core/embedded.h"
#include "core/error.h"
#include "core/json.h"
#include "core/ranges.h"
#include "core/text.h"
#include "models/kernel_sets.h"
#include "models/kernels/kernels.h"

namespace shardwright {
namespace {

using Options = KernelSetOptions;

// The keys of kernel_sets.json.
constexpr std::pair<const char*, bool Options::*> kSwitches[] = {
    {"fused_elementwise", &Options::fused_elementwise},
    {"fused_rope", &Options::fused_rope},
    {"fused_norm", &Options::fused_norm},
    {"fp32_logits", &Options::fp32_logits},
    {"autocast_weights", &Options::autocast_weights},
    {"repeat_kv", &Options::repeat_kv},
    {"flash_position_bias", &Options::flash_position_bias},
    {"flash_soft_cap", &Options::flash_soft_cap},
    {"softmax_fp32", &Options::softmax_fp32},
    {"softmax_keeps_input", &Options::softmax_keeps_input},
    {"fused_softmax", &Options::fused_softmax},
    {"tokens_first", &Options::tokens_first},
    {"python_gelu_tanh", &Options::python_gelu_tanh},
    {"fused_loss", &Options::fused_loss},
    {"loss_in_place", &Options::loss_in_place},
    {"keeps_logits", &Options::keeps_logits},
    {"keeps_dropout_mask", &Options::keeps_dropout_mask},
    {"fused_reductions", &Options::fused_reductions},
    {"inplace_rope", &Options::inplace_rope},
    {"inplace_gate_gradients", &Options::inplace_gate_gradients},
    {"fused_gelu", &Options::fused_gelu},
    {"fused_residual", &Options::fused_residual},
    {"host_kernels", &Options::host_kernels},
    {"cuda_kernels", &Options::cuda_kernels},
    {"whole_recompute", &Options::whole_recompute},
    {"joined_products", &Options::joined_products},
    {"recomputes_attention", &Options::recomputes_attention},
    {"shifted_logits", &Options::shifted_logits},
};
constexpr std::pair<const char*, std::int64_t Options::*> kCounts[] = {
    {"loss_chunks", &Options::loss_chunks},
    {"loss_metrics", &Options::loss_metrics},
};
// In the order of AttentionImpl.
constexpr std::array<std::string_view, kAttentionImplCount> kAttentions = {
    "flash", "materialized", "cudnn", "flash3", "triton", "ck", "own"};

KernelSetOptions ReadSet(const JsonValue& row, const std::vector<KernelSetOptions>& before) {
  KernelSetOptions set;
  if (const auto like = row.Find("like")) {
    const auto found = FindIn(before, like->AsString(), &KernelSetOptions::name);
    SW_CHECK(found != before.end(), "no kernel set " + like->AsString() + " above it");
    set = *found;
  }
  set.name = row.At("name").AsString();
  std::vector<std::string> keys = {"name", "like", "attention"};
  for (const auto& [key, option] : kSwitches) {
    const auto value = row.Find(keys.emplace_back(key));
    set.*option = value ? value->AsBool() : set.*option;
  }
  for (const auto& [key, option] : kCounts) {
    const auto value = row.Find(keys.emplace_back(key));
    set.*option = value ? value->AsInt() : set.*option;
  }
  if (const auto attention = row.Find("attention")) {
    set.attention = static_cast<AttentionImpl>(attention->AsChoice(kAttentions));
  }
  row.AllowOnly(keys);
  return set;
}

}  // namespace

// One row per software stack. docs/kernel_sets.md gives the reason of each value.
std::span<const KernelSetOptions> BuiltinKernelSets() {
  static const std::vector<KernelSetOptions> table = [] {
    const EmbeddedFile& file = EmbeddedKernelSets().front();
    const JsonValue rows = JsonValue::Parse(file.text, std::string(file.path)).At("kernel_sets");
    std::vector<KernelSetOptions> all;
    for (std::size_t i = 0; i < rows.size(); ++i) {
      all.push_back(ReadSet(rows[i], all));
    }
    return all;
  }();
  return table;
}

const KernelSetOptions& FindKernelSet(std::string_view name, std::string_view where) {
  std::vector<std::string> names;
  for (const KernelSetOptions& options : BuiltinKernelSets()) {
    if (options.name == name) {
      return options;
    }
    names.push_back(options.name);
  }
  throw InputError(where, Quoted(name), "one of " + Listed(names, Quoted), DidYouMean(name, names));
}

namespace {

OpKernels LowerGeneral(const internal::LowerContext& context) {
  switch (context.spec.kind) {
    case OpKind::kEmbedding:
      return internal::LowerEmbedding(context);
    case OpKind::kLinear:
      return internal::LowerLinear(context);
    case OpKind::kLayerNorm:
      return internal::LowerLayerNorm(context);
    case OpKind::kRmsNorm:
      return internal::LowerRmsNorm(context);
    case OpKind::kRope:
      return internal::LowerRope(context);
    case OpKind::kAttention:
      return internal::LowerAttention(context);
    case OpKind::kActivation:
      return internal::LowerActivation(context);
    case OpKind::kGatedActivation:
      return internal::LowerGatedActivation(context);
    case OpKind::kAdd:
      return internal::LowerAdd(context);
    case OpKind::kMul:
      return internal::LowerMul(context);
    case OpKind::kScale:
      return internal::LowerScale(context);
    case OpKind::kDropout:
      return internal::LowerDropout(context);
    case OpKind::kPositionBias:
      return internal::LowerPositionBias(context);
    case OpKind::kConv2d:
      return internal::LowerConv2d(context);
    case OpKind::kBatchNorm:
      return internal::LowerBatchNorm(context);
    case OpKind::kMaxPool:
      return internal::LowerMaxPool(context);
    case OpKind::kAvgPool:
      return internal::LowerAvgPool(context);
    case OpKind::kConcat:
      return internal::LowerConcat(context);
    case OpKind::kSelect:
      return internal::LowerSelect(context);
    case OpKind::kRouter:
      return internal::LowerRouter(context);
    case OpKind::kExperts:
      return internal::LowerExperts(context);
    case OpKind::kDispatch:
      return internal::LowerDispatch(context);
    case OpKind::kExchange:
      return internal::LowerExchange(context);
    case OpKind::kCombine:
      return internal::LowerCombine(context);
    case OpKind::kGatherTokens:
    case OpKind::kScatterTokens:
      return internal::LowerMoveTokens(context);
    case OpKind::kLogSoftmax:
      return internal::LowerLogSoftmax(context);
    case OpKind::kNllLoss:
      return internal::LowerNllLoss(context);
    case OpKind::kCrossEntropy:
      return internal::LowerCrossEntropy(context);
    case OpKind::kOther:
      return internal::LowerOther(context);
  }
  SW_CHECK(false, "op kind " + std::to_string(static_cast<int>(context.spec.kind)));
  return {};
}

}  // namespace

OpKernels LowerOp(const OpSpec& spec, std::int64_t batch, DType compute,
                  const KernelSetOptions& options) {
  SW_CHECK(batch >= 1, "batch " + std::to_string(batch));
  const internal::LowerContext context{
      .spec = spec, .batch = batch, .compute = compute, .options = options, .s = SizeOf(compute)};
  OpKernels op = LowerGeneral(context);
  if (spec.kind == OpKind::kOther) {  // planned, not run
    return op;
  }
  if (options.cuda_kernels) {
    return internal::AdaptToCuda(context, std::move(op));
  }
  return options.host_kernels ? internal::AdaptToHost(context, std::move(op)) : op;
}

bool RunsOnce(const Model& model, const ModelOp& op) {
  return model.SpecOf(op).kind != OpKind::kOther && !op.inputs.empty() &&
         NoneOf(op.inputs, [&](TensorId t) { return model.tensors[t.value].per_sample; });
}

Kernel GradientSumKernel(Bytes bytes, DType compute) {
  return internal::PassKernel(KernelClass::kElementwise, compute, 2 * bytes.value, bytes.value);
}

Bytes TensorBytes(const Tensor& tensor, std::int64_t batch, DType compute) {
  std::int64_t element_bytes = SizeOf(compute);
  switch (tensor.role) {
    case TensorRole::kActivation:
      break;
    case TensorRole::kIndex:
      element_bytes = internal::kIndexBytes;
      break;
    case TensorRole::kLoss:
    case TensorRole::kFp32:
      element_bytes = internal::kFp32Bytes;
      break;
    case TensorRole::kBool:
      element_bytes = 1;
      break;
  }
  return Bytes(internal::Product({tensor.elements, tensor.per_sample ? batch : 1, element_bytes}));
}

}  // namespace shardwright
