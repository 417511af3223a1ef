#include "executor/binding.h"

#include <string>

#include "core/error.h"
#include "executor/data/batch.h"
#include "executor/internal/binder.h"
#include "topologies/mesh.h"

namespace shardwright {

namespace {

// Kernels take each expert's matrices from parameters of their own.
void CheckExperts(const Model& model) {
  for (const ModelOp& op : model.ops) {
    if (model.SpecOf(op).kind == OpKind::kExperts &&
        model.params[op.params.front().value].shape.size() > 2) {
      throw InputError("model: op " + op.name, "one weight for all experts",
                       "one per expert, which is what can be run",
                       "plan the model's config.json instead");
    }
  }
}

}  // namespace

void CheckCuts(const Model& model, const Job& job) {
  const bool cuts_tokens = model.context_ranks > 1;
  for (const ModelOp& op : model.ops) {
    const OpSpec& spec = model.SpecOf(op);
    const bool drops = spec.dropout_p > 0.0 && job.mode == JobMode::kTrain;
    if (drops && !model.stages.empty()) {
      throw InputError("plan: pipeline_size", "a pipeline of layers with dropout",
                       "1, since the host has no masks by the places of layers in the whole model");
    }
    if ((cuts_tokens || model.tensor_ranks > 1) && (drops || spec.alibi_max > 0.0)) {
      throw InputError(cuts_tokens ? "plan: context_size" : "plan: tensor_size",
                       std::to_string(model.context_ranks * model.tensor_ranks),
                       std::string("1, since the host has no ") +
                           (drops ? "dropout" : "ALiBi slopes") +
                           " of a part of the tokens or heads");
    }
  }
}

Binding Bind(const ExecutorInput& input, Rank rank, const RankMemory& memory) {
  CheckExperts(input.model);
  return Binder(input, rank, memory).Run();
}

Binder::Binder(const ExecutorInput& input, Rank rank, const RankMemory& memory)
    : in_(input),
      program_(input.program),
      rank_(rank),
      memory_(memory),
      shard_index_(MeshOf(input.program).At(rank).shard),
      layouts_(input.model, input.program),
      fresh_(input.program.buffers.size(), false),
      units_(input.program.units.size()) {
  std::int64_t offset = 0;
  for (const Module& m : in_.model.modules) {
    module_offset_.push_back(offset);
    offset += m.buffer_elements;
  }
  for (const Buffer& buffer : program_.buffers) {
    contents_.push_back(Declared(buffer));
  }
}

Binding Binder::Run() {
  Binding binding;
  FindExperts(binding.row_counts);
  BindBody(program_.init, binding.init);
  BindBody(program_.warmup, binding.warmup);
  BindBody(program_.step, binding.step);
  FillUnits(binding);
  if (host_inputs_.valid()) {
    binding.inputs = InputViews();
  }
  return binding;
}

// The model's inputs in the host's buffer.
std::vector<View> Binder::InputViews() const {
  std::vector<View> views;
  std::byte* at = At(host_inputs_);
  for (const TensorId t : InputTensors(in_.model)) {
    const Tensor& tensor = in_.model.tensors[t.value];
    const std::int64_t n = tensor.elements * (tensor.per_sample ? program_.micro_batch : 1);
    views.push_back({at, DTypeOf(tensor.role), n});
    at += TensorBytes(tensor, program_.micro_batch, in_.job.precision.param).value;
  }
  return views;
}

std::int64_t Binder::ShardOf(UnitId unit) const {
  const bool is_whole = program_.units[unit.value].shards == program_.shard_size;
  return is_whole ? shard_index_ : PlaceInGroup(MeshOf(program_).SameExperts(), rank_).index;
}

std::byte* Binder::At(BufferId buffer) const {
  const std::int64_t offset = in_.placement.offsets[buffer.value].value;
  return (BufferOf(buffer).on_host ? memory_.host : memory_.device) + offset;
}

const Contents& Binder::ContentsOf(BufferId buffer) const {
  SW_CHECK(IsKnown(buffer), "buffer " + std::to_string(buffer.value) + " is read before it holds " +
                                "parameters or gradients");
  return *contents_[buffer.value];
}

// What the program says that the buffer holds; buckets are empty at first.
std::optional<Contents> Binder::Declared(const Buffer& buffer) const {
  const std::int64_t elements = buffer.size.value / SizeOf(buffer.dtype);
  const bool is_gradient = buffer.category == Category::kUnshardedGradient ||
                           buffer.category == Category::kReduceScatter ||
                           buffer.category == Category::kShardedGradient;
  const UnitId unit(buffer.subject);
  switch (buffer.holds) {
    case Holds::kTensors:
      return layouts_.OfOp(in_.model.ops[buffer.subject], is_gradient, buffer.dtype);
    case Holds::kUnit:
      return layouts_.Unsharded(unit, buffer.dtype);
    case Holds::kShards:
      return is_gradient ? layouts_.FullGradient(unit, elements, buffer.dtype)
                         : layouts_.Gathered(unit, buffer.dtype);
    case Holds::kShard:
      return is_gradient ? layouts_.GradientShard(unit, ShardOf(unit),
                                                  elements * program_.units[unit.value].shards,
                                                  buffer.dtype)
                         : layouts_.Shard(unit, ShardOf(unit), buffer.dtype);
    case Holds::kMixed:
      return Contents{buffer.dtype, {}};
    case Holds::kOther:
    case Holds::kSlice:
    case Holds::kRows:
    case Holds::kUses:
      break;
  }
  return std::nullopt;
}

void Binder::MarkFresh(std::span<const MemoryPoint> points) {
  for (const MemoryPoint& point : points) {
    if (point.kind == PointKind::kAlloc) {
      fresh_[point.buffer.value] = !BufferOf(point.buffer).zero_filled;
      written_.erase(written_.lower_bound({point.buffer, ParamId(0)}),
                     written_.upper_bound({point.buffer, ParamId()}));
    }
  }
}

std::vector<ByteRange> Binder::TakePoison(std::span<const Access> accesses) {
  std::vector<ByteRange> poison;
  for (const Access& access : accesses) {
    if (fresh_[access.buffer.value]) {
      fresh_[access.buffer.value] = false;
      if (access.mode == AccessMode::kWrite) {
        poison.push_back({At(access.buffer), BufferOf(access.buffer).size.value});
      }
    }
  }
  return poison;
}

void Binder::BindBody(const Body& body, BoundBody& bound) {
  gathered_.clear();
  has_clipped_ = false;
  for (UnitBuffers& unit : units_) {
    unit.moments.clear();
  }
  bound.calls.reserve(body.size());
  bound.poison.reserve(body.size());
  for (std::size_t i = 0; i < body.size(); ++i) {
    MarkFresh(body.PointsBefore(OpId(i)));
    bound.poison.push_back(TakePoison(body.AccessesOf(OpId(i))));
    bound.calls.push_back(BindOp(body, OpId(i)));
  }
  MarkFresh(body.PointsAtEnd());
}

Call Binder::BindOp(const Body& body, OpId id) {
  OpView v;
  v.op = &body.ops[id.value];
  v.shape = &program_.ShapeOf(*v.op);
  const std::span<const Access> accesses = body.AccessesOf(id);
  for (const Access& access : accesses) {
    if (access.role == Role::kInput) {
      v.inputs.push_back(access);
    } else if (access.role == Role::kOutput) {
      v.outputs.push_back(access);
    }
  }
  if (InfoOf(v.shape->code).is_collective && !accesses.empty() &&
      accesses.front().role == Role::kExchange) {
    return BindExchange(accesses, *v.shape);
  }
  switch (v.shape->code) {
    case OpCode::kCompute:
      return BindModelOp(body, id);
    case OpCode::kAccumulateGrad:
      return BindAccumulate(v);
    case OpCode::kAllGather:
    case OpCode::kReduceScatter:
    case OpCode::kAllReduce:
    case OpCode::kPermute:
    case OpCode::kSend:
    case OpCode::kReceive:
    case OpCode::kSendReceive:
      return BindCollective(v);
    case OpCode::kAllToAll:
      return BindAllToAll(v);
    case OpCode::kCast:
    case OpCode::kGatherCopyOut:
    case OpCode::kGradStore:
      return Divided(MatchedAll(v), v);
    case OpCode::kGatherCopyIn:
      return BindGatherCopyIn(v);
    case OpCode::kReshardClone:
      return BindReshardClone(v);
    case OpCode::kConcatGrad:
    case OpCode::kReduceCopyIn:
      return BindGradientCopy(v);
    case OpCode::kGradScale:
      return BindGradScale(v);
    case OpCode::kBucketCopy:
      return BindBucketCopy(v);
    case OpCode::kGradNorm:
      return BindNorm(accesses, v);
    case OpCode::kGradClip:
      return BindClip(accesses, v);
    case OpCode::kOptimizerStep:
    case OpCode::kHostOptimizerStep:
      return BindUpdate(accesses, v);
    case OpCode::kCopyH2d:
    case OpCode::kCopyD2h:
      return BindTransfer(v);
    case OpCode::kInitialize:
      return BindInitialize(v);
    case OpCode::kHostWait:
    case OpCode::kStreamWait:
      return std::monostate();
    case OpCode::kBroadcast:
    case OpCode::kBarrier:
      break;
  }
  throw InputError("plan: op " + OpName(program_, *v.op), std::string(InfoOf(v.shape->code).name),
                   "an op that the executor can run");
}

}  // namespace shardwright
