// The end of a step: unscaling, clipping, the optimizer, and the release of the gradients.
//
// Example: 3 units of 4 ranks, 6,269,440 bytes of fp32 gradients on this rank, clipping, AdamW with
// foreach. The step ends with these ops on the compute stream:
//
//   grad_norm        reads the gradients once and divides them by the micro-batches
//   all_reduce       over the shard group: 4 bytes; fsdp2 sends 84, one number per parameter
//   grad_clip        reads and writes the gradients
//   optimizer_step   updates masters and both states
//
// Then the gradients are freed, as zero_grad(set_to_none=True) does. If parameters are offloaded,
// the first three ops give way to a sum of the norm alone, and the update runs on the host stream.
//
// The norm must be summed before any rank clips. If one rank clipped by its own shard's norm, ranks
// would scale their parts of one gradient by different factors.

#include <string>
#include <vector>

#include "core/error.h"
#include "core/ranges.h"
#include "schedule/lower.h"
#include "schedule/lower/optimizer.h"
#include "schedule/lower/unit_rules.h"

namespace shardwright {

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

// torch's clip_grad_norm_ stacks the norms of all gradients and, where these are DTensors, sums the
// stack over the shard group; 2.8 sums the norm of the stack. Our own executor's kernels sum one
// fp32 number.
DType StepRules::NormDType() const {
  return plan_.dialect == Dialect::kFsdp2 && !RunsOurKernels() ? job_.precision.master
                                                               : DType::kFp32;
}

BufferId StepRules::NewNorm(std::span<const UnitId> units) {
  std::int64_t count = 1;
  if (plan_.dialect == Dialect::kFsdp2 && RulesOf(plan_.torch).stacks_norms && !RunsOurKernels()) {
    count = 0;
    for (const UnitId u : units) {
      count += std::ssize(PerParameter(u, true, true));
    }
  }
  return e_.Alloc(Bytes(count * SizeOf(NormDType())), Category::kTemporary, Stream::kCompute);
}

// Adds nothing where each rank has all gradients, as under ddp: its norm is then everybody's.
void StepRules::SumNorm(BufferId norm, Stream stream, GroupId group) {
  const bool is_of_shards = e_.program.shard_size > 1 || e_.program.tensor_size > 1;
  if (e_.program.groups[group.value].size > 1 && is_of_shards) {
    e_.AddCollective(Collective(OpCode::kAllReduce, stream, group,
                                e_.program.buffers[norm.value].size, NormDType()),
                     {Phase::kOptimizer, kNoSubject},
                     {{norm, AccessMode::kReadWrite, Role::kInput}});
  }
}

// Of this rank's layers alone otherwise: one number (clip_grad_norm_ of torchtitan's
// distributed/utils.py), which takes in the norm of experts, if there is one.
void StepRules::SumNormOverStages(BufferId norm, BufferId of_experts, Stream stream) {
  if (e_.in.stage) {
    const Bytes size(SizeOf(NormDType()));
    if (of_experts.valid()) {
      TakeIn(norm, of_experts);
    }
    e_.AddCollective(Collective(OpCode::kAllReduce, stream, e_.AddPipeline(), size, NormDType()),
                     {Phase::kOptimizer, kNoSubject}, {});
    e_.body->UseFirst(norm, size, AccessMode::kReadWrite, Role::kInput);
  }
}

bool StepRules::HasScaler() const {
  return IsTorch(plan_.dialect) && job_.precision.param == DType::kFp16 && !RunsOurKernels();
}

// ShardedGradScaler sums over the default group, all ranks, and under a fused optimizer not at all
// (_check_inf_per_device of grad_scaler.py) unless something is clipped. DTensors are asked over
// their shards (found_inf_reduce_handler of _dispatch.py).
std::int64_t StepRules::RanksOfFlag() const {
  const bool is_asked = plan_.dialect == Dialect::kFsdp1 &&
                        (job_.clip_gradients || job_.optimizer.impl != OptimizerImpl::kFused);
  return plan_.dialect == Dialect::kFsdp2 ? plan_.shard_size : is_asked ? e_.mesh.RankCount() : 1;
}

void StepRules::SumFlag(BufferId flag) {
  const std::int64_t ranks = RanksOfFlag();
  if (ranks == 1) {
    return;
  }
  const GroupId group = ranks == plan_.shard_size ? GroupId(0)
                        : plan_.shard_size == 1   ? e_.AddGroup({Axis::kReplicate})
                                                  : e_.AddGroup({Axis::kReplicate, Axis::kShard});
  e_.AddCollective(Collective(OpCode::kAllReduce, Stream::kCompute, group,
                              e_.program.buffers[flag.value].size, DType::kFp32),
                   {Phase::kOptimizer, kNoSubject}, {{flag, AccessMode::kReadWrite, Role::kInput}});
}

std::int64_t StepRules::CountTensors(std::span<const UnitId> units) const {
  const std::int64_t tensors = Summed<std::int64_t>(
      units, [&](const UnitId u) { return static_cast<std::int64_t>(Info(u).params.size()); });
  return tensors;
}

std::int64_t StepRules::CountElements(std::span<const UnitId> units) const {
  return Summed<std::int64_t>(
      units, [&](const UnitId u) { return train_elements_[u.value] / Info(u).shards; });
}

void StepRules::UseAllGrads(std::span<const UnitId> units) {
  std::uint16_t index = 0;
  for (const UnitId u : units) {
    UseGrads(u, AccessMode::kReadWrite, index++);
  }
}

// The scaler's pass divides the gradients by the scale and writes a flag of 4 bytes: 1 if some
// value is infinite or not a number. A step with an overflow skips its update; SumFlag tells the
// other ranks where torch does.
void StepRules::AddUnscale(std::span<const UnitId> units) {
  OpShape shape;
  shape.stream = Stream::kCompute;
  shape.dtype = job_.precision.master;
  for (const UnitId u : units) {
    shape.bytes += GradShard(u);
  }
  shape.code = OpCode::kGradNorm;
  shape.divisor = MicroBatches();
  const BufferId flag =
      e_.Alloc(Bytes(SizeOf(DType::kFp32)), Category::kTemporary, Stream::kCompute);
  e_.Add(shape,
         MultiTensorKernels(CountElements(units), CountTensors(units), shape.bytes, shape.bytes,
                            shape.dtype),
         Phase::kOptimizer, kNoSubject, {{flag, AccessMode::kWrite, Role::kOutput}});
  UseAllGrads(units);
  SumFlag(flag);
  e_.body->Free(flag);
}

// Of the gradients of `units` on this rank.
BufferId StepRules::AddNorm(std::span<const UnitId> units, Stream stream) {
  Bytes grads{0};
  for (const UnitId u : units) {
    grads += GradShard(u);
  }
  const std::int64_t tensors = CountTensors(units);
  const std::int64_t elements = CountElements(units);
  const BufferId norm = NewNorm(units);
  const Bytes size = e_.program.buffers[norm.value].size;
  OpShape shape;
  shape.stream = stream;
  shape.dtype = job_.precision.master;
  shape.bytes = grads;
  shape.code = OpCode::kGradNorm;
  shape.divisor = HasScaler() ? 1.0 : MicroBatches();
  e_.Add(shape, MultiTensorKernels(elements, tensors, grads, size, shape.dtype), Phase::kOptimizer,
         kNoSubject, {{norm, AccessMode::kWrite, Role::kOutput}});
  UseAllGrads(units);  // it divides them
  return norm;
}

// Experts' norm is summed over the ranks that cut them, then over those that share them out
// (torchtitan, distributed/utils.py, _clip_grad_norm_with_ep).
void StepRules::AddClip(std::span<const UnitId> all, Stream stream, GroupId group) {
  std::vector<UnitId> sorted(all.begin(), all.end());
  const std::span<const UnitId> units(sorted);
  const auto begin_of_experts = std::stable_partition(sorted.begin(), sorted.end(),
                                                      [&](UnitId u) { return !IsOfExperts(u); });
  const auto dense = units.first(std::size_t(begin_of_experts - sorted.begin()));
  const auto experts = units.subspan(dense.size());
  BufferId norm, norm_of_experts;
  if (!experts.empty()) {
    norm_of_experts = AddNorm(experts, stream);
    SumNorm(norm_of_experts, stream, e_.AddSameExperts());
    SumNorm(norm_of_experts, stream, e_.AddExperts());
  }
  if (!dense.empty()) {
    norm = AddNorm(dense, stream);
    SumNorm(norm, stream, group);
    if (e_.program.tensor_size > 1) {
      SumNorm(norm, stream, e_.AddTensor());
    }
    SumNormOverStages(norm, norm_of_experts, stream);
  }
  OpShape shape;
  shape.stream = stream;
  shape.dtype = job_.precision.master;
  for (const UnitId u : all) {
    shape.bytes += GradShard(u);
  }
  shape.code = OpCode::kGradClip;
  e_.Add(shape,
         MultiTensorKernels(CountElements(all), CountTensors(all), shape.bytes, shape.bytes,
                            shape.dtype),
         Phase::kOptimizer, kNoSubject,
         {{norm, AccessMode::kRead, Role::kInput},
          {e_.in.stage ? BufferId() : norm_of_experts, AccessMode::kRead, Role::kInput, 1}});
  UseAllGrads(all);
  for (const BufferId buffer : {norm, norm_of_experts}) {
    if (buffer.valid()) {
      e_.body->Free(buffer);
    }
  }
}

// FSDP1 sends the host's norm to the device, sums it there, and takes it back. FSDP2 sums what lies
// on the host, over gloo; the program does as FSDP1, since the host waits in both.
void StepRules::SumHostNorm(std::span<const UnitId> units) {
  if (e_.program.shard_size > 1) {
    const BufferId norm = NewNorm(units);
    TakeIn(norm);
    SumNorm(norm, Stream::kCompute, GroupId(0));
    ReturnToHost(norm);
  }
}

// Sends the flag to the device, sums it there, and lets the host wait. Does nothing if torch does
// not sum the flag.
void StepRules::SumHostFlag() {
  if (RanksOfFlag() > 1) {
    const BufferId flag =
        e_.Alloc(Bytes(SizeOf(DType::kFp32)), Category::kTemporary, Stream::kCompute);
    TakeIn(flag);
    SumFlag(flag);
    ReturnToHost(flag);
  }
}

// Writes a number, from another one if there is any.
void StepRules::TakeIn(BufferId number, BufferId other) {
  const Bytes size = e_.program.buffers[number.value].size;
  OpShape shape;
  shape.code = OpCode::kGradNorm;
  shape.dtype = job_.precision.master;
  shape.bytes = size;
  e_.Add(shape, MultiTensorKernels(1, 1, size, size, shape.dtype), Phase::kOptimizer, kNoSubject,
         {{number, other.valid() ? AccessMode::kReadWrite : AccessMode::kWrite, Role::kOutput},
          {other, AccessMode::kRead, Role::kInput}});
}

void StepRules::ReturnToHost(BufferId number) {
  const OpId summed = e_.body->last();
  e_.AddHostWait({&summed, 1}, Phase::kOptimizer, kNoSubject);
  e_.body->Free(number);
}

// The host's norm of its gradients reads them; clipping reads and writes them.
Kernel StepRules::HostClip(std::span<const UnitId> units) const {
  Kernel kernel;
  kernel.kind = KernelClass::kOptimizer;
  kernel.dtype = job_.precision.master;
  for (const UnitId u : units) {
    kernel.read += 2 * GradShard(u);
    kernel.written += GradShard(u);
  }
  return kernel;
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

// Counts elements, tensors and the largest tensor of the units' shards, then asks optimizer.cc.
// Packed states have kernels of their own. Adafactor always computes in fp32. Lists of tensors have
// one dtype: what learns in fp32 beside others is a second update.
OptimizerStep StepRules::UpdateOf(const OptimizerSpec& optimizer,
                                  std::span<const UnitId> units) const {
  std::int64_t elements = 0, tensors = 0, largest = 0;
  std::int64_t wide = 0, wide_tensors = 0, wide_largest = 0;
  for (const UnitId u : units) {
    elements += train_elements_[u.value] / Info(u).shards;
    for (const ParamSlot& slot : Info(u).params) {
      const bool learns = e_.in.model.params[slot.param.value].trainable;
      const std::int64_t n = slot.padded_elements / Info(u).shards;
      if (learns && e_.a.masters[slot.param.value] != job_.precision.master) {
        wide += n;
        ++wide_tensors;
        wide_largest = std::max(wide_largest, n);
      } else {
        tensors += learns ? 1 : 0;
        largest = std::max(largest, n);
      }
    }
  }
  if (optimizer.kind == OptimizerKind::kAdafactor) {
    return LowerOptimizer(optimizer, elements, tensors + wide_tensors,
                          std::max(largest, wide_largest), DType::kFp32);
  }
  if (optimizer.states != StateFormat::kMaster) {
    Bytes states{0};
    for (const UnitId u : units) {
      states += StateCount(optimizer.kind) * StateShard(u);
    }
    return LowerPackedUpdate(elements, tensors + wide_tensors, states, job_.precision.master);
  }
  OptimizerStep step =
      LowerOptimizer(optimizer, elements - wide, tensors, largest, job_.precision.master);
  if (wide > 0) {
    const OptimizerStep more =
        LowerOptimizer(optimizer, wide, wide_tensors, wide_largest, DType::kFp32);
    step.kernels.insert(step.kernels.end(), more.kernels.begin(), more.kernels.end());
    step.temporaries = std::max(step.temporaries, more.temporaries);
  }
  return step;
}

// States appear with the first update, as torch.optim makes them lazily (`kAllocOnce`). So forward
// of the first step takes less memory than forward of all later ones.
void StepRules::AllocStates(UnitId u, Stream owner, std::span<const Bytes> sizes,
                            PieceRange pieces) {
  std::vector<BufferId>& states = At(u).states;
  for (std::size_t k = states.size(); k < sizes.size(); ++k) {
    Buffer b;
    b.size = sizes[k];
    b.category = Category::kOptimizerState;
    b.owner = owner;
    b.on_host = owner == Stream::kHost || IsPaged(job_.optimizer.states);
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
  shape.divisor = TakesGradNorm(job_) ? 1.0 : MicroBatches();  // behind a norm they are divided
  return e_.Add(shape, kernels, Phase::kOptimizer,
                units.size() == 1 ? units.front().value : kNoSubject, {});
}

// One op for all of `units`. Its kernels and temporaries come from UpdateOf.
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

// Up to four ops: the update of everything that is no matrix; under muon_distributed the matrices'
// updates of this rank and their all-reduce; the change of the matrices.
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

// One op on the host stream. It reads the host's gradients, updates masters and states, and writes
// low-precision copies into `casts` where DeepSpeed keeps such. Clipping adds a pass.
OpId StepRules::AddHostOptimizer(std::span<const UnitId> units, std::span<const BufferId> casts,
                                 bool clips) {
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
  shape.divisor = MicroBatches();
  const OptimizerSpec optimizer = OnHost(job_.optimizer, plan_.dialect);
  std::vector<Kernel> kernels = UpdateOf(optimizer, units).kernels;
  if (!casts.empty()) {
    kernels.push_back(HostCast(units));
  }
  if (clips) {
    kernels.push_back(HostClip(units));
  }
  const OpId op = e_.Add(shape, kernels, Phase::kOptimizer, kNoSubject, {});
  std::uint16_t index = 0;
  for (const UnitId u : units) {
    e_.body->Use(masters(u), AccessMode::kReadWrite, Role::kParameter, index);
    e_.body->Use(At(u).host_grad, AccessMode::kRead, Role::kParamGrad, index);
    for (const BufferId b : At(u).states) {
      e_.body->Use(b, AccessMode::kReadWrite, Role::kState, index);
    }
    if (!casts.empty()) {
      e_.body->Use(casts[index], AccessMode::kWrite, Role::kOutput, index);
    }
    ++index;
  }
  return op;
}

Kernel StepRules::HostCast(std::span<const UnitId> units) const {
  Kernel kernel;
  kernel.kind = KernelClass::kOptimizer;
  kernel.dtype = job_.precision.master;
  for (const UnitId u : units) {
    kernel.read += MasterShard(u);
    kernel.written += GatherShard(u);
    if (TakesGradNorm(job_)) {  // gradients are scaled in a pass of their own
      kernel.read += GradShard(u);
      kernel.written += GradShard(u);
    }
  }
  return kernel;
}

// Example: 1,000 elements of AdamW in fp32 take 8 bytes of states each. With pieces of at most
// 3,000 bytes a piece has at most 375 elements, so there are 3 pieces: of 334, 333 and 333
// elements.
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
  shape.divisor = TakesGradNorm(job_) ? 1.0 : MicroBatches();
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

// The update of the dialects that update all units at once (fsdp2, fsdp1, ddp). Native
// and DeepSpeed's stages have an end of their own. The carry slot tells the next step's gathers
// which op wrote the parameters.
void StepRules::EndStep() {
  const std::vector<UnitId> units = UnitsWithGrads();
  if (units.empty()) {
    return;
  }
  if (plan_.offload.parameters) {
    if (HasScaler()) {
      SumHostFlag();
    }
    if (job_.clip_gradients || (TakesGradNorm(job_) && !HasScaler())) {
      SumHostNorm(units);
    }
    AddHostOptimizer(units, {}, TakesGradNorm(job_));
    FreeShardedGrads(units);
    return;
  }
  if (HasScaler()) {
    AddUnscale(units);
  }
  if (job_.clip_gradients || (TakesGradNorm(job_) && !HasScaler())) {
    AddClip(units, Stream::kCompute, GroupId(0));
  }
  const OpId updated = job_.optimizer.matrices == MatrixRule::kNone
                           ? AddOptimizer(units, Stream::kCompute)
                           : AddMatrixOptimizer(units.front(), Stream::kCompute, GroupId(0));
  e_.body->SetCarry(kOptimizerSlot, updated);
  FreeShardedGrads(units);
}

}  // namespace shardwright
