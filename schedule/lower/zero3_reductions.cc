// How stage 3 reduces gradients: buckets are reduce-scattered, or (DeepSpeed's "reduce_scatter":
// false) all-reduced, after which each rank keeps its parts.
//
// Example: gradients of 30, 50 and 40 elements, reduce_bucket 100, W = 4, r = p. The first two are
// copied into the bucket. The third would make 120, so the bucket is reduced first. A copy lays it
// out as [4][8 + 13] elements: 30 and 50 are padded to 32 and 52, and each row has a quarter. Row k
// is reduced to rank k, whose 21 elements go into the two units' partitions.

#include <map>

#include "core/ranges.h"
#include "schedule/lower/zero3_rules.h"

namespace shardwright {

void Zero3Rules::GradReady(std::uint32_t i, UnitId unit) {
  Member member = TakeGrad(i, unit);
  const bool fits = elements_ + member.elements <= plan_.zero.reduce_bucket;
  if (member.storages.size() > 1 && (!fits || IsTaken(member))) {
    AddParts(ByParameter(member), member.grad);
    e_.body->Free(member.grad, StreamBit(reduce_));
    return;
  }
  FlushBefore(member.elements);
  e_.AddWait(reduce_, {e_.LastCompute()}, Phase::kBackward, unit.value);
  if (FitsBucket(member.elements)) {
    const Bytes bytes = InParam(member.elements);
    e_.AddCopy(OpCode::kBucketCopy, reduce_, {Phase::kBackward, unit.value}, bytes, bytes,
               {{member.grad, AccessMode::kRead, Role::kInput}});
    e_.body->UseFirst(bucket_, InParam(elements_ + member.elements), AccessMode::kWrite,
                      Role::kOutput);
    e_.body->Free(member.grad, StreamBit(reduce_));
    member.grad = BufferId();
  }
  AddMember(member);
}

void Zero3Rules::AddPart(Part part, BufferId grad) {
  Member& member = part.member;
  FlushBefore(member.elements);
  e_.AddWait(reduce_, {e_.LastCompute()}, Phase::kBackward, member.unit.value);
  if (!FitsBucket(member.elements)) {
    member.grad = NewMixed(InParam(member.elements), reduce_, job_.precision.param);
  }
  CopyPart(part, grad, member.grad.valid() ? member.grad : bucket_, reduce_);
  AddMember(member);
}

// A bucket is reduced before it would pass its limit.
void Zero3Rules::FlushBefore(std::int64_t elements) {
  if (elements_ > 0 && elements_ + elements > plan_.zero.reduce_bucket) {
    Flush();
  }
}

void Zero3Rules::AddMember(const Member& member) {
  elements_ += member.elements;
  members_.push_back(member);
}

void Zero3Rules::Flush() {
  if (members_.empty()) {
    return;
  }
  LimitHost(reduce_events_, Phase::kBackward, members_.front().unit);
  FreeReduced();
  if (Scatters()) {
    ScatterMembers({Phase::kBackward, members_.front().unit.value});
  } else {
    AverageMembers();
  }
  for (const Member& m : members_) {
    if (m.grad.valid()) {
      reduced_.push_back(m.grad);
    }
  }
  if (!plan_.zero.before_deepspeed_0_6) {
    FreeReduced();
  }
  if (UpdatesOnHost()) {
    SendWhatIsComplete();
  }
  last_reduce_ = e_.body->last();
  reduce_events_.push_back(last_reduce_);
  members_.clear();
  elements_ = 0;
}

void Zero3Rules::FreeReduced() {
  for (const BufferId grad : reduced_) {
    e_.body->Free(grad, StreamBit(reduce_));
  }
  reduced_.clear();
}

void Zero3Rules::ScatterMembers(Emitter::Where where) {
  const std::int64_t padded = Summed<std::int64_t>(members_, &Member::padded_elements);
  const Bytes wide = InReduce(elements_), full = InReduce(padded);
  BufferId cast;
  if (job_.precision.reduce != job_.precision.param) {
    cast = NewMixed(wide, reduce_, job_.precision.reduce);
    e_.AddCopy(OpCode::kCast, reduce_, where, InParam(elements_), wide,
               {{cast, AccessMode::kWrite, Role::kOutput}});
    UseMembers();
  }
  const BufferId input = e_.Hold(e_.Alloc(full, Category::kReduceScatter, reduce_), Holds::kRows,
                                 kNoSubject, job_.precision.reduce);
  e_.AddCopy(OpCode::kReduceCopyIn, reduce_, where, wide, full,
             {{input, AccessMode::kWrite, Role::kOutput}, {cast, AccessMode::kRead, Role::kInput}});
  if (!cast.valid()) {
    UseMembers();
  }
  if (ranks() > 1) {
    e_.AddCopy(OpCode::kGradScale, reduce_, where, full, full,
               {{input, AccessMode::kReadWrite, Role::kInput}}, factors_.pre);
  }
  const BufferId out = Scatter(input, full, where);
  StoreParts(out, where);
  if (cast.valid()) {
    e_.body->Free(cast);
  }
  e_.body->Free(input);
  if (out != input) {
    e_.body->Free(out);
  }
}

// The bucket, then the gradients that did not fit into it.
void Zero3Rules::UseMembers() {
  std::int64_t copied = 0;
  std::uint16_t index = 1;
  for (const Member& m : members_) {
    copied += m.grad.valid() ? 0 : m.elements;
    if (m.grad.valid()) {
      e_.body->Use(m.grad, AccessMode::kRead, Role::kInput, index++);
    }
  }
  if (copied > 0) {
    e_.body->UseFirst(bucket_, InParam(copied), AccessMode::kRead, Role::kInput);
  }
}

// Row r of `input`, seen as [W][sum of the members' chunks], is what rank r receives.
BufferId Zero3Rules::Scatter(BufferId input, Bytes full, Emitter::Where where) {
  if (plan_.shard_size == 1 && !replicate_group_.valid()) {
    return input;
  }
  BufferId out = input;
  if (plan_.shard_size > 1) {
    out = NewMixed(full / plan_.shard_size, reduce_, job_.precision.reduce);
    e_.AddCollective(
        Collective(OpCode::kReduceScatter, reduce_, shard_group_, full, job_.precision.reduce,
                   replicate_group_.valid() ? 1.0 : factors_.post),
        where,
        {{input, AccessMode::kRead, Role::kInput}, {out, AccessMode::kWrite, Role::kOutput}});
  }
  if (replicate_group_.valid()) {
    e_.AddCollective(Collective(OpCode::kAllReduce, reduce_, replicate_group_,
                                full / plan_.shard_size, job_.precision.reduce, factors_.post),
                     where, {{out, AccessMode::kReadWrite, Role::kInput}});
  }
  return out;
}

// Chunk after chunk, in the order of the members, to the units' gradient partitions.
void Zero3Rules::StoreParts(BufferId out, Emitter::Where where) {
  const std::int64_t chunks = Summed<std::int64_t>(
      members_, [&](const Member& m) { return m.padded_elements / plan_.shard_size; });
  std::vector<BufferId> parts =
      Mapped<BufferId>(UnitsOf(members_), [&](const UnitId u) { return Partition(u); });
  const Bytes wide = InReduce(chunks), low = InParam(chunks);
  e_.AddCopy(OpCode::kGradStore, reduce_, where, first_micro_batch_ ? wide : wide + low, low,
             {{out, AccessMode::kRead, Role::kInput}});
  std::uint16_t index = 0;
  for (const BufferId part : parts) {
    e_.body->Use(part, first_micro_batch_ ? AccessMode::kWrite : AccessMode::kReadWrite,
                 Role::kOutput, index++);
  }
}

// The bucket, and each gradient beside it where it is; without a bucket all of them flattened.
void Zero3Rules::AverageMembers() {
  if (!plan_.zero.contiguous_gradients && members_.size() > 1) {
    const BufferId flat = FlattenMembers(members_, reduce_);
    Average(flat, elements_, members_, members_.front().unit);
    e_.body->Free(flat);
    return;
  }
  const auto beside = FindIf(members_, [](const Member& m) { return m.grad.valid(); });
  const auto in_bucket =
      std::span<const Member>(members_).first(static_cast<std::size_t>(beside - members_.begin()));
  // Before 0.6 a bucket without any goes, too.
  if (bucket_.valid() && plan_.zero.before_deepspeed_0_6) {
    Average(bucket_, plan_.zero.reduce_bucket, in_bucket, members_.front().unit);
  } else if (!in_bucket.empty()) {
    Average(bucket_, SumOf(in_bucket), in_bucket, members_.front().unit);
  }
  for (auto m = beside; m != members_.end(); ++m) {
    Average(m->grad, m->elements, {&*m, 1}, m->unit);
  }
}

// Where reduced gradients go. Beside an update on the host it lives until they are sent there, and
// begins with what earlier micro-batches sent; before 0.6 the first reduction of a step made all.
BufferId Zero3Rules::Partition(UnitId u) {
  BufferId& part = low_grads_[u.value];
  if (!part.valid()) {
    if (UpdatesOnHost()) {
      part = HoldShard(e_.Alloc(GatherShard(u), Category::kShardedGradient, reduce_), u);
      if (!first_micro_batch_) {
        e_.AddTransfer(OpCode::kCopyH2d, reduce_, {Phase::kBackward, u.value}, GatherShard(u),
                       sums_on_host_[u.value], part);
      }
    } else {
      NewPartitions();
    }
  }
  return part;
}

void Zero3Rules::NewPartitions() {
  for (std::uint32_t u = 0; u < unit_count(); ++u) {
    if (IsTrainable(UnitId(u))) {
      low_grads_[u] = HoldShard(
          e_.Alloc(GatherShard(UnitId(u)), Category::kShardedGradient, reduce_), UnitId(u));
    }
  }
  FlattenSubGroups(low_grads_);
}

// Of parameters that reach the loss: the others never have a gradient to wait for.
void Zero3Rules::CountGradients() {
  const Model& model = e_.in.model;
  std::vector<bool> seen(model.params.size(), false);
  for (std::size_t i = 0; i < model.ops.size(); ++i) {
    for (const ParamId p : model.ops[i].params) {
      const ParamId tied_to = model.params[p.value].tied_to;
      const ParamId storage = tied_to.valid() ? tied_to : p;
      if (e_.a.ops[i].weight_grad && e_.a.param_grad[p.value] && !seen[storage.value]) {
        seen[storage.value] = true;
        due_[spans_.unit_of_param[storage.value].value] +=
            RoundUp(model.params[storage.value].Elements(), plan_.shard_size);
      }
    }
  }
}

// Units of which this pass has reduced every gradient: their sum waits on the host for the next
// micro-batch (grad_partitions_flat_buffer), or is sent to the update.
void Zero3Rules::SendWhatIsComplete() {
  for (const Member& m : members_) {
    for (const auto& [unit, padded] : m.shares) {
      stored_[unit.value] += padded;
    }
  }
  for (const UnitId u : UnitsOf(members_)) {
    if (stored_[u.value] < due_[u.value]) {
      continue;
    }
    BufferId& low = low_grads_[u.value];
    if (last_micro_batch_) {
      SendToUpdate(u);
    } else {
      e_.AddTransfer(OpCode::kCopyD2h, reduce_, {Phase::kBackward, u.value}, GatherShard(u), low,
                     sums_on_host_[u.value]);
      e_.body->Free(low);
    }
    low = BufferId();
  }
}

// Cast to the masters' dtype and copied.
void Zero3Rules::SendToUpdate(UnitId u) {
  const BufferId low = low_grads_[u.value];
  UnitState& state = At(u);
  state.sharded_grad = low;
  if (job_.precision.master != job_.precision.param) {
    state.sharded_grad = NewShardedGrad(u, reduce_);
    e_.AddCopy(OpCode::kGradStore, reduce_, {Phase::kOptimizer, u.value}, GatherShard(u),
               MasterShard(u),
               {{low, AccessMode::kRead, Role::kInput},
                {state.sharded_grad, AccessMode::kWrite, Role::kOutput}});
    e_.body->Free(low);
  }
  GradToHost(u, reduce_, e_.body->last());
  e_.body->Free(state.sharded_grad);
  state.sharded_grad = BufferId();
}

// Sums of all ranks over the first elements of `source`, of which each keeps its chunk of each
// parameter of `members`, if there are any. The reduction bears the name of `unit`.
void Zero3Rules::Average(BufferId source, std::int64_t elements, std::span<const Member> members,
                         UnitId unit) {
  AverageInPlace(source, elements, reduce_, {Phase::kBackward, unit.value},
                 std::span(&elements, 1));
  std::map<UnitId, std::int64_t> chunks;
  for (const Member& m : members) {
    for (const auto& [unit, padded] : m.shares) {
      chunks[unit] += padded / plan_.shard_size;
    }
  }
  for (const UnitId u : UnitsOf(members)) {
    const Bytes stored = InParam(chunks[u]);
    const BufferId part = Partition(u);
    e_.AddCopy(OpCode::kGradStore, reduce_, {Phase::kBackward, u.value},
               first_micro_batch_ ? stored : 2 * stored, stored, {});
    e_.body->UseFirst(source, InParam(elements), AccessMode::kRead, Role::kInput);
    e_.body->Use(part, first_micro_batch_ ? AccessMode::kWrite : AccessMode::kReadWrite,
                 Role::kOutput);
  }
}

}  // namespace shardwright
