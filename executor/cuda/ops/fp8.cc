// Operands of products in fp8: copies that lie as tensor cores want them, what is summed over
// innermost, whichever way the matrices lie.
//
// Example: y = x W^T with x (8, 512), W (1,024, 512). Both lie with the summed 512 innermost, so
// they are cast as they are. dx = dy W sums over 1,024, along which W's rows lie, so W is
// transposed on the way. A copy takes 1 byte per element beside the bf16 original, in the call's
// workspace.

#include "executor/cuda/kernels/fp8.h"

#include <algorithm>
#include <cstdint>

#include "executor/cuda/ops/launch.h"

namespace shardwright::ops {
namespace {

struct Copy {
  gpu::Array array = {};
  const float* inverses = nullptr;
};

// Of x, (rows, columns) as it lies in memory; `turns`: sums go over its rows.
// Whole scale: up to 512 blocks look for maxima, then one cast. Scale per row: the cast finds it
// itself; per column (`turns`): maxima of chunks of rows first.
Copy CastMatrix(const OpContext& context, gpu::Fp8CastArgs args, bool turns, Scratch& scratch) {
  const std::int64_t n = args.rows * args.columns;
  args.y = scratch.Take<std::uint8_t>(n);
  args.inverses = scratch.Take<float>(!args.by_row ? 1 : turns ? args.columns : args.rows);
  if (!args.by_row) {
    args.partials = std::min(kFp8Maxima, CeilDiv(n, gpu::Fp8MaxKernel::kPerBlock));
    auto* const partial = scratch.Take<float>(kFp8Maxima);
    LaunchBlocks<gpu::Fp8MaxKernel>(context, args.partials,
                                    {.x = args.x, .n = n, .partial = partial});
    args.partial = partial;
  } else if (turns) {
    args.partials = SumChunks(args.rows);
    auto* const partial = scratch.Take<float>(args.partials * args.columns);
    using gpu::Fp8ColumnMaxKernel;
    LaunchKernel<Fp8ColumnMaxKernel>(
        context.gpu, context.stream,
        args.partials * CeilDiv(args.columns, Fp8ColumnMaxKernel::kColumns),
        gpu::SharedSize<float>(std::int64_t{Fp8ColumnMaxKernel::kWarps} *
                               Fp8ColumnMaxKernel::kColumns),
        {.x = args.x,
         .rows = args.rows,
         .columns = args.columns,
         .rows_per_chunk = CeilDiv(args.rows, args.partials),
         .partial = partial});
    args.partial = partial;
  }
  if (turns) {
    using gpu::Fp8TransposeKernel;
    LaunchKernel<Fp8TransposeKernel>(context.gpu, context.stream,
                                     CeilDiv(args.rows, Fp8TransposeKernel::kRows) *
                                         CeilDiv(args.columns, Fp8TransposeKernel::kColumns),
                                     Fp8TransposeKernel::Shared(), args);
  } else {
    LaunchBlocks<gpu::Fp8CastKernel>(
        context, args.by_row ? args.rows : CeilDiv(n, gpu::Fp8CastKernel::kPerBlock), args);
  }
  return {{args.y, DType::kFp8}, args.inverses};
}

}  // namespace

// Example as above: product.a becomes {fp8 copy, row_stride 512, column_stride 1}, product.b {fp8
// copy, row_stride 1, column_stride 512}. Each gets its inverses. Nothing happens for layers
// outside of fp8.
std::span<std::byte> RoundOperands(const ModelOpCall& call, const OpContext& context,
                                   const Fp8Formats& formats, gpu::GemmArgs& product) {
  if (!MultipliesFp8(*call.spec, call.compute, *call.options)) {
    return call.workspace;
  }
  Scratch scratch(call.workspace);
  const bool by_row = call.options->fp8 == Fp8Products::kPerRow;
  const bool a_turns = product.a.column_stride != 1, b_turns = product.b.row_stride != 1;
  const auto cast = [&](const gpu::Array& x, std::int64_t lines, Fp8Format format, bool turns) {
    return CastMatrix(context,
                      {.x = x,
                       .rows = turns ? product.k : lines,
                       .columns = turns ? lines : product.k,
                       .format = format,
                       .by_row = by_row},
                      turns, scratch);
  };
  const Copy a = cast(product.a.array, product.m, formats.a, a_turns);
  const Copy b = cast(product.b.array, product.n, formats.b, b_turns);
  product.a = {a.array, product.k, 1};
  product.b = {b.array, 1, product.k};
  product.fp8 = {.a_inverses = a.inverses,
                 .b_inverses = b.inverses,
                 .a_format = formats.a,
                 .b_format = formats.b,
                 .by_row = by_row};
  return scratch.Rest();
}

}  // namespace shardwright::ops
