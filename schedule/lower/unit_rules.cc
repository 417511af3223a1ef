// The sizes, buffers and gradients of units that all dialects share; see unit_rules.h.
//
// Example: a unit of 2,622,464 elements over W = 4 ranks, with o = fp32, p = bf16, r = fp32.
//
//   MasterShard   N/W o        2,622,464 bytes   resident; what the optimizer updates
//   GatherShard   N/W p        1,311,232 bytes   what this rank sends in an all-gather
//   Unsharded     N p          5,244,928 bytes   what compute reads
//   ReduceFull    N r         10,489,856 bytes   input of the reduce-scatter
//   ReduceShard   N/W r        2,622,464 bytes   its output
//   GradShard     N/W o        2,622,464 bytes   what the optimizer reads
//   StateShard    N/W o        2,622,464 bytes   one state; AdamW has two
//
// By default the last four rows count trainable parameters only. A dialect with one flat gradient
// per unit overrides GradElements and counts all of them. Collectives send the layout's padding, so
// the sizes include it.

#include "schedule/lower/unit_rules.h"

#include <numeric>

#include "core/error.h"
#include "core/ranges.h"

namespace shardwright {

StepRules::StepRules(Emitter& emitter, const UnitSpans& spans,
                     const std::vector<ResolvedUnit>& units)
    : e_(emitter),
      spans_(spans),
      plan_(emitter.in.plan),
      job_(emitter.in.job),
      fp8_elements_(units.size(), 0),
      completes_grad_(emitter.in.model.ops.size(), false),
      is_shared_(emitter.in.model.params.size(), false),
      ops_of_group_(emitter.in.model.params.size()),
      units_(units.size()) {
  // Walking forward, the first op that uses a storage is the last one in backward.
  std::vector<bool> seen(e_.in.model.params.size(), false);
  for (std::uint32_t i = 0; i < e_.in.model.ops.size(); ++i) {
    if (e_.a.ops[i].weight_grad) {
      const std::size_t storage = GroupOf(i).value;
      completes_grad_[i] = !seen[storage];
      is_shared_[storage] = seen[storage];
      seen[storage] = true;
      ops_of_group_[storage].push_back(i);
    }
  }
}

// Example: 8 ranks, shard size 8, experts shared out over 4 of them. A unit of experts is cut over
// the 2 ranks with the same experts, every other unit over 8.
std::int64_t StepRules::ShardsOf(const ResolvedUnit& unit) const {
  const bool is_shared =
      !unit.params.empty() && e_.in.model.params[unit.params.front().value].parts > 1;
  return is_shared ? e_.mesh.SameExperts().size : plan_.shard_size;
}

// First all layouts, then the buffers unit by unit, then the model's own buffers (tables of
// positions, scales of quantized weights), which every rank has whole.
void StepRules::Init(const std::vector<ResolvedUnit>& units) {
  is_embedding_.assign(e_.in.model.params.size(), false);
  for (const ModelOp& op : e_.in.model.ops) {
    if (e_.in.model.SpecOf(op).kind == OpKind::kEmbedding && !op.params.empty()) {
      is_embedding_[op.params[0].value] = true;
    }
  }
  for (const ResolvedUnit& unit : units) {
    e_.program.units.push_back(Layout(unit));
    e_.program.units.back().full_precision = unit.full_precision;
    e_.program.units.back().shards = ShardsOf(unit);
    train_elements_.push_back(GradElements(e_.program.units.back()));
  }
  std::int64_t buffer_elements = 0;
  for (const Module& m : e_.in.model.modules) {
    buffer_elements += m.buffer_elements;
  }
  for (std::uint32_t u = 0; u < units_.size(); ++u) {
    InitUnit(UnitId(u));
  }
  const Bytes size = Bytes(buffer_elements * SizeOf(DType::kFp32)) + ScaleBytes();
  if (size > Bytes(0)) {
    const BufferId buffers = e_.Alloc(size, Category::kModelBuffer, Stream::kCompute);
    e_.AddCopy(OpCode::kInitialize, Stream::kCompute, {Phase::kInit, kNoSubject}, Bytes(0), size,
               {{buffers, AccessMode::kWrite, Role::kOutput}});
  }
  EndInit();
}

// Allocates and initialises the masters. Where a dialect keeps tensors apart (ShardTensors) the
// buffer has a piece for each: PyTorch allocates them one by one, and the allocator's model needs
// the sizes.
void StepRules::InitUnit(UnitId u) {
  const Bytes size = MasterShard(u);
  if (size == Bytes(0)) {
    return;
  }
  const DType o = job_.precision.master;
  At(u).state_pieces = e_.InternPieces(StatePieces(u));
  const std::vector<Bytes> tensors =
      ShardTensors(u).empty() ? std::vector<Bytes>() : StoredBytes(u, o, true);
  At(u).shard = MastersOnHost() ? e_.AllocOnHost(size, Category::kParameterShard,
                                                 HostBlocks(u, Category::kParameterShard))
                                : e_.AllocPieces(size, e_.InternPieces(tensors),
                                                 Category::kParameterShard, Stream::kCompute);
  Hold(At(u).shard, u, Holds::kShard, o);
  e_.AddCopy(OpCode::kInitialize, Stream::kCompute, {Phase::kInit, u.value}, Bytes(0), size,
             {{At(u).shard, AccessMode::kWrite, Role::kOutput}});
}

std::vector<Bytes> StepRules::HostBlocks(UnitId u, Category category) const {
  const Bytes size = category == Category::kParameterShard ? MasterShard(u) : GradShard(u);
  std::vector<Bytes> blocks;
  if (ShardTensors(u).empty()) {  // a flat parameter is one
    blocks.push_back(e_.Pinned(size));
  } else if (size < MasterShard(u)) {  // of the trainable parameters
    for (const std::int64_t n : StateTensors(u)) {
      blocks.push_back(e_.Pinned(Bytes(n * SizeOf(job_.precision.master))));
    }
  } else {
    for (const Bytes bytes : StoredBytes(u, job_.precision.master, true)) {
      blocks.push_back(e_.Pinned(bytes));
    }
  }
  return blocks;
}

// Example: with nf4 a frozen weight of 1,024 x 1,024 takes 524,288 bytes, a trainable one in bf16
// 2,097,152. A frozen parameter that is not quantized then has the compute dtype.
std::vector<Bytes> StepRules::StoredBytes(UnitId u, DType learned, bool per_rank) const {
  std::vector<Bytes> sizes;
  for (const ParamSlot& slot : Info(u).params) {
    const std::int64_t n = slot.padded_elements / (per_rank ? Info(u).shards : 1);
    const bool as_learned = e_.in.model.params[slot.param.value].trainable ||
                            job_.frozen_format == FrozenFormat::kMaster;
    const DType master = e_.a.masters[slot.param.value];
    const DType dtype = master == job_.precision.master ? learned : master;
    sizes.push_back(as_learned ? Bytes(n * SizeOf(dtype))
                    : e_.a.quantized[slot.param.value]
                        ? SizeOfQuantized(job_.frozen_format, n, n).packed
                        : Bytes(n * SizeOf(PrecisionOf(u).param)));
  }
  return sizes;
}

Bytes StepRules::StoredSum(UnitId u, std::int64_t elements, DType learned, bool per_rank) const {
  if (job_.frozen_format == FrozenFormat::kMaster && job_.fp32_masters.empty()) {
    return Bytes(elements * SizeOf(learned));
  }
  if (plan_.dialect == Dialect::kFsdp1) {
    return IsStoredFlat(u) ? StoredFlat(u, per_rank) : Bytes(elements * SizeOf(learned));
  }
  const std::vector<Bytes> sizes = StoredBytes(u, learned, per_rank);
  return std::accumulate(sizes.begin(), sizes.end(), Bytes(0));
}

// As LayoutFlat, in elements of the dtype of compute, which packed weights are stored in.
Bytes StepRules::StoredFlat(UnitId u, bool per_rank) const {
  constexpr std::int64_t kAlignBytes = 16;
  Bytes size{0};
  for (const Bytes bytes : StoredBytes(u, job_.precision.master, false)) {
    size = plan_.use_orig_params ? Bytes(RoundUp(size.value, kAlignBytes)) : size;
    size += Bytes(RoundUp(bytes.value, SizeOf(PrecisionOf(u).param)));
  }
  const std::int64_t width = SizeOf(PrecisionOf(u).param);
  const std::int64_t ranks =
      plan_.shard_size == 1 && plan_.use_orig_params ? plan_.replicate_size : plan_.shard_size;
  const Bytes shard(CeilDiv(size.value / width, ranks) * width);
  return per_rank && plan_.shard_size > 1 ? shard : shard * ranks;
}

Bytes StepRules::ScaleBytes() const {
  Bytes sum{0};
  for (std::size_t p = 0; p < e_.a.quantized.size(); ++p) {
    const Parameter& param = e_.in.model.params[p];
    if (e_.a.quantized[p] && !param.tied_to.valid()) {
      sum += SizeOfQuantized(job_.frozen_format, param.Elements(), param.shape.back()).scales;
    }
  }
  return sum;
}

Bytes StepRules::CastShard(UnitId u, DType dtype) const {
  return job_.frozen_format == FrozenFormat::kMaster
             ? Bytes((Info(u).shard_elements - Fp8Shard(u)) * SizeOf(dtype))
             : Bytes(TrainablePaddedElements(e_.in.model, Info(u)) / Info(u).shards *
                     SizeOf(dtype));
}

std::vector<Bytes> StepRules::StatePieces(UnitId u) const {
  const DType o = job_.precision.master;
  const StateFormat format = job_.optimizer.states;
  std::vector<std::int64_t> tensors = StateTensors(u);
  std::vector<Bytes> sizes;
  if (IsFactored()) {
    for (const ParamSlot& slot : Info(u).params) {
      const Parameter& param = e_.in.model.params[slot.param.value];
      for (const std::int64_t n :
           param.trainable ? FactoredState(param.shape) : std::vector<std::int64_t>()) {
        sizes.push_back(Bytes(n * SizeOf(DType::kFp32)));
      }
    }
    return sizes;
  }
  if (tensors.empty() && format != StateFormat::kMaster) {
    tensors.push_back(StateElements(Info(u)));
  }
  std::vector<ParamId> learn;
  for (const ParamSlot& slot : Info(u).params) {
    if (e_.in.model.params[slot.param.value].trainable) {
      learn.push_back(slot.param);
    }
  }
  for (std::size_t i = 0; i < tensors.size(); ++i) {
    const bool is_known = learn.size() == tensors.size();
    const bool is_embedding = is_known && is_embedding_[learn[i].value];
    const StateSize size =
        SizeOfState(format, tensors[i], is_embedding, is_known ? e_.a.masters[learn[i].value] : o);
    sizes.push_back(size.codes);
    if (size.scales > Bytes(0)) {
      sizes.push_back(size.scales);
    }
  }
  return sizes;
}

std::vector<std::int64_t> StepRules::PerParameter(UnitId u, bool per_rank,
                                                  bool trainable_only) const {
  std::vector<std::int64_t> elements;
  for (const ParamSlot& slot : Info(u).params) {
    if (e_.in.model.params[slot.param.value].trainable || !trainable_only) {
      elements.push_back(slot.padded_elements / (per_rank ? Info(u).shards : 1));
    }
  }
  return elements;
}

PieceRange StepRules::Pieces(std::span<const std::int64_t> elements, DType dtype) {
  std::vector<Bytes> sizes =
      Mapped<Bytes>(elements, [&](const std::int64_t n) { return Bytes(n * SizeOf(dtype)); });
  return e_.InternPieces(sizes);
}

void StepRules::BeginMicroBatch(bool first, bool last) {
  first_micro_batch_ = first;
  last_micro_batch_ = last;
  in_forward_ = false;
  for (UnitState& s : units_) {
    s.backward_done = false;
    s.grad_of_param.clear();
  }
}

// A gather of new parameters may not overtake the update that writes them. The update is the last
// op of the step before on the compute stream, and the copy of the inputs stands behind it.
void StepRules::BeginGathers(Phase phase) {
  if (in_forward_ || phase != Phase::kForward) {
    return;
  }
  in_forward_ = true;
  const OpId compute = e_.body->last();  // the copy of the inputs, behind the last update
  e_.AddWait(Stream::kCopyIn, {compute}, phase, kNoSubject);
  e_.AddWait(Stream::kGather, {compute}, phase, kNoSubject);
}

// Queues the copy of a reduced gradient to the host, behind `ready`. The host buffer lives until
// the CPU optimizer has read it.
void StepRules::GradToHost(UnitId u, Stream stream, OpId ready) {
  UnitState& state = At(u);
  const DType o = job_.precision.master;
  state.host_grad = Hold(e_.AllocOnHost(GradShard(u), Category::kShardedGradient,
                                        HostBlocks(u, Category::kShardedGradient)),
                         u, Holds::kShard, o);
  to_host_.push_back(e_.AddTransfer(OpCode::kCopyD2h, stream, {Phase::kBackward, u.value},
                                    GradShard(u), state.sharded_grad, state.host_grad));
  e_.After(ready);
}

void StepRules::DropSentGrad(UnitId u, Stream stream) {
  UnitState& state = At(u);
  // Without sharding this is the gradient itself, which the reduce stream has divided before.
  unsigned users = StreamBit(stream);
  if (stream == Stream::kReplicate) {
    users |= StreamBit(Stream::kReduce);
  }
  users &= ~unsigned{StreamBit(e_.program.buffers[state.sharded_grad.value].owner)};
  e_.body->Free(state.sharded_grad, static_cast<std::uint16_t>(users));
  state.sharded_grad = BufferId();
}

void StepRules::WaitForHostGrads(Phase phase) {
  if (!to_host_.empty()) {
    to_host_.push_back(e_.LastCompute());
    e_.AddHostWait(to_host_, phase, kNoSubject);
    to_host_.clear();
  }
}

UnitId StepRules::UnitNamed(const std::string& name) const {
  for (std::uint32_t u = 0; u < units_.size(); ++u) {
    if (plan_.units[u].name == name) {
      return UnitId(u);
    }
  }
  SW_CHECK(false, "no unit is called " + name);
  return UnitId();
}

Bytes StepRules::Unsharded(UnitId u) const {
  return StoredSum(u, Info(u).padded_elements, PrecisionOf(u).param, false) -
         Bytes(fp8_elements_[u.value] * (SizeOf(PrecisionOf(u).param) - 1));
}
Bytes StepRules::GatherShard(UnitId u) const {
  return StoredSum(u, Info(u).shard_elements, PrecisionOf(u).param, true) -
         Bytes(Fp8Shard(u) * (SizeOf(PrecisionOf(u).param) - 1));
}
Bytes StepRules::MasterShard(UnitId u) const {
  return StoredSum(u, Info(u).shard_elements, job_.precision.master, true);
}
Bytes StepRules::ReduceFull(UnitId u) const {
  return Bytes(train_elements_[u.value] * SizeOf(PrecisionOf(u).reduce));
}
Bytes StepRules::ReduceShard(UnitId u) const {
  return Bytes(train_elements_[u.value] / Info(u).shards * SizeOf(PrecisionOf(u).reduce));
}
Bytes StepRules::GradShard(UnitId u) const {
  return Bytes(train_elements_[u.value] / Info(u).shards * SizeOf(job_.precision.master)) +
         WideBytes(u);
}

Bytes StepRules::WideBytes(UnitId u) const {
  Bytes sum{0};
  for (const ParamSlot& slot : Info(u).params) {
    if (e_.in.model.params[slot.param.value].trainable) {
      sum += Bytes(slot.padded_elements *
                   (SizeOf(e_.a.masters[slot.param.value]) - SizeOf(job_.precision.master)));
    }
  }
  return sum;
}

Bytes StepRules::StateShard(UnitId u) const {
  if (job_.optimizer.states == StateFormat::kMaster && !IsFactored()) {
    return Bytes(StateElements(Info(u)) * SizeOf(job_.precision.master)) + WideBytes(u);
  }
  const std::vector<Bytes> pieces = StatePieces(u);
  return std::accumulate(pieces.begin(), pieces.end(), Bytes(0));
}

// By default each op's backward writes into a buffer of its own, with one piece per parameter. Of
// ops that share a weight, the first in backward gets a buffer with room for what the others have
// besides.
StepRules::GradTarget StepRules::WeightGradTarget(std::uint32_t model_op, UnitId unit) {
  const std::vector<std::int64_t> elements = WrittenGrad(model_op, unit) == nullptr
                                                 ? GradElementsWith(model_op)
                                                 : GradElementsOf(model_op);
  const std::int64_t sum = std::accumulate(elements.begin(), elements.end(), std::int64_t{0});
  const DType p = PrecisionOf(unit).param;
  const BufferId grad = e_.AllocPieces(Bytes(sum * SizeOf(p)), Pieces(elements, p),
                                       Category::kUnshardedGradient, Stream::kCompute);
  At(unit).grads.push_back(e_.Hold(grad, Holds::kTensors, model_op, p));
  return {grad, AccessMode::kWrite};
}

// A parameter that several ops use (tied weights) gets its second gradient added to its first; what
// else the later op has goes into the room that the first one's buffer has for it.
void StepRules::WeightGradWritten(std::uint32_t model_op, UnitId unit) {
  UnitState& state = At(unit);
  const BufferId* const written = WrittenGrad(model_op, unit);
  if (written == nullptr) {
    state.grad_of_param.emplace_back(GroupOf(model_op), state.grads.back());
    return;
  }
  const BufferId extra = state.grads.back();
  state.grads.pop_back();
  const Bytes bytes = e_.program.buffers[extra.value].size;
  e_.AddCopy(OpCode::kAccumulateGrad, Stream::kCompute, {Phase::kBackward, model_op}, 2 * bytes,
             bytes,
             {{*written, AccessMode::kReadWrite, Role::kOutput},
              {extra, AccessMode::kRead, Role::kInput}});
  e_.body->Free(extra);
}

const BufferId* StepRules::WrittenGrad(std::uint32_t model_op, UnitId unit) {
  const ParamId storage = GroupOf(model_op);
  if (!is_shared_[storage.value]) {
    return nullptr;  // a unit may hold the whole model: not one look at it per op
  }
  const auto& known = At(unit).grad_of_param;
  const auto written = FindIf(known, [&](const auto& entry) { return entry.first == storage; });
  return written == known.end() ? nullptr : &written->second;
}

std::vector<std::int64_t> StepRules::GradElementsOf(std::uint32_t model_op) const {
  std::vector<std::int64_t> elements;
  for (const ParamId p : e_.in.model.ops[model_op].params) {
    if (e_.a.param_grad[p.value]) {
      elements.push_back(e_.in.model.params[p.value].Elements());
    }
  }
  return elements;
}

std::vector<std::int64_t> StepRules::GradElementsWith(std::uint32_t model_op) const {
  if (!is_shared_[GroupOf(model_op).value]) {
    return GradElementsOf(model_op);
  }
  return Mapped<std::int64_t>(GradStoragesWith(model_op), [&](const ParamId storage) {
    return e_.in.model.params[storage.value].Elements();
  });
}

// Example: the head and the embedding share a weight, and the head has a bias. Both ops return
// {weight, bias}, each storage once.
std::vector<ParamId> StepRules::GradStoragesWith(std::uint32_t model_op) const {
  const Model& model = e_.in.model;
  std::vector<ParamId> storages;
  for (const std::uint32_t i : ops_of_group_[GroupOf(model_op).value]) {
    for (const ParamId p : model.ops[i].params) {
      const Parameter& param = model.params[p.value];
      const ParamId storage = param.tied_to.valid() ? param.tied_to : p;
      if (e_.a.param_grad[p.value] && !IsIn(storages, storage)) {
        storages.push_back(storage);
      }
    }
  }
  return storages;
}

std::int64_t StepRules::SumOfGradElementsWith(std::uint32_t model_op) const {
  const std::vector<std::int64_t> elements = GradElementsWith(model_op);
  return std::accumulate(elements.begin(), elements.end(), std::int64_t{0});
}

Bytes StepRules::GradBytes(UnitId u) const {
  Bytes sum{0};
  for (const BufferId g : units_[u.value].grads) {
    sum += e_.program.buffers[g.value].size;
  }
  return sum;
}

void StepRules::FreeGrads(UnitId u) {
  for (const BufferId g : At(u).grads) {
    e_.body->Free(g);
  }
  At(u).grads.clear();
}

// Example: three micro-batches without a reduction, one gradient of 1 MiB in bf16, reduced in fp32.
// The first call allocates 2 MiB and writes it. The second and third read 1 + 2 MiB and write 2
// MiB.
void StepRules::AccumulateUnsharded(UnitId u) {
  UnitState& state = At(u);
  if (state.grads.empty()) {
    return;
  }
  const Bytes fresh = GradBytes(u);
  const Precision precision = PrecisionOf(u);
  const Bytes kept(fresh.value / SizeOf(precision.param) * SizeOf(precision.reduce));
  const bool first = !state.accumulated.valid();
  if (first) {
    state.accumulated = Hold(e_.Alloc(kept, Category::kUnshardedGradient, Stream::kCompute), u,
                             Holds::kMixed, precision.reduce);
  }
  e_.AddCopy(
      OpCode::kGradStore, Stream::kCompute, {Phase::kBackward, u.value},
      first ? fresh : fresh + kept, kept,
      {{state.accumulated, first ? AccessMode::kWrite : AccessMode::kReadWrite, Role::kOutput}});
  ConsumeGrads(u);
}

void StepRules::ConsumeGrads(UnitId u) {
  std::uint16_t index = 0;
  for (const BufferId g : At(u).grads) {
    e_.body->Use(g, AccessMode::kRead, Role::kInput, index++);
  }
  FreeGrads(u);
}

void StepRules::StoreReduced(UnitId u, BufferId reduced, Stream stream, Bytes from, Bytes to) {
  UnitState& state = At(u);
  const bool accumulate = state.sharded_grad.valid();
  if (!accumulate) {
    state.sharded_grad = NewShardedGrad(u, stream);
  }
  e_.AddCopy(OpCode::kGradStore, stream, {Phase::kBackward, u.value}, accumulate ? from + to : from,
             to,
             {{state.sharded_grad, accumulate ? AccessMode::kReadWrite : AccessMode::kWrite,
               Role::kOutput},
              {reduced, AccessMode::kRead, Role::kInput}});
}

void StepRules::AddReduced(UnitId u, BufferId sum, BufferId other) {
  e_.AddCopy(
      OpCode::kGradStore, Stream::kReduce, {Phase::kBackward, u.value}, 2 * ReduceShard(u),
      ReduceShard(u),
      {{sum, AccessMode::kReadWrite, Role::kOutput}, {other, AccessMode::kRead, Role::kInput}});
  e_.body->Free(other);
}

}  // namespace shardwright
