#include "schedule/lower/unit_rules.h"

#include <algorithm>
#include <numeric>

#include "core/error.h"
#include "schedule/lower.h"
#include "schedule/lower/layout.h"
#include "schedule/lower/optimizer.h"

namespace shardwright {

StepRules::StepRules(Emitter& emitter, const UnitSpans& spans,
                     const std::vector<ResolvedUnit>& units)
    : e_(emitter),
      spans_(spans),
      plan_(emitter.in.plan),
      job_(emitter.in.job),
      completes_grad_(emitter.in.model.ops.size(), false),
      is_shared_(emitter.in.model.params.size(), false),
      units_(units.size()) {
  // Walking forward, the first op that uses a storage is the last one in backward.
  std::vector<bool> seen(e_.in.model.params.size(), false);
  for (std::uint32_t i = 0; i < e_.in.model.ops.size(); ++i) {
    if (e_.a.ops[i].weight_grad) {
      const std::size_t storage = StorageOf(i).value;
      completes_grad_[i] = !seen[storage];
      is_shared_[storage] = seen[storage];
      seen[storage] = true;
    }
  }
}

void StepRules::Init(const std::vector<ResolvedUnit>& units) {
  for (const ResolvedUnit& unit : units) {
    e_.program.units.push_back(Layout(unit));
    e_.program.units.back().full_precision = unit.full_precision;
    train_elements_.push_back(GradElements(e_.program.units.back()));
  }
  std::int64_t buffer_elements = 0;
  for (const Module& m : e_.in.model.modules) {
    buffer_elements += m.buffer_elements;
  }
  for (std::uint32_t u = 0; u < units_.size(); ++u) {
    InitUnit(UnitId(u));
  }
  if (buffer_elements > 0) {
    const Bytes size(buffer_elements * SizeOf(DType::kFp32));
    const BufferId buffers = e_.Alloc(size, Category::kModelBuffer, Stream::kCompute);
    e_.AddCopy(OpCode::kInitialize, Stream::kCompute, {Phase::kInit, kNoSubject}, Bytes(0), size,
               {{buffers, AccessMode::kWrite, Role::kOutput}});
  }
}

void StepRules::InitUnit(UnitId u) {
  const Bytes size = MasterShard(u);
  if (size == Bytes(0)) {
    return;
  }
  const DType o = job_.precision.master;
  At(u).state_pieces = Pieces(StateTensors(u), o);
  At(u).shard = plan_.offload.parameters
                    ? e_.AllocOnHost(size, Category::kParameterShard)
                    : e_.AllocPieces(size, Pieces(ShardTensors(u), o), Category::kParameterShard,
                                     Stream::kCompute);
  e_.AddCopy(OpCode::kInitialize, Stream::kCompute, {Phase::kInit, u.value}, Bytes(0), size,
             {{At(u).shard, AccessMode::kWrite, Role::kOutput}});
}

std::vector<std::int64_t> StepRules::PerParameter(UnitId u, bool per_rank,
                                                  bool trainable_only) const {
  std::vector<std::int64_t> elements;
  for (const ParamSlot& slot : Info(u).params) {
    if (e_.in.model.params[slot.param.value].trainable || !trainable_only) {
      elements.push_back(slot.padded_elements / (per_rank ? e_.program.shard_size : 1));
    }
  }
  return elements;
}

PieceRange StepRules::Pieces(std::span<const std::int64_t> elements, DType dtype) {
  std::vector<Bytes> sizes;
  for (const std::int64_t n : elements) {
    sizes.push_back(Bytes(n * SizeOf(dtype)));
  }
  return e_.InternPieces(sizes);
}

void StepRules::BeginMicroBatch(bool first, bool last) {
  first_micro_batch_ = first;
  last_micro_batch_ = last;
  in_forward_ = false;
  forward_order_.clear();
  forward_position_.assign(units_.size(), 0);
  for (UnitState& s : units_) {
    s.backward_done = false;
    s.grad_of_param.clear();
  }
}

void StepRules::BeginGathers(Phase phase) {
  if (in_forward_ || phase != Phase::kForward) {
    return;
  }
  in_forward_ = true;
  const OpId compute = e_.body->last();  // the copy of the inputs, behind the last update
  e_.AddWait(Stream::kCopyIn, {compute}, phase, kNoSubject);
  e_.AddWait(Stream::kGather, {compute}, phase, kNoSubject);
}

void StepRules::RecordForward(UnitId u) {
  forward_order_.push_back(u);
  forward_position_[u.value] = forward_order_.size();
}

UnitId StepRules::LeftBefore(UnitId u) const {
  const std::size_t position = forward_position_[u.value];
  return position >= 2 ? forward_order_[position - 2] : UnitId();
}

void StepRules::GradToHost(UnitId u, Stream stream, OpId ready) {
  UnitState& state = At(u);
  state.host_grad = e_.AllocOnHost(GradShard(u), Category::kShardedGradient);
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
  e_.body->Free(state.sharded_grad, static_cast<std::uint8_t>(users));
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
  return Bytes(Info(u).padded_elements * SizeOf(PrecisionOf(u).param));
}
Bytes StepRules::GatherShard(UnitId u) const {
  return Bytes(Info(u).shard_elements * SizeOf(PrecisionOf(u).param));
}
Bytes StepRules::MasterShard(UnitId u) const {
  return Bytes(Info(u).shard_elements * SizeOf(job_.precision.master));
}
Bytes StepRules::ReduceFull(UnitId u) const {
  return Bytes(train_elements_[u.value] * SizeOf(PrecisionOf(u).reduce));
}
Bytes StepRules::ReduceShard(UnitId u) const {
  return Bytes(train_elements_[u.value] / e_.program.shard_size * SizeOf(PrecisionOf(u).reduce));
}
Bytes StepRules::GradShard(UnitId u) const {
  return Bytes(train_elements_[u.value] / e_.program.shard_size * SizeOf(job_.precision.master));
}

Bytes StepRules::StateShard(UnitId u) const {
  return Bytes(StateElements(Info(u)) * SizeOf(job_.precision.master));
}

StepRules::GradTarget StepRules::WeightGradTarget(std::uint32_t model_op, UnitId unit) {
  const auto& known = At(unit).grad_of_param;
  const bool is_again = std::any_of(known.begin(), known.end(), [&](const auto& entry) {
    return entry.first == StorageOf(model_op);
  });
  const std::vector<std::int64_t> elements =
      is_again ? GradElementsOf(model_op) : GradElementsWith(model_op);
  const std::int64_t sum = std::accumulate(elements.begin(), elements.end(), std::int64_t{0});
  const DType p = PrecisionOf(unit).param;
  const BufferId grad = e_.AllocPieces(Bytes(sum * SizeOf(p)), Pieces(elements, p),
                                       Category::kUnshardedGradient, Stream::kCompute);
  At(unit).grads.push_back(grad);
  return {grad, AccessMode::kWrite};
}

// A parameter that several ops use (tied weights) gets its second gradient added to its first; what
// else the later op has goes into the room that the first one's buffer has for it.
void StepRules::WeightGradWritten(std::uint32_t model_op, UnitId unit) {
  UnitState& state = At(unit);
  const ParamId storage = StorageOf(model_op);
  const auto seen = std::find_if(state.grad_of_param.begin(), state.grad_of_param.end(),
                                 [&](const auto& entry) { return entry.first == storage; });
  if (seen == state.grad_of_param.end()) {
    state.grad_of_param.emplace_back(storage, state.grads.back());
    return;
  }
  const BufferId extra = state.grads.back();
  state.grads.pop_back();
  const Bytes bytes = e_.program.buffers[extra.value].size;
  e_.AddCopy(OpCode::kAccumulateGrad, Stream::kCompute, {Phase::kBackward, model_op}, 2 * bytes,
             bytes,
             {{seen->second, AccessMode::kReadWrite, Role::kOutput},
              {extra, AccessMode::kRead, Role::kInput}});
  e_.body->Free(extra);
}

std::vector<std::int64_t> StepRules::GradElementsOf(std::uint32_t model_op) const {
  std::vector<std::int64_t> elements;
  for (const ParamId p : e_.in.model.ops[model_op].params) {
    const Parameter& param = e_.in.model.params[p.value];
    if (param.trainable) {
      elements.push_back(param.Elements());
    }
  }
  return elements;
}

std::vector<std::int64_t> StepRules::GradElementsWith(std::uint32_t model_op) const {
  if (!is_shared_[StorageOf(model_op).value]) {
    return GradElementsOf(model_op);
  }
  const Model& model = e_.in.model;
  std::vector<ParamId> storages;
  std::vector<std::int64_t> elements;
  for (std::uint32_t i = 0; i < model.ops.size(); ++i) {
    if (!e_.a.ops[i].weight_grad || StorageOf(i) != StorageOf(model_op)) {
      continue;
    }
    for (const ParamId p : model.ops[i].params) {
      const Parameter& param = model.params[p.value];
      const ParamId storage = param.tied_to.valid() ? param.tied_to : p;
      if (param.trainable &&
          std::find(storages.begin(), storages.end(), storage) == storages.end()) {
        storages.push_back(storage);
        elements.push_back(param.Elements());
      }
    }
  }
  return elements;
}

std::int64_t StepRules::SumOfGradElementsWith(std::uint32_t model_op) const {
  const std::vector<std::int64_t> elements = GradElementsWith(model_op);
  return std::accumulate(elements.begin(), elements.end(), std::int64_t{0});
}

ParamId StepRules::StorageOf(std::uint32_t model_op) const {
  const ParamId p = e_.in.model.ops[model_op].params.front();
  const ParamId tied = e_.in.model.params[p.value].tied_to;
  return tied.valid() ? tied : p;
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
    state.accumulated = e_.Alloc(kept, Category::kUnshardedGradient, Stream::kCompute);
  }
  e_.AddCopy(
      OpCode::kGradStore, Stream::kCompute, {Phase::kBackward, u.value},
      first ? fresh : fresh + kept, kept,
      {{state.accumulated, first ? AccessMode::kWrite : AccessMode::kReadWrite, Role::kOutput}});
  std::uint16_t index = 0;
  for (const BufferId g : state.grads) {
    e_.body->Use(g, AccessMode::kRead, Role::kInput, index++);
  }
  FreeGrads(u);
}

std::vector<UnitId> StepRules::UnitsWithGrads() const {
  std::vector<UnitId> result;
  for (std::uint32_t u = 0; u < units_.size(); ++u) {
    const UnitState& s = units_[u];
    if (s.sharded_grad.valid() || s.host_grad.valid() || !s.grads.empty()) {
      result.push_back(UnitId(u));
    }
  }
  return result;
}

void StepRules::AddClip(std::span<const UnitId> units, Stream stream, GroupId group) {
  Bytes grads{0};
  std::int64_t tensors = 0;
  for (const UnitId u : units) {
    grads += GradShard(u);
    tensors += static_cast<std::int64_t>(Info(u).params.size());
  }
  const std::int64_t elements = grads.value / SizeOf(job_.precision.master);
  constexpr Bytes kScalar{4};
  const BufferId norm = e_.Alloc(kScalar, Category::kTemporary, Stream::kCompute);
  const auto use_grads = [&](AccessMode mode) {
    std::uint16_t index = 0;
    for (const UnitId u : units) {
      UseGrads(u, mode, index++);
    }
  };
  OpShape shape;
  shape.stream = stream;
  shape.dtype = job_.precision.master;
  shape.bytes = grads;
  shape.code = OpCode::kGradNorm;
  e_.Add(shape, MultiTensorKernels(elements, tensors, grads, kScalar, shape.dtype),
         Phase::kOptimizer, kNoSubject, {{norm, AccessMode::kWrite, Role::kOutput}});
  use_grads(AccessMode::kRead);
  if (e_.program.shard_size > 1) {
    e_.AddCollective(Collective(OpCode::kAllReduce, stream, group, kScalar, DType::kFp32),
                     {Phase::kOptimizer, kNoSubject},
                     {{norm, AccessMode::kReadWrite, Role::kInput}});
  }
  shape.code = OpCode::kGradClip;
  e_.Add(shape, MultiTensorKernels(elements, tensors, grads, grads, shape.dtype), Phase::kOptimizer,
         kNoSubject, {{norm, AccessMode::kRead, Role::kInput}});
  use_grads(AccessMode::kReadWrite);
  e_.body->Free(norm);
}

// Multi-tensor updates make one temporary per tensor, or several.
BufferId StepRules::AllocTemporaries(Bytes bytes, std::span<const UnitId> units, Stream stream) {
  std::vector<Bytes> tensors;
  Bytes round{0};
  for (const UnitId u : units) {
    const PieceRange& range = At(u).state_pieces;
    if (range.count == 0) {
      tensors.push_back(StateShard(u));
    }
    for (std::uint32_t i = 0; i < range.count; ++i) {
      tensors.push_back(e_.program.pieces[range.begin + i]);
    }
    round += StateShard(u);
  }
  if (round == Bytes(0) || bytes.value % round.value != 0) {
    return e_.Alloc(bytes, Category::kTemporary, stream);  // one tensor at a time
  }
  const std::vector<Bytes> once = tensors;
  for (std::int64_t k = 1; k < bytes.value / round.value; ++k) {
    tensors.insert(tensors.end(), once.begin(), once.end());
  }
  return e_.AllocPieces(bytes, e_.InternPieces(tensors), Category::kTemporary, stream);
}

OptimizerStep StepRules::UpdateOf(const OptimizerSpec& optimizer,
                                  std::span<const UnitId> units) const {
  std::int64_t elements = 0, tensors = 0, largest = 0;
  for (const UnitId u : units) {
    elements += train_elements_[u.value] / e_.program.shard_size;
    for (const ParamSlot& slot : Info(u).params) {
      tensors += e_.in.model.params[slot.param.value].trainable ? 1 : 0;
      largest = std::max(largest, slot.padded_elements / e_.program.shard_size);
    }
  }
  return LowerOptimizer(optimizer, elements, tensors, largest, job_.precision.master);
}

void StepRules::AllocStates(UnitId u, Stream owner, std::span<const Bytes> sizes,
                            PieceRange pieces) {
  std::vector<BufferId>& states = At(u).states;
  for (std::size_t k = states.size(); k < sizes.size(); ++k) {
    Buffer b;
    b.size = sizes[k];
    b.category = Category::kOptimizerState;
    b.owner = owner;
    b.on_host = owner == Stream::kHost;
    b.pieces = pieces;
    b.zero_filled = true;
    states.push_back(e_.body->NewBuffer(b));
  }
  for (const BufferId b : states) {
    e_.body->Alloc(b, PointKind::kAllocOnce);
  }
}

void StepRules::UseForUpdate(std::span<const UnitId> units, BufferId temporary) {
  std::uint16_t index = 0;
  for (const UnitId u : units) {
    e_.body->Use(At(u).shard, AccessMode::kReadWrite, Role::kParameter, index);
    UseGrads(u, AccessMode::kRead, index);
    for (const BufferId b : At(u).states) {
      e_.body->Use(b, AccessMode::kReadWrite, Role::kState, index);
    }
    ++index;
  }
  if (temporary.valid()) {
    e_.body->Use(temporary, AccessMode::kWrite, Role::kWorkspace);
    e_.body->Free(temporary);
  }
}

OpId StepRules::AddUpdate(std::span<const UnitId> units, std::span<const Kernel> kernels,
                          Bytes updated, Stream stream) {
  OpShape shape;
  shape.code = OpCode::kOptimizerStep;
  shape.stream = stream;
  shape.dtype = job_.precision.master;
  shape.bytes = updated;
  return e_.Add(shape, kernels, Phase::kOptimizer,
                units.size() == 1 ? units.front().value : kNoSubject, {});
}

OpId StepRules::AddOptimizer(std::span<const UnitId> units, Stream stream) {
  Bytes updated{0};
  const auto states = static_cast<std::size_t>(StateCount(job_.optimizer.kind));
  for (const UnitId u : units) {
    updated += GradShard(u);
    AllocStates(u, stream, std::vector<Bytes>(states, StateShard(u)), At(u).state_pieces);
  }
  const OptimizerStep step = UpdateOf(job_.optimizer, units);
  BufferId temporary;
  if (step.temporaries > Bytes(0)) {
    temporary = AllocTemporaries(step.temporaries, units, stream);
  }
  const OpId op = AddUpdate(units, step.kernels, updated, stream);
  UseForUpdate(units, temporary);
  return op;
}

OpId StepRules::AddMatrixOptimizer(UnitId u, Stream stream, GroupId group) {
  const DType o = job_.precision.master;
  const std::int64_t ranks = e_.program.groups[group.value].size;
  std::vector<UpdatedMatrix> matrices;
  std::int64_t elements = 0, tensors = 0, largest = 0, matrix_elements = 0;
  for (const ParamSlot& slot : Info(u).params) {
    const Parameter& param = e_.in.model.params[slot.param.value];
    if (IsBlockMatrix(e_.in.model, param)) {
      matrices.push_back(MatrixOf(param, job_.optimizer.matrices));
      matrix_elements += param.Elements();
    } else if (param.trainable) {
      elements += param.Elements();
      largest = std::max(largest, param.Elements());
      ++tensors;
    }
  }
  const MatrixUpdate update = LowerMatrixUpdate(job_.optimizer.matrices, matrices, o, ranks);
  std::vector<Bytes> states(static_cast<std::size_t>(StateCount(job_.optimizer.kind)),
                            Bytes(elements * SizeOf(o)));
  states.insert(states.end(), update.states.begin(), update.states.end());
  AllocStates(u, stream, states, {});
  const auto scratch = [&](Bytes bytes) {
    return bytes > Bytes(0) ? e_.Alloc(bytes, Category::kTemporary, stream) : BufferId();
  };
  const OptimizerStep others = LowerOptimizer(job_.optimizer, elements, tensors, largest, o);
  const BufferId temporaries = scratch(others.temporaries);
  OpId op = AddUpdate({&u, 1}, others.kernels, Bytes(elements * SizeOf(o)), stream);
  UseForUpdate({&u, 1}, temporaries);
  if (matrices.empty()) {
    return op;
  }
  const BufferId updates = scratch(update.exchanged);
  if (updates.valid()) {
    const BufferId workspace = scratch(update.temporaries);
    AddUpdate({&u, 1}, update.before, Bytes(0), stream);
    e_.body->Use(updates, AccessMode::kWrite, Role::kOutput);
    UseForUpdate({&u, 1}, workspace);
    e_.AddCollective(Collective(OpCode::kAllReduce, stream, group, update.exchanged, DType::kBf16),
                     {Phase::kOptimizer, kNoSubject},
                     {{updates, AccessMode::kReadWrite, Role::kInput}});
  }
  const BufferId workspace = updates.valid() ? updates : scratch(update.temporaries);
  op = AddUpdate({&u, 1}, update.after, Bytes(matrix_elements * SizeOf(o)), stream);
  UseForUpdate({&u, 1}, workspace);
  return op;
}

OpId StepRules::AddHostOptimizer(std::span<const UnitId> units) {
  Bytes updated{0};
  const auto states = static_cast<std::size_t>(StateCount(job_.optimizer.kind));
  for (const UnitId u : units) {
    updated += GradShard(u);
    AllocStates(u, Stream::kHost, std::vector<Bytes>(states, StateShard(u)), {});
  }
  // A host copy of the masters, or the offloaded shards themselves.
  const auto masters = [&](UnitId u) {
    return At(u).host_master.valid() ? At(u).host_master : At(u).shard;
  };
  OpShape shape;
  shape.code = OpCode::kHostOptimizerStep;
  shape.stream = Stream::kHost;
  shape.dtype = job_.precision.master;
  shape.bytes = updated;
  const OptimizerSpec optimizer = OnHost(job_.optimizer, plan_.dialect);
  const OpId op =
      e_.Add(shape, UpdateOf(optimizer, units).kernels, Phase::kOptimizer, kNoSubject, {});
  std::uint16_t index = 0;
  for (const UnitId u : units) {
    e_.body->Use(masters(u), AccessMode::kReadWrite, Role::kParameter, index);
    e_.body->Use(At(u).host_grad, AccessMode::kRead, Role::kParamGrad, index);
    for (const BufferId b : At(u).states) {
      e_.body->Use(b, AccessMode::kReadWrite, Role::kState, index);
    }
    ++index;
  }
  return op;
}

OpId StepRules::AddStagedOptimizer(UnitId u, Stream stream, MomentStaging& staging) {
  // A piece is a range of the trainable elements, with all their states one behind the other.
  // Pieces of a unit are alike: a small one would take the place of one in flight.
  const std::int64_t elements = StateElements(Info(u));
  const std::int64_t width = SizeOf(job_.precision.master);
  const std::int64_t bytes = StateCount(job_.optimizer.kind) * width;
  const std::int64_t most = std::max<std::int64_t>(1, plan_.moments_piece.value / bytes);
  const std::int64_t pieces = CeilDiv(elements, most);
  if (pieces > kMostAlike) {
    throw InputError("plan: moments_piece", std::to_string(plan_.moments_piece.value),
                     "pieces of which one unit has at most " + std::to_string(kMostAlike));
  }
  std::vector<Bytes> sizes;
  for (std::int64_t i = 0; i < pieces; ++i) {
    sizes.push_back(Bytes((elements / pieces + (i < elements % pieces ? 1 : 0)) * bytes));
  }
  AllocStates(u, Stream::kHost, sizes, {});
  OpShape shape;
  shape.code = OpCode::kOptimizerStep;
  shape.stream = stream;
  shape.dtype = job_.precision.master;
  const auto tensors = static_cast<std::int64_t>(Info(u).params.size());
  OpId op;
  for (const BufferId host : At(u).states) {
    const MomentStaging::Piece piece = staging.Fetch(u, host);
    const std::int64_t count = e_.program.buffers[host.value].size.value / bytes;
    const OptimizerStep step = LowerOptimizer(
        job_.optimizer, count, CeilDiv(tensors * count, elements), count, job_.precision.master);
    BufferId temporary;
    if (step.temporaries > Bytes(0)) {
      temporary = e_.Alloc(step.temporaries, Category::kTemporary, stream);
    }
    shape.bytes = Bytes(count * width);
    op = e_.Add(shape, step.kernels, Phase::kOptimizer, u.value,
                {{At(u).shard, AccessMode::kReadWrite, Role::kParameter}});
    UseGrads(u, AccessMode::kRead, 0);
    e_.body->Use(piece.device, AccessMode::kReadWrite, Role::kState);
    e_.After(piece.arrived);
    if (temporary.valid()) {
      e_.body->Use(temporary, AccessMode::kWrite, Role::kWorkspace);
      e_.body->Free(temporary);
    }
    staging.Return(u, piece, op);
  }
  return op;
}

void StepRules::UseGrads(UnitId u, AccessMode mode, std::uint16_t index) {
  if (At(u).sharded_grad.valid()) {
    e_.body->Use(At(u).sharded_grad, mode, Role::kParamGrad, index);
  }
  for (const BufferId g : At(u).grads) {
    e_.body->Use(g, mode, Role::kParamGrad, index);
  }
}

void StepRules::FreeShardedGrads(std::span<const UnitId> units) {
  for (const UnitId u : units) {
    UnitState& state = At(u);
    if (state.sharded_grad.valid()) {
      e_.body->Free(state.sharded_grad);
    }
    if (state.host_grad.valid()) {
      e_.body->Free(state.host_grad);
    }
    FreeGrads(u);
    state.sharded_grad = BufferId();
    state.host_grad = BufferId();
  }
}

void StepRules::EndStep() {
  const std::vector<UnitId> units = UnitsWithGrads();
  if (units.empty()) {
    return;
  }
  if (plan_.offload.parameters) {
    AddHostOptimizer(units);
    FreeShardedGrads(units);
    return;
  }
  if (TakesGradNorm(job_)) {
    AddClip(units, Stream::kCompute, GroupId(0));
  }
  const OpId updated = job_.optimizer.matrices == MatrixRule::kNone
                           ? AddOptimizer(units, Stream::kCompute)
                           : AddMatrixOptimizer(units.front(), Stream::kCompute, GroupId(0));
  e_.body->SetCarry(kOptimizerSlot, updated);
  FreeShardedGrads(units);
}

}  // namespace shardwright
