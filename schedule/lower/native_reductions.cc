// Reductions of the native dialect, and the updates behind them.
//
// Example: layers C, B, A finish backward in this order, in_flight 2, gradients of 10 MiB each. C's
// and B's buffers are in reductions when A's first weight gradient needs a buffer. MakeRoomForGrads
// lets compute wait for C's reduction and frees C's buffer, so 20 MiB exist at most, not 30.
//
// Without clipping the update of a unit follows its reduction on the reduce stream, and backward
// goes on beside it. With clipping all updates wait for the norm of all units.

#include "schedule/lower/native_rules.h"

namespace shardwright {

void NativeRules::MakeRoomForGrads() {
  while (Syncs() && reducing_.size() + waiting_reductions_.size() >=
                        static_cast<std::size_t>(plan_.in_flight)) {
    if (reducing_.empty()) {
      (void)BeginTransfer();
    } else {
      RetireOldestReduction();
    }
  }
}

void NativeRules::MakeRoomForShardedGrads() {
  while (sending_.size() >= static_cast<std::size_t>(plan_.in_flight)) {
    e_.AddWait(Stream::kReduce, {sending_.front().done}, Phase::kBackward, kNoSubject);
    e_.body->Free(sending_.front().buffer);
    sending_.pop_front();
  }
}

void NativeRules::RetireOldestReduction() {
  const InUse oldest = reducing_.front();
  reducing_.pop_front();
  e_.AddWait(Stream::kCompute, {oldest.done}, Phase::kBackward, kNoSubject);
  e_.body->Free(oldest.buffer);
}

void NativeRules::SumOverReplicas(UnitId u, BufferId grad, OpId written) {
  const OpId replicated = e_.AddCollective(
      Collective(OpCode::kAllReduce, Stream::kReplicate, replicate_group_, ReduceShard(u),
                 PrecisionOf(u).reduce, static_cast<double>(plan_.replicate_size)),
      {Phase::kBackward, u.value}, {{grad, AccessMode::kReadWrite, Role::kInput}});
  e_.After(written);
  e_.AddWait(Stream::kReduce, {replicated}, Phase::kBackward, u.value);
}

void NativeRules::ReduceInPlace(UnitId u) {
  UnitState& state = At(u);
  const BufferId grad = state.accumulated;
  state.accumulated = BufferId();
  const OpId written = e_.LastCompute();
  Stream s = Stream::kCompute;
  last_reduce_ = written;
  if (replicate_group_.valid()) {
    SumOverReplicas(u, grad, written);
    s = Stream::kReduce;
    last_reduce_ = e_.body->last();
  }
  if (Adopts(u)) {
    state.sharded_grad = grad;
  } else {
    Store(u, grad, s);
    last_reduce_ = e_.body->last();
    reducing_.push_back({grad, last_reduce_});
  }
  if (last_micro_batch_ && !TakesGradNorm(job_)) {
    e_.AddWait(Stream::kReduce, {last_reduce_}, Phase::kBackward, u.value);
    Update(u, Stream::kReduce);
    last_reduce_ = e_.body->last();
    reducing_.push_back({state.sharded_grad, last_reduce_});
    state.sharded_grad = BufferId();
  }
}

// Reduce-scatter, all-reduce over replicas, cast or add, then the gradient's way out: to the host,
// to the update, or to wait for the norm.
void NativeRules::Reduce(UnitId u) {
  if (ReducesInPlace()) {
    ReduceInPlace(u);
    return;
  }
  MakeRoomForShardedGrads();
  UnitState& state = At(u);
  const BufferId input = state.accumulated;
  state.accumulated = BufferId();
  const OpId written = e_.LastCompute();
  const Stream s = Stream::kReduce;
  const bool adopts = Adopts(u);
  const DType r = PrecisionOf(u).reduce;
  const BufferId out = Hold(
      e_.Alloc(ReduceShard(u), adopts ? Category::kShardedGradient : Category::kReduceScatter, s),
      u, Holds::kShard, r);
  if (plan_.shard_size > 1) {
    e_.AddCollective(
        Collective(OpCode::kReduceScatter, s, reduce_group_, ReduceFull(u), r,
                   static_cast<double>(plan_.shard_size)),
        {Phase::kBackward, u.value},
        {{input, AccessMode::kRead, Role::kInput}, {out, AccessMode::kWrite, Role::kOutput}});
    TakeTurn();
  } else {
    e_.AddCopy(
        OpCode::kGradStore, s, {Phase::kBackward, u.value}, ReduceFull(u), ReduceShard(u),
        {{input, AccessMode::kRead, Role::kInput}, {out, AccessMode::kWrite, Role::kOutput}});
  }
  e_.After(written);
  reducing_.push_back({input, e_.body->last()});
  if (replicate_group_.valid() && plan_.sync == SyncMode::kReplicateLast && !SumPartial(u, out)) {
    return;
  }
  if (replicate_group_.valid()) {
    SumOverReplicas(u, out, e_.body->last());
  }
  if (adopts) {
    state.sharded_grad = out;
  } else {
    Store(u, out, s);
    e_.body->Free(out);
  }
  last_reduce_ = e_.body->last();
  if (UpdatesOnHost() && last_micro_batch_) {
    GradToHost(u, Stream::kD2h, last_reduce_);
    sending_.push_back({state.sharded_grad, e_.body->last()});
    state.sharded_grad = BufferId();
  } else if (last_micro_batch_ && !TakesGradNorm(job_)) {
    FollowActivations();
    Update(u, s);
    last_reduce_ = e_.body->last();
    FreeShardedGrads({&u, 1});
  }
}

bool NativeRules::SumPartial(UnitId u, BufferId out) {
  BufferId& partial = comm_[u.value].partial;
  if (!partial.valid()) {
    if (!last_micro_batch_) {
      partial = out;
    }
    return last_micro_batch_;
  }
  const BufferId sum = last_micro_batch_ ? out : partial;
  const BufferId other = last_micro_batch_ ? partial : out;
  AddReduced(u, sum, other);
  partial = last_micro_batch_ ? BufferId() : partial;
  return last_micro_batch_;
}

void NativeRules::Store(UnitId u, BufferId out, Stream stream) {
  StoreReduced(u, out, stream, ReduceShard(u), GradShard(u));
}

void NativeRules::Update(UnitId u, Stream stream) {
  e_.body->SetCarry(SlotOf(u), StagesMoments() ? AddStagedOptimizer(u, stream, moments_)
                                               : AddOptimizer({&u, 1}, stream));
}

void NativeRules::FollowActivations() {
  if (StagesMoments() && plan_.offload.activations) {
    moments_.FollowCompute();
  }
}

void NativeRules::UpdateOnHost(const std::vector<UnitId>& units) {
  WaitForHostGrads(Phase::kOptimizer);
  for (const InUse& s : sending_) {
    e_.body->Free(s.buffer);
  }
  sending_.clear();
  AddHostOptimizer(units);
  if (!plan_.offload.parameters) {
    for (const UnitId u : units) {
      e_.body->SetCarry(SlotOf(u),
                        e_.AddTransfer(OpCode::kCopyH2d, Stream::kH2d, {Phase::kOptimizer, u.value},
                                       MasterShard(u), At(u).host_master, At(u).shard));
    }
  }
  FreeShardedGrads(units);
}

}  // namespace shardwright
