// Table lookups, and the gradient of a table as sums over equal ids.

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <utility>

#include "core/error.h"
#include "executor/host/kernels/kernels.h"
#include "executor/host/kernels/rows.h"
#include "executor/host/kernels/vector.h"

namespace shardwright {
namespace {

// The table row of each id.
std::int64_t TableRow(const OpSpec& spec, const ConstView& ids, std::int64_t i) {
  const std::int64_t row = static_cast<const std::int64_t*>(ids.data)[i] + spec.index_offset;
  if (row < 0 || row >= spec.vocab) {
    throw InputError("the data", "an id whose row in the table is " + std::to_string(row),
                     "0 to " + std::to_string(spec.vocab - 1));
  }
  return row;
}

// Adds the table's row from `from`, or replaces it.
struct RowSum {
  const ConstView& grads;
  std::int64_t features;  // of a row
  std::int64_t stride;    // rows between two gradients of one id that stand behind each other
  std::int64_t copies;
};

// values[j] += every gradient of row `row`, in order.
void AddGradientRows(const RowSum& sum, std::int64_t row, std::int64_t begin, std::int64_t count,
                     float* values) {
  for (std::int64_t copy = 0; copy < sum.copies; ++copy) {
    ChunkBuffer buffer;
    const std::int64_t offset = (copy * sum.stride + row) * sum.features + begin;
    VectorAdd(1.0F, ReadFloats(sum.grads, offset, count, buffer.values.data()), values, count);
  }
}

using Entry = std::pair<std::int64_t, std::int64_t>;  // table row, position

// Features [first, end) of the gradients of all table rows.
void SumLists(const RowSum& sum, std::span<const Entry> entries, const OpSpec& spec,
              std::int64_t first, std::int64_t end, const ParamGrad& grad) {
  for (std::size_t i = 0; i < entries.size();) {
    const std::int64_t row = entries[i].first;
    std::size_t last = i;
    while (last < entries.size() && entries[last].first == row) {
      ++last;
    }
    ForEachChunk(
        row == spec.padding_row ? 0 : end - first, [&](std::int64_t begin, std::int64_t count) {
          ChunkBuffer total;
          std::fill_n(total.values.data(), count, 0.0F);
          for (std::size_t k = i; k < last; ++k) {
            AddGradientRows(sum, entries[k].second, first + begin, count, total.values.data());
          }
          StoreParamGrad(total.values.data(), count, grad, row * spec.out + first + begin);
        });
    i = last;
  }
}

}  // namespace

void EmbeddingForward(const ModelOpCall& call) {
  const OpSpec& spec = *call.spec;
  const std::int64_t rows = call.batch * spec.rows;
  const ConstView& table = call.params[0];
  const View& y = call.outputs[0];
  ForEachRowChunk(call.team, rows, spec.out,
                  [&](std::int64_t i, std::int64_t begin, std::int64_t count) {
                    ChunkBuffer buffer;
                    const std::int64_t at = TableRow(spec, call.inputs[0], i) * spec.out + begin;
                    StoreFloats(ReadFloats(table, at, count, buffer.values.data()), count, y,
                                i * spec.out + begin);
                  });
}

// Positions are sorted by id; each table row with gradients then gets one sum, in fp32 and in the
// order of positions, and is rounded once.
void EmbeddingBackward(const ModelOpCall& call) {
  if (!Wants(call.param_grads, 0)) {
    return;
  }
  const OpSpec& spec = *call.spec;
  const std::int64_t rows = call.batch * spec.rows;
  const ParamGrad& grad = call.param_grads[0];
  const ConstView& dy = call.output_grads[0];
  const RowSum sum{dy, spec.out, rows, dy.elements / (rows * spec.out)};
  Scratch scratch(call.workspace);
  auto* const entries = reinterpret_cast<Entry*>(scratch.Integers(2 * rows));
  for (std::int64_t i = 0; i < rows; ++i) {
    entries[i] = {TableRow(spec, call.inputs[0], i), i};
  }
  std::sort(entries, entries + rows);
  if (!grad.accumulate) {
    const std::int64_t size = SizeOf(grad.view.dtype);
    ForEachChunk(call.team, spec.vocab * spec.out, [&](std::int64_t begin, std::int64_t count) {
      std::fill_n(static_cast<std::byte*>(grad.view.data) + begin * size, count * size,
                  std::byte{0});
    });
  }
  const std::int64_t least = std::max<std::int64_t>(kLeastColumns, LeastRows(rows));
  ForEachPart(call.team, spec.out, least, [&](std::int64_t begin, std::int64_t end, std::size_t) {
    SumLists(sum, std::span(entries, static_cast<std::size_t>(rows)), spec, begin, end, grad);
  });
}

}  // namespace shardwright
