#pragma once

// Rotary embeddings and T5's relative position bias.
//
// Example of the rotation: a head of 4 features with theta = 10,000 has two pairs, (0, 2) and (1,
// 3), with frequencies 1 and 0.01. At position 3 they turn by 3 and 0.03 radians: (1, 0, 0, 0)
// becomes (cos 3, 0, sin 3, 0) = (-0.990, 0, 0.141, 0). The gradient turns back.
//
// Angles are fp64: at position 100,000 fp32 numbers are 0.008 radians apart.

#include <cmath>
#include <cstdint>

#include "executor/cuda/kernels/array.h"
#include "executor/cuda/kernels/block.h"
#include "executor/cuda/kernels/kernel_id.h"

namespace shardwright::gpu {

// cosines and sines (positions, pairs) of position * frequency, from fp64. `direction` -1 turns
// back: the gradient.
struct RopeTableArgs {
  double log_theta = 0.0;  // of the base
  std::int64_t dim = 0;    // rotated features
  std::int64_t positions = 0;
  double direction = 1.0;
  // Scaling of the frequencies (models/model.h, RopeAngles): 0 none, 1 linear, 2 Llama 3's.
  int rule = 0;
  double factor = 1.0, original_length = 0.0, low_factor = 0.0, high_factor = 0.0;
  float* cosines = nullptr;
  float* sines = nullptr;
};

struct RopeTableKernel : KernelTraits<KernelId::kRopeTable, RopeTableArgs, 256> {
  // Radians per position of pair i. Source of rule 2: _compute_llama3_parameters in Transformers.
  // Example of rule 2, Llama 3: original length 8,192, factor 8, low 1, high 4. A pair that turns
  // 1,304 times in that length keeps its frequency, and one that turns 0.13 times is slowed down by
  // 8. At 2 turns smooth is 1/3, and the frequency is (2/3) / 8 + 1/3 = 0.417 of the plain one.
  static SW_DEVICE double Frequency(const Args& args, std::int64_t i) {
    const double plain =
        exp(-2.0 * static_cast<double>(i) / static_cast<double>(args.dim) * args.log_theta);
    if (args.rule == 1) {
      return plain / args.factor;
    }
    if (args.rule != 2) {
      return plain;
    }
    const double turns = args.original_length * plain / (2.0 * 3.14159265358979323846);
    if (turns < args.low_factor) {
      return plain / args.factor;
    }
    if (turns > args.high_factor) {
      return plain;
    }
    const double smooth = (turns - args.low_factor) / (args.high_factor - args.low_factor);
    return (1.0 - smooth) * plain / args.factor + smooth * plain;
  }

  static SW_DEVICE void Run(Block& block, const Args& args) {
    block.Each([&](int t) {
      const std::int64_t pairs = args.dim / 2;
      const std::int64_t i = block.index() * kThreads + t;
      if (i < args.positions * pairs) {
        const std::int64_t position = i / pairs;
        const double angle = Frequency(args, i % pairs) * static_cast<double>(position);
        args.cosines[i] = static_cast<float>(cos(angle));
        args.sines[i] = static_cast<float>(args.direction * sin(angle));
      }
    });
  }
};

// Turns the `dim` features from `begin` on of every head and copies the others: head h of row r
// from from[from_first + r * from_row + h * from_head] to to[...]. Row r has position r %
// positions. Interleaved pairs (2 i, 2 i + 1) end as (i, i + pairs); a gradient reads and writes
// the other way round. `sums_heads`: the source is the sum over `heads` heads, written once (the
// gradient of a part that all heads share).
// Example: heads of 192 features whose last 64 turn (DeepSeek) have features 192, begin 128, dim
// 64. A partial rotation of the first 32 of 128 features has begin 0, dim 32.
struct RopeArgs {
  Array from = {}, to = {};
  std::int64_t rows = 0, positions = 0, heads = 0;
  std::int64_t features = 0;  // of a head, the copied ones included
  std::int64_t begin = 0, dim = 0;
  std::int64_t from_first = 0, from_row = 0, from_head = 0;
  std::int64_t to_first = 0, to_row = 0, to_head = 0;
  bool interleaved = false, is_gradient = false, sums_heads = false;
  const float* cosines = nullptr;
  const float* sines = nullptr;
};

// Forward and backward. Reads and writes each feature once.
struct RopeKernel : KernelTraits<KernelId::kRope, RopeArgs, 256> {
  static SW_DEVICE float Source(const Args& args, std::int64_t row, std::int64_t head,
                                std::int64_t feature) {
    const std::int64_t at = args.from_first + row * args.from_row + feature;
    if (!args.sums_heads) {
      return Load(args.from, at + head * args.from_head);
    }
    float sum = 0.0F;
    for (std::int64_t h = 0; h < args.heads; ++h) {
      sum += Load(args.from, at + h * args.from_head);
    }
    return sum;
  }

  // Eight pairs, or eight copied features, per thread, where heads divide into such pieces.
  static SW_DEVICE bool IsInVectors(const Args& args) {
    constexpr std::int64_t kMost = std::int64_t{1} << 31;  // pieces: 32-bit divisions are fast
    return !args.interleaved && !args.sums_heads && args.dim % (2 * kVector) == 0 &&
           args.begin % kVector == 0 && args.features % kVector == 0 &&
           args.rows * args.heads * args.features < kMost;
  }

  static SW_DEVICE void Run(Block& block, const Args& args) {
    const bool in_vectors = IsInVectors(args);
    block.Each([&](int t) {
      const std::int64_t index = block.index() * kThreads + t;
      if (in_vectors) {
        TurnEight(args, index);
      } else {
        TurnOne(args, index);
      }
    });
  }

 private:
  static SW_DEVICE void TurnEight(const Args& args, std::int64_t index) {
    const auto pieces = static_cast<std::uint32_t>((args.features - args.dim / 2) / kVector);
    const auto heads = static_cast<std::uint32_t>(args.heads);
    if (index >= args.rows * heads * pieces) {
      return;
    }
    const auto place = static_cast<std::uint32_t>(index);
    const std::int64_t item = std::int64_t{kVector} * (place % pieces);
    const std::int64_t head = place / pieces % heads;
    const std::int64_t row = place / pieces / heads;
    const std::int64_t from = args.from_first + row * args.from_row + head * args.from_head;
    const std::int64_t to = args.to_first + row * args.to_row + head * args.to_head;
    const std::int64_t pairs = args.dim / 2;
    if (item >= pairs) {
      const std::int64_t copied = item - pairs;
      const std::int64_t feature = copied < args.begin ? copied : copied + args.dim;
      float numbers[kVector];
      Unpack(LoadEight(args.from, from + feature), args.from.dtype, numbers);
      StoreEight(args.to, to + feature, Pack(numbers, args.to.dtype));
      return;
    }
    const std::int64_t first = args.begin + item;
    const std::int64_t angle = row % args.positions * pairs + item;
    const Eight firsts = LoadEight(args.from, from + first);
    const Eight seconds = LoadEight(args.from, from + first + pairs);
    const Eight cosines = LoadEight({const_cast<float*>(args.cosines), DType::kFp32}, angle);
    const Eight sines = LoadEight({const_cast<float*>(args.sines), DType::kFp32}, angle);
    float a[kVector], b[kVector], c[kVector], s[kVector];
    Unpack(firsts, args.from.dtype, a);
    Unpack(seconds, args.from.dtype, b);
    Unpack(cosines, DType::kFp32, c);
    Unpack(sines, DType::kFp32, s);
    SW_UNROLL
    for (int k = 0; k < kVector; ++k) {
      const float turned = a[k] * c[k] - b[k] * s[k];
      b[k] = b[k] * c[k] + a[k] * s[k];
      a[k] = turned;
    }
    StoreEight(args.to, to + first, Pack(a, args.to.dtype));
    StoreEight(args.to, to + first + pairs, Pack(b, args.to.dtype));
  }

  // One pair, or one copied feature.
  static SW_DEVICE void TurnOne(const Args& args, std::int64_t index) {
    const std::int64_t pairs = args.dim / 2;
    const std::int64_t items = pairs + args.features - args.dim;
    const std::int64_t heads = args.sums_heads ? 1 : args.heads;
    if (index >= args.rows * heads * items) {
      return;
    }
    const std::int64_t item = index % items;
    const std::int64_t head = index / items % heads;
    const std::int64_t row = index / items / heads;
    const std::int64_t to = args.to_first + row * args.to_row + head * args.to_head;
    if (item >= pairs) {
      const std::int64_t copied = item - pairs;
      const std::int64_t feature = copied < args.begin ? copied : copied + args.dim;
      Store(args.to, to + feature, Source(args, row, head, feature));
      return;
    }
    const std::int64_t apart_first = args.begin + item;
    const std::int64_t apart_second = apart_first + pairs;
    const std::int64_t near_first = args.begin + 2 * item;
    const bool reads_near = args.interleaved && !args.is_gradient;
    const bool writes_near = args.interleaved && args.is_gradient;
    const float a = Source(args, row, head, reads_near ? near_first : apart_first);
    const float b = Source(args, row, head, reads_near ? near_first + 1 : apart_second);
    const std::int64_t angle = row % args.positions * pairs + item;
    const float c = args.cosines[angle];
    const float s = args.sines[angle];
    Store(args.to, to + (writes_near ? near_first : apart_first), a * c - b * s);
    Store(args.to, to + (writes_near ? near_first + 1 : apart_second), b * c + a * s);
  }
};

// T5's bucket of a key `distance` tokens behind (negative: before) the query. Source:
// T5Attention._relative_position_bucket in Transformers; its logarithm is fp32.
// Example: 32 buckets, both directions, distances up to 128: 16 buckets for each direction, the
// first 8 exact. Distance -3 is bucket 3, +3 is 16 + 3 = 19. Distance -20 is 8 + floor(8 log(20/8)
// / log(128/8)) = 10, and all from -91 on are bucket 15.
struct BucketRule {
  std::int64_t buckets = 0;
  bool causal = false;
  float log_range = 1.0F;  // log(max_distance / exact buckets)
};
SW_DEVICE std::int64_t BucketOf(const BucketRule& rule, std::int64_t distance) {
  std::int64_t buckets = rule.buckets;
  std::int64_t bucket = 0;
  std::int64_t n = -distance;
  if (rule.causal) {
    n = n > 0 ? n : 0;
  } else {
    buckets /= 2;
    bucket = distance > 0 ? buckets : 0;
    n = distance > 0 ? distance : -distance;
  }
  const std::int64_t exact = buckets / 2;
  if (n < exact) {
    return bucket + n;
  }
  const float ratio = logf(static_cast<float>(n) / static_cast<float>(exact)) / rule.log_range;
  const std::int64_t far =
      exact + static_cast<std::int64_t>(ratio * static_cast<float>(buckets - exact));
  return bucket + (far < buckets - 1 ? far : buckets - 1);
}

// y (heads, seq_q, seq_k) = table[bucket(key - query)][head].
struct PositionBiasArgs {
  BucketRule rule;
  Array table = {}, y = {};  // the gradient kernel: y is its output's gradient
  std::int64_t heads = 0, seq_q = 0, seq_k = 0;
  Array grad = {};  // the gradient kernel only: (buckets, heads)
  bool adds = false;
};
struct PositionBiasKernel : KernelTraits<KernelId::kPositionBias, PositionBiasArgs, 256> {
  static SW_DEVICE void Run(Block& block, const Args& args) {
    block.Each([&](int t) {
      const std::int64_t i = block.index() * kThreads + t;
      if (i >= args.heads * args.seq_q * args.seq_k) {
        return;
      }
      const std::int64_t key = i % args.seq_k;
      const std::int64_t query = i / args.seq_k % args.seq_q;
      const std::int64_t head = i / args.seq_k / args.seq_q;
      Store(args.y, i, Load(args.table, BucketOf(args.rule, key - query) * args.heads + head));
    });
  }
};

// A block per (bucket, head): the sum over all pairs in the bucket.
// Each block goes through all pairs: O(buckets heads seq^2). T5's 32 buckets and 512 tokens make 8
// M steps for each head.
struct PositionBiasGradKernel : KernelTraits<KernelId::kPositionBiasGrad, PositionBiasArgs, 256> {
  static SW_DEVICE void Run(Block& block, const Args& args) {
    const std::int64_t bucket = block.index() / args.heads;
    const std::int64_t head = block.index() % args.heads;
    PerThread<float> sums;
    block.Each([&](int t) {
      float sum = 0.0F;
      for (std::int64_t i = t; i < args.seq_q * args.seq_k; i += kThreads) {
        const std::int64_t key = i % args.seq_k;
        const std::int64_t query = i / args.seq_k;
        if (BucketOf(args.rule, key - query) == bucket) {
          sum += Load(args.y, head * args.seq_q * args.seq_k + i);
        }
      }
      sums[t] = sum;
    });
    const float total = BlockSum(block, block.Shared<float>(kThreads), sums);
    block.Each([&](int t) {
      if (t == 0) {
        StoreOrAdd(args.grad, bucket * args.heads + head, total, args.adds);
      }
    });
  }
};

}  // namespace shardwright::gpu
