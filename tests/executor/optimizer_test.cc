#include "executor/optimizer.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <random>
#include <string>
#include <utility>
#include <vector>

#include <doctest/doctest.h>

#include "core/error.h"
#include "core/json.h"
#include "executor/half.h"

namespace shardwright {
namespace {

// One tensor with its states, updated as one range.
struct Tensor1 {
  OptimizerKind kind = OptimizerKind::kSgd;
  OptimizerOptions options;
  std::vector<float> param = {};
  std::array<std::vector<float>, 2> states = {};
  std::int64_t step = 0;

  void Step(const std::vector<float>& grad) {
    const auto count = static_cast<std::int64_t>(param.size());
    states[0].resize(param.size(), 0.0F);
    states[1].resize(param.size(), 0.0F);
    const OptimizerRange range = {.count = count, .weight_decay = options.weight_decay};
    OptimizerCall call;
    call.spec.kind = kind;
    call.params = param.data();
    call.grads = grad.data();
    call.states = {states[0].data(), states[1].data()};
    call.ranges = {&range, 1};
    call.learning_rate = options.learning_rate;
    call.step = ++step;
    UpdateShard(call, options);
  }
};

TEST_CASE("updates of matrices are refused") {
  CheckUpdates(OptimizerSpec(), DType::kFp32);
  OptimizerSpec soap;
  soap.matrices = MatrixRule::kSoap;
  CHECK_THROWS_WITH_AS(CheckUpdates(soap, DType::kFp32),
                       "plan: job.optimizer.matrices: got \"soap\", expected none, since the "
                       "executor has no such update",
                       InputError);
}

TEST_CASE("sgd and momentum, three steps by hand") {
  // Powers of two, so that fp32 is exact. p = 1, g = 1, -2, 4; lr = 1/4.
  Tensor1 sgd{.kind = OptimizerKind::kSgd, .options = {.learning_rate = 0.25}, .param = {1.0F}};
  sgd.Step({1.0F});
  CHECK(sgd.param[0] == 0.75F);
  sgd.Step({-2.0F});
  CHECK(sgd.param[0] == 1.25F);
  sgd.Step({4.0F});
  CHECK(sgd.param[0] == 0.25F);

  // momentum 1/2: b = 1; b = 1/2 - 2 = -3/2; b = -3/4 + 4 = 13/4.
  Tensor1 momentum{.kind = OptimizerKind::kMomentum,
                   .options = {.learning_rate = 0.25, .momentum = 0.5},
                   .param = {1.0F}};
  momentum.Step({1.0F});
  CHECK(momentum.param[0] == 0.75F);
  momentum.Step({-2.0F});
  CHECK(momentum.states[0][0] == -1.5F);
  CHECK(momentum.param[0] == 1.125F);
  momentum.Step({4.0F});
  CHECK(momentum.states[0][0] == 3.25F);
  CHECK(momentum.param[0] == 0.3125F);

  // Weight decay 1/2 of p = 2 joins the gradient 1: p = 2 - (1 + 1) / 4.
  Tensor1 decayed{.kind = OptimizerKind::kSgd,
                  .options = {.learning_rate = 0.25, .weight_decay = 0.5},
                  .param = {2.0F}};
  decayed.Step({1.0F});
  CHECK(decayed.param[0] == 1.5F);
}

TEST_CASE("adam and adamw, three steps by hand") {
  // A constant gradient g makes both corrected means exact: m^ = g, v^ = g^2 at every step, so each
  // step moves by lr * g / (|g| + eps). AdamW first shrinks by 1 - lr * decay = 0.99.
  Tensor1 adam{.kind = OptimizerKind::kAdam, .options = {.learning_rate = 0.1}, .param = {1.0F}};
  Tensor1 adamw{.kind = OptimizerKind::kAdamW,
                .options = {.learning_rate = 0.1, .weight_decay = 0.1},
                .param = {1.0F}};
  double expected = 1.0, expected_w = 1.0;
  for (int step = 0; step < 3; ++step) {
    adam.Step({-2.0F});
    adamw.Step({-2.0F});
    expected += 0.1;
    expected_w = expected_w * 0.99 + 0.1;
    // At most ten roundings of numbers below 2 (half a unit of 2^-23 each) per step.
    const double bound = (step + 1) * 10 * 0x1p-24;
    CHECK(std::abs(adam.param[0] - expected) <= bound);
    CHECK(std::abs(adamw.param[0] - expected_w) <= bound);
  }
  // m = g (1 - 0.9^3) and v = g^2 (1 - 0.999^3).
  CHECK(std::abs(adam.states[0][0] - -2.0 * 0.271) < 1e-6);
  CHECK(std::abs(adam.states[1][0] - 4.0 * 0.002997001) < 1e-8);
}

TEST_CASE("adadelta, two steps by hand") {
  // rho = 0.9, eps = 1e-6, g = 1: s = 0.1, d = sqrt(1e-6 / (0.1 + 1e-6)) = 0.00316226185;
  // then s = 0.19, a = 0.1 d^2 = 9.99990e-7, d2 = sqrt((a + 1e-6) / (0.19 + 1e-6)).
  Tensor1 t{.kind = OptimizerKind::kAdadelta,
            .options = {.learning_rate = 1.0, .rho = 0.9, .epsilon = 1e-6},
            .param = {0.0F}};
  t.Step({1.0F});
  const double first = std::sqrt(1e-6 / 0.100001);
  CHECK(std::abs(t.param[0] + first) < 1e-8);
  t.Step({1.0F});
  const double second = std::sqrt((0.1 * first * first + 1e-6) / 0.190001);
  CHECK(std::abs(t.param[0] + first + second) < 1e-8);
}

OptimizerKind KindNamed(const std::string& name) {
  if (name == "sgd")
    return OptimizerKind::kSgd;
  if (name == "momentum")
    return OptimizerKind::kMomentum;
  if (name == "adam")
    return OptimizerKind::kAdam;
  if (name == "adamw")
    return OptimizerKind::kAdamW;
  if (name == "lion")
    return OptimizerKind::kLion;
  if (name == "adafactor")
    return OptimizerKind::kAdafactor;
  REQUIRE(name == "adadelta");
  return OptimizerKind::kAdadelta;
}

OptimizerOptions OptionsOf(const JsonValue& arguments) {
  OptimizerOptions options;
  options.momentum = 0.0;
  for (const std::string& key : arguments.Keys()) {
    if (key == "nesterov") {
      options.nesterov = arguments.At(key).AsBool();
      continue;
    }
    const double value = arguments.At(key).AsDouble();
    if (key == "learning_rate")
      options.learning_rate = value;
    else if (key == "weight_decay")
      options.weight_decay = value;
    else if (key == "momentum")
      options.momentum = value;
    else if (key == "dampening")
      options.dampening = value;
    else if (key == "beta1")
      options.beta1 = value;
    else if (key == "beta2")
      options.beta2 = value;
    else if (key == "epsilon")
      options.epsilon = value;
    else if (key == "rho")
      options.rho = value;
    else
      FAIL(key);
  }
  return options;
}

// A tensor of some dtype, from its elements' bits in hexadecimal.
struct Array {
  DType dtype = DType::kFp32;
  std::int64_t count = 0;
  std::vector<std::byte> bytes = {};

  Array(DType type, std::int64_t elements)
      : dtype(type),
        count(elements),
        bytes(static_cast<std::size_t>(elements * SizeOf(type)), std::byte{0}) {}
  Array(DType type, const JsonValue& hex)
      : Array(type, static_cast<std::int64_t>(hex.AsString().size()) / (2 * SizeOf(type))) {
    const std::string digits = hex.AsString();
    const auto width = static_cast<std::size_t>(2 * SizeOf(type));
    for (std::int64_t i = 0; i < count; ++i) {
      const unsigned long bits =
          std::stoul(digits.substr(static_cast<std::size_t>(i) * width, width), nullptr, 16);
      std::memcpy(bytes.data() + i * SizeOf(type), &bits, width / 2);  // little-endian
    }
  }
  [[nodiscard]] double At(std::int64_t i) const { return LoadFloat(dtype, bytes.data(), i); }
};

// The largest distance between two arrays, each divided by `scale` plus the second one's magnitude.
double Distance(const Array& a, const Array& b, double scale) {
  REQUIRE(a.count == b.count);
  double distance = 0.0;
  for (std::int64_t i = 0; i < a.count; ++i) {
    if (a.At(i) != b.At(i)) {
      distance = std::max(distance, std::abs(a.At(i) - b.At(i)) / (scale + std::abs(b.At(i))));
    }
  }
  return distance;
}

// Expected: torch 2.13, bitsandbytes 0.50 and Transformers 5.23, run by
// tests/executor/torch_optimizer.py. PyTorch's fp32 square root on the
// CPU is MKL's, which errs by up to one unit in the last place, 2^-23; ours is correctly rounded.
// In three steps of Adadelta, each with two square roots whose results enter squared, that can grow
// to 3 * 2 * 2 units of a step, which is at most about the learning rate. All else is bit-equal.
TEST_CASE("every optimizer and dtype equals torch.optim") {
  const JsonValue file = JsonValue::ReadFile("data/executor/torch_optimizer.json");
  const JsonValue cases = file.At("cases");
  REQUIRE(cases.size() == 38);
  for (std::size_t c = 0; c < cases.size(); ++c) {
    const JsonValue test = cases[c];
    const std::string name = test.At("name").AsString() + " " + test.At("dtype").AsString();
    CAPTURE(name);
    OptimizerCall call;
    call.spec.kind = KindNamed(test.At("kind").AsString());
    call.dtype = test.At("dtype").AsString() == "fp32"   ? DType::kFp32
                 : test.At("dtype").AsString() == "bf16" ? DType::kBf16
                                                         : DType::kFp16;
    const OptimizerOptions options = OptionsOf(test.At("arguments"));
    Array param(call.dtype, test.At("param"));
    REQUIRE(param.count == 64);
    const bool is_adafactor = call.spec.kind == OptimizerKind::kAdafactor;
    const auto columns = test.Find("columns");
    const std::int64_t width = columns ? columns->AsInt(1, 64) : 0;
    const std::int64_t kept = columns ? param.count / width + width : param.count;
    std::array<Array, 2> states = {Array(call.dtype, kept), Array(call.dtype, kept)};
    const OptimizerRange range = {
        .count = param.count, .weight_decay = options.weight_decay, .columns = width};
    call.params = param.bytes.data();
    call.states = {states[0].bytes.data(), states[1].bytes.data()};
    call.ranges = {&range, 1};
    call.learning_rate = options.learning_rate;
    const bool has_root = call.spec.kind != OptimizerKind::kSgd &&
                          call.spec.kind != OptimizerKind::kMomentum &&
                          call.spec.kind != OptimizerKind::kLion;
    // Adafactor's means are sums in another order: a few units more in each of 20 steps.
    const double tolerance = is_adafactor                             ? 64 * 0x1p-23
                             : has_root && call.dtype == DType::kFp32 ? 12 * 0x1p-23
                                                                      : 0.0;
    const JsonValue steps = test.At("steps");
    for (std::size_t s = 0; s < steps.size(); ++s) {
      CAPTURE(s);
      const Array grad(call.dtype, steps[s].At("grad"));
      call.grads = grad.bytes.data();
      call.step = static_cast<std::int64_t>(s) + 1;
      UpdateShard(call, options);
      CHECK(Distance(param, Array(call.dtype, steps[s].At("param")), options.learning_rate) <=
            tolerance);
    }
    const JsonValue expected_states = test.At("states");
    REQUIRE(expected_states.size() ==
            (is_adafactor ? 1 : OptimizerStateNames(call.spec.kind).size()));
    for (std::size_t k = 0; k < expected_states.size(); ++k) {
      CHECK(Distance(states[k], Array(call.dtype, expected_states[k]), 0.0) <= tolerance);
    }
  }
}

TEST_CASE("the fused update of bf16 parameters rounds only what it stores") {
  // One AdamW step from zero states in fp64: m = 0.1 g, v = 0.001 g^2, so the parameter moves by
  // lr * sign(g) up to eps; bf16 has 8 significant bits. p = 1 - 2^-6 is exact, so is the result.
  std::uint16_t param = FloatToBf16(1.0F);
  const std::uint16_t grad = FloatToBf16(0.3F);
  std::uint16_t mean = 0, square = 0;
  const OptimizerRange range = {.count = 1};
  OptimizerCall call;
  call.spec = {OptimizerKind::kAdamW, OptimizerImpl::kFused, true};
  call.dtype = DType::kBf16;
  call.params = &param;
  call.grads = &grad;
  call.states = {&mean, &square};
  call.ranges = {&range, 1};
  call.learning_rate = 0x1p-6;
  UpdateShard(call, {});
  CHECK(Bf16ToFloat(param) == 1.0F - 0x1p-6F);
  const float g = Bf16ToFloat(grad);
  CHECK(mean == FloatToBf16(0.1F * g));
  CHECK(square == FloatToBf16(0.001F * g * g));
}

TEST_CASE("an element's update does not depend on how the shard is cut") {
  std::mt19937 random(3);
  std::normal_distribution<float> normal;
  constexpr std::size_t kCount = 67;
  std::vector<float> start(kCount), grad(kCount);
  for (std::size_t i = 0; i < kCount; ++i) {
    start[i] = normal(random);
    grad[i] = normal(random);
  }
  for (const OptimizerKind kind :
       {OptimizerKind::kSgd, OptimizerKind::kMomentum, OptimizerKind::kAdam, OptimizerKind::kAdamW,
        OptimizerKind::kAdadelta, OptimizerKind::kLion}) {
    Tensor1 whole{.kind = kind, .options = {.learning_rate = 0.01, .weight_decay = 0.1}};
    whole.param = start;
    whole.Step(grad);
    whole.Step(grad);
    for (std::size_t cut = 1; cut < kCount; cut += 5) {
      Tensor1 left{.kind = kind, .options = whole.options};
      Tensor1 right = left;
      const auto at = static_cast<std::ptrdiff_t>(cut);
      left.param.assign(start.begin(), start.begin() + at);
      right.param.assign(start.begin() + at, start.end());
      for (int step = 0; step < 2; ++step) {
        left.Step({grad.begin(), grad.begin() + at});
        right.Step({grad.begin() + at, grad.end()});
      }
      left.param.insert(left.param.end(), right.param.begin(), right.param.end());
      CHECK(left.param == whole.param);
    }
  }
}

TEST_CASE("vectors and named parameters have no weight decay") {
  const auto decays = [](const char* fqn, std::vector<std::int64_t> shape,
                         const OptimizerOptions& options) {
    Parameter param;
    param.fqn = fqn;
    param.shape = std::move(shape);
    return HasWeightDecay(param, options);
  };
  OptimizerOptions options;
  CHECK(decays("a.weight", {4, 8}, options));
  options.decay_matrices_only = true;
  CHECK(!decays("a.bias", {4}, options));
  options.decay_matrices_only = false;
  CHECK(decays("a.bias", {4}, options));
  options.no_decay = {"b.*"};
  CHECK(!decays("b.weight", {2, 8}, options));
  CHECK(decays("a.weight", {4, 8}, options));
}

TEST_CASE("learning-rate schedules") {
  ScheduleOptions constant;
  CHECK(LearningRateAt(constant, 0.5, 1000, 7) == 0.5);

  // StepLR of the MNIST example: 1, 0.7, 0.49, ... by epoch, multiplied one after the other.
  const ScheduleOptions step = {
      .kind = ScheduleKind::kStep, .unit = ScheduleUnit::kEpoch, .step_size = 1, .gamma = 0.7};
  CHECK(LearningRateAt(step, 1.0, 999, 0) == 1.0);
  CHECK(LearningRateAt(step, 1.0, 999, 1) == 0.7);
  CHECK(LearningRateAt(step, 1.0, 999, 3) == 0.7 * 0.7 * 0.7);
  const ScheduleOptions pairs = {.kind = ScheduleKind::kStep, .step_size = 2, .gamma = 0.5};
  CHECK(LearningRateAt(pairs, 8.0, 3, 0) == 4.0);
  CHECK(LearningRateAt(pairs, 8.0, 4, 0) == 2.0);
  CHECK(LearningRateAt(pairs, 8.0, std::int64_t{1} << 40, 0) == 0.0);

  // Warm-up over 3 steps: 1/4, 2/4, 3/4; then a cosine to a tenth over 8 steps.
  const ScheduleOptions cosine = {
      .kind = ScheduleKind::kCosine, .warmup = 3, .total = 11, .final_fraction = 0.1};
  CHECK(LearningRateAt(cosine, 4.0, 0, 0) == 1.0);
  CHECK(LearningRateAt(cosine, 4.0, 2, 0) == 3.0);
  CHECK(LearningRateAt(cosine, 4.0, 3, 0) == 4.0);
  CHECK(LearningRateAt(cosine, 4.0, 7, 0) == doctest::Approx(4.0 * 0.55).epsilon(1e-15));
  CHECK(LearningRateAt(cosine, 4.0, 5, 0) ==
        doctest::Approx(4.0 * (0.1 + 0.9 * (1.0 + std::sqrt(0.5)) / 2.0)).epsilon(1e-15));
  CHECK(LearningRateAt(cosine, 4.0, 11, 0) == doctest::Approx(0.4).epsilon(1e-15));
  CHECK(LearningRateAt(cosine, 4.0, 100, 0) == doctest::Approx(0.4).epsilon(1e-15));

  const ScheduleOptions linear = {.kind = ScheduleKind::kLinear, .total = 10};
  CHECK(LearningRateAt(linear, 2.0, 5, 0) == 1.0);
  CHECK(LearningRateAt(linear, 2.0, 10, 0) == 0.0);
}

TEST_CASE("squares of any number of elements are summed once each") {
  // 1 + 4 + ... + n^2 = n (n + 1) (2n + 1) / 6, exact in every type up to 100.
  for (const std::int64_t n : {0, 1, 15, 16, 17, 31, 32, 100}) {
    std::vector<float> values;
    std::vector<std::uint16_t> bf16;
    std::vector<std::uint16_t> fp16;
    for (std::int64_t i = 1; i <= n; ++i) {
      values.push_back(static_cast<float>(i));
      bf16.push_back(FloatToBf16(values.back()));
      fp16.push_back(FloatToFp16(values.back()));
    }
    const auto expected = static_cast<double>(n * (n + 1) * (2 * n + 1) / 6);
    CHECK(SumOfSquares(DType::kFp32, values.data(), n) == expected);
    CHECK(SumOfSquares(DType::kBf16, bf16.data(), n) == expected);
    CHECK(SumOfSquares(DType::kFp16, fp16.data(), n) == expected);
  }
}

TEST_CASE("norms, clipping and scaling") {
  const std::vector<float> values = {3.0F, -4.0F};
  CHECK(SumOfSquares(DType::kFp32, values.data(), 2) == 25.0);
  CHECK(ClipCoefficient(0.5, 1.0) == 1.0F);
  CHECK(ClipCoefficient(4.0, 1.0) == doctest::Approx(0.25).epsilon(1e-6));
  std::vector<std::uint16_t> half = {FloatToFp16(3.0F), FloatToFp16(-4.0F)};
  CHECK(SumOfSquares(DType::kFp16, half.data(), 2) == 25.0);
  ScaleInPlace(DType::kFp16, half.data(), 2, 0.5F);
  CHECK(Fp16ToFloat(half[0]) == 1.5F);
  CHECK(Fp16ToFloat(half[1]) == -2.0F);
}

TEST_CASE("the loss scale halves on overflow and doubles after a row of good steps") {
  const LossScaleOptions options = {.initial = 8.0, .growth_interval = 3};
  LossScaler scaler = {.scale = options.initial};
  scaler.Update(false, options);
  scaler.Update(false, options);
  CHECK(scaler == LossScaler{8.0, 2});
  scaler.Update(true, options);
  CHECK(scaler == LossScaler{4.0, 0});
  for (int i = 0; i < 3; ++i) {
    scaler.Update(false, options);
  }
  CHECK(scaler == LossScaler{8.0, 0});
  // It stays a finite fp32 number.
  LossScaler large = {.scale = 0x1p127, .good_steps = 2};
  large.Update(false, options);
  CHECK(large == LossScaler{0x1p127, 0});
}

}  // namespace
}  // namespace shardwright
