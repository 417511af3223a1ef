// y = x W^T + b. Weights are [out, in], or [in, out] when the spec says so.

#include <algorithm>
#include <cstdint>

#include "executor/host/kernels/fp8.h"
#include "executor/host/kernels/gemm.h"
#include "executor/host/kernels/kernels.h"
#include "executor/host/kernels/rows.h"
#include "executor/host/kernels/vector.h"
#include "models/kernels/host.h"

namespace shardwright {
namespace {

GemmOperand RowMajor(const ConstView& view, std::int64_t columns) {
  return {view.data, view.dtype, columns, 1};
}

GemmOperand Transposed(const ConstView& view, std::int64_t columns) {
  return {view.data, view.dtype, 1, columns};
}

// A product in fp8 has the workspace of a 16-bit result.
DType TileDType(const GemmOperand& a, DType result) {
  return a.fp8.scales == nullptr ? result : DType::kBf16;
}

// sums[j] = sum over rows of dy[i][j]. Threads share the columns.
void SumRows(Team* team, const ConstView& dy, std::int64_t rows, std::int64_t columns,
             float* sums) {
  std::fill_n(sums, columns, 0.0F);
  const std::int64_t least = std::max<std::int64_t>(kLeastColumns, LeastRows(rows));
  ForEachPart(team, columns, least, [&](std::int64_t first, std::int64_t last, std::size_t) {
    for (std::int64_t row = 0; row < rows; ++row) {
      ForEachChunk(last - first, [&](std::int64_t begin, std::int64_t count) {
        ChunkBuffer buffer;
        const std::int64_t column = first + begin;
        VectorAdd(1.0F, ReadFloats(dy, row * columns + column, count, buffer.values.data()),
                  sums + column, count);
      });
    }
  });
}

}  // namespace

void LinearForward(const ModelOpCall& call) {
  const OpSpec& spec = *call.spec;
  const std::int64_t rows = call.batch * spec.rows;
  const ConstView& weight = call.params[0];
  Scratch scratch(call.workspace);
  const float* bias = nullptr;
  if (spec.has_bias && call.params[1].data != nullptr) {
    bias = ReadFloats(call.params[1], 0, spec.out, scratch.Floats(spec.out));
  }
  const View& y = call.outputs[0];
  const GemmSize size{rows, spec.out, spec.in};
  GemmOperand a = RowMajor(call.inputs[0], spec.in);
  GemmOperand b = spec.transposed ? RowMajor(weight, spec.out) : Transposed(weight, spec.in);
  RoundOperands(call, size, {}, a, b, scratch);
  HostGemm(size, a, b, {y.data, y.dtype, spec.out}, bias,
           scratch.Take(HostGemmWorkspace(rows, spec.out, spec.in, TileDType(a, y.dtype))),
           call.team);
}

void LinearBackward(const ModelOpCall& call) {
  if (call.loss_spec != nullptr) {
    return LinearLossBackward(call);
  }
  const OpSpec& spec = *call.spec;
  const std::int64_t rows = call.batch * spec.rows;
  const ConstView& dy = call.output_grads[0];
  const Fp8Format gradient = GradientFormat(call.options->fp8);
  if (call.input_grads[0].data != nullptr) {
    const View& dx = call.input_grads[0];
    const ConstView& weight = call.params[0];
    Scratch scratch(call.workspace);
    const GemmSize size{rows, spec.in, spec.out};
    GemmOperand a = RowMajor(dy, spec.out);
    GemmOperand b = spec.transposed ? Transposed(weight, spec.out) : RowMajor(weight, spec.in);
    RoundOperands(call, size, {.a = gradient}, a, b, scratch);
    HostGemm(size, a, b, {dx.data, dx.dtype, spec.in}, nullptr,
             scratch.Take(HostGemmWorkspace(rows, spec.in, spec.out, TileDType(a, dx.dtype))),
             call.team);
  }
  if (Wants(call.param_grads, 0)) {
    const ParamGrad& dw = call.param_grads[0];
    const ConstView& x = call.inputs[0];
    const std::int64_t m = spec.transposed ? spec.in : spec.out;
    const std::int64_t n = spec.transposed ? spec.out : spec.in;
    Scratch scratch(call.workspace);
    const GemmSize size{m, n, rows};
    GemmOperand a = spec.transposed ? Transposed(x, m) : Transposed(dy, m);
    GemmOperand b = spec.transposed ? RowMajor(dy, n) : RowMajor(x, n);
    RoundOperands(call, size,
                  spec.transposed ? Fp8Formats{.b = gradient} : Fp8Formats{.a = gradient}, a, b,
                  scratch);
    HostGemm(size, a, b, {dw.view.data, dw.view.dtype, n, dw.accumulate, /*finish_first=*/true},
             nullptr, scratch.Take(HostGemmWorkspace(m, n, rows, DType::kBf16)), call.team);
  }
  if (Wants(call.param_grads, 1)) {
    Scratch scratch(call.workspace);
    float* const sums = scratch.Floats(spec.out);
    SumRows(call.team, dy, rows, spec.out, sums);
    StoreParamGrad(sums, spec.out, call.param_grads[1], 0);
  }
}

}  // namespace shardwright
