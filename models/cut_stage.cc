#include "models/cut_stage.h"

#include <algorithm>
#include <utility>
#include <vector>

#include "core/error.h"
#include "core/text.h"

namespace shardwright {
namespace {

using Stages = std::vector<std::int64_t>;  // of each op, or of each parameter

// The outermost block that the op is in, if any.
ModuleId BlockOf(const Model& model, const ModelOp& op) {
  ModuleId found;
  for (ModuleId m = op.module; m.valid(); m = model.modules[m.value].parent) {
    found = IsBlock(model, m) ? m : found;
  }
  return found;
}

InputError Refusal(const std::string& where, std::int64_t stages, const std::string& expected) {
  return {where, std::to_string(stages), expected};
}

// What stands before the first block counts as `edge` layers, and so does what stands behind the
// last. Ops between two blocks go with the first of them.
Stages StagesOfOps(const Model& model, std::int64_t stages, std::int64_t edge,
                   const std::string& where) {
  Stages layer_of;
  std::int64_t layer = 0;  // 0: before the blocks
  std::size_t end = 0;     // behind the last op of a block
  ModuleId last;
  for (const ModelOp& op : model.ops) {
    if (const ModuleId block = BlockOf(model, op); block.valid()) {
      layer += block == last ? 0 : 1;
      last = block;
      end = layer_of.size() + 1;
    }
    layer_of.push_back(layer);
  }
  const std::int64_t layers = layer + 2 * edge, each = layers / stages, more = layers % stages;
  if (layer == 0 || each == 0) {
    throw Refusal(where, stages,
                  layer == 0 ? "1: the model has no blocks"
                             : "at most " + std::to_string(layers) + ", its blocks" +
                                   (edge > 0 ? " and two" : ""));
  }
  for (std::size_t i = 0; i < layer_of.size(); ++i) {
    const std::int64_t l = i < end ? std::max<std::int64_t>(layer_of[i] - 1 + edge, 0) : layers - 1;
    const std::int64_t wide = more * (each + 1);  // layers of the stages that have one more
    layer_of[i] = l < wide ? l / (each + 1) : more + (l - wide) / each;
  }
  return layer_of;
}

Stages StagesOfParams(const Model& model, const Stages& of_op, std::int64_t stages,
                      const std::string& where) {
  Stages of_param(model.params.size(), -1);
  const auto at = [&](std::size_t p) -> std::int64_t& {
    const ParamId tied_to = model.params[p].tied_to;
    return of_param[tied_to.valid() ? tied_to.value : p];
  };
  for (std::size_t i = 0; i < model.ops.size(); ++i) {
    for (const ParamId p : model.ops[i].params) {
      std::int64_t& stage = at(p.value);
      if (stage >= 0 && stage != of_op[i]) {
        throw Refusal(where, stages,
                      "1: stages " + std::to_string(stage) + " and " + std::to_string(of_op[i]) +
                          " would share parameter " + Quoted(model.params[p.value].fqn));
      }
      stage = of_op[i];
    }
  }
  for (std::size_t p = 0; p < of_param.size(); ++p) {
    of_param[p] = std::max<std::int64_t>(at(p), 0);  // one that nothing uses
  }
  return of_param;
}

// The one activation that stages up to `stage` make and later ones read.
TensorId HandedOn(const Model& model, const Stages& of_op, std::int64_t stage, std::int64_t stages,
                  const std::string& where) {
  TensorId found;
  bool is_one = true;
  for (std::size_t i = 0; i < model.ops.size(); ++i) {
    for (const TensorId t : model.ops[i].inputs) {
      const Tensor& tensor = model.tensors[t.value];
      if (of_op[i] > stage && tensor.producer.valid() && of_op[tensor.producer.value] <= stage) {
        is_one = is_one && (!found.valid() || found == t) && tensor.per_sample &&
                 tensor.role == TensorRole::kActivation && of_op[tensor.producer.value] == stage;
        found = t;
      }
    }
  }
  if (!is_one || !found.valid()) {
    throw Refusal(where, stages,
                  "1: stage " + std::to_string(stage) +
                      " would hand on other tensors than one activation of its own");
  }
  return found;
}

// `of_op`: which stage of the rank, or -1.
void KeepOps(Model& model, const Stages& of_op) {
  for (Tensor& tensor : model.tensors) {
    tensor.producer = ModelOpId();
  }
  const std::vector<ModelOp> all = std::exchange(model.ops, {});
  for (std::size_t i = 0; i < all.size(); ++i) {
    if (of_op[i] < 0) {
      continue;
    }
    const auto begin = static_cast<std::uint32_t>(model.ops.size());
    for (const TensorId t : all[i].outputs) {
      model.tensors[t.value].producer = ModelOpId(begin);
    }
    model.ops.push_back(all[i]);
    Model::Stage& stage = model.stages[static_cast<std::size_t>(of_op[i])];
    if (stage.end == 0) {
      stage.begin = begin;
      if (begin > 0) {
        model.ops.back().called_again = ModuleId(0);
      }
    }
    stage.end = begin + 1;
  }
}

// Inputs of the model that several stages of the rank read would be loaded once for all of them.
void CheckInputs(const Model& model, std::int64_t stages, const std::string& where) {
  std::vector<std::size_t> reader(model.tensors.size(), 0);  // the first one, counted from 1
  for (std::size_t k = 0; k < model.stages.size(); ++k) {
    for (std::uint32_t i = model.stages[k].begin; i < model.stages[k].end; ++i) {
      for (const TensorId t : model.ops[i].inputs) {
        std::size_t& first = reader[t.value];
        first = first == 0 ? k + 1 : first;
        if (first != k + 1) {
          throw Refusal(where, stages, "1 per rank: several would read one input of the model");
        }
      }
    }
  }
}

void KeepParams(Model& model, const Stages& of_param) {
  std::vector<ParamId> now(of_param.size());
  const auto renumber = [&](std::vector<ParamId>& ids) {
    std::transform(ids.begin(), ids.end(), ids.begin(), [&](ParamId id) { return now[id.value]; });
    std::erase_if(ids, [](ParamId id) { return !id.valid(); });
  };
  const std::vector<Parameter> all = std::exchange(model.params, {});
  for (std::size_t p = 0; p < all.size(); ++p) {
    if (of_param[p] >= 0) {
      now[p] = ParamId(model.params.size());
      model.params.push_back(all[p]);
      ParamId& tied_to = model.params.back().tied_to;
      tied_to = tied_to.valid() ? now[tied_to.value] : tied_to;
    }
  }
  std::vector<bool> runs(model.modules.size(), false);
  for (ModelOp& op : model.ops) {
    renumber(op.params);
    runs[op.module.value] = true;
  }
  for (std::size_t m = 0; m < runs.size(); ++m) {
    renumber(model.modules[m].params);
    model.modules[m].buffer_elements *= runs[m] ? 1 : 0;
  }
}

// Of a rank whose second stage follows its first: the tensor between them becomes two.
void PartNeighbours(Model& model) {
  if (model.stages.size() < 2 || !model.stages[0].sent.valid() ||
      model.stages[0].sent != model.stages[1].received) {
    return;
  }
  const TensorId sent = model.stages[0].sent, received(model.tensors.size());
  model.tensors.push_back(model.tensors[sent.value]);
  model.tensors.back().producer = {};
  model.stages[1].received = received;
  for (std::uint32_t i = model.stages[1].begin; i < model.stages[1].end; ++i) {
    std::replace(model.ops[i].inputs.begin(), model.ops[i].inputs.end(), sent, received);
  }
}

}  // namespace

void CutStage(Model& model, std::int64_t stages, std::int64_t rank, std::int64_t ranks,
              const std::string& where, std::int64_t edge_layers, bool turns) {
  if (stages == 1) {
    return;
  }
  Stages of_op = StagesOfOps(model, stages, edge_layers, where);
  Stages of_param = StagesOfParams(model, of_op, stages, where);
  const auto stage_at = [&](std::int64_t place) {
    return place * ranks + (turns && place % 2 == 1 ? ranks - 1 - rank : rank);
  };
  for (std::int64_t place = 0; stage_at(place) < stages; ++place) {
    const std::int64_t stage = stage_at(place);
    Model::Stage& added = model.stages.emplace_back();
    if (stage > 0) {
      added.received = HandedOn(model, of_op, stage - 1, stages, where);
    }
    if (stage + 1 < stages) {
      added.sent = HandedOn(model, of_op, stage, stages, where);
    }
  }
  for (Stages* const list : {&of_op, &of_param}) {
    for (std::int64_t& stage : *list) {
      stage = stage == stage_at(stage / ranks) ? stage / ranks : -1;
    }
  }
  KeepOps(model, of_op);
  CheckInputs(model, stages, where);
  KeepParams(model, of_param);
  PartNeighbours(model);
}

}  // namespace shardwright
