#include "executor/host/kernels/fp8.h"

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <vector>

#include "executor/fp8.h"
#include "executor/host/kernels/vector.h"

namespace shardwright {
namespace {

// An operand as it lies in memory: rows of contiguous elements. A line is what one scale is for:
// a row of memory or, where the operand is transposed, a column of it.
struct Stored {
  ConstView view;
  std::int64_t rows = 0, columns = 0, stride = 0;
};

// Calls f(first, count, values) for pieces of columns [begin, end) of a row.
template <class F>
void ForEachPiece(const Stored& x, std::int64_t row, std::int64_t begin, std::int64_t end,
                  const F& f) {
  ForEachChunk(end - begin, [&](std::int64_t first, std::int64_t count) {
    ChunkBuffer buffer;
    const std::int64_t column = begin + first;
    f(column, count, ReadFloats(x.view, row * x.stride + column, count, buffer.values.data()));
  });
}

// largest[row], or of all rows in largest[0].
void LargestOfRows(Team* team, const Stored& x, bool by_row, float* largest) {
  const std::size_t threads = team == nullptr ? 1 : team->threads();
  std::vector<float> of_worker(threads, 0.0F);
  ForEachPart(team, x.rows, LeastRows(x.columns),
              [&](std::int64_t begin, std::int64_t end, std::size_t worker) {
                for (std::int64_t row = begin; row < end; ++row) {
                  float most = 0.0F;
                  ForEachPiece(x, row, 0, x.columns,
                               [&](std::int64_t /*column*/, std::int64_t n, const float* values) {
                                 most = std::max(most, VectorMaxMagnitude(values, n));
                               });
                  of_worker[worker] = std::max(of_worker[worker], most);
                  if (by_row) {
                    largest[row] = most;
                  }
                }
              });
  if (!by_row) {
    largest[0] = *std::max_element(of_worker.begin(), of_worker.end());
  }
}

void LargestOfColumns(Team* team, const Stored& x, float* largest) {
  std::fill_n(largest, x.columns, 0.0F);
  const std::int64_t least = std::max<std::int64_t>(kLeastColumns, LeastRows(x.rows));
  ForEachPart(team, x.columns, least, [&](std::int64_t begin, std::int64_t end, std::size_t) {
    for (std::int64_t row = 0; row < x.rows; ++row) {
      ForEachPiece(x, row, begin, end,
                   [&](std::int64_t column, std::int64_t n, const float* values) {
                     VectorLargerMagnitude(values, largest + column, n);
                   });
    }
  });
}

// Scales of the operand's lines, or one for all.
const float* Scales(Team* team, const Stored& x, bool is_transposed, bool by_row, Fp8Format format,
                    Scratch& scratch) {
  const std::int64_t lines = !by_row ? 1 : is_transposed ? x.columns : x.rows;
  float* const scales = scratch.Floats(lines);
  if (by_row && is_transposed) {
    LargestOfColumns(team, x, scales);
  } else {
    LargestOfRows(team, x, by_row, scales);
  }
  std::transform(scales, scales + lines, scales,
                 [&](float largest) { return Fp8Scale(largest, format, by_row); });
  return scales;
}

}  // namespace

void RoundOperands(const ModelOpCall& call, const GemmSize& size, const Fp8Formats& formats,
                   GemmOperand& a, GemmOperand& b, Scratch& scratch) {
  if (!MultipliesFp8(*call.spec, call.compute, *call.options)) {
    return;
  }
  const bool by_row = call.options->fp8 == Fp8Products::kPerRow;
  const std::int64_t stride = by_row ? 1 : 0;
  // What is summed over lies within a line.
  const auto view = [](const GemmOperand& o) { return ConstView{o.data, o.dtype, 0}; };
  const bool a_lies_across = a.column_stride != 1;
  const Stored left = a_lies_across ? Stored{view(a), size.k, size.m, a.column_stride}
                                    : Stored{view(a), size.m, size.k, a.row_stride};
  a.fp8 = {formats.a, Scales(call.team, left, a_lies_across, by_row, formats.a, scratch), stride,
           0};
  const bool b_lies_across = b.row_stride != 1;
  const Stored right = b_lies_across ? Stored{view(b), size.k, size.n, b.row_stride}
                                     : Stored{view(b), size.n, size.k, b.column_stride};
  b.fp8 = {formats.b, Scales(call.team, right, b_lies_across, by_row, formats.b, scratch), 0,
           stride};
}

}  // namespace shardwright
