#include "models/kernel_set.h"

#include <algorithm>
#include <utility>

#include "core/error.h"
#include "core/text.h"
#include "models/kernels/kernels.h"

namespace shardwright {
namespace {

// One row per software stack. docs/kernel_sets.md gives the reason of each value.
std::vector<KernelSetOptions> PlainSets() {
  return {
      {.name = "torch-eager",
       .repeat_kv = true,
       .flash_position_bias = true,
       .flash_soft_cap = false},
      {.name = "torch-compile",
       .fused_elementwise = true,
       .fused_rope = true,
       .repeat_kv = true,
       .flash_position_bias = true,
       .fused_loss = true},
      {.name = "torch-compile-2024",
       .fused_elementwise = true,
       .fused_rope = true,
       .repeat_kv = true,
       .flash_position_bias = true},
      {.name = "torch-compile-2023",
       .attention = AttentionImpl::kMaterialized,
       .fused_elementwise = true,
       .fused_rope = true,
       .fused_softmax = true,
       .fused_loss = true,
       .whole_recompute = true},
      {.name = "torch-2024",
       .fused_norm = false,
       .repeat_kv = true,
       .flash_position_bias = true,
       .flash_soft_cap = false},
      {.name = "torch-2022",
       .attention = AttentionImpl::kMaterialized,
       .fused_norm = false,
       .fp32_logits = false,
       .whole_recompute = true},
      {.name = "megatron-1.1",
       .attention = AttentionImpl::kMaterialized,
       .softmax_keeps_input = true,
       .tokens_first = true,
       .fused_loss = true,
       .whole_recompute = true,
       .shifted_logits = true},
      {.name = "megatron-2021",
       .attention = AttentionImpl::kMaterialized,
       .fused_softmax = true,
       .tokens_first = true,
       .fused_loss = true,
       .whole_recompute = true,
       .shifted_logits = true},
      {.name = "jax-xla",
       .attention = AttentionImpl::kCudnn,
       .fused_elementwise = true,
       .fused_rope = true,
       .fused_loss = true,
       .inplace_rope = true},
  };
}

std::vector<KernelSetOptions> FrameworkSets() {
  return {
      {.name = "composer-2023",
       .attention = AttentionImpl::kTriton,
       .fp32_logits = false,
       .flash_position_bias = true,
       .fused_loss = true,
       .loss_metrics = 2},
      {.name = "composer-2024",
       .attention = AttentionImpl::kTriton,
       .fp32_logits = false,
       .flash_position_bias = true,
       .fused_loss = true,
       .loss_metrics = 2},
      {.name = "deepspeed",
       .fused_norm = false,
       .repeat_kv = true,
       .flash_soft_cap = false,
       .python_gelu_tanh = true,
       .keeps_logits = true,
       .whole_recompute = true},
      {.name = "internevo",
       .fused_rope = true,
       .fused_loss = true,
       .inplace_rope = true,
       .whole_recompute = true},
  };
}

std::vector<KernelSetOptions> TransformersSets() {
  return {
      {.name = "hf-eager",
       .fused_norm = false,
       .repeat_kv = true,
       .flash_soft_cap = false,
       .python_gelu_tanh = true,
       .keeps_logits = true,
       .whole_recompute = true},
      {.name = "hf-2026",
       .fused_norm = false,
       .repeat_kv = true,
       .flash_soft_cap = false,
       .python_gelu_tanh = true,
       .keeps_logits = true},
      {.name = "hf-trainer",
       .fused_norm = false,
       .flash_position_bias = true,
       .flash_soft_cap = false,
       .python_gelu_tanh = true,
       .whole_recompute = true,
       .shifted_logits = true},
      {.name = "hf-foak",
       .fused_rope = true,
       .flash_soft_cap = false,
       .python_gelu_tanh = true,
       .fused_loss = true,
       .inplace_rope = true,
       .whole_recompute = true,
       .shifted_logits = true},
      {.name = "hf-liger",
       .fused_rope = true,
       .loss_chunks = 16,
       .flash_soft_cap = false,
       .python_gelu_tanh = true,
       .inplace_rope = true,
       .whole_recompute = true},
      {.name = "hf-liger-full",
       .fused_elementwise = true,
       .fused_rope = true,
       .loss_chunks = 16,
       .flash_soft_cap = false,
       .python_gelu_tanh = true,
       .inplace_rope = true,
       .whole_recompute = true},
      {.name = "hf-2021",
       .attention = AttentionImpl::kMaterialized,
       .fused_norm = false,
       .fp32_logits = false,
       .softmax_keeps_input = true,
       .python_gelu_tanh = true,
       .keeps_logits = true,
       .whole_recompute = true,
       .shifted_logits = true},
      {.name = "hf-2022",
       .attention = AttentionImpl::kMaterialized,
       .fused_norm = false,
       .fp32_logits = false,
       .python_gelu_tanh = true,
       .keeps_logits = true,
       .whole_recompute = true,
       .shifted_logits = true},
      {.name = "hf-2023",
       .attention = AttentionImpl::kMaterialized,
       .fused_norm = false,
       .repeat_kv = true,
       .softmax_fp32 = true,
       .python_gelu_tanh = true,
       .keeps_logits = true,
       .whole_recompute = true},
  };
}

std::vector<KernelSetOptions> OwnSets() {
  const KernelSetOptions plain = {.name = "shardwright-cuda-plain",
                                  .fused_rope = true,
                                  .flash_position_bias = true,
                                  .fused_loss = true,
                                  .keeps_dropout_mask = false,
                                  .fused_reductions = true,
                                  .cuda_kernels = true};
  KernelSetOptions gelu = plain;
  gelu.name = "shardwright-cuda-gelu";
  gelu.fused_gelu = true;
  KernelSetOptions fused = gelu;
  fused.name = "shardwright-cuda-fused";
  fused.fused_residual = true;
  KernelSetOptions chunked = fused;
  chunked.name = "shardwright-cuda-chunked";
  chunked.loss_chunks = 8;
  return {
      {.name = "shardwright-host",
       .fused_rope = true,
       .flash_position_bias = true,
       .fused_loss = true,
       .keeps_dropout_mask = false,
       .fused_reductions = true,
       .host_kernels = true},
      {.name = "shardwright-cuda",
       .fused_elementwise = true,
       .fused_rope = true,
       .flash_position_bias = true,
       .fused_loss = true,
       .keeps_dropout_mask = false,
       .fused_reductions = true,
       .inplace_rope = true},
      plain,
      gelu,
      fused,
      chunked,
  };
}

const std::vector<KernelSetOptions>& KernelSetTable() {
  static const std::vector<KernelSetOptions> table = [] {
    std::vector<KernelSetOptions> all = PlainSets();
    for (const std::vector<KernelSetOptions>& more :
         {FrameworkSets(), TransformersSets(), OwnSets()}) {
      all.insert(all.end(), more.begin(), more.end());
    }
    return all;
  }();
  return table;
}

}  // namespace

std::span<const KernelSetOptions> BuiltinKernelSets() {
  return KernelSetTable();
}

const KernelSetOptions& FindKernelSet(std::string_view name, std::string_view where) {
  std::vector<std::string> names;
  for (const KernelSetOptions& options : KernelSetTable()) {
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
         std::none_of(op.inputs.begin(), op.inputs.end(),
                      [&](TensorId t) { return model.tensors[t.value].per_sample; });
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
