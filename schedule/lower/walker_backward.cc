// The backward half of Walker; see walker.h.
//
// Example: y = linear(x), z = x + y, and a loss that reads z. Backward runs:
//
//   op       writes                    dz is held by
//   loss     dz                        z
//   sum      nothing, hands dz on      x and y
//   linear   dw and a fresh dx         x, with two gradients now: accumulate_grad adds dz to dx
//            nothing more              nobody, so it is freed
//
// The sum goes into dx and not into dz, because y still holds dz when dx is made. So a residual
// stream hands on one buffer of gradients, and each block adds one kernel and no third buffer.
//
// Recomputation is part of backward. At the op that starts a region, the region's ops are written
// once more with phase `rec`, and their outputs go to the recomputed instances.

#include <utility>
#include <vector>

#include "core/error.h"
#include "core/ranges.h"
#include "schedule/lower/fusion.h"
#include "schedule/lower/walker.h"

namespace shardwright {
namespace {

// torch's checkpoint stops when it has made again as many tensors as forward kept, whoever needs
// them: behind `start`, the last op that backward needs, come those of parts that reach no loss.
std::uint32_t LastThatKept(const Emitter& e, const Region& region, std::uint32_t start) {
  std::uint32_t stop = start;
  std::vector<TensorId> needs_grad;  // what such parts have made
  for (std::uint32_t i = start + 1; i <= region.last; ++i) {
    const ModelOp& op = e.in.model.ops[i];
    const bool needs =
        !e.a.ops[i].has_backward && !e.in.model.SpecOf(op).other.stops_gradient &&
        (AnyOf(op.params, [&](ParamId p) { return e.a.param_grad[p.value]; }) ||
         AnyOf(op.inputs, [&](TensorId t) {
           return e.a.tensor_grad[t.value] ||
                  std::find(needs_grad.begin(), needs_grad.end(), t) != needs_grad.end();
         }));
    if (!needs) {
      continue;
    }
    needs_grad.insert(needs_grad.end(), op.outputs.begin(), op.outputs.end());
    if (!op.params.empty() || !e.a.KernelsOf(i).backward_data.empty()) {
      stop = i;
    }
  }
  return stop;
}

// Autograd may run an op's backward as several kernels with tensors of their own. Returns the
// largest sum of such tensors over the moments, without the gradients that are allocated anyway and
// the tensors that live to the end. With `fresh` the weights' gradients come into being here as
// well.
Bytes PeakOfMoments(const OpKernels& kernels, bool fresh) {
  Bytes most;
  for (const BackwardMoment& moment : kernels.moments) {
    const Bytes to_come = moment.to_come + (fresh ? moment.weights_to_come : Bytes(0));
    if (moment.alive > to_come) {
      most = std::max(most, moment.alive - to_come);
    }
  }
  return most;
}

}  // namespace

std::uint32_t Walker::NewGrad(BufferId buffer) {
  grads_.push_back({buffer, 1});
  return static_cast<std::uint32_t>(grads_.size() - 1);
}

void Walker::ReleaseGrad(std::uint32_t grad) {
  if (grad != kNoGrad) {
    Release(grads_[grad]);
  }
}

// Takes over one reference to `grad` as a gradient of `tensor`. The first gradient is kept as it
// is. A later one is added in place, into whichever of the two has full size and no other holder.
// If neither has, a third buffer takes the sum. A gradient is smaller than its tensor where an op
// expands one number, such as the sum of all log probabilities.
void Walker::Contribute(std::uint32_t i, TensorId tensor, std::uint32_t grad) {
  std::uint32_t& slot = grad_of_tensor_[tensor.value];
  if (slot == kNoGrad) {
    slot = grad;
    return;
  }
  const Bytes bytes = e_.a.tensor_bytes[tensor.value];
  const Kernel add = GradientSumKernel(bytes, e_.in.job.precision.param);
  OpShape shape;
  shape.code = OpCode::kAccumulateGrad;
  shape.bytes = bytes;
  const auto takes_sum = [&](std::uint32_t g) {
    return grads_[g].refs == 1 && e_.program.buffers[grads_[g].buffer.value].size >= bytes;
  };
  std::uint32_t target = takes_sum(slot) ? slot : grad;
  std::uint32_t other = target == slot ? grad : slot;
  if (takes_sum(target)) {
    e_.Add(shape, {&add, 1}, Phase::kBackward, i,
           {{grads_[target].buffer, AccessMode::kReadWrite, Role::kOutput},
            {grads_[other].buffer, AccessMode::kRead, Role::kInput}});
  } else {
    const BufferId sum = e_.Alloc(bytes, Category::kActivationGradient, Stream::kCompute);
    e_.Add(shape, {&add, 1}, Phase::kBackward, i,
           {{sum, AccessMode::kWrite, Role::kOutput},
            {grads_[target].buffer, AccessMode::kRead, Role::kInput},
            {grads_[other].buffer, AccessMode::kRead, Role::kInput, 1}});
    ReleaseGrad(target);
    target = NewGrad(sum);
  }
  ReleaseGrad(other);
  slot = target;
}

// KernelSetOptions::fused_residual: does the norm or the linear layer add its data gradient to the
// one that is there, which nobody else holds? One that ends with GELU's derivative cannot, nor one
// that runs the loss.
bool Walker::AddsItsGradient(std::uint32_t i) const {
  const ModelOp& op = e_.in.model.ops[i];
  if (!e_.in.kernels.fused_residual || e_.a.ops[i].input_grads == 0) {
    return false;
  }
  const bool is_product = e_.in.model.SpecOf(op).kind == OpKind::kLinear &&
                          !e_.a.ops[i].runs_previous && !e_.a.ops[i].runs_loss;
  if (!is_product && !IsNormOfWhole(e_.in.model, op)) {
    return false;
  }
  const std::uint32_t tensor = op.inputs.front().value;
  const std::uint32_t slot = grad_of_tensor_[tensor];
  return slot != kNoGrad && grads_[slot].refs == 1 &&
         e_.program.buffers[grads_[slot].buffer.value].size == e_.a.tensor_bytes[tensor];
}

// Ops whose backward runs no kernel (a sum, a view) hand their gradient on.
void Walker::PassGradThrough(std::uint32_t i) {
  const ModelOp& op = e_.in.model.ops[i];
  for (std::size_t k = 0; k < op.inputs.size(); ++k) {
    if (((e_.a.ops[i].input_grads >> k) & 1U) == 0) {
      continue;
    }
    // Output k for ops with as many outputs as inputs (views), output 0 otherwise (sums).
    const std::size_t out = op.outputs.size() == op.inputs.size() ? k : 0;
    const std::uint32_t grad = grad_of_tensor_[op.outputs[out].value];
    if (grad == kNoGrad) {
      continue;
    }
    ++grads_[grad].refs;
    Contribute(i, op.inputs[k], grad);
  }
}

void Walker::ReleaseSaved(std::uint32_t i) {
  const bool holds_logits = e_.in.kernels.keeps_logits &&
                            e_.in.model.SpecOf(e_.in.model.ops[i]).kind == OpKind::kCrossEntropy;
  ForEachSaved(e_.a, e_.in.model, i, [&](std::uint32_t s, Role role, std::uint16_t position) {
    if (holds_logits && role == Role::kInput && position == 0) {
      logits_.push_back(&InstanceFor(s, i));
    } else {
      Release(InstanceFor(s, i));
    }
  });
  for (BufferId* kept : {&extra_[i], &early_[i]}) {
    if (kept->valid()) {
      e_.body->Free(std::exchange(*kept, BufferId()));
    }
  }
}

BufferId Walker::NewBackwardWorkspace(const OpKernels& kernels) {
  const bool is_later = part_ == Part::kWeights && !e_.in.kernels.host_kernels;
  if (kernels.backward_workspace == Bytes(0) || is_later) {
    return {};
  }
  return e_.AllocPieces(kernels.backward_workspace,
                        e_.InternPieces(kernels.backward_workspace_tensors), Category::kTemporary,
                        Stream::kCompute);
}

// By input; none where it wants no gradient, or where the op adds to one that is there. One that
// overwrites the input takes its buffer over, which the input then leaves to it.
std::vector<std::uint32_t> Walker::NewInputGrads(std::uint32_t i, bool adds) {
  const ModelOp& op = e_.in.model.ops[i];
  std::vector<std::uint32_t> grads(op.inputs.size(), kNoGrad);
  for (std::size_t j = 0; j < op.inputs.size(); ++j) {
    if (((e_.a.ops[i].input_grads >> j) & 1U) == 0 || adds) {
      continue;
    }
    const Bytes bytes = e_.a.tensor_bytes[op.inputs[j].value];
    const std::uint32_t storage = e_.a.storage_of[op.inputs[j].value];
    if (((e_.a.KernelsOf(i).overwrites_input >> j) & 1U) != 0) {
      Instance& input = InstanceFor(storage, i);
      if (input.refs == 1 && e_.a.storages[storage].bytes == bytes) {
        ++input.refs;
        grads[j] = NewGrad(input.buffer);
        continue;
      }
    }
    grads[j] = NewGrad(e_.Alloc(bytes, Category::kActivationGradient, Stream::kCompute));
  }
  return grads;
}

// The op's backward kernels, with their gradients in and out.
void Walker::AddBackwardOp(std::uint32_t i) {
  FetchBeside(i);
  rules_.BeforeBackwardOp(i);
  const ModelOp& op = e_.in.model.ops[i];
  const ModelOpFacts& facts = e_.a.ops[i];
  const OpKernels& kernels = e_.a.KernelsOf(i);
  BufferId workspace = NewBackwardWorkspace(kernels);  // may take turns with the gradients
  if (early_[i].valid() && part_ != Part::kData) {     // the peak of moments stands for it
    e_.body->Free(std::exchange(early_[i], BufferId()));
  }
  const bool adds = AddsItsGradient(i);
  const std::vector<std::uint32_t> input_grads = NewInputGrads(i, adds || !MakesData(i));
  DialectRules::GradTarget weight;
  const std::size_t buffers = e_.program.buffers.size();
  if (MakesWeights(i)) {
    weight = rules_.WeightGradTarget(i, UnitOf(op));
  }
  const bool is_fresh =
      part_ == Part::kData || (weight.buffer.valid() && weight.buffer.value >= buffers);
  const Bytes peak = PeakOfMoments(kernels, is_fresh);
  if (peak > Bytes(0) && part_ != Part::kWeights) {
    workspace = e_.Alloc(peak, Category::kTemporary, Stream::kCompute);
  }
  BufferId loss;
  if (facts.runs_loss) {
    loss = e_.Alloc(e_.a.tensor_bytes[e_.in.model.ops[i + 1].outputs.front().value],
                    Category::kTemporary, Stream::kCompute);
  }
  BufferId exchanged = AddRing(i, Phase::kBackward, workspace);
  if (kernels.backward_exchange.bytes > Bytes(0) && MakesData(i)) {
    exchanged = AddBackwardExchange(i, weight);
    weight = {};
  }
  MakeWhole(i, Phase::kBackward);
  AddCompute(i, Phase::kBackward, BackwardShape(i, adds),
             part_ == Part::kWeights ? 2 : (exchanged.valid() ? 1 : 0));
  UseForBackward(i);
  DropWhole();
  if (adds) {
    e_.body->Use(grads_[grad_of_tensor_[op.inputs.front().value]].buffer, AccessMode::kReadWrite,
                 Role::kInputGrad);
  }
  for (std::size_t j = 0; j < input_grads.size(); ++j) {
    if (input_grads[j] != kNoGrad) {
      e_.body->Use(grads_[input_grads[j]].buffer, AccessMode::kWrite, Role::kInputGrad,
                   static_cast<std::uint16_t>(j));
    }
  }
  if (weight.buffer.valid()) {
    e_.body->Use(weight.buffer, weight.mode, Role::kParamGrad);
  }
  if (facts.runs_loss) {
    e_.body->Use(loss, AccessMode::kWrite, Role::kLoss);
    e_.body->Free(loss);
  }
  if (workspace.valid()) {
    e_.body->Use(workspace, AccessMode::kWrite, Role::kWorkspace);
    e_.body->Free(workspace);
  }
  if (exchanged.valid()) {
    e_.body->Use(exchanged, AccessMode::kRead, Role::kExchange);
    e_.body->Free(exchanged);
  }
  for (std::size_t j = 0; j < input_grads.size(); ++j) {
    if (input_grads[j] != kNoGrad) {
      Contribute(i, op.inputs[j], input_grads[j]);
    }
  }
  if (MakesWeights(i)) {
    rules_.WeightGradWritten(i, UnitOf(op));
  }
}

// The reads of the op's backward: gradients of its outputs, saved tensors, private saved bytes, and
// parameters if some input needs a gradient. A weight's gradient alone does not read the weight,
// but those of the host's experts do, in the products up to the activation.
void Walker::UseForBackward(std::uint32_t i) {
  const ModelOp& op = e_.in.model.ops[i];
  std::uint16_t index = 0;
  for (const TensorId t : op.outputs) {
    if (grad_of_tensor_[t.value] != kNoGrad) {
      e_.body->Use(grads_[grad_of_tensor_[t.value]].buffer, AccessMode::kRead, Role::kOutputGrad,
                   index);
    }
    ++index;
  }
  ForEachSaved(e_.a, e_.in.model, i, [&](std::uint32_t s, Role role, std::uint16_t position) {
    e_.body->Use(InstanceFor(s, i).buffer, AccessMode::kRead, role, position);
  });
  if (extra_[i].valid()) {
    e_.body->Use(extra_[i], AccessMode::kRead, Role::kSaved);
  }
  if (MakesData(i) || (part_ == Part::kWeights && e_.in.kernels.host_kernels &&
                       e_.in.model.SpecOf(op).kind == OpKind::kExperts)) {
    UseParameters(i);
  }
}

// Three kinds of ops: exchanges between ranks, ops that hand their gradient on, and all others.
// Afterwards the saved tensors and the gradients of the outputs each lose a reference, unless the
// gradients of weights come later.
void Walker::BackwardOp(std::uint32_t i) {
  const Model& model = e_.in.model;
  const ModelOp& op = model.ops[i];
  for (const TensorId t : op.outputs) {
    // An output nobody read is a result of the model: its gradient is given from outside.
    const TensorRole role = model.tensors[t.value].role;
    if (grad_of_tensor_[t.value] == kNoGrad && e_.a.tensor_grad[t.value] &&
        !e_.a.ops[i].runs_loss && (role == TensorRole::kActivation || role == TensorRole::kFp32)) {
      grad_of_tensor_[t.value] = NewGrad(e_.Alloc(
          e_.a.tensor_bytes[t.value], Category::kActivationGradient, Stream::kCompute, true));
    }
  }
  if (IsExchange(i)) {
    AddExchangeOfGrads(i);
  } else if (e_.a.KernelsOf(i).backward_data.empty() && !e_.a.ops[i].weight_grad) {
    PassGradThrough(i);
  } else if (MakesData(i) || MakesWeights(i)) {
    AddBackwardOp(i);
  }
  rules_.AfterBackwardOp(i);
  if (part_ == Part::kData) {
    if (e_.a.ops[i].weight_grad) {
      return;
    }
  } else {
    ReleaseSaved(i);
  }
  for (const TensorId t : op.outputs) {
    ReleaseGrad(std::exchange(grad_of_tensor_[t.value], kNoGrad));
  }
}

// In the order of the parameters, as stage_backward_weight of torch's _backward.py takes them; of
// ops that share some, the last first.
std::vector<std::uint32_t> Walker::OpsWithWeights() const {
  std::vector<std::uint32_t> ops;
  for (std::uint32_t i = e_.Stage().end; i-- > e_.Stage().begin;) {
    if (e_.a.ops[i].weight_grad) {
      ops.push_back(i);
    }
  }
  StableSort(ops, [&](std::uint32_t x, std::uint32_t y) {
    return e_.a.grad_group[x] < e_.a.grad_group[y];
  });
  return ops;
}

// Autograd keeps what forward has saved until the gradients of weights are there: each of them is
// found from its op's node, which holds the nodes before it (torch 2.13, stage_backward_input).
// Those behind the `last` such op go with the stage's output.
void Walker::EndWeights(std::uint32_t last) {
  for (std::uint32_t i = e_.Stage().begin; i < e_.Stage().end; ++i) {
    const ModelOpFacts& facts = e_.a.ops[i];
    if (facts.has_backward && (part_ == Part::kData ? i > last : i < last && !facts.weight_grad)) {
      ReleaseSaved(i);
    }
  }
}

// Example: a block "norm, up, gelu, down, sum". Backward has left the gradients of what norm, up
// and down made; each goes behind its op here.
void Walker::WeightGrads() {
  SwapInFlight();
  part_ = Part::kWeights;
  const std::vector<std::uint32_t> ops = OpsWithWeights();
  for (const std::uint32_t i : ops) {
    BackwardOp(i);
  }
  EndWeights(*std::max_element(ops.begin(), ops.end()));
  ReleaseSent();
  part_ = Part::kAll;
  in_flight_.erase(Place());
}

// Runs the region's ops again. Units that do not cover the region go through their forward hooks
// once more, which is why checkpointing around several units costs extra gathers. Under PyTorch's
// hooks the module runs until the last op has saved what it keeps, `stop`, whatever is made again.
void Walker::Recompute(const Region& region, std::uint32_t stop) {
  running_ = static_cast<std::uint32_t>(&region - e_.a.regions.data());
  rules_.InRegion(running_, Phase::kRecompute);
  const auto inside = [&](const Event& event) { return !Covers(event, region); };
  for (std::uint32_t u = 0; u < spans_.spans.size(); ++u) {
    const auto reaches_in = [&](const UnitSpans::Span& s) {
      return s.first < region.first && s.last >= region.first && s.last < region.last;
    };
    if (AnyOf(spans_.spans[u], reaches_in)) {
      rules_.PreForward(UnitId(u), Phase::kRecompute);
    }
  }
  std::size_t next = 0;
  for (std::uint32_t i = region.first; i <= stop; ++i) {
    for (const Event& event : enter_.At(i)) {
      if (inside(event)) {
        rules_.PreForward(event.unit, Phase::kRecompute);
      }
    }
    for (const Event& event : called_.At(i)) {
      if (inside(event)) {
        rules_.ModuleCalled(event.unit, Phase::kRecompute);
      }
    }
    if (next < region.rerun.size() && region.rerun[next] == i) {
      ForwardOp(i, Phase::kRecompute);
      ++next;
    }
    for (const Event& event : leave_.At(i)) {
      // Of several modules one outside the region does not run again, and nothing ends the pass.
      const bool is_open = i == stop || event.span.first < region.first;
      if (inside(event) && !(StopsEarly() && is_open)) {
        rules_.PostForward(event.unit, Phase::kRecompute);
      }
    }
  }
  rules_.InRegion(kNoRegion, Phase::kRecompute);
  running_ = kNoRegion;
}

// Are the unit's hooks around the region? Those of DeepSpeed sit on the module that a checkpoint
// runs, not on the checkpoint.
bool Walker::Covers(const Event& event, const Region& region) const {
  const bool is_same = event.span.first == region.first && event.span.last == region.last;
  return event.span.first <= region.first && event.span.last >= region.last &&
         !(is_same && e_.in.plan.dialect == Dialect::kZero3);
}

// PreBackward of the units entered at op i: those that cover `region` (or all, without one), or
// those strictly inside it.
void Walker::FireBackwardEntries(std::uint32_t i, bool covering, const Region* region) {
  for (const Event& event : back_enter_.At(i)) {
    if ((region == nullptr || Covers(event, *region)) == covering) {
      rules_.PreBackward(event.unit);
    }
  }
}

// The ends of units behind op `i`, and those of calls that returned what they were given.
void Walker::FireEnds(std::span<const Event> events, std::uint32_t i) {
  for (std::size_t k = 0; k < events.size(); ++k) {
    if (!events[k].is_given) {
      const std::size_t u = events[k].unit.value;
      rules_.BackwardLeft(events[k].unit, i == spans_.backward_spans[u].front().first);
      continue;
    }
    std::vector<UnitId> together = {events[k].unit};
    while (k + 1 < events.size() && events[k + 1].is_given &&
           events[k + 1].call.last == events[k].call.last) {
      together.push_back(events[++k].unit);
    }
    rules_.GivenBack(together);
  }
}

// At the end of a region's backward: results held until then, and kept results that nothing read.
void Walker::ReleaseHeld(std::uint32_t region) {
  if (region == kNoRegion) {
    return;
  }
  for (const std::uint32_t s : e_.a.regions[region].held) {
    Release(rerun_instance_[s]);
  }
  for (const std::uint32_t s : e_.a.regions[region].kept_unread) {
    Release(forward_instance_[s]);
  }
}

void Walker::TakeFetched(const ActivationOffload::Fetched& fetched) {
  for (const auto& [storage, buffer] : fetched) {
    forward_instance_[storage].buffer = buffer;
  }
}

// Offloaded activations that take turns come back beside large products.
void Walker::FetchBeside(std::uint32_t i) {
  if (!products_.empty() && products_[i]) {
    TakeFetched(offload_->NextProduct());
  }
}

// Per op in reverse order, with a backward. First come ends of calls that returned their input,
// hooks of units that begin, and recomputation if a region starts. The op follows, then hooks of
// gradients and of units that end. Under torch's early-stopping checkpoint all hooks come before
// the recomputation. Under other checkpoints those of units inside the region come behind it.
void Walker::Backward(bool leaves_weights) {
  SwapInFlight();
  part_ = leaves_weights ? Part::kData : Part::kAll;
  std::fill(grad_of_tensor_.begin(), grad_of_tensor_.end(), kNoGrad);
  grads_.clear();
  BeginStageBackward();
  for (std::uint32_t i = e_.Stage().end; i-- > e_.Stage().begin;) {
    if (!e_.a.ops[i].has_backward) {
      continue;
    }
    if (backward_mark_[i]) {
      e_.body->MarkLayer();
      if (offload_) {
        TakeFetched(offload_->NextBackwardLayer(i));
      }
    }
    const bool starts = region_start_[i] != kNoRegion;
    const Region* region = starts ? &e_.a.regions[region_start_[i]] : nullptr;
    const bool hooks_first = StopsEarly();
    FireEnds(back_given_.At(i), i);
    FireBackwardEntries(i, true, region);
    if (starts && hooks_first) {
      FireBackwardEntries(i, false, region);
    }
    rules_.BackwardBegins(i);
    if (starts && (StopsEarly() || !region->rerun.empty())) {
      Recompute(*region, StopsEarly() ? LastThatKept(e_, *region, i) : region->rerun.back());
    }
    if (starts && !hooks_first) {
      FireBackwardEntries(i, false, region);
      rules_.BackwardBegins(i);
    }
    BackwardOp(i);
    ReleaseHeld(region_end_[i]);
    for (const Event& event : back_final_.At(i)) {
      rules_.GradientsFinal(event.unit);
    }
    rules_.BackwardDone(i);
    FireEnds(back_leave_.At(i), i);
  }
  for (Instance* logits : std::exchange(logits_, {})) {
    Release(*logits);
  }
  EndStageBackward();
  if (leaves_weights) {
    const std::vector<std::uint32_t> ops = OpsWithWeights();
    EndWeights(*std::max_element(ops.begin(), ops.end()));
    SwapInFlight();
    return;
  }
  ReleaseSent();
  in_flight_.erase(Place());
}

}  // namespace shardwright
