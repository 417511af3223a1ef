// Initialisation, clipping and the optimizer.

#include <algorithm>
#include <utility>

#include "core/error.h"
#include "executor/internal/binder.h"
#include "schedule/lower.h"
#include "schedule/lower/optimizer.h"

namespace shardwright {

Call Binder::BindInitialize(const OpView& v) {
  if (v.outputs.empty()) {
    return std::monostate();  // the update that allocates ZeRO's states changes nothing
  }
  const BufferId to = v.outputs.front().buffer;
  InitializeCall call;
  call.data = At(to);
  if (v.op->subject == kNoSubject) {
    model_buffers_ = to;
    call.elements = ElementsOf(to, DType::kFp32);
    return call;
  }
  const Contents& contents = ContentsOf(to);
  call.unit = v.unit();
  call.part = PartOf(program_, rank_);
  call.dtype = contents.dtype;
  call.elements = ElementsOf(to);
  call.pieces = InWhole(in_.model, contents.pieces, call.part);
  // Weights that are computed with beside the masters come before these.
  UnitBuffers& unit = units_[v.op->subject];
  unit.copy = std::exchange(unit.shard, to);
  return call;
}

std::vector<ElementRange> Binder::GradientRanges(std::span<const Access> accesses,
                                                 std::optional<bool> copies) const {
  std::vector<ElementRange> ranges;
  for (const Access& access : accesses) {
    if (access.role != Role::kParamGrad) {
      continue;
    }
    const Contents& contents = ContentsOf(access.buffer);
    for (const ShardPiece& piece : contents.pieces) {
      if (!copies || *copies == IsCopy(piece.param)) {
        ranges.push_back({At(access.buffer) + piece.shard_offset * SizeOf(contents.dtype),
                          piece.count, contents.dtype});
      }
    }
  }
  return ranges;
}

Call Binder::BindNorm(std::span<const Access> accesses, const OpView& v) {
  if (!v.inputs.empty()) {  // adds one number to another
    CopyCall add;
    add.runs = {{.from = At(v.inputs.front().buffer),
                 .to = At(v.outputs.front().buffer),
                 .count = 1,
                 .accumulate = true}};
    return add;
  }
  NormCall call;
  call.gradients = GradientRanges(accesses, false);
  call.copies = GradientRanges(accesses, true);
  call.divisor = v.shape->divisor;
  call.norm = At(v.outputs.front().buffer);
  // ZeRO takes the norm of 16-bit parts, which it leaves as they are.
  norm_divides_ = std::any_of(accesses.begin(), accesses.end(), [](const Access& access) {
    return access.role == Role::kParamGrad && access.mode == AccessMode::kReadWrite;
  });
  call.in_place = norm_divides_;
  return call;
}

// Of ranks that cut layers the first counts the parameters that all of them have.
bool Binder::IsCopy(ParamId param) const {
  return program_.tensor_size > 1 && in_.model.params[param.value].tensor_parts == 1 &&
         PartOf(program_, rank_) > 0;
}

Call Binder::BindClip(std::span<const Access> accesses, const OpView& v) {
  ClipCall call;
  call.gradients = GradientRanges(accesses);
  call.norm = At(v.inputs.front().buffer);
  for (const Access& other : std::span(v.inputs).subspan(1)) {
    call.other_norms.push_back(At(other.buffer));
  }
  call.divides = !norm_divides_;
  call.divisor = v.shape->divisor;
  call.decides = !has_clipped_;
  has_clipped_ = true;
  return call;
}

Call Binder::BindUpdate(std::span<const Access> accesses, const OpView& v) {
  UpdateCall update;
  // Behind a norm the gradients are divided already; on the host nobody clips before.
  const bool on_host = BufferOf(accesses.front().buffer).on_host;
  if (on_host || !TakesGradNorm(in_.job)) {
    update.gradients = GradientRanges(accesses);
    update.divisor = v.shape->divisor;
  }
  if (on_host && TakesGradNorm(in_.job)) {
    update.clips = true;
    for (std::size_t g = 0; g < program_.groups.size() && program_.shard_size > 1; ++g) {
      if (program_.groups[g].name == "shard") {
        update.clip_group = GroupId(g);
      }
    }
  }
  std::uint16_t count = 0;
  for (const Access& access : accesses) {
    count = std::max<std::uint16_t>(count, static_cast<std::uint16_t>(access.index + 1));
  }
  for (std::uint16_t index = 0; index < count; ++index) {
    AddShardUpdate(accesses, index, update);
  }
  AddCasts(accesses, update.casts);
  return update;
}

// zero3 on the host: what was updated is cast to the dtype of the weights.
void Binder::AddCasts(std::span<const Access> accesses, CopyCall& casts) {
  for (const Access& access : accesses) {
    if (access.role != Role::kOutput) {
      continue;
    }
    Access master;
    master.buffer = BuffersOfIndex(accesses, access.index).shard;
    AppendCopy(Matched({&master, 1}, access.buffer, false), casts);
  }
}

// All accesses of one index belong to one unit: its shard, its gradients, its states.
Binder::ShardBuffers Binder::BuffersOfIndex(std::span<const Access> accesses,
                                            std::uint16_t index) const {
  ShardBuffers buffers;
  for (const Access& access : accesses) {
    if (access.index != index) {
      continue;
    }
    if (access.role == Role::kParameter) {
      buffers.shard = access.buffer;
    } else if (access.role == Role::kParamGrad) {
      buffers.grads.push_back(access.buffer);
    } else if (access.role == Role::kState) {
      buffers.states.push_back(access.buffer);
    }
  }
  return buffers;
}

// Pieces of a unit come in order.
void Binder::StagePiece(UnitId unit, BufferId host, BufferId device) {
  std::vector<StagedPiece>& pieces = units_[unit.value].moments;
  const std::int64_t element =
      StateCount(in_.job.optimizer.kind) * SizeOf(in_.job.precision.master);
  const std::int64_t begin = pieces.empty() ? 0 : pieces.back().begin + pieces.back().count;
  pieces.push_back({host, begin, BufferOf(host).size.value / element});
  staged_[device] = pieces.back();
}

// What of the ranges has its moments in the piece.
std::vector<OptimizerRange> Binder::InPiece(const std::vector<OptimizerRange>& ranges,
                                            const StagedPiece& piece) {
  std::vector<OptimizerRange> result;
  for (OptimizerRange r : ranges) {
    const std::int64_t first = std::max(r.state_offset, piece.begin);
    const std::int64_t last = std::min(r.state_offset + r.count, piece.begin + piece.count);
    if (first < last) {
      r.param_offset += first - r.state_offset;
      r.grad_offset += first - r.state_offset;
      r.state_offset = first - piece.begin;
      r.count = last - first;
      result.push_back(r);
    }
  }
  return result;
}

// A unit's shard by each of its gradients. Where moments visit the device in pieces, the elements
// whose moments are there, and no others.
void Binder::AddShardUpdate(std::span<const Access> accesses, std::uint16_t index,
                            UpdateCall& update) {
  const ShardBuffers buffers = BuffersOfIndex(accesses, index);
  if (!buffers.shard.valid()) {
    return;
  }
  // Of the unit's last update: on the device or, of a copy, on the host.
  units_[BufferOf(buffers.shard).subject].master = buffers.shard;
  units_[BufferOf(buffers.shard).subject].states = buffers.states;
  const auto staged = buffers.states.empty() ? staged_.end() : staged_.find(buffers.states.front());
  const Contents& params = ContentsOf(buffers.shard);
  const std::int64_t width = SizeOf(params.dtype);
  for (const BufferId grad : buffers.grads) {
    SW_CHECK(ContentsOf(grad).dtype == params.dtype, "gradients and parameters of two dtypes");
    OptimizerCall call;
    call.spec = in_.job.optimizer;
    call.dtype = params.dtype;
    call.params = At(buffers.shard);
    call.grads = At(grad);
    std::vector<OptimizerRange> ranges = UpdateRanges(params, ContentsOf(grad));
    std::int64_t bytes = 0;  // of each state
    if (staged == staged_.end()) {
      for (std::size_t k = 0; k < buffers.states.size() && k < call.states.size(); ++k) {
        call.states[k] = At(buffers.states[k]);
        bytes = BufferOf(buffers.states[k]).size.value;
      }
    } else {
      ranges = InPiece(ranges, staged->second);
      bytes = staged->second.count * width;
      for (std::size_t k = 0; k < static_cast<std::size_t>(StateCount(call.spec.kind)); ++k) {
        call.states[k] = At(buffers.states.front()) + static_cast<std::int64_t>(k) * bytes;
      }
      if (!update.gradients.empty()) {
        update.gradients.clear();
        for (const OptimizerRange& r : ranges) {
          update.gradients.push_back({At(grad) + r.grad_offset * width, r.count, call.dtype});
        }
      }
    }
    const bool is_factored = call.spec.kind == OptimizerKind::kAdafactor;
    if (is_factored) {
      ranges = FactoredRanges(params, std::move(ranges), Bytes(bytes));
    }
    for (const OptimizerRange& r : ranges) {
      SW_CHECK(is_factored || buffers.states.empty() || (r.state_offset + r.count) * width <= bytes,
               "an optimizer state is too small for its shard");
    }
    update.shards.push_back(call);
    update.ranges.push_back(std::move(ranges));
  }
}

// Trainable elements of the shard for which `grads` has a gradient. States hold the shard's
// trainable elements packed.
std::vector<OptimizerRange> Binder::UpdateRanges(const Contents& params,
                                                 const Contents& grads) const {
  std::vector<OptimizerRange> ranges;
  std::int64_t state_offset = 0;
  for (const ShardPiece& p : params.pieces) {
    const Parameter& param = in_.model.params[p.param.value];
    if (!param.trainable) {
      continue;
    }
    for (const ShardPiece& g : grads.pieces) {
      const std::int64_t first = std::max(p.param_begin, g.param_begin);
      const std::int64_t last = std::min(p.param_begin + p.count, g.param_begin + g.count);
      if (g.param != p.param || first >= last) {
        continue;
      }
      OptimizerRange r;
      r.param_offset = p.shard_offset + first - p.param_begin;
      r.grad_offset = g.shard_offset + first - g.param_begin;
      r.state_offset = state_offset + first - p.param_begin;
      r.count = last - first;
      r.weight_decay =
          HasWeightDecay(param, in_.training.optimizer) ? in_.training.optimizer.weight_decay : 0.0;
      ranges.push_back(r);
    }
    state_offset += p.count;
  }
  return ranges;
}

std::vector<OptimizerRange> Binder::FactoredRanges(const Contents& params,
                                                   std::vector<OptimizerRange> ranges,
                                                   Bytes state) const {
  std::int64_t offset = 0;
  for (const ShardPiece& p : params.pieces) {
    const Parameter& param = in_.model.params[p.param.value];
    if (!param.trainable) {
      continue;
    }
    const bool is_matrix = param.shape.size() == 2;
    for (OptimizerRange& r : ranges) {
      if (r.param_offset >= p.shard_offset && r.param_offset < p.shard_offset + p.count) {
        if (param.shape.size() > 2) {
          throw InputError("plan: job.optimizer.kind",
                           "\"adafactor\" with " + param.fqn + " of more than two dimensions",
                           "another one, since the executor factors matrices alone");
        }
        if (r.count != param.Elements() * param.tensor_parts) {
          throw InputError("plan: job.optimizer.kind", "\"adafactor\" with a part of " + param.fqn,
                           "whole vectors and matrices, which dialect ddp has");
        }
        r.state_offset = offset;
        r.columns = is_matrix ? param.shape[1] : 0;
      }
    }
    for (const std::int64_t n : FactoredState(param.shape)) {
      offset += n;
    }
  }
  if (offset * SizeOf(DType::kFp32) != state.value) {
    throw InputError("plan: job.optimizer.kind", "\"adafactor\" with flat parameters",
                     "another one, or dialect ddp, where matrices keep their shape");
  }
  return ranges;
}

void Binder::FillUnits(Binding& binding) const {
  if (model_buffers_.valid()) {
    binding.model_buffers = reinterpret_cast<float*>(At(model_buffers_));
  }
  binding.units.resize(program_.units.size());
  for (std::size_t u = 0; u < program_.units.size(); ++u) {
    BoundUnit& unit = binding.units[u];
    const UnitBuffers& own = units_[u];
    if (!own.shard.valid()) {
      continue;
    }
    const Contents& contents = ContentsOf(own.shard);
    unit.pieces = contents.pieces;
    unit.dtype = contents.dtype;
    unit.elements = ElementsOf(own.shard);
    unit.parameters = At(own.shard);
    if (own.copy.valid()) {
      const Contents& copy = ContentsOf(own.copy);
      unit.copy = {copy.pieces, ElementsOf(own.copy), copy.dtype, At(own.copy)};
      for (const ShardPiece& piece : copy.pieces) {  // no rank's masters have frozen parameters
        const bool is_there =
            std::any_of(contents.pieces.begin(), contents.pieces.end(),
                        [&](const ShardPiece& p) { return p.param == piece.param; });
        if (!is_there && !in_.model.params[piece.param.value].trainable) {
          unit.copy_only.push_back(piece);
        }
      }
    }
    if (own.master.valid() && own.master != own.shard) {
      unit.host_copy = At(own.master);
    }
    unit.states = StatesOf(own, contents);
  }
}

// States hold the trainable elements of the shard, packed.
std::vector<BoundStates> Binder::StatesOf(const UnitBuffers& unit, const Contents& shard) const {
  Contents packed{shard.dtype, {}};
  std::int64_t elements = 0;
  for (ShardPiece piece : shard.pieces) {
    if (in_.model.params[piece.param.value].trainable) {
      piece.shard_offset = elements;
      packed.pieces.push_back(piece);
      elements += piece.count;
    }
  }
  std::vector<BoundStates> result;
  if (in_.job.optimizer.kind == OptimizerKind::kAdafactor) {
    return result;  // no checkpoint has its states
  }
  for (const StagedPiece& staged : unit.moments) {
    const std::int64_t bytes = staged.count * SizeOf(shard.dtype);
    BoundStates& states = result.emplace_back();
    states.pieces = Slice(packed, staged.begin, staged.begin + staged.count).pieces;
    for (int k = 0; k < StateCount(in_.job.optimizer.kind); ++k) {
      states.data.push_back(At(staged.host) + k * bytes);
    }
  }
  if (result.empty() && !unit.states.empty()) {
    BoundStates& states = result.emplace_back();
    states.pieces = std::move(packed.pieces);
    for (const BufferId state : unit.states) {
      states.data.push_back(At(state));
    }
  }
  return result;
}

}  // namespace shardwright
