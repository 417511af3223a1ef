#include "schedule/internal/model_ends.h"

#include <algorithm>

#include "models/reference.h"

namespace shardwright::internal {
namespace {

// `ancestors`: ascending.
bool IsInsideAny(const Model& model, ModuleId module, const std::vector<ModuleId>& ancestors) {
  while (module.valid() && !std::binary_search(ancestors.begin(), ancestors.end(), module)) {
    module = model.modules[module.value].parent;
  }
  return module.valid();
}

// Follows the value of `tensor` back through ops that only reshape, scale or pick.
const ModelOp* ProducerThrough(const Model& model, TensorId tensor) {
  while (true) {
    const ModelOpId producer = model.tensors[tensor.value].producer;
    if (!producer.valid()) {
      return nullptr;
    }
    const ModelOp& op = model.ops[producer.value];
    switch (model.SpecOf(op).kind) {
      case OpKind::kActivation:
      case OpKind::kScale:
      case OpKind::kDropout:
      case OpKind::kSelect:
      case OpKind::kLogSoftmax:
        tensor = op.inputs[0];
        break;
      default:
        return &op;
    }
  }
}

void FindHead(const Model& model, const std::vector<ModuleId>& blocks, Ends& ends) {
  for (const ModelOp& loss : model.ops) {
    const OpKind kind = model.SpecOf(loss).kind;
    if ((kind != OpKind::kCrossEntropy && kind != OpKind::kNllLoss) ||
        IsOfReference(model, loss.module)) {
      continue;
    }
    const ModelOp* head = ProducerThrough(model, loss.inputs[0]);
    if (head == nullptr || model.SpecOf(*head).kind != OpKind::kLinear ||
        IsInsideAny(model, head->module, blocks)) {
      continue;
    }
    ends.head = head->module;
    const ModelOp* norm = ProducerThrough(model, head->inputs[0]);
    if (norm != nullptr && !IsInsideAny(model, norm->module, blocks) &&
        (model.SpecOf(*norm).kind == OpKind::kRmsNorm ||
         model.SpecOf(*norm).kind == OpKind::kLayerNorm)) {
      ends.norm = norm->module;
    }
  }
}

}  // namespace

ParamId StorageOf(const Model& model, ParamId param) {
  const ParamId tied_to = model.params[param.value].tied_to;
  return tied_to.valid() ? tied_to : param;
}

Ends FindEnds(const Model& model, const std::vector<ModuleId>& blocks) {
  Ends ends;
  ParamId table;
  for (const ModelOp& op : model.ops) {
    if (model.SpecOf(op).kind == OpKind::kEmbedding && !op.params.empty() &&
        !IsInsideAny(model, op.module, blocks) && !IsOfReference(model, op.module)) {
      table = StorageOf(model, op.params[0]);
      ends.embedding = model.params[table.value].module;
      break;
    }
  }
  FindHead(model, blocks, ends);
  if (ends.head.valid() && table.valid()) {
    for (const ParamId id : model.modules[ends.head.value].params) {
      ends.head_is_tied = ends.head_is_tied || StorageOf(model, id) == table;
    }
  }
  return ends;
}

}  // namespace shardwright::internal
