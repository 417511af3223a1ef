#include "models/trainable.h"

#include <algorithm>
#include <charconv>
#include <utility>

#include "core/ranges.h"
#include "core/text.h"
#include "core/units.h"
#include "models/cut_experts.h"
#include "models/internal/builder.h"
#include "models/reference.h"

namespace shardwright {
namespace {

// What training adds to one module: the adapter's matrices (and DoRA's magnitudes) with their own
// modules, none where they belong to it; or a copy that learns whole.
struct Added {
  bool has_adapter = false;
  bool is_saved = false;
  std::int64_t in = 0;
  std::int64_t out = 0;
  ParamId a = {};
  ParamId b = {};
  ParamId magnitude = {};
  ModuleId module_a = {};
  ModuleId module_b = {};
  ModuleId module_magnitude = {};
  ModuleId copy = {};
  OpSpec experts = {};  // that have an adapter of this rank, in these tensors
  std::int64_t expert_rank = 0;
  std::vector<ParamId> stacks = {};
};
// By module; most modules have nothing.
using Additions = std::vector<Added>;

void Freeze(Model& model, const std::vector<std::string>& globs, const Path& where) {
  for (std::size_t i = 0; i < globs.size(); ++i) {
    bool has_match = false;
    for (Parameter& param : model.params) {
      if (MatchesGlob(globs[i], param.fqn)) {
        // An alias names storage that another parameter owns: both are frozen.
        (param.tied_to.valid() ? model.params[param.tied_to.value] : param).trainable = false;
        has_match = true;
      }
    }
    if (!has_match) {
      throw InputError(where.Field("frozen").Index(i).str(), '"' + globs[i] + '"',
                       "a pattern that matches the name of a parameter");
    }
  }
  for (Parameter& param : model.params) {
    if (param.tied_to.valid()) {
      param.trainable = model.params[param.tied_to.value].trainable;
    }
  }
}

// One of lora_targets: "x"; "!x", which takes back what others match; or "x@4" for experts.
struct Target {
  std::string glob;
  bool takes_back = false;
  std::int64_t width = 0;  // the rank, of experts; 0: it is for linear modules
};

Target TargetOf(const std::string& text, const std::string& where) {
  const std::size_t at = std::min(text.find('@'), text.size());
  Target target{text.substr(0, at), text.starts_with('!')};
  target.glob.erase(0, target.takes_back ? 1 : 0);
  if (at < text.size()) {
    const char* const end = text.data() + text.size();
    const auto [rest, problem] = std::from_chars(text.data() + at + 1, end, target.width);
    if (problem != std::errc() || rest != end || target.width < 1 ||
        target.width > ModelLimits::kFeatures) {
      throw InputError(where, Quoted(text), "a pattern, or PATTERN@N with N above 0");
    }
  }
  return target;
}

bool IsTarget(const Module& module, const std::string& glob) {
  return MatchesGlob(glob, glob.find('.') == std::string::npos ? module.name : module.fqn);
}

void CheckMatched(const std::vector<bool>& has_match, const std::vector<std::string>& globs,
                  const Path& where, const char* expected) {
  for (std::size_t i = 0; i < has_match.size(); ++i) {
    if (!has_match[i]) {
      throw InputError(where.Index(i).str(), '"' + globs[i] + '"', expected);
    }
  }
}

void FindTargets(const Model& model, const TrainableSpec& spec, const Path& where,
                 Additions& additions) {
  std::vector<Target> targets;
  std::vector<bool> has_match;
  for (const std::string& text : spec.lora_targets) {
    targets.push_back(TargetOf(text, where.Field("lora_targets").str()));
    has_match.push_back(targets.back().takes_back);
  }
  for (const ModelOp& op : model.ops) {
    const OpSpec& op_spec = model.SpecOf(op);
    const bool has_experts = op_spec.kind == OpKind::kExperts;
    if (op_spec.kind != OpKind::kLinear && !has_experts) {
      continue;
    }
    const ModuleId id = has_experts ? ExpertsModule(model, op) : FirstNameOf(model, op.module);
    const Module& module = model.modules[id.value];
    const bool is_left_out = AnyOf(targets, [&](const Target& target) {
      return target.takes_back && IsTarget(module, target.glob);
    });
    Added& added = additions[id.value];
    for (std::size_t i = 0; i < targets.size() && !is_left_out; ++i) {
      if (targets[i].takes_back || (targets[i].width > 0) != has_experts ||
          !IsTarget(module, targets[i].glob)) {
        continue;
      }
      has_match[i] = true;
      added.has_adapter = !has_experts;
      added.in = op_spec.in;
      added.out = op_spec.out;
      added.experts = op_spec;
      added.expert_rank = targets[i].width;
    }
  }
  CheckMatched(has_match, spec.lora_targets, where.Field("lora_targets"),
               "a pattern that matches the name of a linear module");
}

void FindSaved(const Model& model, const TrainableSpec& spec, const Path& where,
               const std::vector<bool>& is_shared, Additions& additions) {
  std::vector<bool> has_match(spec.lora_saved.size(), false);
  for (std::size_t m = 0; m < model.modules.size(); ++m) {
    const Module& module = model.modules[m];
    for (std::size_t i = 0; i < spec.lora_saved.size(); ++i) {
      if (module.params.empty() || module.same_as.valid() ||
          !IsTarget(module, spec.lora_saved[i])) {
        continue;
      }
      has_match[i] = true;
      if (!module.children.empty() || additions[m].has_adapter || is_shared[m]) {
        throw InputError(where.Field("lora_saved").Index(i).str(),
                         '"' + spec.lora_saved[i] + "\" for module " + module.fqn,
                         "modules with one name, without adapters and without modules below them");
      }
      additions[m].is_saved = true;
    }
  }
  CheckMatched(has_match, spec.lora_saved, where.Field("lora_saved"),
               "a pattern that matches the name of a module with parameters");
}

// Modules that are registered more than once.
std::vector<bool> SharedModules(const Model& model) {
  std::vector<bool> is_shared(model.modules.size(), false);
  for (const Module& module : model.modules) {
    if (module.same_as.valid()) {
      is_shared[module.same_as.value] = true;
    }
  }
  return is_shared;
}

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

bool MatchesGlob(std::string_view glob, std::string_view text) {
  // Greedy with one point to return to: the last star and the text it had taken so far.
  std::size_t g = 0;
  std::size_t t = 0;
  std::size_t star = std::string_view::npos;
  std::size_t resume = 0;
  while (t < text.size()) {
    if (g < glob.size() && glob[g] == '*') {
      star = g++;
      resume = t;
    } else if (g < glob.size() && (glob[g] == '?' || glob[g] == text[t])) {
      ++g;
      ++t;
    } else if (star != std::string_view::npos) {
      g = star + 1;
      t = ++resume;
    } else {
      return false;
    }
  }
  while (g < glob.size() && glob[g] == '*') {
    ++g;
  }
  return g == glob.size();
}

std::vector<bool> ConvertibleWeights(const Model& model) {
  std::vector<bool> result(model.params.size(), false);
  std::vector<bool> is_scored(model.tensors.size(), false);
  for (const ModelOp& loss : model.ops) {
    if (model.SpecOf(loss).kind != OpKind::kCrossEntropy) {
      continue;
    }
    // Behind views, scales and soft caps stands the head.
    TensorId t = loss.inputs[0];
    is_scored[t.value] = true;
    while (model.tensors[t.value].producer.valid()) {
      const ModelOp& op = model.ops[model.tensors[t.value].producer.value];
      if (!op.params.empty() || op.inputs.empty()) {
        break;
      }
      t = op.inputs[0];
      is_scored[t.value] = true;
    }
  }
  for (const ModelOp& op : model.ops) {
    // A bias stays as it is.
    if (op.name != "lora_base" && model.SpecOf(op).kind == OpKind::kLinear &&
        !is_scored[op.outputs[0].value] && !op.params.empty() &&
        model.params[op.params[0].value].shape.size() == 2) {
      result[op.params[0].value] = true;
    }
  }
  return result;
}

std::vector<std::string> MatchedTargets(const Model& model, const std::vector<std::string>& globs,
                                        const std::string& where) {
  std::vector<const Module*> linear, of_experts;
  std::int64_t chosen = 1;  // experts per token
  const std::vector<bool> convertible = ConvertibleWeights(model);
  for (const ModelOp& op : model.ops) {
    if (model.SpecOf(op).kind == OpKind::kExperts) {
      of_experts.push_back(&model.modules[ExpertsModule(model, op).value]);
      chosen = model.SpecOf(op).experts_per_token;
    } else if (!op.params.empty() && convertible[op.params[0].value]) {
      linear.push_back(&model.modules[FirstNameOf(model, op.module).value]);
    }
  }
  std::vector<std::string> result;
  const auto add = [&](const std::string& glob) {
    if (!IsIn(result, glob)) {
      result.push_back(glob);
    }
  };
  for (const std::string& given : globs) {
    // "x@32/k": the rank is shared by the experts of a token.
    const bool is_shared = given.ends_with("/k");
    Target target = TargetOf(given.substr(0, given.size() - (is_shared ? 2 : 0)), where);
    target.width = is_shared ? std::max<std::int64_t>(target.width / chosen, 1) : target.width;
    const std::string glob =
        target.width > 0 ? target.glob + '@' + std::to_string(target.width) : given;
    if (target.takes_back || (target.width > 0 && AnyOf(of_experts, [&](const Module* module) {
                                return IsTarget(*module, target.glob);
                              }))) {
      add(glob);
    }
    for (const Module* module : linear) {
      if (glob == "all-linear") {
        add(module->name);
      } else if (IsTarget(*module, glob)) {
        add(glob);
        break;
      }
    }
  }
  if (result.empty()) {
    std::string names;
    for (const std::string& glob : globs) {
      names += (names.empty() ? "" : ", ") + glob;
    }
    throw InputError(where, '"' + names + '"', "names of linear modules of " + model.name);
  }
  return result;
}

std::int64_t SamplesPerExample(TrainsBy trains_by) {
  return trains_by == TrainsBy::kOwn || trains_by >= TrainsBy::kKto ? 1 : 2;
}

bool HasReference(TrainsBy trains_by, const Rollout& rollout) {
  return trains_by == TrainsBy::kDpo || trains_by == TrainsBy::kKto ||
         (trains_by == TrainsBy::kGrpo && rollout.has_reference);
}

namespace {

void ApplyAdapters(Model& model, const TrainableSpec& spec, const Path& where) {
  if (spec.lora_rank == 0) {
    const std::pair<const char*, bool> others[] = {{"lora_targets", !spec.lora_targets.empty()},
                                                   {"lora_dropout", spec.lora_dropout != 0.0},
                                                   {"lora_alpha", spec.lora_alpha != 0.0},
                                                   {"lora_magnitudes", spec.lora_magnitudes},
                                                   {"lora_saved", !spec.lora_saved.empty()}};
    for (const auto& [name, is_given] : others) {
      if (is_given) {
        throw InputError(where.Field("lora_rank").str(), std::string("0 with ") + name,
                         "a rank above 0");
      }
    }
    return;
  }
  // DoRA's product of the identity counts in^2 x rank.
  const std::int64_t most = spec.lora_magnitudes ? std::int64_t{1} << 16 : ModelLimits::kFeatures;
  if (spec.lora_rank < 0 || spec.lora_rank > most) {
    throw InputError(where.Field("lora_rank").str(), std::to_string(spec.lora_rank),
                     "0 to " + std::to_string(most));
  }
  if (AllOf(spec.lora_targets, [](const std::string& glob) { return glob.starts_with('!'); })) {
    throw InputError(where.Field("lora_targets").str(),
                     "none with lora_rank " + std::to_string(spec.lora_rank),
                     "at least one pattern, such as \"q_proj\"");
  }
  Additions additions(model.modules.size());
  const std::vector<bool> is_shared = SharedModules(model);
  FindTargets(model, spec, where, additions);
  FindSaved(model, spec, where, is_shared, additions);
  InsertModules(model, is_shared, spec.lora_magnitudes, additions);
  InsertParams(model, additions, spec);
  InsertOps(model, additions, spec);
}

}  // namespace

void ApplyTrainable(Model& model, const TrainableSpec& spec, const Path& where) {
  if (spec.trains_by == TrainsBy::kReward) {
    AddScore(model, where);
  } else if (spec.trains_by == TrainsBy::kGrpo) {
    ScoreCompletions(model, spec.rollout.completion, where);
  }
  Freeze(model, spec.frozen, where);
  ApplyAdapters(model, spec, where);
  AddForwards(model, spec);
}

}  // namespace shardwright
