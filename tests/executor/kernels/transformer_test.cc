// Kernels of transformers against plain fp64 loops and finite differences of them.
//
// Tolerances of fp32 results: u = 2^-24 times the number of roundings on the way to an element
// times the size of the intermediate results, which the tests keep near 1 by their choice of data.

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>
#include <vector>

#include <doctest/doctest.h>

#include "tests/executor/kernels/harness.h"

namespace shardwright::testing {
namespace {

std::vector<Numbers> LinearOracle(const KernelCase& c, const std::vector<Numbers>& inputs,
                                  const std::vector<Numbers>& params) {
  const OpSpec& s = c.spec;
  Numbers y(S(c.batch * s.rows * s.out));
  for (std::int64_t r = 0; r < c.batch * s.rows; ++r) {
    for (std::int64_t o = 0; o < s.out; ++o) {
      double sum = s.has_bias ? params[1][S(o)] : 0.0;
      for (std::int64_t i = 0; i < s.in; ++i) {
        const double w = params[0][S(s.transposed ? i * s.out + o : o * s.in + i)];
        sum += inputs[0][S(r * s.in + i)] * w;
      }
      y[S(r * s.out + o)] = sum;
    }
  }
  return {y};
}

// Norms of rows; LayerNorm subtracts the mean.
std::vector<Numbers> NormOracle(const KernelCase& c, const std::vector<Numbers>& inputs,
                                const std::vector<Numbers>& params) {
  const OpSpec& s = c.spec;
  Numbers y = inputs[0];
  const auto n = static_cast<double>(s.in);
  for (std::int64_t r = 0; r < c.batch * s.rows; ++r) {
    double* const row = &y[S(r * s.in)];
    double mean = 0.0;
    double square = 0.0;
    for (std::int64_t i = 0; i < s.in; ++i) {
      mean += row[i] / n;
    }
    mean = s.kind == OpKind::kLayerNorm ? mean : 0.0;
    for (std::int64_t i = 0; i < s.in; ++i) {
      square += (row[i] - mean) * (row[i] - mean) / n;
    }
    for (std::int64_t i = 0; i < s.in; ++i) {
      row[i] =
          (row[i] - mean) / std::sqrt(square + s.epsilon) * (params[0][S(i)] + s.weight_offset) +
          (s.has_bias ? params[1][S(i)] : 0.0);
    }
  }
  return {y};
}

// Attention written as its definition, with what makes it different for each model.
struct AttentionView {
  std::int64_t row, first, head;  // strides of one of q, k, v in its tensor
  const Numbers* data;
  [[nodiscard]] double At(std::int64_t r, std::int64_t h, std::int64_t i) const {
    return (*data)[S(r * row + first + h * head + i)];
  }
};

std::vector<Numbers> AttentionOracle(const KernelCase& c, const std::vector<AttentionView>& qkv,
                                     const Numbers* bias) {
  const OpSpec& s = c.spec;
  const double factor = s.factor > 0 ? s.factor : 1.0 / std::sqrt(static_cast<double>(s.head_dim));
  const std::int64_t offset = std::max<std::int64_t>(0, s.seq_k - s.seq_q);
  Numbers y(S(c.batch * s.seq_q * s.heads * s.value_dim), 0.0);
  for (std::int64_t b = 0; b < c.batch; ++b) {
    for (std::int64_t h = 0; h < s.heads; ++h) {
      const std::int64_t kv = h / (s.heads / s.kv_heads);
      for (std::int64_t i = 0; i < s.seq_q; ++i) {
        std::vector<std::pair<std::int64_t, double>> scores;
        for (std::int64_t j = 0; j < s.seq_k; ++j) {
          const std::int64_t behind = i + offset - j;
          const bool is_hidden = (s.causal && behind < 0) ||
                                 (s.window > 0 && (behind >= s.window || -behind >= s.window));
          if (is_hidden) {
            continue;
          }
          double score = 0.0;
          for (std::int64_t d = 0; d < s.head_dim; ++d) {
            score += qkv[0].At(b * s.seq_q + i, h, d) * qkv[1].At(b * s.seq_k + j, kv, d);
          }
          score *= factor;
          score = s.soft_cap > 0 ? s.soft_cap * std::tanh(score / s.soft_cap) : score;
          score += bias != nullptr ? (*bias)[S((h * s.seq_q + i) * s.seq_k + j)] : 0.0;
          if (s.alibi_max > 0) {  // heads a power of two: slope 2^(-max (h + 1) / heads)
            score += std::exp2(-s.alibi_max * static_cast<double>(h + 1) /
                               static_cast<double>(s.heads)) *
                     static_cast<double>(j - i);
          }
          scores.emplace_back(j, score);
        }
        double sum = 0.0;
        for (auto& [j, score] : scores) {
          score = std::exp(score);
          sum += score;
        }
        for (const auto& [j, score] : scores) {
          for (std::int64_t d = 0; d < s.value_dim; ++d) {
            y[S(((b * s.seq_q + i) * s.heads + h) * s.value_dim + d)] +=
                score / sum * qkv[2].At(b * s.seq_k + j, kv, d);
          }
        }
      }
    }
  }
  return {y};
}

OpSpec AttentionSpec(std::int64_t heads, std::int64_t kv_heads, std::int64_t tokens) {
  return {.kind = OpKind::kAttention,
          .rows = tokens,
          .heads = heads,
          .kv_heads = kv_heads,
          .head_dim = 8,
          .value_dim = 8,
          .seq_q = tokens,
          .seq_k = tokens,
          .causal = true};
}

KernelCase AttentionCase(const OpSpec& spec, std::int64_t batch) {
  KernelCase c = MakeCase(spec, batch);
  c.inputs = {Normal(batch * spec.seq_q * spec.heads * spec.head_dim, 1),
              Normal(batch * spec.seq_k * spec.kv_heads * spec.head_dim, 2),
              Normal(batch * spec.seq_k * spec.kv_heads * spec.value_dim, 3)};
  if (spec.has_bias) {
    c.inputs.push_back(Normal(spec.heads * spec.seq_q * spec.seq_k, 4));
  }
  c.output_elements = {batch * spec.seq_q * spec.heads * spec.value_dim};
  return c;
}

// Scores of up to 10 with head_dim + 10 roundings, exponentials, and sums over the keys.
Tolerance AttentionTolerance(const OpSpec& s) {
  const double n = static_cast<double>(s.head_dim + s.value_dim + 10);
  return {.absolute = 40.0 * n * kU, .relative = 40.0 * n * kU};
}
// The row sum D is taken from the rounded output: head_dim products, each off by a rounding.
double AttentionKeptError(DType dtype) {
  return dtype == DType::kFp32 ? 0.0 : (dtype == DType::kBf16 ? 0x1p-5 : 0x1p-7);
}

void CheckAttention(const KernelCase& c, DType dtype) {
  const OpSpec s = c.spec;
  const std::int64_t q = s.heads * s.head_dim;
  const std::int64_t k = s.kv_heads * s.head_dim;
  const std::int64_t v = s.kv_heads * s.value_dim;
  CheckKernel(
      c, dtype,
      [&c, s, q, k, v](const std::vector<Numbers>& in, const std::vector<Numbers>&) {
        std::vector<AttentionView> views;
        if (in.size() == 1 && s.packed_by_head) {
          for (std::int64_t part = 0; part < 3; ++part) {
            views.push_back({3 * q, part * s.head_dim, 3 * s.head_dim, in.data()});
          }
        } else if (in.size() == 1) {
          views = {{q + 2 * k, 0, s.head_dim, in.data()},
                   {q + 2 * k, q, s.head_dim, in.data()},
                   {q + 2 * k, q + k, s.head_dim, in.data()}};
        } else {
          views = {{q, 0, s.head_dim, in.data()},
                   {k, 0, s.head_dim, &in[1]},
                   {v, 0, s.value_dim, &in[2]}};
          const auto v_row = static_cast<std::int64_t>(in[2].size()) / (c.batch * s.seq_k);
          if (v_row != v && s.packed_by_head) {
            views[2] = {v_row, 2 * s.head_dim, 3 * s.head_dim, &in[2]};
          } else if (v_row != v) {
            const std::int64_t head = v_row / s.heads;
            views[2] = {v_row, head - s.value_dim, head, &in[2]};
          }
        }
        return AttentionOracle(c, views, s.has_bias ? &in[3] : nullptr);
      },
      AttentionTolerance(s), AttentionKeptError(dtype));
}

}  // namespace

TEST_CASE("HostKernels.Linear") {
  for (const DType dtype : kAllDTypes) {
    for (const bool transposed : {false, true}) {
      for (const bool has_bias : {false, true}) {
        KernelCase c = MakeCase({.kind = OpKind::kLinear,
                                 .rows = 5,
                                 .in = 11,
                                 .out = 14,
                                 .has_bias = has_bias,
                                 .transposed = transposed},
                                3);
        c.inputs = {Normal(3 * 5 * 11, 1)};
        c.params = {Normal(11 * 14, 2)};
        if (has_bias) {
          c.params.push_back(Normal(14, 3));
        }
        c.output_elements = {3 * 5 * 14};
        c.accumulate = has_bias;
        const Oracle oracle = [&c](const auto& in, const auto& params) {
          return LinearOracle(c, in, params);
        };
        // At most 16 products of numbers below 4 in each sum.
        CheckKernel(c, dtype, oracle, {.absolute = 16 * 16 * 4 * kU, .relative = 0.0});
        c.grad_dtype = dtype;  // gradients that are reduced in the compute dtype
        CheckKernel(c, dtype, oracle, {.absolute = 16 * 16 * 4 * kU, .relative = 0.0});
      }
    }
  }
}

TEST_CASE("HostKernels.LinearAcrossBlocks") {
  KernelCase c =
      MakeCase({.kind = OpKind::kLinear, .rows = 101, .in = 260, .out = 520, .has_bias = true}, 1);
  c.inputs = {Normal(101 * 260, 1)};
  c.params = {Normal(260 * 520, 2, 1.0 / 16), Normal(520, 3)};
  c.output_elements = {101 * 520};
  CheckKernel(c, DType::kFp32,
              [&c](const auto& in, const auto& params) { return LinearOracle(c, in, params); },
              {.absolute = 520 * 8 * kU, .relative = 0.0});
}

// More sums of a bias' gradient than a chunk has.
TEST_CASE("HostKernels.LinearWithAWideBias") {
  KernelCase c =
      MakeCase({.kind = OpKind::kLinear, .rows = 3, .in = 2, .out = 2100, .has_bias = true}, 1);
  c.inputs = {Normal(3 * 2, 1)};
  c.params = {Normal(2 * 2100, 2), Normal(2100, 3)};
  c.output_elements = {3 * 2100};
  CheckKernel(c, DType::kFp32,
              [&c](const auto& in, const auto& params) { return LinearOracle(c, in, params); },
              {.absolute = 2100 * 8 * kU, .relative = 0.0});
}

TEST_CASE("HostKernels.Embedding") {
  for (const DType dtype : kAllDTypes) {
    KernelCase c = MakeCase(
        {.kind = OpKind::kEmbedding, .rows = 9, .out = 6, .vocab = 7, .index_offset = 2}, 2);
    c.inputs = {Integers(2 * 9, 5, 1)};  // ids of 0 to 4 in rows 2 to 6: many are equal
    c.index_inputs = {0};
    c.params = {Normal(7 * 6, 2)};
    c.output_elements = {2 * 9 * 6};
    const Oracle oracle = [](const auto& in, const auto& params) {
      Numbers y;
      for (const double id : in[0]) {
        for (int i = 0; i < 6; ++i) {
          y.push_back(params[0][S(static_cast<std::int64_t>(id + 2) * 6 + i)]);
        }
      }
      return std::vector<Numbers>{y};
    };
    // Sums of at most 18 numbers below 4.
    CheckKernel(c, dtype, oracle, {.absolute = 18 * 18 * 4 * kU, .relative = 0.0});
    c.accumulate = true;
    CheckKernel(c, dtype, oracle, {.absolute = 18 * 18 * 4 * kU, .relative = 0.0});
  }
}

// Equal ids that lie far from each other: sums of two or three positions.
TEST_CASE("HostKernels.EmbeddingOfManyRows") {
  constexpr std::int64_t kRows = 2500, kApart = 1100, kFeatures = 20;
  KernelCase c =
      MakeCase({.kind = OpKind::kEmbedding, .rows = kRows, .out = kFeatures, .vocab = kApart}, 1);
  c.index_inputs = {0};
  c.inputs.emplace_back();
  for (std::int64_t i = 0; i < kRows; ++i) {
    c.inputs[0].push_back(static_cast<double>(i % kApart));
  }
  c.params = {Normal(kApart * kFeatures, 2)};
  c.output_elements = {kRows * kFeatures};
  const KernelRun run = RunKernel(c, DType::kFp32);
  for (std::int64_t i = 0; i < kApart * kFeatures; ++i) {
    float sum = 0.0F;
    for (std::int64_t at = i; at < kRows * kFeatures; at += kApart * kFeatures) {
      sum += static_cast<float>(run.output_grads[0][S(at)]);
    }
    REQUIRE(run.param_grads[0][S(i)] == static_cast<double>(sum));
  }
}

// torch.nn.Embedding(padding_idx=4): row 4 gets no gradient, or keeps the one it has; the others
// get what they get without it.
TEST_CASE("HostKernels.EmbeddingWithPaddingRow") {
  for (const bool accumulate : {false, true}) {
    KernelCase c = MakeCase(
        {.kind = OpKind::kEmbedding, .rows = 9, .out = 6, .vocab = 7, .index_offset = 2}, 2);
    c.inputs = {Integers(2 * 9, 5, 1)};
    c.index_inputs = {0};
    c.params = {Normal(7 * 6, 2)};
    c.output_elements = {2 * 9 * 6};
    c.accumulate = accumulate;
    const KernelRun without = RunKernel(c, DType::kFp32);
    c.spec.padding_row = 4;
    const KernelRun with = RunKernel(c, DType::kFp32);
    Numbers expected = without.param_grads[0];
    CHECK(expected[4 * 6] != (accumulate ? 1.0 : 0.0));  // the row is looked up
    std::fill_n(expected.begin() + 4 * 6, 6, accumulate ? 1.0 : 0.0);
    CHECK(with.param_grads[0] == expected);
    CHECK(with.outputs == without.outputs);
  }
}

TEST_CASE("HostKernels.Norms") {
  for (const DType dtype : kAllDTypes) {
    for (const OpKind kind : {OpKind::kLayerNorm, OpKind::kRmsNorm}) {
      for (const std::int64_t features : {7, 40}) {
        KernelCase c = MakeCase({.kind = kind,
                                 .rows = 3,
                                 .in = features,
                                 .has_bias = kind == OpKind::kLayerNorm,
                                 .epsilon = 1e-5,
                                 .weight_offset = kind == OpKind::kRmsNorm ? 1.0 : 0.0},
                                2);
        c.inputs = {Normal(6 * features, 1)};
        c.params = {Normal(features, 2)};
        if (c.spec.has_bias) {
          c.params.push_back(Normal(features, 3));
        }
        c.output_elements = {6 * features};
        // Rows of a few standard numbers; deviations stay above 0.3, so that errors grow little.
        CheckKernel(c, dtype,
                    [&c](const auto& in, const auto& params) { return NormOracle(c, in, params); },
                    {.absolute = 400 * kU, .relative = 100 * kU});
      }
    }
  }
}

TEST_CASE("HostKernels.AttentionVariants") {
  for (const DType dtype : kAllDTypes) {
    CheckAttention(AttentionCase(AttentionSpec(2, 2, 5), 2), dtype);  // causal
    CheckAttention(AttentionCase(AttentionSpec(4, 2, 5), 2), dtype);  // grouped
    OpSpec spec = AttentionSpec(2, 1, 6);
    spec.causal = false;
    CheckAttention(AttentionCase(spec, 2), dtype);  // bidirectional
    spec.window = 2;
    CheckAttention(AttentionCase(spec, 1), dtype);
    spec.causal = true;
    CheckAttention(AttentionCase(spec, 1), dtype);
    spec = AttentionSpec(2, 2, 5);
    spec.has_bias = true;
    spec.factor = 1.0;  // T5
    spec.head_dim = spec.value_dim = 2;
    CheckAttention(AttentionCase(spec, 3), dtype);
    spec = AttentionSpec(2, 2, 5);
    spec.soft_cap = 1.5;  // Gemma 2
    CheckAttention(AttentionCase(spec, 2), dtype);
    spec = AttentionSpec(4, 4, 5);
    spec.alibi_max = 8.0;  // MPT
    CheckAttention(AttentionCase(spec, 2), dtype);
    spec = AttentionSpec(2, 2, 4);
    spec.causal = false;
    spec.seq_k = 7;  // T5's decoder looking at the encoder
    CheckAttention(AttentionCase(spec, 2), dtype);
    spec.causal = true;  // the last query sees the last key
    CheckAttention(AttentionCase(spec, 1), dtype);
    spec.seq_k = 3;  // more queries than keys
    CheckAttention(AttentionCase(spec, 1), dtype);
  }
}

TEST_CASE("HostKernels.AttentionOfPackedTensors") {
  for (const DType dtype : {DType::kFp32, DType::kBf16}) {
    for (const bool by_head : {false, true}) {
      OpSpec spec = AttentionSpec(2, 2, 5);
      spec.packed_by_head = by_head;
      KernelCase c = AttentionCase(spec, 2);
      c.inputs = {Normal(2 * 5 * 3 * 16, 1)};
      CheckAttention(c, dtype);  // GPT-2, MPT; by head: an unrotated GPT-NeoX
    }
    // GPT-NeoX: rotated q and k, v inside the packed tensor.
    OpSpec spec = AttentionSpec(2, 2, 5);
    spec.packed_by_head = true;
    KernelCase c = AttentionCase(spec, 2);
    c.inputs[2] = Normal(2 * 5 * 3 * 16, 3);
    CheckAttention(c, dtype);
    // DeepSeek: v behind the plain part of the keys, narrower than q and k.
    spec = AttentionSpec(2, 2, 5);
    spec.value_dim = 4;
    c = AttentionCase(spec, 2);
    c.inputs[2] = Normal(2 * 5 * 2 * (6 + 4), 3);
    CheckAttention(c, dtype);
  }
}

TEST_CASE("HostKernels.AttentionAcrossTiles") {
  // 128 queries and 256 keys are a tile.
  OpSpec spec = AttentionSpec(2, 1, 300);
  spec.head_dim = spec.value_dim = 4;
  CheckAttention(AttentionCase(spec, 1), DType::kFp32);
  spec.window = 140;
  CheckAttention(AttentionCase(spec, 1), DType::kFp32);
  spec.window = 0;
  spec.causal = false;
  CheckAttention(AttentionCase(spec, 1), DType::kFp32);
}

TEST_CASE("HostKernels.Rope") {
  for (const DType dtype : kAllDTypes) {
    for (const bool interleaved : {false, true}) {
      OpSpec spec{.kind = OpKind::kRope,
                  .rows = 4,
                  .heads = 2,
                  .kv_heads = 1,
                  .head_dim = 6,
                  .rope = {.dim = 4, .theta = 100.0, .interleaved = interleaved}};
      KernelCase c = MakeCase(spec, 2);
      c.inputs = {Normal(2 * 4 * 12, 1), Normal(2 * 4 * 6, 2)};
      c.output_elements = {2 * 4 * 12, 2 * 4 * 6};
      CheckKernel(c, dtype,
                  [interleaved](const auto& in, const auto&) {
                    std::vector<Numbers> outputs = in;
                    for (std::size_t part = 0; part < 2; ++part) {
                      const std::int64_t heads = part == 0 ? 2 : 1;
                      for (std::int64_t r = 0; r < 8; ++r) {
                        for (std::int64_t h = 0; h < heads; ++h) {
                          const std::int64_t at = (r * heads + h) * 6;
                          for (std::int64_t i = 0; i < 2; ++i) {
                            const double angle = static_cast<double>(r % 4) *
                                                 std::pow(100.0, -static_cast<double>(i) / 2);
                            const double a = in[part][S(at + (interleaved ? 2 * i : i))];
                            const double b = in[part][S(at + (interleaved ? 2 * i + 1 : i + 2))];
                            outputs[part][S(at + i)] = a * std::cos(angle) - b * std::sin(angle);
                            outputs[part][S(at + i + 2)] =
                                b * std::cos(angle) + a * std::sin(angle);
                          }
                        }
                      }
                    }
                    return outputs;
                  },
                  {.absolute = 16 * kU, .relative = 4 * kU});
    }
  }
}

TEST_CASE("HostKernels.RopeOfPackedTensors") {
  for (const bool by_head : {false, true}) {
    OpSpec spec{.kind = OpKind::kRope,
                .rows = 4,
                .heads = 2,
                .kv_heads = 2,
                .head_dim = 4,
                .rope = {.dim = 4, .theta = 100.0},
                .packed_by_head = by_head};
    KernelCase c = MakeCase(spec, 2);
    c.inputs = {Normal(2 * 4 * 24, 1)};
    c.output_elements = {2 * 4 * 8, 2 * 4 * 8};
    CheckKernel(c, DType::kFp32,
                [by_head](const auto& in, const auto&) {
                  std::vector<Numbers> outputs(2, Numbers(64));
                  for (std::int64_t part = 0; part < 2; ++part) {
                    for (std::int64_t r = 0; r < 8; ++r) {
                      for (std::int64_t h = 0; h < 2; ++h) {
                        const std::int64_t at =
                            r * 24 + (by_head ? (h * 3 + part) : (part * 2 + h)) * 4;
                        for (std::int64_t i = 0; i < 2; ++i) {
                          const double angle = static_cast<double>(r % 4) *
                                               std::pow(100.0, -static_cast<double>(i) / 2);
                          const double a = in[0][S(at + i)];
                          const double b = in[0][S(at + i + 2)];
                          Numbers& y = outputs[S(part)];
                          y[S((r * 2 + h) * 4 + i)] = a * std::cos(angle) - b * std::sin(angle);
                          y[S((r * 2 + h) * 4 + i + 2)] = b * std::cos(angle) + a * std::sin(angle);
                        }
                      }
                    }
                  }
                  return outputs;
                },
                {.absolute = 16 * kU, .relative = 4 * kU});
  }
}

// DeepSeek: queries (plain, positional); (heads, plain key and value); low-rank row with the shared
// positional key at its end. Pairs are interleaved and end in halves.
TEST_CASE("HostKernels.RopeOfLatentTensors") {
  OpSpec spec{.kind = OpKind::kRope,
              .rows = 3,
              .heads = 2,
              .kv_heads = 2,
              .head_dim = 5,
              .rope = {.dim = 2, .theta = 100.0, .interleaved = true}};
  KernelCase c = MakeCase(spec, 2);
  c.inputs = {Normal(6 * 10, 1), Normal(6 * 2 * (3 + 4), 2), Normal(6 * 7, 3)};
  c.output_elements = {6 * 10, 6 * 10};
  CheckKernel(c, DType::kFp32,
              [](const auto& in, const auto&) {
                std::vector<Numbers> outputs(2, Numbers(60));
                for (std::int64_t r = 0; r < 6; ++r) {
                  const auto angle = static_cast<double>(r % 3);
                  for (std::int64_t h = 0; h < 2; ++h) {
                    const std::int64_t at = r * 10 + h * 5;
                    for (std::int64_t i = 0; i < 3; ++i) {
                      outputs[0][S(at + i)] = in[0][S(at + i)];
                      outputs[1][S(at + i)] = in[1][S(r * 14 + h * 7 + i)];
                    }
                    const double qa = in[0][S(at + 3)];
                    const double qb = in[0][S(at + 4)];
                    const double ka = in[2][S(r * 7 + 5)];
                    const double kb = in[2][S(r * 7 + 6)];
                    outputs[0][S(at + 3)] = qa * std::cos(angle) - qb * std::sin(angle);
                    outputs[0][S(at + 4)] = qb * std::cos(angle) + qa * std::sin(angle);
                    outputs[1][S(at + 3)] = ka * std::cos(angle) - kb * std::sin(angle);
                    outputs[1][S(at + 4)] = kb * std::cos(angle) + ka * std::sin(angle);
                  }
                }
                return outputs;
              },
              {.absolute = 24 * kU, .relative = 4 * kU});
}

TEST_CASE("HostKernels.CrossEntropy") {
  for (const DType dtype : kAllDTypes) {
    for (const LossReduction reduction : {LossReduction::kMean, LossReduction::kSum}) {
      KernelCase c = MakeCase({.kind = OpKind::kCrossEntropy, .rows = 3, .in = 9}, 2);
      c.inputs = {Normal(6 * 9, 1, 2.0), Integers(6, 9, 2)};
      c.inputs[1][1] = -100.0;  // PyTorch's ignore_index
      c.index_inputs = {1};
      c.output_elements = {1};
      c.reduction = reduction;
      CheckKernel(
          c, dtype,
          [reduction](const auto& in, const auto&) {
            double loss = 0.0;
            for (std::int64_t r = 0; r < 6; ++r) {
              double sum = 0.0;
              for (std::int64_t i = 0; i < 9; ++i) {
                sum += std::exp(in[0][S(r * 9 + i)]);
              }
              const auto label = static_cast<std::int64_t>(in[1][S(r)]);
              loss += label < 0 ? 0.0 : std::log(sum) - in[0][S(r * 9 + label)];
            }
            return std::vector<Numbers>{{reduction == LossReduction::kMean ? loss / 5 : loss}};
          },
          {.absolute = 60 * kU, .relative = 16 * kU});
    }
  }
}

TEST_CASE("HostKernels.CrossEntropyOfManyClasses") {
  KernelCase c = MakeCase({.kind = OpKind::kCrossEntropy, .rows = 2, .in = 2100}, 1);
  c.inputs = {Normal(2 * 2100, 1), Integers(2, 2100, 2)};
  c.index_inputs = {1};
  c.output_elements = {1};
  CheckKernel(c, DType::kFp32,
              [](const auto& in, const auto&) {
                double loss = 0.0;
                for (std::int64_t r = 0; r < 2; ++r) {
                  double sum = 0.0;
                  for (std::int64_t i = 0; i < 2100; ++i) {
                    sum += std::exp(in[0][S(r * 2100 + i)]);
                  }
                  loss +=
                      std::log(sum) - in[0][S(r * 2100 + static_cast<std::int64_t>(in[1][S(r)]))];
                }
                return std::vector<Numbers>{{loss / 2}};
              },
              {.absolute = 100 * kU, .relative = 16 * kU});
}

// The bucket rule by hand for 8 buckets and distances up to 16, both directions: keys before the
// query at distance 0, 1: buckets 0, 1; 2 + floor(log(n / 2) / log(8) * 2) from 2 on, at most 3.
// Keys after the query: the same plus 4. Causal: 0 to 3 exact, then 4 + floor(log(n / 4) / log(4) *
// 4), at most 7.
TEST_CASE("HostKernels.PositionBias") {
  for (const bool causal : {false, true}) {
    const auto bucket = [causal](std::int64_t behind) -> std::int64_t {
      const auto log_bucket = [](double n, double exact, double most, double count) {
        return static_cast<std::int64_t>(std::log(n / exact) / std::log(most / exact) * count);
      };
      if (causal) {
        const std::int64_t n = std::max<std::int64_t>(behind, 0);
        return n < 4 ? n
                     : std::min<std::int64_t>(7, 4 + log_bucket(static_cast<double>(n), 4, 16, 4));
      }
      const std::int64_t n = std::abs(behind);
      const std::int64_t b =
          n < 2 ? n : std::min<std::int64_t>(3, 2 + log_bucket(static_cast<double>(n), 2, 16, 2));
      return behind < 0 ? 4 + b : b;
    };
    KernelCase c = MakeCase({.kind = OpKind::kPositionBias,
                             .vocab = 8,
                             .heads = 3,
                             .seq_q = 7,
                             .seq_k = 7,
                             .causal = causal,
                             .max_distance = 16},
                            1);
    c.params = {Normal(8 * 3, 1)};
    c.output_elements = {3 * 7 * 7};
    CheckKernel(c, DType::kFp32,
                [&](const auto&, const auto& params) {
                  Numbers y;
                  for (std::int64_t h = 0; h < 3; ++h) {
                    for (std::int64_t q = 0; q < 7; ++q) {
                      for (std::int64_t k = 0; k < 7; ++k) {
                        y.push_back(params[0][S(bucket(q - k) * 3 + h)]);
                      }
                    }
                  }
                  return std::vector<Numbers>{y};
                },
                {.absolute = 49 * 49 * kU, .relative = 0.0});
  }
}

}  // namespace shardwright::testing
