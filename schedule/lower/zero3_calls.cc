// Which module a hook of stage 3 belongs to, and whether it releases the module.
//
// DeepSpeed counts, per module and not per call, the inputs that still wait for a gradient
// (ds_grads_remaining of parameter_offload.py). A forward call sets the count anew, a backward call
// takes one away, and the module is released when nothing is left.
//
// Example: a module is called twice in forward. Both calls set the count to 1. Backward of the
// second call takes it to 0 and releases the module. Backward of the first call fetches it again,
// takes the count to -1 and releases nothing. An embedding's input needs no gradient, so its count
// is 0 and backward never releases it.

#include <set>
#include <utility>

#include "core/error.h"
#include "core/ranges.h"
#include "models/model.h"
#include "schedule/lower/zero3_rules.h"

namespace shardwright {
namespace {

// The module of the unit that is called, or the one beside it that reads its parameter, by its
// first name. `named`: the unit's modules.
ModuleId ModuleOf(const Model& model, const ResolvedUnit& unit, const std::set<ModuleId>& named,
                  const UnitSpans::Call& call) {
  const ModuleId called(call.module), first = FirstNameOf(model, called);
  const auto next = named.lower_bound(first);  // a subtree's modules follow its root
  const bool is_around = next != named.end() && IsInside(model, *next, first);
  const bool is_named = called != model.ops[call.span.first].module || named.contains(called);
  return is_around && !is_named ? FirstNameOf(model, unit.modules.front()) : first;
}

// Does the module run under torch.no_grad() with all of the module that calls it? Then no input
// needs a gradient: the hook of the outermost module called so hands on a tensor without one.
bool IsStoppedWithCaller(const Model& model, const std::vector<bool>& requires_grad,
                         const UnitSpans::Call& call) {
  ModuleId caller = model.modules[call.module].parent;
  while (caller.valid() && IsContainer(model.modules[caller.value].class_name)) {
    caller = model.modules[caller.value].parent;  // nothing calls a list
  }
  if (!caller.valid()) {
    return false;
  }
  const auto stops = [&](std::uint32_t op) {
    const std::vector<TensorId>& made = model.ops[op].outputs;
    return NoneOf(made, [&](TensorId t) { return requires_grad[t.value]; });
  };
  const auto is_in = [&](std::uint32_t op) {
    return IsInside(model, model.ops[op].module, caller);
  };
  const auto count = static_cast<std::uint32_t>(model.ops.size());
  bool is_stopped = true;  // ends at the first op that needs a gradient: O(ops of the call)
  for (std::uint32_t i = call.span.first; is_stopped && i <= call.span.last; ++i) {
    is_stopped = stops(i);
  }
  for (std::uint32_t i = call.span.first; is_stopped && i > 0 && is_in(i - 1); --i) {
    is_stopped = stops(i - 1);
  }
  for (std::uint32_t i = call.span.last + 1; is_stopped && i < count && is_in(i); ++i) {
    is_stopped = stops(i);
  }
  return is_stopped;
}

}  // namespace

// DeepSpeed registers hooks with the children of each module, of which torch lists each once.
void Zero3Rules::CountNames() {
  const Model& model = e_.in.model;
  std::set<std::pair<ModuleId, ModuleId>> seen;  // a parent's name and the child
  std::vector<bool> counts(model.modules.size(), false);
  for (std::uint32_t m = 0; m < model.modules.size(); ++m) {
    const ModuleId parent = model.modules[m].parent, first = FirstNameOf(model, ModuleId(m));
    counts[m] = (!parent.valid() || counts[parent.value]) && seen.emplace(parent, first).second;
    names_[first.value] += counts[m] ? 1 : 0;
  }
}

void Zero3Rules::FindCalls(const std::vector<ResolvedUnit>& units) {
  const Model& model = e_.in.model;
  const std::vector<bool> requires_grad = RequiringGrad(model, e_.a.param_grad);
  const auto is_hooked = [&](const UnitSpans::Span& call) {
    for (std::uint32_t i = call.first; i <= call.last; ++i) {
      for (const TensorId t : model.ops[i].inputs) {
        const ModelOpId p = model.tensors[t.value].producer;
        const bool outside = !p.valid() || p.value < call.first;
        if (outside && requires_grad[t.value]) {
          return true;
        }
      }
    }
    return false;
  };
  for (std::uint32_t u = 0; u < units.size(); ++u) {
    Calls& calls = calls_[u];
    if (spans_.like[u] != u) {
      calls = calls_[spans_.like[u]];
    }
    const bool is_new = spans_.like[u] == u;
    const std::set<ModuleId> named(units[u].modules.begin(), units[u].modules.end());
    auto from = spans_.backward_from[u].begin();
    for (std::size_t k = 0; is_new && k < spans_.spans[u].size(); ++k) {
      const UnitSpans::Span& span = spans_.spans[u][k];
      if (from != spans_.backward_from[u].end() && from->first == span.first) {
        calls.with_backward.push_back(k);
        ++from;
      }
      calls.all.push_back(
          {ModuleOf(model, units[u], named, spans_.ends[u][k].first),
           is_hooked(span) && !IsStoppedWithCaller(model, requires_grad, spans_.ends[u][k].first)});
    }
    for (const Call& call : calls.all) {
      std::vector<UnitId>& of = units_of_[call.module.value];
      if (of.empty() || of.back() != UnitId(u)) {
        of.push_back(UnitId(u));
      }
    }
  }
}

// Recomputation calls again what the region has called.
void Zero3Rules::InRegion(std::uint32_t region, Phase phase) {
  if (phase != Phase::kRecompute || region == kNoRegion) {
    return;
  }
  again_from_ = e_.a.regions[region].first;
  ++regions_again_;
}

// The unit's calls, its next one as the regions that ran again have left it.
Zero3Rules::Calls& Zero3Rules::CallsOf(UnitId u) {
  Calls& calls = calls_[u.value];
  if (std::exchange(calls.regions_again, regions_again_) != regions_again_) {
    const auto& spans = spans_.spans[u.value];
    const auto call =
        std::partition_point(spans.begin(), spans.end(),
                             [&](const UnitSpans::Span& span) { return span.last < again_from_; });
    calls.next_forward = static_cast<std::size_t>(call - spans.begin());
  }
  return calls;
}

const Zero3Rules::Call& Zero3Rules::NextForwardCall(UnitId u) {
  Calls& calls = CallsOf(u);
  return calls.all[std::min(calls.next_forward++, calls.all.size() - 1)];
}

// Have all units with parameters of the module been told of its call?
bool Zero3Rules::AllCalled(ModuleId module) {
  std::size_t& called = called_[module.value];
  called = (called + 1) % units_of_[module.value].size();
  return called == 0;
}

void Zero3Rules::PreForward(UnitId u, Phase phase) {
  if (!InPlace()) {
    BeginGathers(phase);
  }
  const Call& call = NextForwardCall(u);
  if (RunsPolicyBefore(job_) && call.module == ModuleId(0) && phase == Phase::kForward &&
      calls_[u.value].next_forward > 1) {
    order_.EndPass();
    order_.BeginPass();
  }
  if (AllCalled(call.module)) {
    hooks_left_[call.module.value] = call.hooked ? 1 : 0;
    FetchModule(call.module, phase);
    if (phase == Phase::kRecompute) {
      KeepRecomputed(call.module);
    }
  }
}

// Frozen parameters are kept by the module whose backward was fetched for last, too, until that is
// over (update_recompute_parameters): those that train have a backward of their own to go with.
void Zero3Rules::KeepRecomputed(ModuleId module) {
  for (const UnitId u : units_of_[module.value]) {
    if (InPlace() || backward_.empty() || !HasParams(u) || IsTrainable(u)) {
      continue;
    }
    Backward& owner = backward_.back();
    AddOnce(calls_[u.value].active, owner.module);
    AddOnce(owner.recomputed, u);
  }
}

void Zero3Rules::PostForward(UnitId u, Phase /*phase*/) {
  const Calls& calls = CallsOf(u);
  const ModuleId module = calls.all[std::min(calls.next_forward, calls.all.size()) - 1].module;
  if (AllCalled(module)) {
    ReleaseModule(module);
  }
}

void Zero3Rules::PreBackward(UnitId u) {
  Calls& calls = calls_[u.value];
  --calls.next_backward;
  const ModuleId module = calls.all[calls.with_backward[calls.next_backward]].module;
  if (AllCalled(module)) {
    if (!IsIn(backward_, module, &Backward::module)) {
      backward_.push_back({module, {}});
    }
    FetchModule(module, Phase::kBackward);
  }
}

void Zero3Rules::BackwardLeft(UnitId u, bool /*done*/) {
  const Calls& calls = calls_[u.value];
  const Call& call = calls.all[calls.with_backward[calls.next_backward]];
  if (AllCalled(call.module) && call.hooked && --hooks_left_[call.module.value] == 0) {
    ReleaseBackward(call.module);
  }
}

void Zero3Rules::GivenBack(std::span<const UnitId> units) {
  for (const UnitId u : units) {
    PreBackward(u);
  }
}

// A module that runs again behind its hook before backward is released, if the checkpoint does not
// stop in it: a part that reaches no loss comes behind.
BufferId Zero3Rules::ParameterStorage(UnitId u, std::uint32_t model_op) {
  if (InPlace() || !IsAway(u)) {
    return InPlace() ? low_[u.value] : At(u).unsharded;
  }
  const Model& model = e_.in.model;
  throw InputError("plan: recompute",
                   "module \"" + model.modules[model.ops[model_op].module.value].fqn +
                       "\" in a region, with a part behind it there that reaches no loss",
                   "a region that ends with what backward begins with",
                   "DeepSpeed releases the module when the region has run again, before its "
                   "backward; torch fails: the size of tensor a (0) must match the size of tensor "
                   "b");
}

}  // namespace shardwright
