// FairScale's FullyShardedDataParallel: as FSDP1, whose ancestor it is, but without prefetch and
// rate limiter, with a communicator of its own for reductions, and with small gradients reduced
// together in a bucket. Rules: docs/lowering.md, section fairscale.
//
// Example: layers A and B and a root on 4 ranks, shards of 655,616, 655,616 and 256,128 elements, r
// = fp32. All fit the bucket's slot. Their gradients go into the bucket as they become final, B, A,
// root, and one reduce-scatter of 25,077,760 bytes at the end of backward reduces all three. FSDP1
// sends three reduce-scatters for the same, two of them while backward still runs.

#include <algorithm>

#include "core/error.h"
#include "schedule/lower/flat_rules.h"
#include "schedule/lower/layout.h"

namespace shardwright {
namespace {

class FairscaleRules : public FlatRules {
 public:
  FairscaleRules(Emitter& emitter, const UnitSpans& spans, const std::vector<ResolvedUnit>& units)
      : FlatRules(emitter, spans, units),
        reduce_group_(e_.AddGroup({Axis::kShard}, "shard.reduce")),
        slot_elements_(plan_.reduce_scatter_bucket.value / SizeOf(job_.precision.reduce) /
                       plan_.shard_size) {}

  void BeginStep(bool first) override {
    StepRules::BeginStep(first);
    frees_.clear();
  }

  void PreBackward(UnitId u) override {
    if (HasParams(u)) {
      Unshard(u, Phase::kBackward);
      WaitForUnshard(u, Phase::kBackward);
    }
  }

  void FlatGradFinal(UnitId u) override {
    At(u).backward_done = true;
    if (plan_.bounded_memory) {
      e_.AddWait(Stream::kCompute, {last_reduce_}, Phase::kBackward, u.value);
    }
    const BufferId flat = FlattenGrads(u);
    if (Syncs() || Reshards(u)) {
      FreeUnsharded(u);
    }
    if (Syncs()) {
      Reduce(u, AddKept(u, flat));
    } else {
      KeepUnreduced(u, flat);
    }
  }

  // Reduces the rest of the bucket; then compute waits for the post-backward stream.
  void EndBackward() override {
    FlushBucket();
    e_.AddWait(Stream::kCompute, {last_reduce_}, Phase::kBackward, kNoSubject);
    if (bucket_.valid()) {
      e_.body->Free(bucket_);
      bucket_ = BufferId();
    }
    if (Syncs()) {
      FreeAllUnsharded();
    }
    WaitForHostGrads(Phase::kBackward);
    last_reduce_ = OpId();
  }

 protected:
  [[nodiscard]] UnitInfo Layout(const ResolvedUnit& unit) const override {
    return LayoutFlat(e_.in.model, unit, plan_.shard_size, false,
                      UnitPrecision(job_.precision, unit.full_precision).param);
  }

  void BeforeGather(Phase phase, UnitId unit) override {
    if (plan_.bounded_memory && frees_.size() >= 2) {
      e_.AddWait(Stream::kGather, {frees_[frees_.size() - 2]}, phase, unit.value);
    }
  }
  void AfterFree() override { frees_.push_back(e_.LastCompute()); }

 private:
  static constexpr Stream kPost = Stream::kReduce;  // the post_backward stream

  [[nodiscard]] Bytes ReducedShard(UnitId u) const {
    return Bytes(Info(u).shard_elements * SizeOf(PrecisionOf(u).reduce));
  }
  [[nodiscard]] Bytes Slots(std::int64_t elements) const {
    return Bytes(elements * plan_.shard_size * SizeOf(job_.precision.reduce));
  }

  void Reduce(UnitId u, BufferId flat) {
    e_.AddWait(kPost, {e_.LastCompute()}, Phase::kBackward, u.value);
    const BufferId input = CastFlat(u, flat);
    Scale(u, input, FlatGrad(u, PrecisionOf(u).reduce), kPost, factors_.pre);
    if (plan_.shard_size == 1) {
      Finish(u, input);
    } else if (Info(u).shard_elements <= slot_elements_ && !Info(u).full_precision) {
      AddToBucket(u, input);
    } else {
      ReduceAlone(u, input);
    }
    if (flat != At(u).sharded_grad) {
      e_.body->Free(flat, StreamBit(kPost));
    }
    if (input != flat && input != At(u).sharded_grad) {
      e_.body->Free(input);
    }
    last_reduce_ = e_.body->last();
  }

  // Gradients that are larger, or of another dtype than the bucket, are concatenated once more,
  // chunk by chunk, and reduced by themselves.
  void ReduceAlone(UnitId u, BufferId input) {
    const Bytes full = FlatGrad(u, PrecisionOf(u).reduce);
    const Emitter::Where where{Phase::kBackward, u.value};
    const BufferId chunks = Hold(e_.Alloc(full, Category::kReduceScatter, kPost), u, Holds::kShards,
                                 PrecisionOf(u).reduce);
    e_.AddCopy(
        OpCode::kReduceCopyIn, kPost, where, full, full,
        {{input, AccessMode::kRead, Role::kInput}, {chunks, AccessMode::kWrite, Role::kOutput}});
    const BufferId out = NewShard(u);
    e_.AddCollective(
        Collective(OpCode::kReduceScatter, kPost, reduce_group_, full, PrecisionOf(u).reduce),
        where,
        {{chunks, AccessMode::kRead, Role::kInput}, {out, AccessMode::kWrite, Role::kOutput}});
    e_.body->Free(chunks);
    Finish(u, out);
  }

  [[nodiscard]] BufferId NewRows(std::int64_t elements) {
    return e_.Hold(e_.Alloc(Slots(elements), Category::kReduceScatter, kPost), Holds::kRows,
                   kNoSubject, job_.precision.reduce);
  }

  // The gradient's chunks go behind those that are in the bucket already: row r of [W][slot] is
  // what rank r receives. They are stacked first, which takes a temporary.
  void AddToBucket(UnitId u, BufferId input) {
    if (used_ + Info(u).shard_elements > slot_elements_) {
      FlushBucket();
    }
    if (!bucket_.valid()) {
      bucket_ = NewRows(slot_elements_);
    }
    const Bytes full = FlatGrad(u, PrecisionOf(u).reduce);
    const BufferId stacked = e_.Alloc(full, Category::kTemporary, kPost);
    e_.AddCopy(OpCode::kBucketCopy, kPost, {Phase::kBackward, u.value}, 2 * full, 2 * full,
               {{input, AccessMode::kRead, Role::kInput},
                {bucket_, AccessMode::kWrite, Role::kOutput},
                {stacked, AccessMode::kWrite, Role::kWorkspace}});
    e_.body->Free(stacked);
    used_ += Info(u).shard_elements;
    in_bucket_.push_back(u);
  }

  // Reduce-scatters the used columns, which are made contiguous before and zeroed behind; each
  // unit's result is a part of one output.
  void FlushBucket() {
    if (in_bucket_.empty()) {
      return;
    }
    const Bytes full = Slots(used_);
    const Emitter::Where where{Phase::kBackward, in_bucket_.front().value};
    const BufferId columns = NewRows(used_);
    e_.AddCopy(
        OpCode::kReduceCopyIn, kPost, where, full, 2 * full,
        {{bucket_, AccessMode::kRead, Role::kInput}, {columns, AccessMode::kWrite, Role::kOutput}});
    std::vector<BufferId> outputs;
    for (const UnitId u : in_bucket_) {
      outputs.push_back(NewShard(u));
    }
    e_.AddCollective(
        Collective(OpCode::kReduceScatter, kPost, reduce_group_, full, job_.precision.reduce),
        where, {{columns, AccessMode::kRead, Role::kInput}});
    std::uint16_t index = 0;
    for (const BufferId out : outputs) {
      e_.body->Use(out, AccessMode::kWrite, Role::kOutput, index++);
    }
    e_.body->Free(columns);
    for (std::size_t i = 0; i < in_bucket_.size(); ++i) {
      Finish(in_bucket_[i], outputs[i]);
    }
    in_bucket_.clear();
    used_ = 0;
    last_reduce_ = e_.body->last();
  }

  [[nodiscard]] bool Adopts(UnitId u) { return !CastsReduce(u) && !At(u).sharded_grad.valid(); }
  [[nodiscard]] BufferId NewShard(UnitId u) {
    const Category category = Adopts(u) ? Category::kShardedGradient : Category::kReduceScatter;
    return Hold(e_.Alloc(ReducedShard(u), category, kPost), u, Holds::kShard,
                PrecisionOf(u).reduce);
  }

  // After the reduction: the second division; cast, accumulate or keep as it is.
  void Finish(UnitId u, BufferId out) {
    const Bytes shard = ReducedShard(u);
    Scale(u, out, shard, kPost, factors_.post);
    if (Adopts(u)) {
      At(u).sharded_grad = out;
    } else {
      StoreReduced(u, out, kPost, shard, MasterShard(u));
      if (plan_.shard_size > 1) {
        e_.body->Free(out);
      }
    }
    if (plan_.offload.parameters && last_micro_batch_) {
      GradToHost(u, kPost, e_.body->last());
      if (plan_.shard_size > 1) {  // alone, a rank keeps the gradient itself
        DropSentGrad(u, kPost);
      }
    }
  }

  const GroupId reduce_group_;
  const std::int64_t slot_elements_;  // a unit's shard that fits into the bucket at most
  std::vector<OpId> frees_;           // of the step: what compute was given last before each free
  BufferId bucket_;
  std::vector<UnitId> in_bucket_;
  std::int64_t used_ = 0;  // elements of each rank's row
  OpId last_reduce_;
};

}  // namespace

std::unique_ptr<StepRules> MakeFairscale(Emitter& emitter, const UnitSpans& spans,
                                         const std::vector<ResolvedUnit>& units) {
  return std::make_unique<FairscaleRules>(emitter, spans, units);
}

}  // namespace shardwright
