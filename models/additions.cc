// Adapters and copies put into a model: modules behind those that they belong to, then parameters,
// then ops behind the ops that they change.

#include "models/internal/additions.h"

#include <utility>

#include "models/cut_experts.h"
#include "models/internal/builder.h"

namespace shardwright {
namespace {

Parameter AdapterParam(const Module& module, ModuleId id, const char* name,
                       std::vector<std::int64_t> shape) {
  Parameter param;
  param.fqn = module.fqn + '.' + name;
  param.shape = std::move(shape);
  param.module = id;
  return param;
}

// Puts the new modules behind those that they belong to, which keeps the order, and renumbers.
void InsertModules(Model& model, const std::vector<bool>& is_shared, bool has_magnitudes,
                   Additions& additions) {
  std::vector<Module> modules;
  std::vector<ModuleId> renamed(model.modules.size());
  std::vector<std::vector<ModuleId>> fresh(model.modules.size());  // as renamed
  for (std::size_t m = 0; m < model.modules.size(); ++m) {
    renamed[m] = ModuleId(modules.size());
    modules.push_back(std::move(model.modules[m]));
    const auto add = [&](const char* name, const std::string& class_name) {
      const ModuleId id(modules.size());
      Module child;
      child.name = name;
      child.fqn = modules[renamed[m].value].fqn + '.' + name;
      child.class_name = class_name;
      child.parent = ModuleId(m);
      modules.push_back(std::move(child));
      fresh[m].push_back(id);
      return id;
    };
    Added& added = additions[m];
    if (added.is_saved) {
      added.copy = add("modules_to_save", std::string(modules.back().class_name));
    } else if (added.has_adapter && modules.back().children.empty() && !is_shared[m]) {
      added.module_a = add("lora_A", "Linear");
      added.module_b = add("lora_B", "Linear");
      if (has_magnitudes) {
        added.module_magnitude = add("lora_magnitude_vector", "DoraLinearLayer");
      }
    }
  }
  const auto rename = [&](ModuleId& id) { id = id.valid() ? renamed[id.value] : id; };
  for (Module& module : modules) {
    rename(module.parent);
    rename(module.same_as);
    std::for_each(module.children.begin(), module.children.end(), rename);
  }
  for (std::size_t m = 0; m < renamed.size(); ++m) {
    std::vector<ModuleId>& children = modules[renamed[m].value].children;
    children.insert(children.end(), fresh[m].begin(), fresh[m].end());
  }
  for (Parameter& param : model.params) {
    rename(param.module);
  }
  Additions moved(modules.size());
  for (std::size_t m = 0; m < renamed.size(); ++m) {
    moved[renamed[m].value] = additions[m];
  }
  additions = std::move(moved);
  for (ModelOp& op : model.ops) {
    rename(op.module);
    rename(op.called_again);
    std::for_each(op.returns_input.begin(), op.returns_input.end(), rename);
  }
  model.modules = std::move(modules);
}

// Inserts the new parameters behind those of the module that they belong to, which keeps the
// registration order, freezes everything else and renumbers.
void InsertParams(Model& model, Additions& additions, const TrainableSpec& spec) {
  std::vector<Parameter> params;
  std::vector<ParamId> renamed(model.params.size());
  std::vector<ParamId> copy_of(model.params.size());
  std::vector<std::vector<ParamId>> given(model.modules.size());
  for (std::size_t m = 0; m < model.modules.size(); ++m) {
    given[m].swap(model.modules[m].params);
  }
  const auto append = [&](Parameter param) {
    const ParamId id(params.size());
    model.modules[param.module.value].params.push_back(id);
    params.push_back(std::move(param));
    return id;
  };
  for (std::size_t m = 0; m < model.modules.size(); ++m) {
    Added& added = additions[m];
    for (const ParamId id : given[m]) {
      renamed[id.value] = ParamId(params.size());
      model.modules[m].params.push_back(renamed[id.value]);
      params.push_back(std::move(model.params[id.value]));
      params.back().trainable = false;
    }
    for (const ParamId id : given[m]) {
      if (added.is_saved) {  // tied ones are copied apart, as deepcopy does
        Parameter copy = params[renamed[id.value].value];
        copy.fqn.insert(model.modules[m].fqn.size(), ".modules_to_save");
        copy.module = added.copy;
        copy.trainable = true;
        copy.tied_to = ParamId();
        copy_of[id.value] = append(std::move(copy));
      }
    }
    if (added.expert_rank > 0) {
      const auto stack = [&](const char* name, std::int64_t rows, std::int64_t columns) {
        added.stacks.push_back(append(AdapterParam(model.modules[m], ModuleId(m), name,
                                                   {added.experts.experts, rows, columns})));
      };
      stack("lora_gate_and_up_A", added.in, added.expert_rank);
      stack("lora_gate_and_up_B", added.expert_rank, (added.experts.gated ? 2 : 1) * added.out);
      stack("lora_down_A", added.out, added.expert_rank);
      stack("lora_down_B", added.expert_rank, added.in);
    }
    if (!added.has_adapter) {
      continue;
    }
    const auto add = [&](const char* name, ModuleId own, std::vector<std::int64_t> shape) {
      return append(
          AdapterParam(model.modules[m], own.valid() ? own : ModuleId(m), name, std::move(shape)));
    };
    added.a = add("lora_A.weight", added.module_a, {spec.lora_rank, added.in});
    added.b = add("lora_B.weight", added.module_b, {added.out, spec.lora_rank});
    if (spec.lora_magnitudes) {
      added.magnitude = add("lora_magnitude_vector.weight", added.module_magnitude, {added.out});
    }
  }
  for (Parameter& param : params) {
    if (param.tied_to.valid()) {
      param.tied_to = renamed[param.tied_to.value];
    }
  }
  for (ModelOp& op : model.ops) {
    const Added& added = additions[FirstNameOf(model, op.module).value];
    for (ParamId& id : op.params) {
      id = added.is_saved && copy_of[id.value].valid() ? copy_of[id.value] : renamed[id.value];
    }
    op.module = added.is_saved ? added.copy : op.module;
  }
  model.params = std::move(params);
}

// Appends ops to a model whose specs may already hold an equal one.
class OpAppender {
 public:
  OpAppender(Model& model, std::vector<ModelOp>& ops) : model_(model), ops_(ops) {}

  TensorId Append(ModuleId module, const char* name, const OpSpec& spec,
                  std::vector<TensorId> inputs, std::vector<ParamId> params) {
    const auto known = FindIn(model_.specs, spec);
    const auto index = static_cast<std::uint32_t>(known - model_.specs.begin());
    if (known == model_.specs.end()) {
      model_.specs.push_back(spec);
    }
    const TensorId output(model_.tensors.size());
    model_.tensors.push_back({.role = TensorRole::kActivation,
                              .elements = OutputElements(spec, 0),
                              .per_sample = true,
                              .producer = ModelOpId(ops_.size())});
    ops_.push_back({.spec = index,
                    .module = module,
                    .name = name,
                    .inputs = std::move(inputs),
                    .outputs = {output},
                    .params = std::move(params)});
    return output;
  }

 private:
  Model& model_;
  std::vector<ModelOp>& ops_;
};

// DoRA's part of one linear as PEFT 0.21 computes it (lora/dora.py). It multiplies an identity
// matrix by A and B, and takes the norm of each row of W + B A. Element-wise passes then make
// (m / norm - 1) y + m / norm * scale * t. Weights and norm are detached.
OtherCost MagnitudeCost(const OpSpec& linear, std::int64_t rank) {
  using Pass = OtherKernel::Pass;
  OtherCost cost;
  cost.function = "peft.dora";
  cost.outputs.emplace_back().elements = linear.rows * linear.out;
  const auto add = [&](Pass pass, OtherKernel::Class kind, Amount read, Amount written) {
    OtherKernel kernel;
    kernel.pass = pass;
    kernel.kind = kind;
    kernel.read.elements = read;
    kernel.written.elements = written;
    cost.kernels.push_back(kernel);
    return &cost.kernels.back();
  };
  const auto multiply = [&](std::int64_t n, std::int64_t k) {  // of the identity's `in` rows
    OtherKernel* kernel = add(Pass::kForward, OtherKernel::Class::kGemm,
                              {.fixed = linear.in * k + n * k}, {.fixed = linear.in * n});
    kernel->batch = {.fixed = 1};
    kernel->m = {.fixed = linear.in};
    kernel->n = {.fixed = n};
    kernel->k = {.fixed = k};
    kernel->flops = {.fixed = 2 * linear.in * n * k};
  };
  const auto pass = [&](Pass which, std::int64_t read, std::int64_t written, Amount size) {
    const auto times = [&](std::int64_t n) {
      return Amount{.fixed = n * size.fixed, .per_sample = n * size.per_sample};
    };
    add(which, OtherKernel::Class::kElementwise, times(read), times(written));
  };
  const Amount eye{.fixed = linear.in * linear.in}, whole{.fixed = linear.in * linear.out};
  const Amount rows{.per_sample = linear.rows * linear.out};
  pass(Pass::kForward, 0, 1, eye);
  multiply(rank, linear.in);
  multiply(linear.out, rank);
  pass(Pass::kForward, 1, 1, whole);        // scale * B A
  pass(Pass::kForward, 2, 1, whole);        // + W
  pass(Pass::kForward, 1, 0, whole);        // norm
  pass(Pass::kForward, 1, 1, rows);         // (m / norm - 1) y
  pass(Pass::kForward, 1, 1, rows);         // m / norm * t
  pass(Pass::kForward, 1, 1, rows);         // * scale
  pass(Pass::kForward, 2, 1, rows);         // sum
  pass(Pass::kBackwardData, 1, 1, rows);    // of y
  pass(Pass::kBackwardData, 1, 1, rows);    // gradient * scale
  pass(Pass::kBackwardData, 1, 1, rows);    // of t
  pass(Pass::kBackwardWeight, 4, 2, rows);  // of m: two products
  pass(Pass::kBackwardWeight, 2, 0, rows);  // and their sums over rows
  cost.saves_input = 3;
  cost.saves_input_for_weight = 3;
  cost.saved.emplace_back().elements = {.fixed = linear.out};
  // W + scale * B A beside both of its parts; behind it a norm, so that rows of outputs are less.
  cost.forward_workspace.elements = {.fixed = 3 * linear.in * linear.out};
  cost.backward_workspace.elements = {.per_sample = linear.rows * linear.out};
  return cost;
}

// Adapters of all experts of a layer, as NeMo Automodel computes them (components/_peft/
// lora_experts.py): of gate and up in one, and of down, by grouped products. The experts themselves
// keep the rows and what goes into down.
OtherCost ExpertAdapterCost(const OpSpec& experts, std::int64_t rank) {
  using Pass = OtherKernel::Pass;
  const std::int64_t rows = experts.rows * experts.experts_per_token;
  OtherCost cost;
  cost.function = "automodel.lora_experts";
  cost.outputs.emplace_back().elements = experts.rows * experts.in;
  const auto multiply = [&](Pass pass, std::int64_t out, std::int64_t in) {
    OtherKernel& kernel = cost.kernels.emplace_back();
    const std::int64_t weights = experts.experts * out * in;
    const bool is_of_weight = pass == Pass::kBackwardWeight;
    kernel.pass = pass;
    kernel.kind = OtherKernel::Class::kGemm;
    kernel.batch = {.fixed = 1};
    kernel.m = kernel.k = {.per_sample = rows};
    kernel.n = {.fixed = is_of_weight ? in : out};
    (is_of_weight ? kernel.m : kernel.k) = {.fixed = is_of_weight ? out : in};
    kernel.flops = {.per_sample = 2 * rows * out * in};
    kernel.read.elements = {.fixed = is_of_weight ? 0 : weights,
                            .per_sample = rows * (is_of_weight ? in + out : in)};
    kernel.written.elements = {.fixed = is_of_weight ? weights : 0,
                               .per_sample = is_of_weight ? 0 : rows * out};
  };
  const auto pass = [&](Pass which, std::int64_t read, std::int64_t features) {
    OtherKernel& kernel = cost.kernels.emplace_back();
    kernel.pass = which;
    kernel.read.elements = {.per_sample = read * rows * features};
    kernel.written.elements = {.per_sample = rows * features};
  };
  const std::int64_t up = (experts.gated ? 2 : 1) * experts.out;
  for (const auto& [in, out] : {std::pair{experts.in, up}, {experts.out, experts.in}}) {
    multiply(Pass::kForward, rank, in);
    multiply(Pass::kForward, out, rank);
    pass(Pass::kForward, 1, out);  // times alpha / rank
    pass(Pass::kForward, 2, out);  // sum
    pass(Pass::kBackwardData, 1, out);
    multiply(Pass::kBackwardData, rank, out);
    multiply(Pass::kBackwardData, in, rank);
    pass(Pass::kBackwardData, 2, in);
    multiply(Pass::kBackwardWeight, rank, in);
    multiply(Pass::kBackwardWeight, out, rank);
    cost.saved.emplace_back().elements = {.per_sample = rows * rank};
  }
  cost.forward_workspace.elements = {.per_sample = 2 * rows * std::max(up, experts.in)};
  cost.backward_workspace.elements = cost.forward_workspace.elements;
  return cost;
}

// The ops behind one linear op; the tensor that takes the place of its output.
TensorId AppendAdapter(OpAppender& appender, const ModelOp& op, const OpSpec& spec,
                       const Added& added, const TrainableSpec& trained) {
  const std::int64_t rank = trained.lora_rank;
  const ModuleId module = op.module;
  TensorId x = op.inputs[0];
  const TensorId y = op.outputs[0];
  const std::vector<ParamId> params = op.params;  // appending moves `op`
  const OpSpec down{.kind = OpKind::kLinear, .rows = spec.rows, .in = spec.in, .out = rank};
  const OpSpec up{.kind = OpKind::kLinear, .rows = spec.rows, .in = rank, .out = spec.out};
  const OpSpec add{.kind = OpKind::kAdd, .rows = spec.rows, .in = spec.out};
  if (trained.lora_dropout > 0.0) {
    const OpSpec dropout{.kind = OpKind::kDropout,
                         .rows = spec.rows,
                         .in = spec.in,
                         .dropout_p = trained.lora_dropout};
    x = appender.Append(module, "lora_dropout", dropout, {x}, {});
  }
  const auto of = [&](ModuleId own) { return own.valid() ? own : module; };
  TensorId t = appender.Append(of(added.module_a), "lora_A", down, {x}, {added.a});
  t = appender.Append(of(added.module_b), "lora_B", up, {t}, {added.b});
  if (trained.lora_magnitudes) {
    OpSpec base = spec;
    base.has_bias = false;
    // Behind dropout, PEFT takes the product with the whole weight once more.
    const TensorId of_base = trained.lora_dropout > 0.0
                                 ? appender.Append(module, "lora_base", base, {x}, {params[0]})
                                 : y;
    const OpSpec magnitudes{.kind = OpKind::kOther, .other = MagnitudeCost(spec, rank)};
    t = appender.Append(of(added.module_magnitude), "lora_magnitude", magnitudes, {of_base, t},
                        {added.magnitude});
  } else {
    const double factor =
        trained.lora_alpha > 0.0 ? trained.lora_alpha / static_cast<double>(rank) : 1.0;
    const OpSpec scale{.kind = OpKind::kScale, .rows = spec.rows, .in = spec.out, .factor = factor};
    t = appender.Append(module, "lora_scale", scale, {t}, {});
  }
  return appender.Append(module, "lora_add", add, {y, t}, {});
}

void InsertOps(Model& model, const Additions& additions, const TrainableSpec& trained) {
  std::vector<ModelOp> ops;
  ops.reserve(model.ops.size());
  OpAppender appender(model, ops);
  std::vector<TensorId> replaced(model.tensors.size());  // the adapted output of a linear op
  for (ModelOp& op : model.ops) {
    for (TensorId& input : op.inputs) {
      input = replaced[input.value].valid() ? replaced[input.value] : input;
    }
    for (const TensorId output : op.outputs) {
      model.tensors[output.value].producer = ModelOpId(ops.size());
    }
    const OpSpec spec = model.SpecOf(op);
    ops.push_back(std::move(op));
    if (spec.kind == OpKind::kExperts) {
      const Added& added = additions[ExpertsModule(model, ops.back()).value];
      if (added.expert_rank > 0) {
        const TensorId y = ops.back().outputs[0];
        const OpSpec adapter{.kind = OpKind::kOther,
                             .rows = spec.rows * spec.experts_per_token,
                             .experts = spec.experts,
                             .other = ExpertAdapterCost(spec, added.expert_rank)};
        replaced[y.value] =
            appender.Append(ops.back().module, "adapters", adapter, {y}, added.stacks);
      }
      continue;
    }
    const Added& added = additions[FirstNameOf(model, ops.back().module).value];
    if (added.has_adapter && spec.kind == OpKind::kLinear) {
      const TensorId y = ops.back().outputs[0];
      replaced[y.value] = AppendAdapter(appender, ops.back(), spec, added, trained);
    }
  }
  model.ops = std::move(ops);
}

}  // namespace

std::vector<bool> SharedModules(const Model& model) {
  std::vector<bool> is_shared(model.modules.size(), false);
  for (const Module& module : model.modules) {
    if (module.same_as.valid()) {
      is_shared[module.same_as.value] = true;
    }
  }
  return is_shared;
}

void InsertAdditions(Model& model, const TrainableSpec& spec, const std::vector<bool>& is_shared,
                     Additions& additions) {
  InsertModules(model, is_shared, spec.lora_magnitudes, additions);
  InsertParams(model, additions, spec);
  InsertOps(model, additions, spec);
}

}  // namespace shardwright
