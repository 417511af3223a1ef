#include "schedule/lower/analysis.h"

#include <algorithm>
#include <numeric>
#include <string_view>
#include <unordered_map>
#include <unordered_set>
#include <utility>

#include "core/error.h"
#include "schedule/lower/fusion.h"
#include "schedule/lower/walker.h"
#include "schedule/wrap.h"

namespace shardwright {
namespace {

// FSDP1 with use_orig_params: modules see views of the flat parameter, and views need a gradient
// if it does (_flat_param.py, _use_unsharded_views). Without it such a mixture is refused.
void ShareGradients(const LowerInput& in, const std::string& where, ModelAnalysis& a) {
  const std::size_t trainable =
      static_cast<std::size_t>(std::count(a.param_grad.begin(), a.param_grad.end(), true));
  if (in.plan.dialect != Dialect::kFsdp1 || trainable == 0 || trainable == a.param_grad.size()) {
    return;
  }
  for (const ResolvedUnit& unit : ResolveUnits(in.model, in.plan, where)) {
    const bool any = std::any_of(unit.params.begin(), unit.params.end(),
                                 [&](ParamId p) { return a.param_grad[p.value]; });
    for (const ParamId p : unit.params) {
      a.param_grad[p.value] = any;
    }
  }
  for (std::size_t p = 0; p < a.param_grad.size(); ++p) {
    if (in.model.params[p].tied_to.valid()) {
      a.param_grad[p] = a.param_grad[in.model.params[p].tied_to.value];
    }
  }
}

void FindParamGrads(const LowerInput& in, bool train, const std::string& where, ModelAnalysis& a) {
  for (const Parameter& param : in.model.params) {
    a.param_grad.push_back(train && param.trainable);
  }
  ShareGradients(in, where, a);
}

void FindGradients(const Model& model, ModelAnalysis& a) {
  const std::vector<bool> reaches = OpsBehindResult(model);
  a.tensor_grad.assign(model.tensors.size(), false);
  for (std::size_t i = 0; i < model.ops.size(); ++i) {
    const ModelOp& op = model.ops[i];
    ModelOpFacts& f = a.ops[i];
    for (const ParamId p : op.params) {
      f.weight_grad = f.weight_grad || (reaches[i] && a.param_grad[p.value]);
    }
    for (std::size_t k = 0; k < op.inputs.size(); ++k) {
      if (reaches[i] && a.tensor_grad[op.inputs[k].value]) {
        f.input_grads |= 1U << k;
      }
    }
    f.has_backward = f.weight_grad || f.input_grads != 0;
    for (const TensorId t : op.outputs) {
      const TensorRole role = model.tensors[t.value].role;
      a.tensor_grad[t.value] =
          f.has_backward && role != TensorRole::kIndex && role != TensorRole::kBool;
    }
  }
}

// Ops that share a parameter, whichever of theirs it is, are one group, which goes by the first
// parameter of its first op.
void FindGradGroups(const Model& model, ModelAnalysis& a) {
  std::vector<std::uint32_t> stands_for(model.params.size());  // a forest of storages
  std::iota(stands_for.begin(), stands_for.end(), 0U);
  const auto root_of = [&](ParamId p) {
    const ParamId tied = model.params[p.value].tied_to;
    std::uint32_t s = tied.valid() ? tied.value : p.value;
    while (stands_for[s] != s) {
      s = stands_for[s] = stands_for[stands_for[s]];
    }
    return s;
  };
  for (std::size_t i = 0; i < model.ops.size(); ++i) {
    const std::vector<ParamId>& params = model.ops[i].params;
    for (std::size_t k = 1; k < params.size() && a.ops[i].weight_grad; ++k) {
      if (a.param_grad[params[k].value]) {
        stands_for[root_of(params[k])] = root_of(params.front());
      }
    }
  }
  std::vector<ParamId> first(model.params.size());  // per root
  a.grad_group.resize(model.ops.size());
  for (std::size_t i = 0; i < model.ops.size(); ++i) {
    if (!a.ops[i].weight_grad) {
      continue;
    }
    const ParamId p = model.ops[i].params.front();
    ParamId& name = first[root_of(p)];
    if (!name.valid()) {
      const ParamId tied = model.params[p.value].tied_to;
      name = tied.valid() ? tied : p;
    }
    a.grad_group[i] = name;
  }
}

void FindStorages(const LowerInput& in, ModelAnalysis& a) {
  const Model& model = in.model;
  constexpr std::uint32_t kUnset = 0xffffffffu;
  a.storage_of.assign(model.tensors.size(), kUnset);
  const auto add = [&](TensorId t, std::uint32_t producer) {
    StorageFacts s;
    const Tensor& tensor = model.tensors[t.value];
    s.bytes = a.tensor_bytes[t.value];
    s.is_index = tensor.role == TensorRole::kIndex;
    s.producer = producer;
    a.storage_of[t.value] = static_cast<std::uint32_t>(a.storages.size());
    a.storages.push_back(s);
  };
  for (std::size_t i = 0; i < model.ops.size(); ++i) {
    const ModelOp& op = model.ops[i];
    for (const TensorId t : op.inputs) {
      if (a.storage_of[t.value] == kUnset) {
        add(t, kNoRegion);
      }
      ++a.storages[a.storage_of[t.value]].forward_uses;
    }
    const auto& aliases = a.KernelsOf(static_cast<std::uint32_t>(i)).output_aliases;
    for (std::size_t k = 0; k < op.outputs.size(); ++k) {
      const int alias = k < aliases.size() ? aliases[k] : -1;
      // An in-place rope on one packed tensor has no second input to overwrite.
      if (alias >= 0 && static_cast<std::size_t>(alias) < op.inputs.size()) {
        a.storage_of[op.outputs[k].value] =
            a.storage_of[op.inputs[static_cast<std::size_t>(alias)].value];
      } else {
        add(op.outputs[k], static_cast<std::uint32_t>(i));
      }
    }
  }
}

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

// Which ops of the region keep their outputs from forward under selective checkpointing.
std::vector<bool> KeptOps(const Model& model, const ModelAnalysis& a, const Region& r,
                          const RecomputeRegion& plan) {
  std::vector<bool> kept(r.last - r.first + 1, false);
  if (plan.kind == RecomputeKind::kFull) {
    return kept;
  }
  std::int64_t linears = 0;
  for (std::uint32_t i = r.first; i <= r.last; ++i) {
    if (!a.KernelsOf(i).compute_intensive) {
      continue;
    }
    const bool is_linear = model.SpecOf(model.ops[i]).kind == OpKind::kLinear;
    kept[i - r.first] = !is_linear || linears % plan.keep_every == 0;
    linears += is_linear ? 1 : 0;
  }
  return kept;
}

// Attention that forward keeps hands over its output and row statistics only: its operands are
// made again, copies of k and v for all query heads among them. They count as scratch of backward,
// when they exist, and of forward.
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
  const auto same = std::find_if(a.kernels.begin(), a.kernels.end(), [&](const OpKernels& k) {
    return k.forward == kernels.forward && k.extra_saved == kernels.extra_saved;
  });
  a.variant[i] = static_cast<std::uint32_t>(same - a.kernels.begin());
  if (same == a.kernels.end()) {
    a.kernels.push_back(std::move(kernels));
  }
}

// Fills region.rerun and the facts that follow from it: walks the region backwards, marking every
// op whose outputs (or private saved bytes) backward needs and forward did not keep; with
// `whole`, every op.
void FindReruns(const Model& model, const std::vector<bool>& kept, bool whole, Region& region,
                ModelAnalysis& a) {
  const auto index = static_cast<std::uint32_t>(a.regions.size());
  std::unordered_set<std::uint32_t> needed;  // storages; a table of all would cost each region all
  const auto produced_inside = [&](std::uint32_t s) {
    const std::uint32_t p = a.storages[s].producer;
    return p != kNoRegion && p >= region.first && p <= region.last && !kept[p - region.first];
  };
  const auto need = [&](std::uint32_t s, Role, std::uint16_t) {
    if (produced_inside(s)) {
      needed.insert(s);
    }
  };
  for (std::uint32_t i = region.first; i <= region.last; ++i) {
    a.ops[i].region = index;
    if (a.ops[i].has_backward) {
      ForEachSaved(a, model, i, need);
    }
  }
  for (std::uint32_t i = region.last + 1; i-- > region.first;) {
    const ModelOp& op = model.ops[i];
    ModelOpFacts& f = a.ops[i];
    const bool is_kept = kept[i - region.first];
    f.saves_in_forward = is_kept && f.has_backward;
    bool wanted = whole || (f.has_backward && a.KernelsOf(i).extra_saved > Bytes(0));
    for (const TensorId t : op.outputs) {
      wanted = wanted || needed.contains(a.storage_of[t.value]);
    }
    if (!wanted || is_kept) {
      continue;
    }
    f.reruns = true;
    region.rerun.push_back(i);
    for (const TensorId t : op.inputs) {
      need(a.storage_of[t.value], Role::kInput, 0);
    }
    for (const TensorId t : op.outputs) {
      StorageFacts& s = a.storages[a.storage_of[t.value]];
      s.recomputed = s.recomputed || produced_inside(a.storage_of[t.value]);
    }
  }
  std::reverse(region.rerun.begin(), region.rerun.end());
}

void AddRegion(const Model& model, Region region, const std::vector<bool>& kept, bool whole,
               ModelAnalysis& a) {
  FindReruns(model, kept, whole, region, a);
  a.regions.push_back(std::move(region));
}

// What a region run again as a whole hands out: it lives until the region's backward has ended.
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

// Is the region, which begins in `outer`, one with it? torch nests their checkpoints. Backward asks
// for the inner one's tensors first. To run that again it needs its input, so the outer one runs
// again, up to there if it keeps nothing behind it, and then the inner one: all of it once.
bool IsOneWith(const LowerInput& in, const Region& region, std::size_t entry,
               const std::pair<Region, std::size_t>& outer) {
  const auto is_full = [&](std::size_t i) {
    return in.plan.recompute[i].kind == RecomputeKind::kFull;
  };
  if (!RecomputesLate(in.plan.dialect) || in.kernels.whole_recompute || !is_full(entry) ||
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
    if (calls[module.value].empty() &&
        (class_name == "ModuleList" || class_name == "ModuleDict" || in.model.ops.empty())) {
      FailWithoutOps(in.model, module, where + ": recompute[" + std::to_string(i) + "].module");
    }
    for (const Region& call : calls[module.value]) {
      found.emplace_back(call, i);
      found.back().first.planned = i;
    }
  }
  std::sort(found.begin(), found.end(), [](const auto& x, const auto& y) {
    return x.first.first != y.first.first ? x.first.first < y.first.first
                                          : x.first.last > y.first.last;
  });
  PlannedRegions apart;
  for (const auto& [region, entry] : found) {
    if (apart.empty() || region.first > apart.back().first.last) {
      apart.emplace_back(region, entry);
    } else if (!IsOneWith(in, region, entry, apart.back())) {
      throw InputError(where + ": recompute", '"' + in.plan.recompute[entry].module + '"',
                       "regions that do not overlap, or one at the end of the other",
                       "what else lies in two of them runs a third time, which our programs "
                       "cannot say");
    }
  }
  return apart;
}

void AddPlannedRegions(const LowerInput& in, const PlannedRegions& found, ModelAnalysis& a) {
  for (std::size_t i = 0; i < found.size(); ++i) {
    const RecomputeRegion& planned = in.plan.recompute[found[i].second];
    const bool whole = in.kernels.whole_recompute && planned.kind == RecomputeKind::kFull;
    const Region& region = found[i].first;
    const std::vector<bool> kept = KeptOps(in.model, a, region, planned);
    for (std::uint32_t op = region.first; op <= region.last; ++op) {
      if (kept[op - region.first]) {
        KeepOnlyAttentionResult(in, op, a);
      }
    }
    AddRegion(in.model, region, kept, whole, a);
  }
  if (in.kernels.whole_recompute) {
    HoldOutputs(in.model, a);
  }
}

// A compiler recomputes cheap outputs instead of keeping them, inside each block that it compiles.
void FindCompiledRegions(const Model& model, const std::string& where, ModelAnalysis& a) {
  const auto recomputes = [](const OpKernels& k) { return k.output_recomputed; };
  if (std::none_of(a.kernels.begin(), a.kernels.end(), recomputes)) {
    return;
  }
  const std::vector<Region> stretches = FindStretches(model);
  for (const ModuleId block : BlocksOf(model)) {
    const Region region = RegionOf(model, stretches, block, where);
    std::vector<bool> kept;
    for (std::uint32_t i = region.first; i <= region.last; ++i) {
      kept.push_back(!recomputes(a.KernelsOf(i)));
    }
    AddRegion(model, region, kept, false, a);
  }
}

// Counts how often backward reads the forward and the recomputed instance of each storage.
void CountBackwardUses(const Model& model, ModelAnalysis& a) {
  const auto same_region = [&](std::uint32_t s, std::uint32_t op) {
    const std::uint32_t p = a.storages[s].producer;
    return p != kNoRegion && a.ops[op].region != kNoRegion && a.ops[p].region == a.ops[op].region;
  };
  for (std::uint32_t i = 0; i < model.ops.size(); ++i) {
    const auto read = [&](std::uint32_t s, Role, std::uint16_t) {
      StorageFacts& f = a.storages[s];
      ++(f.recomputed && same_region(s, i) ? f.rerun_uses : f.backward_uses);
    };
    if (a.ops[i].reruns) {
      for (const TensorId t : model.ops[i].inputs) {
        read(a.storage_of[t.value], Role::kInput, 0);
      }
    }
    if (a.ops[i].has_backward) {
      ForEachSaved(a, model, i, read);
    }
  }
}

// What metrics read stays until they run, after the micro-batch's last pass.
void CountMetrics(const Model& model, ModelAnalysis& a) {
  for (std::uint32_t i = 0; i < model.ops.size(); ++i) {
    if (!a.KernelsOf(i).metrics.empty()) {
      for (const TensorId t : model.ops[i].inputs) {
        ++a.storages[a.storage_of[t.value]].backward_uses;
      }
    }
  }
}

// Eager selective checkpointing keeps the results it was told to keep, whoever reads them; a
// compiler drops those that nobody reads.
void HoldKeptResults(const LowerInput& in, ModelAnalysis& a) {
  const Model& model = in.model;
  for (Region& region : a.regions) {
    for (std::uint32_t i = region.first; i <= region.last; ++i) {
      if (!a.ops[i].saves_in_forward) {
        continue;
      }
      for (const TensorId t : model.ops[i].outputs) {
        StorageFacts& s = a.storages[a.storage_of[t.value]];
        if (s.producer == i && s.backward_uses == 0) {
          s.backward_uses = 1;
          region.kept_unread.push_back(a.storage_of[t.value]);
        }
      }
    }
  }
}

// One rank has nobody to synchronise with, and running statistics are those of all ranks.
OpSpec SpecHere(const LowerInput& in, const OpSpec& spec) {
  OpSpec here = spec;
  here.synchronized = spec.synchronized && in.job.mode == JobMode::kTrain &&
                      in.plan.shard_size * in.plan.replicate_size > 1;
  return here;
}

// Kernels of each spec in use, and sizes of tensors. Ops on tensors that the samples share (a table
// of positions) run once, whatever the batch.
void LowerSpecs(const LowerInput& in, ModelAnalysis& a) {
  const Model& model = in.model;
  constexpr std::uint32_t kUnset = 0xffffffffu;
  std::vector<std::uint32_t> variant_of(2 * model.specs.size(), kUnset);
  for (const ModelOp& op : model.ops) {
    const bool shared = RunsOnce(model, op);
    std::uint32_t& variant = variant_of[2U * op.spec + (shared ? 1U : 0U)];
    if (variant == kUnset) {
      variant = static_cast<std::uint32_t>(a.kernels.size());
      a.kernels.push_back(LowerOp(SpecHere(in, model.specs[op.spec]),
                                  shared ? 1 : in.plan.micro_batch, in.job.precision.param,
                                  in.kernels));
    }
    a.variant.push_back(variant);
  }
  a.tensor_bytes.reserve(model.tensors.size());
  for (const Tensor& t : model.tensors) {
    a.tensor_bytes.push_back(TensorBytes(t, in.plan.micro_batch, in.job.precision.param));
  }
  // A chunked loss runs the head and the loss over row chunks: logits never exist as a whole.
  for (const ModelOp& op : model.ops) {
    if (model.SpecOf(op).kind == OpKind::kCrossEntropy && in.kernels.loss_chunks > 1) {
      Bytes& logits = a.tensor_bytes[op.inputs.front().value];
      logits = Bytes(CeilDiv(logits.value, in.kernels.loss_chunks));
    }
  }
}

}  // namespace

std::vector<bool> OpsBehindResult(const Model& model) {
  std::vector<bool> is_read(model.tensors.size(), false);
  bool has_loss = false;
  for (const ModelOp& op : model.ops) {
    for (const TensorId t : op.inputs) {
      is_read[t.value] = true;
    }
    for (const TensorId t : op.outputs) {
      has_loss = has_loss || model.tensors[t.value].role == TensorRole::kLoss;
    }
  }
  std::vector<bool> wanted(model.tensors.size(), false);
  std::vector<bool> reaches(model.ops.size(), false);
  for (std::size_t i = model.ops.size(); i-- > 0;) {
    const ModelOp& op = model.ops[i];
    for (const TensorId t : op.outputs) {
      const bool is_result =
          has_loss ? model.tensors[t.value].role == TensorRole::kLoss : !is_read[t.value];
      reaches[i] = reaches[i] || is_result || wanted[t.value];
    }
    for (std::size_t k = 0; reaches[i] && k < op.inputs.size(); ++k) {
      wanted[op.inputs[k].value] = true;
    }
  }
  return reaches;
}

ModelAnalysis AnalyzeModel(const LowerInput& in, const std::string& where) {
  ModelAnalysis a;
  LowerSpecs(in, a);
  a.ops.resize(in.model.ops.size());
  const bool train = in.job.mode == JobMode::kTrain;
  FindParamGrads(in, train, where, a);
  FindGradients(in.model, a);
  FindGradGroups(in.model, a);
  FindStorages(in, a);
  CountMetrics(in.model, a);
  for (ModelOpFacts& f : a.ops) {
    f.saves_in_forward = f.has_backward;
  }
  if (train) {
    const PlannedRegions regions = FindPlannedRegions(in, where);
    if (in.kernels.fused_gelu) {
      FuseGelu(in, regions, a);
    }
    if (in.plan.recompute.empty()) {
      FindCompiledRegions(in.model, where, a);
    } else {
      AddPlannedRegions(in, regions, a);
    }
    CountBackwardUses(in.model, a);
    if (!in.plan.recompute.empty() && !in.kernels.fused_elementwise &&
        !in.plan.offload.activations) {  // what nobody reads does not travel
      HoldKeptResults(in, a);
    }
  }
  if (in.kernels.fused_residual) {
    FuseSums(in.model, a);
  }
  return a;
}

}  // namespace shardwright
