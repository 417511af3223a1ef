// Router and experts against fp64 loops and finite differences.

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <vector>

#include <doctest/doctest.h>

#include "tests/executor/kernels/harness.h"

namespace shardwright::testing {
namespace {

double Silu(double x) {
  return x / (1.0 + std::exp(-x));
}

// Routing weights of each row: softmax or sigmoid, the k best, divided by their sum.
std::vector<Numbers> RouterOracle(const KernelCase& c, const std::vector<Numbers>& in,
                                  const std::vector<Numbers>& params) {
  const OpSpec& s = c.spec;
  Numbers y;
  for (std::int64_t r = 0; r < c.batch * s.rows; ++r) {
    Numbers scores(S(s.experts));
    double sum = 0.0;
    for (std::int64_t e = 0; e < s.experts; ++e) {
      double logit = 0.0;
      for (std::int64_t i = 0; i < s.in; ++i) {
        logit += in[0][S(r * s.in + i)] * params[0][S(e * s.in + i)];
      }
      scores[S(e)] = s.scores_by_sigmoid ? 1.0 / (1.0 + std::exp(-logit)) : std::exp(logit);
      sum += scores[S(e)];
    }
    for (double& score : scores) {
      score = s.scores_by_sigmoid ? score : score / sum;
    }
    Numbers ordered = scores;
    if (s.groups_per_token > 0) {  // two groups, the better one remains
      const auto best_two = [&](std::int64_t g) {
        Numbers group(ordered.begin() + g * s.experts / 2,
                      ordered.begin() + (g + 1) * s.experts / 2);
        std::sort(group.rbegin(), group.rend());
        return group[0] + group[1];
      };
      const std::int64_t loser = best_two(0) >= best_two(1) ? 1 : 0;
      std::fill_n(ordered.begin() + loser * s.experts / 2, s.experts / 2, -1.0);
    }
    std::sort(ordered.rbegin(), ordered.rend());
    double chosen_sum = 0.0;
    for (std::int64_t k = 0; k < s.experts_per_token; ++k) {
      chosen_sum += ordered[S(k)];
    }
    const double smallest = ordered[S(s.experts_per_token - 1)];
    for (std::int64_t e = 0; e < s.experts; ++e) {
      const bool in_group = s.groups_per_token == 0 ||
                            std::find(ordered.begin(), ordered.begin() + s.experts_per_token,
                                      scores[S(e)]) != ordered.begin() + s.experts_per_token;
      const double weight =
          scores[S(e)] / (s.normalizes_top_k ? chosen_sum : 1.0) * (s.factor > 0 ? s.factor : 1.0);
      y.push_back(in_group && scores[S(e)] >= smallest ? weight : 0.0);
    }
  }
  return {y};
}

// x (rows, in) through every expert with its weight of `routing`.
std::vector<Numbers> ExpertsOracle(const KernelCase& c, const std::vector<Numbers>& in,
                                   const std::vector<Numbers>& params) {
  const OpSpec& s = c.spec;
  const std::int64_t per_expert = s.gated ? 3 : 2;
  Numbers y(S(c.batch * s.rows * s.in), 0.0);
  for (std::int64_t r = 0; r < c.batch * s.rows; ++r) {
    for (std::int64_t e = 0; e < s.experts; ++e) {
      const double weight = in[1][S(r * s.experts + e)];
      const auto project = [&](std::int64_t matrix, std::int64_t o) {
        double sum = 0.0;
        for (std::int64_t i = 0; i < s.in; ++i) {
          sum += in[0][S(r * s.in + i)] * params[S(e * per_expert + matrix)][S(o * s.in + i)];
        }
        return sum;
      };
      const std::int64_t up = s.gated ? (s.up_last ? 2 : 1) : 0;
      const std::int64_t down = s.gated ? (s.up_last ? 1 : 2) : 1;
      for (std::int64_t o = 0; o < s.out; ++o) {
        const double hidden = s.gated ? Silu(project(0, o)) * project(up, o) : Silu(project(up, o));
        for (std::int64_t i = 0; i < s.in; ++i) {
          y[S(r * s.in + i)] +=
              weight * hidden * params[S(e * per_expert + down)][S(i * s.out + o)];
        }
      }
    }
  }
  return {y};
}

}  // namespace

TEST_CASE("HostKernels.Router") {
  for (const DType dtype : kAllDTypes) {
    for (const bool normalizes : {false, true}) {
      for (const bool by_sigmoid : {false, true}) {
        KernelCase c = MakeCase({.kind = OpKind::kRouter,
                                 .rows = 3,
                                 .in = 4,
                                 .groups = by_sigmoid ? 2 : 1,
                                 .experts = 6,
                                 .experts_per_token = 2,
                                 .factor = by_sigmoid ? 2.5 : 0.0,
                                 .normalizes_top_k = normalizes,
                                 .scores_by_sigmoid = by_sigmoid,
                                 .groups_per_token = by_sigmoid ? 1 : 0},
                                2);
        c.inputs = {Normal(6 * 4, 1)};
        c.params = {Normal(6 * 4, 2)};
        c.output_elements = {6 * 6};
        CheckKernel(
            c, dtype,
            [&c](const auto& in, const auto& params) { return RouterOracle(c, in, params); },
            {.absolute = 600 * kU, .relative = 64 * kU});
      }
    }
  }
}

TEST_CASE("HostKernels.RouterAcrossBlocks") {
  KernelCase c = MakeCase(
      {.kind = OpKind::kRouter, .rows = 150, .in = 300, .experts = 6, .experts_per_token = 2}, 1);
  c.inputs = {Normal(150 * 300, 1)};
  c.params = {Normal(6 * 300, 2, 1.0 / 16)};
  c.output_elements = {150 * 6};
  CheckKernel(c, DType::kFp32,
              [&c](const auto& in, const auto& params) { return RouterOracle(c, in, params); },
              {.absolute = 150 * 16 * kU, .relative = 64 * kU});
}

TEST_CASE("HostKernels.RouterCorrectionSteersTheChoiceOnly") {
  KernelCase c = MakeCase({.kind = OpKind::kRouter,
                           .rows = 1,
                           .in = 1,
                           .experts = 3,
                           .experts_per_token = 1,
                           .scores_by_sigmoid = true},
                          1);
  c.inputs = {{1.0}};
  c.params = {{2.0, 1.0, 0.0}};
  c.output_elements = {3};
  c.buffers = {0.0F, 0.0F, 1.0F};
  const KernelRun run = RunKernel(c, DType::kFp32);
  CHECK(run.outputs[0] == Numbers{0.0, 0.0, 0.5});
}

TEST_CASE("HostKernels.Experts") {
  for (const DType dtype : kAllDTypes) {
    for (const bool gated : {false, true}) {
      for (const MoeDispatch dispatch : {MoeDispatch::kGrouped, MoeDispatch::kDense}) {
        KernelCase c = MakeCase({.kind = OpKind::kExperts,
                                 .rows = 3,
                                 .in = 4,
                                 .out = 5,
                                 .gated = gated,
                                 .activation = Activation::kSilu,
                                 .experts = 4,
                                 .experts_per_token = 2,
                                 .up_last = gated},
                                2);
        c.options.moe_dispatch = dispatch;
        c.inputs = {Normal(6 * 4, 1), Numbers(6 * 4, 0.0)};
        // Two experts per row; the last one gets no row at all.
        for (std::int64_t r = 0; r < 6; ++r) {
          c.inputs[1][S(r * 4 + r % 3)] = 0.75;
          c.inputs[1][S(r * 4 + (r + 1) % 3)] = 0.25;
        }
        for (std::int64_t e = 0; e < 4; ++e) {
          for (std::int64_t matrix = 0; matrix < (gated ? 3 : 2); ++matrix) {
            c.params.push_back(Normal(20, S(10 + e * 3 + matrix)));
          }
        }
        c.output_elements = {6 * 4};
        Oracle oracle = [&c](const auto& in, const auto& params) {
          return ExpertsOracle(c, in, params);
        };
        if (dispatch == MoeDispatch::kGrouped) {
          // An expert that was not chosen has no gradient of its weight: keep those constant.
          oracle = [&c](std::vector<Numbers> in, const auto& params) {
            for (std::size_t i = 0; i < in[1].size(); ++i) {
              in[1][i] = c.inputs[1][i] == 0.0 ? 0.0 : in[1][i];
            }
            return ExpertsOracle(c, in, params);
          };
        }
        // Gate and up projections, numbers up to 8, are kept in 16 bits: each is off by up to 8 u,
        // and so is the hidden row times the other one; sums of five such terms times weights up
        // to 2.
        const double kept = dtype == DType::kFp32 ? 0.0 : (dtype == DType::kBf16 ? 0.25 : 0.03);
        KernelCase forward = c;
        CheckKernel(forward, dtype, oracle,
                    {.absolute = 5000 * kU + 2.0 * kept, .relative = 100 * kU});
        c.accumulate = true;
        CheckKernel(c, dtype, oracle, {.absolute = 5000 * kU + 2.0 * kept, .relative = 100 * kU});
      }
    }
  }
}

// More rows and features than a block takes, sizes that are no multiples of its parts, experts with
// 141 rows, 37 and none.
TEST_CASE("HostKernels.ExpertsAcrossBlocks") {
  constexpr std::int64_t kRows = 150, kIn = 72, kOut = 136, kExperts = 3;
  for (const DType dtype : {DType::kBf16, DType::kFp16}) {
    KernelCase c = MakeCase({.kind = OpKind::kExperts,
                             .rows = kRows,
                             .in = kIn,
                             .out = kOut,
                             .gated = true,
                             .activation = Activation::kSilu,
                             .experts = kExperts,
                             .experts_per_token = 2},
                            1);
    c.inputs = {Normal(kRows * kIn, 1), Numbers(S(kRows * kExperts), 0.0)};
    for (std::int64_t r = 0; r < kRows; ++r) {
      c.inputs[1][S(r * kExperts)] = r % 17 == 0 ? 0.0 : 0.75;
      c.inputs[1][S(r * kExperts + 1)] = r % 17 == 0 || r % 5 == 1 ? 0.5 : 0.0;
    }
    for (std::int64_t i = 0; i < 3 * kExperts; ++i) {
      c.params.push_back(Normal(kIn * kOut, S(10 + i), 1.0 / 8));
    }
    c.output_elements = {kRows * kIn};
    c.accumulate = true;
    const Oracle oracle = [&c](std::vector<Numbers> in, const auto& params) {
      for (std::size_t i = 0; i < in[1].size(); ++i) {  // the choice is given
        in[1][i] = c.inputs[1][i] == 0.0 ? 0.0 : in[1][i];
      }
      return ExpertsOracle(c, in, params);
    };
    // Gate, up, what becomes of them and their gradients, all about 1, may be rounded to 16 bits:
    // three roundings in each of some 140 terms, which are a tenth of that size.
    const double rounding = dtype == DType::kBf16 ? 0x1p-8 : 0x1p-11;
    CheckKernel(c, dtype, oracle, {.absolute = 140 * 0.1 * 3 * rounding, .relative = 0.0});
  }
}

}  // namespace shardwright::testing
