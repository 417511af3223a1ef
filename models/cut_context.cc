#include "models/cut_context.h"

#include <array>
#include <utility>

#include "core/error.h"
#include "core/ranges.h"
#include "core/text.h"
#include "models/internal/builder.h"
#include "models/internal/cutter.h"

namespace shardwright {
namespace {

// What the rule of a kind does with an op.
enum class ContextRule : std::uint8_t {
  kRefused,
  kTokens,  // the same with a part of the rows
  kAttention,
};

ContextRule ContextRuleOf(OpKind kind) {
  using enum OpKind;
  static constexpr std::array kOfTokens = {
      kEmbedding, kLinear,  kLayerNorm,  kRmsNorm, kRope,        kActivation, kGatedActivation,
      kAdd,       kMul,     kScale,      kDropout, kRouter,      kExperts,    kDispatch,
      kExchange,  kCombine, kLogSoftmax, kNllLoss, kCrossEntropy};
  return kind == kAttention      ? ContextRule::kAttention
         : IsIn(kOfTokens, kind) ? ContextRule::kTokens
                                 : ContextRule::kRefused;
}

class ContextCutter : Cutter {
 public:
  ContextCutter(Model& model, std::int64_t ranks, ContextMethod method, const std::string& where)
      : Cutter(model, ranks, where), method_(method) {}

  void Run() {
    if (model_.sequence_length == 0) {
      Refuse("1: the model reads no sequences");
    }
    if (model_.sequence_length % (2 * ranks_) != 0) {
      Refuse("a divisor of half of the " + std::to_string(model_.sequence_length) +
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
    SetProducers();
    model_.context_ranks = ranks_;
    model_.context_method = method_;
  }

 private:
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
    if (rule == ContextRule::kAttention) {
      return CutAttention(std::move(op), spec);
    }
    spec.rows /= ranks_;
    Keep(std::move(op), spec);
  }

  void CutAttention(ModelOp op, OpSpec spec) {
    CheckAttention(op, spec);
    if (method_ == ContextMethod::kUlysses) {
      return CutHeads(std::move(op), spec);
    }
    spec.rows /= ranks_;
    spec.seq_q /= ranks_;
    spec.context_ranks = ranks_;
    spec.context_method = method_;
    if (method_ == ContextMethod::kGather) {
      OpSpec gather;
      gather.kind = OpKind::kGatherTokens;
      gather.rows = model_.sequence_length;
      gather.tensor_ranks = ranks_;
      op.inputs[1] = Add(op, "_k", op.inputs[1], gather, spec.kv_heads * spec.head_dim);
      op.inputs[2] = Add(op, "_v", op.inputs[2], gather, spec.kv_heads * spec.value_dim);
    }
    Keep(std::move(op), spec);
  }

  void CheckAttention(const ModelOp& op, const OpSpec& spec) const {
    const std::int64_t rows = model_.sequence_length / ranks_;
    const auto is_of = [&](std::size_t input, std::int64_t features) {
      return model_.tensors[op.inputs[input].value].elements == rows * features;
    };
    if (op.inputs.size() != 3 || spec.has_bias || spec.seq_q != spec.seq_k ||
        !is_of(0, spec.heads * spec.head_dim) || !is_of(1, spec.kv_heads * spec.head_dim) ||
        !is_of(2, spec.kv_heads * spec.value_dim)) {
      Refuse(op, "attention of other inputs than q, k and v of one sequence");
    }
    if (IsRing(method_) && (!spec.causal || spec.materialized || spec.window > 0 ||
                            spec.soft_cap > 0.0 || spec.alibi_max > 0.0)) {
      Refuse(op, "attention by a ring that is not plainly causal");
    }
  }

  // All tokens of some heads: q, k and v are exchanged for those, and the result back.
  void CutHeads(ModelOp op, OpSpec spec) {
    if (spec.kv_heads % ranks_ != 0 || spec.heads % ranks_ != 0) {
      Refuse(op, std::to_string(spec.heads) + " heads, " + std::to_string(spec.kv_heads) +
                     " of keys, that make no equal parts");
    }
    OpSpec swap;
    swap.kind = OpKind::kExchange;
    swap.rows = model_.sequence_length / ranks_;
    op.inputs[0] = Add(op, "_q", op.inputs[0], swap, spec.heads * spec.head_dim);
    op.inputs[1] = Add(op, "_k", op.inputs[1], swap, spec.kv_heads * spec.head_dim);
    op.inputs[2] = Add(op, "_v", op.inputs[2], swap, spec.kv_heads * spec.value_dim);
    ModelOp last = op;
    const TensorId result = std::exchange(op.outputs.front(), NewTensor(op.outputs.front()));
    op.returns_input = {};
    const std::int64_t features = spec.heads * spec.value_dim;
    spec.heads /= ranks_;
    spec.kv_heads /= ranks_;
    Keep(op, spec);
    swap.transposed = true;
    (void)Add(last, "_out", op.outputs.front(), swap, features, result);
    model_.ops.back().returns_input = std::move(last.returns_input);
  }

  // What `spec` makes of `part`, beside `op`; in a new tensor, if `out` is none.
  TensorId Add(const ModelOp& op, const char* name, TensorId part, OpSpec spec,
               std::int64_t features, TensorId out = {}) {
    spec.in = features;
    spec.context_ranks = ranks_;
    ModelOp added;
    added.module = op.module;
    added.name = op.name + name;
    added.inputs = {part};
    added.outputs = {out.valid() ? out : NewTensor(part)};
    Keep(std::move(added), spec);
    return model_.ops.back().outputs.front();
  }

  ContextMethod method_;
};

}  // namespace

void CutContext(Model& model, std::int64_t ranks, ContextMethod method, const std::string& where) {
  if (ranks < 1) {
    throw InputError(where, std::to_string(ranks), "at least 1");
  }
  if (ranks != 1 && model.context_ranks != ranks) {
    ContextCutter(model, ranks, method, where).Run();
  }
}

}  // namespace shardwright
