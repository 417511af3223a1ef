// Scaled dot-product attention, fused (flash) or with the score matrix in memory.

#include <algorithm>
#include <cstdint>
#include <utility>
#include <vector>

#include "models/kernels/kernels.h"

namespace shardwright::internal {
namespace {

// Bytes of the tensors of one attention op for the whole micro-batch.
struct AttentionBytes {
  std::int64_t q = 0, k = 0, v = 0;  // as the graph has them
  std::int64_t output = 0;
  std::int64_t k_all = 0, v_all = 0;  // with one k and v head per query head
  std::int64_t scores = 0;            // elements of the (heads, seq_q, seq_k) matrices
  std::int64_t rows = 0;              // batch * heads * seq_q
  std::int64_t bias = 0;              // the additive position bias, shared by the samples
};

AttentionBytes Measure(const LowerContext& context) {
  const OpSpec& spec = context.spec;
  const std::int64_t b = context.batch;
  const std::int64_t s = context.s;
  AttentionBytes bytes;
  bytes.q = Product({b, spec.heads, spec.seq_q, spec.head_dim, s});
  bytes.k = Product({b, spec.kv_heads, spec.seq_k, spec.head_dim, s});
  bytes.v = Product({b, spec.kv_heads, spec.seq_k, spec.value_dim, s});
  bytes.output = Product({b, spec.heads, spec.seq_q, spec.value_dim, s});
  bytes.k_all = Product({b, spec.heads, spec.seq_k, spec.head_dim, s});
  bytes.v_all = Product({b, spec.heads, spec.seq_k, spec.value_dim, s});
  bytes.scores = Product({b, spec.heads, spec.seq_q, spec.seq_k});
  bytes.rows = Product({b, spec.heads, spec.seq_q});
  bytes.bias = spec.has_bias ? Product({spec.heads, spec.seq_q, spec.seq_k, s}) : 0;
  return bytes;
}

bool Grouped(const OpSpec& spec) {
  return spec.kv_heads < spec.heads;
}

bool Repeats(const LowerContext& context) {
  return Grouped(context.spec) && context.options.repeat_kv && !context.spec.native_groups;
}

// expand + reshape of k and v to all query heads, and the sum of their gradients per group. The
// attention keeps the copies, not k and v.
void RepeatKeyValue(const LowerContext& context, const AttentionBytes& bytes, OpKernels* op) {
  const DType t = context.compute;
  op->forward.insert(op->forward.begin(),
                     {PassKernel(KernelClass::kCopy, t, bytes.k, bytes.k_all),
                      PassKernel(KernelClass::kCopy, t, bytes.v, bytes.v_all)});
  op->backward_data.push_back(PassKernel(KernelClass::kElementwise, t, bytes.k_all, bytes.k));
  op->backward_data.push_back(PassKernel(KernelClass::kElementwise, t, bytes.v_all, bytes.v));
  op->saves_input &= ~0b110U;
  AddTensors({bytes.k_all, bytes.v_all}, &op->extra_saved, &op->extra_saved_tensors);
  AddTensors({bytes.k_all, bytes.v_all}, &op->backward_workspace, &op->backward_workspace_tensors);
}

Kernel FlashKernel(const LowerContext& context, KernelClass kind, double flops) {
  const OpSpec& spec = context.spec;
  Kernel kernel;
  kernel.kind = kind;
  kernel.dtype = context.compute;
  kernel.batch = Product({context.batch, spec.heads});
  kernel.m = spec.seq_q;
  kernel.n = spec.seq_k;
  kernel.k = spec.head_dim;
  kernel.attention = context.options.attention;
  kernel.flops = Flops(flops * static_cast<double>(kernel.batch));
  return kernel;
}

// A rotation may concatenate its queries with heads before tokens (GPT-NeoX, Phi-3). PyTorch's
// output follows them, and the next layer takes a copy with tokens first; the attention keeps what
// it wrote.
void CopyOutput(const LowerContext& context, const AttentionBytes& bytes, OpKernels* op) {
  op->forward.push_back(
      PassKernel(KernelClass::kCopy, context.compute, bytes.output, bytes.output));
  op->saves_output = 0;
  AddTensors({bytes.output}, &op->extra_saved, &op->extra_saved_tensors);
}

// Our own kernels, the ones that reduce in two steps, read a bias where it lies.
bool CopiesBias(const LowerContext& context) {
  return context.spec.has_bias && context.options.attention == AttentionImpl::kFlash &&
         !context.options.fused_reductions;
}

// PyTorch's memory-efficient kernel keeps the bias that it is given, and transformers gives each
// layer a copy of its own; in a causal one the copy has the mask in it, which is kept, too. The
// bias's gradient comes for each sample.
void TakeBias(const LowerContext& context, const AttentionBytes& bytes, OpKernels* op) {
  const OpSpec& spec = context.spec;
  const std::int64_t gradient = Product({bytes.scores, context.s});
  const KernelClass merge = spec.causal ? KernelClass::kElementwise : KernelClass::kCopy;
  op->forward.insert(op->forward.begin(),
                     PassKernel(merge, context.compute, bytes.bias, bytes.bias));
  AddTensors({bytes.bias, spec.causal ? Product({spec.seq_q, spec.seq_k}) : 0}, &op->extra_saved,
             &op->extra_saved_tensors);
  op->backward_data[1].written += Bytes(gradient - bytes.bias);
  if (context.batch > 1) {
    op->backward_data.push_back(
        PassKernel(KernelClass::kElementwise, context.compute, gradient, bytes.bias));
  }
  if (spec.causal) {
    op->backward_data.push_back(
        PassKernel(KernelClass::kElementwise, context.compute, bytes.bias, bytes.bias));
  }
  AddTensors({gradient}, &op->backward_workspace, &op->backward_workspace_tensors);
}

OpKernels FlashAttention(const LowerContext& context, const AttentionBytes& bytes) {
  const OpSpec& spec = context.spec;
  const bool repeat = Repeats(context);
  const std::int64_t kv = repeat ? bytes.k_all + bytes.v_all : bytes.k + bytes.v;
  const std::int64_t row_stats = Product({bytes.rows, kFp32Bytes});
  const double pairs = FlashPairs(spec);
  const auto qk = static_cast<double>(spec.head_dim);
  const auto ov = static_cast<double>(spec.value_dim);
  OpKernels op;
  // Forward multiplies q k^T and p v; backward q k^T again, do v^T, p^T do, ds k and ds^T q.
  Kernel forward = FlashKernel(context, KernelClass::kAttentionForward, 2.0 * pairs * (qk + ov));
  forward.read = Bytes(bytes.q + kv + bytes.bias);
  forward.written = Bytes(bytes.output + row_stats);
  op.forward = {forward};

  // The query gradient is summed over key tiles in fp32, then cast. FlashAttention-2 allocates the
  // sum and the row sums for whole tiles of queries and heads rounded up to 32.
  const std::int64_t dq_fp32 = Product({bytes.rows, spec.head_dim, kFp32Bytes});
  const std::int64_t tile_rows =
      Product({context.batch, spec.heads, RoundUp(spec.seq_q, kFlashTile), kFp32Bytes});
  const std::int64_t dq_sum = Product({tile_rows, RoundUp(spec.head_dim, 32)});
  Kernel backward =
      FlashKernel(context, KernelClass::kAttentionBackward, 2.0 * pairs * (3.0 * qk + 2.0 * ov));
  backward.read = Bytes(bytes.q + kv + bytes.output + 2 * row_stats + bytes.bias);
  backward.written = Bytes(dq_fp32 + kv + bytes.bias);
  op.backward_data = {
      // Row sums of output * output gradient.
      PassKernel(KernelClass::kElementwise, context.compute, 2 * bytes.output, row_stats),
      backward,
      PassKernel(KernelClass::kCopy, context.compute, dq_fp32, bytes.q),
  };
  AddTensors({dq_sum, tile_rows}, &op.backward_workspace, &op.backward_workspace_tensors);
  op.saves_input = 0b111;
  op.saves_output = 1;
  op.extra_saved = Bytes(row_stats);  // log-sum-exp per query and head
  if (CopiesBias(context)) {
    TakeBias(context, bytes, &op);
  }
  if (spec.heads_first && !context.options.fused_rope) {
    CopyOutput(context, bytes, &op);
  }
  if (repeat) {
    RepeatKeyValue(context, bytes, &op);
  } else if (Grouped(spec)) {
    // The kernel writes one k and v gradient per query head, then sums each group.
    const std::int64_t expanded = bytes.k_all + bytes.v_all;
    op.backward_data[1].written += Bytes(expanded - kv);
    op.backward_data.push_back(
        PassKernel(KernelClass::kElementwise, context.compute, expanded, bytes.k + bytes.v));
    AddTensors({bytes.k_all, bytes.v_all}, &op.backward_workspace, &op.backward_workspace_tensors);
  }
  return op;
}

// A kernel over the score matrices that reads and writes so many bytes per element.
Kernel ScorePass(const LowerContext& context, const AttentionBytes& bytes, KernelClass kind,
                 std::int64_t read_per_element, std::int64_t written_per_element) {
  return PassKernel(kind, context.compute, Product({bytes.scores, read_per_element}),
                    Product({bytes.scores, written_per_element}));
}

// Bytes of a score that capping keeps: divided, through tanh, which keeps its result, multiplied. A
// kernel for all of the softmax has it inside.
std::int64_t CappedBytes(const LowerContext& context) {
  return context.spec.soft_cap > 0.0 && !context.options.fused_softmax ? context.s : 0;
}

// How the softmax of materialised scores is computed. PyTorch fuses the cast of fp16 scores into an
// fp32 softmax, but not that of bf16 scores. All known code takes capped scores in fp32.
struct SoftmaxPrecision {
  bool casts = false;       // fp32 softmax of 16-bit scores
  bool cast_first = false;  // the scores are copied to fp32 before
  std::int64_t bytes = 2;   // of one element of the result
  std::int64_t kept = 0;    // of one element of the input, where autograd keeps that, too
};

SoftmaxPrecision PrecisionOf(const LowerContext& context) {
  SoftmaxPrecision precision;
  precision.casts =
      (context.options.softmax_fp32 || CappedBytes(context) > 0) && context.compute != DType::kFp32;
  precision.cast_first = precision.casts && context.compute != DType::kFp16;
  precision.bytes = precision.casts ? kFp32Bytes : context.s;
  if (context.options.softmax_keeps_input) {
    precision.kept = precision.cast_first ? precision.bytes : context.s;
  }
  return precision;
}

void AppendCopy(const LowerContext& context, std::int64_t bytes, std::vector<Kernel>* kernels) {
  kernels->push_back(PassKernel(KernelClass::kCopy, context.compute, bytes, bytes));
}

void MaterializedForward(const LowerContext& context, const AttentionBytes& bytes, OpKernels* op) {
  const OpSpec& spec = context.spec;
  const std::int64_t s = context.s;
  const SoftmaxPrecision softmax = PrecisionOf(context);
  const std::int64_t p = softmax.bytes;
  const std::int64_t heads = Product({context.batch, spec.heads});
  std::vector<Kernel>& kernels = op->forward;
  if (context.batch > 1 && !context.options.tokens_first) {
    // Samples and heads are no longer one dimension once heads stand before tokens: batched
    // products copy their operands. Repeated k and v are such copies already.
    AppendCopy(context, bytes.q, &kernels);
    AddTensors({bytes.q}, &op->forward_workspace, &op->forward_workspace_tensors);
    if (!Grouped(spec)) {
      AppendCopy(context, bytes.k, &kernels);
      AppendCopy(context, bytes.v, &kernels);
      AddTensors({bytes.k, bytes.v}, &op->forward_workspace, &op->forward_workspace_tensors);
    }
  }
  kernels.push_back(
      GemmKernel(context, {.batch = heads, .m = spec.seq_q, .n = spec.seq_k, .k = spec.head_dim}));
  if (!context.options.fused_softmax) {
    kernels.push_back(ScorePass(context, bytes, KernelClass::kElementwise, s, s));  // scale
  }
  if (CappedBytes(context) > 0) {
    kernels.insert(kernels.end(), 3, ScorePass(context, bytes, KernelClass::kElementwise, s, s));
  }
  const bool is_masked = spec.causal || spec.window > 0;
  if (spec.has_bias || (is_masked && !context.options.fused_softmax)) {
    // The mask and the bias are added as one matrix, shared by the samples.
    Kernel mask = ScorePass(context, bytes, KernelClass::kElementwise, s, s);
    mask.read += Bytes(bytes.bias);
    kernels.push_back(mask);
  }
  if (softmax.cast_first) {
    kernels.push_back(ScorePass(context, bytes, KernelClass::kCopy, s, p));
  }
  kernels.push_back(
      ScorePass(context, bytes, KernelClass::kSoftmax, softmax.cast_first ? p : s, p));
  if (softmax.casts) {
    kernels.push_back(ScorePass(context, bytes, KernelClass::kCopy, p, s));
  }
  if (spec.dropout_p > 0.0) {
    kernels.push_back(ScorePass(context, bytes, KernelClass::kElementwise, s, s + 1));
  }
  kernels.push_back(
      GemmKernel(context, {.batch = heads, .m = spec.seq_q, .n = spec.value_dim, .k = spec.seq_k}));
  AppendCopy(context, bytes.output, &kernels);  // tokens before heads again
}

// Bytes kept per score. Softmax keeps its result, before PyTorch 1.11 its input, too; the second
// product keeps its left operand: the result, unless a cast or dropout stands between. Dropout
// keeps a mask of one byte per element.
std::int64_t SavedPerScore(const LowerContext& context) {
  const SoftmaxPrecision softmax = PrecisionOf(context);
  const bool dropout = context.spec.dropout_p > 0.0;
  return CappedBytes(context) + softmax.kept + softmax.bytes +
         (dropout         ? 1 + context.s
          : softmax.casts ? context.s
                          : 0);
}

// Scratch memory of the backward pass. Autograd lets go of what a step has saved when the step is
// done, and the gradients of q and k come last, when all but one tensor of scores is gone; the
// buffers of both stand for the whole pass, so the scratch memory is what the peak takes beyond
// them.
void AddScoreGradients(const LowerContext& context, const AttentionBytes& bytes, OpKernels* op) {
  const std::int64_t s = context.s;
  const SoftmaxPrecision softmax = PrecisionOf(context);
  const std::int64_t p = softmax.bytes;
  const bool dropout = context.spec.dropout_p > 0.0;
  const std::int64_t saved = SavedPerScore(context);
  // Bytes per score at the moments that can be the peak: the gradient of the probabilities, of
  // dropout (probabilities, mask, both gradients), of the cast back, of the softmax.
  const std::int64_t kept = CappedBytes(context) + softmax.kept;
  std::int64_t peak = saved + s;
  if (dropout) {
    peak = std::max(peak, kept + p + 1 + 2 * s);
  }
  if (softmax.casts) {
    peak = std::max(peak, kept + p + s + p);
  }
  const std::int64_t result = context.options.fused_softmax ? 0 : softmax.cast_first ? p : s;
  peak = std::max(peak, kept + 2 * p + result);
  const std::int64_t one = Product({bytes.scores, s});
  const std::int64_t gradients = Product({bytes.scores, peak - saved});
  const std::int64_t scratch = gradients - bytes.q - bytes.k;
  if (scratch <= 0) {
    return;
  }
  op->backward_workspace += Bytes(scratch);
  // In PyTorch's allocator gradients of scores and of v are gone when those of q and k come.
  for (const std::int64_t tensor : {std::min(gradients, one), gradients - one, bytes.v_all}) {
    if (tensor > 0) {
      op->backward_workspace_tensors.emplace_back(tensor);
    }
  }
}

void MaterializedBackward(const LowerContext& context, const AttentionBytes& bytes, OpKernels* op) {
  const OpSpec& spec = context.spec;
  const std::int64_t s = context.s;
  const SoftmaxPrecision softmax = PrecisionOf(context);
  const std::int64_t p = softmax.bytes;
  const std::int64_t heads = Product({context.batch, spec.heads});
  std::vector<Kernel>& kernels = op->backward_data;
  if (context.batch > 1 && !context.options.tokens_first) {
    AppendCopy(context, bytes.output, &kernels);
  }
  kernels.push_back(GemmKernel(  // gradient of the probabilities
      context, {.batch = heads, .m = spec.seq_q, .n = spec.seq_k, .k = spec.value_dim}));
  kernels.push_back(GemmKernel(  // gradient of v
      context, {.batch = heads, .m = spec.seq_k, .n = spec.value_dim, .k = spec.seq_q}));
  if (spec.dropout_p > 0.0) {
    kernels.push_back(ScorePass(context, bytes, KernelClass::kElementwise, s + 1, s));
  }
  if (softmax.casts) {
    kernels.push_back(ScorePass(context, bytes, KernelClass::kCopy, s, p));
  }
  kernels.push_back(
      ScorePass(context, bytes, KernelClass::kSoftmax, 2 * p, softmax.cast_first ? p : s));
  if (softmax.cast_first) {
    kernels.push_back(ScorePass(context, bytes, KernelClass::kCopy, p, s));
  }
  if (CappedBytes(context) > 0) {
    kernels.push_back(ScorePass(context, bytes, KernelClass::kElementwise, s, s));
    kernels.push_back(ScorePass(context, bytes, KernelClass::kElementwise, 2 * s, s));  // tanh
    kernels.push_back(ScorePass(context, bytes, KernelClass::kElementwise, s, s));
  }
  if (spec.has_bias) {  // sum over the samples
    kernels.push_back(PassKernel(KernelClass::kElementwise, context.compute,
                                 Product({bytes.scores, s}), bytes.bias));
  }
  if (!context.options.fused_softmax) {
    kernels.push_back(ScorePass(context, bytes, KernelClass::kElementwise, s, s));  // scale
  }
  kernels.push_back(GemmKernel(  // gradient of q
      context, {.batch = heads, .m = spec.seq_q, .n = spec.head_dim, .k = spec.seq_k}));
  kernels.push_back(GemmKernel(  // gradient of k
      context, {.batch = heads, .m = spec.seq_k, .n = spec.head_dim, .k = spec.seq_q}));
  // Gradients of q, k and v go back to tokens before heads.
  AppendCopy(context, bytes.q, &kernels);
  AppendCopy(context, bytes.k_all, &kernels);
  AppendCopy(context, bytes.v_all, &kernels);
  AddScoreGradients(context, bytes, op);
}

OpKernels MaterializedAttention(const LowerContext& context, const AttentionBytes& bytes) {
  const OpSpec& spec = context.spec;
  const std::int64_t s = context.s;
  const SoftmaxPrecision softmax = PrecisionOf(context);
  const bool dropout = spec.dropout_p > 0.0;
  OpKernels op;
  MaterializedForward(context, bytes, &op);
  MaterializedBackward(context, bytes, &op);
  op.saves_input = 0b111;
  const std::int64_t saved = SavedPerScore(context);
  const std::int64_t mask = dropout ? 1 : 0;
  const std::int64_t capped = CappedBytes(context);
  AddTensors({Product({bytes.scores, capped}), Product({bytes.scores, softmax.kept}),
              Product({bytes.scores, softmax.bytes}), Product({bytes.scores, mask}),
              Product({bytes.scores, saved - capped - softmax.kept - softmax.bytes - mask})},
             &op.extra_saved, &op.extra_saved_tensors);
  // Bytes per score at the moments that can be the peak: scaling (two copies), softmax (scores,
  // their fp32 copy, result), the cast back (scores, both results), dropout (all that is saved and,
  // after a cast, its input).
  std::int64_t peak = std::max(2 * s, s + softmax.bytes);
  if (softmax.casts) {
    peak = std::max(peak, s + softmax.bytes * (softmax.cast_first ? 2 : 1));
    peak = std::max(peak, 2 * s + softmax.bytes);
  }
  if (dropout) {
    peak = std::max(peak, saved - capped + (softmax.casts ? s : 0));
  }
  AddTensors({Product({bytes.scores, std::max<std::int64_t>(0, peak + capped - saved)})},
             &op.forward_workspace, &op.forward_workspace_tensors);
  if (Grouped(spec)) {  // batched products know no groups: k and v are always copied
    RepeatKeyValue(context, bytes, &op);
  }
  return op;
}

// Sum over i in [0, count) of max(0, i - shift).
double RampSum(std::int64_t count, std::int64_t shift) {
  const auto first = static_cast<double>(std::max<std::int64_t>(0, -shift));
  const auto last = static_cast<double>(count - 1 - shift);
  return last < first ? 0.0 : (first + last) * (last - first + 1.0) / 2.0;
}

}  // namespace

double FlashPairs(const OpSpec& spec) {
  if (spec.context_ranks > 1) {  // head and tail of the sequence: as much work on each rank
    OpSpec whole = spec;
    whole.seq_q *= std::exchange(whole.context_ranks, 0);
    return FlashPairs(whole) / static_cast<double>(spec.context_ranks);
  }
  const std::int64_t tile = kFlashTile;
  const std::int64_t seq_k = spec.seq_k;
  if (!spec.causal && spec.window == 0) {
    return static_cast<double>(spec.seq_q) * static_cast<double>(seq_k);
  }
  // In units of tiles: query tile i sees keys up to tile i + ahead and from tile i - behind on.
  // Where keys are more than queries, the last ones stand for the same tokens.
  const std::int64_t more = std::max<std::int64_t>(0, seq_k - spec.seq_q);
  const std::int64_t offset = CeilDiv(more, tile);
  const std::int64_t reach =
      spec.window == 0 ? CeilDiv(seq_k, tile) + offset : CeilDiv(spec.window - 1, tile);
  const std::int64_t behind = reach - more / tile;
  const std::int64_t ahead = spec.causal ? offset : offset + reach;
  const std::int64_t full = spec.seq_q / tile;         // whole query tiles
  const std::int64_t rest = spec.seq_q - full * tile;  // queries of the last one
  // Keys of query tile i: min(seq_k, (i + 1 + ahead) * tile) - max(0, i - behind) * tile.
  const std::int64_t open = std::clamp<std::int64_t>(seq_k / tile - ahead, 0, full);
  const auto tile_d = static_cast<double>(tile);
  const auto open_d = static_cast<double>(open);
  double keys = tile_d * open_d * ((open_d + 1.0) / 2.0 + static_cast<double>(ahead)) +
                static_cast<double>(full - open) * static_cast<double>(seq_k);
  keys -= tile_d * RampSum(full, behind);
  double pairs = keys * tile_d;
  if (rest > 0) {
    const std::int64_t last_keys = std::min(seq_k, (full + 1 + ahead) * tile) -
                                   std::max<std::int64_t>(0, full - behind) * tile;
    pairs += static_cast<double>(rest) * static_cast<double>(last_keys);
  }
  return pairs;
}

namespace {

// A rank's own keys and values first, then those of the ranks before it: a half of the queries
// against all of them, as on the first rank, or all queries against a half. Results are merged in
// fp32 by their log-sum-exps. Source: torch 2.13, _context_parallel/_attention.py.
OpKernels RingAttention(const LowerContext& context) {
  OpSpec own = context.spec;
  own.context_ranks = 0;
  own.seq_k = own.seq_q;
  OpSpec other = own;
  other.seq_q /= 2;
  other.causal = false;
  other.native_groups = true;  // copied already
  const LowerContext at_home = {own, context.batch, context.compute, context.options, context.s};
  const LowerContext away = {other, context.batch, context.compute, context.options, context.s};
  const AttentionBytes bytes = Measure(at_home);
  if (Repeats(at_home)) {
    other.kv_heads = other.heads;
  }
  const bool copies = Repeats(at_home);
  const OpKernels block = FlashAttention(away, Measure(away));
  OpKernels op = FlashAttention(at_home, bytes);
  const std::int64_t kv = copies ? bytes.k_all + bytes.v_all : bytes.k + bytes.v;
  const auto wide = [&](std::int64_t size) { return size / context.s * kFp32Bytes; };
  const auto pass = [&](std::int64_t read, std::int64_t written) {
    return PassKernel(KernelClass::kElementwise, DType::kFp32, read, written);
  };
  const std::int64_t out = wide(bytes.output), half = out / 2;
  op.ring.steps = context.spec.context_ranks;
  op.ring.gathers = context.spec.context_method == ContextMethod::kRingGather;
  op.ring.sent = Bytes(kv);
  op.ring.sent_back = Bytes(wide(kv));
  op.ring.pack = {PassKernel(KernelClass::kCopy, context.compute, kv, kv)};
  op.ring.first = std::exchange(op.forward, {pass(out, bytes.output)});
  op.ring.first.push_back(pass(bytes.output, out));
  op.ring.later = block.forward;  // cast, difference, weight, difference
  for (const Kernel& merge : {pass(bytes.output / 2, half), pass(2 * half, half), pass(half, half),
                              pass(2 * half, half)}) {
    op.ring.later.push_back(merge);
  }
  op.ring.add = {pass(kv + wide(kv), wide(kv)), pass(wide(kv), wide(kv))};
  const Kernel add_queries = pass(bytes.q + wide(bytes.q), wide(bytes.q));
  op.ring.back_first = std::exchange(
      op.backward_data,
      {pass(wide(bytes.q), bytes.q), pass(wide(kv), copies ? kv : bytes.k + bytes.v)});
  op.ring.back_first.push_back(add_queries);
  op.ring.back_later = block.backward_data;
  op.ring.back_later.push_back(pass((bytes.q + wide(bytes.q)) / 2, wide(bytes.q) / 2));
  AddTensors({out, bytes.output}, &op.forward_workspace, &op.forward_workspace_tensors);
  AddTensors({wide(bytes.q), bytes.q, kv}, &op.backward_workspace, &op.backward_workspace_tensors);
  return op;
}

}  // namespace

OpKernels LowerAttention(const LowerContext& context) {
  const AttentionBytes bytes = Measure(context);
  // Where no kernel takes an additive bias, as T5's, or capped scores, as Gemma 2's, the scores are
  // materialised instead.
  const bool flash = IsFused(context.options.attention) && !context.spec.materialized &&
                     (!context.spec.has_bias || context.options.flash_position_bias) &&
                     (context.spec.soft_cap == 0.0 || context.options.flash_soft_cap);
  const bool is_ring =
      context.spec.context_ranks > 0 && context.spec.context_method != ContextMethod::kGather;
  OpKernels op = is_ring ? RingAttention(context)
                 : flash ? FlashAttention(context, bytes)
                         : MaterializedAttention(context, bytes);
  op.output_aliases = {-1};
  op.compute_intensive = true;
  return op;
}

}  // namespace shardwright::internal
