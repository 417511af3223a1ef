// Ops that one kernel runs together. Each change gives the ops kernels of a new variant; the model
// stays as it is, and the ops that lose their kernels write nothing.
//
//   fused_gelu      linear, GELU, linear: the first writes the GELU's output, too; backward of the
//                   last reads the GELU's input. An output of 8 MiB costs 8 MiB more written and 8
//                   MiB more read, but no passes of its own.
//   fused_residual  sum, norm: the norm reads both operands and writes their sum beside its result.
//   loss_chunks     head, loss: nothing runs in forward. Backward makes the logits of one chunk
//                   at a time. With 16 chunks 256 MiB of 4 GiB of logits exist.
//
// Under fused_gelu and loss_chunks no other op may read the tensors between: then they must exist,
// and the ops stay apart. A region that runs one of the ops again must run all of them.

#include "schedule/lower/fusion.h"

#include <map>
#include <utility>

#include "core/ranges.h"

namespace shardwright {
namespace {

// May ops i, i + 1 and i + 2 be a linear layer, a GELU that runs inside products, and the linear
// layer that takes its result? Nobody else may read what lies between them, both must have
// gradients, and what is run again must be all three.
bool MayRunGelu(const LowerInput& in, const PlannedRegions& regions, std::uint32_t i,
                const ModelAnalysis& a) {
  const Model& model = in.model;
  const ModelOp& gelu = model.ops[i + 1];
  const ModelOp& behind = model.ops[i + 2];
  const auto is_linear = [&](const ModelOp& op) {
    return model.SpecOf(op).kind == OpKind::kLinear;
  };
  if (!is_linear(model.ops[i]) || !is_linear(behind) ||
      model.SpecOf(gelu).kind != OpKind::kActivation ||
      model.SpecOf(gelu).activation != Activation::kGeluTanh ||
      gelu.inputs.front() != model.ops[i].outputs.front() ||
      behind.inputs.front() != gelu.outputs.front()) {
    return false;
  }
  const auto is_read_once = [&](TensorId t) {
    return a.storages[a.storage_of[t.value]].forward_uses == 1;
  };
  if (!is_read_once(gelu.inputs.front()) || !is_read_once(gelu.outputs.front()) ||
      a.ops[i + 1].input_grads == 0 || a.ops[i + 2].input_grads == 0 || !a.ops[i + 2].weight_grad) {
    return false;
  }
  // The regions that reach the three ops; they come in order and do not overlap.
  auto found = std::lower_bound(regions.begin(), regions.end(), i,
                                [](const auto& r, std::uint32_t op) { return r.first.last < op; });
  for (; found != regions.end() && found->first.first <= i + 2; ++found) {
    const bool holds = found->first.first <= i && found->first.last >= i + 2;
    if (!holds || in.plan.recompute[found->second].kind != RecomputeKind::kFull) {
      return false;
    }
  }
  return true;
}

// The variant of `kernels` that `change` makes; one for all ops of a variant.
template <class F>
void ChangeVariant(std::uint32_t op, F change, std::map<std::uint32_t, std::uint32_t>& made,
                   ModelAnalysis& a) {
  const auto [at, is_new] =
      made.try_emplace(a.variant[op], static_cast<std::uint32_t>(a.kernels.size()));
  if (is_new) {
    OpKernels changed = a.kernels[at->first];
    change(changed);
    a.kernels.push_back(std::move(changed));
  }
  a.variant[op] = at->second;
}

// May the norm that is op i + 1 make its input, op i's sum of two tensors of that size? Both ops
// must be in one region, and both or none of them must run again.
bool MaySumFirst(const Model& model, std::uint32_t i, const ModelAnalysis& a) {
  const ModelOp& sum = model.ops[i];
  const ModelOp& norm = model.ops[i + 1];
  if (model.SpecOf(sum).kind != OpKind::kAdd || !sum.params.empty() || sum.inputs.size() != 2 ||
      !IsNormOfWhole(model, norm) || norm.inputs.front() != sum.outputs.front()) {
    return false;
  }
  const Tensor& result = model.tensors[norm.inputs.front().value];
  const bool fits = AllOf(sum.inputs, [&](TensorId t) {
    const Tensor& in = model.tensors[t.value];
    return in.role == result.role && in.elements == result.elements &&
           in.per_sample == result.per_sample;
  });
  return fits && a.storages[a.storage_of[norm.inputs.front().value]].producer == i &&
         a.ops[i].region == a.ops[i + 1].region && a.ops[i].reruns == a.ops[i + 1].reruns;
}

// May linear layer `i` run the loss that is op i + 1? Nobody else may read the logits between them.
bool MayRunLoss(const Model& model, std::uint32_t i, const ModelAnalysis& a) {
  if (!IsLinearLoss(model, i)) {
    return false;
  }
  const TensorId logits = model.ops[i + 1].inputs.front();
  const StorageFacts& storage = a.storages[a.storage_of[logits.value]];
  return storage.producer == i && storage.forward_uses == 1 && storage.backward_uses == 0 &&
         model.tensors[logits.value].role == TensorRole::kActivation && a.ops[i].input_grads != 0 &&
         a.ops[i + 1].has_backward && a.ops[i].region == kNoRegion &&
         a.ops[i + 1].region == kNoRegion;
}

// A head and a loss without backward, of a reference: forward has the logits of one chunk.
void ChunkForward(const LowerInput& in, std::uint32_t i,
                  std::map<std::uint32_t, std::uint32_t>& made, ModelAnalysis& a) {
  const auto part = [&](Bytes& whole) {
    whole = Bytes((whole.value + in.kernels.loss_chunks - 1) / in.kernels.loss_chunks);
  };
  part(a.storages[a.storage_of[in.model.ops[i].outputs.front().value]].bytes);
  const auto change = [&](OpKernels& k) {
    part(k.extra_saved);
    part(k.forward_workspace);
    std::for_each(k.extra_saved_tensors.begin(), k.extra_saved_tensors.end(), part);
    std::for_each(k.forward_workspace_tensors.begin(), k.forward_workspace_tensors.end(), part);
  };
  ChangeVariant(i + 1, change, made, a);
}

}  // namespace

bool IsNormOfWhole(const Model& model, const ModelOp& op) {
  const OpSpec& spec = model.SpecOf(op);
  return (spec.kind == OpKind::kLayerNorm || spec.kind == OpKind::kRmsNorm) &&
         model.tensors[op.inputs.front().value].elements == spec.rows * spec.in;
}

void FuseGelu(const LowerInput& in, const PlannedRegions& regions, ModelAnalysis& a) {
  std::map<std::uint32_t, std::uint32_t> before, between, behind;  // variants made of variants
  for (std::uint32_t i = 0; i + 2 < in.model.ops.size(); ++i) {
    if (!MayRunGelu(in, regions, i, a)) {
      continue;
    }
    const Bytes size = a.tensor_bytes[in.model.ops[i + 1].outputs.front().value];
    a.ops[i].runs_next = true;
    a.ops[i + 2].runs_previous = true;
    ChangeVariant(
        i, [&](OpKernels& k) { k.forward.back().written += size; }, before, a);
    ChangeVariant(
        i + 1,
        [](OpKernels& k) {
          k.forward.clear();
          k.backward_data.clear();
          k.saves_input = 0;
        },
        between, a);
    ChangeVariant(
        i + 2, [&](OpKernels& k) { k.backward_data.back().read += size; }, behind, a);
  }
}

void FuseLoss(const LowerInput& in, ModelAnalysis& a) {
  const Model& model = in.model;
  std::map<std::uint32_t, std::uint32_t> chunked;  // variants made of variants
  for (std::uint32_t i = 0; i + 1 < model.ops.size(); ++i) {
    if (IsLinearLoss(model, i) && !a.ops[i].has_backward && !a.ops[i + 1].has_backward) {
      ChunkForward(in, i, chunked, a);
    }
    if (!MayRunLoss(model, i, a)) {
      continue;
    }
    a.ops[i].runs_loss = true;
    a.variant[i] = static_cast<std::uint32_t>(a.kernels.size());
    a.kernels.push_back(LowerLinearLoss(model.SpecOf(model.ops[i]), model.SpecOf(model.ops[i + 1]),
                                        in.plan.micro_batch, in.job.precision.param, in.kernels));
    a.variant[i + 1] = static_cast<std::uint32_t>(a.kernels.size());
    a.kernels.emplace_back();
  }
}

void FuseSums(const Model& model, ModelAnalysis& a) {
  std::map<std::uint32_t, std::uint32_t> sums, norms;  // variants made of variants
  for (std::uint32_t i = 0; i + 1 < model.ops.size(); ++i) {
    if (!MaySumFirst(model, i, a)) {
      continue;
    }
    const Bytes size = a.tensor_bytes[model.ops[i].outputs.front().value];
    a.ops[i].left_to_next = true;
    ChangeVariant(
        i, [](OpKernels& k) { k.forward.clear(); }, sums, a);
    ChangeVariant(
        i + 1,
        [&](OpKernels& k) {
          k.forward.back().read += size;
          k.forward.back().written += size;
        },
        norms, a);
  }
}

}  // namespace shardwright
