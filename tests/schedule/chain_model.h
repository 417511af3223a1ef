#pragma once

// A model that closed forms can be written for: a stem linear that belongs to the root, then equal
// blocks of `linears` linear layers each, one after the other.

#include <cstdint>
#include <string>

#include "models/model.h"
#include "schedule/plan.h"
#include "tests/schedule/tiny_model.h"

namespace shardwright::testing {

struct ChainSpec {
  int blocks = 4;
  int linears = 1;          // per block
  std::int64_t width = 64;  // weights are [width, width]
  std::int64_t stem = 8;    // the stem's weight is [width, stem]
  std::int64_t rows = 1;    // per sample
};

inline Model ChainModel(const ChainSpec& spec) {
  Model model;
  model.name = "chain";
  model.type = "custom";
  model.block_classes = {"Block"};
  model.sequence_length = spec.rows;
  model.tokens_per_sample = spec.rows;
  OpSpec linear;
  linear.kind = OpKind::kLinear;
  linear.rows = spec.rows;
  linear.in = linear.out = spec.width;
  OpSpec stem = linear;
  stem.in = spec.stem;
  model.specs = {stem, linear};

  model.tensors.push_back({TensorRole::kActivation, spec.rows * spec.stem, true, ModelOpId()});
  const auto add_linear = [&](ModuleId module, std::uint32_t which, std::int64_t in) {
    const ParamId weight = AddParam(model, module, "weight", {spec.width, in});
    ModelOp op;
    op.spec = which;
    op.module = module;
    op.name = model.modules[module.value].name;
    op.inputs = {TensorId(model.tensors.size() - 1)};
    op.outputs = {TensorId(model.tensors.size())};
    op.params = {weight};
    model.tensors.push_back(
        {TensorRole::kActivation, spec.rows * spec.width, true, ModelOpId(model.ops.size())});
    model.ops.push_back(op);
  };
  const ModuleId root = AddModule(model, {}, "", "Chain");
  add_linear(AddModule(model, root, "stem", "Linear"), 0, spec.stem);
  for (int b = 0; b < spec.blocks; ++b) {
    const ModuleId block = AddModule(model, root, "block" + std::to_string(b), "Block");
    for (int l = 0; l < spec.linears; ++l) {
      add_linear(AddModule(model, block, "lin" + std::to_string(l), "Linear"), 1, spec.width);
    }
  }
  return model;
}

// The chain of three blocks or more, of which the second one's result is dropped: it `returns` what
// it was given, or else nobody reads it.
inline Model ChainWithDroppedBlock(const ChainSpec& spec, bool returns) {
  Model model = ChainModel(spec);
  model.ops[3].inputs = model.ops[2].inputs;  // ops: stem, blocks
  if (returns) {
    model.ops[2].returns_input = {model.modules[model.ops[2].module.value].parent};
  }
  model.tensors[model.ops.back().outputs[0].value].role = TensorRole::kLoss;
  ValidateModel(model, "test");
  return model;
}

// Each block a unit, the stem in the root, which keeps its parameters.
inline Plan ChainPlan(const ChainSpec& spec, Dialect dialect, std::int64_t ranks) {
  Plan plan;
  plan.dialect = dialect;
  plan.shard_size = ranks;
  for (int b = 0; b < spec.blocks; ++b) {
    UnitPlan unit;
    unit.name = "block" + std::to_string(b);
    unit.modules = {unit.name};
    plan.units.push_back(unit);
  }
  UnitPlan root;
  root.name = "root";
  root.modules = {""};
  root.reshard.kind = Reshard::Kind::kNever;
  plan.units.push_back(root);
  return plan;
}

// Training without clipping, so that a step has no more collectives than the units ask for.
inline Job ChainJob(const ChainSpec& spec, Precision precision) {
  Job job;
  job.sequence_length = spec.rows;
  job.precision = precision;
  job.clip_gradients = false;
  return job;
}

}  // namespace shardwright::testing
