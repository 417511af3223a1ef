#pragma once

// Where the parts of an op's tensors lie, which the kernels of all devices go by.

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "executor/model_op.h"

namespace shardwright {

// One of q, k, v or their gradients: head h of row r begins at element r * row + first + h * head.
struct HeadPlace {
  void* data = nullptr;  // null: not there
  DType dtype = DType::kFp32;
  std::int64_t row = 0;
  std::int64_t first = 0;
  std::int64_t head = 0;

  [[nodiscard]] std::int64_t At(std::int64_t r, std::int64_t h) const {
    return r * row + first + h * head;
  }
};
struct HeadPlaces {
  HeadPlace q, k, v;
};
// Part 0, 1, 2 (q, k, v) of a packed tensor.
[[nodiscard]] inline HeadPlace PackedHeads(const OpSpec& spec, const View& view, int part) {
  HeadPlace place{view.data, view.dtype, (spec.heads + 2 * spec.kv_heads) * spec.head_dim, 0,
                  spec.head_dim};
  if (spec.packed_by_head) {
    place.first = part * spec.head_dim;
    place.head = 3 * spec.head_dim;
  } else if (part > 0) {
    place.first = (spec.heads + (part - 1) * spec.kv_heads) * spec.head_dim;
  }
  return place;
}
// The three ways to pass them: apart; packed in one tensor; q and k apart and v inside a packed
// tensor or behind the plain keys of DeepSeek's.
[[nodiscard]] inline HeadPlaces FindHeads(const ModelOpCall& call, std::span<const View> tensors) {
  const OpSpec& spec = *call.spec;
  const auto apart = [](const View& view, std::int64_t heads, std::int64_t features) {
    return HeadPlace{view.data, view.dtype, heads * features, 0, features};
  };
  if (tensors.size() == 1) {
    return {PackedHeads(spec, tensors[0], 0), PackedHeads(spec, tensors[0], 1),
            PackedHeads(spec, tensors[0], 2)};
  }
  HeadPlaces places{apart(tensors[0], spec.heads, spec.head_dim),
                    apart(tensors[1], spec.kv_heads, spec.head_dim),
                    apart(tensors[2], spec.kv_heads, spec.value_dim)};
  const std::int64_t row = tensors[2].elements / (call.batch * spec.seq_k);
  if (row == spec.kv_heads * spec.value_dim) {
    return places;
  }
  if (row == (spec.heads + 2 * spec.kv_heads) * spec.head_dim && spec.value_dim == spec.head_dim) {
    places.v = PackedHeads(spec, tensors[2], 2);
  } else {  // (heads, plain key and value)
    const std::int64_t head = row / spec.kv_heads;
    places.v.row = row;
    places.v.first = head - spec.value_dim;
    places.v.head = head;
  }
  return places;
}
[[nodiscard]] inline HeadPlaces FindHeads(const ModelOpCall& call) {
  std::vector<View> views;
  for (const ConstView& input : call.inputs) {
    // Places are shared with gradients, which are written; inputs are only read through them.
    views.push_back({const_cast<void*>(input.data), input.dtype, input.elements});
  }
  return FindHeads(call, views);
}
[[nodiscard]] inline HeadPlaces FindHeadGrads(const ModelOpCall& call) {
  return FindHeads(call, call.input_grads);
}

// The parameters of one expert: gate and up (intermediate, hidden), down (hidden, intermediate).
struct ExpertParams {
  std::size_t gate = 0, up = 0, down = 0;
};
[[nodiscard]] inline ExpertParams ParamsOf(const OpSpec& spec, std::int64_t expert) {
  const auto first = static_cast<std::size_t>(expert * (spec.gated ? 3 : 2));
  if (!spec.gated) {
    return {first, first, first + 1};
  }
  return spec.up_last ? ExpertParams{first, first + 2, first + 1}
                      : ExpertParams{first, first + 1, first + 2};
}

// kMul: (channels, height, width) times one number per channel, as squeeze and excitation has it.
[[nodiscard]] inline bool ScalesChannels(const ModelOpCall& call) {
  return call.inputs[1].elements < call.inputs[0].elements &&
         call.inputs[1].elements == call.batch * call.spec->in;
}

}  // namespace shardwright
