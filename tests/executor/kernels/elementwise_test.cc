// Element-wise kernels, layouts, dropout and plain losses against fp64 loops and finite
// differences.

#include <algorithm>
#include <array>
#include <cmath>
#include <cstdint>
#include <vector>

#include <doctest/doctest.h>

#include "core/error.h"
#include "executor/host/kernels/dropout.h"
#include "executor/host/kernels/table.h"
#include "tests/executor/kernels/harness.h"

namespace shardwright::testing {
namespace {

double ActivationOracle(Activation function, double x) {
  switch (function) {
    case Activation::kNone:
      return x;
    case Activation::kRelu:
      return std::max(0.0, x);
    case Activation::kGelu:
      return 0.5 * x * std::erfc(-x / std::sqrt(2.0));
    case Activation::kGeluTanh:
      return 0.5 * x * (1.0 + std::tanh(std::sqrt(2.0 / M_PI) * (x + 0.044715 * x * x * x)));
    case Activation::kSilu:
      return x / (1.0 + std::exp(-x));
    case Activation::kTanh:
      return std::tanh(x);
    case Activation::kSigmoid:
      return 1.0 / (1.0 + std::exp(-x));
  }
  return 0.0;
}

constexpr Activation kActivations[] = {Activation::kRelu, Activation::kGelu, Activation::kGeluTanh,
                                       Activation::kSilu, Activation::kTanh, Activation::kSigmoid};

// Derivatives computed from a result that was rounded to 16 bits (ReLU's does not depend on it).
double ActivationKeptError(Activation function, DType dtype) {
  const bool keeps = function == Activation::kTanh || function == Activation::kSigmoid;
  const double u = dtype == DType::kBf16 ? 0x1p-8 : 0x1p-11;
  // d(1 - y^2) <= 2 |y| u |y|, times gradients below 4.
  return keeps && dtype != DType::kFp32 ? 8.0 * u : 0.0;
}

// An element-wise op on (batch 2, rows, features).
KernelCase ElementCase(OpKind kind, std::int64_t rows, std::int64_t features, std::size_t inputs) {
  KernelCase c = MakeCase({.kind = kind, .rows = rows, .in = features}, 2);
  for (std::size_t i = 0; i < inputs; ++i) {
    c.inputs.push_back(Normal(2 * rows * features, 1 + i));
  }
  c.output_elements = {2 * rows * features};
  return c;
}

}  // namespace

TEST_CASE("HostKernels.Activations") {
  for (const DType dtype : kAllDTypes) {
    for (const Activation function : kActivations) {
      for (const std::int64_t features : {5, 700}) {  // the second is more than one chunk
        KernelCase c = ElementCase(OpKind::kActivation, 2, features, 1);
        c.spec.activation = function;
        if (function == Activation::kRelu) {  // no finite difference across its corner
          for (double& x : c.inputs[0]) {
            x += x > 0 ? 0.01 : -0.01;
          }
        }
        CheckKernel(
            c, dtype,
            [function](const auto& in, const auto&) {
              Numbers y = in[0];
              for (double& v : y) {
                v = ActivationOracle(function, v);
              }
              return std::vector<Numbers>{y};
            },
            {.absolute = 64 * kU, .relative = 16 * kU}, ActivationKeptError(function, dtype));
      }
    }
  }
}

TEST_CASE("HostKernels.ActivationsOfExtremeNumbers") {
  KernelCase c = ElementCase(OpKind::kActivation, 1, 3, 1);
  for (const Activation function : kActivations) {
    c.spec.activation = function;
    c.inputs[0] = {-200.0, -30.0, -1e-20, 1e-20, 30.0, 200.0};
    const KernelRun run = RunKernel(c, DType::kFp32);
    for (std::size_t i = 0; i < 6; ++i) {
      const double exact = ActivationOracle(function, c.inputs[0][i]);
      CHECK(std::fabs(run.outputs[0][i] - exact) <= 4e-7 * std::fabs(exact) + 1e-37);
      CHECK(std::isfinite(run.input_grads[0][i]));
    }
    c.inputs[0][2] = std::nan("");
    CHECK(std::isnan(RunKernel(c, DType::kFp32).outputs[0][2]));
  }
}

TEST_CASE("HostKernels.GatedActivations") {
  for (const DType dtype : kAllDTypes) {
    for (const Activation function :
         {Activation::kSilu, Activation::kGeluTanh, Activation::kTanh}) {
      KernelCase c = ElementCase(OpKind::kGatedActivation, 3, 7, 2);
      c.spec.activation = function;
      CheckKernel(c, dtype,
                  [function](const auto& in, const auto&) {
                    Numbers y = in[1];
                    for (std::size_t i = 0; i < y.size(); ++i) {
                      y[i] *= ActivationOracle(function, in[0][i]);
                    }
                    return std::vector<Numbers>{y};
                  },
                  {.absolute = 128 * kU, .relative = 32 * kU});
    }
  }
}

TEST_CASE("HostKernels.PackedGatedActivations") {
  for (const DType dtype : kAllDTypes) {
    for (const Activation function : {Activation::kSilu, Activation::kTanh}) {
      for (const std::int64_t features : {7, 16, 700}) {  // 700: more than one chunk
        KernelCase c = ElementCase(OpKind::kGatedActivation, 3, features, 1);
        c.inputs[0] = Normal(2 * 3 * 2 * features, 1);
        c.spec.activation = function;
        c.spec.packed_gate = true;
        CheckKernel(c, dtype,
                    [function, features](const auto& in, const auto&) {
                      Numbers y;
                      for (std::int64_t row = 0; row < 2 * 3; ++row) {
                        const auto gate = static_cast<std::size_t>(row * 2 * features);
                        for (std::size_t i = 0; i < static_cast<std::size_t>(features); ++i) {
                          const double up = in[0][gate + static_cast<std::size_t>(features) + i];
                          y.push_back(ActivationOracle(function, in[0][gate + i]) * up);
                        }
                      }
                      return std::vector<Numbers>{y};
                    },
                    {.absolute = 128 * kU, .relative = 32 * kU});
      }
    }
  }
}

TEST_CASE("HostKernels.Add") {
  for (const DType dtype : kAllDTypes) {
    const Oracle sum = [](const std::vector<Numbers>& in, const std::vector<Numbers>& params) {
      const Numbers& other = params.empty() ? in[1] : params[0];
      const bool swap = other.size() > in[0].size();
      const Numbers& large = swap ? other : in[0];
      const Numbers& small = swap ? in[0] : other;
      Numbers y = large;
      for (std::size_t i = 0; i < y.size(); ++i) {
        y[i] += small[i % small.size()];
      }
      return std::vector<Numbers>{y};
    };
    const Tolerance tolerance{.absolute = 8 * kU, .relative = 4 * kU};
    CheckKernel(ElementCase(OpKind::kAdd, 3, 5, 2), dtype, sum, tolerance);
    // A table of positions that the samples share, on either side; and one that is a parameter.
    KernelCase c = ElementCase(OpKind::kAdd, 3, 5, 2);
    c.inputs[1].resize(15);
    CheckKernel(c, dtype, sum, tolerance);
    std::swap(c.inputs[0], c.inputs[1]);
    CheckKernel(c, dtype, sum, tolerance);
    c = ElementCase(OpKind::kAdd, 3, 5, 1);
    c.spec.has_bias = true;
    c.params = {Normal(15, 9)};
    CheckKernel(c, dtype, sum, tolerance);
  }
}

// A gradient of several times the output's elements stands for samples that share the output.
TEST_CASE("HostKernels.EmbeddingOfSharedPositionsSumsOverSamples") {
  KernelCase c = MakeCase({.kind = OpKind::kEmbedding, .rows = 2, .out = 3, .vocab = 4}, 1);
  const std::int64_t ids[] = {3, 1};
  const std::vector<float> table(12, 0.0F);
  const std::vector<float> dy = {1, 2, 3, 10, 20, 30, 100, 200, 300, 1000, 2000, 3000};
  std::vector<float> grad(12, -1.0F);
  const OpKernels kernels = LowerOp(c.spec, 1, DType::kFp32, c.options);
  alignas(64) std::byte workspace[512];
  REQUIRE(kernels.backward_workspace <= Bytes(sizeof workspace));
  ModelOpCall call;
  call.spec = &c.spec;
  call.options = &c.options;
  call.inputs = {{ids, DType::kInt64, 2}};
  call.params = {{table.data(), DType::kFp32, 12}};
  call.output_grads = {{dy.data(), DType::kFp32, 12}};
  call.input_grads = {{nullptr, DType::kInt64, 2}};
  call.param_grads = {{{grad.data(), DType::kFp32, 12}, false}};
  call.workspace = workspace;
  SubjectUnderTest().run(call, /*is_backward=*/true);
  CHECK(grad == std::vector<float>{0, 0, 0, 1010, 2020, 3030, 0, 0, 0, 101, 202, 303});
}

TEST_CASE("HostKernels.IdsOutOfRangeAreRefused") {
  KernelCase c = MakeCase({.kind = OpKind::kEmbedding, .rows = 1, .out = 3, .vocab = 4}, 1);
  c.inputs = {{4.0}};
  c.index_inputs = {0};
  c.params = {Normal(12, 1)};
  c.output_elements = {3};
  CHECK_THROWS_WITH_AS((void)RunKernel(c, DType::kFp32),
                       "the data: got an id whose row in the table is 4, expected 0 to 3",
                       InputError);
  c = MakeCase({.kind = OpKind::kCrossEntropy, .rows = 1, .in = 3}, 1);
  c.inputs = {Normal(3, 1), {3.0}};
  c.index_inputs = {1};
  c.output_elements = {1};
  CHECK_THROWS_WITH_AS((void)RunKernel(c, DType::kFp32),
                       "the data: got a label 3, expected less than the number of classes, 3",
                       InputError);
}

TEST_CASE("HostKernels.Mul") {
  for (const DType dtype : kAllDTypes) {
    const Tolerance tolerance{.absolute = 200 * kU, .relative = 4 * kU};
    CheckKernel(
        ElementCase(OpKind::kMul, 3, 5, 2), dtype,
        [](const auto& in, const auto&) {
          Numbers y = in[0];
          for (std::size_t i = 0; i < y.size(); ++i) {
            y[i] *= in[1][i];
          }
          return std::vector<Numbers>{y};
        },
        tolerance);
    // Squeeze and excitation: (channels 3, 4 pixels) times (channels 3).
    KernelCase c = ElementCase(OpKind::kMul, 4, 3, 2);
    c.inputs[1].resize(2 * 3);
    CheckKernel(
        c, dtype,
        [](const auto& in, const auto&) {
          Numbers y = in[0];
          for (std::size_t i = 0; i < y.size(); ++i) {
            y[i] *= in[1][i / 4];
          }
          return std::vector<Numbers>{y};
        },
        tolerance);
  }
}

TEST_CASE("HostKernels.Scale") {
  for (const DType dtype : kAllDTypes) {
    KernelCase c = ElementCase(OpKind::kScale, 3, 5, 1);
    c.spec.factor = 0.3;
    CheckKernel(c, dtype,
                [](const auto& in, const auto&) {
                  Numbers y = in[0];
                  for (double& v : y) {
                    v *= 0.3;
                  }
                  return std::vector<Numbers>{y};
                },
                {.absolute = 4 * kU, .relative = 4 * kU});
  }
}

TEST_CASE("HostKernels.ConcatAndSelect") {
  for (const DType dtype : kAllDTypes) {
    // Samples of one class token and two parts of 2 and 1 rows of 3 features.
    KernelCase c = MakeCase({.kind = OpKind::kConcat, .rows = 4, .in = 3}, 2);
    c.inputs = {Normal(2 * 2 * 3, 1), Normal(2 * 1 * 3, 2)};
    c.params = {Normal(3, 3)};
    c.output_elements = {2 * 4 * 3};
    CheckKernel(c, dtype,
                [](const auto& in, const auto& params) {
                  Numbers y;
                  for (std::size_t sample = 0; sample < 2; ++sample) {
                    y.insert(y.end(), params[0].begin(), params[0].end());
                    for (std::size_t part = 0; part < 2; ++part) {
                      const std::size_t n = in[part].size() / 2;
                      for (std::size_t i = 0; i < n; ++i) {
                        y.push_back(in[part][sample * n + i]);
                      }
                    }
                  }
                  return std::vector<Numbers>{y};
                },
                {.absolute = 8 * kU, .relative = 0.0});
    c = MakeCase({.kind = OpKind::kSelect, .rows = 2, .in = 3}, 2);
    c.inputs = {Normal(2 * 5 * 3, 1)};
    c.output_elements = {2 * 2 * 3};
    CheckKernel(c, dtype,
                [](const auto& in, const auto&) {
                  Numbers y(in[0].begin(), in[0].begin() + 6);
                  y.insert(y.end(), in[0].begin() + 15, in[0].begin() + 21);
                  return std::vector<Numbers>{y};
                },
                {});
  }
}

TEST_CASE("HostKernels.LogSoftmaxAndNll") {
  for (const DType dtype : kAllDTypes) {
    KernelCase c = ElementCase(OpKind::kLogSoftmax, 3, 10, 1);
    CheckKernel(
        c, dtype,
        [](const auto& in, const auto&) {
          Numbers y = in[0];
          for (std::size_t r = 0; r < 6; ++r) {
            double sum = 0.0;
            for (std::size_t i = 0; i < 10; ++i) {
              sum += std::exp(y[r * 10 + i]);
            }
            for (std::size_t i = 0; i < 10; ++i) {
              y[r * 10 + i] -= std::log(sum);
            }
          }
          return std::vector<Numbers>{y};
        },
        {.absolute = 64 * kU, .relative = 16 * kU},
        // exp of a rounded log-probability: e^y (|y| u) <= u / e, times a row's sum of gradients.
        dtype == DType::kFp32 ? 0.0 : (dtype == DType::kBf16 ? 0x1p-5 : 0x1p-8));
    for (const LossReduction reduction : {LossReduction::kMean, LossReduction::kSum}) {
      c = MakeCase({.kind = OpKind::kNllLoss, .rows = 3, .in = 10}, 2);
      c.inputs = {Normal(60, 1), Integers(6, 10, 2)};
      c.inputs[1][4] = -100.0;
      c.index_inputs = {1};
      c.output_elements = {1};
      c.reduction = reduction;
      CheckKernel(
          c, dtype,
          [reduction](const auto& in, const auto&) {
            double loss = 0.0;
            for (std::size_t r = 0; r < 6; ++r) {
              loss -= in[1][r] < 0 ? 0.0 : in[0][r * 10 + static_cast<std::size_t>(in[1][r])];
            }
            return std::vector<Numbers>{{reduction == LossReduction::kMean ? loss / 5 : loss}};
          },
          {.absolute = 32 * kU, .relative = 8 * kU});
    }
  }
}

// Random123's known answers for Philox4x32-10 (kat_vectors of its distribution).
TEST_CASE("Philox.KnownAnswers") {
  using Words = std::array<std::uint32_t, 4>;
  CHECK(Philox({0, 0, 0, 0}, {0, 0}) == Words{0x6627e8d5, 0xe169c58d, 0xbc57ac4c, 0x9b00dbd8});
  CHECK(Philox({0xffffffff, 0xffffffff, 0xffffffff, 0xffffffff}, {0xffffffff, 0xffffffff}) ==
        Words{0x408f276d, 0x41c83b0e, 0xa20bc7c6, 0x6d5451fd});
  CHECK(Philox({0x243f6a88, 0x85a308d3, 0x13198a2e, 0x03707344}, {0xa4093822, 0x299f31d0}) ==
        Words{0xd16cfe09, 0x94fdcceb, 0x5001e420, 0x24126ea1});
}

TEST_CASE("HostKernels.Dropout") {
  for (const DType dtype : kAllDTypes) {
    KernelCase c = ElementCase(OpKind::kDropout, 3, 700, 1);
    c.spec.dropout_p = 0.25;
    c.inputs[0].assign(c.inputs[0].size(), 1.0);
    c.dropout = {.seed = 7, .step = 3, .op = 5, .first_sample = 10};
    const KernelRun run = RunKernel(c, dtype);
    std::int64_t kept = 0;
    float scale = 4.0F / 3.0F;
    const double u = dtype == DType::kFp32 ? kU : (dtype == DType::kBf16 ? 0x1p-8 : 0x1p-11);
    for (std::size_t i = 0; i < run.outputs[0].size(); ++i) {
      const double y = run.outputs[0][i];
      CHECK((y == 0.0 || std::fabs(y - static_cast<double>(scale)) <= 4.0 / 3.0 * u));
      kept += y != 0.0 ? 1 : 0;
      // Backward draws the same mask.
      CHECK((run.input_grads[0][i] == 0.0) == (y == 0.0 || run.output_grads[0][i] == 0.0));
    }
    // 4200 draws of probability 3/4: four deviations of sqrt(4200 * 3/16) = 28.
    CHECK(std::abs(kept - 3150) <= 112);
    c.is_training = false;
    CHECK(RunKernel(c, dtype).outputs[0] == c.inputs[0]);
  }
}

TEST_CASE("HostKernels.DropoutDependsOnTheSampleNotOnTheBatch") {
  KernelCase c = ElementCase(OpKind::kDropout, 3, 7, 1);
  c.spec.dropout_p = 0.5;
  c.inputs[0].assign(c.inputs[0].size(), 1.0);
  c.dropout = {.seed = 7, .step = 3, .op = 5, .first_sample = 10};
  const Numbers both = RunKernel(c, DType::kFp32).outputs[0];
  c.batch = 1;
  c.inputs[0].resize(21);
  c.output_elements = {21};
  Numbers apart = RunKernel(c, DType::kFp32).outputs[0];
  c.dropout.first_sample = 11;
  const Numbers second = RunKernel(c, DType::kFp32).outputs[0];
  CHECK(apart != second);
  apart.insert(apart.end(), second.begin(), second.end());
  CHECK(apart == both);
  for (const auto& change :
       {DropoutKey{8, 3, 5, 11}, DropoutKey{7, 4, 5, 11}, DropoutKey{7, 3, 6, 11}}) {
    c.dropout = change;
    CHECK(RunKernel(c, DType::kFp32).outputs[0] != second);
  }
}

// With v the identity, the output of attention is its matrix of dropped probabilities: each is 0 or
// 4/3 of the plain one. With the mask known, gradients follow by finite differences.
TEST_CASE("HostKernels.AttentionDropout") {
  constexpr std::int64_t kTokens = 6;
  KernelCase c = MakeCase({.kind = OpKind::kAttention,
                           .rows = kTokens,
                           .heads = 1,
                           .kv_heads = 1,
                           .head_dim = kTokens,
                           .value_dim = kTokens,
                           .seq_q = kTokens,
                           .seq_k = kTokens},
                          1);
  c.inputs = {Normal(36, 1), Normal(36, 2), Numbers(36, 0.0)};
  for (std::size_t i = 0; i < 6; ++i) {
    c.inputs[2][i * 6 + i] = 1.0;
  }
  c.output_elements = {36};
  c.dropout = {.seed = 1, .step = 2, .op = 3, .first_sample = 4};
  const Numbers plain = RunKernel(c, DType::kFp32).outputs[0];
  c.spec.dropout_p = 0.25;
  const Numbers dropped = RunKernel(c, DType::kFp32).outputs[0];
  Numbers mask(36, 0.0);
  std::int64_t zeros = 0;
  for (std::size_t i = 0; i < 36; ++i) {
    if (dropped[i] == 0.0) {
      ++zeros;
      continue;
    }
    mask[i] = 4.0 / 3.0;
    CHECK(dropped[i] == doctest::Approx(plain[i] * 4.0 / 3.0).epsilon(1e-5));
  }
  CHECK(zeros > 0);
  CHECK(zeros < 36);
  c.inputs[2] = Normal(36, 3);
  CheckKernel(c, DType::kFp32,
              [&mask](const auto& in, const auto&) {
                Numbers y(36, 0.0);
                for (std::size_t i = 0; i < 6; ++i) {
                  Numbers p(6);
                  double sum = 0.0;
                  for (std::size_t j = 0; j < 6; ++j) {
                    double score = 0.0;
                    for (std::size_t d = 0; d < 6; ++d) {
                      score += in[0][i * 6 + d] * in[1][j * 6 + d];
                    }
                    p[j] = std::exp(score / std::sqrt(6.0));
                    sum += p[j];
                  }
                  for (std::size_t j = 0; j < 6; ++j) {
                    for (std::size_t d = 0; d < 6; ++d) {
                      y[i * 6 + d] += p[j] / sum * mask[i * 6 + j] * in[2][j * 6 + d];
                    }
                  }
                }
                return std::vector<Numbers>{y};
              },
              {.absolute = 2000 * kU, .relative = 100 * kU});
}

TEST_CASE("HostKernelProblem.NamesWhatTheHostCannotRun") {
  const KernelSetOptions& host = FindKernelSet("shardwright-host", "test");
  OpSpec rope{.kind = OpKind::kRope, .rope = {.dim = 4, .theta = 1e4}};
  CHECK(HostKernelProblem(rope, DType::kBf16, host).empty());
  rope.rope.scaling = RopeScaling::kOther;
  CHECK(HostKernelProblem(rope, DType::kBf16, host) ==
        "the model's rope_scaling rule is not known; known are linear and llama3");
  CHECK(HostKernelProblem({.kind = OpKind::kAdd}, DType::kFp8, host) ==
        "the host computes in fp32, bf16 or fp16 only");
  CHECK(HostKernelProblem({.kind = OpKind::kAdd}, DType::kFp32,
                          FindKernelSet("torch-eager", "test")) ==
        "the plan's kernel set is torch-eager; the host runs shardwright-host only (its kernels "
        "keep and need other memory)");
}

}  // namespace shardwright::testing
