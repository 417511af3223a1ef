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

// The table row of id `i`; -1: another rank has it.
std::int64_t TableRow(const ModelOpCall& call, std::int64_t i) {
  const OpSpec& spec = *call.spec;
  const std::int64_t id = static_cast<const std::int64_t*>(call.inputs[0].data)[i];
  const std::int64_t row = id + spec.index_offset;
  const std::int64_t all = spec.vocab * std::max<std::int64_t>(spec.tensor_ranks, 1);
  if (row < 0 || row >= all) {
    throw InputError("the data", "an id whose row in the table is " + std::to_string(row),
                     "0 to " + std::to_string(all - 1));
  }
  if (spec.tensor_ranks == 0) {
    return row;
  }
  return row / spec.vocab == call.cut.part ? row % spec.vocab : -1;
}

// The row that gets no gradient; -1: none of this rank's.
std::int64_t PaddingRow(const ModelOpCall& call) {
  const OpSpec& spec = *call.spec;
  const std::int64_t first = spec.tensor_ranks > 0 ? call.cut.part * spec.vocab : 0;
  return std::max<std::int64_t>(spec.padding_row - first, -1);
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
void SumLists(const RowSum& sum, std::span<const Entry> entries, std::int64_t padding_row,
              std::int64_t first, std::int64_t end, const ParamGrad& grad) {
  for (std::size_t i = 0; i < entries.size();) {
    const std::int64_t row = entries[i].first;
    std::size_t last = i;
    while (last < entries.size() && entries[last].first == row) {
      ++last;
    }
    ForEachChunk(row < 0 || row == padding_row ? 0 : end - first, [&](std::int64_t begin,
                                                                      std::int64_t count) {
      ChunkBuffer total;
      std::fill_n(total.values.data(), count, 0.0F);
      for (std::size_t k = i; k < last; ++k) {
        AddGradientRows(sum, entries[k].second, first + begin, count, total.values.data());
      }
      StoreParamGrad(total.values.data(), count, grad, row * sum.features + first + begin);
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
  ForEachRowChunk(
      call.team, rows, spec.out, [&](std::int64_t i, std::int64_t begin, std::int64_t count) {
        ChunkBuffer buffer;
        const std::int64_t row = TableRow(call, i);
        std::fill_n(buffer.values.data(), count, 0.0F);
        const float* const values =
            row < 0 ? buffer.values.data()
                    : ReadFloats(table, row * spec.out + begin, count, buffer.values.data());
        StoreFloats(values, count, y, i * spec.out + begin);
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
    entries[i] = {TableRow(call, i), i};
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
    SumLists(sum, std::span(entries, static_cast<std::size_t>(rows)), PaddingRow(call), begin, end,
             grad);
  });
}

}  // namespace shardwright
