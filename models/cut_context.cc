#include "models/cut_context.h"

#include <algorithm>
#include <utility>
#include <vector>

#include "core/error.h"
#include "core/text.h"
#include "models/internal/builder.h"

namespace shardwright {
namespace {

// What the rule of a kind does with an op.
enum class ContextRule : std::uint8_t {
  kRefused,
  kTokens,  // the same with a part of the rows
  kAttention,
};

ContextRule ContextRuleOf(OpKind kind) {
  switch (kind) {
    case OpKind::kEmbedding:
    case OpKind::kLinear:
    case OpKind::kLayerNorm:
    case OpKind::kRmsNorm:
    case OpKind::kRope:
    case OpKind::kActivation:
    case OpKind::kGatedActivation:
    case OpKind::kAdd:
    case OpKind::kMul:
    case OpKind::kScale:
    case OpKind::kDropout:
    case OpKind::kRouter:
    case OpKind::kExperts:
    case OpKind::kDispatch:
    case OpKind::kExchange:
    case OpKind::kCombine:
    case OpKind::kLogSoftmax:
    case OpKind::kNllLoss:
    case OpKind::kCrossEntropy:
      return ContextRule::kTokens;
    case OpKind::kAttention:
      return ContextRule::kAttention;
    default:
      return ContextRule::kRefused;
  }
}

class ContextCutter {
 public:
  ContextCutter(Model& model, std::int64_t ranks, const std::string& where)
      : model_(model), ranks_(ranks), where_(where) {}

  void Run() {
    if (model_.sequence_length % (2 * ranks_) != 0 || model_.sequence_length == 0) {
      throw InputError(where_, std::to_string(ranks_),
                       "a divisor of half of the " + std::to_string(model_.sequence_length) +
                           " tokens, of which each rank has a piece of the head and of the tail");
    }
    for (Tensor& tensor : model_.tensors) {  // those of ops follow
      if (!tensor.producer.valid() && tensor.elements == model_.sequence_length) {
        tensor.elements /= ranks_;
      }
    }
    for (ModelOp& op : std::exchange(model_.ops, {})) {
      Cut(std::move(op));
    }
    for (std::size_t i = 0; i < model_.ops.size(); ++i) {
      for (const TensorId t : model_.ops[i].outputs) {
        model_.tensors[t.value].producer = ModelOpId(i);
      }
    }
    model_.context_ranks = ranks_;
  }

 private:
  static constexpr const char* kInputs =
      "attention of other inputs than q, k and v of one sequence";
  [[noreturn]] void Refuse(const ModelOp& op, const std::string& what) const {
    const std::string& module = model_.modules[op.module.value].fqn;
    throw InputError(where_, std::to_string(ranks_),
                     "1: " + what + " in " + Quoted(module.empty() ? op.name : module));
  }

  void Cut(ModelOp op) {
    OpSpec spec = model_.SpecOf(op);
    const ContextRule rule = ContextRuleOf(spec.kind);
    if (rule == ContextRule::kRefused) {
      Refuse(op, "no rule cuts the tokens of op " + Quoted(op.name));
    }
    if (spec.rows % model_.sequence_length != 0) {
      Refuse(op, "op " + Quoted(op.name) + " is not of all tokens");
    }
    if (spec.kind == OpKind::kAdd && spec.has_bias) {
      Refuse(op, "a table of positions that is added");
    }
    spec.rows /= ranks_;
    if (rule == ContextRule::kAttention) {
      if (op.inputs.size() != 3 || spec.has_bias || spec.seq_q != spec.seq_k) {
        Refuse(op, kInputs);
      }
      spec.seq_q /= ranks_;
      spec.context_ranks = ranks_;
      op.inputs[1] = Gather(op, "_k", op.inputs[1], spec.kv_heads * spec.head_dim);
      op.inputs[2] = Gather(op, "_v", op.inputs[2], spec.kv_heads * spec.value_dim);
    }
    Keep(std::move(op), spec);
  }

  // All tokens of `part`, in front of `op`.
  TensorId Gather(const ModelOp& op, const char* name, TensorId part, std::int64_t features) {
    if (model_.tensors[part.value].elements * ranks_ != model_.sequence_length * features) {
      Refuse(op, kInputs);  // packed with others
    }
    OpSpec spec;
    spec.kind = OpKind::kGatherTokens;
    spec.rows = model_.sequence_length;
    spec.in = features;
    spec.tensor_ranks = spec.context_ranks = ranks_;
    ModelOp added;
    added.module = op.module;
    added.name = op.name + name;
    added.inputs = {part};
    added.outputs = {TensorId(model_.tensors.size())};
    const Tensor copy = model_.tensors[part.value];
    model_.tensors.push_back(copy);
    Keep(std::move(added), spec);
    return model_.ops.back().outputs.front();
  }

  // Adds the op, whose outputs have so many elements. Counts of rows by expert stay.
  void Keep(ModelOp op, const OpSpec& spec) {
    for (std::size_t i = 0; i < std::min(op.outputs.size(), OutputCount(spec)); ++i) {
      model_.tensors[op.outputs[i].value].elements = OutputElements(spec, i);
    }
    const auto found = std::find(model_.specs.begin(), model_.specs.end(), spec);
    op.spec = static_cast<std::uint32_t>(found - model_.specs.begin());
    if (found == model_.specs.end()) {
      model_.specs.push_back(spec);
    }
    model_.ops.push_back(std::move(op));
  }

  Model& model_;
  std::int64_t ranks_;
  const std::string& where_;
};

}  // namespace

void CutContext(Model& model, std::int64_t ranks, const std::string& where) {
  if (ranks < 1) {
    throw InputError(where, std::to_string(ranks), "at least 1");
  }
  if (ranks != 1 && model.context_ranks != ranks) {
    ContextCutter(model, ranks, where).Run();
  }
}

}  // namespace shardwright
