// One flat parameter per unit: gathering, freeing, and the moment at which its gradient is final.
//
// Example of the moment: units root (ops 0 and 7), A (ops 1 to 3) and B (ops 4 to 6). The node that
// splits a unit's flat parameter is made when forward enters the unit, so it is older than the
// nodes of all later ops. Autograd runs young nodes first, so the node of B runs after op 4's
// backward, that of A after op 1's, and that of the root after op 0's, last of all. FindFinals
// computes this order.
//
// A gather casts the shard on copy_in, allocates U and all-gathers. Parameters are views of U, so
// there is no copy-out: a layer of 5.0 MiB takes 5.0 MiB, where FSDP2 takes 10.0 MiB for a moment.
//
// The gradients of a unit exist twice for a moment, as autograd concatenates them into the flat
// one. For the layer these are 5.0 MiB of parts and 5.0 MiB of the whole. If r is fp32, the flat
// one is then cast to 10.0 MiB.

#include "schedule/lower/flat_rules.h"

#include <numeric>

#include "core/error.h"
#include "core/ranges.h"
#include "schedule/lower/layout.h"

namespace shardwright {

FlatRules::FlatRules(Emitter& emitter, const UnitSpans& spans,
                     const std::vector<ResolvedUnit>& units)
    : StepRules(emitter, spans, units),
      factors_(FactorsFor(e_.mesh.RankCount())),
      shard_group_(e_.AddGroup({Axis::kShard})),
      pending_(units.size(), false) {
  for (const ResolvedUnit& u : units) {
    is_root_.push_back(!emitter.in.model.modules[u.modules.front().value].parent.valid());
  }
  FindRequiresGrad();
}

bool FlatRules::WouldMakeNode(const ModelOp& op) const {
  return AnyOf(op.inputs, [&](TensorId t) { return requires_grad_[t.value]; }) ||
         AnyOf(op.params, [&](ParamId p) { return e_.a.param_grad[p.value]; });
}

void FlatRules::FindRequiresGrad() {
  const Model& model = e_.in.model;
  requires_grad_ = RequiringGrad(model, e_.a.param_grad);
  for (const ModelOp& op : model.ops) {
    without_grad_.push_back(IsWithoutGrad(op));
  }
  // Ops that do not say it follow the nearest op before, and the nearest one behind.
  without_grad_before_ = without_grad_behind_ = without_grad_;
  for (std::size_t i = 1; i < without_grad_.size(); ++i) {
    if (!without_grad_before_[i]) {
      without_grad_before_[i] = without_grad_before_[i - 1];
    }
  }
  for (std::size_t i = without_grad_.size(); i-- > 1;) {
    if (!without_grad_behind_[i - 1]) {
      without_grad_behind_[i - 1] = without_grad_behind_[i];
    }
  }
}

// tools/export_model.py writes detach() and .data as an op "detach"; the other ops without
// gradients run under torch.no_grad().
std::optional<bool> FlatRules::IsWithoutGrad(const ModelOp& op) const {
  const OtherCost& other = e_.in.model.SpecOf(op).other;
  if (other.function == "detach" || (!other.stops_gradient && !WouldMakeNode(op))) {
    return std::nullopt;
  }
  return other.stops_gradient;
}

bool FlatRules::IsWithoutGrad(UnitSpans::Span call) const {
  std::optional<bool> found;
  for (std::uint32_t i = call.first; i <= call.last; ++i) {
    if (without_grad_[i] == false) {
      return false;
    }
    found = without_grad_[i] ? without_grad_[i] : found;
  }
  return found ||
         (without_grad_before_[call.first] == true && without_grad_behind_[call.last] == true);
}

UnitSpans::Span FlatRules::FirstWithGrad(UnitId u) const {
  const auto& spans = spans_.spans[u.value];
  const auto found = FindIf(spans, [&](const UnitSpans::Span& s) { return !IsWithoutGrad(s); });
  return found == spans.end() ? spans.front() : *found;
}

void FlatRules::EndInit() {
  for (std::uint32_t u = 0; u < unit_count(); ++u) {
    if (IsEntered(UnitId(u))) {
      entered_.emplace_back(u);
    }
  }
  SortAll(entered_, [&](UnitId x, UnitId y) { return EntersBefore(x, y); });
}

// The outer one of two that begin with the same op is longer, or later in the plan.
bool FlatRules::EntersBefore(UnitId x, UnitId y) const {
  const UnitSpans::Span& a = spans_.spans[x.value].front();
  const UnitSpans::Span& b = spans_.spans[y.value].front();
  return a.first != b.first ? a.first < b.first : a.last != b.last ? a.last > b.last : x > y;
}

// A unit's views are older than the nodes of all ops from its first one on. Of units that enter
// with the same op the inner one's are younger.
void FlatRules::FindFinals() {
  finals_.clear();
  next_final_ = 0;
  const std::size_t op_count = e_.in.model.ops.size();
  std::vector<std::uint32_t> backward_from(op_count + 1, kNoRegion);  // lowest op at or above
  for (std::size_t i = op_count; i-- > 0;) {
    backward_from[i] =
        e_.a.ops[i].has_backward ? static_cast<std::uint32_t>(i) : backward_from[i + 1];
  }
  for (std::size_t k = entered_.size(); k-- > 0;) {
    const UnitId unit = entered_[k];
    if (spans_.grads_final[unit.value] == kNoRegion) {
      continue;
    }
    const UnitId entered = entered_[MakesViewsEarly() && k > 0 ? k - 1 : k];
    // Views of a first call that no gradient comes back to do not count.
    std::vector<UnitSpans::Span> calls;
    for (std::size_t c = 0; c < spans_.backward_from[unit.value].size(); ++c) {
      if (!spans_.backward_given[unit.value][c]) {
        calls.push_back(spans_.backward_from[unit.value][c]);
      }
    }
    const UnitSpans::Span first = FirstWithGrad(unit);
    const bool is_first = calls.empty() || calls.front().first == first.first;
    if (!is_first) {
      CheckHook(unit);
    }
    const std::uint32_t made = is_first ? FirstWithGrad(entered).first : calls.front().first;
    finals_.push_back({backward_from[made], unit});
  }
  StableSortBy(finals_, &Final::model_op, std::greater<>());
}

// Torch puts the hook that reduces a unit on the node that collects the gradient of its first call.
// Where the flat parameter is cast or comes from the host, each call has such a node of its own, as
// other data take the parameter's place meanwhile (_register_post_backward_hook of
// _runtime_utils.py, torch 2.13). A unit whose first call gets no gradient would then never be
// reduced, so it is refused.
void FlatRules::CheckHook(UnitId u) const {
  if (CastsGather(u) || plan_.offload.parameters) {
    throw InputError("plan: units[" + std::to_string(u.value) + "]",
                     "unit \"" + Info(u).name + "\" called again after a call without a gradient",
                     "one whose first call has one, or parameters that are neither cast nor "
                     "offloaded",
                     "torch would wait for the first call's gradient and not reduce the others; "
                     "leave the parameters to a unit around it");
  }
}

void FlatRules::BackwardDone(std::uint32_t model_op) {
  while (next_final_ < finals_.size() && finals_[next_final_].model_op == model_op) {
    FlatGradFinal(finals_[next_final_++].unit);
  }
}

BufferId FlatRules::ParameterStorage(UnitId u, std::uint32_t model_op) {
  const auto& spans = spans_.spans[u.value];
  const bool inside = AnyOf(
      spans, [&](const UnitSpans::Span& s) { return s.first <= model_op && model_op <= s.last; });
  const BufferId storage = InPlace(u) ? At(u).shard : At(u).unsharded;
  // Without use_orig_params a module keeps the views of its last call, which are those of the
  // optimizer's parameters if nothing is cast.
  const bool keeps_views = InPlace(u) && !plan_.use_orig_params && model_op > spans.front().first;
  if (!storage.valid() || (!inside && plan_.shard_size == 1 && !keeps_views)) {
    const Model& model = e_.in.model;
    throw InputError("plan: units[" + std::to_string(u.value) + "]",
                     "a parameter of the unit \"" + Info(u).name + "\" used in module \"" +
                         model.modules[model.ops[model_op].module.value].fqn + '"',
                     "its uses inside the unit's forward",
                     "outside of that torch has a part of the flat parameter in its place, or one "
                     "that nothing reduces; leave the parameter to a unit around both modules");
  }
  return storage;
}

std::int64_t FlatRules::GradElements(const UnitInfo& unit) const {
  return TrainablePaddedElements(e_.in.model, unit) > 0 ? unit.padded_elements : 0;
}

// With use_orig_params the optimizer sees views of the shard, one per parameter in it; otherwise
// the shard itself, padding included.
std::int64_t FlatRules::StateElements(const UnitInfo& unit) const {
  if (!plan_.use_orig_params) {
    return TrainablePaddedElements(e_.in.model, unit) > 0 ? unit.shard_elements : 0;
  }
  const std::vector<std::int64_t> tensors = FullestFlatShard(e_.in.model, unit);
  return std::accumulate(tensors.begin(), tensors.end(), std::int64_t{0});
}

std::vector<std::int64_t> FlatRules::StateTensors(UnitId u) const {
  return plan_.use_orig_params ? FullestFlatShard(e_.in.model, Info(u))
                               : std::vector<std::int64_t>{};
}

BufferId FlatRules::StageShard(UnitId u, Phase phase, std::vector<BufferId>& staged) {
  BufferId source = At(u).shard;
  if (plan_.offload.parameters) {
    staged.push_back(Hold(e_.Alloc(MasterShard(u), Category::kAllGather, Stream::kCopyIn), u,
                          Holds::kShard, job_.precision.master));
    e_.AddTransfer(OpCode::kCopyH2d, Stream::kCopyIn, {phase, u.value}, MasterShard(u), source,
                   staged.back());
    source = staged.back();
  }
  if (CastsGather(u) && plan_.shard_size > 1) {
    staged.push_back(Hold(e_.Alloc(GatherShard(u), Category::kAllGather, Stream::kCopyIn), u,
                          Holds::kShard, PrecisionOf(u).param));
    e_.AddCopy(OpCode::kCast, Stream::kCopyIn, {phase, u.value}, MasterShard(u), GatherShard(u),
               {{source, AccessMode::kRead, Role::kInput},
                {staged.back(), AccessMode::kWrite, Role::kOutput}});
    source = staged.back();
  }
  return source;
}

// `staged` are the copies that lead to the gather: 2.5 MiB of fp32 from the host if parameters are
// offloaded, 1.25 MiB of bf16 if they are cast. The gather reads them on its stream, so their frees
// record that stream.
void FlatRules::Unshard(UnitId u, Phase phase) {
  if (InPlace(u) || pending_[u.value] || At(u).unsharded.valid()) {
    return;
  }
  pending_[u.value] = true;
  std::vector<BufferId> staged;  // freed once the gather is queued; it reads them on its stream
  const BufferId source = StageShard(u, phase, staged);
  const OpId prepared = staged.empty() ? OpId() : e_.body->last();
  BeforeGather(phase, u);
  At(u).unsharded = AllocUnsharded(u);
  if (plan_.shard_size == 1) {
    e_.AddCopy(OpCode::kCast, Stream::kGather, {phase, u.value}, MasterShard(u), Unsharded(u),
               {{source, AccessMode::kRead, Role::kInput},
                {At(u).unsharded, AccessMode::kWrite, Role::kOutput}});
  } else {
    e_.AddCollective(Collective(OpCode::kAllGather, Stream::kGather, shard_group_, Unsharded(u),
                                PrecisionOf(u).param),
                     {phase, u.value},
                     {{source, AccessMode::kRead, Role::kInput},
                      {At(u).unsharded, AccessMode::kWrite, Role::kOutput}});
  }
  e_.After(prepared);
  last_gather_ = e_.body->last();
  for (const BufferId b : staged) {
    e_.body->Free(b, StreamBit(Stream::kGather));
  }
}

BufferId FlatRules::AllocUnsharded(UnitId u) {
  Buffer buffer;
  buffer.size = Unsharded(u);
  buffer.category = Category::kUnshardedParameter;
  buffer.owner = Stream::kGather;
  const BufferId id = Hold(e_.body->NewBuffer(buffer), u, Holds::kUnit, PrecisionOf(u).param);
  e_.body->Alloc(id, StaysGathered(u) ? PointKind::kAllocOnce : PointKind::kAlloc);
  return id;
}

void FlatRules::WaitForUnshard(UnitId u, Phase phase) {
  if (pending_[u.value]) {
    pending_[u.value] = false;
    e_.AddWait(Stream::kCompute, {last_gather_}, phase, u.value);
  }
}

void FlatRules::FreeUnsharded(UnitId u) {
  if (!At(u).unsharded.valid()) {
    return;
  }
  WaitForUnshard(u, Phase::kBackward);
  e_.body->Free(At(u).unsharded, StreamBit(Stream::kCompute));
  At(u).unsharded = BufferId();
  AfterFree();
}

BufferId FlatRules::FlattenGrads(UnitId u) {
  const Bytes size = MadeGrad(u, PrecisionOf(u).param);
  const BufferId flat = Hold(e_.Alloc(size, Category::kUnshardedGradient, Stream::kCompute), u,
                             HeldGrad(u), PrecisionOf(u).param);
  e_.AddCopy(OpCode::kConcatGrad, Stream::kCompute, {Phase::kBackward, u.value}, GradBytes(u), size,
             {{flat, AccessMode::kWrite, Role::kOutput}});
  ConsumeGrads(u);
  return flat;
}

BufferId FlatRules::AddKept(UnitId u, BufferId flat) {
  UnitState& state = At(u);
  if (!state.accumulated.valid()) {
    return flat;
  }
  const BufferId kept = state.accumulated;
  state.accumulated = BufferId();
  const Bytes size = MadeGrad(u, PrecisionOf(u).param);
  e_.AddCopy(
      OpCode::kGradStore, Stream::kCompute, {Phase::kBackward, u.value}, 2 * size, size,
      {{kept, AccessMode::kReadWrite, Role::kOutput}, {flat, AccessMode::kRead, Role::kInput}});
  e_.body->Free(flat);
  return kept;
}

BufferId FlatRules::CastFlat(UnitId u, BufferId flat) {
  const DType r = PrecisionOf(u).reduce;
  if (r == PrecisionOf(u).param) {
    return flat;
  }
  const BufferId cast =
      Hold(e_.Alloc(MadeGrad(u, r), Category::kReduceScatter, Stream::kReduce), u, HeldGrad(u), r);
  e_.AddCopy(OpCode::kCast, Stream::kReduce, {Phase::kBackward, u.value},
             MadeGrad(u, PrecisionOf(u).param), MadeGrad(u, r),
             {{flat, AccessMode::kRead, Role::kInput}, {cast, AccessMode::kWrite, Role::kOutput}});
  return cast;
}

// Returns the input of the reduce-scatter. Without use_orig_params the gradient has no padding, and
// parts of equal size for all ranks take a padded copy: 10 elements over 4 ranks become 12.
BufferId FlatRules::PadFlat(UnitId u, BufferId flat) {
  if (!IsPaddedLate(u)) {
    return flat;
  }
  const DType r = PrecisionOf(u).reduce;
  const BufferId padded = Hold(e_.Alloc(FlatGrad(u, r), Category::kReduceScatter, Stream::kReduce),
                               u, Holds::kShards, r);
  e_.AddCopy(
      OpCode::kReduceCopyIn, Stream::kReduce, {Phase::kBackward, u.value}, MadeGrad(u, r),
      FlatGrad(u, r),
      {{flat, AccessMode::kRead, Role::kInput}, {padded, AccessMode::kWrite, Role::kOutput}});
  return padded;
}

void FlatRules::Scale(UnitId u, BufferId buffer, Bytes bytes, Stream stream, double divisor) {
  if (divisor > 1) {
    e_.AddCopy(OpCode::kGradScale, stream, {Phase::kBackward, u.value}, bytes, bytes,
               {{buffer, AccessMode::kReadWrite, Role::kInput}}, divisor);
  }
}

}  // namespace shardwright
