// Facts about the model under this job and plan that all dialects need before the first op is
// written.
//
// Example: a block "norm, up, gelu, down, sum" between an embedding (op 0) and a loss (op 6); the
// model trains. Each of ops 1 to 5 makes one tensor, and the sum reads the block's input as well.
//
//   FindParamGrads     norm, up and down have gradients of their weights
//   LowerSpecs         the kernels of each op at this micro-batch; equal specs share one entry
//   FindGradients      forward from op 0: a tensor needs a gradient if its op has a backward
//   FindStorages       one storage per tensor; op 0's output is read twice in forward (norm, sum)
//   CountBackwardUses  norm, up, gelu and down each keep their input: one use each
//   regions            if the block is checkpointed: which ops run again (regions.cc)
//
// If the embedding and the norm are frozen, FindGradients gives op 1 no backward. `up` then needs a
// gradient of its weight but not of its input, so its backward has half of the products.
//
// The counts of uses are the reference counts of the walker. A count too low would free a buffer
// that a later op reads, and one too high would keep it to the end of the step. The walker fails if
// an instance is released more often than it was counted.

#include "schedule/lower/analysis.h"

#include <array>
#include <map>
#include <numeric>
#include <utility>

#include "core/ranges.h"
#include "models/cut_experts.h"
#include "models/totals.h"
#include "models/trainable.h"
#include "schedule/lower/autocast.h"
#include "schedule/lower/fusion.h"
#include "schedule/lower/regions.h"
#include "topologies/mesh.h"

namespace shardwright {
namespace {

// FSDP1 with use_orig_params: modules see views of the flat parameter, and views need a gradient
// if it does (_flat_param.py, _use_unsharded_views). Without it such a mixture is refused.
void ShareGradients(const LowerInput& in, const std::string& where, ModelAnalysis& a) {
  const std::size_t trainable = static_cast<std::size_t>(CountOf(a.param_grad, true));
  if (in.plan.dialect != Dialect::kFsdp1 || trainable == 0 || trainable == a.param_grad.size()) {
    return;
  }
  for (const ResolvedUnit& unit : ResolveUnits(in.model, in.plan, where)) {
    const bool any = AnyOf(unit.params, [&](ParamId p) { return a.param_grad[p.value]; });
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

// Those of tied parameters are one.
void FindMasters(const LowerInput& in, ModelAnalysis& a) {
  const std::vector<Parameter>& params = in.model.params;
  a.masters.assign(params.size(), in.job.precision.master);
  if (in.job.fp32_masters.empty()) {
    return;
  }
  const auto storage = [&](std::size_t p) {
    return params[p].tied_to.valid() ? params[p].tied_to.value : p;
  };
  for (std::size_t p = 0; p < params.size(); ++p) {
    if (params[p].trainable && IsWide(in.job, params[p])) {
      a.masters[storage(p)] = DType::kFp32;
    }
  }
  for (std::size_t p = 0; p < params.size(); ++p) {
    a.masters[p] = a.masters[storage(p)];
  }
}

void FindParamGrads(const LowerInput& in, bool train, const std::string& where, ModelAnalysis& a) {
  for (const Parameter& param : in.model.params) {
    a.param_grad.push_back(train && param.trainable);
  }
  ShareGradients(in, where, a);
}

// Per parameter: is it stored in 8 or 4 bits? These are frozen weights of linear layers other than
// the head, and with `quantized_experts` the experts' weights, too. A trainable weight never is.
void FindQuantized(const LowerInput& in, ModelAnalysis& a) {
  a.quantized.assign(in.model.params.size(), false);
  if (in.job.frozen_format <= FrozenFormat::kParam) {
    return;
  }
  a.quantized = ConvertibleWeights(in.model);
  for (const ModelOp& op : in.model.ops) {
    for (const ParamId p : op.params) {
      if (in.job.quantized_experts && in.model.SpecOf(op).kind == OpKind::kExperts) {
        a.quantized[p.value] = true;
      }
    }
  }
  for (std::size_t p = 0; p < a.quantized.size(); ++p) {
    a.quantized[p] = a.quantized[p] && !in.model.params[p].trainable;
  }
}

// One pass in forward order, O(ops + inputs). Ops behind which no loss lies have no gradients.
// Index and bool outputs carry none.
void FindGradients(const Model& model, ModelAnalysis& a) {
  const std::vector<bool> reaches = OpsBehindResult(model);
  a.tensor_grad.assign(model.tensors.size(), false);
  for (const Model::Stage& stage : model.stages) {
    if (stage.received.valid()) {
      a.tensor_grad[stage.received.value] = a.trains;
    }
  }
  for (std::size_t i = 0; i < model.ops.size(); ++i) {
    const ModelOp& op = model.ops[i];
    ModelOpFacts& f = a.ops[i];
    for (const ParamId p : op.params) {
      f.weight_grad = f.weight_grad || (reaches[i] && a.param_grad[p.value]);
    }
    for (std::size_t k = 0; k < op.inputs.size(); ++k) {
      // The router's choice tells where rows go; its weights are applied behind the experts.
      const bool is_choice = k > 0 && model.SpecOf(op).kind == OpKind::kDispatch;
      if (reaches[i] && a.tensor_grad[op.inputs[k].value] && !is_choice) {
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
// Example: an embedding and a head share their weight, and the head has a bias. Both ops are in one
// group, named after the weight. A union-find forest joins the parameters of each op; the cost is
// almost linear.
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

// Views and in-place results share the storage of an input. Example: op 3 is a view of op 2's
// output. Both tensors then have one storage, and its forward uses are the reads of either tensor.
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

// Counts how often backward reads the forward and the recomputed instances of each storage.
void CountBackwardUses(const Model& model, ModelAnalysis& a) {
  const auto same_region = [&](std::uint32_t s, std::uint32_t op) {
    const std::uint32_t p = a.storages[s].producer;
    return p != kNoRegion && a.ops[op].region != kNoRegion && a.ops[p].region == a.ops[op].region;
  };
  // By op `i`, in a run of the inner region `run` or of none.
  const auto read = [&](std::uint32_t s, std::uint32_t i, std::uint32_t run) {
    StorageFacts& f = a.storages[s];
    if (!f.recomputed || !same_region(s, i)) {
      ++f.backward_uses;
      return;
    }
    const std::uint32_t inner = a.ops[f.producer].inner;
    ++(inner == kNoRegion || inner == run ? f.rerun_uses : f.passing_uses);
  };
  for (std::uint32_t r = 0; r < a.regions.size(); ++r) {
    for (const std::uint32_t i : a.regions[r].rerun) {
      for (const TensorId t : model.ops[i].inputs) {
        read(a.storage_of[t.value], i, a.regions[r].outer == kNoRegion ? kNoRegion : r);
      }
    }
  }
  for (std::uint32_t i = 0; i < model.ops.size(); ++i) {
    if (a.ops[i].has_backward) {
      ForEachSaved(a, model, i,
                   [&](std::uint32_t s, Role, std::uint16_t) { read(s, i, a.ops[i].inner); });
    }
  }
}

// The inputs of metrics (the logits) live until the metrics have run, after the micro-batch's last
// pass. Each of these reads counts as one more use in backward.
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
OpSpec SpecHere(const LowerInput& in, const OpSpec& spec, bool bias_only) {
  OpSpec here = spec;
  here.bias_only = bias_only;
  here.synchronized =
      spec.synchronized && in.job.mode == JobMode::kTrain && MeshOf(in.plan).RankCount() > 1;
  return here;
}

// Kernels of each spec in use, and sizes of tensors. Ops on tensors that the samples share (a table
// of positions) run once, whatever the batch.
void LowerSpecs(const LowerInput& in, ModelAnalysis& a) {
  const Model& model = in.model;
  constexpr std::uint32_t kUnset = 0xffffffffu;
  std::vector<std::uint32_t> variant_of(16 * model.specs.size(), kUnset);
  std::map<std::array<std::uint32_t, 3>, std::uint32_t> with_casts;
  const bool is_own = in.kernels.host_kernels || in.kernels.cuda_kernels;
  for (std::size_t i = 0; i < model.ops.size(); ++i) {
    const ModelOp& op = model.ops[i];
    const bool shared = RunsOnce(model, op);
    const bool bias_only = !is_own && TrainsBiasOnly(model, op, a.param_grad);
    const bool trains = AnyOf(op.params, [&](ParamId p) { return a.param_grad[p.value]; });
    std::uint32_t casts = 0;
    for (std::size_t j = 0; j < op.inputs.size() && j < 32 && !a.wide_ops[i]; ++j) {
      casts |= a.wide_tensors[op.inputs[j].value] ? 1U << j : 0U;
    }
    const std::uint32_t flags = (bias_only ? 1U : 0U) + (shared ? 2U : 0U) +
                                (a.wide_ops[i] ? 4U : 0U) + (casts != 0 && trains ? 8U : 0U);
    std::uint32_t& variant =
        casts == 0 ? variant_of[16U * op.spec + flags]
                   : with_casts.try_emplace({op.spec, flags, casts}, kUnset).first->second;
    if (variant == kUnset) {
      variant = static_cast<std::uint32_t>(a.kernels.size());
      const DType compute = a.wide_ops[i] ? DType::kFp32 : in.job.precision.param;
      OpKernels kernels = LowerOp(SpecHere(in, model.specs[op.spec], bias_only),
                                  shared ? 1 : in.plan.micro_batch, compute, in.kernels);
      a.kernels.push_back(WithCasts(in, op, casts, trains, std::move(kernels)));
    }
    a.variant.push_back(variant);
  }
  a.tensor_bytes.reserve(model.tensors.size());
  for (std::size_t t = 0; t < model.tensors.size(); ++t) {
    a.tensor_bytes.push_back(
        TensorBytes(model.tensors[t], in.plan.micro_batch,
                    a.wide_tensors[t] ? DType::kFp32 : in.job.precision.param));
  }
  // The host's kernels run: their buffers have room for all rows that may come.
  for (std::size_t i = 0; i < model.ops.size() && in.kernels.host_kernels; ++i) {
    OpSpec spec = model.SpecOf(model.ops[i]);
    spec.rows = MostRows(model, i);
    if (spec.rows == 0) {
      continue;
    }
    a.tensor_bytes[model.ops[i].outputs[0].value] =
        Bytes(in.plan.micro_batch * spec.rows * spec.in * SizeOf(in.job.precision.param));
    const OpKernels most = LowerOp(spec, in.plan.micro_batch, in.job.precision.param, in.kernels);
    OpKernels& kernels = a.kernels[a.variant[i]];
    kernels.extra_saved = most.extra_saved;
    kernels.forward_workspace = most.forward_workspace;
    kernels.backward_workspace = most.backward_workspace;
  }
}

}  // namespace

std::vector<bool> RequiringGrad(const Model& model, const std::vector<bool>& param_grad) {
  std::vector<bool> requires_grad(model.tensors.size(), false);
  for (const Model::Stage& stage : model.stages) {
    if (stage.received.valid()) {
      requires_grad[stage.received.value] = true;
    }
  }
  for (const ModelOp& op : model.ops) {
    const bool any = AnyOf(op.params, [&](ParamId p) { return param_grad[p.value]; }) ||
                     AnyOf(op.inputs, [&](TensorId t) { return requires_grad[t.value]; });
    for (const TensorId t : op.outputs) {
      const TensorRole role = model.tensors[t.value].role;
      requires_grad[t.value] = any && !model.SpecOf(op).other.stops_gradient &&
                               role != TensorRole::kIndex && role != TensorRole::kBool;
    }
  }
  return requires_grad;
}

ModelAnalysis AnalyzeModel(const LowerInput& in, const std::string& where) {
  ModelAnalysis a;
  a.ops.resize(in.model.ops.size());
  const bool train = a.trains = in.job.mode == JobMode::kTrain;
  FindParamGrads(in, train, where, a);
  FindQuantized(in, a);
  FindMasters(in, a);
  FindAutocast(in, a);
  LowerSpecs(in, a);
  FindGradients(in.model, a);
  FindGradGroups(in.model, a);
  FindStorages(in, a);
  for (const Model::Stage& stage : in.model.stages) {
    if (stage.sent.valid() && train) {  // torch holds it until the micro-batch's backward is over
      ++a.storages[a.storage_of[stage.sent.value]].backward_uses;
    }
  }
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
      AddPlannedRegions(in, regions, where, a);
    }
    if ((in.kernels.loss_chunks > 1 || in.kernels.loss_in_place) && !in.kernels.keeps_logits) {
      FuseLoss(in, a);
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
