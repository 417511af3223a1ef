// Expert parallel: a copy of each token per chosen expert, in the experts' order, and the weighted
// sum of what comes back. Sums run over experts in their order, as where a rank has them all.

#include "executor/host/kernels/dispatch.h"

#include <algorithm>
#include <cstddef>
#include <cstring>
#include <numeric>
#include <span>

#include "core/error.h"
#include "executor/host/kernels/kernels.h"
#include "executor/host/kernels/vector.h"
#include "models/kernels/host.h"

namespace shardwright {

Dispatch MakeDispatch(const ModelOpCall& call, bool is_dense, Scratch& scratch) {
  const OpSpec& spec = *call.spec;
  const std::int64_t rows = RowsOf(call);
  const std::int64_t capacity = RoutedRows(spec, rows, is_dense);
  std::int64_t* const offsets = scratch.Integers(spec.experts + 1);
  std::int64_t* const list = scratch.Integers(capacity);
  std::int64_t used = 0;
  for (std::int64_t e = 0; e < spec.experts; ++e) {
    offsets[e] = used;
    for (std::int64_t row = 0; row < rows; ++row) {
      if (is_dense || ReadOne(call.inputs[1], row * spec.experts + e) != 0.0F) {
        SW_CHECK(used < capacity, "a router chose more experts than experts_per_token");
        list[used++] = row;
      }
    }
  }
  offsets[spec.experts] = used;
  return {offsets, list};
}

namespace {

// Rank by rank, how many rows came for each expert here.
std::span<const std::int64_t> CameCounts(const ModelOpCall& call) {
  return {reinterpret_cast<const std::int64_t*>(call.exchange.data()),
          call.exchange.size() / sizeof(std::int64_t)};
}

}  // namespace

std::int64_t CameRows(const ModelOpCall& call) {
  const auto counts = CameCounts(call);
  return std::accumulate(counts.begin(), counts.end(), std::int64_t{0});
}

Dispatch DispatchOfCame(const ModelOpCall& call, Scratch& scratch) {
  const std::int64_t experts = call.spec->experts;
  std::int64_t* const offsets = scratch.Integers(experts + 1);
  std::int64_t* const list = scratch.Integers(CameRows(call));
  const auto counts = CameCounts(call);
  std::int64_t used = 0;
  for (std::int64_t e = 0; e < experts; ++e) {
    offsets[e] = used;
    std::int64_t begin = 0;
    for (std::size_t i = 0; i < counts.size(); ++i) {
      if (static_cast<std::int64_t>(i) % experts == e) {
        std::iota(list + used, list + used + counts[i], begin);
        used += counts[i];
      }
      begin += counts[i];
    }
  }
  offsets[experts] = used;
  return {offsets, list};
}

namespace {

// f(expert, row of a token, row among those sent) for each row that is sent.
template <class F>
void ForEachSent(const Dispatch& dispatch, std::int64_t experts, const F& f) {
  for (std::int64_t e = 0; e < experts; ++e) {
    for (std::int64_t i = dispatch.offsets[e]; i < dispatch.offsets[e + 1]; ++i) {
      f(e, dispatch.rows[i], i);
    }
  }
}

}  // namespace

void DispatchForward(const ModelOpCall& call) {
  const OpSpec& spec = *call.spec;
  Scratch scratch(call.workspace);
  const Dispatch dispatch = MakeDispatch(call, /*is_dense=*/false, scratch);
  const std::int64_t bytes = spec.in * SizeOf(call.compute);
  const auto* const from = static_cast<const std::byte*>(call.inputs[0].data);
  auto* const to = static_cast<std::byte*>(call.outputs[0].data);
  ForEachSent(dispatch, spec.experts, [&](std::int64_t, std::int64_t token, std::int64_t i) {
    std::memcpy(to + i * bytes, from + token * bytes, static_cast<std::size_t>(bytes));
  });
  auto* const counts = static_cast<std::int64_t*>(call.outputs[1].data);
  for (std::int64_t e = 0; e < spec.experts; ++e) {
    counts[e] = dispatch.offsets[e + 1] - dispatch.offsets[e];
  }
}

namespace {

// Adds up, for each token, `rows` of those that were sent: each weight(expert, token) times.
template <class Weight>
void SumOfSent(const ModelOpCall& call, const ConstView& rows, const View& to,
               const Weight& weight) {
  const OpSpec& spec = *call.spec;
  Scratch scratch(call.workspace);
  const Dispatch dispatch = MakeDispatch(call, /*is_dense=*/false, scratch);
  float* const buffer = scratch.Floats(spec.in);
  float* const sums = scratch.Floats(RowsOf(call) * spec.in);
  std::fill_n(sums, RowsOf(call) * spec.in, 0.0F);
  ForEachSent(dispatch, spec.experts, [&](std::int64_t e, std::int64_t token, std::int64_t i) {
    const float* const row = ReadFloats(rows, i * spec.in, spec.in, buffer);
    VectorAdd(weight(e, token), row, sums + token * spec.in, spec.in);
  });
  StoreFloats(sums, RowsOf(call) * spec.in, to, 0);
}

}  // namespace

void DispatchBackward(const ModelOpCall& call) {
  SumOfSent(call, call.output_grads[0], call.input_grads[0],
            [](std::int64_t, std::int64_t) { return 1.0F; });
}

void CombineForward(const ModelOpCall& call) {
  SumOfSent(call, call.inputs[0], call.outputs[0], [&](std::int64_t e, std::int64_t token) {
    return ReadOne(call.inputs[1], token * call.spec->experts + e);
  });
}

void CombineBackward(const ModelOpCall& call) {
  const OpSpec& spec = *call.spec;
  Scratch scratch(call.workspace);
  const Dispatch dispatch = MakeDispatch(call, /*is_dense=*/false, scratch);
  float* const buffer = scratch.Floats(spec.in);
  float* const grad = scratch.Floats(spec.in);
  if (Wants(call.input_grads, 1)) {
    ZeroFill(call.input_grads[1]);
  }
  ForEachSent(dispatch, spec.experts, [&](std::int64_t e, std::int64_t token, std::int64_t i) {
    LoadFloats(call.output_grads[0], token * spec.in, spec.in, grad);
    if (Wants(call.input_grads, 1)) {
      const float* const y = ReadFloats(call.inputs[0], i * spec.in, spec.in, buffer);
      const float dot = VectorDot(grad, y, spec.in);
      StoreFloats(&dot, 1, call.input_grads[1], token * spec.experts + e);
    }
    if (Wants(call.input_grads, 0)) {
      VectorScale(ReadOne(call.inputs[1], token * spec.experts + e), grad, grad, spec.in);
      StoreFloats(grad, spec.in, call.input_grads[0], i * spec.in);
    }
  });
}

}  // namespace shardwright
