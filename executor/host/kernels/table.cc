#include "executor/host/kernels/table.h"

#include <array>
#include <cstddef>

#include "core/error.h"
#include "executor/host/kernels/kernels.h"

namespace shardwright {
namespace {

struct HostKernel {
  OpKind kind;
  void (*forward)(const ModelOpCall&);
  void (*backward)(const ModelOpCall&);
};

// In the order of OpKind.
constexpr std::array<HostKernel, 30> kTable = {{
    {OpKind::kEmbedding, EmbeddingForward, EmbeddingBackward},
    {OpKind::kLinear, LinearForward, LinearBackward},
    {OpKind::kLayerNorm, LayerNormForward, LayerNormBackward},
    {OpKind::kRmsNorm, RmsNormForward, RmsNormBackward},
    {OpKind::kRope, RopeForward, RopeBackward},
    {OpKind::kAttention, AttentionForward, AttentionBackward},
    {OpKind::kActivation, ActivationForward, ActivationBackward},
    {OpKind::kGatedActivation, GatedActivationForward, GatedActivationBackward},
    {OpKind::kAdd, AddForward, AddBackward},
    {OpKind::kMul, MulForward, MulBackward},
    {OpKind::kScale, ScaleForward, ScaleBackward},
    {OpKind::kDropout, DropoutForward, DropoutBackward},
    {OpKind::kPositionBias, PositionBiasForward, PositionBiasBackward},
    {OpKind::kConv2d, Conv2dForward, Conv2dBackward},
    {OpKind::kBatchNorm, BatchNormForward, BatchNormBackward},
    {OpKind::kMaxPool, MaxPoolForward, MaxPoolBackward},
    {OpKind::kAvgPool, AvgPoolForward, AvgPoolBackward},
    {OpKind::kConcat, ConcatForward, ConcatBackward},
    {OpKind::kSelect, SelectForward, SelectBackward},
    {OpKind::kRouter, RouterForward, RouterBackward},
    {OpKind::kExperts, ExpertsForward, ExpertsBackward},
    {OpKind::kLogSoftmax, LogSoftmaxForward, LogSoftmaxBackward},
    {OpKind::kNllLoss, NllLossForward, NllLossBackward},
    {OpKind::kCrossEntropy, CrossEntropyForward, CrossEntropyBackward},
    {OpKind::kOther, nullptr, nullptr},
    {OpKind::kDispatch, DispatchForward, DispatchBackward},
    {OpKind::kExchange, MoveTokensForward, MoveTokensBackward},  // of experts: a collective alone
    {OpKind::kCombine, CombineForward, CombineBackward},
    {OpKind::kGatherTokens, MoveTokensForward, MoveTokensBackward},
    {OpKind::kScatterTokens, MoveTokensForward, MoveTokensBackward},
}};

const HostKernel& KernelOf(const ModelOpCall& call) {
  const auto row = static_cast<std::size_t>(call.spec->kind);
  SW_CHECK(
      row < kTable.size() && kTable[row].kind == call.spec->kind && kTable[row].forward != nullptr,
      "the table is in the order of OpKind, and the plan's ops have kernels");
  return kTable[row];
}

}  // namespace

void ForwardOnHost(const ModelOpCall& call) {
  KernelOf(call).forward(call);
}

void BackwardOnHost(const ModelOpCall& call) {
  KernelOf(call).backward(call);
}

std::string KernelProblem(const OpSpec& spec, DType compute, const KernelSetOptions& options,
                          const std::string& device) {
  if (spec.kind == OpKind::kOther) {
    return "no kernel of " + device + " does " + spec.other.function +
           ", which can be planned only";
  }
  if (spec.kind == OpKind::kAttention && spec.materialized) {
    return device + "'s attention keeps no scores; the model writes it out";
  }
  if (compute != DType::kFp32 && compute != DType::kBf16 && compute != DType::kFp16) {
    return device + " computes in fp32, bf16 or fp16 only";
  }
  if (spec.kind == OpKind::kRope && spec.rope.scaling == RopeScaling::kOther) {
    return "the model's rope_scaling rule is not known; known are linear and llama3";
  }
  if (spec.kind == OpKind::kRope && spec.rope.dim == 0) {
    return "the model gives no rotary angles";
  }
  if (!IsFused(options.attention) && spec.kind == OpKind::kAttention) {
    return device + "'s attention keeps no scores; the plan asks for materialised ones";
  }
  return {};
}

std::string HostKernelProblem(const OpSpec& spec, DType compute, const KernelSetOptions& options) {
  return options.host_kernels
             ? KernelProblem(spec, compute, options, "the host")
             : "the plan's kernel set is " + options.name +
                   "; the host runs shardwright-host only (its kernels keep and need other memory)";
}

}  // namespace shardwright
