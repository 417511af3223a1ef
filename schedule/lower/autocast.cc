#include "schedule/lower/autocast.h"

#include "core/ranges.h"
#include "models/kernel_set.h"

namespace shardwright {
namespace {

// On autocast's list of 16 bits; what else has parameters of its own promotes to their dtype. Of
// ops known by their costs these are products.
bool RunsIn16Bits(const OpSpec& spec) {
  const auto is_product = [](const OtherKernel& kernel) {
    return kernel.pass == OtherKernel::Pass::kForward && kernel.flops != Amount{};
  };
  const OpKind kind = spec.kind;
  return kind == OpKind::kLinear || kind == OpKind::kAttention || kind == OpKind::kConv2d ||
         kind == OpKind::kRouter || kind == OpKind::kExperts ||
         (kind == OpKind::kOther && AnyOf(spec.other.kernels, is_product));
}

// These have rules of their own: losses say themselves what they upcast.
bool IsLeftAlone(OpKind kind) {
  return kind == OpKind::kBatchNorm || kind == OpKind::kLogSoftmax || kind == OpKind::kNllLoss ||
         kind == OpKind::kCrossEntropy;
}

// One more tensor of a count of bytes; a count that had no list becomes its first one.
void AddTensor(Bytes size, Bytes& total, std::vector<Bytes>& tensors) {
  if (tensors.empty() && total > Bytes(0)) {
    tensors.push_back(total);
  }
  tensors.push_back(size);
  total += size;
}

bool IsStoredWide(const LowerInput& in, const ModelAnalysis& a, ParamId p) {
  const bool as_master =
      in.model.params[p.value].trainable || in.job.frozen_format == FrozenFormat::kMaster;
  return as_master && a.masters[p.value] == DType::kFp32;
}

}  // namespace

void FindAutocast(const LowerInput& in, ModelAnalysis& a) {
  const KernelSetOptions& k = in.kernels;
  a.wide_tensors.assign(in.model.tensors.size(), false);
  a.wide_ops.assign(in.model.ops.size(), false);
  if (in.plan.dialect != Dialect::kDdp || in.job.precision.param == DType::kFp32 ||
      k.host_kernels || k.cuda_kernels || k.fused_elementwise || k.autocast_weights ||
      k.tokens_first) {
    return;
  }
  for (std::size_t i = 0; i < in.model.ops.size(); ++i) {
    const ModelOp& op = in.model.ops[i];
    const OpSpec& spec = in.model.SpecOf(op);
    const bool promotes = AnyOf(op.params, [&](ParamId p) { return IsStoredWide(in, a, p); }) ||
                          AnyOf(op.inputs, [&](TensorId t) { return a.wide_tensors[t.value]; });
    a.wide_ops[i] = promotes && !RunsIn16Bits(spec) && !IsLeftAlone(spec.kind);
    for (const TensorId t : op.outputs) {
      a.wide_tensors[t.value] =
          a.wide_ops[i] && in.model.tensors[t.value].role == TensorRole::kActivation;
    }
  }
}

OpKernels WithCasts(const LowerInput& in, const ModelOp& op, std::uint32_t inputs, bool trains,
                    OpKernels kernels) {
  const DType narrow = in.job.precision.param;
  for (std::size_t j = 0; j < op.inputs.size() && j < 32; ++j) {
    if (((inputs >> j) & 1U) == 0) {
      continue;
    }
    const Tensor& tensor = in.model.tensors[op.inputs[j].value];
    const Bytes cast = TensorBytes(tensor, in.plan.micro_batch, narrow);
    const Bytes wide = TensorBytes(tensor, in.plan.micro_batch, DType::kFp32);
    Kernel copy;
    copy.kind = KernelClass::kCopy;
    copy.dtype = narrow;
    copy.read = wide;
    copy.written = cast;
    kernels.forward.insert(kernels.forward.begin(), copy);
    std::swap(copy.read, copy.written);
    kernels.backward_data.push_back(copy);
    const std::uint32_t bit = 1U << j;
    const bool is_kept =
        (kernels.saves_input & bit) != 0 && (trains || (kernels.saves_input_for_weight & bit) == 0);
    kernels.saves_input &= ~bit;
    kernels.saves_input_for_weight &= ~bit;
    AddTensor(cast, is_kept ? kernels.extra_saved : kernels.forward_workspace,
              is_kept ? kernels.extra_saved_tensors : kernels.forward_workspace_tensors);
    if (kernels.moments.empty()) {  // which have room for it
      AddTensor(cast, kernels.backward_workspace, kernels.backward_workspace_tensors);
    }
  }
  return kernels;
}

}  // namespace shardwright
