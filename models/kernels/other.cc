// Ops that are only known by what they cost.

#include <array>
#include <cstdint>
#include <vector>

#include "models/kernels/kernels.h"

namespace shardwright::internal {
namespace {

KernelClass ClassOf(OtherKernel::Class kind) {
  using enum KernelClass;
  // In the order of OtherKernel::Class.
  constexpr std::array<KernelClass, 9> kClasses = {
      kElementwise,      kCopy, kNorm, kSoftmax, kGatherScatter, kGemm, kConv, kAttentionForward,
      kAttentionBackward};
  return kClasses[static_cast<std::size_t>(kind)];
}

std::int64_t BytesOf(const LowerContext& context, const AmountOfData& amount) {
  return Product({amount.elements.Of(context.batch), context.s}) + amount.bytes.Of(context.batch);
}

// More than an integer holds, of large models.
Flops FlopsOf(const Amount& amount, double batch) {
  return Flops(static_cast<double>(amount.fixed) + (static_cast<double>(amount.per_sample) +
                                                    static_cast<double>(amount.per_pair) * batch) *
                                                       batch);
}

std::vector<Kernel>& ListOf(OtherKernel::Pass pass, OpKernels* op) {
  return pass == OtherKernel::Pass::kForward        ? op->forward
         : pass == OtherKernel::Pass::kBackwardData ? op->backward_data
                                                    : op->backward_weight;
}

}  // namespace

OpKernels LowerOther(const LowerContext& context) {
  const OtherCost& cost = context.spec.other;
  OpKernels op;
  if (cost.is_cast && context.compute == DType::kFp32) {
    op.output_aliases = {0};
    return op;
  }
  for (const OtherKernel& launch : cost.kernels) {
    Kernel kernel;
    kernel.kind = ClassOf(launch.kind);
    kernel.dtype = context.compute;
    if (IsAttention(kernel.kind) && IsFused(context.options.attention)) {
      kernel.attention = context.options.attention;
    }
    kernel.batch = launch.batch.Of(context.batch);
    kernel.m = launch.m.Of(context.batch);
    kernel.n = launch.n.Of(context.batch);
    kernel.k = launch.k.Of(context.batch);
    kernel.flops = FlopsOf(launch.flops, static_cast<double>(context.batch));
    kernel.read = Bytes(BytesOf(context, launch.read));
    kernel.written = Bytes(BytesOf(context, launch.written));
    op.compute_intensive = op.compute_intensive ||
                           (launch.pass == OtherKernel::Pass::kForward && launch.flops != Amount{});
    ListOf(launch.pass, &op).push_back(kernel);
  }
  op.saves_input = cost.saves_input;
  op.saves_output = cost.saves_output;
  op.saves_input_for_weight = cost.saves_input_for_weight;
  for (const AmountOfData& tensor : cost.saved) {
    AddTensors({BytesOf(context, tensor)}, &op.extra_saved, &op.extra_saved_tensors);
  }
  op.forward_workspace = Bytes(BytesOf(context, cost.forward_workspace));
  op.backward_workspace = Bytes(BytesOf(context, cost.backward_workspace));
  for (const OtherOutput& output : cost.outputs) {
    op.output_aliases.push_back(output.view_of);
  }
  return op;
}

}  // namespace shardwright::internal
