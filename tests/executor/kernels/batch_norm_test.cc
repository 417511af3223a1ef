// Batch norm against fp64 loops and finite differences, and of several ranks against one.

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <vector>

#include <doctest/doctest.h>

#include "tests/executor/kernels/harness.h"

namespace shardwright::testing {
namespace {

// Of images of `channels` planes.
Oracle BatchNormOracle(std::size_t batch, std::size_t channels, std::size_t plane) {
  return [=](const std::vector<Numbers>& in, const std::vector<Numbers>& params) {
    Numbers y = in[0];
    const auto n = static_cast<double>(batch * plane);
    for (std::size_t channel = 0; channel < channels; ++channel) {
      double mean = 0.0;
      double square = 0.0;
      for (int pass = 0; pass < 3; ++pass) {
        for (std::size_t b = 0; b < batch; ++b) {
          for (std::size_t p = 0; p < plane; ++p) {
            double& v = y[(b * channels + channel) * plane + p];
            if (pass == 0) {
              mean += v / n;
            } else if (pass == 1) {
              square += (v - mean) * (v - mean) / n;
            } else {
              v = (v - mean) / std::sqrt(square + 1e-5) * params[0][channel] + params[1][channel];
            }
          }
        }
      }
    }
    return std::vector<Numbers>{y};
  };
}

}  // namespace

TEST_CASE("HostKernels.BatchNorm") {
  const Oracle oracle = BatchNormOracle(2, 3, 20);
  for (const DType dtype : kAllDTypes) {
    KernelCase c = MakeCase({.kind = OpKind::kBatchNorm,
                             .in = 3,
                             .has_bias = true,
                             .height = 4,
                             .width = 5,
                             .epsilon = 1e-5},
                            2);
    c.inputs = {Normal(2 * 3 * 20, 1)};
    c.params = {Normal(3, 2), Normal(3, 3)};
    c.output_elements = {2 * 3 * 20};
    CheckKernel(c, dtype, oracle, {.absolute = 200 * kU, .relative = 50 * kU});

    // Running statistics: 0.9 of the old and 0.1 of the new, the variance divided by n - 1.
    c.buffers = {1.0F, 2.0F, 3.0F, 4.0F, 5.0F, 6.0F, 0.0F};
    const KernelRun run = RunKernel(c, DType::kFp32);
    double mean = 0.0;
    double square = 0.0;
    for (std::size_t b = 0; b < 2; ++b) {
      for (std::size_t p = 0; p < 20; ++p) {
        mean += c.inputs[0][(b * 3 + 1) * 20 + p] / 40.0;
      }
    }
    for (std::size_t b = 0; b < 2; ++b) {
      for (std::size_t p = 0; p < 20; ++p) {
        square += std::pow(c.inputs[0][(b * 3 + 1) * 20 + p] - mean, 2) / 39.0;
      }
    }
    CHECK(static_cast<double>(run.buffers[1]) == doctest::Approx(1.8 + 0.1 * mean).epsilon(1e-6));
    CHECK(static_cast<double>(run.buffers[4]) == doctest::Approx(4.5 + 0.1 * square).epsilon(1e-6));
    // In evaluation they replace the batch's.
    c.is_training = false;
    const KernelRun eval = RunKernel(c, DType::kFp32);
    CHECK(eval.buffers == c.buffers);
    CHECK(eval.outputs[0][0] ==
          doctest::Approx((c.inputs[0][0] - 1.0) / std::sqrt(4.0 + 1e-5) * c.params[0][0] +
                          c.params[1][0])
              .epsilon(1e-5));
  }
}

// Planes of more elements than threads take at once.
TEST_CASE("HostKernels.BatchNormAcrossBlocks") {
  KernelCase c = MakeCase({.kind = OpKind::kBatchNorm,
                           .in = 2,
                           .has_bias = true,
                           .height = 71,
                           .width = 303,
                           .epsilon = 1e-5},
                          2);
  constexpr std::int64_t kPlane = std::int64_t{71} * 303;
  c.inputs = {Normal(2 * 2 * kPlane, 1)};
  c.params = {Normal(2, 2), Normal(2, 3)};
  c.output_elements = {2 * 2 * kPlane};
  for (const DType dtype : {DType::kFp32, DType::kBf16}) {
    CheckKernel(c, dtype, BatchNormOracle(2, 2, kPlane),
                {.absolute = 2 * kPlane * 8 * kU, .relative = 50 * kU});
  }
}

namespace {

using Floats = std::vector<float>;

template <class T>
ConstView ReadOnly(const std::vector<T>& numbers) {
  return {numbers.data(), DType::kFp32, static_cast<std::int64_t>(numbers.size())};
}
View Writable(Floats& numbers) {
  return {numbers.data(), DType::kFp32, static_cast<std::int64_t>(numbers.size())};
}
std::span<std::byte> BytesOf(Floats& numbers) {
  return std::as_writable_bytes(std::span<float>(numbers));
}

// What one of several ranks holds of a synchronised batch norm.
struct NormRank {
  std::int64_t batch = 0;
  Floats x, dy, y, dx, exchange, running;
  Floats saved = Floats(7, NAN), weight_grad = Floats(3, NAN), bias_grad = Floats(3, NAN);
};

void RunPart(const OpSpec& spec, const KernelCase& c, const std::vector<Floats>& params,
             NormRank& r, OpPart part, bool is_backward) {
  ModelOpCall call;
  call.spec = &spec;
  call.options = &c.options;
  call.batch = r.batch;
  call.part = part;
  call.inputs = {ReadOnly(r.x)};
  call.params = {ReadOnly(params[0]), ReadOnly(params[1])};
  call.outputs = {part == OpPart::kAfterExchange ? Writable(r.y) : View()};
  call.saved = BytesOf(r.saved);
  call.exchange = BytesOf(r.exchange);
  call.buffers = r.running.data();
  if (is_backward) {
    call.output_grads = {ReadOnly(r.dy)};
    call.input_grads = {part == OpPart::kAfterExchange ? Writable(r.dx) : View()};
    call.param_grads.resize(2);
    if (part == OpPart::kBeforeExchange) {
      call.param_grads[0].view = Writable(r.weight_grad);
      call.param_grads[1].view = Writable(r.bias_grad);
    }
  }
  SubjectUnderTest().run(call, is_backward);
}

Floats Slice(const Numbers& numbers, std::int64_t begin, std::int64_t count) {
  return {numbers.begin() + begin, numbers.begin() + begin + count};
}

void CheckClose(const Floats& actual, const Numbers& whole, std::int64_t begin, double bound) {
  for (std::size_t i = 0; i < actual.size(); ++i) {
    const double expected = whole[S(begin) + i];
    CHECK(std::abs(static_cast<double>(actual[i]) - expected) <=
          bound * std::max(1.0, std::abs(expected)));
  }
}

}  // namespace

// Ranks with batches of 1, 2 and 3 samples, exchanging what they declare, against one rank with all
// six. Each lies within 200 u of the exact numbers (as above), for the mean is some 3, three times
// that.
TEST_CASE("HostKernels.BatchNormOfSeveralRanks") {
  constexpr std::int64_t kSample = 3 * 4 * 5;
  constexpr double kBound = 2 * 600 * kU;
  KernelCase c = MakeCase({.kind = OpKind::kBatchNorm,
                           .in = 3,
                           .has_bias = true,
                           .height = 4,
                           .width = 5,
                           .epsilon = 1e-5},
                          6);
  c.inputs = {Normal(6 * kSample, 1)};
  for (std::size_t i = 0; i < c.inputs[0].size(); ++i) {  // the ranks' means differ, too
    c.inputs[0][i] = static_cast<double>(
        static_cast<float>(c.inputs[0][i] + 3.0 + 0.2 * static_cast<double>(i / kSample)));
  }
  c.params = {Normal(3, 2), Normal(3, 3)};
  c.output_elements = {6 * kSample};
  c.buffers = {1.0F, 2.0F, 3.0F, 4.0F, 5.0F, 6.0F, 0.0F};
  const KernelRun whole = RunKernel(c, DType::kFp32);

  OpSpec spec = c.spec;
  spec.synchronized = true;
  const OpKernels kernels = LowerOp(spec, 1, DType::kFp32, c.options);
  CHECK(kernels.forward_exchange.bytes == Bytes(7 * 4));  // 3 means, 3 sums of squares, a count
  CHECK(kernels.backward_exchange.bytes == Bytes(6 * 4));
  CHECK(kernels.extra_saved == Bytes(7 * 4));
  const std::vector<Floats> params = {Slice(c.params[0], 0, 3), Slice(c.params[1], 0, 3)};
  std::vector<NormRank> ranks;
  Floats gathered;
  std::int64_t begin = 0;
  for (const std::int64_t batch : {1, 2, 3}) {
    NormRank r{.batch = batch,
               .x = Slice(c.inputs[0], begin, batch * kSample),
               .dy = Slice(whole.output_grads[0], begin, batch * kSample),
               .y = Floats(S(batch * kSample), NAN),
               .dx = Floats(S(batch * kSample), NAN),
               .exchange = Floats(7, NAN),
               .running = c.buffers};
    begin += batch * kSample;
    RunPart(spec, c, params, r, OpPart::kBeforeExchange, false);
    gathered.insert(gathered.end(), r.exchange.begin(), r.exchange.end());
    ranks.push_back(std::move(r));
  }
  Floats sums(6, 0.0F);
  Floats param_grads(6, 0.0F);
  for (NormRank& r : ranks) {
    r.exchange = gathered;
    RunPart(spec, c, params, r, OpPart::kAfterExchange, false);
    r.exchange = Floats(6, NAN);
    RunPart(spec, c, params, r, OpPart::kBeforeExchange, true);
    for (std::size_t i = 0; i < 6; ++i) {
      sums[i] += r.exchange[i];
      param_grads[i] += (i < 3 ? r.weight_grad : r.bias_grad)[i % 3];
    }
  }
  begin = 0;
  for (NormRank& r : ranks) {
    r.exchange = sums;
    RunPart(spec, c, params, r, OpPart::kAfterExchange, true);
    CheckClose(r.y, whole.outputs[0], begin, kBound);
    CheckClose(r.dx, whole.input_grads[0], begin, kBound);
    CheckClose(r.running, {whole.buffers.begin(), whole.buffers.end()}, 0, kBound);
    begin += r.batch * kSample;
  }
  CheckClose({param_grads.begin(), param_grads.begin() + 3}, whole.param_grads[0], 0, 60 * kBound);
  CheckClose({param_grads.begin() + 3, param_grads.end()}, whole.param_grads[1], 0, 60 * kBound);
}

}  // namespace shardwright::testing
