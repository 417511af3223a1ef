// Parts that ZeRO-1, ZeRO-2 and ZeRO-3 have in common: members of buckets, averages, the update.
//
// Example of a member: backward of a linear layer with weight (512 x 512) and bias (512) over 4
// ranks makes one gradient of 262,656 elements. It is one member of the bucket while all of it
// fits. If only 200,000 elements are free, ByParameter cuts it, as DeepSpeed's hooks act per
// parameter. Under stage 2 the bias still fits, then the bucket is reduced, then the weight opens
// the next one.
//
// Example of an average: a bucket of 6,269,440 bf16 elements over 4 ranks, r = fp32. Divide by 2 in
// place, cast to 25,077,760 bytes, all-reduce with a division by 2, cast back: 4 ops.

#include "schedule/lower/zero_rules.h"

#include <algorithm>
#include <array>
#include <set>

#include "core/error.h"
#include "core/ranges.h"
#include "schedule/lower/ddp_buckets.h"
#include "schedule/lower/layout.h"
#include "schedule/lower/optimizer.h"

namespace shardwright {
namespace {

constexpr Bytes kScalar{4};

}  // namespace

// only_user_: a weight that the embedding and the head share has several users, so kNoRegion.
ZeroRules::ZeroRules(Emitter& emitter, const UnitSpans& spans,
                     const std::vector<ResolvedUnit>& units)
    : StepRules(emitter, spans, units),
      low_grads_(units.size()),
      factors_(FactorsFor(ranks())),
      only_user_(emitter.in.model.params.size(), kNoRegion) {
  const Model& model = e_.in.model;
  std::vector<bool> seen(model.params.size(), false);
  for (std::uint32_t i = 0; i < model.ops.size(); ++i) {
    for (const ParamId p : model.ops[i].params) {
      const ParamId tied_to = model.params[p.value].tied_to;
      const std::size_t storage = (tied_to.valid() ? tied_to : p).value;
      only_user_[storage] = !seen[storage] || only_user_[storage] == i ? i : kNoRegion;
      seen[storage] = true;
    }
  }
  overlaps_ = plan_.zero.overlap_comm == Overlap::kDefault
                  ? plan_.dialect == Dialect::kZero3
                  : plan_.zero.overlap_comm == Overlap::kOn;
  shard_group_ = e_.AddGroup({Axis::kShard});
  if (plan_.replicate_size > 1) {
    replicate_group_ = e_.AddGroup({Axis::kReplicate});
  }
}

// States are allocated here, when DeepSpeed is set up, and not in the first step as torch.optim
// does.
void ZeroRules::InitUnit(UnitId u) {
  const bool here = IsTrainable(u) && !UpdatesOnHost() && !HasPackedStates();
  for (int i = 0; i < StateCount(job_.optimizer.kind) && here; ++i) {
    At(u).states.push_back(
        e_.Alloc(MasterShard(u), Category::kOptimizerState, Stream::kCompute, true));
  }
  StepRules::InitUnit(u);
}

// DeepSpeed's first update at start-up, with gradients of zeros: its gradients and temporaries come
// and go here, before the first step, and leave their marks on the allocator.
void ZeroRules::EndInit() {
  std::int64_t elements = 0;
  for (const std::vector<UnitId>& group : UpdatedTogether()) {
    elements = std::max(elements, FlatElements(group));
    AllocFlatStates(group);
  }
  if (job_.mode == JobMode::kForward || UpdatesOnHost() || elements == 0) {
    return;
  }
  const DType o = job_.precision.master;
  const Bytes bytes(elements * SizeOf(o));
  const OptimizerStep step = FlatUpdate(elements);
  const BufferId grads = e_.Alloc(bytes, Category::kShardedGradient, Stream::kCompute);
  const BufferId temporaries = AllocFlatTemporaries(step, elements);
  e_.AddCopy(OpCode::kInitialize, Stream::kCompute, {Phase::kInit, kNoSubject}, Bytes(0), bytes,
             {{grads, AccessMode::kWrite, Role::kWorkspace, 0},
              {temporaries, AccessMode::kWrite, Role::kWorkspace, 1}});
  e_.body->Free(grads);
  if (temporaries.valid()) {
    e_.body->Free(temporaries);
  }
}

// Packed states of a flat tensor, with its first unit.
void ZeroRules::AllocFlatStates(std::span<const UnitId> units) {
  if (units.empty() || !HasPackedStates() || job_.mode == JobMode::kForward) {
    return;
  }
  const StateSize size = FlatState(FlatElements(units));
  std::vector<Bytes> pieces = {size.codes, size.scales};
  std::erase(pieces, Bytes(0));
  for (int i = 0; i < StateCount(job_.optimizer.kind); ++i) {
    At(units.front())
        .states.push_back(e_.body->NewAllocated({.size = size.codes + size.scales,
                                                 .category = Category::kOptimizerState,
                                                 .owner = Stream::kCompute,
                                                 .on_host = IsPaged(job_.optimizer.states),
                                                 .zero_filled = true,
                                                 .pieces = e_.InternPieces(pieces)}));
  }
}

// The library sees one tensor, which is no module's, so that it packs small weights and embeddings,
// too. Example: bitsandbytes keeps a partition of 5,120 elements in 5,120 bytes and 20 scales.
StateSize ZeroRules::FlatState(std::int64_t elements) const {
  return SizeOfState(job_.optimizer.states, elements, /*is_embedding=*/false,
                     job_.precision.master);
}

OptimizerStep ZeroRules::FlatUpdate(std::int64_t elements) const {
  if (!HasPackedStates()) {
    return LowerOptimizer(job_.optimizer, elements, 1, elements, job_.precision.master);
  }
  const StateSize size = FlatState(elements);
  return LowerPackedUpdate(elements, 1,
                           StateCount(job_.optimizer.kind) * (size.codes + size.scales),
                           job_.precision.master);
}

std::vector<UnitId> ZeroRules::TrainableUnits() const {
  std::vector<UnitId> units;
  for (std::uint32_t u = 0; u < unit_count(); ++u) {
    if (IsTrainable(UnitId(u))) {
      units.push_back(UnitId(u));
    }
  }
  return units;
}

std::int64_t ZeroRules::FlatElements(std::span<const UnitId> units) const {
  return Summed<std::int64_t>(units, [&](const UnitId u) { return Info(u).shard_elements; });
}

// A gradient is ready when the last of the ops that share the weight has added to it.
void ZeroRules::WeightGradWritten(std::uint32_t model_op, UnitId unit) {
  StepRules::WeightGradWritten(model_op, unit);
  if (completes_grad_[model_op]) {
    GradReady(model_op, unit);
  } else if (ReducesAtOnce()) {
    TakeOwn(model_op, unit);
  }
}

// The op's parameters that no other op has, while others add to a weight that it shares.
void ZeroRules::TakeOwn(std::uint32_t model_op, UnitId unit) {
  const BufferId* const grad = WrittenGrad(model_op, unit);
  const Model& model = e_.in.model;
  const auto is_own = [&](ParamId p) {
    const ParamId tied_to = model.params[p.value].tied_to;
    return only_user_[(tied_to.valid() ? tied_to : p).value] == model_op;
  };
  const std::vector<ParamId>& params = model.ops[model_op].params;
  if (grad == nullptr || NoneOf(params, is_own)) {
    return;
  }
  for (Part& part : ByParameter(MemberOf(model_op, unit, *grad))) {
    const ParamId storage = part.member.storages.front();
    if (only_user_[storage.value] == model_op) {
      taken_.resize(model.params.size());
      taken_[storage.value] = true;
      // Out of the buffer that compute still adds to; in torch it is another one.
      const BufferId own =
          NewMixed(InParam(part.member.elements), Stream::kCompute, job_.precision.param);
      CopyPart(part, *grad, own, Stream::kCompute);
      part.end = part.member.elements;
      AddPart(part, own);
      e_.body->Free(own, Overlaps() ? StreamBit(Stream::kReduce) : std::uint16_t{0});
    }
  }
}

bool ZeroRules::IsTaken(const Member& member) const {
  return AnyOf(member.storages, [&](ParamId storage) {
    return storage.value < taken_.size() && taken_[storage.value];
  });
}

void ZeroRules::AddParts(std::vector<Part> parts, BufferId grad) {
  for (Part& part : parts) {
    if (IsTaken(part.member)) {
      taken_[part.member.storages.front().value] = false;
    } else {
      AddPart(std::move(part), grad);
    }
  }
}

ZeroRules::Member ZeroRules::TakeGrad(std::uint32_t model_op, UnitId unit) {
  UnitState& state = At(unit);
  const ParamId group = GroupOf(model_op);
  // From the back: it was most likely written just now.
  const auto entry = std::find_if(state.grad_of_param.rbegin(), state.grad_of_param.rend(),
                                  [&](const auto& e) { return e.first == group; });
  SW_CHECK(entry != state.grad_of_param.rend(), "a gradient is ready that nobody wrote");
  const Member member = MemberOf(model_op, unit, entry->second);
  state.grad_of_param.erase(std::next(entry).base());
  const auto grad = std::find(state.grads.rbegin(), state.grads.rend(), member.grad);
  state.grads.erase(std::next(grad).base());
  return member;
}

// Behind those of the op that runs backward first lies what the others have beside what they share
// (Holds::kTensors).
std::vector<ParamId> ZeroRules::AsLaidOut(std::uint32_t model_op) const {
  const Model& model = e_.in.model;
  if (!is_shared_[GroupOf(model_op).value]) {
    return GradStoragesWith(model_op);
  }
  std::vector<ParamId> storages;
  const std::vector<std::uint32_t>& ops = ops_of_group_[GroupOf(model_op).value];
  for (auto i = ops.rbegin(); i != ops.rend(); ++i) {
    for (const ParamId p : model.ops[*i].params) {
      const ParamId tied_to = model.params[p.value].tied_to;
      const ParamId storage = tied_to.valid() ? tied_to : p;
      if (e_.a.param_grad[p.value] && !IsIn(storages, storage)) {
        storages.push_back(storage);
      }
    }
  }
  return storages;
}

// Example of padding: a bias of 513 elements over 4 ranks counts as 516, 129 for each rank.
ZeroRules::Member ZeroRules::MemberOf(std::uint32_t model_op, UnitId unit, BufferId grad) const {
  Member member{model_op, unit, grad, 0, 0, {}, {}};
  for (const ParamId storage : AsLaidOut(model_op)) {
    const std::int64_t n = e_.in.model.params[storage.value].Elements();
    const std::int64_t padded = RoundUp(n, plan_.shard_size);
    member.elements += n;
    member.padded_elements += padded;
    member.storages.push_back(storage);
    const UnitId owner = spans_.unit_of_param[storage.value];
    const auto share = FindIf(member.shares, [&](const auto& s) { return s.first == owner; });
    if (share == member.shares.end()) {
      member.shares.emplace_back(owner, padded);
    } else {
      share->second += padded;
    }
  }
  return member;
}

// Example: a weight of 262,144 and a bias of 512 elements are two parts, ordered as their hooks
// fire.
std::vector<ZeroRules::Part> ZeroRules::ByParameter(const Member& member) const {
  const Model& model = e_.in.model;
  std::vector<Part> parts;
  std::int64_t end = 0;
  for (const ParamId storage : member.storages) {
    const std::int64_t n = model.params[storage.value].Elements();
    const std::int64_t padded = RoundUp(n, plan_.shard_size);
    const UnitId owner = spans_.unit_of_param[storage.value];
    end += n;
    parts.push_back(
        {{member.model_op, owner, BufferId(), n, padded, {{owner, padded}}, {storage}}, end});
  }
  // Stage 3 has a linear layer of its own, whose two gradients are ready together
  // (LinearFunctionForZeroStage3): the weight's goes first.
  const bool together = plan_.dialect == Dialect::kZero3;
  std::vector<ParamId> ready;
  for (const ParamId p : AsReady(model, model.ops[member.model_op], together)) {
    const ParamId tied_to = model.params[p.value].tied_to;
    ready.push_back(tied_to.valid() ? tied_to : p);
  }
  const auto place = [&](const Part& part) {
    const auto it = FindIn(ready, part.member.storages.front());
    return it == ready.end() ? std::ptrdiff_t{-1} : it - ready.begin();
  };
  StableSort(parts, [&](const Part& x, const Part& y) { return place(x) < place(y); });
  return parts;
}

void ZeroRules::CopyPart(const Part& part, BufferId grad, BufferId to, Stream stream) {
  const Bytes bytes = InParam(part.member.elements);
  e_.AddCopy(OpCode::kBucketCopy, stream, {Phase::kBackward, part.member.unit.value}, bytes, bytes,
             {});
  e_.body->UseFirst(grad, InParam(part.end), AccessMode::kRead, Role::kInput);
  e_.body->Use(to, AccessMode::kWrite, Role::kOutput);
}

bool ZeroRules::IsTrainable(UnitId u) const {
  return TrainablePaddedElements(e_.in.model, Info(u)) > 0;
}

void ZeroRules::AddWorldGroup() {
  world_group_ =
      plan_.replicate_size == 1 ? shard_group_ : e_.AddGroup({Axis::kReplicate, Axis::kShard});
}

// Example: members of 100 and 50 bf16 elements are copied into one buffer of 300 bytes by one op.
BufferId ZeroRules::FlattenMembers(std::span<const Member> members, Stream stream) {
  const Bytes bytes = InParam(SumOf(members));
  const BufferId flat = NewMixed(bytes, stream, job_.precision.param);
  e_.AddCopy(OpCode::kBucketCopy, stream, {Phase::kBackward, members.front().unit.value}, bytes,
             bytes, {{flat, AccessMode::kWrite, Role::kOutput}});
  std::uint16_t index = 0;
  for (const Member& m : members) {
    e_.body->Use(m.grad, AccessMode::kRead, Role::kInput, index++);
  }
  return flat;
}

void ZeroRules::AverageInPlace(BufferId source, std::int64_t elements, Stream stream,
                               Emitter::Where where, std::span<const std::int64_t> pieces) {
  const Bytes low = InParam(elements), wide = InReduce(elements);
  if (ranks() == 1) {
    return;
  }
  const auto step = [&](OpCode code, Bytes read, Bytes written, BufferId from, BufferId to,
                        double divisor = 1.0) {
    e_.AddCopy(code, stream, where, read, written, {}, divisor);
    if (from == to) {
      e_.body->UseFirst(from, read, AccessMode::kReadWrite, Role::kInput);
    } else {
      e_.body->UseFirst(from, read, AccessMode::kRead, Role::kInput);
      e_.body->UseFirst(to, written, AccessMode::kWrite, Role::kOutput);
    }
  };
  step(OpCode::kGradScale, low, low, source, source, factors_.pre);
  BufferId summed = source;
  const bool casts = job_.precision.reduce != job_.precision.param;
  if (casts) {
    summed = NewMixed(wide, stream, job_.precision.reduce);
    step(OpCode::kCast, low, wide, source, summed);
  }
  std::int64_t end = 0;
  for (const std::int64_t piece : pieces) {
    end += piece;
    e_.AddCollective(Collective(OpCode::kAllReduce, stream, world_group_, InReduce(piece),
                                job_.precision.reduce, factors_.post),
                     where, {});
    e_.body->UseFirst(summed, InReduce(end), AccessMode::kReadWrite, Role::kInput);
  }
  if (casts) {
    step(OpCode::kCast, wide, low, summed, source);
    e_.body->Free(summed);
  }
}

BufferId ZeroRules::NewMixed(Bytes bytes, Stream owner, DType dtype, bool zero_filled) {
  return e_.Hold(e_.Alloc(bytes, Category::kReduceScatter, owner, zero_filled), Holds::kMixed,
                 kNoSubject, dtype);
}

std::int64_t ZeroRules::SumOf(std::span<const Member> members) {
  std::int64_t elements = 0;
  for (const Member& m : members) {
    elements += m.elements;
  }
  return elements;
}

std::vector<UnitId> ZeroRules::UnitsOf(std::span<const Member> members) {
  std::vector<UnitId> units;
  std::set<UnitId> seen;
  for (const Member& m : members) {
    for (const auto& [unit, padded] : m.shares) {
      if (seen.insert(unit).second) {
        units.push_back(unit);
      }
    }
  }
  return units;
}

BufferId ZeroRules::AddNorm(std::span<const UnitId> units) {
  Bytes bytes{0};
  for (const UnitId u : units) {
    bytes += e_.program.buffers[low_grads_[u.value].value].size;
  }
  const BufferId norm = e_.Alloc(kScalar, Category::kTemporary, Stream::kCompute);
  OpShape shape;
  shape.code = OpCode::kGradNorm;
  shape.divisor = MicroBatches();  // of the norm alone: the clip divides the gradients
  shape.dtype = job_.precision.param;
  shape.bytes = bytes;
  e_.Add(shape,
         MultiTensorKernels(bytes.value / SizeOf(shape.dtype),
                            static_cast<std::int64_t>(units.size()), bytes, kScalar, shape.dtype),
         Phase::kOptimizer, kNoSubject, {{norm, AccessMode::kWrite, Role::kOutput}});
  std::uint16_t index = 0;
  for (const UnitId u : units) {
    e_.body->Use(low_grads_[u.value], AccessMode::kRead, Role::kParamGrad, index++);
  }
  SumNorm(norm, Stream::kCompute, shard_group_);
  return norm;
}

// The gradients lie on the host; the norm of each was taken when it was sent there.
BufferId ZeroRules::AddNormOfSent() {
  const BufferId norm = e_.Alloc(kScalar, Category::kTemporary, Stream::kCompute);
  OpShape shape;
  shape.code = OpCode::kGradNorm;
  shape.dtype = DType::kFp32;
  shape.bytes = kScalar;
  e_.Add(shape, MultiTensorKernels(1, 1, kScalar, kScalar, shape.dtype), Phase::kOptimizer,
         kNoSubject, {{norm, AccessMode::kWrite, Role::kOutput}});
  SumNorm(norm, Stream::kCompute, shard_group_);
  return norm;
}

// Example: two units of 100 and 50 elements, bf16 to fp32: 300 bytes are flattened, then cast to
// 600. Where both dtypes agree nothing is flattened apart.
void ZeroRules::CastGrads(std::span<const UnitId> units) {
  Bytes low{0}, full{0};
  for (const UnitId u : units) {
    low += e_.program.buffers[low_grads_[u.value].value].size;
    full += MasterShard(u);
    At(u).sharded_grad = NewShardedGrad(u, Stream::kCompute);
  }
  BufferId flat;
  if (low != full) {
    flat = e_.Alloc(low, Category::kTemporary, Stream::kCompute);
  }
  e_.AddCopy(OpCode::kGradStore, Stream::kCompute, {Phase::kOptimizer, units.front().value},
             flat.valid() ? 2 * low : low, flat.valid() ? low + full : full,
             {{flat, AccessMode::kWrite, Role::kWorkspace}});
  std::uint16_t index = 0;
  for (const UnitId u : units) {
    e_.body->Use(low_grads_[u.value], AccessMode::kRead, Role::kInput, index);
    e_.body->Use(At(u).sharded_grad, AccessMode::kWrite, Role::kOutput, index++);
  }
  if (flat.valid()) {
    e_.body->Free(flat);
  }
}

void ZeroRules::ClipGrads(std::span<const UnitId> units, std::span<const BufferId> norms) {
  if (norms.empty()) {
    return;
  }
  Bytes bytes{0};
  for (const UnitId u : units) {
    bytes += MasterShard(u);
  }
  OpShape shape;
  shape.code = OpCode::kGradClip;
  shape.divisor = MicroBatches();
  shape.dtype = job_.precision.master;
  shape.bytes = bytes;
  e_.Add(shape, MultiTensorKernels(bytes.value / SizeOf(shape.dtype), 1, bytes, bytes, shape.dtype),
         Phase::kOptimizer, units.front().value, {});
  std::uint16_t index = 0;
  for (const BufferId norm : norms) {
    const bool is_sum = index == 0 && norms.size() > 1;
    e_.body->Use(norm, is_sum ? AccessMode::kReadWrite : AccessMode::kRead, Role::kInput, index++);
  }
  index = 0;
  for (const UnitId u : units) {
    UseGrads(u, AccessMode::kReadWrite, index++);
  }
}

// Example: temporaries of three times the parameters are three pieces, each of the partition's
// size.
BufferId ZeroRules::AllocFlatTemporaries(const OptimizerStep& step, std::int64_t elements) {
  if (step.temporaries == Bytes(0)) {
    return {};
  }
  const Bytes one(elements * SizeOf(job_.precision.master));
  const auto count = static_cast<std::size_t>(step.temporaries.value / one.value);
  return e_.AllocPieces(step.temporaries, e_.InternPieces(std::vector<Bytes>(count, one)),
                        Category::kTemporary, Stream::kCompute);
}

// One tensor of all partitions: an update of 1,567,360 elements takes few kernels, however many
// parameters there are.
void ZeroRules::AddFlatOptimizer(std::span<const UnitId> units) {
  const std::int64_t elements = FlatElements(units);
  const DType o = job_.precision.master;
  const OptimizerStep step = FlatUpdate(elements);
  const BufferId temporary = AllocFlatTemporaries(step, elements);
  OpShape shape;
  shape.code = OpCode::kOptimizerStep;
  shape.divisor = TakesGradNorm(job_) ? 1.0 : MicroBatches();
  shape.dtype = o;
  shape.bytes = Bytes(elements * SizeOf(o));
  e_.Add(shape, step.kernels, Phase::kOptimizer, units.front().value, {});
  UseForUpdate(units, temporary);
}

}  // namespace shardwright
