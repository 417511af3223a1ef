#include "models/cut_tensor.h"

#include <algorithm>
#include <map>
#include <utility>
#include <vector>

#include "core/error.h"
#include "core/text.h"
#include "models/internal/cutter.h"

namespace shardwright {
namespace {

// What a rank has of a tensor that ops compute.
enum class Part : std::uint8_t {
  kWhole,     // ids, labels, the loss
  kTokens,    // some of the tokens
  kFeatures,  // of all tokens some of the heads or features
};

// What the rule of a kind does with an op.
enum class Rule : std::uint8_t {
  kRefused,
  kLookup,   // a table of which each rank has some rows
  kProduct,  // by columns of tokens, by rows of features
  kNorm,     // of tokens, or of the features of each head
  kHeads,    // on some heads
  kAlike,    // element by element
  kLoss,
};

Rule RuleOf(OpKind kind) {
  switch (kind) {
    case OpKind::kEmbedding:
      return Rule::kLookup;
    case OpKind::kLinear:
      return Rule::kProduct;
    case OpKind::kLayerNorm:
    case OpKind::kRmsNorm:
      return Rule::kNorm;
    case OpKind::kRope:
    case OpKind::kAttention:
      return Rule::kHeads;
    case OpKind::kActivation:
    case OpKind::kGatedActivation:
    case OpKind::kAdd:
    case OpKind::kMul:
    case OpKind::kScale:
    case OpKind::kDropout:
      return Rule::kAlike;
    case OpKind::kCrossEntropy:
      return Rule::kLoss;
    default:
      return Rule::kRefused;
  }
}

class TensorCutter : Cutter {
 public:
  TensorCutter(Model& model, std::int64_t ranks, const std::string& where)
      : Cutter(model, ranks, where), part_(model.tensors.size(), Part::kWhole) {}

  void Run() {
    FindReaders();
    for (ModelOp& op : std::exchange(model_.ops, {})) {
      Cut(std::move(op));
    }
    SetProducers();
    model_.tensor_ranks = ranks_;
  }

 private:
  // The products that a module has of one tensor share what was gathered for them.
  [[nodiscard]] std::pair<std::uint32_t, std::uint32_t> ReaderOf(const ModelOp& op) const {
    const ModuleId parent = model_.modules[op.module.value].parent;
    return {op.inputs.front().value, (parent.valid() ? parent : op.module).value};
  }
  void FindReaders() {
    for (const ModelOp& op : model_.ops) {
      if (model_.SpecOf(op).kind == OpKind::kLinear) {
        ++readers_[ReaderOf(op)];
      }
    }
  }

  void Cut(ModelOp op) {
    OpSpec spec = model_.SpecOf(op);
    const Rule rule = RuleOf(spec.kind);
    const Part part = PartOf(op, rule);
    switch (rule) {
      case Rule::kRefused:
        Refuse(op, "no rule cuts op " + Quoted(op.name));
      case Rule::kLookup:
        return CutLookup(std::move(op), spec);
      case Rule::kProduct:
        return part == Part::kTokens ? CutColumns(std::move(op), spec)
                                     : CutRows(std::move(op), spec);
      case Rule::kNorm:
        CutNorm(op, spec, part);
        break;
      case Rule::kHeads:
        CutHeads(op, spec);
        break;
      case Rule::kAlike:
        if (spec.has_bias || spec.packed_gate) {
          Refuse(op, spec.has_bias ? "a table of positions" : "gates packed with other features");
        }
        Divide(part == Part::kFeatures ? spec.in : spec.rows, op,
               part == Part::kFeatures ? "features" : "tokens");
        break;
      case Rule::kLoss:
        Divide(spec.in, op, "words");
        spec.tensor_ranks = ranks_;
        break;
    }
    Keep(std::move(op), spec, rule == Rule::kLoss ? Part::kWhole : part);
  }

  // Of its inputs, which must agree.
  [[nodiscard]] Part PartOf(const ModelOp& op, Rule rule) const {
    const Part part = op.inputs.empty() ? Part::kWhole : part_[op.inputs.front().value];
    const bool is_table = rule == Rule::kLookup;
    const bool has_one = rule == Rule::kLoss;  // labels are whole
    for (std::size_t i = 0; i < (has_one ? 1 : op.inputs.size()); ++i) {
      if (rule != Rule::kRefused &&
          (part_[op.inputs[i].value] != part || (part == Part::kWhole) != is_table)) {
        Refuse(op, "layers of another form than embedding, blocks of products, head and loss");
      }
    }
    if (has_one && part != Part::kFeatures) {
      Refuse(op, "logits that no product makes");
    }
    return part;
  }

  void CutLookup(ModelOp op, OpSpec spec) {
    const InputKind input = model_.tensors[op.inputs.front().value].input;
    if (input == InputKind::kPositions || input == InputKind::kTokenTypes) {
      Refuse(op, "a table of positions or of token types");
    }
    Divide(spec.vocab, op, "words");
    spec.tensor_ranks = ranks_;
    CutParameter(op, op.params.front(), 0);
    Scatter(std::move(op), spec, spec.out);
  }

  void CutColumns(ModelOp op, OpSpec spec) {
    const auto key = ReaderOf(op);
    auto gathered = gathered_.find(key);
    if (gathered == gathered_.end()) {
      gathered = gathered_.emplace(key, Gather(op, spec, key)).first;
    }
    op.inputs.front() = gathered->second;
    Divide(spec.out, op, "output features");
    CutParameter(op, op.params.front(), spec.transposed ? 1 : 0);
    for (std::size_t k = 1; k < op.params.size(); ++k) {
      CutParameter(op, op.params[k], 0);
    }
    Keep(std::move(op), spec, Part::kFeatures);
  }

  // The bias is added once, to the sum over the ranks: all have it, and its whole gradient.
  void CutRows(ModelOp op, OpSpec spec) {
    Divide(spec.in, op, "input features");
    CutParameter(op, op.params.front(), spec.transposed ? 0 : 1);
    Scatter(std::move(op), spec, spec.out);
  }

  void CutNorm(const ModelOp& op, OpSpec& spec, Part part) {
    if (part == Part::kFeatures && spec.rows <= model_.SpecOf(ProducerOf(op)).rows) {
      Refuse(op, "a norm over features of several ranks");
    }
    Divide(spec.rows, op, part == Part::kFeatures ? "heads of all tokens" : "tokens");
    for (const ParamId p : op.params) {
      model_.params[p.value].has_partial_gradient = true;
    }
  }
  [[nodiscard]] const ModelOp& ProducerOf(const ModelOp& op) const {
    for (std::size_t i = model_.ops.size(); i-- > 0;) {
      const std::vector<TensorId>& outputs = model_.ops[i].outputs;
      if (std::find(outputs.begin(), outputs.end(), op.inputs.front()) != outputs.end()) {
        return model_.ops[i];
      }
    }
    Refuse(op, "a norm of an input of the model");
  }

  void CutHeads(const ModelOp& op, OpSpec& spec) const {
    if (op.inputs.size() != (spec.kind == OpKind::kRope ? 2 : 3) || spec.has_bias) {
      Refuse(op, "attention of other inputs than q, k and v");
    }
    Divide(spec.heads, op, "heads");
    Divide(spec.kv_heads, op, "heads of keys and values");
  }

  // Tied ones are cut once.
  void CutParameter(const ModelOp& op, ParamId id, std::size_t dimension) {
    Parameter& param = model_.params[id.value];
    if (param.tensor_parts == ranks_) {
      Refuse(op, "a weight that several ops use");
    }
    Divide(param.shape[dimension], op, "rows or columns");
    param.tensor_parts = ranks_;
    param.tensor_dimension = dimension;
  }

  // All tokens of the first input, in front of `op`.
  TensorId Gather(const ModelOp& op, const OpSpec& product,
                  std::pair<std::uint32_t, std::uint32_t> key) {
    ModelOp added;
    added.module = readers_[key] > 1 ? ModuleId(key.second) : op.module;
    added.name = "gather_tokens";
    added.inputs = {op.inputs.front()};
    added.outputs = {NewTensor(op.inputs.front())};
    OpSpec spec;
    spec.kind = OpKind::kGatherTokens;
    spec.rows = product.rows;
    spec.in = product.in;
    spec.tensor_ranks = ranks_;
    const TensorId out = added.outputs.front();
    Keep(std::move(added), spec, Part::kFeatures);
    return out;
  }

  // `op` makes a part of a sum, and the output that it had are this rank's tokens of the sum.
  void Scatter(ModelOp op, const OpSpec& product, std::int64_t features) {
    OpSpec spec;
    spec.kind = OpKind::kScatterTokens;
    spec.rows = product.rows;
    spec.in = features;
    spec.tensor_ranks = ranks_;
    ModelOp added;
    added.module = op.module;
    added.name = "scatter_tokens";
    added.outputs = {op.outputs.front()};
    added.inputs = {op.outputs.front() = NewTensor(op.outputs.front())};
    added.returns_input = std::exchange(op.returns_input, {});
    std::int64_t tokens = spec.rows;
    Divide(tokens, op, "tokens");
    Keep(std::move(op), product, Part::kFeatures);
    Keep(std::move(added), spec, Part::kTokens);
  }

  void Keep(ModelOp op, const OpSpec& spec, Part part) {
    part_.resize(model_.tensors.size(), Part::kWhole);
    for (const TensorId t : op.outputs) {
      part_[t.value] = part;
    }
    Cutter::Keep(std::move(op), spec);
  }

  std::vector<Part> part_;  // by tensor
  // Of a tensor and the module around products: how many there are, and what was gathered.
  std::map<std::pair<std::uint32_t, std::uint32_t>, int> readers_;
  std::map<std::pair<std::uint32_t, std::uint32_t>, TensorId> gathered_;
};

}  // namespace

void CutTensor(Model& model, std::int64_t ranks, const std::string& where) {
  if (ranks < 1) {
    throw InputError(where, std::to_string(ranks), "at least 1");
  }
  if (ranks != 1 && model.tensor_ranks != ranks) {
    TensorCutter(model, ranks, where).Run();
  }
}

}  // namespace shardwright
