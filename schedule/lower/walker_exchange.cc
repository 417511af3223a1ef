// Ops that need all data-parallel ranks in the middle of a pass (synchronised batch norm): compute,
// a small collective on the compute stream, where PyTorch runs it, too, and the rest of the op.

#include <cstdint>

#include "schedule/lower/walker.h"

namespace shardwright {

// The framework's default process group. A dialect whose own collectives span all ranks shares its
// communicator with the exchanges, as PyTorch's does; only native gives them one of their own, so
// that they need not wait behind gathers.
GroupId Walker::DataParallelGroup() {
  const GroupShape all = e_.mesh.Of({Axis::kReplicate, Axis::kShard});
  if (e_.in.plan.dialect == Dialect::kNative) {
    return e_.AddGroup({Axis::kReplicate, Axis::kShard}, "statistics");
  }
  for (std::size_t g = 0; g < e_.program.groups.size(); ++g) {
    if (e_.program.groups[g].size == all.size && e_.program.groups[g].stride == all.stride) {
      return GroupId(g);
    }
  }
  return e_.AddGroup({Axis::kReplicate, Axis::kShard});
}

BufferId Walker::AddForwardExchange(std::uint32_t i, Phase phase) {
  const Exchange& exchange = e_.a.KernelsOf(i).forward_exchange;
  OpShape shape;
  shape.dtype = e_.in.job.precision.param;
  const BufferId mine = e_.Alloc(exchange.bytes, Category::kTemporary, Stream::kCompute);
  AddCompute(i, phase, e_.Intern(shape, exchange.before));
  UseInputs(i, phase);
  e_.body->Use(mine, AccessMode::kWrite, Role::kExchange);
  const GroupId group = DataParallelGroup();
  const Bytes bytes = e_.program.groups[group.value].size * exchange.bytes;
  const BufferId all = e_.Alloc(bytes, Category::kTemporary, Stream::kCompute);
  e_.AddCollective(
      Collective(OpCode::kAllGather, Stream::kCompute, group, bytes, DType::kFp32),
      {phase, kNoSubject},
      {{mine, AccessMode::kRead, Role::kExchange}, {all, AccessMode::kWrite, Role::kExchange, 1}});
  e_.body->Free(mine);
  return all;
}

// The gradients of the parameters are those of this rank's samples: sums that the part before the
// exchange makes anyway.
BufferId Walker::AddBackwardExchange(std::uint32_t i, DialectRules::GradTarget weight) {
  const Exchange& exchange = e_.a.KernelsOf(i).backward_exchange;
  OpShape shape;
  shape.dtype = e_.in.job.precision.param;
  const BufferId sums = e_.Alloc(exchange.bytes, Category::kTemporary, Stream::kCompute);
  AddCompute(i, Phase::kBackward, e_.Intern(shape, exchange.before));
  UseForBackward(i);
  if (weight.buffer.valid()) {
    e_.body->Use(weight.buffer, weight.mode, Role::kParamGrad);
  }
  e_.body->Use(sums, AccessMode::kWrite, Role::kExchange);
  e_.AddCollective(Collective(OpCode::kAllReduce, Stream::kCompute, DataParallelGroup(),
                              exchange.bytes, DType::kFp32),
                   {Phase::kBackward, kNoSubject},
                   {{sums, AccessMode::kReadWrite, Role::kExchange}});
  return sums;
}

}  // namespace shardwright
