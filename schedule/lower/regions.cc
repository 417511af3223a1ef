// Which ops run again in backward, and what their second run makes available.
//
// Example: one block of a Llama, fully checkpointed. Forward keeps the block's input and output
// only. In backward these ops run again, in this order: input norm, q, k, v, rope, attention, o,
// first sum, second norm, gate, up, gated activation. `down` and the second sum do not: no op of
// the block keeps their results, and torch's checkpoint stops early.
//
// Example: the same block under a selective checkpoint that keeps attention and every second linear
// layer. Forward keeps the results of q (0th), v (2nd), attention, gate (4th) and down (6th). Only
// the input norm, k, rope, o, the first sum, the second norm, up and the gated activation run
// again.
//
// FindReruns walks a region backwards from its last op. It marks an op if a later op of the region
// needs its output and forward did not keep it, and then needs the op's own inputs. So a region
// costs O(its ops), and nested regions cost their ops twice.
//
// A storage may thus exist twice: the instance from forward and the recomputed one. An op of the
// region reads the recomputed one, an op outside of it the one from forward.

#include "schedule/lower/regions.h"

#include <string_view>
#include <unordered_map>
#include <unordered_set>

#include "core/error.h"
#include "core/ranges.h"
#include "schedule/lower/walker.h"
#include "schedule/wrap.h"

namespace shardwright {
namespace {

// The stretch of ops inside each module; first: kNoRegion for one that runs none. O(ops * depth).
std::vector<Region> FindStretches(const Model& model) {
  std::vector<Region> stretches(model.modules.size());
  for (Region& r : stretches) {
    r.first = kNoRegion;
  }
  for (std::uint32_t i = 0; i < model.ops.size(); ++i) {
    for (ModuleId m = model.ops[i].module; m.valid(); m = model.modules[m.value].parent) {
      Region& r = stretches[m.value];
      r.first = std::min(r.first, i);
      r.last = i;
    }
  }
  return stretches;
}

[[noreturn]] void FailWithoutOps(const Model& model, ModuleId module, const std::string& where) {
  throw InputError(where, '"' + model.modules[module.value].fqn + '"',
                   "a module that runs ops in forward");
}

const Region& RegionOf(const Model& model, const std::vector<Region>& stretches, ModuleId module,
                       const std::string& where) {
  if (stretches[module.value].first == kNoRegion) {
    FailWithoutOps(model, module, where);
  }
  return stretches[module.value];
}

// The calls of each wanted module, by whatever name: each is checkpointed by itself. By the
// module's first name; O(ops * depth).
std::vector<std::vector<Region>> FindCalls(const Model& model, const std::vector<bool>& wanted) {
  std::vector<std::vector<Region>> calls(model.modules.size());
  std::vector<ModuleId> called_as(model.modules.size());
  for (std::uint32_t i = 0; i < model.ops.size(); ++i) {
    for (ModuleId m = model.ops[i].module; m.valid(); m = model.modules[m.value].parent) {
      const ModuleId first = FirstNameOf(model, m);
      if (!wanted[first.value]) {
        continue;
      }
      std::vector<Region>& of_module = calls[first.value];
      const bool goes_on = !of_module.empty() && of_module.back().last + 1 == i &&
                           called_as[first.value] == m && !IsCalledAgain(model, i, m);
      if (!goes_on) {
        of_module.emplace_back();
        of_module.back().first = i;
        called_as[first.value] = m;
      }
      of_module.back().last = i;
    }
  }
  return calls;
}

// Which ops of the region keep their outputs from forward under selective checkpointing: fused
// attention, convolutions and every N-th product of two matrices, a router's among them. The same
// list is _selective_contexts of planner/emitters/python/shardwright_plan.py and torchtitan's
// (activation_checkpoint.py): batched and grouped products, so a mixture's experts, are not on it.
std::vector<bool> KeptOps(const LowerInput& in, const ModelAnalysis& a, const Region& r,
                          const RecomputeRegion& plan) {
  const Model& model = in.model;
  std::vector<bool> kept(r.last - r.first + 1, false);
  if (plan.kind == RecomputeKind::kFull) {
    return kept;
  }
  std::int64_t linears = 0;
  for (std::uint32_t i = r.first; i <= r.last; ++i) {
    if (!a.KernelsOf(i).compute_intensive) {
      continue;
    }
    const OpKind kind = model.SpecOf(model.ops[i]).kind;
    const bool is_linear = kind == OpKind::kLinear || kind == OpKind::kRouter;
    kept[i - r.first] =
        is_linear ? linears % plan.keep_every == 0
                  : kind != OpKind::kAttention ||
                        (IsFused(in.kernels.attention) && !in.kernels.recomputes_attention);
    linears += is_linear ? 1 : 0;
  }
  return kept;
}

// A selective checkpoint keeps attention's output and row statistics, but not its operands. q, k
// and v are made again. If k and v are repeated for all query heads, the copies are scratch: of
// forward when it runs, and of backward when they are made again. One more kernel variant says so.
void KeepOnlyAttentionResult(const LowerInput& in, std::uint32_t i, ModelAnalysis& a) {
  const OpSpec& spec = in.model.SpecOf(in.model.ops[i]);
  if (spec.kind != OpKind::kAttention || !in.kernels.repeat_kv || spec.native_groups ||
      spec.kv_heads >= spec.heads || !IsFused(in.kernels.attention)) {
    return;
  }
  const OpKernels& copying = a.KernelsOf(i);
  KernelSetOptions options = in.kernels;
  options.repeat_kv = false;
  OpKernels kernels = LowerOp(spec, in.plan.micro_batch, in.job.precision.param, options);
  kernels.forward = copying.forward;
  const Bytes copies = copying.extra_saved - kernels.extra_saved;
  kernels.forward_workspace += copies;
  kernels.backward_workspace += copies;
  kernels.backward_workspace_tensors.push_back(copies);
  const auto same = FindIf(a.kernels, [&](const OpKernels& k) {
    return k.forward == kernels.forward && k.extra_saved == kernels.extra_saved;
  });
  a.variant[i] = static_cast<std::uint32_t>(same - a.kernels.begin());
  if (same == a.kernels.end()) {
    a.kernels.push_back(std::move(kernels));
  }
}

// Fills the region's rerun and the facts that follow from it: walks the region backwards, marking
// every op whose outputs (or private saved bytes) backward needs and forward did not keep; with
// `whole`, every op. Inner regions come first: what they run again reads what this one makes, and
// what they keep themselves is not kept here.
void FindReruns(const Model& model, const std::vector<bool>& kept, bool whole, std::uint32_t index,
                ModelAnalysis& a) {
  Region& region = a.regions[index];
  std::unordered_set<std::uint32_t> needed;  // storages; a table of all would cost each region all
  const auto produced_inside = [&](std::uint32_t s) {
    const std::uint32_t p = a.storages[s].producer;
    return p != kNoRegion && p >= region.first && p <= region.last && !kept[p - region.first];
  };
  const auto need = [&](std::uint32_t s, std::uint32_t reader) {
    const bool is_own = produced_inside(s) && IsPassed(a, index, reader) &&
                        a.ops[a.storages[s].producer].inner == a.ops[reader].inner;
    if (produced_inside(s) && !is_own) {
      needed.insert(s);
    }
  };
  for (std::uint32_t i = region.first; i <= region.last; ++i) {
    a.ops[i].region = region.outer == kNoRegion ? index : region.outer;
    if (a.ops[i].has_backward) {
      ForEachSaved(a, model, i, [&](std::uint32_t s, Role, std::uint16_t) { need(s, i); });
    }
    for (const TensorId t : model.ops[i].inputs) {
      if (IsPassed(a, index, i) && a.ops[i].reruns) {
        need(a.storage_of[t.value], i);
      }
    }
  }
  for (std::uint32_t i = region.last + 1; i-- > region.first;) {
    const ModelOp& op = model.ops[i];
    ModelOpFacts& f = a.ops[i];
    const bool is_kept = kept[i - region.first];
    f.saves_in_forward = is_kept && f.has_backward;
    bool wanted = whole || (f.has_backward && !IsPassed(a, index, i) &&
                            a.KernelsOf(i).extra_saved > Bytes(0));
    for (const TensorId t : op.outputs) {
      wanted = wanted || needed.contains(a.storage_of[t.value]);
    }
    if (!wanted || is_kept) {
      continue;
    }
    f.reruns = true;
    region.rerun.push_back(i);
    for (const TensorId t : op.inputs) {
      if (produced_inside(a.storage_of[t.value])) {
        needed.insert(a.storage_of[t.value]);
      }
    }
    for (const TensorId t : op.outputs) {
      StorageFacts& s = a.storages[a.storage_of[t.value]];
      s.recomputed = s.recomputed || produced_inside(a.storage_of[t.value]);
    }
  }
  std::reverse(region.rerun.begin(), region.rerun.end());
}

// Fills region `index`. A region in which no op has a backward runs no op again, even under stacks
// that recompute whole regions.
void FillRegion(const Model& model, std::uint32_t index, const std::vector<bool>& kept, bool whole,
                ModelAnalysis& a) {
  // A region that reaches no loss does not run again.
  const auto begin = a.ops.begin() + a.regions[index].first,
             end = a.ops.begin() + a.regions[index].last + 1;
  const bool runs = std::any_of(begin, end, [](const ModelOpFacts& op) { return op.has_backward; });
  FindReruns(model, kept, whole && runs, index, a);
}

// For stacks that run whole regions again. A region's results (storages that an op outside reads,
// or no op at all) live until its backward has ended. Each such storage gets one more use, released
// by the walker at the end of the region.
void HoldOutputs(const Model& model, ModelAnalysis& a) {
  std::vector<bool> read_outside(a.storages.size(), false);
  std::vector<bool> read(a.storages.size(), false);
  for (std::uint32_t i = 0; i < model.ops.size(); ++i) {
    for (const TensorId t : model.ops[i].inputs) {
      const std::uint32_t s = a.storage_of[t.value];
      const std::uint32_t p = a.storages[s].producer;
      read[s] = true;
      read_outside[s] = read_outside[s] || (p != kNoRegion && a.ops[p].region != a.ops[i].region);
    }
  }
  for (Region& region : a.regions) {
    for (const std::uint32_t i : region.rerun) {
      for (const TensorId t : model.ops[i].outputs) {
        const std::uint32_t s = a.storage_of[t.value];
        if (a.storages[s].producer == i && (read_outside[s] || !read[s])) {
          region.held.push_back(s);
          ++a.storages[s].rerun_uses;
        }
      }
    }
  }
}

// torch's checkpoints nest by themselves; native has none of its own.
bool Nests(Dialect dialect) {
  return dialect != Dialect::kNative;
}

// Is the region, which begins in `outer`, one with it? torch nests their checkpoints. Backward asks
// for the inner one's tensors first. To run that again it needs its input, so the outer one runs
// again, up to there if it keeps nothing behind it, and then the inner one: all of it once.
// Example: a block is checkpointed, and so is the MLP at its end, which is followed by a sum only.
// The MLP's region is dropped: the block's run again already makes everything that it needs.
bool IsOneWith(const LowerInput& in, const Region& region, std::size_t entry,
               const std::pair<Region, std::size_t>& outer) {
  const auto is_full = [&](std::size_t i) {
    return in.plan.recompute[i].kind == RecomputeKind::kFull;
  };
  if (!Nests(in.plan.dialect) || in.kernels.whole_recompute || !is_full(entry) ||
      !is_full(outer.second) || region.last > outer.first.last) {
    return false;
  }
  for (std::uint32_t i = region.last + 1; i <= outer.first.last; ++i) {
    if (in.model.SpecOf(in.model.ops[i]).kind != OpKind::kAdd || !in.model.ops[i].params.empty()) {
      return false;
    }
  }
  return true;
}

[[noreturn]] void FailOverlapping(const RecomputeRegion& planned, const std::string& where) {
  throw InputError(where + ": recompute", '"' + planned.module + '"',
                   "regions that do not overlap, or one inside of another",
                   "what lies in two of them runs a third time, which our programs can say of a "
                   "region inside of one other, without fused kernels and offloaded activations");
}

// May the region lie inside `outer` as one of its own? The outer region runs again when backward
// asks for a tensor that it would have kept. It passes the inner one, which runs a third time for
// its own backward. Kernel sets that fuse ops, and offloaded activations, have no such rule here.
bool MayNest(const LowerInput& in, const Region& region, std::size_t entry,
             const std::pair<Region, std::size_t>& outer) {
  const auto is_full = [&](std::size_t i) {
    return in.plan.recompute[i].kind == RecomputeKind::kFull;
  };
  const KernelSetOptions& kernels = in.kernels;
  return Nests(in.plan.dialect) && !kernels.whole_recompute && !kernels.fused_gelu &&
         !kernels.fused_residual && !in.plan.offload.activations && is_full(entry) &&
         is_full(outer.second) && outer.first.outer == kNoRegion && region.last <= outer.first.last;
}

// `found` is in the order of first ops, and the longest comes first of those that begin together.
// Regions equal to their parent in effect are dropped. Other nested regions get `outer`.
// O(regions).
PlannedRegions Nested(const LowerInput& in, const PlannedRegions& found, const std::string& where) {
  PlannedRegions regions;
  std::uint32_t outer = 0;
  for (const auto& [region, entry] : found) {
    if (regions.empty() || region.first > regions[outer].first.last) {
      outer = static_cast<std::uint32_t>(regions.size());
      regions.emplace_back(region, entry);
      continue;
    }
    const bool is_in_last = region.first <= regions.back().first.last;
    const auto& around = is_in_last ? regions.back() : regions[outer];
    if (IsOneWith(in, region, entry, around)) {
      continue;
    }
    if (!MayNest(in, region, entry, around)) {
      FailOverlapping(in.plan.recompute[entry], where);
    }
    regions.emplace_back(region, entry);
    regions.back().first.outer = outer;
  }
  return regions;
}

// Does backward reach a tensor that the outer region keeps behind the inner one before it needs the
// latter? Then that one's input is there when it runs again.
bool RunsOuterFirst(const Model& model, const Region& inner, const ModelAnalysis& a) {
  for (std::uint32_t i = inner.last + 1; i <= a.regions[inner.outer].last; ++i) {
    const ModelOpFacts& f = a.ops[i];
    if (f.has_backward && f.inner == kNoRegion && !model.ops[i].params.empty()) {
      return true;
    }
  }
  return false;
}

// torch.utils.checkpoint with use_reentrant=True is an autograd function: its result needs a
// gradient only if an input does. A region on detached data, or on ids, runs without an error and
// its parameters stay untrained. Frozen embeddings are no reason to refuse: libraries let the
// embedding's result require a gradient then (Transformers' enable_input_require_grads).
void CheckReentrant(const LowerInput& in, const PlannedRegions& found, const std::string& where,
                    const ModelAnalysis& a) {
  const Model& model = in.model;
  const std::vector<bool> may_need =
      RequiringGrad(model, std::vector<bool>(model.params.size(), true));
  for (const auto& [region, entry] : found) {
    if (in.plan.recompute[entry].kind != RecomputeKind::kFull) {
      continue;
    }
    std::unordered_set<std::uint32_t> made;
    bool trains = false;
    bool is_reached = false;
    for (std::uint32_t i = region.first; i <= region.last; ++i) {
      trains = trains || a.ops[i].weight_grad;
      for (const TensorId t : model.ops[i].inputs) {
        is_reached = is_reached || (may_need[t.value] && !made.contains(t.value));
      }
      for (const TensorId t : model.ops[i].outputs) {
        made.insert(t.value);
      }
    }
    if (trains && !is_reached) {
      throw InputError(
          where + ": recompute[" + std::to_string(entry) + "].module",
          '"' + in.plan.recompute[entry].module + "\", of which no input needs a gradient",
          "a module whose input needs one",
          "this kernel set's checkpoint (use_reentrant=True) would leave the module's "
          "parameters untrained without an error; torch-eager's (False) trains them");
    }
  }
}

}  // namespace

PlannedRegions FindPlannedRegions(const LowerInput& in, const std::string& where) {
  PlannedRegions found;
  std::unordered_map<std::string_view, ModuleId> modules;  // by name
  for (std::size_t m = 0; m < in.model.modules.size(); ++m) {
    modules.emplace(in.model.modules[m].fqn, FirstNameOf(in.model, ModuleId(m)));
  }
  std::vector<bool> wanted(in.model.modules.size(), false);
  for (const RecomputeRegion& region : in.plan.recompute) {
    const auto module = modules.find(region.module);
    SW_CHECK(module != modules.end(), region.module);  // ValidatePlan has seen it
    wanted[module->second.value] = true;
  }
  const std::vector<std::vector<Region>> calls = FindCalls(in.model, wanted);
  for (std::size_t i = 0; i < in.plan.recompute.size(); ++i) {
    const ModuleId module = modules.at(in.plan.recompute[i].module);
    const std::string& class_name = in.model.modules[module.value].class_name;
    if (calls[module.value].empty() && (IsContainer(class_name) || in.model.ops.empty())) {
      FailWithoutOps(in.model, module, where + ": recompute[" + std::to_string(i) + "].module");
    }
    for (const Region& call : calls[module.value]) {
      found.emplace_back(call, i);
      found.back().first.planned = i;
    }
  }
  SortAll(found, [](const auto& x, const auto& y) {
    return x.first.first != y.first.first ? x.first.first < y.first.first
                                          : x.first.last > y.first.last;
  });
  return Nested(in, found, where);
}

void AddPlannedRegions(const LowerInput& in, const PlannedRegions& found, const std::string& where,
                       ModelAnalysis& a) {
  if (in.kernels.whole_recompute && Nests(in.plan.dialect)) {
    CheckReentrant(in, found, where, a);
  }
  std::vector<std::vector<bool>> kept;
  for (std::uint32_t i = 0; i < found.size(); ++i) {
    const Region& region = found[i].first;
    kept.push_back(KeptOps(in, a, region, in.plan.recompute[found[i].second]));
    for (std::uint32_t op = region.first; op <= region.last; ++op) {
      if (kept.back()[op - region.first]) {
        KeepOnlyAttentionResult(in, op, a);
      }
      a.ops[op].inner = region.outer == kNoRegion ? kNoRegion : i;
    }
    a.regions.push_back(region);
  }
  for (auto i = static_cast<std::uint32_t>(found.size()); i-- > 0;) {  // inner ones first
    const RecomputeRegion& planned = in.plan.recompute[found[i].second];
    if (a.regions[i].outer != kNoRegion && !RunsOuterFirst(in.model, a.regions[i], a)) {
      FailOverlapping(planned, where);
    }
    const bool whole = in.kernels.whole_recompute && planned.kind == RecomputeKind::kFull;
    FillRegion(in.model, i, kept[i], whole, a);
  }
  if (in.kernels.whole_recompute) {
    HoldOutputs(in.model, a);
  }
}

void FindCompiledRegions(const Model& model, const std::string& where, ModelAnalysis& a) {
  const auto recomputes = [](const OpKernels& k) { return k.output_recomputed; };
  if (NoneOf(a.kernels, recomputes)) {
    return;
  }
  const std::vector<Region> stretches = FindStretches(model);
  for (const ModuleId block : BlocksOf(model)) {
    const Region region = RegionOf(model, stretches, block, where);
    std::vector<bool> kept;
    for (std::uint32_t i = region.first; i <= region.last; ++i) {
      kept.push_back(!recomputes(a.KernelsOf(i)));
    }
    a.regions.push_back(region);
    FillRegion(model, static_cast<std::uint32_t>(a.regions.size() - 1), kept, false, a);
  }
}

}  // namespace shardwright
