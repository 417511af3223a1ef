#pragma once

// A neural network as Shardwright sees it: a module tree with parameters, and a DAG of ops in
// execution order. All sizes are per sample (one sequence, one image); a micro-batch of B samples
// multiplies them. The sequence length is fixed when the model is built.

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "core/units.h"

namespace shardwright {

struct Parameter {
  std::string fqn;                  // as named_parameters() prints it, e.g. "model.norm.weight"
  std::vector<std::int64_t> shape;  // as PyTorch stores it; an nn.Linear weight is [out, in]
  ModuleId module;                  // the module that registers it
  bool trainable = true;            // false: no gradient, no optimizer state
  ParamId tied_to;                  // the earlier parameter whose storage this one is, if any
  bool full_precision = false;      // mixed precision leaves it alone; of batch norms only
  std::int64_t parts = 1;         // ranks that have an equal part each of the model's (CutExperts)
  std::int64_t tensor_parts = 1;  // the same of CutTensor
  std::size_t tensor_dimension = 0;  // of `shape`, which CutTensor divides
  // Lengths here along that dimension of what is packed there (q, k and v), each divided; empty:
  // all.
  std::vector<std::int64_t> tensor_sections = {};
  // Whole on each of the ranks of CutTensor, and each has the gradient of its own tokens or heads.
  bool has_partial_gradient = false;

  // Product of `shape`.
  [[nodiscard]] std::int64_t Elements() const;
  // The shape before CutTensor.
  [[nodiscard]] std::vector<std::int64_t> WholeShape() const;
};

struct Module {
  std::string name;                  // last component of the FQN; empty for the root
  std::string fqn;                   // "model.layers.0"; empty for the root
  std::string class_name;            // "LlamaDecoderLayer"
  ModuleId parent;                   // none for the root
  std::vector<ModuleId> children;    // in registration order
  std::vector<ParamId> params;       // registered directly here, in registration order
  std::int64_t buffer_elements = 0;  // fp32 elements of non-parameter buffers (running stats)
  ModuleId same_as = {};             // the earlier module that is registered here once more, if any
};

enum class OpKind : std::uint8_t {
  kEmbedding,        // ids (rows) -> (rows, out); params: table [vocab, out]
  kLinear,           // (rows, in) -> (rows, out); params: weight, optional bias
  kLayerNorm,        // (rows, in); params: weight, optional bias
  kRmsNorm,          // (rows, in); params: weight
  kRope,             // rotates q and k: inputs q, k (or packed with v); outputs q', k'
  kAttention,        // inputs q, k, v (has_bias: and a position bias), or one packed qkv tensor;
                     // output (rows, heads*value_dim)
  kActivation,       // element-wise on (rows, in)
  kGatedActivation,  // act(gate) * up on two (rows, in) inputs (packed_gate: on one)
  kAdd,              // residual or embedding sum of two (rows, in) inputs; has_bias: of one input
                     // and a parameter (a position table)
  kMul,              // product of two (rows, in) inputs
  kScale,            // (rows, in) times a constant (Gemma's embedding scale)
  kDropout,          // (rows, in), probability dropout_p
  kPositionBias,  // T5: params table [buckets, heads] -> (heads, seq_q, seq_k), no batch; causal:
                  // only keys before the query have buckets of their own
  kConv2d,        // (in, height, width) -> (out, height_out, width_out)
  kBatchNorm,     // (in, height, width); params weight, bias
  kMaxPool,       // (in, height, width) -> (in, height_out, width_out)
  kAvgPool,       // the same; a global pool has height_out = width_out = 1
  kConcat,        // token concatenation; params (class token) first, then inputs; output (rows, in)
  kSelect,        // picks the first rows (class token, pooler input): (in) per selected row
  kRouter,        // MoE: (rows, in) -> (rows, experts) probabilities + top-k; params: weight
  kExperts,       // MoE: all expert MLPs on the routed rows, dispatch and combine included; inputs
                  // x and the router's output; params: per expert gate (if gated), up, down
  kLogSoftmax,    // (rows, in)
  kNllLoss,       // (rows, in) -> scalar
  kCrossEntropy,  // logits (rows, vocab=in) -> scalar
  kOther,         // any op that is only known by what it costs (OpSpec::other)
  // What CutExperts makes of kExperts, in this order, with kExperts on routed rows in the middle.
  kDispatch,  // inputs x and the router's output: (rows, in) -> (rows * experts_per_token, in),
              // a copy of each token per chosen expert, in the experts' order; and their numbers
  kExchange,  // (rows, in) -> (rows, in): all-to-all among the ranks that share the experts;
              // routed: input 1 are the numbers, which are exchanged first
  kCombine,   // inputs those rows and the router's output: weighted sum per token (rows, in)
  // What CutTensor puts between ops, among the ranks that cut every layer; the first also
  // CutContext, among the ranks that have a part of the tokens each.
  kGatherTokens,   // all-gather: (rows / ranks, in) -> (rows, in)
  kScatterTokens,  // reduce-scatter of partial sums: (rows, in) -> (rows / ranks, in)
};

// How the positions of a rotary embedding are stretched beyond the trained length. kOther stands
// for a rule that a config names and no kernel knows: such models can be planned, not run.
enum class RopeScaling : std::uint8_t { kNone, kLinear, kLlama3, kOther };

// The angles of a rotary embedding: pair i of position p turns by p * theta^(-2 i / dim).
struct RopeAngles {
  std::int64_t dim = 0;  // rotated features of a head: its first ones, or its last ones when the
                         // keys come from two tensors (DeepSeek); 0: not a rope
  double theta = 0.0;    // base of the frequencies
  bool interleaved = false;  // pairs (2 i, 2 i + 1); otherwise (i, i + dim / 2)
  RopeScaling scaling = RopeScaling::kNone;
  double factor = 0.0;  // kLinear, kLlama3
  double low_frequency_factor = 0.0, high_frequency_factor = 0.0, original_length = 0.0;  // kLlama3

  bool operator==(const RopeAngles&) const = default;
};

// A size of an op for a micro-batch of B samples: fixed + per_sample * B + per_pair * B * B. Losses
// that compare every sample with every other have pairs.
struct Amount {
  std::int64_t fixed = 0, per_sample = 0, per_pair = 0;

  [[nodiscard]] constexpr std::int64_t Of(std::int64_t batch) const {
    return fixed + (per_sample + per_pair * batch) * batch;
  }
  bool operator==(const Amount&) const = default;
};

// Elements of the compute dtype, and bytes of what has a dtype of its own.
struct AmountOfData {
  Amount elements, bytes;

  bool operator==(const AmountOfData&) const = default;
};

// One launch of a kOther op.
struct OtherKernel {
  enum class Pass : std::uint8_t { kForward, kBackwardData, kBackwardWeight };
  enum class Class : std::uint8_t {
    kElementwise,
    kCopy,
    kNorm,
    kSoftmax,
    kGatherScatter,
    kGemm,
    kConv,
    kAttention,
    kAttentionBackward
  };
  Pass pass = Pass::kForward;
  Class kind = Class::kElementwise;
  Amount batch, m, n, k;  // kGemm, kConv; kAttention*: as in Kernel
  Amount flops;
  AmountOfData read, written;

  bool operator==(const OtherKernel&) const = default;
};

struct OtherOutput {
  enum class Type : std::uint8_t { kCompute, kFp32, kInt64, kBool };
  Type type = Type::kCompute;
  std::int64_t elements = 0;  // per sample, or in all when it is shared
  bool is_shared = false;     // one copy whatever the batch
  std::int32_t view_of = -1;  // the input whose storage it is; -1: its own

  bool operator==(const OtherOutput&) const = default;
};

// What an op costs of which nothing else is known: its launches and what it keeps for backward, as
// tools/export_model.py finds them.
struct OtherCost {
  std::string function;  // "aten.cumsum"
  std::vector<OtherKernel> kernels;
  std::vector<OtherOutput> outputs;
  std::vector<AmountOfData> saved;  // tensors that are neither inputs nor outputs
  std::uint32_t saves_input = 0, saves_output = 0, saves_input_for_weight = 0;  // as in OpKernels
  AmountOfData forward_workspace;   // alive only while it runs
  AmountOfData backward_workspace;  // alive at the peak of its backward beside gradients
  bool is_cast = false;             // to fp32: nothing where that is the compute dtype
  bool stops_gradient = false;      // runs without gradients, or hands none on (detach)

  bool operator==(const OtherCost&) const = default;
};

enum class Activation : std::uint8_t { kNone, kRelu, kGelu, kGeluTanh, kSilu, kTanh, kSigmoid };

// How the model's own code writes GELU's tanh form: as one operator, or in several, by names of
// Transformers "gelu_new" (GPT-2's, with pow) and "gelu_fast" (with products).
enum class GeluCode : std::uint8_t { kOneOperator, kNew, kFast };

// How attention meets the tokens of other ranks (CutContext).
enum class ContextMethod : std::uint8_t {
  kGather,      // all keys and values at once (torchtitan)
  kRingGather,  // rank after rank; all were gathered beside the first (torch's context_parallel)
  kRing,        // rank after rank; the next ones are sent round meanwhile
  kUlysses,     // all tokens of some heads instead
};
inline constexpr std::size_t kContextMethodCount = 4;

// Everything a kernel's shape and numbers depend on, per sample. Ops with equal specs cost the
// same, so specs are stored once and ops point at them. Unused fields stay 0.
struct OpSpec {
  OpKind kind = OpKind::kLinear;
  std::int64_t rows = 0;       // rows (tokens, pixels for kSelect: selected rows) per sample
  std::int64_t in = 0;         // input features or channels
  std::int64_t out = 0;        // output features or channels; MoE: intermediate size of one expert
  std::int64_t vocab = 0;      // embedding rows
  std::int64_t heads = 0;      // query heads
  std::int64_t kv_heads = 0;   // key/value heads (GQA)
  std::int64_t head_dim = 0;   // query/key head size
  std::int64_t value_dim = 0;  // value head size
  std::int64_t seq_q = 0, seq_k = 0;  // attention lengths
  std::int64_t window = 0;            // sliding window; 0 = none
  bool causal = false;
  bool has_bias = false;
  bool gated = false;         // MoE: experts have a gate projection (3 matrices)
  bool routed = false;        // kExperts: its one input are rows that arrived for these experts;
                              // kExchange: rows on their way to experts, not back
  bool synchronized = false;  // kBatchNorm: statistics over the samples of all data-parallel ranks
  Activation activation = Activation::kNone;
  GeluCode gelu_code = GeluCode::kOneOperator;  // of kGeluTanh
  double dropout_p = 0.0;
  std::int64_t height = 0, width = 0;          // conv/pool input
  std::int64_t height_out = 0, width_out = 0;  // conv/pool output
  std::int64_t kernel = 0, stride = 0, padding = 0, groups = 1;
  std::int64_t experts = 0, experts_per_token = 0;
  // kGatherTokens, kScatterTokens, kEmbedding and kCrossEntropy of a part of the vocabulary: ranks
  // that cut the layer
  std::int64_t tensor_ranks = 0;
  // kAttention, and kGatherTokens in front of it: ranks that have a part of the tokens each. seq_q
  // is of one rank, seq_k of all.
  std::int64_t context_ranks = 0;
  ContextMethod context_method = ContextMethod::kGather;

  // What the numbers depend on and the cost does not.
  double epsilon = 0.0;        // norms: added to the variance or mean square
  double weight_offset = 0.0;  // kRmsNorm: multiplies by weight + this (Gemma: 1)
  bool scales_input = false;   // kRmsNorm: written out, it scales x itself, not the fp32 copy (T5)
  // kScale: the constant. kAttention: what scores are multiplied by; 0 = 1 / sqrt(head_dim).
  // kRouter: what the routing weights are multiplied by; 0 = 1.
  double factor = 0.0;
  double soft_cap = 0.0;          // kAttention: scores become cap * tanh(scores / cap); 0 = none
  double alibi_max = 0.0;         // kAttention: exponent of the last head's ALiBi slope; 0 = none
  RopeAngles rope = {};           // kRope
  bool packed_by_head = false;    // packed q, k, v: [head][q, k, v], otherwise [q, k, v][head]
  bool packed_gate = false;       // kGatedActivation: rows of the input are gate, then up
  bool transposed = false;        // kLinear: the weight is [in, out]; kExchange of CutContext:
                                  // heads come back, and tokens go
  bool bias_only = false;         // kLinear, kConv2d: the bias is trained and the weight is not
  bool tokens_out = false;        // kConv2d: the output is (pixels, channels)
  bool up_last = false;           // kExperts: matrices are gate, down, up instead of gate, up, down
  bool normalizes_top_k = false;  // kRouter: the chosen weights of a token sum to 1
  bool scores_by_sigmoid = false;     // kRouter: sigmoid instead of softmax over the experts
  std::int64_t groups_per_token = 0;  // kRouter: experts come from that many of `groups`; 0 = all
  std::int64_t max_distance = 0;  // kPositionBias: the distance from which one bucket serves all
  std::int64_t index_offset = 0;  // kEmbedding: added to every id (OPT's positions: 2)
  // kEmbedding: the row that starts at zero and gets no gradient from here (torch's padding_idx);
  // -1 = none.
  std::int64_t padding_row = -1;
  bool materialized = false;   // kAttention: written out, so that scores are kept by any kernel set
  bool native_groups = false;  // kAttention: no kernel set copies k and v to all query heads
  bool heads_first = false;  // kAttention: an eager rotation makes queries with heads before tokens
  OtherCost other = {};      // kOther

  bool operator==(const OpSpec&) const = default;
};

// What an activation tensor holds; the KernelSet turns this into a dtype.
enum class TensorRole : std::uint8_t {
  kActivation,  // compute dtype
  kIndex,       // token ids, labels: int64
  kLoss,        // fp32 scalar
  kFp32,        // an activation that stays in fp32 whatever the compute dtype
  kBool,        // a mask: a byte per element, no gradient
};

// What an input of the model is filled with.
enum class InputKind : std::uint8_t {
  kNone,           // no input: an op makes it
  kFeatures,       // images and other activations
  kTokens,         // ids from the data
  kTokenTypes,     // BERT's segments; 0 for data without them
  kDecoderTokens,  // the labels, shifted by one to the right
  kPositions,      // 0, 1, 2, ...: the same for every sample
  kLabels,
};

// A value that flows between ops.
struct Tensor {
  TensorRole role = TensorRole::kActivation;
  std::int64_t elements = 0;  // per sample, or in all when !per_sample
  bool per_sample = true;     // false: one copy whatever the batch (T5's position bias)
  ModelOpId producer;         // none: an input of the model (ids, labels, images)
  InputKind input = InputKind::kNone;
};

struct ModelOp {
  std::uint32_t spec = 0;        // index into Model::specs
  ModuleId module;               // the innermost module whose forward runs it
  std::string name;              // short and unique inside its module: "q_proj", "attn", "add_1"
  std::vector<TensorId> inputs;  // in the order OpKind documents
  std::vector<TensorId> outputs;
  std::vector<ParamId>
      params;  // in the order OpKind documents; tied ones may be listed twice in the model
  // The outermost module of which a further call begins with this op, right behind the one before.
  ModuleId called_again = {};
  // Modules whose call ends with this op and that return only what they were given, as an input of
  // theirs; what they computed is dropped. Where a gradient comes back to what they returned.
  std::vector<ModuleId> returns_input = {};
};

struct Model {
  std::string name;  // zoo name, or the file's stem
  std::string type;  // "llama", "gpt2", ..., "custom"
  // Classes of the repeated layers ("LlamaDecoderLayer"), several where they differ; may be empty.
  std::vector<std::string> block_classes;
  std::vector<Module> modules;    // pre-order in registration order; [0] is the root
  std::vector<Parameter> params;  // pre-order in registration order, aliases included
  std::vector<Tensor> tensors;
  std::vector<ModelOp> ops;  // in execution order, which is a topological order
  std::vector<OpSpec> specs;
  std::int64_t sequence_length = 0;    // tokens per sample; 0 for image models
  std::int64_t tokens_per_sample = 0;  // what throughput counts: tokens, or 1 per image
  std::int64_t tensor_ranks = 1;       // it is one of so many equal parts (CutTensor)
  std::int64_t context_ranks = 1;  // it has one of so many equal parts of the tokens (CutContext)
  ContextMethod context_method = ContextMethod::kGather;
  // The stages of a pipeline's rank (CutStage): their ops, what they get from the stage before, and
  // what the one behind gets.
  struct Stage {
    std::uint32_t begin = 0, end = 0;
    TensorId received = {}, sent = {};
  };
  std::vector<Stage> stages = {};
  // What the config says of first values: initializer_range or init_std, the standard deviation of
  // matrices; of T5 initializer_factor, which multiplies all of them.
  double initializer = 0.02;
  std::vector<std::string> warnings;  // what the loader left out or assumed, one line each

  [[nodiscard]] const OpSpec& SpecOf(const ModelOp& op) const { return specs[op.spec]; }
};

// Does nothing call a module of this class, as it only holds others?
[[nodiscard]] bool IsContainer(std::string_view class_name);

// Is `op` a product whose bias gets a gradient and whose weight does not, by `has_grad` per
// parameter?
[[nodiscard]] bool TrainsBiasOnly(const Model& model, const ModelOp& op,
                                  const std::vector<bool>& has_grad);

// Parameters counted once per storage; `trainable_only` leaves out frozen ones.
[[nodiscard]] std::int64_t CountParameters(const Model& model, bool trainable_only = false);

// The module with this FQN, or none. O(1) after the first call is not promised; O(modules).
[[nodiscard]] ModuleId FindModule(const Model& model, std::string_view fqn);

// The module itself, or the one that is registered once more under its name.
[[nodiscard]] ModuleId FirstNameOf(const Model& model, ModuleId module);

// Is it of one of the model's block classes?
[[nodiscard]] bool IsBlock(const Model& model, ModuleId module);

// Is `module` equal to `ancestor` or below it? O(depth).
[[nodiscard]] bool IsInside(const Model& model, ModuleId module, ModuleId ancestor);

// Those of `modules` that are not inside others of them.
[[nodiscard]] std::vector<ModuleId> OuterOnes(const Model& model,
                                              const std::vector<ModuleId>& modules);

// Does op `i`, which is inside `module` as the op before it is, begin a further call of it?
[[nodiscard]] bool IsCalledAgain(const Model& model, std::size_t i, ModuleId module);

// Model FLOPs of one training step on one sample, by the convention that published MFU figures
// use: 6 FLOPs per matmul parameter and token (input embedding left out when untied) plus
// 12 * heads * head_dim * seq per attention layer and token, causal attention counted in full.
// Source: PaLM, arXiv 2204.02311, appendix B; 2 of the 6 are forward.
[[nodiscard]] Flops ConventionFlopsPerSample(const Model& model);

// Checks every invariant stated above (ids in range, execution order topological, one producer per
// tensor, ties point to earlier equal shapes). Throws InputError naming `where`. Boost.Graph's
// strong components tell a cycle, which is reported with its ops, from ops in a wrong order.
void ValidateModel(const Model& model, const std::string& where);

}  // namespace shardwright
