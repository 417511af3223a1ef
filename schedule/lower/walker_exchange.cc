// Ops that need other ranks in the middle of a pass. Synchronised batch norm: compute, a small
// collective on the compute stream, where PyTorch runs it, too, and the rest of the op. Experts
// that ranks share out: numbers of rows, then the rows. Layers that ranks cut: tokens, and sums of
// the loss.

#include <algorithm>
#include <cstdint>
#include <iterator>
#include <vector>

#include "models/cut_experts.h"
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
  const bool is_cut = e_.in.model.SpecOf(e_.in.model.ops[i]).tensor_ranks > 0;
  const GroupId group = is_cut ? e_.AddTensor() : DataParallelGroup();
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

// The all-to-all runs on the compute stream: torch gives it a stream of its own, for which compute
// waits at once. Its name is that of the experts' unit. Where rows may come in any number it is
// priced as if as many came as leave.
OpId Walker::AddRowCollective(std::uint32_t i, Phase phase) {
  const ModelOp& op = e_.in.model.ops[i];
  const bool leaves = e_.in.model.SpecOf(op).routed;
  const UnitId unit = UnitOf(e_.in.model.ops[leaves ? i + 1 : i - 1]);
  if (leaves && phase != Phase::kBackward) {
    SendCounts(i, phase, unit);
  }
  return e_.AddCollective(Collective(OpCode::kAllToAll, Stream::kCompute, e_.AddExperts(),
                                     e_.a.tensor_bytes[(leaves ? op.inputs : op.outputs)[0].value],
                                     e_.in.job.precision.param),
                          {phase, unit.value}, {});
}

// How many rows each expert gets is known on the device; the host, which must know how many leave
// and how many come, waits for the numbers.
void Walker::SendCounts(std::uint32_t i, Phase phase, UnitId unit) {
  const TensorId counts = e_.in.model.ops[i].inputs[1];
  const Bytes bytes = e_.a.tensor_bytes[counts.value];
  const BufferId come = e_.Alloc(bytes, Category::kTemporary, Stream::kCompute);
  e_.AddCollective(
      Collective(OpCode::kAllToAll, Stream::kCompute, e_.AddExperts(), bytes, DType::kInt64),
      {phase, unit.value},
      {{InputOf(i, 1, phase), AccessMode::kRead, Role::kInput},
       {come, AccessMode::kWrite, Role::kOutput}});
  OpShape copy;
  copy.code = OpCode::kCopyD2h;
  copy.stream = Stream::kCompute;
  copy.bytes = bytes + bytes;
  const OpId copied = e_.Add(copy, {}, phase, unit.value,
                             {{InputOf(i, 1, phase), AccessMode::kRead, Role::kInput},
                              {come, AccessMode::kRead, Role::kInput, 1}});
  e_.AddHostWait({&copied, 1}, phase, unit.value);
  e_.body->Free(come);
}

void Walker::AddExchangeOfRows(std::uint32_t i, Phase phase) {
  const std::uint32_t s = e_.a.storage_of[e_.in.model.ops[i].outputs[0].value];
  const BufferId out = (phase == Phase::kRecompute ? rerun_instance_ : forward_instance_)[s].buffer;
  if (MovesTokens(e_.in.model.SpecOf(e_.in.model.ops[i]))) {
    return MoveTokens(i, phase, InputOf(i, 0, phase), out);
  }
  AddRowCollective(i, phase);
  e_.body->Use(InputOf(i, 0, phase), AccessMode::kRead, Role::kInput,
               e_.in.model.SpecOf(e_.in.model.ops[i]).routed ? kToExperts : kFromExperts);
  e_.body->Use(out, AccessMode::kWrite, Role::kOutput);
}

void Walker::AddExchangeOfGrads(std::uint32_t i) {
  const ModelOp& op = e_.in.model.ops[i];
  const std::uint32_t grad = NewInputGrads(i, false).front();
  const BufferId from = grads_[grad_of_tensor_[op.outputs[0].value]].buffer;
  const BufferId to = grads_[grad].buffer;
  if (MovesTokens(e_.in.model.SpecOf(op))) {
    MoveTokens(i, Phase::kBackward, from, to);
  } else {
    AddRowCollective(i, Phase::kBackward);
    e_.body->Use(from, AccessMode::kRead, Role::kInput,
                 e_.in.model.SpecOf(op).routed ? kFromExperts : kToExperts);
    e_.body->Use(to, AccessMode::kWrite, Role::kOutput);
  }
  Contribute(i, op.inputs[0], grad);
}

// The products that a transfer of tokens runs beside: forward those that read what is gathered (q,
// k and v), or the one that makes what is scattered; backward the data gradient that reads what is
// gathered, or makes what is scattered: none where gradients of several are added first.
std::vector<Kernel> Walker::ProductsBeside(std::uint32_t i, bool is_backward) const {
  const Model& model = e_.in.model;
  std::vector<std::uint32_t> ops = {i - 1};
  if (model.SpecOf(model.ops[i]).kind == OpKind::kGatherTokens) {
    const auto reads = [&](std::uint32_t j) {
      return j < model.ops.size() && !model.ops[j].inputs.empty() &&
             model.ops[j].inputs.front() == model.ops[i].outputs.front();
    };
    ops = {i + 1};
    while (reads(ops.back() + 1)) {
      ops.push_back(ops.back() + 1);
    }
    if (is_backward && ops.size() > 1 && !e_.in.kernels.joined_products) {
      return {};
    }
  }
  std::vector<Kernel> products;
  for (const std::uint32_t op : ops) {
    const OpKernels& kernels = e_.a.KernelsOf(op);
    const std::vector<Kernel>& all = is_backward ? kernels.backward_data : kernels.forward;
    std::copy_if(all.begin(), all.end(), std::back_inserter(products),
                 [](const Kernel& kernel) { return kernel.kind == KernelClass::kGemm; });
  }
  return products;
}

// DTensor gathers and scatters the first dimension: tokens of several samples are put in order
// behind a gather, and those of each rank together before a scatter. On the compute stream, which
// waits for the result at once.
void Walker::MoveTokens(std::uint32_t i, Phase phase, BufferId from, BufferId to) {
  const ModelOp& op = e_.in.model.ops[i];
  const bool is_backward = phase == Phase::kBackward;
  const OpSpec& spec = e_.in.model.SpecOf(op);
  const bool swaps = spec.kind == OpKind::kExchange;  // tokens for heads
  const bool gathers = !swaps && (spec.kind == OpKind::kGatherTokens) != is_backward;
  // The op that reads what is gathered, or made what is scattered.
  const UnitId unit =
      swaps ? UnitId() : UnitOf(e_.in.model.ops[gathers != is_backward ? i + 1 : i - 1]);
  const Bytes bytes =
      std::max(e_.a.tensor_bytes[op.inputs[0].value], e_.a.tensor_bytes[op.outputs[0].value]);
  const OpKernels& kernels = e_.a.KernelsOf(i);
  const bool copies = !(is_backward ? kernels.backward_data : kernels.forward).empty();
  BufferId sent = from, received = to;
  for (BufferId* const between : {&sent, &received}) {
    // Torch's two copies of an exchange for heads are one op here; the host's are two.
    const bool is_copied = (between == &sent) != gathers || (swaps && e_.in.kernels.host_kernels);
    if (copies && is_copied) {
      *between = e_.Alloc(bytes, Category::kTemporary, Stream::kCompute);
    }
  }
  const auto copy = [&](const Access& source, const Access& target) {
    const bool packs = source.role == Role::kInput;
    AddCompute(i, phase, is_backward ? BackwardShape(i, false) : ForwardShape(i),
               packs || sent == from ? 0 : 1);
    e_.body->Use(source.buffer, AccessMode::kRead, source.role);
    e_.body->Use(target.buffer, AccessMode::kWrite, target.role);
  };
  if (sent != from) {
    copy({.buffer = from, .role = Role::kInput}, {.buffer = sent, .role = Role::kExchange});
  }
  const OpCode code = swaps     ? OpCode::kAllToAll
                      : gathers ? OpCode::kAllGather
                                : OpCode::kReduceScatter;
  const OpShape shape =
      Collective(code, Stream::kCompute, spec.context_ranks > 0 ? e_.AddContext() : e_.AddTensor(),
                 bytes, e_.in.job.precision.param);
  const Touch reads = {sent, AccessMode::kRead, Role::kExchange};
  const Touch writes = {received, AccessMode::kWrite, Role::kExchange, 1};
  if (e_.in.kernels.fused_elementwise) {  // a compiler's graph issues it, no hook of a module
    const bool is_beside = e_.in.plan.tensor_async && spec.context_ranks == 0;
    e_.Add(shape, is_beside ? ProductsBeside(i, is_backward) : std::vector<Kernel>(), phase,
           unit.value, {reads, writes});
  } else {
    e_.AddCollective(shape, {phase, unit.value}, {reads, writes});
  }
  if (sent != from) {
    e_.body->Free(sent);
  }
  if (received != to) {
    copy({.buffer = received, .role = Role::kExchange}, {.buffer = to, .role = Role::kOutput});
    e_.body->Free(received);
  }
}

// PyTorch's _templated_ring_attention. While a step computes, the keys and values of the next one
// are on their way. In backward their gradients follow them, with what each rank adds. The
// transfers have the stream of replicas, which there are none of.
BufferId Walker::AddRing(std::uint32_t i, Phase phase, BufferId workspace) {
  const RingKernels& ring = e_.a.KernelsOf(i).ring;
  const bool is_backward = phase == Phase::kBackward;
  const DType dtype = e_.in.job.precision.param;
  std::uint16_t part = 3;  // occurrence: 1 and 2 are AddCompute's others
  // Reads what came, if anything, and makes `made`.
  const auto compute = [&](const std::vector<Kernel>& kernels, const Arrival& came, BufferId made,
                           Role role) {
    OpShape shape;
    shape.dtype = dtype;
    AddCompute(i, phase, e_.Intern(shape, kernels), part++);
    is_backward ? UseForBackward(i) : UseInputs(i, phase);
    if (came.by.valid()) {
      e_.body->Use(came.buffer, AccessMode::kRead, Role::kExchange);
      e_.After(came.by);
    }
    if (made.valid()) {
      e_.body->Use(made, AccessMode::kWrite, role, 1);
    }
  };
  const auto alloc = [&](Bytes bytes) {
    return e_.Alloc(bytes, Category::kTemporary, Stream::kCompute);
  };
  const auto send = [&](OpCode code, Bytes all, BufferId sent, DType of) {
    Arrival arrival = {alloc(all), sent, {}};
    const OpId made = e_.LastCompute();
    arrival.by = e_.AddCollective(Collective(code, Stream::kReplicate, e_.AddContext(), all, of),
                                  {phase, kNoSubject},
                                  {{sent, AccessMode::kRead, Role::kInput},
                                   {arrival.buffer, AccessMode::kWrite, Role::kOutput}});
    e_.After(made);
    return arrival;
  };
  Arrival here, grads;
  for (std::int64_t step = 0; step < ring.steps; ++step) {
    Arrival next = here;
    if (step + 1 < ring.steps && (!ring.gathers || step == 0)) {
      const BufferId packed = alloc(ring.sent);
      compute(ring.pack, here, packed, Role::kExchange);
      next = ring.gathers ? send(OpCode::kAllGather, ring.sent * ring.steps, packed, dtype)
                          : send(OpCode::kPermute, ring.sent, packed, dtype);
    }
    compute(step == 0 ? (is_backward ? ring.back_first : ring.first)
                      : (is_backward ? ring.back_later : ring.later),
            here, workspace, Role::kWorkspace);
    if (here.by.valid() && (!ring.gathers || step + 1 == ring.steps)) {
      e_.body->Free(here.sent);
      e_.body->Free(here.buffer);
    }
    here = next;
    if (is_backward) {
      const BufferId sum = alloc(ring.sent_back);
      compute(ring.add, grads, sum, Role::kExchange);
      if (e_.in.kernels.host_kernels) {
        e_.body->Use(workspace, AccessMode::kRead, Role::kWorkspace);
      }
      if (grads.by.valid()) {
        e_.body->Free(grads.sent);
        e_.body->Free(grads.buffer);
      }
      grads = send(OpCode::kPermute, ring.sent_back, sum, DType::kFp32);
    }
  }
  if (grads.by.valid()) {
    e_.AddWait(Stream::kCompute, {grads.by}, phase, kNoSubject);
    e_.body->Free(grads.sent);
  }
  return grads.buffer;
}

// Each part of the op reads its inputs and makes what the ranks reduce behind it.
void Walker::AddTensorSums(std::uint32_t i, Phase phase) {
  std::uint16_t part = 3;  // occurrence: 1 and 2 are AddCompute's others
  for (const Exchange& sum : e_.a.KernelsOf(i).tensor_sums) {
    OpShape shape;
    shape.dtype = e_.in.job.precision.param;
    const BufferId numbers = e_.Alloc(sum.bytes, Category::kTemporary, Stream::kCompute);
    AddCompute(i, phase, e_.Intern(shape, sum.before), part++);
    UseInputs(i, phase);
    e_.body->Use(numbers, AccessMode::kWrite, Role::kExchange);
    e_.AddCollective(
        Collective(OpCode::kAllReduce, Stream::kCompute, e_.AddTensor(), sum.bytes, DType::kFp32),
        {phase, kNoSubject}, {{numbers, AccessMode::kReadWrite, Role::kExchange}});
    e_.body->Free(numbers);
  }
}

}  // namespace shardwright
