// PyTorch DistributedDataParallel: replicated parameters, gradients all-reduced in buckets while
// backward runs. Rules: docs/lowering.md, section ddp.
//
// Example: the Llama of ddp_buckets.cc on 4 ranks. Backward of the head writes a bf16 gradient,
// casts it to 2,048,000 bytes of .grad, copies these into bucket 0 and starts its all-reduce on the
// reduce stream. Backward goes on; the last gradient, the embedding's, completes bucket 1. At the
// end compute waits for each bucket and copies it back to the gradients.
//
// So a step holds gradients twice, in .grad and in buckets: 2 x 25,077,760 bytes here. Buckets
// launch strictly in their order, even if a later one is complete first: all ranks must issue
// collectives in one order.

#include <array>
#include <utility>

#include "core/error.h"
#include "core/ranges.h"
#include "schedule/lower/ddp_buckets.h"
#include "schedule/lower/layout.h"
#include "schedule/lower/unit_rules.h"

namespace shardwright {
namespace {

class DdpRules : public StepRules {
 public:
  DdpRules(Emitter& emitter, const UnitSpans& spans, const std::vector<ResolvedUnit>& units)
      : StepRules(emitter, spans, units),
        cast_of_op_(emitter.in.model.ops.size()),
        grad_of_param_(emitter.in.model.params.size()),
        part_of_param_(emitter.in.model.params.size()) {
    group_ = e_.AddGroup({Axis::kReplicate});
    if (plan_.replicate_size > 1 && job_.mode == JobMode::kTrain && !FindsUnused(plan_)) {
      CheckAllReachTheLoss(e_.in.model, e_.a);
    }
  }

  // One bucket holds everything until the order in which gradients become ready is known.
  [[nodiscard]] bool FirstStepDiffers() const override {
    return job_.mode == JobMode::kTrain && !IsDynamic();
  }

  void BeginStep(bool first) override {
    StepRules::BeginStep(first);
    if (plan_.replicate_size > 1 && job_.mode == JobMode::kTrain) {
      MakeBuckets(first);
    }
  }

  void EndStep() override {
    StepRules::EndStep();
    if (first_step_) {
      FreeBuckets();
    }
  }

  void BeginMicroBatch(bool first, bool last) override {
    StepRules::BeginMicroBatch(first, last);
    // Rebuilt in the forward pass after the first backward pass that has reduced when it noted in
    // which order gradients become ready: a static graph's first pass only notes which do.
    passes_ = first ? 1 : passes_ + 1;
    const int initial = plan_.static_graph ? 2 : 1;
    if (first_step_ && passes_ > initial && is_initial_ && plan_.sync == SyncMode::kEvery) {
      FreeBuckets();
      MakeBuckets(false);
    }
    for (Bucket& b : buckets_) {
      b.missing = b.plan.parts.size();
      b.filled = OpId();
    }
    next_bucket_ = 0;
    if (first) {
      std::fill(grad_of_param_.begin(), grad_of_param_.end(), BufferId());
    }
  }

  void PreForward(UnitId, Phase) override {}
  void PostForward(UnitId, Phase) override {}
  void PreBackward(UnitId) override {}
  void BackwardLeft(UnitId, bool) override {}

  // Autocast: weights are cast where they are first used and kept for the op's backward.
  void BeforeForwardOp(std::uint32_t i, Phase phase) override {
    const std::int64_t elements = ParamElements(i, false);
    if (elements == 0 || !CastsWeights(i) || cast_of_op_[i].valid()) {
      return;
    }
    const Bytes cast(elements * SizeOf(job_.precision.param));
    cast_of_op_[i] = e_.Hold(e_.Alloc(cast, Category::kUnshardedParameter, Stream::kCompute),
                             Holds::kTensors, i, job_.precision.param);
    const UnitId unit = UnitOf(i);
    e_.AddCopy(OpCode::kCast, Stream::kCompute, {phase, unit.value},
               Bytes(elements * SizeOf(MasterOfOp(i))), cast,
               {{At(unit).shard, AccessMode::kRead, Role::kInput},
                {cast_of_op_[i], AccessMode::kWrite, Role::kOutput}});
  }

  // The forward of a head whose loss runs in chunks waits for backward.
  void BeforeBackwardOp(std::uint32_t i) override {
    if (e_.a.ops[i].runs_loss) {
      BeforeForwardOp(i, Phase::kBackward);
    }
  }

  BufferId ParameterStorage(UnitId unit, std::uint32_t model_op) override {
    return CastsWeights(model_op) ? cast_of_op_[model_op] : At(unit).shard;
  }

  void AfterBackwardOp(std::uint32_t i) override { FreeCast(i); }

  void EndForward() override {
    for (std::uint32_t i = 0; i < cast_of_op_.size(); ++i) {
      if (!e_.a.ops[i].has_backward) {
        FreeCast(i);
      }
    }
  }

  GradTarget WeightGradTarget(std::uint32_t i, UnitId) override {
    const DType dtype = CastsWeights(i) ? job_.precision.param : MasterOfOp(i);
    const bool becomes_sum = !CastsWeights(i) && !SumOf(i).valid();
    const std::int64_t n = becomes_sum ? SumOfGradElementsWith(i) : ParamElements(i, true);
    fresh_grad_ = NewGrad(i, n, dtype);
    return {fresh_grad_, AccessMode::kWrite};
  }

  // A gradient becomes .grad or is added to it, then its bucket fills. Ops that share a weight add
  // up the micro-batch's gradient first, as autograd does before it touches .grad.
  void WeightGradWritten(std::uint32_t i, UnitId unit) override {
    BufferId& grad = grad_of_param_[GroupOf(i).value];
    BufferId& sum = SumOf(i);
    const bool is_new = !grad.valid();
    AddFresh(i, sum);
    if (is_new) {
      At(unit).grads.push_back(grad);
    }
    if (&sum != &grad && completes_grad_[i]) {
      Accumulate(i, sum, grad, AccessMode::kReadWrite);
      sum = BufferId();
    }
    if (Syncs() && plan_.replicate_size > 1 && completes_grad_[i]) {
      if (WaitsForAll()) {
        waiting_.push_back(i);
      } else {
        FillBucket(i);
      }
    }
  }

  void EndBackward() override {
    for (std::uint32_t i = 0; i < cast_of_op_.size(); ++i) {
      FreeCast(i);  // of ops that ran again without a backward of their own
    }
    if (WaitsForAll() && Syncs() && plan_.replicate_size > 1) {
      SumMap(kNoSubject);
    }
    for (const std::uint32_t i : waiting_) {
      FillBucket(i);
    }
    waiting_.clear();
    SW_CHECK(next_bucket_ == buckets_.size() || !Syncs() || plan_.replicate_size == 1,
             "a gradient bucket was never complete");
    if (next_bucket_ == 0) {
      return;
    }
    for (std::size_t b = 0; b < next_bucket_; ++b) {
      CopyOut(buckets_[b]);
    }
    ReadMap();
  }

 protected:
  void EndInit() override {
    std::int64_t count = 0;
    for (std::size_t p = 0; p < e_.in.model.params.size(); ++p) {
      const bool is_unused = !e_.in.without_gradient.empty() && e_.in.without_gradient[p];
      has_unused_ = has_unused_ || is_unused;
      count += is_unused || (e_.a.param_grad[p] && !e_.in.model.params[p].tied_to.valid()) ? 1 : 0;
    }
    if (FindsUnused(plan_) && plan_.replicate_size > 1 && job_.mode == JobMode::kTrain) {
      const Bytes size(count * SizeOf(DType::kInt32));
      map_ = HoldMap(e_.Alloc(size, Category::kModelBuffer, Stream::kCompute, true));
      host_map_ = HoldMap(e_.AllocOnHost(size, Category::kModelBuffer));
      e_.program.buffers[host_map_.value].zero_filled = true;
    }
  }
  [[nodiscard]] UnitInfo Layout(const ResolvedUnit& unit) const override {
    return LayoutWhole(e_.in.model, unit);
  }
  [[nodiscard]] std::vector<std::int64_t> ShardTensors(UnitId u) const override {
    return PerParameter(u, true, false);
  }
  [[nodiscard]] std::vector<std::int64_t> StateTensors(UnitId u) const override {
    return PerParameter(u, true, true);
  }

 private:
  struct Bucket {
    BucketPlan plan;
    BufferId storage;
    std::size_t missing = 0;
    OpId filled;
    OpId reduced;
  };

  [[nodiscard]] UnitId UnitOf(std::uint32_t i) const {
    return spans_.unit_of_param[FirstOf(i).value];
  }
  [[nodiscard]] ParamId FirstOf(std::uint32_t i) const { return e_.in.model.ops[i].params.front(); }
  // Of what learns of the op, if that differs from what does not.
  [[nodiscard]] DType MasterOfOp(std::uint32_t i) const {
    const bool is_wide = AnyOf(e_.in.model.ops[i].params,
                               [&](ParamId p) { return e_.a.masters[p.value] == DType::kFp32; });
    return is_wide ? DType::kFp32 : job_.precision.master;
  }
  // Autocast does not touch what batch norms read, and what is read in fp32.
  [[nodiscard]] bool CastsWeights(std::uint32_t i) const {
    const Parameter& first = e_.in.model.params[FirstOf(i).value];
    const bool is_cast =
        !first.trainable && job_.frozen_format != FrozenFormat::kMaster;  // as it is stored
    return job_.precision.param != MasterOfOp(i) && !first.full_precision && !is_cast &&
           !e_.a.wide_ops[i];
  }
  [[nodiscard]] std::int64_t ParamElements(std::uint32_t i, bool trainable_only) const {
    std::int64_t n = 0;
    for (const ParamId p : e_.in.model.ops[i].params) {
      const Parameter& param = e_.in.model.params[p.value];
      n += param.trainable || !trainable_only ? param.Elements() : 0;
    }
    return n;
  }
  // Where the op's gradient is added: .grad, or what a later micro-batch has of it so far.
  [[nodiscard]] BufferId& SumOf(std::uint32_t i) {
    const std::size_t storage = GroupOf(i).value;
    const bool is_apart = !first_micro_batch_ && is_shared_[storage];
    return is_apart ? part_of_param_[storage] : grad_of_param_[storage];
  }
  [[nodiscard]] BufferId NewGrad(std::uint32_t i, std::int64_t elements, DType dtype) {
    const Bytes size(elements * SizeOf(dtype));
    return e_.Hold(e_.Alloc(size, Category::kUnshardedGradient, Stream::kCompute), Holds::kTensors,
                   i, dtype);
  }
  // The fresh gradient becomes `sum`, is cast into it, or is added to it.
  void AddFresh(std::uint32_t i, BufferId& sum) {
    if (!sum.valid() && !CastsWeights(i)) {
      sum = fresh_grad_;
      return;
    }
    AccessMode mode = AccessMode::kReadWrite;
    if (!sum.valid()) {
      mode = AccessMode::kWrite;
      sum = NewGrad(i, SumOfGradElementsWith(i), MasterOfOp(i));
    }
    Accumulate(i, fresh_grad_, sum, mode);
  }
  // Adds `from` to `sum`, or writes it there, and frees it.
  void Accumulate(std::uint32_t i, BufferId from, BufferId sum, AccessMode mode) {
    const Bytes read = e_.program.buffers[from.value].size;
    const Bytes size = e_.program.buffers[sum.value].size;
    e_.AddCopy(OpCode::kAccumulateGrad, Stream::kCompute, {Phase::kBackward, i},
               mode == AccessMode::kWrite ? read : read + size, size,
               {{sum, mode, Role::kOutput}, {from, AccessMode::kRead, Role::kInput}});
    e_.body->Free(from);
  }
  void FreeCast(std::uint32_t i) {
    if (cast_of_op_[i].valid()) {
      e_.body->Free(cast_of_op_[i]);
      cast_of_op_[i] = BufferId();
    }
  }
  void MakeBuckets(bool initial) {
    is_initial_ = initial;
    AssignBuckets();
    for (Bucket& b : buckets_) {
      Buffer buffer;
      buffer.size = b.plan.size;
      buffer.category = Category::kReduceScatter;
      buffer.zero_filled = has_unused_;  // for parameters without a gradient
      b.storage = e_.Hold(e_.body->NewBuffer(buffer), Holds::kMixed, kNoSubject, b.plan.dtype);
      // Gradients are not views of the buckets by default, so buckets live as long as the
      // reducer; the first step's are given up when the buckets are rebuilt.
      e_.body->Alloc(b.storage, first_step_ ? PointKind::kAlloc : PointKind::kAllocOnce);
    }
  }
  void FreeBuckets() {
    for (const Bucket& b : buckets_) {
      e_.body->Free(b.storage);
    }
  }
  // At first all gradients are in one bucket (distributed.py, compute_bucket_size_limits).
  void AssignBuckets() {
    const BucketOrder order = IsDynamic() ? BucketOrder::kRegistered : BucketOrder::kReady;
    buckets_.clear();
    parts_of_storage_.assign(e_.in.model.params.size(), {});
    for (BucketPlan& plan :
         PlanBuckets(e_.in, e_.a, order, is_initial_ ? kNoCap : plan_.first_bucket,
                     is_initial_ ? kNoCap : plan_.bucket)) {
      for (const BucketPart& part : plan.parts) {
        parts_of_storage_[part.storage.value].emplace_back(buckets_.size(), part);
      }
      buckets_.emplace_back().plan = std::move(plan);
    }
  }

  // Copies the gradients into their buckets and launches every bucket that is complete, strictly in
  // order. (torch divides by the ranks on the way into the bucket, here the sum is divided.)
  void FillBucket(std::uint32_t i) {
    const BufferId grad = grad_of_param_[GroupOf(i).value];
    for (const auto& [bucket, part] : parts_of_storage_[GroupOf(i).value]) {
      Bucket& b = buckets_[bucket];
      const Bytes size = part.end - part.begin;
      b.filled = e_.AddCopy(OpCode::kBucketCopy, Stream::kCompute,
                            {Phase::kBackward, UnitOf(i).value}, size, size, {});
      e_.body->UseFirst(grad, part.end, AccessMode::kRead, Role::kInput);
      e_.body->Use(b.storage, AccessMode::kWrite, Role::kOutput);
      --b.missing;
      LaunchComplete(i);
    }
  }
  void LaunchComplete(std::uint32_t i) {
    while (next_bucket_ < buckets_.size() && buckets_[next_bucket_].missing == 0) {
      Bucket& ready = buckets_[next_bucket_++];
      ready.reduced =
          e_.AddCollective(Collective(OpCode::kAllReduce, Stream::kReduce, group_, ready.plan.size,
                                      ready.plan.dtype, static_cast<double>(plan_.replicate_size)),
                           {Phase::kBackward, UnitOf(i).value},
                           {{ready.storage, AccessMode::kReadWrite, Role::kInput}});
      if (ready.filled.valid()) {
        e_.After(ready.filled);
      }
      if (next_bucket_ == buckets_.size() && IsDynamic()) {
        SumMap(UnitOf(i).value);
      }
    }
  }

  BufferId HoldMap(BufferId buffer) {
    return e_.Hold(buffer, Holds::kUses, kNoSubject, DType::kInt32);
  }

  // Which parameters have a gradient on some rank: those without one on all keep theirs as it was.
  void SumMap(std::uint32_t subject) {
    const Bytes size = e_.program.buffers[map_.value].size;
    const Emitter::Where where{Phase::kBackward, subject};
    const OpId copied =
        e_.AddTransfer(OpCode::kCopyH2d, Stream::kCompute, where, size, host_map_, map_);
    map_summed_ = e_.AddCollective(
        Collective(OpCode::kAllReduce, Stream::kReduce, group_, size, DType::kInt32), where,
        {{map_, AccessMode::kReadWrite, Role::kInput}});
    e_.After(copied);
  }

  // The host reads it when it meets a parameter without a gradient on this rank.
  void ReadMap() {
    if (!map_summed_.valid()) {
      return;
    }
    e_.AddWait(Stream::kCompute, {map_summed_}, Phase::kBackward, kNoSubject);
    map_summed_ = OpId();
    if (has_unused_) {
      const OpId read =
          e_.AddTransfer(OpCode::kCopyD2h, Stream::kCompute, {Phase::kBackward, kNoSubject},
                         e_.program.buffers[map_.value].size, map_, host_map_);
      e_.AddHostWait(std::array{read}, Phase::kBackward, kNoSubject);
    }
  }

  void CopyOut(Bucket& b) {
    e_.AddWait(Stream::kCompute, {b.reduced}, Phase::kBackward, kNoSubject);
    if (b.plan.parts.empty()) {
      return;
    }
    e_.AddCopy(OpCode::kBucketCopy, Stream::kCompute, {Phase::kBackward, kNoSubject}, b.plan.size,
               b.plan.size, {{b.storage, AccessMode::kRead, Role::kInput}});
    std::vector<ParamId> written;
    for (const BucketPart& part : b.plan.parts) {
      const ParamId p = part.storage;
      const bool is_again = is_shared_[p.value] && IsIn(written, p);
      if (!is_again) {
        e_.body->Use(grad_of_param_[p.value], AccessMode::kWrite, Role::kOutput,
                     static_cast<std::uint16_t>(written.size()));
        written.push_back(p);
      }
    }
  }

  // Looks for parameters without a gradient in every pass (dynamic_graph_find_unused of
  // reducer.cpp), and never rebuilds its buckets.
  [[nodiscard]] bool IsDynamic() const {
    return plan_.find_unused_parameters && !plan_.static_graph;
  }
  // A static graph's first pass reduces when backward has ended (delay_all_reduce of reducer.cpp).
  [[nodiscard]] bool WaitsForAll() const {
    return plan_.static_graph && first_step_ && passes_ == 1;
  }

  GroupId group_;
  bool is_initial_ = false;             // the buckets are those of the first backward pass
  int passes_ = 0;                      // of this step, with the one at hand
  std::vector<std::uint32_t> waiting_;  // ops whose gradients wait for the end of backward
  bool has_unused_ = false;             // there are parameters without a gradient
  BufferId map_, host_map_;             // of parameters: which have a gradient
  OpId map_summed_;
  std::vector<Bucket> buckets_;
  std::vector<std::vector<std::pair<std::size_t, BucketPart>>>
      parts_of_storage_;  // with the bucket
  std::size_t next_bucket_ = 0;
  std::vector<BufferId> cast_of_op_;
  std::vector<BufferId> grad_of_param_;  // .grad by storage, in the master dtype
  std::vector<BufferId>
      part_of_param_;  // of later micro-batches, until all ops that share it are done
  BufferId fresh_grad_;
};

}  // namespace

std::unique_ptr<StepRules> MakeDdp(Emitter& emitter, const UnitSpans& spans,
                                   const std::vector<ResolvedUnit>& units) {
  return std::make_unique<DdpRules>(emitter, spans, units);
}

}  // namespace shardwright
