// Where units begin and end in execution order; see walker.h for the result.
//
// Example: ops 0 to 7, where the root holds ops 0 and 7, block A is ops 1 to 3 and block B ops 4 to
// 6. Each op has parameters. Every op but op 0, an embedding of ids, hands a gradient to its input.
//
//   unit   spans     backward_spans   grads_final   hooked
//   root   [0, 7]    [0, 7]                     0   no: ids need no gradient
//   A      [1, 3]    [1, 3]                     1   yes: op 0 made its input
//   B      [4, 6]    [4, 6]                     4   yes
//
// The walker enters a unit before `first` and leaves it behind `last`; backward goes the other way.
// If all of A and the embedding are frozen, nothing before B needs a gradient. A then has no
// backward span, and B is not hooked.
//
// A unit with several stretches is left and entered again for each of them. If the head reads the
// embedding's weight and both are one unit with `gap: regather`, its spans are [0, 0] and [7, 7].
// With `gap: hold` they are [0, 7], and the weight stays gathered all along.

#include <iterator>
#include <map>
#include <optional>
#include <set>

#include "core/budget.h"
#include "core/ranges.h"
#include "schedule/lower/unit_parts.h"
#include "schedule/lower/walker.h"

namespace shardwright {
namespace {

// Modules are stored in pre-order, so a subtree is a contiguous range [m, end).
std::vector<std::uint32_t> SubtreeEnds(const Model& model) {
  std::vector<std::uint32_t> end(model.modules.size());
  for (std::size_t m = model.modules.size(); m-- > 0;) {
    end[m] = std::max(end[m], static_cast<std::uint32_t>(m + 1));
    const ModuleId parent = model.modules[m].parent;
    if (parent.valid()) {
      end[parent.value] = std::max(end[parent.value], end[m]);
    }
  }
  return end;
}

// The unit of each parameter; ties map to their storage's unit.
std::vector<UnitId> UnitsOfParams(const Model& model, const std::vector<ResolvedUnit>& units) {
  std::vector<UnitId> unit_of_param(model.params.size());
  for (std::uint32_t u = 0; u < units.size(); ++u) {
    for (const ParamId p : units[u].params) {
      unit_of_param[p.value] = UnitId(u);
    }
  }
  for (std::size_t p = 0; p < model.params.size(); ++p) {
    if (model.params[p].tied_to.valid()) {
      unit_of_param[p] = unit_of_param[model.params[p].tied_to.value];
    }
  }
  return unit_of_param;
}

// Limits on plans whose units overlap, or whose many parts name many modules. A step is one look at
// a module or an op. A stretch counts as 16 steps, which is about the memory it takes.
constexpr std::int64_t kMostSteps = 64'000'000;
constexpr std::int64_t kStepsPerSpan = 16;

// Per unit, the first one that has the same modules: parts of a unit have.
std::vector<std::uint32_t> FirstsAlike(const std::vector<ResolvedUnit>& units) {
  std::vector<std::uint32_t> first(units.size());
  std::map<std::pair<std::uint32_t, std::vector<ModuleId>>, std::uint32_t> seen;
  for (std::uint32_t u = 0; u < units.size(); ++u) {
    first[u] = seen.try_emplace({units[u].planned, units[u].modules}, u).first->second;
  }
  return first;
}

// Appends a stretch, or extends the last one if they touch: [1, 2] and then [3, 3] give [1, 3].
void AddTo(std::vector<UnitSpans::Span>& spans, UnitSpans::Span span) {
  if (!spans.empty() && spans.back().last + 1 >= span.first) {
    spans.back().last = std::max(spans.back().last, span.last);
  } else {
    spans.push_back(span);
  }
}

// Per unit, as maximal stretches: the ops inside the subtrees of its modules, and the ops that use
// its parameters from elsewhere (a module that is registered in several places runs in each). Units
// that have the same stretches as the one in `like` are left out; the others get themselves there.
// O(units of each op's module + parameters of ops), within the budget of `steps`.
std::vector<std::vector<UnitSpans::Span>> Stretches(const Model& model,
                                                    const std::vector<ResolvedUnit>& units,
                                                    const std::vector<UnitId>& unit_of_param,
                                                    Budget& steps,
                                                    std::vector<std::uint32_t>& like) {
  const std::vector<std::uint32_t> end = SubtreeEnds(model);
  // Units that contain each module, found by painting subtrees: total size is the sum over
  // modules of their nesting depth in units.
  std::vector<std::vector<std::uint32_t>> units_of_module(model.modules.size());
  for (std::uint32_t u = 0; u < units.size(); ++u) {
    for (std::size_t i = 0; like[u] == u && i < units[u].modules.size(); ++i) {
      const std::uint32_t root = units[u].modules[i].value;
      steps.Take(end[root] - root);
      for (std::uint32_t m = root; m < end[root]; ++m) {
        if (units_of_module[m].empty() || units_of_module[m].back() != u) {
          units_of_module[m].push_back(u);
        }
      }
    }
  }
  std::vector<std::vector<UnitSpans::Span>> inside(units.size()), elsewhere(units.size());
  for (std::uint32_t i = 0; i < model.ops.size(); ++i) {
    for (const std::uint32_t u : units_of_module[model.ops[i].module.value]) {
      AddTo(inside[u], {i, i});
    }
    for (const ParamId p : model.ops[i].params) {
      const std::uint32_t u = unit_of_param[p.value].value;
      if (inside[like[u]].empty() || inside[like[u]].back().last != i) {
        AddTo(elsewhere[u], {i, i});
      }
    }
  }
  std::vector<std::vector<UnitSpans::Span>> spans(units.size());
  std::vector<std::uint32_t> alike(units.size(), kNoRegion);  // per first unit: without elsewhere
  for (std::uint32_t u = 0; u < units.size(); ++u) {
    std::uint32_t& first = elsewhere[u].empty() ? alike[like[u]] : u;
    first = std::min(first, u);
    if (first == u) {
      steps.Take(kStepsPerSpan * std::ssize(inside[like[u]]));
      std::vector<UnitSpans::Span> all;
      std::merge(inside[like[u]].begin(), inside[like[u]].end(), elsewhere[u].begin(),
                 elsewhere[u].end(), std::back_inserter(all),
                 [](const auto& x, const auto& y) { return x.first < y.first; });
      std::for_each(all.begin(), all.end(), [&](const auto& span) { AddTo(spans[u], span); });
    }
    like[u] = first;
  }
  return spans;
}

// The forward calls of the modules that units name, as torch's hooks see them.
// Example: module `m` runs ops 1 to 2 and is called again for ops 3 to 4. Spans would join these
// into [1, 4]; calls are [1, 2] and [3, 4], since the model says that op 3 begins a call
// (called_again). FSDP2 frees and gathers the unit between them.
class CallFinder {
 public:
  CallFinder(const Model& model, const std::vector<ResolvedUnit>& units)
      : model_(model),
        targets_of_(model.modules.size()),
        latest_(model.modules.size(), 0),
        calls_(units.size()) {
    std::vector<std::uint32_t> unit_of(model.modules.size(), kNoUnit);
    for (std::uint32_t u = 0; u < units.size(); ++u) {
      for (const ModuleId m : units[u].modules) {
        unit_of[FirstNameOf(model, m).value] = u;
      }
    }
    for (std::uint32_t m = 0; m < model.modules.size(); ++m) {
      unit_of[m] = unit_of[FirstNameOf(model, ModuleId(m)).value];
      if (model.modules[m].parent.valid()) {
        targets_of_[m] = targets_of_[model.modules[m].parent.value];
      }
      const std::uint32_t unit = unit_of[m];
      if (unit != kNoUnit) {
        targets_of_[m].push_back({unit, ModuleId(m)});
      }
    }
    FindCalls();
  }

  // Per unit, its passes: a call of its module; of several modules, from the first one that is
  // entered until all have been left, or else until the model's end (_register_group_forward_hooks
  // and _force_complete_incomplete_states in _fsdp_state.py). `rules` may have nothing at that end.
  [[nodiscard]] std::vector<UnitSpans::Span> Passes(std::uint32_t u, const ResolvedUnit& unit,
                                                    const TorchRules& rules,
                                                    std::vector<UnitSpans::Ends>& ends) {
    std::set<ModuleId> modules;
    for (const ModuleId m : unit.modules) {
      modules.insert(FirstNameOf(model_, m));
    }
    std::vector<UnitSpans::Span> passes;
    std::set<ModuleId> missing;
    for (const Call& call : calls_[u]) {
      const UnitSpans::Call end{call.span, call.module.value};
      if (missing.empty()) {
        missing = modules;
        passes.push_back(call.span);
        ends.push_back({end, end});
      }
      if (call.span.last >= passes.back().last) {
        passes.back().last = call.span.last;
        ends.back().last = end;
      }
      missing.erase(FirstNameOf(model_, call.module));
    }
    if (!missing.empty()) {
      passes.back().last = static_cast<std::uint32_t>(model_.ops.size() - 1);
      ends.back().last = {passes.back(), modules.begin()->value};
      ends.back().by_model = true;
      ends.back().is_open = !rules.ends_groups;
    }
    return passes;
  }

  [[nodiscard]] std::vector<UnitSpans::Span> Calls(std::uint32_t u) const {
    return Mapped<UnitSpans::Span>(calls_[u], &Call::span);
  }

 private:
  static constexpr std::uint32_t kNoUnit = 0xffffffffu;

  struct Target {
    std::uint32_t unit = 0;
    ModuleId module;  // by the name under which it is called
  };
  struct Call {
    ModuleId module;
    UnitSpans::Span span;
  };

  void FindCalls() {
    for (std::uint32_t i = 0; i < model_.ops.size(); ++i) {
      for (const Target& target : targets_of_[model_.ops[i].module.value]) {
        std::vector<Call>& calls = calls_[target.unit];
        std::size_t& latest = latest_[target.module.value];  // behind its latest call; 0: none yet
        if (latest > 0 && calls[latest - 1].span.last + 1 == i &&
            !IsCalledAgain(model_, i, target.module)) {
          calls[latest - 1].span.last = i;
        } else {
          calls.push_back({target.module, {i, i}});
          latest = calls.size();
        }
      }
    }
  }

  const Model& model_;
  std::vector<std::vector<Target>> targets_of_;  // per module
  std::vector<std::size_t> latest_;              // likewise
  std::vector<std::vector<Call>> calls_;         // per unit, by their first op
};

// The modules that a unit names, for ZeRO-3.
class NamedModules {
 public:
  NamedModules(const Model& model, const std::vector<ModuleId>& modules) : model_(model) {
    for (const ModuleId m : modules) {
      place_.emplace(m, place_.size());
    }
  }

  // Calls f(module, its place in the list) for each that `module` is, or is inside of.
  template <class F>
  void ForEachAround(ModuleId module, F f) const {
    for (; module.valid(); module = model_.modules[module.value].parent) {
      if (const auto found = place_.find(module); found != place_.end()) {
        f(module, found->second);
      }
    }
  }
  // Is one of them `module`, inside of it, or around it?
  [[nodiscard]] bool Touch(ModuleId module) const {
    const auto next = place_.lower_bound(module);  // a subtree's modules follow its root
    bool touch = next != place_.end() && IsInside(model_, next->first, module);
    ForEachAround(module, [&](ModuleId, std::size_t) { touch = true; });
    return touch;
  }

 private:
  const Model& model_;
  std::map<ModuleId, std::size_t> place_;
};

// DeepSpeed fetches and releases with each call of a module (pre_sub_module_forward_function and
// post_sub_module_forward_function of parameter_offload.py). This splits stretches at such calls:
// of a module called twice in a row, of several modules that share a parameter, and of a module
// beside the unit's that reads the parameter.
std::vector<UnitSpans::Span> SplitAtCalls(const Model& model, const NamedModules& named,
                                          const std::vector<UnitSpans::Span>& spans) {
  std::vector<UnitSpans::Span> calls;
  for (const UnitSpans::Span& s : spans) {
    calls.push_back({s.first, s.first});
    for (std::uint32_t i = s.first + 1; i <= s.last; ++i) {
      const ModuleId reader = model.ops[i].module, before = model.ops[i - 1].module;
      bool begins = !named.Touch(reader) && (IsCalledAgain(model, i, reader) || before != reader);
      named.ForEachAround(reader, [&](ModuleId m, std::size_t) {
        begins = begins || IsCalledAgain(model, i, m) || !IsInside(model, before, m);
      });
      if (begins) {
        calls.push_back({i, i});
      }
      calls.back().last = i;
    }
  }
  return calls;
}

// The module of the unit that runs op `i`, by the name under which it is called, or the one beside
// it that does. Where nothing goes by calls, `first`.
std::uint32_t CalledModule(const LowerInput& in, const NamedModules& named, std::uint32_t i,
                           std::uint32_t first) {
  if (in.plan.dialect != Dialect::kZero3) {
    return first;
  }
  ModuleId called = in.model.ops[i].module;
  std::size_t least = in.model.modules.size();
  named.ForEachAround(called, [&](ModuleId m, std::size_t place) {
    called = place < least ? m : called;
    least = std::min(least, place);
  });
  return called.value;
}

// Does some op with a backward in `within` read a tensor from outside `span` that needs a gradient?
// Torch hooks the end of a unit's backward on these gradients. Without any, the hook never fires,
// and the unit ends with the whole backward.
bool HasInputGrads(const Model& model, const ModelAnalysis& a, UnitSpans::Span span,
                   UnitSpans::Span within) {
  for (std::uint32_t i = within.first; i <= within.last; ++i) {
    for (std::size_t k = 0; k < model.ops[i].inputs.size(); ++k) {
      const ModelOpId p = model.tensors[model.ops[i].inputs[k].value].producer;
      const bool outside = !p.valid() || p.value < span.first || p.value > span.last;
      if (outside && ((a.ops[i].input_grads >> k) & 1U) != 0) {
        return true;
      }
    }
  }
  return false;
}

// The span cut down to ops with a backward; first is kNoRegion when there is none.
UnitSpans::Span CutToBackward(const ModelAnalysis& a, UnitSpans::Span span) {
  UnitSpans::Span cut{kNoRegion, 0};
  for (std::uint32_t i = span.first; i <= span.last; ++i) {
    if (a.ops[i].has_backward) {
      cut = {std::min(cut.first, i), i};
    }
  }
  return cut;
}

// The op before whose backward the gradient of what the call returns is complete, if that is what
// it was given; kNoRegion if not. A node that stands before the call takes its place in autograd's
// order; hooks on the tensor itself wait for the op that made it.
std::uint32_t GivenBackAt(const LowerInput& in, const ModelAnalysis& a, const UnitSpans::Call& call,
                          bool has_node) {
  const Model& model = in.model;
  const std::vector<ModuleId>& returning = model.ops[call.span.last].returns_input;
  if (in.plan.dialect != Dialect::kFsdp2 && in.plan.dialect != Dialect::kFsdp1 &&
      in.plan.dialect != Dialect::kZero3) {
    return kNoRegion;
  }
  if (!IsIn(returning, ModuleId(call.module))) {
    return kNoRegion;
  }
  for (std::uint32_t i = call.span.first; i <= call.span.last; ++i) {
    for (const TensorId t : model.ops[i].inputs) {
      const ModelOpId maker = model.tensors[t.value].producer;
      if (!a.tensor_grad[t.value] || !maker.valid() || maker.value >= call.span.first) {
        continue;
      }
      std::uint32_t at = has_node ? call.span.first - 1 : maker.value;
      while (at > maker.value && !a.ops[at].has_backward) {
        --at;
      }
      return at;
    }
  }
  return kNoRegion;
}

// For a stretch of several calls whose first or last call returned its input. Backward enters the
// stretch where the last call's result has its gradient (before the op `given`). It leaves the
// stretch by the node in front of the first call. Returns true if that call has such a node.
bool StretchToGiven(const LowerInput& in, const ModelAnalysis& a, const UnitSpans::Ends& ends,
                    std::uint32_t given, UnitSpans::Span& cut) {
  if (given != kNoRegion) {
    cut.last = std::max(cut.last, given);
  }
  const std::uint32_t node = GivenBackAt(in, a, ends.first, true);
  if (node == kNoRegion) {
    return false;
  }
  std::uint32_t behind = node + 1;
  while (behind < cut.first && !a.ops[behind].has_backward) {
    ++behind;
  }
  cut.first = std::min(cut.first, behind);
  return true;
}

// Per unit, the lowest op of backward that uses its parameters, for units with some weight
// gradient. Frozen parameters count, too: an op that only hands its gradient on still reads them.
std::vector<std::uint32_t> LastUsesInBackward(const Model& model, const ModelAnalysis& a,
                                              const std::vector<UnitId>& unit_of_param,
                                              std::size_t unit_count) {
  std::vector<std::uint32_t> last(unit_count, kNoRegion);
  std::vector<bool> has_weight_grad(unit_count, false);
  for (auto i = static_cast<std::uint32_t>(model.ops.size()); i-- > 0;) {
    for (const ParamId p : model.ops[i].params) {
      const std::uint32_t u = unit_of_param[p.value].value;
      if (a.param_grad[p.value]) {
        has_weight_grad[u] = true;
      }
      if (a.ops[i].has_backward) {
        last[u] = i;
      }
    }
  }
  for (std::size_t u = 0; u < unit_count; ++u) {
    if (!has_weight_grad[u]) {
      last[u] = kNoRegion;
    }
  }
  return last;
}

// Appends to `result` the backward of the unit's stretch `k`, if it has one.
void AddBackward(const LowerInput& in, const ModelAnalysis& a, std::uint32_t u, std::size_t k,
                 UnitSpans& result) {
  const UnitSpans::Span& s = result.spans[u][k];
  const UnitSpans::Ends& ends = result.ends[u][k];
  const bool is_one_call = !ends.by_model && ends.first.span.first == ends.last.span.first;
  const bool has_node = is_one_call && in.plan.dialect != Dialect::kFsdp1;
  const std::uint32_t given = GivenBackAt(in, a, ends.last, has_node);
  UnitSpans::Span cut = CutToBackward(a, s);
  const bool is_given = cut.first == kNoRegion && given != kNoRegion;
  bool hooked = is_given || HasInputGrads(in.model, a, s, ends.first.span);
  if (is_given) {
    cut = {given, given};
  } else if (cut.first != kNoRegion && !is_one_call) {
    hooked = StretchToGiven(in, a, ends, given, cut) || hooked;
  }
  result.input_grads[u] = result.input_grads[u] || hooked;
  if (cut.first == kNoRegion) {
    return;
  }
  result.backward_spans[u].push_back(cut);
  result.backward_from[u].push_back(s);
  result.backward_hooked[u].push_back(hooked);
  result.backward_given[u].push_back(is_given);
  result.backward_reached[u].push_back(
      !ends.is_open && (given != kNoRegion || CutToBackward(a, ends.last.span).first != kNoRegion));
  result.backward_ends[u].push_back(ends);
  result.backward_first[u] = cut.last;
}

void CopySpans(std::uint32_t from, std::uint32_t to, UnitSpans& all) {
  const auto copy = [&](auto& per_unit) { per_unit[to] = per_unit[from]; };
  copy(all.spans);
  copy(all.ends);
  copy(all.first_module);
  copy(all.backward_first);
  copy(all.backward_spans);
  copy(all.backward_from);
  copy(all.backward_hooked);
  copy(all.backward_reached);
  copy(all.backward_given);
  copy(all.backward_ends);
  copy(all.input_grads);
}

}  // namespace

// Units with the same modules and stretches are computed once: `like` says which unit to copy from.
// A leaf module of ZeRO-3 with 100 parameters has 100 parts that agree in all of this.
UnitSpans FindUnitSpans(const LowerInput& in, const ModelAnalysis& a,
                        const std::vector<ResolvedUnit>& units) {
  const Model& model = in.model;
  Budget steps("plan: units", "steps to find where units begin and end", kMostSteps);
  UnitSpans result;
  result.unit_of_param = UnitsOfParams(model, units);
  result.like = FirstsAlike(units);
  result.spans = Stretches(model, units, result.unit_of_param, steps, result.like);
  const std::size_t n = units.size();
  result.grads_final = LastUsesInBackward(model, a, result.unit_of_param, n);
  result.backward_first.assign(n, kNoRegion);
  result.backward_spans.resize(n);
  result.backward_from.resize(n);
  result.backward_hooked.resize(n);
  result.backward_reached.resize(n);
  result.backward_given.resize(n);
  result.calls.resize(n);
  result.first_module.assign(n, kNoRegion);
  std::optional<CallFinder> calls;
  if (in.plan.dialect == Dialect::kFsdp2 || in.plan.dialect == Dialect::kFsdp1) {
    calls.emplace(model, units);
  }
  result.input_grads.assign(n, false);
  result.ends.resize(n);
  result.backward_ends.resize(n);
  for (std::uint32_t u = 0; u < n; ++u) {
    auto& spans = result.spans[u];
    auto& ends = result.ends[u];
    if (result.like[u] != u) {
      CopySpans(result.like[u], u, result);
      steps.Take(kStepsPerSpan * std::ssize(spans));
      continue;
    }
    for (const ModuleId m : units[u].modules) {
      result.first_module[u] = std::min(result.first_module[u], FirstNameOf(model, m).value);
    }
    for (const UnitSpans::Span& span : spans) {
      steps.Take(span.last - span.first);
    }
    const NamedModules named(model, units[u].modules);
    if (calls) {
      spans = calls->Passes(u, units[u], RulesOf(in.plan.torch), ends);
      result.calls[u] = calls->Calls(u);
    } else if (units[u].planned != kOnlyCalls &&
               in.plan.units[units[u].planned].gap == Gap::kHold && spans.size() > 1) {
      spans = {{spans.front().first, spans.back().last}};
    } else if (in.plan.dialect == Dialect::kZero3) {
      spans = SplitAtCalls(model, named, spans);
    }
    steps.Take(kStepsPerSpan * std::ssize(spans));
    for (std::size_t k = 0; k < spans.size(); ++k) {
      if (!calls) {
        const UnitSpans::Call call{spans[k],
                                   CalledModule(in, named, spans[k].first, result.first_module[u])};
        ends.push_back({call, call});
      }
      AddBackward(in, a, u, k, result);
    }
  }
  return result;
}

}  // namespace shardwright
