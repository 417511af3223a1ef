// The executor's host kernels (executor/host/kernels): what they keep for backward and the exact
// workspace of each, piece by piece in the order in which the kernel takes them. Launches and bytes
// are those of the general lowering, except where a kernel does something else.

#include "models/kernels/host.h"

#include <initializer_list>
#include <utility>

#include "models/kernels/fp8.h"
#include "models/kernels/kernels.h"

namespace shardwright::internal {
namespace {

// Bytes of a workspace of pieces with so many 4-byte numbers each.
std::int64_t Pieces(std::initializer_list<std::int64_t> counts) {
  std::int64_t bytes = 0;
  for (const std::int64_t count : counts) {
    bytes += HostAligned(Product({count, kFp32Bytes}));
  }
  return bytes;
}

Kernel Pass(const LowerContext& context, std::int64_t read, std::int64_t written) {
  return PassKernel(KernelClass::kElementwise, context.compute, Product({read, context.s}),
                    Product({written, context.s}));
}

// Operands are read once more for the largest magnitude, and rounded inside the product.
void RoundInsideProducts(const LowerContext& context, OpKernels* op) {
  const OpSpec& spec = context.spec;
  const Kernel input = Pass(context, Product({Rows(context), spec.in}), 0);
  const Kernel output = Pass(context, Product({Rows(context), spec.out}), 0);
  const Kernel weight = Pass(context, Product({spec.in, spec.out}), 0);
  op->forward.insert(op->forward.begin(), {input, weight});
  op->backward_data.insert(op->backward_data.begin(), {output, weight});
  op->backward_weight.insert(op->backward_weight.begin(), {output, input});
}

void SetHostLinear(const LowerContext& context, OpKernels* op) {
  const OpSpec& spec = context.spec;
  const std::int64_t rows = Rows(context);
  op->saves_input = 1;
  op->saves_input_for_weight = 1;
  // Sums in fp8 are divided by scales in a tile, whatever the result's dtype.
  const bool is_fp8 = MultipliesFp8(spec, context.compute, context.options);
  const DType result = is_fp8 ? DType::kBf16 : context.compute;
  op->forward_workspace = Bytes((spec.has_bias ? Pieces({spec.out}) : 0) +
                                HostGemmWorkspace(rows, spec.out, spec.in, result));
  // Weight gradients are finished in a tile, as results of 16 bits are.
  const std::int64_t m = spec.transposed ? spec.in : spec.out;
  const std::int64_t n = spec.transposed ? spec.out : spec.in;
  op->backward_workspace =
      Bytes(std::max({HostGemmWorkspace(rows, spec.in, spec.out, result),
                      HostGemmWorkspace(m, n, rows, DType::kBf16), Pieces({spec.out})}));
  if (is_fp8 && context.options.host_kernels) {
    const bool by_row = context.options.fp8 == Fp8Products::kPerRow;
    op->forward_workspace += Bytes(HostFp8Scales(rows, spec.out, by_row));
    op->backward_workspace +=
        Bytes(std::max(HostFp8Scales(rows, spec.in, by_row), HostFp8Scales(m, n, by_row)));
    RoundInsideProducts(context, op);
  }
}

void SetNorm(const LowerContext& context, std::int64_t statistics, OpKernels* op) {
  const std::int64_t in = context.spec.in;
  op->saves_input = 1;
  op->extra_saved = Bytes(Product({Rows(context), statistics, kFp32Bytes}));
  op->forward_workspace = Bytes(Pieces({in, context.spec.has_bias ? in : 0, in, in}));
  op->backward_workspace = Bytes(Pieces({in, in, in, in, in, in, in}));
}

// In a ring, beside the tiles: what the queries have summed so far, and in backward the gradients
// of the keys and values that are here.
void SetHostRing(const LowerContext& context, OpKernels* op) {
  const OpSpec& spec = context.spec;
  const std::int64_t queries = Product({context.batch, spec.heads, spec.seq_q});
  const std::int64_t keys = Product({context.batch, spec.kv_heads, spec.seq_q});
  const std::int64_t both = keys * (spec.head_dim + spec.value_dim);
  op->ring.sent = Bytes(both * context.s);
  op->ring.sent_back = Bytes(both * kFp32Bytes);
  op->forward_workspace += Bytes(Pieces({queries * spec.value_dim, queries, queries}));
  op->backward_workspace += Bytes(Pieces({queries * spec.head_dim, both}));
}

void SetHostAttention(const LowerContext& context, OpKernels* op) {
  OpSpec spec = context.spec;
  if (op->ring.steps > 0) {
    spec.seq_k = spec.seq_q;
  }
  const HostAttentionTiles tiles = AttentionTilesOf(spec);
  const std::int64_t tile = tiles.queries * tiles.keys;
  op->saves_input = spec.has_bias ? 0b1111 : 0b111;
  op->saves_output = 1;
  op->extra_saved = Bytes(Product({context.batch, spec.heads, spec.seq_q, kFp32Bytes}));
  op->forward_workspace =
      Bytes(Pieces({tile, tiles.queries * spec.value_dim, tiles.queries, tiles.queries}) +
            HostAligned(tiles.gemm_bytes));
  const std::int64_t bias =
      spec.has_bias ? Product({spec.heads / spec.kv_heads, spec.seq_q, spec.seq_k}) : 0;
  op->backward_workspace =
      Bytes(Pieces({tile, tile, tile, tile, tiles.queries * spec.head_dim,
                    spec.seq_k * spec.head_dim, spec.seq_k * spec.value_dim, tiles.queries, bias}) +
            HostAligned(tiles.gemm_bytes));
  if (op->ring.steps > 0) {
    SetHostRing(context, op);
  }
}

void SetRope(const LowerContext& context, OpKernels* op) {
  const OpSpec& spec = context.spec;
  const std::int64_t pairs = spec.rope.dim / 2;
  op->forward_workspace = Bytes(Pieces({pairs, pairs, 2 * pairs, spec.head_dim, spec.head_dim}));
  op->backward_workspace = op->forward_workspace;
  op->output_aliases = {-1, -1};
}

void SetConv(const LowerContext& context, OpKernels* op) {
  const OpSpec& spec = context.spec;
  const HostConvSizes sizes = ConvSizesOf(spec);
  const std::int64_t columns = Product({sizes.taps, sizes.pixels});
  op->saves_input = 1;
  op->saves_input_for_weight = 1;
  op->forward_workspace = Bytes(
      Pieces({columns, spec.out}) +
      (spec.tokens_out
           ? HostGemmWorkspace(sizes.pixels, sizes.channels_out, sizes.taps, context.compute)
           : HostGemmWorkspace(sizes.channels_out, sizes.pixels, sizes.taps, context.compute)));
  const std::int64_t data =
      Pieces({columns, sizes.channels_in * sizes.pixels_in}) +
      HostGemmWorkspace(sizes.taps, sizes.pixels, sizes.channels_out, DType::kFp32);
  const std::int64_t weight =
      Pieces({columns, spec.out * sizes.taps}) +
      HostGemmWorkspace(sizes.channels_out, sizes.taps, sizes.pixels, DType::kFp32);
  op->backward_workspace = Bytes(std::max(data, weight));
}

void SetPool(const LowerContext& context, OpKernels* op) {
  const OpSpec& spec = context.spec;
  const std::int64_t pooled = Product({spec.height_out, spec.width_out});
  if (spec.kind == OpKind::kMaxPool) {  // the place of each maximum
    op->extra_saved = Bytes(Product({context.batch, spec.in, pooled, 4}));
  }
  op->forward_workspace = Bytes(Pieces({Product({spec.height, spec.width}), pooled}));
  op->backward_workspace = op->forward_workspace;
}

void SetHostRouter(const LowerContext& context, OpKernels* op) {
  const OpSpec& spec = context.spec;
  const std::int64_t rows = Rows(context);
  op->saves_input = 1;
  op->saves_input_for_weight = 1;
  // Scores, and the chosen experts as 4-byte indices.
  op->extra_saved = Bytes(Product({rows, spec.experts + spec.experts_per_token, 4}));
  op->forward_workspace = Bytes(Pieces({spec.experts, spec.groups, spec.experts}) +
                                HostGemmWorkspace(rows, spec.experts, spec.in, DType::kFp32));
  op->backward_workspace =
      Bytes(Pieces({rows * spec.experts, spec.experts}) +
            std::max(HostGemmWorkspace(rows, spec.in, spec.experts, DType::kBf16),
                     HostGemmWorkspace(spec.experts, spec.in, rows, DType::kBf16)));
}

void SetHostExperts(const LowerContext& context, OpKernels* op) {
  const OpSpec& spec = context.spec;
  const std::int64_t rows = Rows(context);
  const bool is_dense = context.options.moe_dispatch == MoeDispatch::kDense && !spec.routed;
  const std::int64_t routed = RoutedRows(spec, rows, is_dense);
  op->saves_input = spec.routed ? 0b1 : 0b11;
  op->extra_saved = Bytes(Product({routed, spec.out, spec.gated ? 2 : 1, context.s}));
  const std::int64_t lists = Pieces({2 * (spec.experts + 1), 2 * routed});
  const std::int64_t in = Product({rows, spec.in});
  const std::int64_t hidden = Product({rows, spec.out});
  const std::int64_t gemm = ExpertsGemmWorkspace(spec, rows);
  op->forward_workspace = Bytes(lists + Pieces({in, in, in, hidden}) + gemm);
  op->backward_workspace = Bytes(lists + Pieces({in, in, in, hidden, in, hidden, hidden}) + gemm);
}

// Rows on their way to the experts of other ranks, or weighted and summed behind it. The router's
// output tells their order; a combination also keeps the rows, which its weights' gradients need.
void SetHostDispatch(const LowerContext& context, OpKernels* op) {
  const OpSpec& spec = context.spec;
  const bool combines = spec.kind == OpKind::kCombine;
  const std::int64_t rows = Rows(context);
  const std::int64_t lists =
      Pieces({2 * (spec.experts + 1), 2 * RoutedRows(spec, rows, /*is_dense=*/false)});
  const std::int64_t sums = Pieces({Product({rows, spec.in})});
  op->saves_input = combines ? 0b11 : 0b10;
  op->forward_workspace = Bytes(lists + (combines ? Pieces({spec.in}) + sums : 0));
  op->backward_workspace = Bytes(lists + Pieces({spec.in}) + (combines ? Pieces({spec.in}) : sums));
}

void SetPositionBias(const LowerContext& context, OpKernels* op) {
  const OpSpec& spec = context.spec;
  const std::int64_t distances = spec.seq_q + spec.seq_k - 1;
  op->forward_workspace = Bytes(Pieces({2 * distances, spec.vocab}));
  op->backward_workspace = Bytes(Pieces({2 * distances, spec.vocab, distances}));
}

// Ops that move or scale elements: their kernels, and nothing kept but what is said here.
void SetElementwise(const LowerContext& context, OpKernels* op) {
  const OpSpec& spec = context.spec;
  const std::int64_t e = Product({context.batch, spec.rows, spec.in});
  switch (spec.kind) {
    case OpKind::kActivation:
      if (spec.activation == Activation::kNone) {
        op->output_aliases = {0};
        return;
      }
      op->forward = {Pass(context, e, e)};
      op->backward_data = {Pass(context, 2 * e, e)};
      switch (spec.activation) {
        case Activation::kRelu:
        case Activation::kTanh:
        case Activation::kSigmoid:
          op->saves_output = 1;
          break;
        default:
          op->saves_input = 1;
      }
      return;
    case OpKind::kGatedActivation:
      op->forward = {Pass(context, 2 * e, e)};
      op->backward_data = {Pass(context, 3 * e, 2 * e)};
      op->saves_input = spec.packed_gate ? 0b1 : 0b11;
      return;
    case OpKind::kAdd:
      op->forward = {Pass(context, 2 * e, e)};
      if (spec.has_bias) {  // the parameter's gradient is a sum over the samples
        op->backward_data = {Pass(context, e, e)};
        op->backward_weight = {Pass(context, e, Product({spec.rows, spec.in}))};
      }
      return;
    case OpKind::kDropout:
      if (spec.dropout_p <= 0.0) {
        op->output_aliases = {0};
        return;
      }
      op->forward = {Pass(context, e, e)};
      op->backward_data = {Pass(context, e, e)};
      return;
    case OpKind::kConcat:
      op->backward_data = {Pass(context, e, e)};
      return;
    case OpKind::kSelect:
      op->forward = {Pass(context, e, e)};
      return;
    case OpKind::kExchange:
    case OpKind::kGatherTokens:
      if (spec.context_ranks > 0) {  // tokens do not lie in the order of ranks
        op->forward = op->backward_data = {Pass(context, e, e)};
      }
      return;
    case OpKind::kMul:
      op->saves_input = 0b11;
      return;
    default:
      return;
  }
}

void SetBatchNorm(OpKernels* general, OpKernels* op) {
  op->saves_input = 1;
  op->extra_saved = general->extra_saved;
  op->forward_exchange = std::move(general->forward_exchange);
  op->backward_exchange = std::move(general->backward_exchange);
}

// Kept: log-sums. Ranks with a part of the words share three numbers of a row: the largest logit,
// the sum of exponentials and the label's logit.
void SetHostCrossEntropy(const LowerContext& context, OpKernels* op) {
  const std::int64_t rows = Rows(context);
  op->saves_input = 0b11;
  op->extra_saved = Bytes(Product({rows, kFp32Bytes}));
  if (context.spec.tensor_ranks > 0) {
    op->forward_exchange = {{Pass(context, Product({rows, context.spec.in}), 3 * rows)},
                            Bytes(Product({3, rows, kFp32Bytes}))};
  }
}

}  // namespace

OpKernels AdaptToHost(const LowerContext& context, OpKernels general) {
  const OpSpec& spec = context.spec;
  const std::int64_t rows = Product({context.batch, spec.rows});
  OpKernels op;
  op.forward = std::move(general.forward);
  op.backward_data = std::move(general.backward_data);
  op.backward_weight = std::move(general.backward_weight);
  op.compute_intensive = general.compute_intensive;
  op.ring = std::move(general.ring);
  op.output_aliases = {-1};
  switch (spec.kind) {
    case OpKind::kEmbedding:
      op.saves_input = 1;
      op.saves_input_for_weight = 1;
      op.backward_workspace = Bytes(Pieces({4 * rows}));  // table row and position, 8 bytes each
      break;
    case OpKind::kLinear:
      SetHostLinear(context, &op);
      break;
    case OpKind::kLayerNorm:
    case OpKind::kRmsNorm:
      SetNorm(context, spec.kind == OpKind::kLayerNorm ? 2 : 1, &op);
      break;
    case OpKind::kRope:
      SetRope(context, &op);
      break;
    case OpKind::kAttention:
      SetHostAttention(context, &op);
      break;
    case OpKind::kPositionBias:
      SetPositionBias(context, &op);
      break;
    case OpKind::kConv2d:
      SetConv(context, &op);
      break;
    case OpKind::kBatchNorm:
      SetBatchNorm(&general, &op);
      break;
    case OpKind::kMaxPool:
    case OpKind::kAvgPool:
      SetPool(context, &op);
      break;
    case OpKind::kRouter:
      SetHostRouter(context, &op);
      break;
    case OpKind::kExperts:
      SetHostExperts(context, &op);
      break;
    case OpKind::kDispatch:
    case OpKind::kCombine:
      SetHostDispatch(context, &op);
      break;
    case OpKind::kLogSoftmax:
      op.saves_output = 1;
      break;
    case OpKind::kNllLoss:
      op.saves_input = 0b10;
      break;
    case OpKind::kCrossEntropy:
      SetHostCrossEntropy(context, &op);
      break;
    default:
      SetElementwise(context, &op);
      break;
  }
  return op;
}

}  // namespace shardwright::internal
