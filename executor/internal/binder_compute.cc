// Model ops: every access becomes an argument of the kernel call.

#include <algorithm>
#include <vector>

#include "core/error.h"
#include "executor/internal/binder.h"
#include "topologies/mesh.h"

namespace shardwright {
namespace {

bool IsLoss(OpKind kind) {
  return kind == OpKind::kNllLoss || kind == OpKind::kCrossEntropy;
}

}  // namespace

DType Binder::DTypeOf(TensorRole role) const {
  switch (role) {
    case TensorRole::kActivation:
      return in_.job.precision.param;
    case TensorRole::kIndex:
      return DType::kInt64;
    case TensorRole::kLoss:
    case TensorRole::kFp32:
      return DType::kFp32;
    case TensorRole::kBool:
      break;  // of ops that no device runs
  }
  return DType::kFp32;
}

View Binder::TensorView(TensorId tensor, BufferId buffer) const {
  const Tensor& t = in_.model.tensors[tensor.value];
  const std::int64_t n = t.elements * (t.per_sample ? program_.micro_batch : 1);
  return {At(buffer), DTypeOf(t.role), n};
}

ConstView Binder::ParameterView(ParamId param, BufferId buffer) const {
  const ParamId storage = StorageOf(in_.model, param);
  const View view = ViewOf(storage, buffer);
  SW_CHECK(view.elements == in_.model.params[storage.value].Elements(),
           in_.model.params[param.value].fqn + " is not whole in the buffer its op reads");
  return {view.data, view.dtype, view.elements};
}

Call Binder::BindModelOp(const Body& body, OpId id) {
  const Op& program_op = body.ops[id.value];
  const ModelOp& op = in_.model.ops[program_op.subject];
  ModelCall call;
  ModelOpCall& c = call.call;
  call.is_backward = program_op.phase == Phase::kBackward;
  call.micro_batch = program_op.micro_batch;
  c.spec = &in_.model.SpecOf(op);
  c.options = &in_.kernels;
  bool shared = !op.inputs.empty();
  for (const TensorId t : op.inputs) {
    shared = shared && !in_.model.tensors[t.value].per_sample;
  }
  c.batch = shared ? 1 : program_.micro_batch;
  c.compute = in_.job.precision.param;
  c.is_training = in_.job.mode == JobMode::kTrain;
  c.inputs.resize(op.inputs.size());
  c.params.resize(op.params.size());
  c.outputs.resize(op.outputs.size());
  if (call.is_backward) {
    c.output_grads.resize(op.outputs.size());
    c.input_grads.resize(op.inputs.size());
    c.param_grads.resize(op.params.size());
  }
  for (const Access& access : body.AccessesOf(id)) {
    if (access.role == Role::kLabels || access.role == Role::kLoss) {
      BindLossInside(access, in_.model.ops[program_op.subject + 1], call);
    } else if (call.is_backward) {
      BindBackwardAccess(access, op, call);
    } else {
      BindForwardAccess(access, op, call);
    }
  }
  if (model_buffers_.valid() && in_.model.modules[op.module.value].buffer_elements > 0) {
    c.buffers = reinterpret_cast<float*>(At(model_buffers_)) + module_offset_[op.module.value];
  }
  if (c.spec->kind == OpKind::kExperts && c.spec->routed) {
    c.exchange = CameFor(op, program_op.micro_batch);
  }
  c.dropout.seed = in_.training.seed;
  c.dropout.op = program_op.subject;
  c.dropout.first_sample =
      MeshOf(program_).FirstSample(rank_, program_op.micro_batch, program_.micro_batch);
  c.cut = {PartOf(program_, rank_), PlaceInGroup(MeshOf(program_).Context(), rank_).index,
           program_.context_size};
  if (c.spec->kind == OpKind::kAttention && c.spec->context_ranks > 0 &&
      c.spec->context_method != ContextMethod::kGather) {
    BindRing(program_op, body.AccessesOf(id), c);
  }
  c.reduction = in_.training.sum_loss ? LossReduction::kSum : LossReduction::kMean;
  if (c.spec->kind == OpKind::kLinear && c.params.size() > 1 && c.cut.part > 0 &&
      in_.model.params[op.params[0].value].tensor_parts >
          in_.model.params[op.params[1].value].tensor_parts) {
    c.params[1].data = nullptr;  // a whole bias, which the first rank adds to the sum
  }
  if (c.spec->kind == OpKind::kEmbedding && program_.tensor_size > 1 &&
      in_.model.tensors[op.inputs[0].value].input == InputKind::kPositions) {
    ConstView& positions = c.inputs[0];  // of all tokens, where this rank looks up its own
    positions.elements = c.spec->rows;
    positions.data = static_cast<const std::byte*>(positions.data) +
                     c.cut.part * c.spec->rows * SizeOf(positions.dtype);
  }
  if (IsLoss(c.spec->kind) && program_op.phase == Phase::kForward) {
    call.loss = static_cast<const float*>(c.outputs.front().data);
  }
  return call;
}

// Which step an op of a ring is: the walker numbers those before the op itself from 3 on.
void Binder::BindRing(const Op& op, std::span<const Access> accesses, ModelOpCall& call) const {
  const std::int64_t ranks = call.spec->context_ranks;
  const bool gathers = call.spec->context_method == ContextMethod::kRingGather;
  std::vector<std::pair<RingPart, std::int64_t>> parts;  // with their steps
  for (std::int64_t step = 0; step < ranks; ++step) {
    if (step + 1 < ranks && (!gathers || step == 0)) {
      parts.emplace_back(RingPart::kPack, step);
    }
    parts.emplace_back(RingPart::kAttend, step);
    if (op.phase == Phase::kBackward) {
      parts.emplace_back(RingPart::kAdd, step);
    }
  }
  constexpr std::size_t kFirst = 3;
  const auto [part, step] =
      op.occurrence < kFirst ? std::pair(RingPart::kFinish, ranks) : parts[op.occurrence - kFirst];
  call.ring = {part, (call.cut.index + ranks - step) % ranks, step == 0};
  for (const Access& access : accesses) {
    if (access.role == Role::kExchange && access.mode == AccessMode::kRead) {
      const auto bytes = static_cast<std::size_t>(BufferOf(access.buffer).size.value);
      call.ring.came = {At(access.buffer), bytes};
      if (gathers && part == RingPart::kAttend) {  // those of all ranks
        const std::size_t each = bytes / static_cast<std::size_t>(ranks);
        call.ring.came =
            call.ring.came.subspan(static_cast<std::size_t>(call.ring.source) * each, each);
      }
    } else if (access.role == Role::kExchange) {
      call.exchange = {At(access.buffer),
                       static_cast<std::size_t>(BufferOf(access.buffer).size.value)};
    }
  }
}

// Statistics, not gradients: gathered, or summed in place, and divided by nobody.
Call Binder::BindExchange(std::span<const Access> accesses, const OpShape& shape) const {
  CollectiveCall call = CollectiveOf(shape);
  call.send = At(accesses.front().buffer);
  call.receive = At(accesses.back().buffer);
  return call;
}

void Binder::BindForwardAccess(const Access& access, const ModelOp& op, ModelCall& call) {
  ModelOpCall& c = call.call;
  std::byte* data = At(access.buffer);
  const auto bytes = static_cast<std::size_t>(BufferOf(access.buffer).size.value);
  // Behind the op's own tensors: the input or output of a GELU or a sum that it runs, which has the
  // shape of the tensor between the two.
  const auto place_of = [&](auto& views, const std::vector<TensorId>& own) {
    views.resize(std::max<std::size_t>(views.size(), access.index + std::size_t{1}));
    return own[std::min<std::size_t>(access.index, own.size() - 1)];
  };
  switch (access.role) {
    case Role::kInput: {
      const View view = TensorView(place_of(c.inputs, op.inputs), access.buffer);
      c.inputs[access.index] = {view.data, view.dtype, view.elements};
      return;
    }
    case Role::kOutput:
      c.outputs[access.index] = TensorView(place_of(c.outputs, op.outputs), access.buffer);
      return;
    case Role::kSaved:
      c.saved = {data, bytes};
      return;
    case Role::kParameter:
      c.params[access.index] = ParameterView(op.params[access.index], access.buffer);
      return;
    case Role::kWorkspace:
      c.workspace = {data, bytes};
      return;
    case Role::kExchange:
      c.exchange = {data, bytes};
      c.part = access.mode == AccessMode::kWrite ? OpPart::kBeforeExchange : OpPart::kAfterExchange;
      return;
    default:
      SW_CHECK(false, "an access of forward that no kernel has");
  }
}

void Binder::BindBackwardAccess(const Access& access, const ModelOp& op, ModelCall& call) {
  ModelOpCall& c = call.call;
  const DType p = in_.job.precision.param;
  switch (access.role) {
    case Role::kOutputGrad:
      c.output_grads[access.index] = {At(access.buffer), p, ElementsOf(access.buffer, p)};
      return;
    case Role::kInputGrad:
      c.input_grads[access.index] = {At(access.buffer), p, ElementsOf(access.buffer, p)};
      c.adds_input_grads = access.mode == AccessMode::kReadWrite;
      return;
    case Role::kParamGrad:
      BindParamGrads(access, op, call);
      return;
    default:
      BindForwardAccess(access, op, call);
  }
}

// A linear layer's access to what the loss behind it reads or writes.
void Binder::BindLossInside(const Access& access, const ModelOp& loss, ModelCall& call) const {
  ModelOpCall& c = call.call;
  if (access.role == Role::kLabels) {
    const View labels = TensorView(loss.inputs.back(), access.buffer);
    c.inputs.push_back({labels.data, labels.dtype, labels.elements});
    return;
  }
  c.loss_spec = &in_.model.SpecOf(loss);
  c.outputs.front() = TensorView(loss.outputs.front(), access.buffer);
  call.loss = static_cast<const float*>(c.outputs.front().data);
}

// Either the unit's reduction input itself, or a buffer with the op's gradients back to back, and
// behind them what other ops that share its weight have more.
void Binder::BindParamGrads(const Access& access, const ModelOp& op, ModelCall& call) {
  const BufferId buffer = access.buffer;
  if (BufferOf(buffer).holds == Holds::kTensors) {
    Contents part = ContentsOf(buffer);
    Append(layouts_.OfOp(op, true, part.dtype), part);
    Set(buffer, std::move(part));
  }
  for (std::size_t k = 0; k < op.params.size(); ++k) {
    if (!in_.model.params[op.params[k].value].trainable) {
      continue;
    }
    const ParamId storage = StorageOf(in_.model, op.params[k]);
    ParamGrad& grad = call.call.param_grads[k];
    grad.view = ViewOf(storage, buffer);
    // The first writer of a parameter in a shared buffer replaces what is there.
    grad.accumulate = access.mode == AccessMode::kReadWrite && written_.contains({buffer, storage});
    written_.insert({buffer, storage});
  }
}

// A parameter or its gradient, which a flat layout may cut at shard borders but keeps in one piece.
View Binder::ViewOf(ParamId storage, BufferId buffer) const {
  const Contents& contents = ContentsOf(buffer);
  const ShardPiece* first = nullptr;
  std::int64_t count = 0;
  for (const ShardPiece& piece : contents.pieces) {
    if (piece.param != storage) {
      continue;
    }
    first = first == nullptr ? &piece : first;
    SW_CHECK(piece.shard_offset == first->shard_offset + count && piece.param_begin == count,
             in_.model.params[storage.value].fqn + " lies in pieces");
    count += piece.count;
  }
  SW_CHECK(first != nullptr, in_.model.params[storage.value].fqn + " has no place in a buffer");
  return {At(buffer) + first->shard_offset * SizeOf(contents.dtype), contents.dtype, count};
}

}  // namespace shardwright
