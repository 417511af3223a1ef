#include "models/reference.h"

#include <cstddef>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "core/ranges.h"
#include "core/text.h"
#include "models/internal/builder.h"

namespace shardwright {
namespace {

// Which module and which parameter the reference has in the place of each of the model's.
struct Places {
  std::vector<ModuleId> modules;
  std::vector<ParamId> params;
};

// The frozen base: of a module that learns as a copy, the one that was copied.
Places BaseOf(const Model& model) {
  Places places;
  for (std::size_t m = 0; m < model.modules.size(); ++m) {
    const Module& module = model.modules[m];
    places.modules.push_back(module.name == "modules_to_save" ? module.parent : ModuleId(m));
  }
  for (std::size_t p = 0; p < model.params.size(); ++p) {
    const ModuleId own = model.params[p].module;
    const std::vector<ParamId>& copies = model.modules[own.value].params;
    const auto at = FindIn(copies, ParamId(p)) - copies.begin();
    places.params.push_back(
        model.modules[places.modules[own.value].value].params[static_cast<std::size_t>(at)]);
  }
  return places;
}

Places CopyModules(Model& model) {
  const std::size_t modules = model.modules.size(), params = model.params.size();
  Places places;
  for (std::size_t m = 0; m < modules; ++m) {
    places.modules.emplace_back(modules + m);
  }
  for (std::size_t p = 0; p < params; ++p) {
    places.params.emplace_back(params + p);
  }
  const auto move = [&](ModuleId& id) { id = id.valid() ? places.modules[id.value] : id; };
  const std::string root = kReferenceRoot;
  for (std::size_t m = 0; m < modules; ++m) {
    Module copy = model.modules[m];
    copy.name = m == 0 ? root : copy.name;
    copy.fqn = m == 0 ? root : root + '.' + copy.fqn;
    move(copy.parent);
    move(copy.same_as);
    std::for_each(copy.children.begin(), copy.children.end(), move);
    for (ParamId& id : copy.params) {
      id = places.params[id.value];
    }
    model.modules.push_back(std::move(copy));
  }
  for (std::size_t p = 0; p < params; ++p) {
    Parameter copy = model.params[p];
    copy.fqn = root + '.' + copy.fqn;
    copy.trainable = false;
    move(copy.module);
    copy.tied_to = copy.tied_to.valid() ? places.params[copy.tied_to.value] : copy.tied_to;
    model.params.push_back(std::move(copy));
  }
  return places;
}

void SetProducers(Model& model) {
  for (std::size_t i = 0; i < model.ops.size(); ++i) {
    for (const TensorId t : model.ops[i].outputs) {
      model.tensors[t.value].producer = ModelOpId(i);
    }
  }
}

std::uint32_t WithoutGradient(Model& model, std::uint32_t spec) {
  OpSpec stopped = model.specs[spec];
  stopped.other.stops_gradient = true;
  const auto known = FindIn(model.specs, stopped);
  const auto index = static_cast<std::uint32_t>(known - model.specs.begin());
  if (known == model.specs.end()) {
    model.specs.push_back(std::move(stopped));
  }
  return index;
}

// A forward besides the one that learns.
struct Forward {
  const Places& places;        // whose modules and parameters it runs
  bool has_adapters = false;   // runs them, too
  bool stops = false;          // its parameters may learn, its ops have no gradients
  ModuleId called_again = {};  // by its first op; invalid: nobody called these modules before
};

// Appends the ops `own` once more, with tensors of their own.
void AppendForward(Model& model, const std::vector<ModelOp>& own, const Forward& forward) {
  std::vector<TensorId> made(model.tensors.size());
  const auto given = [&](TensorId t) { return made[t.value].valid() ? made[t.value] : t; };
  std::vector<std::uint32_t> stopped(model.specs.size(), 0);  // 0: not known yet
  const std::size_t begin = model.ops.size();
  for (ModelOp op : own) {
    if ((op.name == "lora_add" && !forward.has_adapters) ||
        model.SpecOf(op).kind == OpKind::kDropout) {
      made[op.outputs[0].value] = given(op.inputs[0]);
      continue;
    }
    if (op.name.starts_with("lora_") && !forward.has_adapters) {
      continue;
    }
    for (TensorId& t : op.inputs) {
      t = given(t);
    }
    for (TensorId& t : op.outputs) {
      Tensor tensor = model.tensors[t.value];
      tensor.role = tensor.role == TensorRole::kLoss ? TensorRole::kFp32 : tensor.role;
      made[t.value] = TensorId(model.tensors.size());
      t = made[t.value];
      model.tensors.push_back(tensor);
    }
    for (ParamId& id : op.params) {
      id = forward.places.params[id.value];
    }
    const auto move = [&](ModuleId& id) {
      id = id.valid() ? forward.places.modules[id.value] : id;
    };
    move(op.module);
    move(op.called_again);
    std::for_each(op.returns_input.begin(), op.returns_input.end(), move);
    if (forward.stops) {
      if (stopped[op.spec] == 0) {
        stopped[op.spec] = WithoutGradient(model, op.spec);
      }
      op.spec = stopped[op.spec];
    }
    if (forward.called_again.valid() && model.ops.size() == begin) {
      op.called_again = forward.called_again;
    }
    model.ops.push_back(std::move(op));
  }
}

}  // namespace

bool IsOfReference(const Model& model, ModuleId module) {
  while (model.modules[module.value].parent.valid()) {
    module = model.modules[module.value].parent;
  }
  return module != ModuleId(0);
}

void AddForwards(Model& model, const TrainableSpec& spec) {
  enum class Call { kOwn, kPolicy, kReference };
  using enum Call;
  std::vector<Call> calls;
  if (spec.trains_by == TrainsBy::kDpo) {
    calls = {kOwn, kReference};
  } else if (spec.trains_by == TrainsBy::kKto) {
    calls = {kPolicy, kOwn, kReference, kReference};
  } else if (spec.trains_by == TrainsBy::kGrpo) {
    calls.insert(calls.end(), spec.rollout.has_old ? 1 : 0, kPolicy);
    calls.insert(calls.end(), spec.rollout.has_reference ? 1 : 0, kReference);
    calls.push_back(kOwn);
  }
  if (calls.size() < 2) {
    return;
  }
  const bool has_adapters = spec.lora_rank > 0;
  Places policy;
  for (std::size_t m = 0; m < model.modules.size(); ++m) {
    policy.modules.emplace_back(m);
  }
  for (std::size_t p = 0; p < model.params.size(); ++p) {
    policy.params.emplace_back(p);
  }
  const bool refers = std::count(calls.begin(), calls.end(), kReference) > 0;
  const Places reference = !refers ? policy : has_adapters ? BaseOf(model) : CopyModules(model);
  const std::vector<ModelOp> own = std::exchange(model.ops, {});
  std::set<ModuleId> called;
  for (const Call call : calls) {
    const Places& places = call == kReference ? reference : policy;
    const ModuleId root = places.modules[0];
    const ModuleId again = called.insert(root).second ? ModuleId() : root;
    if (call == kOwn) {
      const std::size_t first = model.ops.size();
      model.ops.insert(model.ops.end(), own.begin(), own.end());
      model.ops[first].called_again = again;
    } else {
      AppendForward(model, own,
                    {.places = places,
                     .has_adapters = call == kPolicy,
                     .stops = call == kPolicy || has_adapters,
                     .called_again = again});
    }
  }
  SetProducers(model);
}

namespace {

[[noreturn]] void RefuseHead(const Model& model, const char* trains_by, const Path& where) {
  throw InputError(where.Field("trains_by").str(), Quoted(trains_by) + " with model " + model.name,
                   "a model whose loss a linear layer without bias feeds");
}

// The linear layer that feeds the loss, and the loss: indices of ops. Behind the head there may be
// a scale or a soft cap.
std::pair<std::size_t, std::size_t> HeadAndLoss(const Model& model, const char* trains_by,
                                                const Path& where) {
  const auto loss = std::find_if(model.ops.rbegin(), model.ops.rend(), [&](const ModelOp& op) {
    return model.SpecOf(op).kind == OpKind::kCrossEntropy;
  });
  if (loss != model.ops.rend()) {
    TensorId logits = loss->inputs[0];
    const auto maker = [&] { return model.tensors[logits.value].producer; };
    while (maker().valid() && model.ops[maker().value].params.empty()) {
      logits = model.ops[maker().value].inputs[0];
    }
    if (maker().valid() && model.SpecOf(model.ops[maker().value]).kind == OpKind::kLinear &&
        model.ops[maker().value].params.size() == 1) {
      return {maker().value,
              model.ops.size() - 1 - static_cast<std::size_t>(loss - model.ops.rbegin())};
    }
  }
  RefuseHead(model, trains_by, where);
}

// Gives the ops from the head to the loss other sizes.
template <class Change>
void Resize(Model& model, std::pair<std::size_t, std::size_t> ops, Change change) {
  for (std::size_t i = ops.first; i <= ops.second; ++i) {
    OpSpec spec = model.SpecOf(model.ops[i]);
    change(spec, i == ops.first);
    model.ops[i].spec = static_cast<std::uint32_t>(model.specs.size());
    model.specs.push_back(spec);
    for (const TensorId t : model.ops[i].outputs) {
      model.tensors[t.value].elements = OutputElements(spec, 0);
    }
  }
}

}  // namespace

void ScoreCompletions(Model& model, std::int64_t tokens, const Path& where) {
  const auto [head, loss] = HeadAndLoss(model, "grpo", where);
  const OpSpec whole = model.SpecOf(model.ops[head]);
  if (tokens == 0) {
    tokens = std::max<std::int64_t>(1, whole.rows / 2);
  }
  if (tokens >= whole.rows) {
    throw InputError(where.Field("rollout").Field("completion").str(), std::to_string(tokens),
                     "less than the " + std::to_string(whole.rows) +
                         " tokens of a sample, which begins with the prompt");
  }
  Resize(model, {head, loss}, [&](OpSpec& spec, bool) { spec.rows = tokens; });
  // A view of their rows, whose gradient is zeros around theirs.
  ModelOp select = model.ops[head];
  select.name = "completion";
  select.params = {};
  select.spec = static_cast<std::uint32_t>(model.specs.size());
  model.specs.push_back(
      {.kind = OpKind::kSelect, .rows = tokens, .in = whole.in, .seq_k = whole.rows});
  select.outputs = {TensorId(model.tensors.size())};
  model.tensors.push_back({.elements = tokens * whole.in, .producer = {}});
  const ModuleId above = model.modules[select.module.value].parent;
  select.module = above.valid() ? above : select.module;
  model.ops[head].inputs = select.outputs;
  model.ops.insert(model.ops.begin() + static_cast<std::ptrdiff_t>(head), std::move(select));
  SetProducers(model);
}

void AddScore(Model& model, const Path& where) {
  const auto [head, last] = HeadAndLoss(model, "reward", where);
  Resize(model, {head, last},
         [](OpSpec& spec, bool is_head) { (is_head ? spec.out : spec.in) = 1; });
  Parameter& weight = model.params[model.ops[head].params[0].value];
  Module& module = model.modules[model.ops[head].module.value];
  const bool has_own = weight.module == model.ops[head].module && module.children.empty();
  if (!has_own) {
    RefuseHead(model, "reward", where);
  }
  weight.shape = {1, model.SpecOf(model.ops[head]).in};
  weight.tied_to = ParamId();
  module.fqn = module.fqn.substr(0, module.fqn.size() - module.name.size()) + "score";
  module.name = "score";
  model.ops[head].name = "score";
  weight.fqn = module.fqn + ".weight";
}

}  // namespace shardwright
