// Launches that several files share.
//
// Example of SumRows: 8,192 rows of 4,096 columns. With a workspace there are 64 chunks of 128
// rows, 64 x 16 = 1,024 blocks, and a second kernel adds 64 partial sums for each column. Without
// one there is one chunk: 16 blocks, each of which goes through all rows.

#include "executor/cuda/ops/launch.h"

#include <algorithm>
#include <cmath>

#include "executor/cuda/kernels/fp8.h"
#include "executor/cuda/kernels/sums.h"

namespace shardwright::ops {

void Map(const OpContext& context, const gpu::MapArgs& args) {
  LaunchKernel<gpu::MapKernel>(context.gpu, context.stream,
                               CeilDiv(args.n, gpu::MapKernel::PerBlock(args)), 0, args);
}

void ZeroFill(const OpContext& context, const View& view) {
  context.gpu.Fill(view.data, 0, view.elements * SizeOf(view.dtype), context.stream);
}

void SumRows(const OpContext& context, const RowSum& sum, const gpu::Array& to, bool adds,
             float* partial) {
  gpu::ColumnSumArgs args{.x = sum.x,
                          .y = sum.y,
                          .rows = sum.rows,
                          .columns = sum.columns,
                          .first = sum.first,
                          .stride = sum.stride,
                          .y_stride = sum.y_stride,
                          .means = sum.means,
                          .inverses = sum.inverses};
  args.chunks = partial != nullptr ? SumChunks(sum.rows) : 1;
  args.rows_per_chunk = CeilDiv(sum.rows, args.chunks);
  args.partial = partial;
  args.to = to;
  args.adds = adds;
  using gpu::ColumnSumKernel;
  const std::int64_t tiles = CeilDiv(sum.columns, ColumnSumKernel::kColumns);
  LaunchKernel<ColumnSumKernel>(
      context.gpu, context.stream, args.chunks * tiles,
      gpu::SharedSize<float>(std::int64_t{ColumnSumKernel::kWarps} * ColumnSumKernel::kColumns),
      args);
  if (partial != nullptr) {
    LaunchItems<gpu::PartialSumKernel>(context, sum.columns,
                                       {.partial = partial,
                                        .chunks = args.chunks,
                                        .columns = sum.columns,
                                        .to = to,
                                        .adds = adds});
  }
}

// Tensor cores multiply two operands of one 16-bit dtype; anything else is multiplied in fp32.
DType MultiplyAs(DType a, DType b) {
  return a == b && (a == DType::kBf16 || a == DType::kFp16) ? a : DType::kFp32;
}

// The library first. Our own kernel takes a block for each 64 x 64 results.
void Multiply(const OpContext& context, gpu::GemmArgs args, std::span<std::byte> workspace) {
  args.multiply_as = MultiplyAs(args.a.array.dtype, args.b.array.dtype);
  if (MultiplyByLibrary(context, args, workspace)) {
    return;
  }
  const std::int64_t blocks =
      CeilDiv(args.m, gpu::kProductRows) * CeilDiv(args.n, gpu::kProductColumns);
  if (args.fp8.a_inverses != nullptr) {
    LaunchKernel<gpu::Fp8GemmKernel>(context.gpu, context.stream, blocks,
                                     gpu::ProductShared<gpu::Bf16>(), args);
    return;
  }
  LaunchKernel<gpu::GemmKernel>(context.gpu, context.stream, blocks, gpu::ProductShared<float>(),
                                args);
}

// Example: p = 0.1 gives threshold round(0.1 x 2^32) = 429,496,730 and keep = 1.111. At p = 1 the
// threshold is 2^32 - 1, the largest that fits.
gpu::DropoutMask MaskOf(const ModelOpCall& call) {
  const double p = call.spec->dropout_p;
  gpu::DropoutMask mask;
  mask.seed = call.dropout.seed;
  mask.step = static_cast<std::uint32_t>(call.dropout.step);
  mask.op = call.dropout.op;
  mask.first_sample = static_cast<std::uint32_t>(call.dropout.first_sample);
  mask.threshold = static_cast<std::uint32_t>(std::min(std::llround(p * 0x1p32), 0xffffffffLL));
  mask.keep = static_cast<float>(1.0 / (1.0 - p));
  return mask;
}

}  // namespace shardwright::ops
