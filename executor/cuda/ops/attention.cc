// Attention, rotary embeddings, T5's position bias.
//
// Each function fills the arguments of kernels from an op: shapes from the spec, addresses and
// strides from the call, scratch memory from its workspace. Libraries are asked first, our own
// kernels do the rest.

#include <cmath>
#include <cstdint>

#include "executor/cuda/kernels/attention_forward.h"
#include "executor/cuda/kernels/attention_grad.h"
#include "executor/cuda/kernels/position.h"
#include "executor/cuda/ops/launch.h"
#include "executor/op_layout.h"

namespace shardwright::ops {
namespace {

using gpu::AttentionArgs;
using gpu::HeadArray;

HeadArray HeadsOf(const HeadPlace& place) {
  return {{place.data, place.dtype}, place.row, place.first, place.head};
}

template <class Kernel>
std::int64_t SharedOf(const AttentionArgs& args) {
  return args.multiply_as == DType::kFp32 ? Kernel::template Shared<float>(args)
                                          : Kernel::template Shared<gpu::Bf16>(args);
}

// The largest tiles whose panels fit into a block's shared memory. Depends on the GPU and the shape
// only.
// Example: 200 tokens take tiles of 64, 20 tokens tiles of 32, 10 tokens tiles of 16. Gradients of
// keys with 256 features and tiles of 64 x 64 need 321,536 bytes, more than the 232,448 of an H200,
// so keys go in tiles of 32: 196,608 bytes.
//
// Blocks, for 2 samples, 8 heads, 2 key heads and 200 tokens: 4 x 8 x 2 = 64 over queries, 4 x 2 x
// 2 = 16 over keys.
template <class Kernel>
void LaunchTiles(const OpContext& context, AttentionArgs args, bool over_keys) {
  const auto length = [](std::int64_t n) {
    int size = gpu::kTile;
    while (size < 64 && size < n) {
      size *= 2;
    }
    return size;
  };
  args.tile_q = length(args.seq_q);
  args.tile_k = length(args.seq_k);
  const std::int64_t limit = context.gpu.Info().shared_bytes;
  while (SharedOf<Kernel>(args) > limit && args.tile_q * args.tile_k > gpu::kTile * gpu::kTile) {
    int& larger = args.tile_q > args.tile_k ? args.tile_q : args.tile_k;
    larger /= 2;
  }
  const std::int64_t tiles_q = CeilDiv(args.seq_q, args.tile_q);
  const std::int64_t tiles_k = CeilDiv(args.seq_k, args.tile_k);
  const std::int64_t blocks =
      over_keys ? tiles_k * args.kv_heads * args.batch : tiles_q * args.heads * args.batch;
  const bool is_bias = Kernel::kId == gpu::KernelId::kAttentionBiasGrad;
  LaunchKernel<Kernel>(context.gpu, context.stream,
                       is_bias ? tiles_q * tiles_k * args.heads : blocks, SharedOf<Kernel>(args),
                       args);
}

// A factor of 0 in the spec is PyTorch's default, 1 / sqrt(head_dim): 0.125 for 64 features.
AttentionArgs ArgsOf(const ModelOpCall& call) {
  const OpSpec& spec = *call.spec;
  AttentionArgs args;
  const HeadPlaces heads = FindHeads(call);
  args.q = HeadsOf(heads.q);
  args.k = HeadsOf(heads.k);
  args.v = HeadsOf(heads.v);
  args.y = ArrayOf(call.outputs[0]);
  args.bias = spec.has_bias ? ArrayOf(call.inputs[3]) : gpu::Array{};
  args.log_sums = reinterpret_cast<float*>(call.saved.data());
  args.batch = call.batch;
  args.heads = spec.heads;
  args.kv_heads = spec.kv_heads;
  args.head_dim = spec.head_dim;
  args.value_dim = spec.value_dim;
  args.seq_q = spec.seq_q;
  args.seq_k = spec.seq_k;
  args.window = spec.window;
  args.causal = spec.causal;
  args.drops = spec.dropout_p > 0.0 && call.is_training;
  args.factor = static_cast<float>(
      spec.factor > 0.0 ? spec.factor : 1.0 / std::sqrt(static_cast<double>(spec.head_dim)));
  args.soft_cap = static_cast<float>(spec.soft_cap);
  args.alibi_max = spec.alibi_max;
  args.mask = MaskOf(call);
  args.multiply_as = MultiplyAs(call.compute, call.compute);
  return args;
}

// One call of the library, or up to four kernels: D by query, then the gradients of k and v, of q,
// and of the bias. The log-sums were saved by forward, 4 bytes per query and head.
void AttentionBackward(const ModelOpCall& call, const OpContext& context) {
  const OpSpec& spec = *call.spec;
  AttentionArgs args = ArgsOf(call);
  const HeadPlaces grads = FindHeadGrads(call);
  args.dq = HeadsOf(grads.q);
  args.dk = HeadsOf(grads.k);
  args.dv = HeadsOf(grads.v);
  args.dy = ArrayOf(call.output_grads[0]);
  Scratch scratch(call.workspace);
  args.products = scratch.Take<float>(call.batch * spec.heads * spec.seq_q);
  // Gradients of tensors of which attention reads a part only begin as zeros.
  if (Wants(call.input_grads, 2) &&
      call.input_grads[2].elements != call.batch * spec.seq_k * spec.kv_heads * spec.value_dim) {
    ZeroFill(context, call.input_grads[2]);
  }
  if (AttendByLibrary(context, args, /*is_backward=*/true, scratch.Rest())) {
    return;
  }
  LaunchItems<gpu::AttentionProductsKernel>(context, call.batch * spec.heads * spec.seq_q, args);
  LaunchTiles<gpu::AttentionKeyGradKernel>(context, args, /*over_keys=*/true);
  if (args.dq.array.data != nullptr) {
    LaunchTiles<gpu::AttentionQueryGradKernel>(context, args, /*over_keys=*/false);
  }
  if (spec.has_bias && Wants(call.input_grads, 3)) {
    args.dbias = ArrayOf(call.input_grads[3]);
    LaunchTiles<gpu::AttentionBiasGradKernel>(context, args, /*over_keys=*/false);
  }
}

}  // namespace

void SubmitAttention(const ModelOpCall& call, bool is_backward, const OpContext& context) {
  if (is_backward) {
    return AttentionBackward(call, context);
  }
  const AttentionArgs args = ArgsOf(call);
  if (!AttendByLibrary(context, args, /*is_backward=*/false, call.workspace)) {
    LaunchTiles<gpu::AttentionForwardKernel>(context, args, /*over_keys=*/false);
  }
}

namespace {

// Angles are made anew in each call: 4,096 positions x 64 pairs x 2 numbers are 2 MiB of workspace,
// and no memory is kept between calls.
gpu::RopeTableArgs TableOf(const ModelOpCall& call, bool is_gradient) {
  const RopeAngles& rope = call.spec->rope;
  gpu::RopeTableArgs args;
  args.log_theta = std::log(rope.theta);
  args.dim = rope.dim;
  args.positions = call.spec->rows;
  args.direction = is_gradient ? -1.0 : 1.0;
  args.rule = rope.scaling == RopeScaling::kLinear   ? 1
              : rope.scaling == RopeScaling::kLlama3 ? 2
                                                     : 0;
  args.factor = rope.factor;
  args.original_length = rope.original_length;
  args.low_factor = rope.low_frequency_factor;
  args.high_factor = rope.high_frequency_factor;
  Scratch scratch(call.workspace);
  args.cosines = scratch.Take<float>(args.positions * args.dim / 2);
  args.sines = scratch.Take<float>(args.positions * args.dim / 2);
  return args;
}

// Arguments that are the same for q, k and the shared part.
gpu::RopeArgs RopeOf(const ModelOpCall& call, const gpu::RopeTableArgs& table, bool is_gradient) {
  gpu::RopeArgs args;
  args.rows = RowsOf(call);
  args.positions = call.spec->rows;
  args.features = call.spec->head_dim;
  args.dim = call.spec->rope.dim;
  args.interleaved = call.spec->rope.interleaved;
  args.is_gradient = is_gradient;
  args.cosines = table.cosines;
  args.sines = table.sines;
  return args;
}

// Example: heads of 128 features that all turn have 64 pairs. 8 rows with 4 heads are 2,048 items,
// or 256 vectors of 8.
void Turn(const OpContext& context, const gpu::RopeArgs& args) {
  const std::int64_t items = args.dim / 2 + args.features - args.dim;
  const std::int64_t all = args.rows * (args.sums_heads ? 1 : args.heads) * items;
  LaunchItems<gpu::RopeKernel>(context,
                               gpu::RopeKernel::IsInVectors(args) ? all / gpu::kVector : all, args);
}

// q and k, each (heads, head_dim), or both in one packed row on the side of the model's inputs.
// Example of a packed row with 4 heads, 2 key heads and 64 features: q begins at 0, k at 256, the
// row has 512 features with v. Forward reads from there, backward writes there.
void TurnPlain(const ModelOpCall& call, bool is_gradient, const gpu::RopeTableArgs& table,
               const OpContext& context) {
  const OpSpec& spec = *call.spec;
  const bool is_packed = (is_gradient ? call.input_grads.size() : call.inputs.size()) == 1;
  for (std::size_t part = 0; part < 2; ++part) {
    const std::size_t side = is_packed ? 0 : part;
    if (is_gradient && !Wants(call.input_grads, side)) {
      continue;
    }
    gpu::RopeArgs args = RopeOf(call, table, is_gradient);
    args.heads = part == 0 ? spec.heads : spec.kv_heads;
    args.from = is_gradient ? ArrayOf(call.output_grads[part]) : ArrayOf(call.inputs[side]);
    args.to = is_gradient ? ArrayOf(call.input_grads[side]) : ArrayOf(call.outputs[part]);
    args.from_row = args.to_row = args.heads * spec.head_dim;
    args.from_head = args.to_head = spec.head_dim;
    if (is_packed) {
      const HeadPlace packed = PackedHeads(spec, {}, static_cast<int>(part));
      (is_gradient ? args.to_first : args.from_first) = packed.first;
      (is_gradient ? args.to_row : args.from_row) = packed.row;
      (is_gradient ? args.to_head : args.from_head) = packed.head;
    }
    Turn(context, args);
  }
}

// The keys' first features, of every head, from (heads, plain key and value) or back.
void CopyPlainKeys(const ModelOpCall& call, bool is_gradient, const gpu::Array& keys,
                   const OpContext& context) {
  const OpSpec& spec = *call.spec;
  const std::int64_t rows = RowsOf(call);
  const std::int64_t plain = spec.head_dim - spec.rope.dim;
  const View kv = is_gradient ? call.input_grads[1]
                              : View{const_cast<void*>(call.inputs[1].data), call.inputs[1].dtype,
                                     call.inputs[1].elements};
  if (kv.data == nullptr) {
    return;
  }
  const std::int64_t kv_row = kv.elements / rows;
  for (std::int64_t head = 0; head < spec.heads; ++head) {
    gpu::CopyRowsArgs copy{.from = is_gradient ? keys : ArrayOf(kv),
                           .to = is_gradient ? ArrayOf(kv) : keys,
                           .rows = rows,
                           .features = plain};
    (is_gradient ? copy.from_first : copy.to_first) = head * spec.head_dim;
    (is_gradient ? copy.from_stride : copy.to_stride) = spec.heads * spec.head_dim;
    (is_gradient ? copy.to_first : copy.from_first) = head * (kv_row / spec.heads);
    (is_gradient ? copy.to_stride : copy.from_stride) = kv_row;
    LaunchItems<gpu::CopyRowsKernel>(context, gpu::CopyRowsKernel::Items(copy), copy);
  }
}

// DeepSeek's three tensors: queries whose last features turn; (heads, plain key and value); and a
// row whose last features are the positional part of the keys of all heads.
// Example, DeepSeek V3: 128 heads of 192 features, of which the last 64 turn. The positional part
// of the keys is one row of 64 for all heads. Forward copies it to every head; backward sums over
// the heads.
void TurnLatent(const ModelOpCall& call, bool is_gradient, const gpu::RopeTableArgs& table,
                const OpContext& context) {
  const OpSpec& spec = *call.spec;
  const std::int64_t rows = RowsOf(call);
  const std::int64_t plain = spec.head_dim - spec.rope.dim;
  const std::int64_t low_row =
      (is_gradient ? call.input_grads[2].elements : call.inputs[2].elements) / rows;
  const std::int64_t row = spec.heads * spec.head_dim;
  gpu::RopeArgs query = RopeOf(call, table, is_gradient);
  query.heads = spec.heads;
  query.begin = plain;
  query.from_row = query.to_row = row;
  query.from_head = query.to_head = spec.head_dim;
  query.from = is_gradient ? ArrayOf(call.output_grads[0]) : ArrayOf(call.inputs[0]);
  query.to = is_gradient ? ArrayOf(call.input_grads[0]) : ArrayOf(call.outputs[0]);
  if (query.to.data != nullptr) {
    Turn(context, query);
  }
  const gpu::Array keys = is_gradient ? ArrayOf(call.output_grads[1]) : ArrayOf(call.outputs[1]);
  gpu::RopeArgs position = RopeOf(call, table, is_gradient);
  position.features = position.dim;
  position.heads = spec.heads;
  const gpu::Array low = is_gradient ? ArrayOf(call.input_grads[2]) : ArrayOf(call.inputs[2]);
  position.from = is_gradient ? keys : low;
  position.to = is_gradient ? low : keys;
  position.sums_heads = is_gradient;
  (is_gradient ? position.from_first : position.to_first) = plain;
  (is_gradient ? position.from_row : position.to_row) = row;
  (is_gradient ? position.from_head : position.to_head) = spec.head_dim;
  (is_gradient ? position.to_first : position.from_first) = low_row - spec.rope.dim;
  (is_gradient ? position.to_row : position.from_row) = low_row;
  if (position.to.data != nullptr) {
    Turn(context, position);
  }
  CopyPlainKeys(call, is_gradient, keys, context);
}

}  // namespace

// Inputs: (q, k), one packed row, or DeepSeek's three tensors. The number of tensors tells.
void SubmitRope(const ModelOpCall& call, bool is_backward, const OpContext& context) {
  const gpu::RopeTableArgs table = TableOf(call, is_backward);
  LaunchItems<gpu::RopeTableKernel>(context, table.positions * table.dim / 2, table);
  const std::size_t tensors = is_backward ? call.input_grads.size() : call.inputs.size();
  // Values, and the low-rank part, get their gradients from other readers.
  for (std::size_t i = tensors == 3 ? 1 : 0; is_backward && tensors != 2 && i < tensors; ++i) {
    if (Wants(call.input_grads, i)) {
      ZeroFill(context, call.input_grads[i]);
    }
  }
  if (tensors == 3) {
    TurnLatent(call, is_backward, table, context);
  } else {
    TurnPlain(call, is_backward, table, context);
  }
}

// Example of T5: 32 buckets, distances to 128. The first 8 of 16 in each direction are exact, so
// log_range is log(128 / 8) = 2.77.
void SubmitPositionBias(const ModelOpCall& call, bool is_backward, const OpContext& context) {
  const OpSpec& spec = *call.spec;
  gpu::PositionBiasArgs args;
  args.rule.buckets = spec.vocab;
  args.rule.causal = spec.causal;
  const std::int64_t exact = (spec.causal ? spec.vocab : spec.vocab / 2) / 2;
  args.rule.log_range = static_cast<float>(
      std::log(static_cast<double>(spec.max_distance) / static_cast<double>(exact)));
  args.heads = spec.heads;
  args.seq_q = spec.seq_q;
  args.seq_k = spec.seq_k;
  if (!is_backward) {
    args.table = ArrayOf(call.params[0]);
    args.y = ArrayOf(call.outputs[0]);
    LaunchItems<gpu::PositionBiasKernel>(context, spec.heads * spec.seq_q * spec.seq_k, args);
    return;
  }
  if (call.param_grads[0].view.data == nullptr) {  // a gradient that nobody keeps
    return;
  }
  if (Wants(call.param_grads, 0)) {
    args.y = ArrayOf(call.output_grads[0]);
    args.grad = ArrayOf(call.param_grads[0].view);
    args.adds = call.param_grads[0].accumulate;
    LaunchBlocks<gpu::PositionBiasGradKernel>(context, spec.vocab * spec.heads, args);
  }
}

}  // namespace shardwright::ops
