// A linear layer that runs the cross-entropy behind it in chunks of rows, against both in fp64.

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstring>
#include <string>
#include <vector>

#include <doctest/doctest.h>

#include "executor/half.h"
#include "tests/executor/kernels/harness.h"

namespace shardwright::testing {
namespace {

// x: (rows, in), weight: (out, in) or transposed, bias: (out), labels below zero do not count.
struct LossCase {
  std::int64_t batch = 1, rows = 1, in = 1, out = 1, chunks = 2;
  bool has_bias = false, transposed = false, accumulate = false;
  LossReduction reduction = LossReduction::kMean;
  DType compute = DType::kFp32;
  double scale = 1.0;

  [[nodiscard]] std::int64_t AllRows() const { return batch * rows; }
};

struct Result {
  double loss = 0.0;
  Numbers dx, dw, db;
};

// Memory of `values` in a dtype, with a guard behind it.
class Memory {
 public:
  Memory(const Numbers& values, DType dtype) : Memory(std::ssize(values), dtype) {
    for (std::int64_t i = 0; i < n_; ++i) {
      if (dtype == DType::kInt64) {
        const auto whole = static_cast<std::int64_t>(values[S(i)]);
        std::memcpy(data() + i * 8, &whole, 8);
      } else {
        StoreFloat(dtype, data(), i, static_cast<float>(values[S(i)]));
      }
    }
  }
  Memory(std::int64_t n, DType dtype)
      : n_(n), dtype_(dtype), bytes_(S(n * SizeOf(dtype)) + 512, std::byte{0xFF}) {}

  [[nodiscard]] std::byte* data() {
    const auto address = reinterpret_cast<std::uintptr_t>(bytes_.data());
    return bytes_.data() + (256 - address % 256) % 256;
  }
  [[nodiscard]] ConstView in() { return {data(), dtype_, n_}; }
  [[nodiscard]] View out() { return {data(), dtype_, n_}; }
  [[nodiscard]] Numbers Read() {
    Numbers all;
    for (std::int64_t i = 0; i < n_; ++i) {
      all.push_back(static_cast<double>(LoadFloat(dtype_, data(), i)));
    }
    return all;
  }
  [[nodiscard]] bool IsGuardIntact() {
    const std::byte* const end = data() + n_ * SizeOf(dtype_);
    return std::all_of(end, end + 128, [](std::byte b) { return b == std::byte{0xFF}; });
  }

 private:
  std::int64_t n_;
  DType dtype_;
  std::vector<std::byte> bytes_;
};

Numbers RoundedTo(const Numbers& values, DType dtype) {
  return Memory(values, dtype).Read();
}

struct Operands {
  Numbers x, weight, bias, labels, first_dw, first_db;
};
Operands OperandsOf(const LossCase& c) {
  Operands o{RoundedTo(Normal(c.AllRows() * c.in, 1), c.compute),
             RoundedTo(Normal(c.in * c.out, 2, 0.2), c.compute),
             RoundedTo(Normal(c.out, 3), c.compute),
             Integers(c.AllRows(), c.out, 4),
             Normal(c.in * c.out, 5),
             Normal(c.out, 6)};
  o.labels[S(c.AllRows() / 2)] = -100.0;
  return o;
}

Result Exact(const LossCase& c, const Operands& o) {
  const auto weight = [&](std::int64_t j, std::int64_t k) {
    return c.transposed ? k * c.out + j : j * c.in + k;
  };
  const auto counted = static_cast<double>(c.AllRows() - 1);
  const double factor = c.reduction == LossReduction::kMean ? 1.0 / counted : 1.0;
  Result r{0.0, Numbers(S(c.AllRows() * c.in)), Numbers(S(c.in * c.out)), Numbers(S(c.out))};
  if (c.accumulate) {
    r.dw = RoundedTo(o.first_dw, DType::kFp32);
    r.db = RoundedTo(o.first_db, DType::kFp32);
  }
  for (std::int64_t row = 0; row < c.AllRows(); ++row) {
    const auto label = static_cast<std::int64_t>(o.labels[S(row)]);
    if (label < 0) {
      continue;
    }
    Numbers logits(S(c.out));
    double sum = 0.0;
    for (std::int64_t j = 0; j < c.out; ++j) {
      logits[S(j)] = c.has_bias ? o.bias[S(j)] : 0.0;
      for (std::int64_t k = 0; k < c.in; ++k) {
        logits[S(j)] += o.x[S(row * c.in + k)] * o.weight[S(weight(j, k))];
      }
      sum += std::exp(logits[S(j)]);
    }
    r.loss += (std::log(sum) - logits[S(label)]) * factor;
    for (std::int64_t j = 0; j < c.out; ++j) {
      const double d = (std::exp(logits[S(j)]) / sum - (j == label ? 1.0 : 0.0)) * factor * c.scale;
      r.db[S(j)] += d;
      for (std::int64_t k = 0; k < c.in; ++k) {
        r.dx[S(row * c.in + k)] += d * o.weight[S(weight(j, k))];
        r.dw[S(weight(j, k))] += d * o.x[S(row * c.in + k)];
      }
    }
  }
  return r;
}

Result Run(const LossCase& c, const Operands& o) {
  const OpSpec linear{.kind = OpKind::kLinear,
                      .rows = c.rows,
                      .in = c.in,
                      .out = c.out,
                      .has_bias = c.has_bias,
                      .transposed = c.transposed};
  const OpSpec loss{.kind = OpKind::kCrossEntropy, .rows = c.rows, .in = c.out};
  KernelSetOptions options = FindKernelSet(SubjectUnderTest().kernel_set, "test");
  options.loss_chunks = c.chunks;
  const OpKernels kernels = LowerLinearLoss(linear, loss, c.batch, c.compute, options);
  CHECK(kernels.forward.empty());
  Memory x(o.x, c.compute), weight(o.weight, c.compute), bias(o.bias, c.compute);
  Memory labels(o.labels, DType::kInt64), value(1, DType::kFp32);
  Memory dx(std::ssize(o.x), c.compute);
  Memory dw(o.first_dw, DType::kFp32), db(o.first_db, DType::kFp32);
  Memory workspace((kernels.backward_workspace.value + 3) / 4, DType::kFp32);
  ModelOpCall call;
  call.spec = &linear;
  call.loss_spec = &loss;
  call.options = &options;
  call.batch = c.batch;
  call.compute = c.compute;
  call.inputs = {x.in(), labels.in()};
  call.params = {weight.in()};
  call.param_grads = {{dw.out(), c.accumulate}};
  if (c.has_bias) {
    call.params.push_back(bias.in());
    call.param_grads.push_back({db.out(), c.accumulate});
  }
  call.outputs = {value.out()};
  call.output_grads.resize(1);
  call.input_grads = {dx.out()};
  call.workspace = {workspace.data(), static_cast<std::size_t>(kernels.backward_workspace.value)};
  call.reduction = c.reduction;
  call.loss_scale = c.scale;
  SubjectUnderTest().run(call, true);
  for (Memory* memory : {&x, &weight, &bias, &labels, &value, &dx, &dw, &db, &workspace}) {
    CHECK(memory->IsGuardIntact());
  }
  return {value.Read()[0], dx.Read(), dw.Read(), c.has_bias ? db.Read() : Numbers{}};
}

void CheckClose(const Numbers& got, const Numbers& expected, double tolerance) {
  REQUIRE(got.size() == expected.size());
  double largest = 0.0;
  for (const double e : expected) {
    largest = std::max(largest, std::abs(e));
  }
  for (std::size_t i = 0; i < got.size(); ++i) {
    CHECK(std::abs(got[i] - expected[i]) <= tolerance * largest);
  }
}

void CheckCase(const LossCase& c) {
  CAPTURE(c.rows);
  CAPTURE(c.chunks);
  CAPTURE(c.compute);
  CAPTURE(c.has_bias);
  CAPTURE(c.transposed);
  const Operands operands = OperandsOf(c);
  Result expected = Exact(c, operands);
  const Result got = Run(c, operands);
  if (!c.has_bias) {
    expected.db.clear();
  }
  // Logits (a few units at most), their gradient and dx are rounded to 16 bits.
  const double tolerance = c.compute == DType::kFp32   ? 64 * kU
                           : c.compute == DType::kBf16 ? 0x1p-6
                                                       : 0x1p-9;
  CHECK(got.loss == doctest::Approx(expected.loss).epsilon(tolerance));
  CheckClose(got.dx, expected.dx, tolerance);
  CheckClose(got.dw, expected.dw, tolerance);
  CheckClose(got.db, expected.db, tolerance);
}

}  // namespace

TEST_CASE("HostKernels.LinearRunsTheLossBehindIt") {
  for (const DType dtype : kAllDTypes) {
    for (const std::int64_t chunks : {2, 3, 4, 10, 1000}) {  // of ten rows
      CheckCase({.batch = 2, .rows = 5, .in = 7, .out = 11, .chunks = chunks, .compute = dtype});
    }
    CheckCase({.batch = 1,
               .rows = 7,
               .in = 33,
               .out = 70,
               .chunks = 3,
               .has_bias = true,
               .accumulate = true,
               .reduction = LossReduction::kSum,
               .compute = dtype,
               .scale = 4.0});
    CheckCase({.batch = 3,
               .rows = 6,
               .in = 8,
               .out = 9,
               .chunks = 4,
               .has_bias = true,
               .transposed = true,
               .compute = dtype});
  }
}

// Several blocks of 256 rows in a chunk of the GPU's sum.
TEST_CASE("HostKernels.LinearRunsTheLossOfManyRows") {
  CheckCase({.batch = 2, .rows = 450, .in = 4, .out = 6, .chunks = 2});
}

}  // namespace shardwright::testing
