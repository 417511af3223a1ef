// How FSDP2 keeps gradients without a reduction, and reduces them over shards and replicas.
//
// Example: a layer of 2,622,464 parameters on 4 ranks, gradients in bf16, r = o = fp32.
//
//   copy-in          compute   5.0 MiB of gradients into 10.0 MiB of fp32; frees the gradients
//   reduce-scatter   reduce    10.0 MiB to 2.5 MiB, averaged over 4 by NCCL
//   store            none      r equals o, so the 2.5 MiB become the gradient of the optimizer
//
// The next unit's copy-in waits until this reduce-scatter has ended and its 10.0 MiB are freed. So
// one input is in flight, and backward's peak holds one, not one per layer. With 2 replicas an
// all-reduce of the 2.5 MiB follows on its own stream, and the reduce stream goes on to the next
// unit.
//
// Micro-batches: `sync: every` reduces each and adds shards. `sync: last` keeps gradients whole, in
// r. `sync: replicate_last` adds the sums over shards and all-reduces once.

#include <map>
#include <utility>

#include "core/ranges.h"
#include "schedule/lower/fsdp2_rules.h"

namespace shardwright {

void Fsdp2Rules::FreeReduceInput() {
  if (reduce_input_.valid()) {
    e_.body->Free(reduce_input_);
    reduce_input_ = BufferId();
  }
}

// Without a reduction a gradient is kept in the reduce dtype. Where that is the one it was made in,
// it simply stays in .grad (to_accumulated_grad_if_needed of _fsdp_param.py, torch 2.13), to which
// autograd adds the next micro-batch's as soon as that is there.
bool Fsdp2Rules::AddsInPlace(UnitId u) const {
  return plan_.sync == SyncMode::kLast && PrecisionOf(u).param == PrecisionOf(u).reduce;
}

void Fsdp2Rules::WeightGradWritten(std::uint32_t model_op, UnitId u) {
  StepRules::WeightGradWritten(model_op, u);
  if (!completes_grad_[model_op]) {
    return;  // autograd sums the gradients of all uses before it touches .grad
  }
  const auto has_storage = [&](const auto& entry) { return entry.first == GroupOf(model_op); };
  auto& kept = comm_[u.value].kept_grads;
  const auto sum = FindIf(kept, has_storage);
  if (sum == kept.end()) {
    return;
  }
  auto& fresh = At(u).grad_of_param;
  const BufferId grad = FindIf(fresh, has_storage)->second;
  const Bytes bytes = e_.program.buffers[grad.value].size;
  e_.AddCopy(OpCode::kAccumulateGrad, Stream::kCompute, {Phase::kBackward, model_op}, 2 * bytes,
             bytes,
             {{sum->second, AccessMode::kReadWrite, Role::kOutput},
              {grad, AccessMode::kRead, Role::kInput}});
  e_.body->Free(grad);
  std::erase(At(u).grads, grad);
}

// Gradients that passes of weights alone left in .grad, in the dtype they were made in.
void Fsdp2Rules::TakeKept(UnitId u) {
  for (const auto& [storage, grad] : std::exchange(comm_[u.value].kept_grads, {})) {
    At(u).grads.push_back(grad);
  }
}

// The unit's gradients outlive their micro-batch.
void Fsdp2Rules::KeepGrads(UnitId u) {
  if (!AddsInPlace(u)) {
    if (!At(u).accumulated.valid()) {
      comm_[u.value].kept_order = At(u).grads;
    }
    AccumulateUnsharded(u);
    return;
  }
  if (!At(u).grads.empty()) {
    comm_[u.value].kept_grads = At(u).grad_of_param;
    At(u).grads.clear();
  }
}

// The end of a unit's backward, once per call. Gradients are reduced after the last call in
// backward: autograd has added those of all calls by then. Of a rank's stages each has a root of
// its own: with parameters of another one the unit does not end here.
void Fsdp2Rules::PostBackward(UnitId u) {
  if (!HasParams(u) || !IsOfStage(u)) {
    return;
  }
  comm_[u.value].state = State::kPostBackward;
  if (!AddsInPlace(u) && (!Syncs() || At(u).accumulated.valid())) {
    TakeKept(u);
  }
  // Autograd sums the gradients of all calls before it hands them to the parameters.
  const bool is_last = comm_[u.value].passes_left == 0;
  const bool has_grads = At(u).accumulated.valid() || !comm_[u.value].kept_grads.empty() ||
                         (is_last && !At(u).grads.empty());
  // Later gradients are added while the parameters are there; the first are cast when they are
  // gone (post_backward of _fsdp_param_group.py, torch 2.13).
  if (is_last && At(u).accumulated.valid()) {
    AccumulateUnsharded(u);
  }
  if (Syncs() && has_grads) {
    SumOverTensor(u);
  }
  if (!StaysWhole()) {
    FreeUnsharded(u);
    LeaveClone(u);
  }
  if (!Syncs()) {
    if (is_last) {
      KeepGrads(u);
    }
  } else {
    // One reduce-scatter input in flight: compute waits for the unit before.
    e_.AddWait(Stream::kCompute, {reduce_done_}, Phase::kBackward, u.value);
    FreeReduceInput();
    if (has_grads) {
      ReduceGrads(u);
    }
  }
}

// Sums the gradients of weights that all ranks hold although they cut the layer (norms): each rank
// has the gradient of its own tokens. Torch reduces them one by one before it reduces the unit over
// the data-parallel ranks (_get_grad_inner_tensor of _fsdp_param.py, torch 2.13).
void Fsdp2Rules::SumOverTensor(UnitId u) {
  const BufferId accumulated = At(u).accumulated;
  std::map<ParamId, BufferId> grad_of;
  const auto add = [&](BufferId grad) {
    for (const ParamId p : e_.in.model.ops[e_.program.buffers[grad.value].subject].params) {
      grad_of[p] = grad;
    }
  };
  std::for_each(At(u).grads.begin(), At(u).grads.end(), add);
  for (const auto& [storage, grad] : comm_[u.value].kept_grads) {
    add(grad);
  }
  std::map<ParamId, Bytes> begin_of;  // in the sum of micro-batches, one behind the other
  Bytes begin{0};
  for (const BufferId grad : comm_[u.value].kept_order) {
    for (const ParamId p : e_.in.model.ops[e_.program.buffers[grad.value].subject].params) {
      const Parameter& param = e_.in.model.params[p.value];
      const ParamId storage = param.tied_to.valid() ? param.tied_to : p;
      if (param.trainable && begin_of.emplace(storage, begin).second) {
        begin += Bytes(param.Elements() * SizeOf(PrecisionOf(u).reduce));
      }
    }
  }
  std::map<BufferId, Bytes> ends;  // of what is reduced
  for (const ParamSlot& slot : Info(u).params) {
    const Parameter& param = e_.in.model.params[slot.param.value];
    const BufferId grad = accumulated.valid() ? accumulated : grad_of[slot.param];
    if (!param.has_partial_gradient || !param.trainable || !grad.valid()) {
      continue;
    }
    const Buffer& buffer = e_.program.buffers[grad.value];
    const Bytes bytes(param.Elements() * SizeOf(buffer.dtype));
    Bytes& end = ends[grad];
    end = (grad == accumulated ? begin_of[slot.param] : end) + bytes;
    e_.AddCollective(
        Collective(OpCode::kAllReduce, Stream::kCompute, e_.AddTensor(), bytes, buffer.dtype),
        {Phase::kBackward, u.value}, {});
    e_.body->UseFirst(grad, end, AccessMode::kReadWrite, Role::kInput);
  }
}

// Copy-in, scale (fp16 only), reduce-scatter, partial sums, all-reduce over replicas, scale, store.
// `adopts`: the output becomes the sharded gradient as it is, because r equals o and no earlier
// micro-batch has left one.
void Fsdp2Rules::ReduceGrads(UnitId u) {
  CopyGradsIn(u, comm_[u.value].passes_left == 0);
  const OpId copied = e_.body->last();
  const bool replicate =
      replicate_group_.valid() && (plan_.sync != SyncMode::kReplicateLast || last_micro_batch_);
  const bool adopts = !CastsReduce(u) && !At(u).sharded_grad.valid();
  const DType r = PrecisionOf(u).reduce;
  const bool is_partial = replicate_group_.valid() && !replicate;
  const bool stays = adopts || (is_partial && !comm_[u.value].partial.valid());
  BufferId out =
      Hold(e_.Alloc(ReduceShard(u), stays ? Category::kShardedGradient : Category::kReduceScatter,
                    Stream::kReduce),
           u, Holds::kShard, r);
  // Rows of all ranks that share the experts have reached them, so that few ranks' sums are means
  // over all ranks (set_gradient_divide_factor).
  const double divisor = MeanOver(IsOfExperts(u) ? e_.mesh.RankCount() : plan_.shard_size, r);
  if (Info(u).shards > 1) {
    ScaleForFp16(u, reduce_input_, ReduceFull(u), Stream::kReduce, factors_.pre);
    e_.AddCollective(Collective(OpCode::kReduceScatter, Stream::kReduce, ShardGroup(u),
                                ReduceFull(u), r, divisor),
                     {Phase::kBackward, u.value},
                     {{reduce_input_, AccessMode::kRead, Role::kInput},
                      {out, AccessMode::kWrite, Role::kOutput}});
  } else {
    e_.AddCopy(OpCode::kGradStore, Stream::kReduce, {Phase::kBackward, u.value}, ReduceShard(u),
               ReduceShard(u),
               {{reduce_input_, AccessMode::kRead, Role::kInput},
                {out, AccessMode::kWrite, Role::kOutput}},
               IsOfExperts(u) ? divisor : 1.0);
  }
  e_.After(copied);
  reduce_done_ = last_reduce_ = e_.body->last();
  if (is_partial) {
    KeepPartial(u, out);
    return;
  }
  AddPartial(u, out);
  Stream tail = Stream::kReduce;
  if (replicate) {
    tail = Stream::kReplicate;
    e_.AddCollective(Collective(OpCode::kAllReduce, tail, replicate_group_, ReduceShard(u), r,
                                IsOfExperts(u) ? 1.0 : MeanOver(plan_.replicate_size, r)),
                     {Phase::kBackward, u.value}, {{out, AccessMode::kReadWrite, Role::kInput}});
    e_.After(last_reduce_);
    last_replicate_ = e_.body->last();
  }
  ScaleForFp16(u, out, ReduceShard(u), tail,
               Info(u).shards > 1 ? factors_.post : factors_.pre * factors_.post);
  StoreShardedGrad(u, out, adopts, tail);
}

// The gradients that .grad has: what earlier micro-batches kept there and, after the last call,
// this one's.
std::vector<BufferId> Fsdp2Rules::TakeGrads(UnitId u, bool is_last) {
  std::vector<BufferId> grads;
  for (const auto& [storage, grad] : std::exchange(comm_[u.value].kept_grads, {})) {
    grads.push_back(grad);
  }
  if (is_last) {
    grads.insert(grads.end(), At(u).grads.begin(), At(u).grads.end());
    At(u).grads.clear();
  }
  return grads;
}

// One kernel casts and pads all gradients of the unit into the input. If r is narrower than p, it
// needs scratch in p, `narrow`.
void Fsdp2Rules::CopyGradsIn(UnitId u, bool is_last) {
  UnitState& state = At(u);
  const bool kept = state.accumulated.valid();
  reduce_input_ = Hold(e_.Alloc(ReduceFull(u), Category::kReduceScatter, Stream::kCompute), u,
                       Holds::kShards, PrecisionOf(u).reduce);
  BufferId narrow;
  if (SizeOf(PrecisionOf(u).reduce) < SizeOf(PrecisionOf(u).param)) {
    narrow = e_.Alloc(ReduceFull(u) / SizeOf(PrecisionOf(u).reduce) * SizeOf(PrecisionOf(u).param),
                      Category::kTemporary, Stream::kCompute);
  }
  const std::vector<BufferId> grads = TakeGrads(u, is_last);
  Bytes read = kept ? e_.program.buffers[state.accumulated.value].size : Bytes(0);
  for (const BufferId g : grads) {
    read += e_.program.buffers[g.value].size;
  }
  e_.AddCopy(OpCode::kReduceCopyIn, Stream::kCompute, {Phase::kBackward, u.value}, read,
             ReduceFull(u),
             {{reduce_input_, AccessMode::kWrite, Role::kOutput},
              {state.accumulated, AccessMode::kRead, Role::kInput},
              {narrow, AccessMode::kWrite, Role::kWorkspace}});
  std::uint16_t index = 0;
  for (const BufferId g : grads) {
    e_.body->Use(g, AccessMode::kRead, Role::kInput, index++);
  }
  if (narrow.valid()) {
    e_.body->Free(narrow);
  }
  for (const BufferId g : grads) {
    e_.body->Free(g);
  }
  if (kept) {
    e_.body->Free(state.accumulated);
    state.accumulated = BufferId();
  }
}

// Sums over the shard group that the replicas have not seen yet stay apart, in the reduce dtype,
// until the last micro-batch's are added and all-reduced with them. Source: foreach_reduce's
// partial_reduce_output.
void Fsdp2Rules::KeepPartial(UnitId u, BufferId out) {
  BufferId& partial = comm_[u.value].partial;
  if (!partial.valid()) {
    partial = out;
    return;
  }
  AddShards(u, partial, out);
}

void Fsdp2Rules::AddPartial(UnitId u, BufferId out) {
  BufferId& partial = comm_[u.value].partial;
  if (partial.valid()) {
    AddShards(u, out, partial);
    partial = BufferId();
  }
}

// sum += other, which goes.
void Fsdp2Rules::AddShards(UnitId u, BufferId sum, BufferId other) {
  AddReduced(u, sum, other);
  last_reduce_ = e_.body->last();
}

// fp16 sums are divided before and after; other dtypes use NCCL's average.
double Fsdp2Rules::MeanOver(std::int64_t ranks, DType reduce) {
  return reduce == DType::kFp16 ? 1.0 : static_cast<double>(ranks);
}

void Fsdp2Rules::ScaleForFp16(UnitId u, BufferId buffer, Bytes bytes, Stream stream,
                              double divisor) {
  if (PrecisionOf(u).reduce != DType::kFp16) {
    return;
  }
  const OpId before = e_.body->last();
  e_.AddCopy(OpCode::kGradScale, stream, {Phase::kBackward, u.value}, bytes, bytes,
             {{buffer, AccessMode::kReadWrite, Role::kInput}}, divisor);
  e_.After(before);
}

void Fsdp2Rules::StoreShardedGrad(UnitId u, BufferId out, bool adopts, Stream tail) {
  if (adopts) {
    At(u).sharded_grad = out;
  } else {
    const OpId before = e_.body->last();
    StoreReduced(u, out, tail, ReduceShard(u), GradShard(u));
    e_.After(before);
    if (tail == Stream::kReplicate) {
      held_.push_back(out);  // the 2025 code keeps a reference until backward ends
    } else {
      e_.body->Free(out);
    }
  }
  (tail == Stream::kReplicate ? last_replicate_ : last_reduce_) = e_.body->last();
  if (plan_.offload.parameters && last_micro_batch_ && comm_[u.value].passes_left == 0) {
    GradToHost(u, tail, e_.body->last());
    DropSentGrad(u, tail);
    (tail == Stream::kReplicate ? last_replicate_ : last_reduce_) = e_.body->last();
  }
}

}  // namespace shardwright
