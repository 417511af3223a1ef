#include "models/cut_tensor.h"

#include <algorithm>
#include <array>
#include <map>
#include <span>
#include <utility>
#include <vector>

#include "core/error.h"
#include "core/lookup.h"
#include "core/ranges.h"
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

// Of an adapter, whose ops stand behind the product that they add to.
bool IsOfAdapter(const ModelOp& op) {
  return op.name.starts_with("lora_");
}

// What the rule of a kind does with an op.
enum class Rule : std::uint8_t {
  kRefused,
  kLookup,   // a table of which each rank has some rows
  kProduct,  // by columns of tokens, by rows of features
  kNorm,     // of tokens, or of the features of each head
  kCosted,   // one of which the costs are known: each has its part of those per sample
  kHeads,    // on some heads
  kMoved,    // some heads, on their way between ranks that cut tokens
  kAlike,    // element by element
  kLoss,
};

// Of each token by itself: norms in fp32, and Nemotron's, whose weight is one more than the
// parameter.
bool IsNorm(const OpSpec& spec) {
  return spec.other.function == "aten.native_layer_norm" || spec.other.function == "aten.rsqrt";
}

bool IsCopy(const OpSpec& spec) {
  return spec.other.function == "aten.clone" || spec.other.function == "aten._to_copy";
}

Rule RuleOf(const OpSpec& spec) {
  using enum OpKind;
  static constexpr std::array<std::pair<OpKind, Rule>, 13> kRules = {{
      {kEmbedding, Rule::kLookup},
      {kLinear, Rule::kProduct},
      {kLayerNorm, Rule::kNorm},
      {kRmsNorm, Rule::kNorm},
      {kRope, Rule::kHeads},
      {kAttention, Rule::kHeads},
      {kActivation, Rule::kAlike},
      {kGatedActivation, Rule::kAlike},
      {kAdd, Rule::kAlike},
      {kMul, Rule::kAlike},
      {kScale, Rule::kAlike},
      {kDropout, Rule::kAlike},
      {kCrossEntropy, Rule::kLoss},
  }};
  if (spec.kind == kGatherTokens || spec.kind == kExchange) {
    return spec.context_ranks > 0 ? Rule::kMoved : Rule::kRefused;
  }
  const bool is_costed = spec.kind == kOther && (IsNorm(spec) || IsCopy(spec));
  return is_costed ? Rule::kCosted : ValueOf(kRules, spec.kind, Rule::kRefused);
}

class TensorCutter : Cutter {
 public:
  TensorCutter(Model& model, std::int64_t ranks, const std::string& where)
      : Cutter(model, ranks, where), part_(model.tensors.size(), Part::kWhole) {}

  void Run() {
    FindReaders();
    std::vector<ModelOp> ops = std::exchange(model_.ops, {});
    for (auto op = ops.begin(); op != ops.end();) {
      const auto end = std::find_if_not(op + 1, ops.end(), IsOfAdapter);
      adapter_ = std::span(ops).subspan(static_cast<std::size_t>(op + 1 - ops.begin()),
                                        static_cast<std::size_t>(end - op - 1));
      Cut(std::move(*op));
      op = end;
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
      if (model_.SpecOf(op).kind == OpKind::kLinear && !IsOfAdapter(op)) {
        ++readers_[ReaderOf(op)];
      }
    }
  }

  void Cut(ModelOp op) {
    OpSpec spec = model_.SpecOf(op);
    if (IsOfParameters(op, spec)) {
      return Keep(std::move(op), spec, Part::kWhole);
    }
    const Rule rule = RuleOf(spec);
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
      case Rule::kCosted:
        CutCosted(op, spec, part);
        break;
      case Rule::kHeads:
        CutHeads(op, spec);
        break;
      case Rule::kMoved:
        Divide(spec.in, op, "features");
        break;
      case Rule::kAlike:
        if (spec.has_bias) {
          Refuse(op, "a table of positions that is added");
        }
        Divide(part == Part::kFeatures ? spec.in : spec.rows, op,
               part == Part::kFeatures ? "features" : "tokens");
        if (spec.packed_gate) {
          SetSections(op, {spec.in, spec.in});
        }
        break;
      case Rule::kLoss:
        Divide(spec.in, op, "words");
        spec.tensor_ranks = ranks_;
        break;
    }
    Keep(std::move(op), spec, rule == Rule::kLoss ? Part::kWhole : part);
  }

  // Does it make something of parameters alone (Nemotron's 1 + weight of a norm)?
  [[nodiscard]] static bool IsOfParameters(const ModelOp& op, const OpSpec& spec) {
    return spec.kind == OpKind::kOther && op.inputs.empty() && !op.params.empty();
  }

  // Of its inputs, which must agree.
  [[nodiscard]] Part PartOf(const ModelOp& op, Rule rule) const {
    const Part part = op.inputs.empty() ? Part::kWhole : part_[op.inputs.front().value];
    const bool is_table = rule == Rule::kLookup;
    const bool has_one = rule == Rule::kLoss || rule == Rule::kCosted;  // labels, weights are whole
    for (std::size_t i = 0; i < (has_one ? 1 : op.inputs.size()); ++i) {
      if (rule != Rule::kRefused &&
          (part_[op.inputs[i].value] != part || (part == Part::kWhole) != is_table)) {
        Refuse(op, "layers of another form than embedding, blocks of products, head and loss");
      }
    }
    if (rule == Rule::kLoss && part != Part::kFeatures) {
      Refuse(op, "logits that no product makes");
    }
    return part;
  }

  void CutLookup(ModelOp op, OpSpec spec) {
    const InputKind input = model_.tensors[op.inputs.front().value].input;
    if (input == InputKind::kTokenTypes) {
      Refuse(op, "a table of token types");
    }
    if (input == InputKind::kPositions) {  // each looks up the positions of its tokens
      Divide(spec.rows, op, "tokens");
      SetPartial(op);
      return Keep(std::move(op), spec, Part::kTokens);
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
    const TensorId part = std::exchange(op.inputs.front(), gathered->second);
    Divide(spec.out, op, "output features");
    CutParameter(op, op.params.front(), spec.transposed ? 1 : 0);
    for (std::size_t k = 1; k < op.params.size(); ++k) {
      CutParameter(op, op.params[k], 0);
    }
    Keep(std::move(op), spec, Part::kFeatures);
    for (ModelOp& added : adapter_) {
      std::replace(added.inputs.begin(), added.inputs.end(), part, gathered->second);
      OpSpec its = CutAdapter(added, /*is_of_rows=*/false);
      Keep(std::move(added), its, Part::kFeatures);
    }
  }

  // The bias is added once, to the sum over the ranks: all have it, and its whole gradient.
  void CutRows(ModelOp op, OpSpec spec) {
    Divide(spec.in, op, "input features");
    CutParameter(op, op.params.front(), spec.transposed ? 0 : 1);
    const std::int64_t features = spec.out;
    for (ModelOp& added : adapter_) {  // whose sum is scattered in the place of the product
      const OpSpec its = CutAdapter(added, /*is_of_rows=*/true);
      Keep(std::exchange(op, std::move(added)), std::exchange(spec, its), Part::kFeatures);
    }
    Scatter(std::move(op), spec, features);
  }

  // As torchtitan's components/lora.py: B has the outputs of columns, A the inputs of rows. The
  // other one is whole, and each rank has a part of its gradient.
  OpSpec CutAdapter(const ModelOp& op, bool is_of_rows) {
    OpSpec spec = model_.SpecOf(op);
    const bool is_a = op.name == "lora_A", reads_input = is_a || spec.kind == OpKind::kDropout;
    if (spec.kind == OpKind::kOther) {
      Refuse(op, "an adapter that learns lengths of rows (DoRA)");
    }
    if (reads_input != is_of_rows) {
      SetPartial(op);
      return spec;
    }
    Divide(op.params.empty() || is_a ? spec.in : spec.out, op, "features");
    for (const ParamId p : op.params) {
      CutParameter(op, p, is_a ? 1 : 0);
    }
    return spec;
  }

  void CutNorm(const ModelOp& op, OpSpec& spec, Part part) {
    if (part == Part::kFeatures && spec.rows <= model_.SpecOf(ProducerOf(op)).rows) {
      Refuse(op, "a norm over features of several ranks");
    }
    Divide(spec.rows, op, part == Part::kFeatures ? "heads of all tokens" : "tokens");
    SetPartial(op);
  }
  void SetPartial(const ModelOp& op) {
    for (const ParamId p : op.params) {
      model_.params[p.value].has_partial_gradient = true;
    }
  }
  void CutCosted(const ModelOp& op, OpSpec& spec, Part part) {
    if (part == Part::kFeatures && IsNorm(spec)) {
      Refuse(op, "a norm over features of several ranks");
    }
    SetPartial(op);
    for (std::size_t i = 1; i < op.inputs.size(); ++i) {
      SetPartial(ProducerOf(op, i));
    }
    const auto divide = [&](AmountOfData& amount) {
      Divide(amount.elements.per_sample, op, "elements");
      Divide(amount.bytes.per_sample, op, "bytes");
    };
    for (OtherKernel& kernel : spec.other.kernels) {
      divide(kernel.read);
      divide(kernel.written);
    }
    std::for_each(spec.other.saved.begin(), spec.other.saved.end(), divide);
    divide(spec.other.forward_workspace);
    divide(spec.other.backward_workspace);
    for (OtherOutput& output : spec.other.outputs) {
      Divide(output.elements, op, "elements");
    }
  }

  [[nodiscard]] const ModelOp& ProducerOf(const ModelOp& op, std::size_t input = 0) const {
    for (std::size_t i = model_.ops.size(); i-- > 0;) {
      const std::vector<TensorId>& outputs = model_.ops[i].outputs;
      if (IsIn(outputs, op.inputs[input])) {
        return model_.ops[i];
      }
    }
    Refuse(op, "an input of the model where a layer's output is expected");
  }

  void CutHeads(const ModelOp& op, OpSpec& spec) {
    const bool is_packed = op.inputs.size() == 1;
    if ((!is_packed && op.inputs.size() != (spec.kind == OpKind::kRope ? 2 : 3)) || spec.has_bias) {
      Refuse(op, "attention of other inputs than q, k and v");
    }
    Divide(spec.heads, op, "heads");
    Divide(spec.kv_heads, op, "heads of keys and values");
    if (is_packed && !spec.packed_by_head) {
      const std::int64_t q = spec.heads * spec.head_dim, k = spec.kv_heads * spec.head_dim;
      SetSections(op, {q, k, model_.tensors[op.inputs[0].value].elements / spec.rows - q - k});
    }
  }

  // Of the product that makes the input of `op`, and of its adapter: what stands packed in its
  // features, cut each.
  void SetSections(const ModelOp& op, const std::vector<std::int64_t>& sections,
                   std::size_t input = 0) {
    const ModelOp& product = ProducerOf(op, input);
    if (IsOfAdapter(product) && product.params.empty()) {
      for (std::size_t i = 0; i < product.inputs.size(); ++i) {
        SetSections(product, sections, i);
      }
      return;
    }
    if (model_.SpecOf(product).kind != OpKind::kLinear) {
      Refuse(op, "packed features that no product makes");
    }
    for (const ParamId p : product.params) {
      model_.params[p.value].tensor_sections = sections;
    }
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

  std::vector<Part> part_;      // by tensor
  std::span<ModelOp> adapter_;  // of the op that is cut
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
