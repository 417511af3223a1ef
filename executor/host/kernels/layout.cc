// Ops that only move rows: concatenation and selection.

#include <algorithm>
#include <cstddef>
#include <cstdint>

#include "executor/host/kernels/kernels.h"
#include "executor/host/kernels/rows.h"
#include "executor/host/kernels/vector.h"

namespace shardwright {
namespace {

void CopyFloats(const ConstView& from, std::int64_t from_offset, std::int64_t n, const View& to,
                std::int64_t to_offset) {
  ForEachChunk(n, [&](std::int64_t begin, std::int64_t count) {
    ChunkBuffer buffer;
    StoreFloats(ReadFloats(from, from_offset + begin, count, buffer.values.data()), count, to,
                to_offset + begin);
  });
}

}  // namespace

void ConcatForward(const ModelOpCall& call) {
  const View& y = call.outputs[0];
  const std::int64_t sample_elements = call.spec->rows * call.spec->in;
  for (std::int64_t sample = 0; sample < call.batch; ++sample) {
    std::int64_t to = sample * sample_elements;
    for (const ConstView& param : call.params) {
      CopyFloats(param, 0, param.elements, y, to);
      to += param.elements;
    }
    for (const ConstView& input : call.inputs) {
      const std::int64_t n = input.elements / call.batch;
      CopyFloats(input, sample * n, n, y, to);
      to += n;
    }
  }
}

void ConcatBackward(const ModelOpCall& call) {
  const ConstView& dy = call.output_grads[0];
  const std::int64_t sample_elements = call.spec->rows * call.spec->in;
  std::int64_t from = 0;  // of the part in a sample's rows
  for (std::size_t i = 0; i < call.params.size(); ++i) {
    const std::int64_t n = call.params[i].elements;
    if (Wants(call.param_grads, i)) {
      ForEachChunk(n, [&](std::int64_t begin, std::int64_t count) {
        ChunkBuffer total;
        std::fill_n(total.values.data(), count, 0.0F);
        for (std::int64_t sample = 0; sample < call.batch; ++sample) {
          ChunkBuffer buffer;
          const std::int64_t offset = sample * sample_elements + from + begin;
          VectorAdd(1.0F, ReadFloats(dy, offset, count, buffer.values.data()), total.values.data(),
                    count);
        }
        StoreParamGrad(total.values.data(), count, call.param_grads[i], begin);
      });
    }
    from += n;
  }
  // Gradients have the sizes of the inputs, which backward does not get.
  const auto parts = static_cast<std::int64_t>(call.input_grads.size());
  for (const View& dx : call.input_grads) {
    const std::int64_t n = parts == 1 ? sample_elements - from : dx.elements / call.batch;
    if (dx.data != nullptr) {
      for (std::int64_t sample = 0; sample < call.batch; ++sample) {
        CopyFloats(dy, sample * sample_elements + from, n, dx, sample * n);
      }
    }
    from += n;
  }
}

void SelectForward(const ModelOpCall& call) {
  const std::int64_t n = call.spec->rows * call.spec->in;
  const std::int64_t all = call.inputs[0].elements / call.batch;
  for (std::int64_t sample = 0; sample < call.batch; ++sample) {
    CopyFloats(call.inputs[0], sample * all, n, call.outputs[0], sample * n);
  }
}

void SelectBackward(const ModelOpCall& call) {
  const View& dx = call.input_grads[0];
  const std::int64_t n = call.spec->rows * call.spec->in;
  const std::int64_t all = dx.elements / call.batch;
  ZeroFill(dx);
  for (std::int64_t sample = 0; sample < call.batch; ++sample) {
    CopyFloats(call.output_grads[0], sample * n, n, dx, sample * all);
  }
}

}  // namespace shardwright
