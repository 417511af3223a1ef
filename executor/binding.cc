#include "executor/binding.h"

#include <algorithm>
#include <string>

#include "core/error.h"
#include "executor/internal/binder.h"

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

Binding Bind(const ExecutorInput& input, Rank rank, const RankMemory& memory) {
  CheckExperts(input.model);
  return Binder(input, rank, memory).Run();
}

Binder::Binder(const ExecutorInput& input, Rank rank, const RankMemory& memory)
    : in_(input),
      program_(input.program),
      rank_(rank),
      memory_(memory),
      shard_index_(static_cast<std::int64_t>(rank.value) % input.program.shard_size),
      ranks_(input.program.shard_size * input.program.replicate_size),
      layouts_(input.model, input.program),
      is_zero12_(program_.dialect == "zero1" || program_.dialect == "zero2"),
      is_zero3_(program_.dialect == "zero3"),
      contents_(input.program.buffers.size()),
      fresh_(input.program.buffers.size(), false),
      unit_of_param_(input.model.params.size()),
      states_(input.program.units.size()),
      moments_(input.program.units.size()),
      masters_(input.program.units.size()),
      shards_(input.program.units.size()),
      copies_(input.program.units.size()) {
  for (std::size_t u = 0; u < program_.units.size(); ++u) {
    for (const ParamSlot& slot : program_.units[u].params) {
      unit_of_param_[slot.param.value] = UnitId(u);
    }
  }
  std::int64_t offset = 0;
  for (const Module& m : in_.model.modules) {
    module_offset_.push_back(offset);
    offset += m.buffer_elements;
  }
  for (const Op& op : program_.step.ops) {
    scales_explicitly_ = scales_explicitly_ || program_.ShapeOf(op).code == OpCode::kGradScale;
  }
}

Binding Binder::Run() {
  Binding binding;
  BindBody(program_.init, binding.init);
  BindBody(program_.warmup, binding.warmup);
  BindBody(program_.step, binding.step);
  FillUnits(binding);
  if (host_inputs_.valid()) {
    std::byte* at = At(host_inputs_);
    std::vector<bool> used(in_.model.tensors.size(), false);
    for (const ModelOp& op : in_.model.ops) {
      for (const TensorId t : op.inputs) {
        used[t.value] = true;
      }
    }
    for (std::size_t t = 0; t < in_.model.tensors.size(); ++t) {
      const Tensor& tensor = in_.model.tensors[t];
      if (used[t] && !tensor.producer.valid()) {
        const std::int64_t n = tensor.elements * (tensor.per_sample ? program_.micro_batch : 1);
        binding.inputs.push_back({at, DTypeOf(tensor.role), n});
        at += TensorBytes(tensor, program_.micro_batch, in_.job.precision.param).value;
      }
    }
  }
  return binding;
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

DType Binder::WidthOf(BufferId buffer, std::int64_t elements) const {
  const Precision& p = in_.job.precision;
  const bool sharded = BufferOf(buffer).category == Category::kShardedGradient;
  for (const DType dtype : {sharded ? p.master : p.reduce, p.param, p.master}) {
    if (elements * SizeOf(dtype) == BufferOf(buffer).size.value) {
      return dtype;
    }
  }
  SW_CHECK(false, "buffer " + std::to_string(buffer.value) + " does not hold " +
                      std::to_string(elements) + " elements");
  return p.master;
}

// A DDP bucket's layout follows from the op that empties it: its outputs in order.
void Binder::FindBuckets(const Body& body) {
  buckets_.clear();
  for (std::size_t i = 0; i < body.size(); ++i) {
    if (program_.ShapeOf(body.ops[i]).code != OpCode::kBucketCopy) {
      continue;
    }
    Shares shares;
    std::int64_t offset = 0;
    BufferId bucket;
    for (const Access& access : body.AccessesOf(OpId(i))) {
      if (access.role == Role::kInput) {
        bucket = access.buffer;
      } else {
        shares[access.buffer] = offset;
        offset += BufferOf(access.buffer).size.value;
      }
    }
    // A copy into a bucket has one output, the bucket, which nobody looks up as a bucket here
    // unless it is emptied, too.
    if (BufferOf(bucket).category == Category::kReduceScatter) {
      buckets_[bucket] = std::move(shares);
    }
  }
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
  if (is_zero12_ || is_zero3_) {
    zero_.gathered.clear();
  } else {
    FindBuckets(body);
  }
  has_clipped_ = false;
  moments_.assign(program_.units.size(), {});
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
  if (is_zero12_ || is_zero3_) {
    if (std::optional<Call> call = BindZeroOp(v)) {
      return *std::move(call);
    }
  }
  switch (v.shape->code) {
    case OpCode::kCompute:
      return BindModelOp(body, id);
    case OpCode::kAccumulateGrad:
      return BindAccumulate(v);
    case OpCode::kAllGather:
    case OpCode::kReduceScatter:
    case OpCode::kAllReduce:
      return BindCollective(v);
    case OpCode::kCast:
      return BindCast(body, id, v);
    case OpCode::kGatherCopyIn:
      return BindGatherCopyIn(v);
    case OpCode::kGatherCopyOut:
      return BindGatherCopyOut(v);
    case OpCode::kReshardClone:
      return BindReshardClone(v);
    case OpCode::kConcatGrad:
    case OpCode::kReduceCopyIn:
      return BindGradientCopy(v);
    case OpCode::kGradScale:
      return BindGradScale(v);
    case OpCode::kGradStore:
      return BindGradStore(v);
    case OpCode::kBucketCopy:
      return BindBucketCopy(v);
    case OpCode::kGradNorm:
      return BindNorm(accesses, v);
    case OpCode::kGradClip:
      return BindClip(accesses, v);
    case OpCode::kOptimizerStep:
    case OpCode::kHostOptimizerStep:
      return BindUpdate(accesses);
    case OpCode::kCopyH2d:
    case OpCode::kCopyD2h:
      return BindTransfer(v);
    case OpCode::kInitialize:
      return BindInitialize(v);
    case OpCode::kHostWait:
    case OpCode::kStreamWait:
      return std::monostate();
    case OpCode::kBroadcast:
    case OpCode::kAllToAll:
    case OpCode::kBarrier:
      break;
  }
  throw InputError("plan: op " + OpName(program_, *v.op), std::string(InfoOf(v.shape->code).name),
                   "an op that the executor can run");
}

}  // namespace shardwright
