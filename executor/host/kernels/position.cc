// T5's relative position bias and rotary embeddings.

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <span>

#include "executor/host/kernels/clones.h"
#include "executor/host/kernels/kernels.h"
#include "executor/host/kernels/rows.h"
#include "executor/host/kernels/vector.h"

namespace shardwright {
namespace {

// The bucket of a key `distance` tokens behind (negative: before) the query. Half of the buckets
// are exact distances, the others grow logarithmically up to max_distance. Source:
// T5Attention._relative_position_bucket in Transformers; its logarithm is fp32.
std::int64_t BucketOf(const OpSpec& spec, std::int64_t distance) {
  std::int64_t buckets = spec.vocab;
  std::int64_t bucket = 0;
  std::int64_t n = -distance;
  if (spec.causal) {
    n = std::max<std::int64_t>(n, 0);
  } else {
    buckets /= 2;
    bucket = distance > 0 ? buckets : 0;
    n = std::abs(distance);
  }
  const std::int64_t exact = buckets / 2;
  if (n < exact) {
    return bucket + n;
  }
  const float ratio = std::log(static_cast<float>(n) / static_cast<float>(exact)) /
                      static_cast<float>(std::log(static_cast<double>(spec.max_distance) /
                                                  static_cast<double>(exact)));
  const auto far = exact + static_cast<std::int64_t>(ratio * static_cast<float>(buckets - exact));
  return bucket + std::min(far, buckets - 1);
}

// Buckets of all distances 1 - seq_q .. seq_k - 1.
const std::int64_t* FindBuckets(const OpSpec& spec, Scratch& scratch) {
  const std::int64_t count = spec.seq_q + spec.seq_k - 1;
  std::int64_t* const buckets = scratch.Integers(count);
  for (std::int64_t i = 0; i < count; ++i) {
    buckets[i] = BucketOf(spec, i - (spec.seq_q - 1));
  }
  return buckets;
}

}  // namespace

void PositionBiasForward(const ModelOpCall& call) {
  const OpSpec& spec = *call.spec;
  Scratch scratch(call.workspace);
  const std::int64_t* const buckets = FindBuckets(spec, scratch);
  float* const column = scratch.Floats(spec.vocab);
  for (std::int64_t head = 0; head < spec.heads; ++head) {
    for (std::int64_t b = 0; b < spec.vocab; ++b) {
      LoadFloats(call.params[0], b * spec.heads + head, 1, &column[b]);
    }
    for (std::int64_t q = 0; q < spec.seq_q; ++q) {
      ForEachChunk(spec.seq_k, [&](std::int64_t begin, std::int64_t n) {
        ChunkBuffer values;
        for (std::int64_t i = 0; i < n; ++i) {
          values.values[static_cast<std::size_t>(i)] =
              column[buckets[begin + i - q + spec.seq_q - 1]];
        }
        StoreFloats(values.values.data(), n, call.outputs[0],
                    (head * spec.seq_q + q) * spec.seq_k + begin);
      });
    }
  }
}

// Sums over the pairs of each distance first, then over the distances of each bucket.
void PositionBiasBackward(const ModelOpCall& call) {
  if (call.param_grads[0].view.data == nullptr) {  // autograd makes a gradient that nobody keeps
    return;
  }
  const OpSpec& spec = *call.spec;
  Scratch scratch(call.workspace);
  const std::int64_t* const buckets = FindBuckets(spec, scratch);
  float* const column = scratch.Floats(spec.vocab);
  float* const sums = scratch.Floats(spec.seq_q + spec.seq_k - 1);
  for (std::int64_t head = 0; head < spec.heads; ++head) {
    std::fill_n(sums, spec.seq_q + spec.seq_k - 1, 0.0F);
    for (std::int64_t q = 0; q < spec.seq_q; ++q) {
      ForEachChunk(spec.seq_k, [&](std::int64_t begin, std::int64_t n) {
        ChunkBuffer buffer;
        VectorAdd(1.0F,
                  ReadFloats(call.output_grads[0], (head * spec.seq_q + q) * spec.seq_k + begin, n,
                             buffer.values.data()),
                  sums + begin - q + spec.seq_q - 1, n);
      });
    }
    std::fill_n(column, spec.vocab, 0.0F);
    for (std::int64_t i = 0; i < spec.seq_q + spec.seq_k - 1; ++i) {
      column[buckets[i]] += sums[i];
    }
    for (std::int64_t b = 0; b < spec.vocab; ++b) {
      StoreParamGrad(&column[b], 1, call.param_grads[0], b * spec.heads + head);
    }
  }
}

namespace {

// cos and sin of one position's angles.
struct Angles {
  float* cosines;
  float* sines;
  double* frequencies;
};

// Radians per position of pair i. Llama 3's rule: low frequencies are divided by the factor, high
// ones stay, and those between are mixed. Source: _compute_llama3_parameters in Transformers.
double FrequencyOf(const RopeAngles& rope, std::int64_t i) {
  const double plain =
      std::pow(rope.theta, -2.0 * static_cast<double>(i) / static_cast<double>(rope.dim));
  if (rope.scaling == RopeScaling::kLinear) {
    return plain / rope.factor;
  }
  if (rope.scaling != RopeScaling::kLlama3) {
    return plain;
  }
  const double turns = rope.original_length * plain / (2.0 * M_PI);  // over the trained length
  if (turns < rope.low_frequency_factor) {
    return plain / rope.factor;
  }
  if (turns > rope.high_frequency_factor) {
    return plain;
  }
  const double smooth = (turns - rope.low_frequency_factor) /
                        (rope.high_frequency_factor - rope.low_frequency_factor);
  return (1.0 - smooth) * plain / rope.factor + smooth * plain;
}

Angles MakeAngles(const RopeAngles& rope, Scratch& scratch) {
  const std::int64_t pairs = rope.dim / 2;
  const Angles angles{scratch.Floats(pairs), scratch.Floats(pairs),
                      reinterpret_cast<double*>(scratch.Integers(pairs))};
  for (std::int64_t i = 0; i < pairs; ++i) {
    angles.frequencies[i] = FrequencyOf(rope, i);
  }
  return angles;
}

// `direction` -1 turns back, which is the gradient.
void SetPosition(const Angles& angles, std::int64_t pairs, std::int64_t position,
                 double direction) {
  for (std::int64_t i = 0; i < pairs; ++i) {
    const double angle = angles.frequencies[i] * static_cast<double>(position);
    angles.cosines[i] = static_cast<float>(std::cos(angle));
    angles.sines[i] = static_cast<float>(direction * std::sin(angle));
  }
}

SHARDWRIGHT_CLONES void TurnHalves(const float* x, const float* cosines, const float* sines,
                                   std::int64_t pairs, float* y) {
  for (std::int64_t i = 0; i < pairs; ++i) {
    y[i] = x[i] * cosines[i] - x[i + pairs] * sines[i];
    y[i + pairs] = x[i + pairs] * cosines[i] + x[i] * sines[i];
  }
}

// Interleaved pairs (2 i, 2 i + 1) end as (i, i + pairs): what DeepSeek does with queries and keys,
// whose products do not depend on the order. The gradient reads and writes the other way round.
void TurnInterleaved(const float* x, const Angles& angles, std::int64_t pairs, bool is_gradient,
                     float* y) {
  for (std::int64_t i = 0; i < pairs; ++i) {
    const float a = x[is_gradient ? i : 2 * i];
    const float b = x[is_gradient ? i + pairs : 2 * i + 1];
    const float c = angles.cosines[i];
    const float s = angles.sines[i];
    y[is_gradient ? 2 * i : i] = a * c - b * s;
    y[is_gradient ? 2 * i + 1 : i + pairs] = b * c + a * s;
  }
}

// One head of one position, in fp32, in a buffer of head_dim numbers.
class HeadTurner {
 public:
  HeadTurner(const ModelOpCall& call, bool is_gradient, std::span<std::byte> workspace)
      : spec_(*call.spec),
        cut_(call.cut),
        is_gradient_(is_gradient),
        scratch_(workspace),
        angles_(MakeAngles(spec_.rope, scratch_)),
        in_(scratch_.Floats(spec_.head_dim)),
        out_(scratch_.Floats(spec_.head_dim)) {}

  void MoveTo(std::int64_t token) {
    SetPosition(angles_, spec_.rope.dim / 2, cut_.PositionHere(token, spec_.rows),
                is_gradient_ ? -1.0 : 1.0);
  }

  // to[to_offset..] = the turned head from[from_offset..]; the rotated features begin at `begin`.
  void Turn(const ConstView& from, std::int64_t from_offset, std::int64_t begin, const View& to,
            std::int64_t to_offset) {
    const std::int64_t n = spec_.head_dim;
    const float* const x = ReadFloats(from, from_offset, n, in_);
    float* const y = ResultFloats(to, to_offset, out_);
    std::copy_n(x, begin, y);
    TurnPart(x + begin, y + begin);
    const std::int64_t end = begin + spec_.rope.dim;
    std::copy_n(x + end, n - end, y + end);
    FinishFloats(y, n, to, to_offset);
  }

  // The rotated features alone: y = turned x, rope.dim numbers each.
  void TurnPart(const float* x, float* y) const {
    const std::int64_t pairs = spec_.rope.dim / 2;
    if (spec_.rope.interleaved) {
      TurnInterleaved(x, angles_, pairs, is_gradient_, y);
    } else {
      TurnHalves(x, angles_.cosines, angles_.sines, pairs, y);
    }
  }

  [[nodiscard]] float* in() const { return in_; }
  [[nodiscard]] float* out() const { return out_; }

 private:
  const OpSpec& spec_;
  CutPlace cut_;
  bool is_gradient_;
  Scratch scratch_;
  Angles angles_;
  float* in_;
  float* out_;
};

// Where head `head` of tensor `part` (0 q, 1 k, 2 v) lies in a row of a packed tensor.
std::int64_t PackedOffset(const OpSpec& spec, int part, std::int64_t head) {
  if (spec.packed_by_head) {
    return (head * 3 + part) * spec.head_dim;
  }
  const std::int64_t before = part == 0 ? 0 : (part == 1 ? spec.heads : spec.heads + spec.kv_heads);
  return (before + head) * spec.head_dim;
}

std::int64_t HeadsOf(const OpSpec& spec, int part) {
  return part == 0 ? spec.heads : spec.kv_heads;
}

// q and k of one row, each (heads, head_dim), or both in one packed row on the side of the model's
// inputs.
void RotateRow(const ModelOpCall& call, bool is_gradient, std::int64_t row, HeadTurner& turner) {
  const OpSpec& spec = *call.spec;
  const bool is_packed = (is_gradient ? call.input_grads.size() : call.inputs.size()) == 1;
  const std::int64_t packed_row = (spec.heads + 2 * spec.kv_heads) * spec.head_dim;
  for (int part = 0; part < 2; ++part) {
    const auto index = static_cast<std::size_t>(part);
    const std::size_t side = is_packed ? 0 : index;
    if (is_gradient && call.input_grads[side].data == nullptr) {
      continue;
    }
    for (std::int64_t head = 0; head < HeadsOf(spec, part); ++head) {
      const std::int64_t out = (row * HeadsOf(spec, part) + head) * spec.head_dim;
      const std::int64_t in = is_packed ? row * packed_row + PackedOffset(spec, part, head) : out;
      if (is_gradient) {
        turner.Turn(call.output_grads[index], out, 0, call.input_grads[side], in);
      } else {
        turner.Turn(call.inputs[side], in, 0, call.outputs[index], out);
      }
    }
  }
}

void RotatePlain(const ModelOpCall& call, bool is_gradient) {
  const OpSpec& spec = *call.spec;
  const std::int64_t heads = spec.heads + spec.kv_heads;
  ForEachPart(call.team, spec.rows, LeastRows(call.batch * heads * spec.head_dim),
              [&](std::int64_t first, std::int64_t last, std::size_t worker) {
                HeadTurner turner(call, is_gradient, WorkspaceOf(call, worker));
                for (std::int64_t position = first; position < last; ++position) {
                  turner.MoveTo(position);
                  for (std::int64_t sample = 0; sample < call.batch; ++sample) {
                    RotateRow(call, is_gradient, sample * spec.rows + position, turner);
                  }
                }
              });
}

// DeepSeek's three tensors: queries whose last features turn; (heads, plain key and value); and a
// row whose last features are the positional part of the keys of all heads.
struct LatentSizes {
  std::int64_t plain = 0;   // features of a key without position
  std::int64_t kv_row = 0;  // of the second tensor
  std::int64_t kv_head = 0;
  std::int64_t low_row = 0;  // of the third tensor
};

LatentSizes SizesOf(const ModelOpCall& call, std::int64_t kv_elements, std::int64_t low_elements) {
  const OpSpec& spec = *call.spec;
  const std::int64_t rows = call.batch * spec.rows;
  LatentSizes s;
  s.plain = spec.head_dim - spec.rope.dim;
  s.kv_row = kv_elements / rows;
  s.kv_head = s.kv_row / spec.heads;
  s.low_row = low_elements / rows;
  return s;
}

void RotateLatentForward(const ModelOpCall& call) {
  const OpSpec& spec = *call.spec;
  const LatentSizes s = SizesOf(call, call.inputs[1].elements, call.inputs[2].elements);
  HeadTurner turner(call, /*is_gradient=*/false, call.workspace);
  for (std::int64_t position = 0; position < spec.rows; ++position) {
    turner.MoveTo(position);
    for (std::int64_t sample = 0; sample < call.batch; ++sample) {
      const std::int64_t row = sample * spec.rows + position;
      for (std::int64_t head = 0; head < spec.heads; ++head) {
        const std::int64_t at = (row * spec.heads + head) * spec.head_dim;
        turner.Turn(call.inputs[0], at, s.plain, call.outputs[0], at);
        float* const key = turner.out();
        LoadFloats(call.inputs[1], row * s.kv_row + head * s.kv_head, s.plain, key);
        LoadFloats(call.inputs[2], (row + 1) * s.low_row - spec.rope.dim, spec.rope.dim,
                   turner.in());
        turner.TurnPart(turner.in(), key + s.plain);
        StoreFloats(key, spec.head_dim, call.outputs[1], at);
      }
    }
  }
}

void RotateLatentBackward(const ModelOpCall& call) {
  const OpSpec& spec = *call.spec;
  const View& dkv = call.input_grads[1];
  const View& dlow = call.input_grads[2];
  const LatentSizes s = SizesOf(call, dkv.elements, dlow.elements);
  HeadTurner turner(call, /*is_gradient=*/true, call.workspace);
  // Values and the low-rank part get their gradients from other readers.
  for (const View& zeroed : {dkv, dlow}) {
    if (zeroed.data != nullptr) {
      ZeroFill(zeroed);
    }
  }
  for (std::int64_t position = 0; position < spec.rows; ++position) {
    turner.MoveTo(position);
    for (std::int64_t sample = 0; sample < call.batch; ++sample) {
      const std::int64_t row = sample * spec.rows + position;
      float* const sum = turner.out();
      float* const buffer = turner.in();
      for (std::int64_t head = 0; head < spec.heads && call.input_grads[0].data != nullptr;
           ++head) {
        const std::int64_t at = (row * spec.heads + head) * spec.head_dim;
        turner.Turn(call.output_grads[0], at, s.plain, call.input_grads[0], at);
      }
      std::fill_n(sum, spec.rope.dim, 0.0F);
      for (std::int64_t head = 0; head < spec.heads; ++head) {
        const std::int64_t at = (row * spec.heads + head) * spec.head_dim;
        LoadFloats(call.output_grads[1], at, spec.head_dim, buffer);
        if (dkv.data != nullptr) {
          StoreFloats(buffer, s.plain, dkv, row * s.kv_row + head * s.kv_head);
        }
        VectorAdd(1.0F, buffer + s.plain, sum, spec.rope.dim);
      }
      if (dlow.data != nullptr) {
        turner.TurnPart(sum, buffer);
        StoreFloats(buffer, spec.rope.dim, dlow, (row + 1) * s.low_row - spec.rope.dim);
      }
    }
  }
}

}  // namespace

void RopeForward(const ModelOpCall& call) {
  if (call.inputs.size() == 3) {
    RotateLatentForward(call);
  } else {
    RotatePlain(call, /*is_gradient=*/false);
  }
}

void RopeBackward(const ModelOpCall& call) {
  if (call.input_grads.size() == 3) {
    RotateLatentBackward(call);
    return;
  }
  if (call.input_grads.size() == 1) {
    // Values get their gradient from the attention.
    ZeroFill(call.input_grads[0]);
  }
  RotatePlain(call, /*is_gradient=*/true);
}

}  // namespace shardwright
