#include "models/model.h"

#include <functional>
#include <numeric>
#include <set>
#include <utility>

#include <boost/graph/adjacency_list.hpp>
#include <boost/graph/strong_components.hpp>

#include "core/error.h"
#include "core/ranges.h"
#include "core/text.h"
#include "models/internal/order.h"
#include "models/reference.h"

namespace shardwright {
namespace {

// Six FLOPs per multiplied parameter: two forward, two for the gradient of the input, two for the
// gradient of the weight (absent when the weight is frozen).
double TrainingFlopsPerParameter(const Parameter& param) {
  return param.trainable ? 6.0 : 4.0;
}

// Rows in which the parameters of one op are used per sample, as published formulas count them: a
// norm counts once per token even where it runs once per head.
double ParameterUses(const Model& model, const OpSpec& spec) {
  const double tokens =
      static_cast<double>(std::max<std::int64_t>(model.sequence_length / model.context_ranks, 1));
  switch (spec.kind) {
    case OpKind::kLinear:
    case OpKind::kRouter:
      return static_cast<double>(spec.rows);
    case OpKind::kExperts:
      // Each token uses experts_per_token of the experts.
      return static_cast<double>(spec.rows) * static_cast<double>(spec.experts_per_token) /
             static_cast<double>(spec.experts);
    case OpKind::kConv2d:
      return static_cast<double>(spec.height_out * spec.width_out);
    default:
      if (spec.experts > 0) {  // of their adapters, by routed rows
        return static_cast<double>(spec.rows) / static_cast<double>(spec.experts);
      }
      return std::min(
          static_cast<double>(std::max<std::int64_t>(spec.rows * model.tensor_ranks, 1)), tokens);
  }
}

// Is this the lookup of the token table (ids of the sample), not of a position table (ids that are
// the same for every sample)?
bool IsTokenLookup(const Model& model, const ModelOp& op) {
  return model.SpecOf(op).kind == OpKind::kEmbedding && !op.inputs.empty() &&
         model.tensors[op.inputs[0].value].per_sample;
}

[[noreturn]] void Fail(const std::string& where, const std::string& found,
                       const std::string& expected) {
  throw InputError(where, found, expected);
}

// Throws where two modules or parameters have one name. They are sorted by their hashes first, as a
// set of all names of a model with 130,000 modules is slow.
template <class T>
void CheckNames(const std::vector<T>& things, const char* what, const std::string& where) {
  std::vector<std::pair<std::size_t, std::string_view>> names;
  names.reserve(things.size());
  for (const T& thing : things) {
    names.emplace_back(std::hash<std::string_view>()(thing.fqn), thing.fqn);
  }
  SortAll(names);
  const auto twice = std::adjacent_find(names.begin(), names.end());
  if (twice != names.end()) {
    Fail(where, std::string("two ") + what + " named " + Quoted(twice->second), "unique names");
  }
}

void ValidateModules(const Model& model, const std::string& where) {
  if (model.modules.empty()) {
    Fail(where, "no module", "at least the root module");
  }
  CheckNames(model.modules, "modules", where);
  for (std::size_t i = 0; i < model.modules.size(); ++i) {
    const Module& module = model.modules[i];
    const bool parent_ok =
        i == 0 ? !module.parent.valid() : module.parent.valid() && module.parent.value < i;
    if (!parent_ok) {
      Fail(where, "module " + Quoted(module.fqn) + " before its parent", "parents first");
    }
    for (const ModuleId child : module.children) {
      if (child.value >= model.modules.size() || model.modules[child.value].parent != ModuleId(i)) {
        Fail(where, "a child of module " + Quoted(module.fqn) + " with another parent",
             "a module tree");
      }
    }
  }
}

// A module that is registered once more has the same children and storages as under its first name.
void ValidateAliases(const Model& model, const std::string& where) {
  for (std::size_t i = 0; i < model.modules.size(); ++i) {
    const Module& module = model.modules[i];
    if (!module.same_as.valid()) {
      continue;
    }
    if (module.same_as.value >= i || model.modules[module.same_as.value].same_as.valid()) {
      Fail(where, "module " + Quoted(module.fqn) + " that is the same as a later one",
           "the first name of the module");
    }
    const Module& first = model.modules[module.same_as.value];
    bool is_same = first.class_name == module.class_name &&
                   first.children.size() == module.children.size() &&
                   first.params.size() == module.params.size();
    for (std::size_t k = 0; is_same && k < module.children.size(); ++k) {
      is_same = FirstNameOf(model, module.children[k]) == FirstNameOf(model, first.children[k]);
    }
    for (std::size_t k = 0; is_same && k < module.params.size(); ++k) {
      const ParamId tied = model.params[first.params[k].value].tied_to;
      is_same =
          model.params[module.params[k].value].tied_to == (tied.valid() ? tied : first.params[k]);
    }
    if (!is_same) {
      Fail(where, "module " + Quoted(module.fqn) + " that is unlike " + Quoted(first.fqn),
           "class, children and parameters (tied) of the module that it is the same as");
    }
  }
}

void ValidateParams(const Model& model, const std::string& where) {
  CheckNames(model.params, "parameters", where);
  for (std::size_t i = 0; i < model.params.size(); ++i) {
    const Parameter& param = model.params[i];
    if (param.module.value >= model.modules.size()) {
      Fail(where, "parameter " + Quoted(param.fqn) + " of no module", "a module of the model");
    }
    if (AnyOf(param.shape, [](auto n) { return n < 1; })) {
      Fail(where, "parameter " + Quoted(param.fqn) + " with an empty dimension", "positive sizes");
    }
    if (!param.tied_to.valid()) {
      continue;
    }
    if (param.tied_to.value >= i) {
      Fail(where, "parameter " + Quoted(param.fqn) + " tied to a later one", "an earlier one");
    }
    const Parameter& target = model.params[param.tied_to.value];
    if (target.tied_to.valid() || target.shape != param.shape) {
      Fail(where, "parameter " + Quoted(param.fqn) + " tied to " + Quoted(target.fqn),
           "an untied parameter of the same shape");
    }
  }
}

// A further call of a module begins behind an op of the call before.
void CheckCall(const Model& model, std::size_t i, const std::string& where) {
  const ModelOp& op = model.ops[i];
  if (!op.called_again.valid()) {
    return;
  }
  const std::string name = Quoted(OpLabel(model, op));
  if (op.called_again.value >= model.modules.size()) {
    Fail(where, "op " + name + " that calls no module of the model again", "ids of the model");
  }
  const std::string module = Quoted(model.modules[op.called_again.value].fqn);
  if (op.called_again == ModuleId(0) || !IsInside(model, op.module, op.called_again)) {
    Fail(where, "op " + name + " that begins a further call of " + module,
         "its module or one around it, but for the root");
  }
  if (i == 0 || !IsInside(model, model.ops[i - 1].module, op.called_again)) {
    Fail(where, "op " + name + " that begins a further call of " + module,
         "an op of the same module right before it");
  }
}

// Modules that return what they were given end with the op.
void CheckReturns(const Model& model, std::size_t i, const std::string& where) {
  const ModelOp& op = model.ops[i];
  for (const ModuleId returning : op.returns_input) {
    const std::string name = Quoted(OpLabel(model, op));
    if (returning.value >= model.modules.size()) {
      Fail(where, "op " + name + " that ends a call of no module", "ids of the model");
    }
    const std::string module = Quoted(model.modules[returning.value].fqn);
    if (returning == ModuleId(0) || !IsInside(model, op.module, returning)) {
      Fail(where, "op " + name + " that ends a call of " + module,
           "its module or one around it, but for the root");
    }
    if (i + 1 < model.ops.size() && IsInside(model, model.ops[i + 1].module, returning) &&
        !IsCalledAgain(model, i + 1, returning)) {
      Fail(where, "op " + name + " that ends a call of " + module, "its last op");
    }
  }
}

// Other ops than batch norm multiply operands of one dtype.
void CheckFullPrecision(const Model& model, const ModelOp& op, const std::string& where) {
  for (const ParamId id : op.params) {
    const Parameter& param = model.params[id.value];
    if (param.full_precision && model.SpecOf(op).kind != OpKind::kBatchNorm) {
      Fail(where,
           "parameter " + Quoted(param.fqn) + " in full precision, which op " +
               Quoted(OpLabel(model, op)) + " reads",
           "full_precision for batch norms only");
    }
  }
}

void ValidateOps(const Model& model, const std::string& where) {
  std::vector<ModelOpId> producer(model.tensors.size());
  for (std::size_t i = 0; i < model.ops.size(); ++i) {
    const ModelOp& op = model.ops[i];
    const auto fail = [&](const std::string& found, const std::string& expected) {
      Fail(where, "op " + Quoted(OpLabel(model, op)) + found, expected);
    };
    if (op.spec >= model.specs.size() || op.module.value >= model.modules.size()) {
      Fail(where, "op " + Quoted(op.name) + " without module or spec", "ids of the model");
    }
    for (const ParamId param : op.params) {
      if (param.value >= model.params.size()) {
        fail(" that reads no parameter of the model", "ids of the model");
      }
    }
    CheckFullPrecision(model, op, where);
    CheckCall(model, i, where);
    CheckReturns(model, i, where);
    for (const TensorId tensor : op.outputs) {
      if (tensor.value >= model.tensors.size() || producer[tensor.value].valid()) {
        fail(" that writes a tensor with another producer", "one producer per tensor");
      }
      producer[tensor.value] = ModelOpId(i);
    }
    for (const TensorId tensor : op.inputs) {
      if (tensor.value >= model.tensors.size()) {
        fail(" that reads no tensor of the model", "ids of the model");
      }
    }
  }
  for (std::size_t i = 0; i < model.tensors.size(); ++i) {
    if (model.tensors[i].producer != producer[i]) {
      Fail(where, "tensor " + std::to_string(i) + " with a producer that does not write it",
           "the op that writes it");
    }
  }
}

// The ops of one set of cycles with common ops, in execution order; empty when there is no cycle.
std::vector<std::size_t> FindCycle(const Model& model) {
  // An edge from the producer of a tensor to each op that reads it.
  using Graph = boost::adjacency_list<boost::vecS, boost::vecS, boost::directedS>;
  Graph graph(model.ops.size());
  std::vector<bool> reads_itself(model.ops.size(), false);
  for (std::size_t i = 0; i < model.ops.size(); ++i) {
    for (const TensorId tensor : model.ops[i].inputs) {
      const ModelOpId producer = model.tensors[tensor.value].producer;
      if (producer.valid()) {
        boost::add_edge(producer.value, i, graph);
        reads_itself[i] = reads_itself[i] || producer.value == i;
      }
    }
  }
  // Ops lie on a common cycle exactly when they are strongly connected.
  std::vector<std::size_t> component(model.ops.size());
  const std::size_t count = boost::strong_components(
      graph,
      boost::make_iterator_property_map(component.begin(), boost::get(boost::vertex_index, graph)));
  std::vector<std::vector<std::size_t>> members(count);
  for (std::size_t i = 0; i < model.ops.size(); ++i) {
    members[component[i]].push_back(i);
  }
  for (std::size_t i = 0; i < model.ops.size(); ++i) {
    if (members[component[i]].size() > 1 || reads_itself[i]) {
      return members[component[i]];
    }
  }
  return {};
}

std::string NamesOf(const Model& model, const std::vector<std::size_t>& ops) {
  constexpr std::size_t kMostNamed = 8;
  const std::string names =
      Listed(std::span(ops).first(std::min(ops.size(), kMostNamed)),
             [&](std::size_t op) { return Quoted(OpLabel(model, model.ops[op])); });
  return ops.size() <= kMostNamed
             ? names
             : names + " and " + std::to_string(ops.size() - kMostNamed) + " more";
}

}  // namespace

std::int64_t Parameter::Elements() const {
  return std::accumulate(shape.begin(), shape.end(), std::int64_t{1}, std::multiplies<>());
}

std::vector<std::int64_t> Parameter::WholeShape() const {
  std::vector<std::int64_t> whole = shape;
  if (tensor_parts > 1) {
    whole[tensor_dimension] *= tensor_parts;
  }
  return whole;
}

std::int64_t CountParameters(const Model& model, bool trainable_only) {
  std::int64_t count = 0;
  for (const Parameter& param : model.params) {
    if (!param.tied_to.valid() && (param.trainable || !trainable_only)) {
      count += param.Elements() * param.parts * param.tensor_parts;
    }
  }
  return count;
}

ModuleId FindModule(const Model& model, std::string_view fqn) {
  for (std::size_t i = 0; i < model.modules.size(); ++i) {
    if (model.modules[i].fqn == fqn) {
      return ModuleId(i);
    }
  }
  return {};
}

ModuleId FirstNameOf(const Model& model, ModuleId module) {
  const ModuleId first = model.modules[module.value].same_as;
  return first.valid() ? first : module;
}

bool IsContainer(std::string_view class_name) {
  return class_name == "ModuleList" || class_name == "ModuleDict";
}

bool TrainsBiasOnly(const Model& model, const ModelOp& op, const std::vector<bool>& has_grad) {
  const OpKind kind = model.SpecOf(op).kind;
  return (kind == OpKind::kLinear || kind == OpKind::kConv2d) && op.params.size() == 2 &&
         !has_grad[op.params[0].value] && has_grad[op.params[1].value];
}

bool IsBlock(const Model& model, ModuleId module) {
  const std::string& name = model.modules[module.value].class_name;
  return IsIn(model.block_classes, name);
}

bool IsInside(const Model& model, ModuleId module, ModuleId ancestor) {
  // Parents precede their children, so the climb may stop as soon as it has passed the ancestor.
  while (module.valid() && module > ancestor) {
    module = model.modules[module.value].parent;
  }
  return module.valid() && module == ancestor;
}

std::vector<ModuleId> OuterOnes(const Model& model, const std::vector<ModuleId>& modules) {
  const std::set<ModuleId> all(modules.begin(), modules.end());
  std::vector<ModuleId> outer = modules;
  std::erase_if(outer, [&](ModuleId id) {
    do {
      id = model.modules[id.value].parent;
    } while (id.valid() && !all.contains(id));
    return id.valid();
  });
  return outer;
}

bool IsCalledAgain(const Model& model, std::size_t i, ModuleId module) {
  const ModuleId again = model.ops[i].called_again;
  return again.valid() && IsInside(model, module, again);
}

Flops ConventionFlopsPerSample(const Model& model) {
  double flops = 0.0;
  for (const ModelOp& op : model.ops) {
    const OpSpec& spec = model.SpecOf(op);
    const bool is_forward = spec.other.stops_gradient || IsOfReference(model, op.module);
    if (spec.kind == OpKind::kAttention) {
      // Scores (2 * head_dim) and values (2 * value_dim) per query, key and head, times three for
      // forward and backward: 12 * heads * head_dim * seq per token when the two sizes are equal.
      flops += (is_forward ? 2.0 : 6.0) * static_cast<double>(spec.heads * model.tensor_ranks) *
               static_cast<double>(spec.head_dim + spec.value_dim) *
               static_cast<double>(spec.rows) * static_cast<double>(spec.seq_k);
    }
    if (IsTokenLookup(model, op) || spec.kind == OpKind::kPositionBias) {
      continue;
    }
    const double uses = ParameterUses(model, spec);
    for (const ParamId id : op.params) {
      const Parameter& param = model.params[id.value];
      flops += (is_forward ? 2.0 : TrainingFlopsPerParameter(param)) *
               static_cast<double>(param.Elements() * param.tensor_parts) * uses;
    }
  }
  return Flops(flops * static_cast<double>(model.context_ranks));
}

std::string OpLabel(const Model& model, const ModelOp& op) {
  const std::string& module = model.modules[op.module.value].fqn;
  const std::string& own = model.modules[op.module.value].name;
  if (module.empty()) {
    return op.name;
  }
  // A layer's only op is named after the layer; do not say it twice.
  return op.name == own ? module : module + "." + op.name;
}

void CheckExecutionOrder(const Model& model, const std::string& where) {
  for (std::size_t i = 0; i < model.ops.size(); ++i) {
    for (const TensorId tensor : model.ops[i].inputs) {
      const ModelOpId producer = model.tensors[tensor.value].producer;
      if (!producer.valid() || producer.value < i) {
        continue;
      }
      const std::vector<std::size_t> cycle = FindCycle(model);
      if (!cycle.empty()) {
        Fail(where, "a cycle through ops " + NamesOf(model, cycle), "a graph without cycles");
      }
      Fail(where,
           "op " + Quoted(OpLabel(model, model.ops[i])) + " before op " +
               Quoted(OpLabel(model, model.ops[producer.value])) + " whose output it reads",
           "ops in execution order");
    }
  }
}

void ValidateModel(const Model& model, const std::string& where) {
  ValidateModules(model, where);
  ValidateParams(model, where);
  ValidateAliases(model, where);
  ValidateOps(model, where);
  CheckExecutionOrder(model, where);
}

}  // namespace shardwright
