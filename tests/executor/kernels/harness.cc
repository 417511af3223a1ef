#include "tests/executor/kernels/harness.h"

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstring>
#include <limits>
#include <random>
#include <string>

#include <doctest/doctest.h>

#include "core/error.h"
#include "executor/half.h"

namespace shardwright::testing {
namespace {

constexpr std::size_t kGuard = 64;
constexpr auto kGuardByte = std::byte{0xA5};
constexpr auto kPoison = std::byte{0xFF};  // NaN in every floating-point format

// Memory between guards, 64-byte aligned plus `shift`, poisoned.
class Guarded {
 public:
  Guarded(std::size_t bytes, std::size_t shift = 0)
      : bytes_(bytes), memory_(bytes + 2 * kGuard + 64 + shift, kGuardByte) {
    const auto address = reinterpret_cast<std::uintptr_t>(memory_.data());
    offset_ = (64 - address % 64) % 64 + kGuard + shift;
    std::fill_n(data(), bytes_, kPoison);
  }

  [[nodiscard]] std::byte* data() { return memory_.data() + offset_; }
  [[nodiscard]] std::span<std::byte> span() { return {data(), bytes_}; }
  [[nodiscard]] bool Intact() const {
    const auto guards = [&](std::size_t begin, std::size_t end) {
      return std::all_of(memory_.begin() + static_cast<std::ptrdiff_t>(begin),
                         memory_.begin() + static_cast<std::ptrdiff_t>(end),
                         [](std::byte b) { return b == kGuardByte; });
    };
    return guards(0, offset_) && guards(offset_ + bytes_, memory_.size());
  }

 private:
  std::size_t bytes_;
  std::size_t offset_ = 0;
  std::vector<std::byte> memory_;
};

// A tensor of a kernel call.
class TensorMemory {
 public:
  TensorMemory(std::int64_t elements, DType dtype, std::size_t shift)
      : elements_(elements),
        dtype_(dtype),
        memory_(static_cast<std::size_t>(elements * SizeOf(dtype)), shift) {}
  TensorMemory(const Numbers& values, DType dtype, std::size_t shift)
      : TensorMemory(static_cast<std::int64_t>(values.size()), dtype, shift) {
    for (std::size_t i = 0; i < values.size(); ++i) {
      Set(i, values[i]);
    }
    original_.assign(memory_.span().begin(), memory_.span().end());
  }

  void Set(std::size_t i, double value) {
    if (dtype_ == DType::kInt64) {
      const auto integer = static_cast<std::int64_t>(value);
      std::memcpy(memory_.data() + i * 8, &integer, 8);
    } else {
      StoreFloat(dtype_, memory_.data(), static_cast<std::int64_t>(i), static_cast<float>(value));
    }
  }

  [[nodiscard]] Numbers Read() {
    Numbers values;
    for (std::int64_t i = 0; i < elements_; ++i) {
      values.push_back(static_cast<double>(LoadFloat(dtype_, memory_.data(), i)));
    }
    return values;
  }

  [[nodiscard]] ConstView const_view(bool present = true) {
    return {present ? memory_.data() : nullptr, dtype_, elements_};
  }
  [[nodiscard]] View view(bool present = true) {
    return {present ? memory_.data() : nullptr, dtype_, elements_};
  }
  [[nodiscard]] bool Intact() const { return memory_.Intact(); }
  [[nodiscard]] bool Unchanged() {
    return original_.empty() || std::equal(original_.begin(), original_.end(), memory_.data());
  }
  void Append(std::vector<std::uint8_t>* bits) {
    for (const std::byte b : memory_.span()) {
      bits->push_back(static_cast<std::uint8_t>(b));
    }
  }

 private:
  std::int64_t elements_;
  DType dtype_;
  Guarded memory_;
  std::vector<std::byte> original_;
};

bool IsIndex(const KernelCase& c, std::size_t input) {
  return std::find(c.index_inputs.begin(), c.index_inputs.end(),
                   static_cast<std::int64_t>(input)) != c.index_inputs.end();
}

bool IsLoss(const KernelCase& c) {
  return c.spec.kind == OpKind::kNllLoss || c.spec.kind == OpKind::kCrossEntropy;
}

// All memory of one forward and one backward call.
struct Memory {
  std::vector<TensorMemory> inputs, params, outputs, output_grads, input_grads, param_grads;
};

Memory MakeMemory(const KernelCase& c, DType compute, const std::vector<Numbers>& output_grads) {
  Memory m;
  for (std::size_t i = 0; i < c.inputs.size(); ++i) {
    m.inputs.emplace_back(c.inputs[i], IsIndex(c, i) ? DType::kInt64 : compute,
                          IsIndex(c, i) ? 0 : c.shift);
    m.input_grads.emplace_back(static_cast<std::int64_t>(c.inputs[i].size()), compute, c.shift);
  }
  for (const Numbers& param : c.params) {
    m.params.emplace_back(param, compute, c.shift);
    m.param_grads.emplace_back(c.accumulate ? Numbers(param.size(), 1.0) : Numbers(param.size()),
                               c.grad_dtype, c.shift);
  }
  for (std::size_t i = 0; i < c.output_elements.size(); ++i) {
    m.outputs.emplace_back(c.output_elements[i], IsLoss(c) ? DType::kFp32 : compute, c.shift);
    m.output_grads.emplace_back(output_grads[i], compute, c.shift);
  }
  return m;
}

ModelOpCall BaseCall(const KernelCase& c, DType compute) {
  ModelOpCall call;
  call.spec = &c.spec;
  call.options = &c.options;
  call.batch = c.batch;
  call.compute = compute;
  call.is_training = c.is_training;
  call.dropout = c.dropout;
  call.reduction = c.reduction;
  return call;
}

void RunForward(const KernelCase& c, DType compute, Memory& m, std::span<std::byte> saved,
                const OpKernels& kernels, std::vector<float>* buffers) {
  ModelOpCall call = BaseCall(c, compute);
  for (TensorMemory& t : m.inputs) {
    call.inputs.push_back(t.const_view());
  }
  for (TensorMemory& t : m.params) {
    call.params.push_back(t.const_view());
  }
  for (TensorMemory& t : m.outputs) {
    call.outputs.push_back(t.view());
  }
  call.saved = saved;
  call.buffers = buffers->empty() ? nullptr : buffers->data();
  Guarded workspace(static_cast<std::size_t>(kernels.forward_workspace.value));
  call.workspace = workspace.span();
  SubjectUnderTest().run(call, /*is_backward=*/false);
  CHECK(workspace.Intact());
}

void RunBackward(const KernelCase& c, DType compute, Memory& m, std::span<std::byte> saved,
                 const OpKernels& kernels, std::vector<float>* buffers) {
  ModelOpCall call = BaseCall(c, compute);
  for (std::size_t i = 0; i < m.inputs.size(); ++i) {
    call.inputs.push_back(m.inputs[i].const_view(((kernels.saves_input >> i) & 1U) != 0));
    call.input_grads.push_back(m.input_grads[i].view(!IsIndex(c, i)));
  }
  for (std::size_t i = 0; i < m.params.size(); ++i) {
    call.params.push_back(m.params[i].const_view());
    call.param_grads.push_back({m.param_grads[i].view(), c.accumulate});
  }
  for (std::size_t i = 0; i < m.outputs.size(); ++i) {
    call.outputs.push_back(m.outputs[i].view(((kernels.saves_output >> i) & 1U) != 0));
    if (!IsLoss(c)) {
      call.output_grads.push_back(m.output_grads[i].const_view());
    }
  }
  call.saved = saved;
  call.buffers = buffers->empty() ? nullptr : buffers->data();
  Guarded workspace(static_cast<std::size_t>(kernels.backward_workspace.value));
  call.workspace = workspace.span();
  SubjectUnderTest().run(call, /*is_backward=*/true);
  CHECK(workspace.Intact());
}

// sum over outputs of <output grads, f>.
double Objective(const Oracle& oracle, const std::vector<Numbers>& inputs,
                 const std::vector<Numbers>& params, const std::vector<Numbers>& grads) {
  const std::vector<Numbers> outputs = oracle(inputs, params);
  double sum = 0.0;
  for (std::size_t i = 0; i < outputs.size(); ++i) {
    for (std::size_t j = 0; j < outputs[i].size(); ++j) {
      sum += grads[i][j] * outputs[i][j];
    }
  }
  return sum;
}

// 2^-p for a significand of p bits: 24, 8, 11.
double UnitRoundoff(DType dtype) {
  return dtype == DType::kFp32 ? 0x1p-24 : (dtype == DType::kBf16 ? 0x1p-8 : 0x1p-11);
}

// Smallest absolute error of a rounding: half the smallest subnormal number.
double Underflow(DType dtype) {
  return dtype == DType::kFp16 ? 0x1p-25 : 0.0;
}

void CheckNumbers(const Numbers& actual, const Numbers& exact, const Tolerance& t, DType dtype,
                  const std::string& what) {
  REQUIRE(actual.size() == exact.size());
  double worst = 0.0;
  std::size_t where = 0;
  const double rounding = dtype == DType::kFp32 ? 0.0 : UnitRoundoff(dtype);
  for (std::size_t i = 0; i < actual.size(); ++i) {
    const double bound =
        t.absolute + Underflow(dtype) + (t.relative + rounding) * std::fabs(exact[i]);
    const double error = std::fabs(actual[i] - exact[i]);
    const double ratio = error == 0.0 ? 0.0 : error / bound;
    if (!(ratio <= worst)) {
      worst = ratio;
      where = i;
    }
  }
  INFO(what << ": element " << where << " is " << actual[where] << ", exact " << exact[where]);
  CHECK(worst <= 1.0);
}

constexpr double kStep = 1e-5;  // of finite differences: their error is about 1e-10 in fp64
constexpr std::size_t kElementLimit = 160;
constexpr int kDirections = 3;

struct Gradient {
  Numbers values;
  double base = 0.0;  // what was there before, which the gradient was added to
  DType dtype = DType::kFp32;
};

// One tensor's gradient against central differences of the oracle in that tensor.
void CheckGradient(const std::function<double(const Numbers&)>& objective, const Numbers& at,
                   const Gradient& gradient, const Tolerance& t, const std::string& what) {
  const Numbers& actual = gradient.values;
  const DType dtype = gradient.dtype;
  const auto slope = [&](const Numbers& direction) {
    Numbers plus = at;
    Numbers minus = at;
    for (std::size_t i = 0; i < at.size(); ++i) {
      plus[i] += kStep * direction[i];
      minus[i] -= kStep * direction[i];
    }
    return (objective(plus) - objective(minus)) / (2.0 * kStep);
  };
  constexpr double kDifferenceError = 1e-7;
  if (at.size() <= kElementLimit) {
    Numbers exact(at.size());
    for (std::size_t i = 0; i < at.size(); ++i) {
      Numbers direction(at.size(), 0.0);
      direction[i] = 1.0;
      exact[i] = gradient.base + slope(direction);
    }
    CheckNumbers(actual, exact, {t.absolute + kDifferenceError, t.relative}, dtype, what);
    return;
  }
  for (int k = 0; k < kDirections; ++k) {
    const Numbers direction =
        Normal(static_cast<std::int64_t>(at.size()), 90 + static_cast<std::uint64_t>(k));
    double projected = 0.0;
    double bound = 0.0;  // of the sum of all elements' errors, as independent ones
    const double relative = t.relative + (dtype == DType::kFp32 ? 0.0 : UnitRoundoff(dtype));
    for (std::size_t i = 0; i < at.size(); ++i) {
      projected += (actual[i] - gradient.base) * direction[i];
      const double error = (t.absolute + relative * std::fabs(actual[i])) * direction[i];
      bound += error * error;
    }
    INFO(what << ", direction " << k);
    const double exact = slope(direction);
    CHECK(std::fabs(projected - exact) <=
          4.0 * std::sqrt(bound) + kDifferenceError * static_cast<double>(at.size()));
  }
}

}  // namespace

KernelCase MakeCase(const OpSpec& spec, std::int64_t batch) {
  KernelCase c;
  c.spec = spec;
  c.batch = batch;
  c.options = FindKernelSet(SubjectUnderTest().kernel_set, "test");
  return c;
}

KernelRun RunKernel(const KernelCase& c, DType compute) {
  std::vector<Numbers> output_grads;
  for (std::size_t i = 0; i < c.output_elements.size(); ++i) {
    Numbers grad = IsLoss(c) ? Numbers(1, 1.0) : Normal(c.output_elements[i], 77 + i);
    for (double& g : grad) {
      float stored = 0.0F;
      StoreFloat(compute, &stored, 0, static_cast<float>(g));
      g = static_cast<double>(LoadFloat(compute, &stored, 0));
    }
    output_grads.push_back(std::move(grad));
  }
  const OpKernels kernels = LowerOp(c.spec, c.batch, compute, c.options);
  Memory m = MakeMemory(c, compute, output_grads);
  Guarded saved(static_cast<std::size_t>(kernels.extra_saved.value));
  KernelRun run;
  run.buffers = c.buffers;
  RunForward(c, compute, m, saved.span(), kernels, &run.buffers);
  std::vector<float> buffers = run.buffers;
  RunBackward(c, compute, m, saved.span(), kernels, &buffers);
  CHECK(saved.Intact());
  for (auto* list : {&m.inputs, &m.params, &m.output_grads}) {
    for (TensorMemory& t : *list) {
      CHECK(t.Unchanged());
    }
  }
  for (auto* list : {&m.inputs, &m.params, &m.outputs, &m.input_grads, &m.param_grads}) {
    for (const TensorMemory& t : *list) {
      CHECK(t.Intact());
    }
  }
  run.output_grads = std::move(output_grads);
  for (TensorMemory& t : m.outputs) {
    run.outputs.push_back(t.Read());
    t.Append(&run.bits);
  }
  for (std::size_t i = 0; i < m.inputs.size(); ++i) {
    run.input_grads.push_back(IsIndex(c, i) ? Numbers() : m.input_grads[i].Read());
    m.input_grads[i].Append(&run.bits);
  }
  for (TensorMemory& t : m.param_grads) {
    run.param_grads.push_back(t.Read());
    t.Append(&run.bits);
  }
  return run;
}

KernelCase Rounded(const KernelCase& c, DType compute) {
  KernelCase rounded = c;
  const auto round = [compute](Numbers& values) {
    for (double& v : values) {
      float stored = 0.0F;
      StoreFloat(compute, &stored, 0, static_cast<float>(v));
      v = static_cast<double>(LoadFloat(compute, &stored, 0));
    }
  };
  for (std::size_t i = 0; i < rounded.inputs.size(); ++i) {
    if (!IsIndex(c, i)) {
      round(rounded.inputs[i]);
    }
  }
  for (Numbers& param : rounded.params) {
    round(param);
  }
  return rounded;
}

void CheckKernel(const KernelCase& c, DType compute, const Oracle& oracle,
                 const Tolerance& fp32_tolerance, double kept_error) {
  Tolerance tolerance = fp32_tolerance;
  if (c.spec.kind == OpKind::kAttention && compute != DType::kFp32) {
    // Sums of a few numbers of size one, each with a factor that was rounded.
    tolerance.absolute += 4.0 * SubjectUnderTest().inner_rounding;
  }
  const KernelCase rounded = Rounded(c, compute);
  const KernelRun run = RunKernel(rounded, compute);
  const std::vector<Numbers> exact = oracle(rounded.inputs, rounded.params);
  const DType output_dtype = IsLoss(c) ? DType::kFp32 : compute;
  for (std::size_t i = 0; i < exact.size(); ++i) {
    CheckNumbers(run.outputs[i], exact[i], tolerance, output_dtype, "output " + std::to_string(i));
  }
  Tolerance gradient = tolerance;
  gradient.absolute += kept_error;
  for (std::size_t i = 0; i < rounded.inputs.size(); ++i) {
    if (IsIndex(c, i)) {
      continue;
    }
    const auto objective = [&](const Numbers& x) {
      std::vector<Numbers> inputs = rounded.inputs;
      inputs[i] = x;
      return Objective(oracle, inputs, rounded.params, run.output_grads);
    };
    CheckGradient(objective, rounded.inputs[i], {run.input_grads[i], 0.0, compute}, gradient,
                  "gradient of input " + std::to_string(i));
  }
  for (std::size_t i = 0; i < rounded.params.size(); ++i) {
    const auto objective = [&](const Numbers& x) {
      std::vector<Numbers> params = rounded.params;
      params[i] = x;
      return Objective(oracle, rounded.inputs, params, run.output_grads);
    };
    CheckGradient(objective, rounded.params[i],
                  {run.param_grads[i], c.accumulate ? 1.0 : 0.0, c.grad_dtype}, gradient,
                  "gradient of parameter " + std::to_string(i));
  }
}

Numbers Normal(std::int64_t n, std::uint64_t seed, double deviation) {
  std::mt19937_64 generator(seed);
  std::normal_distribution<double> distribution(0.0, deviation);
  Numbers values(static_cast<std::size_t>(n));
  for (double& v : values) {
    v = distribution(generator);
  }
  return values;
}

Numbers Integers(std::int64_t n, std::int64_t limit, std::uint64_t seed) {
  std::mt19937_64 generator(seed);
  Numbers values(static_cast<std::size_t>(n));
  for (double& v : values) {
    v = static_cast<double>(generator() % static_cast<std::uint64_t>(limit));
  }
  return values;
}

}  // namespace shardwright::testing
