// A linear layer and the cross-entropy behind it, chunk by chunk: logits of some rows, their loss,
// its gradient, then the gradients of the layer's input and weight, before the next rows.

#include <algorithm>
#include <cstdint>
#include <vector>

#include "models/kernels/cuda.h"
#include "models/kernels/host.h"
#include "models/kernels/kernels.h"

namespace shardwright {
namespace {

struct Parts {
  OpKernels linear, loss;  // of the rows of one chunk
};

Parts LowerParts(const OpSpec& linear, const OpSpec& loss, std::int64_t rows, DType compute,
                 const KernelSetOptions& options) {
  OpSpec head = linear;
  OpSpec tail = loss;
  head.rows = tail.rows = rows;
  return {LowerOp(head, 1, compute, options), LowerOp(tail, 1, compute, options)};
}

// Logits and what the loss keeps of a chunk, and the most that one of its passes takes beside them.
// Our own kernels and fused losses write the gradient of the logits over these.
Bytes WorkspaceOf(const Parts& parts, std::int64_t rows, std::int64_t chunk, const OpSpec& linear,
                  DType compute, const KernelSetOptions& options) {
  const std::int64_t logits = internal::Product({chunk, linear.out, SizeOf(compute)});
  const std::int64_t kept = parts.loss.extra_saved.value;
  const std::int64_t products =
      std::max(parts.linear.forward_workspace.value, parts.linear.backward_workspace.value);
  if (options.cuda_kernels) {
    return Bytes(CudaPieces({logits, kept}) + LossChunksWorkspace(rows, chunk) + products);
  }
  const std::int64_t loss =
      std::max(parts.loss.forward_workspace.value,
               parts.loss.backward_workspace.value + (options.fused_loss ? 0 : logits));
  if (options.host_kernels) {
    return Bytes(HostAligned(logits) + HostAligned(kept) + std::max(products, loss));
  }
  return Bytes(logits + kept + std::max(products, loss));
}

void Append(const std::vector<Kernel>& more, std::vector<Kernel>& kernels) {
  kernels.insert(kernels.end(), more.begin(), more.end());
}

}  // namespace

KernelSetOptions WithLossChunks(KernelSetOptions options, std::int64_t chunks) {
  options.loss_chunks = chunks;
  if (chunks > 1) {
    options.keeps_logits = false;
    options.shifted_logits = false;
  }
  return options;
}

bool IsLinearLoss(const Model& model, std::size_t i) {
  return i + 1 < model.ops.size() && model.SpecOf(model.ops[i]).kind == OpKind::kLinear &&
         model.SpecOf(model.ops[i + 1]).kind == OpKind::kCrossEntropy &&
         model.ops[i + 1].inputs.front() == model.ops[i].outputs.front();
}

OpKernels LowerLinearLoss(const OpSpec& linear, const OpSpec& loss, std::int64_t batch,
                          DType compute, const KernelSetOptions& options) {
  const std::int64_t rows = internal::Product({batch, linear.rows});
  const std::int64_t chunk = LossChunkRows(rows, options.loss_chunks);
  const Bytes weight(internal::Product({linear.in, linear.out, SizeOf(compute)}));
  OpKernels op;
  op.saves_input = 1;
  op.output_aliases = {-1};
  op.compute_intensive = true;
  for (std::int64_t first = 0; first < rows; first += chunk) {
    Parts parts = LowerParts(linear, loss, std::min(chunk, rows - first), compute, options);
    if (first == 0) {
      op.backward_workspace = WorkspaceOf(parts, rows, chunk, linear, compute, options);
    } else {
      parts.linear.backward_weight.front().read += weight;  // adds to those of the rows before
    }
    Append(parts.linear.forward, op.backward_data);
    Append(parts.loss.forward, op.backward_data);
    Append(parts.loss.backward_data, op.backward_data);
    Append(parts.linear.backward_data, op.backward_data);
    Append(parts.linear.backward_weight, op.backward_weight);
  }
  return op;
}

}  // namespace shardwright
