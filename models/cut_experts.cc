#include "models/cut_experts.h"

#include <iterator>
#include <string_view>

#include "core/error.h"
#include "core/ranges.h"
#include "core/text.h"
#include "models/internal/cutter.h"

namespace shardwright {
namespace {

class ExpertCutter : Cutter {
 public:
  ExpertCutter(Model& model, std::int64_t ranks, const std::string& where)
      : Cutter(model, ranks, where), keeps_(model.params.size(), true) {}

  void Run() {
    bool has_experts = false;
    std::vector<ModelOp> ops = std::exchange(model_.ops, {});
    for (std::size_t i = 0; i < ops.size(); ++i) {
      if (model_.SpecOf(ops[i]).kind != OpKind::kExperts) {
        model_.ops.push_back(std::move(ops[i]));
        continue;
      }
      has_experts = true;
      const bool has_biases = i + 1 < ops.size() && AreBiases(ops[i], ops[i + 1]);
      CutParameters(ops[i], has_biases ? &ops[i + 1] : nullptr);
      Replace(std::move(ops[i]), has_biases ? &ops[i + 1] : nullptr);
      i += has_biases ? 1 : 0;
    }
    if (!has_experts) {
      Refuse("1: model " + Quoted(model_.name) + " has no experts");
    }
    SetProducers();
    DropParameters();
  }

 private:
  // Does `next` add to what the experts `op` return the biases that stand beside their matrices, or
  // what their adapters make?
  [[nodiscard]] bool AreBiases(const ModelOp& op, const ModelOp& next) const {
    const ModuleId module = ExpertsModule(model_, op);
    return model_.SpecOf(next).kind == OpKind::kOther && next.outputs.size() == 1 &&
           next.inputs == op.outputs && !next.params.empty() &&
           AllOf(next.params, [&](ParamId p) { return model_.params[p.value].module == module; });
  }

  // A matrix per expert: those of the first experts stay. All experts in one tensor: its first
  // part. `biases` may be null.
  void CutParameters(ModelOp& op, const ModelOp* biases) {
    const std::int64_t experts = model_.SpecOf(op).experts;
    std::int64_t here = experts;
    Divide(here, op, "experts");
    const std::size_t matrices = model_.SpecOf(op).gated ? 3 : 2;
    const bool is_stacked = op.params.size() < matrices * static_cast<std::size_t>(experts);
    std::vector<ParamId> params = op.params;
    if (biases != nullptr) {
      params.insert(params.end(), biases->params.begin(), biases->params.end());
    }
    for (const ParamId p : model_.modules[ExpertsModule(model_, op).value].params) {
      if (!IsIn(params, p)) {
        Refuse("1: experts with " + Quoted(model_.params[p.value].fqn) +
               ", a bias, cannot be shared out so far");
      }
    }
    for (const ParamId p : params) {
      Parameter& param = model_.params[p.value];
      if (param.tied_to.valid() || param.parts != 1 ||
          ((is_stacked || !IsIn(op.params, p)) &&
           (param.shape.empty() || param.shape.front() != experts))) {
        Refuse("1: parameter " + Quoted(param.fqn) + " cannot be cut by experts");
      }
      param.parts = ranks_;
      param.shape.front() /= is_stacked || !IsIn(op.params, p) ? ranks_ : 1;
    }
    if (!is_stacked) {
      const auto kept = static_cast<std::ptrdiff_t>(op.params.size()) / ranks_;
      std::for_each(op.params.begin() + kept, op.params.end(),
                    [&](ParamId p) { keeps_[p.value] = false; });
      CheckAlike(op.params, static_cast<std::size_t>(kept));
      op.params.resize(static_cast<std::size_t>(kept));
    }
  }

  // The first rank's experts stand for those of all.
  void CheckAlike(const std::vector<ParamId>& params, std::size_t kept) const {
    for (std::size_t k = kept; k < params.size(); ++k) {
      const Parameter& param = model_.params[params[k].value];
      if (param.trainable != model_.params[params[k % kept].value].trainable) {
        Refuse("1: " + Quoted(param.fqn) +
               " and the same expert of the first rank are "
               "not both trained or both frozen");
      }
    }
  }

  void Replace(ModelOp op, const ModelOp* biases) {
    const OpSpec whole = model_.SpecOf(op);
    const std::int64_t rows = whole.rows * whole.experts_per_token;
    OpSpec spec;
    spec.rows = whole.rows;
    spec.in = whole.in;
    spec.experts = whole.experts;
    spec.experts_per_token = whole.experts_per_token;
    OpSpec experts = whole;
    experts.rows = spec.rows = rows;
    experts.experts /= ranks_;
    experts.experts_per_token = 1;
    experts.routed = true;
    const auto of_tokens = [&](OpKind kind) {
      OpSpec s = spec;
      s.kind = kind;
      s.rows = whole.rows;
      return s;
    };
    OpSpec exchange = spec;
    exchange.kind = OpKind::kExchange;
    OpSpec leave = exchange;
    leave.routed = true;
    // Frameworks dispatch and combine around the module that holds the experts, which sends and
    // receives.
    const ModuleId module = ExpertsModule(model_, op);
    if (IsInside(model_, op.module, module)) {
      op.module = model_.modules[module.value].parent;
    }
    const TensorId router = op.inputs[1];
    TensorId x = Add(op, "dispatch", of_tokens(OpKind::kDispatch), {op.inputs[0], router}, {});
    const TensorId counts = AddCounts(whole.experts);
    x = Add(op, "to_experts", leave, {x, counts}, {});
    x = Add(op, op.name, experts, {x}, op.params);
    if (biases != nullptr) {
      OpSpec added = model_.SpecOf(*biases);
      added.rows = rows;
      added.in = whole.in;
      added.experts /= ranks_;
      added.other.outputs.front().elements = rows * whole.in;
      for (OtherKernel& kernel : added.other.kernels) {  // of the weights of the experts here
        kernel.read.elements.fixed /= ranks_;
        kernel.written.elements.fixed /= ranks_;
      }
      const Tensor sum = model_.tensors[Add(op, biases->name, added, {x}, biases->params).value];
      model_.tensors.pop_back();
      x = std::exchange(op.outputs, biases->outputs).front();
      model_.tensors[x.value] = sum;
      model_.ops.back().outputs = {x};
      op.returns_input = biases->returns_input;
    }
    x = Add(op, "from_experts", exchange, {x}, {});
    std::for_each(model_.ops.end() - (biases != nullptr ? 4 : 3), model_.ops.end(),
                  [&](ModelOp& o) { o.module = module; });
    op.inputs = {x, router};
    op.name = "combine";
    op.params.clear();
    op.called_again = {};
    op.spec = SpecIndex(of_tokens(OpKind::kCombine));
    model_.ops.push_back(std::move(op));
  }

  // How many rows the dispatch has for each expert, as its second output.
  TensorId AddCounts(std::int64_t experts) {
    const TensorId counts(model_.tensors.size());
    model_.tensors.push_back(
        {.role = TensorRole::kIndex, .elements = experts, .per_sample = false, .producer = {}});
    model_.ops.back().outputs.push_back(counts);
    return counts;
  }

  // An op in front of what remains of `op`; returns its output, which has the rows of routed
  // tokens.
  TensorId Add(const ModelOp& op, const std::string& name, const OpSpec& spec,
               std::vector<TensorId> inputs, std::vector<ParamId> params) {
    Tensor out = model_.tensors[op.outputs[0].value];
    out.elements =
        spec.in * spec.rows * (spec.kind == OpKind::kDispatch ? spec.experts_per_token : 1);
    model_.tensors.push_back(out);
    ModelOp added;
    added.spec = SpecIndex(spec);
    added.module = op.module;
    added.name = name;
    added.inputs = std::move(inputs);
    added.outputs = {TensorId(model_.tensors.size() - 1)};
    added.params = std::move(params);
    added.called_again = spec.kind == OpKind::kDispatch ? op.called_again : ModuleId();
    model_.ops.push_back(std::move(added));
    return model_.ops.back().outputs[0];
  }

  void DropParameters() {
    std::vector<ParamId> moved(model_.params.size());
    std::vector<Parameter> kept;
    for (std::size_t p = 0; p < moved.size(); ++p) {
      if (keeps_[p]) {
        moved[p] = ParamId(kept.size());
        kept.push_back(std::move(model_.params[p]));
      }
    }
    model_.params = std::move(kept);
    const auto move = [&](std::vector<ParamId>& params) {
      std::erase_if(params, [&](ParamId p) { return !keeps_[p.value]; });
      for (ParamId& p : params) {
        p = moved[p.value];
      }
    };
    for (Module& module : model_.modules) {
      move(module.params);
    }
    for (ModelOp& op : model_.ops) {
      move(op.params);
    }
    for (Parameter& param : model_.params) {
      param.tied_to = param.tied_to.valid() ? moved[param.tied_to.value] : ParamId();
    }
  }

  std::vector<bool> keeps_;  // by parameter
};

}  // namespace

void CutExperts(Model& model, std::int64_t ranks, const std::string& where) {
  if (ranks < 1) {
    throw InputError(where, std::to_string(ranks), "at least 1");
  }
  const bool is_cut = IsIn(model.params, ranks, &Parameter::parts);
  if (ranks != 1 && !is_cut) {
    ExpertCutter(model, ranks, where).Run();
  }
}

namespace {

// The last number among the components of a name, with what is around it.
struct NumberedName {
  std::string_view before, behind;  // "model.layers.0.mlp.experts.", ".w1.weight"
  std::int64_t number = -1;         // none: there is none
};
NumberedName Numbered(std::string_view fqn) {
  for (std::size_t end = fqn.size(); end != std::string_view::npos && end > 0;) {
    const std::size_t dot = fqn.rfind('.', end - 1);
    const std::size_t begin = dot == std::string_view::npos ? 0 : dot + 1;
    if (const auto number = IntegerIn(fqn.substr(begin, end - begin))) {
      return {fqn.substr(0, begin), fqn.substr(end), *number};
    }
    end = dot;
  }
  return {};
}

}  // namespace

std::int64_t MostRows(const Model& model, std::size_t op) {
  const OpSpec& spec = model.SpecOf(model.ops[op]);
  if (!spec.routed) {
    return 0;
  }
  // A token chooses an expert once at most.
  const bool is_exchange = spec.kind == OpKind::kExchange;
  const OpSpec& dispatch = model.SpecOf(model.ops[op - (is_exchange ? 1 : 2)]);
  const std::int64_t here = model.SpecOf(model.ops[op + (is_exchange ? 1 : 0)]).experts;
  return dispatch.rows * (dispatch.experts / here) * std::min(dispatch.experts_per_token, here);
}

std::string FqnOfPart(const Model& model, ParamId param, std::int64_t part) {
  const Parameter& p = model.params[param.value];
  if (part == 0 || p.parts == 1) {
    return p.fqn;
  }
  const NumberedName name = Numbered(p.fqn);
  if (p.shape.size() > 2 || name.number < 0) {
    throw InputError("model: " + p.fqn, "experts without a number in their parameters' names",
                     "a parameter per matrix, named by the expert's number");
  }
  std::int64_t here = 0;  // experts; their parameters are neighbours
  const auto count = [&](const Parameter& other) {
    const NumberedName its = Numbered(other.fqn);
    const bool is_sibling = other.parts == p.parts && its.before == name.before;
    here = is_sibling ? std::max(here, its.number + 1) : here;
    return is_sibling;
  };
  const auto at = model.params.begin() + static_cast<std::ptrdiff_t>(param.value);
  (void)std::find_if_not(at, model.params.end(), count);
  (void)std::find_if_not(std::reverse_iterator(at), model.params.rend(), count);
  return std::string(name.before) + std::to_string(name.number + part * here) +
         std::string(name.behind);
}

std::vector<std::pair<ParamId, std::int64_t>> AllParts(const Model& model) {
  std::vector<std::pair<ParamId, std::int64_t>> all;
  for (std::size_t begin = 0, end = 0; begin < model.params.size(); begin = end) {
    const std::int64_t parts = model.params[begin].parts;
    do {
      ++end;
    } while (parts > 1 && end < model.params.size() && model.params[end].parts == parts);
    for (std::int64_t part = 0; part < parts; ++part) {
      for (std::size_t p = begin; p < end; ++p) {
        all.emplace_back(ParamId(p), part);
      }
    }
  }
  return all;
}

ModuleId ExpertsModule(const Model& model, const ModelOp& op) {
  ModuleId module = model.params[op.params.front().value].module;
  for (const ParamId p : op.params) {
    while (!IsInside(model, model.params[p.value].module, module)) {
      module = model.modules[module.value].parent;
    }
  }
  return module;
}

}  // namespace shardwright
