#include "models/internal/cutter.h"

#include <utility>

#include "core/error.h"
#include "core/ranges.h"
#include "core/text.h"
#include "models/internal/builder.h"

namespace shardwright {

void Cutter::Refuse(std::string_view expected) const {
  throw InputError(where_, std::to_string(ranks_), std::string(expected));
}

void Cutter::Refuse(const ModelOp& op, std::string_view what) const {
  const std::string& module = model_.modules[op.module.value].fqn;
  Refuse("1: " + std::string(what) + " in " + Quoted(module.empty() ? op.name : module));
}

void Cutter::Divide(std::int64_t& size, const ModelOp& op, std::string_view what) const {
  if (size % ranks_ != 0) {
    Refuse("a divisor of the " + std::to_string(size) + ' ' + std::string(what) + " of " +
           Quoted(model_.modules[op.module.value].fqn));
  }
  size /= ranks_;
}

TensorId Cutter::NewTensor(TensorId like) {
  const Tensor copy = model_.tensors[like.value];
  model_.tensors.push_back(copy);
  return TensorId(model_.tensors.size() - 1);
}

std::uint32_t Cutter::SpecIndex(const OpSpec& spec) {
  const auto found = FindIn(model_.specs, spec);
  const auto index = static_cast<std::uint32_t>(found - model_.specs.begin());
  if (found == model_.specs.end()) {
    model_.specs.push_back(spec);
  }
  return index;
}

void Cutter::Keep(ModelOp op, const OpSpec& spec) {
  for (std::size_t i = 0; i < std::min(op.outputs.size(), OutputCount(spec)); ++i) {
    model_.tensors[op.outputs[i].value].elements = OutputElements(spec, i);
  }
  op.spec = SpecIndex(spec);
  model_.ops.push_back(std::move(op));
}

void Cutter::SetProducers() {
  for (std::size_t i = 0; i < model_.ops.size(); ++i) {
    for (const TensorId t : model_.ops[i].outputs) {
      model_.tensors[t.value].producer = ModelOpId(i);
    }
  }
}

}  // namespace shardwright
