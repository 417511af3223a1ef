#include "models/trainable.h"

#include <algorithm>
#include <optional>
#include <utility>

#include "core/units.h"
#include "models/internal/builder.h"

namespace shardwright {
namespace {

// The two adapter matrices of one module, and their own modules: none where they belong to it.
struct Adapter {
  std::int64_t in = 0;
  std::int64_t out = 0;
  ParamId a;
  ParamId b;
  ModuleId module_a = {};
  ModuleId module_b = {};
};
// By module; most modules have none.
using Adapters = std::vector<std::optional<Adapter>>;

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

bool IsTarget(const Module& module, const std::string& glob) {
  return MatchesGlob(glob, glob.find('.') == std::string::npos ? module.name : module.fqn);
}

Adapters FindTargets(const Model& model, const TrainableSpec& spec, const Path& where) {
  Adapters adapters(model.modules.size());
  std::vector<bool> has_match(spec.lora_targets.size(), false);
  for (const ModelOp& op : model.ops) {
    const OpSpec& op_spec = model.SpecOf(op);
    if (op_spec.kind != OpKind::kLinear) {
      continue;
    }
    const ModuleId module = FirstNameOf(model, op.module);
    for (std::size_t i = 0; i < spec.lora_targets.size(); ++i) {
      if (IsTarget(model.modules[module.value], spec.lora_targets[i])) {
        adapters[module.value] = Adapter{.in = op_spec.in, .out = op_spec.out, .a = {}, .b = {}};
        has_match[i] = true;
      }
    }
  }
  for (std::size_t i = 0; i < has_match.size(); ++i) {
    if (!has_match[i]) {
      throw InputError(where.Field("lora_targets").Index(i).str(), '"' + spec.lora_targets[i] + '"',
                       "a pattern that matches the name of a linear module");
    }
  }
  return adapters;
}

Parameter AdapterParam(const Module& module, ModuleId id, const char* name, std::int64_t out,
                       std::int64_t in) {
  Parameter param;
  param.fqn = module.fqn + '.' + name;
  param.shape = {out, in};
  param.module = id;
  return param;
}

// Puts the new modules behind those that they belong to, which keeps the order, and renumbers.
void InsertModules(Model& model, Adapters& adapters) {
  std::vector<bool> is_shared(model.modules.size(), false);  // registered more than once
  for (const Module& module : model.modules) {
    if (module.same_as.valid()) {
      is_shared[module.same_as.value] = true;
    }
  }
  std::vector<Module> modules;
  std::vector<ModuleId> renamed(model.modules.size());
  std::vector<std::vector<ModuleId>> fresh(model.modules.size());  // as renamed
  for (std::size_t m = 0; m < model.modules.size(); ++m) {
    renamed[m] = ModuleId(modules.size());
    modules.push_back(std::move(model.modules[m]));
    const auto add = [&](const char* name) {
      const ModuleId id(modules.size());
      Module child;
      child.name = name;
      child.fqn = modules[renamed[m].value].fqn + '.' + name;
      child.class_name = "Linear";
      child.parent = ModuleId(m);
      modules.push_back(std::move(child));
      fresh[m].push_back(id);
      return id;
    };
    if (adapters[m] && modules.back().children.empty() && !is_shared[m]) {
      adapters[m]->module_a = add("lora_A");
      adapters[m]->module_b = add("lora_B");
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
  Adapters moved(modules.size());
  for (std::size_t m = 0; m < renamed.size(); ++m) {
    moved[renamed[m].value] = adapters[m];
  }
  adapters = std::move(moved);
  for (ModelOp& op : model.ops) {
    rename(op.module);
    rename(op.called_again);
    std::for_each(op.returns_input.begin(), op.returns_input.end(), rename);
  }
  model.modules = std::move(modules);
}

// Inserts the new parameters behind those of the module that they belong to, which keeps the
// registration order, freezes everything else and renumbers.
void InsertParams(Model& model, Adapters& adapters, std::int64_t rank) {
  std::vector<Parameter> params;
  std::vector<ParamId> renamed(model.params.size());
  std::vector<std::vector<ParamId>> given(model.modules.size());
  for (std::size_t m = 0; m < model.modules.size(); ++m) {
    given[m].swap(model.modules[m].params);
  }
  for (std::size_t m = 0; m < model.modules.size(); ++m) {
    for (const ParamId id : given[m]) {
      renamed[id.value] = ParamId(params.size());
      model.modules[m].params.push_back(renamed[id.value]);
      params.push_back(std::move(model.params[id.value]));
      params.back().trainable = false;
    }
    if (!adapters[m]) {
      continue;
    }
    const auto add = [&](const char* name, ModuleId own, std::int64_t out, std::int64_t in) {
      const ModuleId owner = own.valid() ? own : ModuleId(m);
      const ParamId id(params.size());
      params.push_back(AdapterParam(model.modules[m], owner, name, out, in));
      model.modules[owner.value].params.push_back(id);
      return id;
    };
    Adapter& adapter = *adapters[m];
    adapter.a = add("lora_A.weight", adapter.module_a, rank, adapter.in);
    adapter.b = add("lora_B.weight", adapter.module_b, adapter.out, rank);
  }
  for (Parameter& param : params) {
    if (param.tied_to.valid()) {
      param.tied_to = renamed[param.tied_to.value];
    }
  }
  for (ModelOp& op : model.ops) {
    for (ParamId& id : op.params) {
      id = renamed[id.value];
    }
  }
  model.params = std::move(params);
}

// Appends ops to a model whose specs may already hold an equal one.
class OpAppender {
 public:
  OpAppender(Model& model, std::vector<ModelOp>& ops) : model_(model), ops_(ops) {}

  TensorId Append(ModuleId module, const char* name, const OpSpec& spec,
                  std::vector<TensorId> inputs, std::vector<ParamId> params) {
    const auto known = std::find(model_.specs.begin(), model_.specs.end(), spec);
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

void InsertOps(Model& model, const Adapters& adapters, const TrainableSpec& trained) {
  const std::int64_t rank = trained.lora_rank;
  const double factor =
      trained.lora_alpha > 0.0 ? trained.lora_alpha / static_cast<double>(rank) : 1.0;
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
    const ModuleId module = op.module;
    const OpSpec spec = model.SpecOf(op);
    ops.push_back(std::move(op));
    const std::optional<Adapter>& adapter = adapters[FirstNameOf(model, module).value];
    if (!adapter || spec.kind != OpKind::kLinear) {
      continue;
    }
    TensorId x = ops.back().inputs[0];
    const TensorId y = ops.back().outputs[0];
    const OpSpec down{.kind = OpKind::kLinear, .rows = spec.rows, .in = spec.in, .out = rank};
    const OpSpec up{.kind = OpKind::kLinear, .rows = spec.rows, .in = rank, .out = spec.out};
    const OpSpec scale{.kind = OpKind::kScale, .rows = spec.rows, .in = spec.out, .factor = factor};
    const OpSpec add{.kind = OpKind::kAdd, .rows = spec.rows, .in = spec.out};
    if (trained.lora_dropout > 0.0) {
      const OpSpec dropout{.kind = OpKind::kDropout,
                           .rows = spec.rows,
                           .in = spec.in,
                           .dropout_p = trained.lora_dropout};
      x = appender.Append(module, "lora_dropout", dropout, {x}, {});
    }
    const auto of = [&](ModuleId own) { return own.valid() ? own : module; };
    TensorId t = appender.Append(of(adapter->module_a), "lora_A", down, {x}, {adapter->a});
    t = appender.Append(of(adapter->module_b), "lora_B", up, {t}, {adapter->b});
    t = appender.Append(module, "lora_scale", scale, {t}, {});
    replaced[y.value] = appender.Append(module, "lora_add", add, {y, t}, {});
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
    if (model.SpecOf(op).kind == OpKind::kLinear && !is_scored[op.outputs[0].value] &&
        !op.params.empty() && model.params[op.params[0].value].shape.size() == 2) {
      result[op.params[0].value] = true;
    }
  }
  return result;
}

std::vector<std::string> MatchedTargets(const Model& model, const std::vector<std::string>& globs,
                                        const std::string& where) {
  std::vector<const Module*> linear;
  const std::vector<bool> convertible = ConvertibleWeights(model);
  for (const ModelOp& op : model.ops) {
    if (!op.params.empty() && convertible[op.params[0].value]) {
      linear.push_back(&model.modules[FirstNameOf(model, op.module).value]);
    }
  }
  std::vector<std::string> result;
  const auto add = [&](const std::string& glob) {
    if (std::find(result.begin(), result.end(), glob) == result.end()) {
      result.push_back(glob);
    }
  };
  for (const std::string& glob : globs) {
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

void ApplyTrainable(Model& model, const TrainableSpec& spec, const Path& where) {
  Freeze(model, spec.frozen, where);
  if (spec.lora_rank == 0) {
    if (!spec.lora_targets.empty()) {
      throw InputError(where.Field("lora_rank").str(), "0 with lora_targets", "a rank above 0");
    }
    if (spec.lora_dropout != 0.0) {
      throw InputError(where.Field("lora_rank").str(), "0 with lora_dropout", "a rank above 0");
    }
    if (spec.lora_alpha != 0.0) {
      throw InputError(where.Field("lora_rank").str(), "0 with lora_alpha", "a rank above 0");
    }
    return;
  }
  if (spec.lora_rank < 0 || spec.lora_rank > ModelLimits::kFeatures) {
    throw InputError(where.Field("lora_rank").str(), std::to_string(spec.lora_rank),
                     "0 to " + std::to_string(ModelLimits::kFeatures));
  }
  if (spec.lora_targets.empty()) {
    throw InputError(where.Field("lora_targets").str(),
                     "none with lora_rank " + std::to_string(spec.lora_rank),
                     "at least one pattern, such as \"q_proj\"");
  }
  Adapters adapters = FindTargets(model, spec, where);
  InsertModules(model, adapters);
  InsertParams(model, adapters, spec.lora_rank);
  InsertOps(model, adapters, spec);
}

}  // namespace shardwright
