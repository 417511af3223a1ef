#include "executor/optimizer.h"

#include <cmath>
#include <string>
#include <string_view>
#include <vector>

#include "core/error.h"
#include "core/ranges.h"
#include "core/text.h"
#include "executor/half.h"
#include "executor/update_step.h"
#include "models/trainable.h"

// Inlined into the loop that is compiled for machines with fused multiply-add.
#define SW_INLINE [[gnu::always_inline]] inline
#if defined(__x86_64__)
#define SW_TARGET_FMA [[gnu::target("avx2,fma")]]
#else
#define SW_TARGET_FMA
#endif

namespace shardwright {
namespace {

bool HasFma() {
#if defined(__x86_64__)
  return __builtin_cpu_supports("avx2") != 0 && __builtin_cpu_supports("fma") != 0;
#else
  return true;
#endif
}

// How elements are read, stored and rounded between two operations.
struct Fp32 {
  using Stored = float;
  SW_INLINE static float Load(float stored) { return stored; }
  SW_INLINE static float Store(float value) { return value; }
};
struct Bf16 {
  using Stored = std::uint16_t;
  SW_INLINE static float Load(std::uint16_t stored) { return Bf16ToFloat(stored); }
  SW_INLINE static std::uint16_t Store(float value) { return FloatToBf16(value); }
};
struct Fp16 {
  using Stored = std::uint16_t;
  SW_INLINE static float Load(std::uint16_t stored) { return Fp16ToFloat(stored); }
  SW_INLINE static std::uint16_t Store(float value) { return FloatToFp16(value); }
};

// The arrays of one range.
template <class Element>
struct Arrays {
  typename Element::Stored* param;
  const typename Element::Stored* grad;
  typename Element::Stored* state0;
  typename Element::Stored* state1;
  std::int64_t count;
};

// The loop over one range.
template <class Element, bool kRoundEach, OptimizerKind kKind>
struct Update {
  SW_INLINE static void Loop(const Arrays<Element>& arrays, const UpdateScalars& scalars) {
    constexpr bool kHasState0 = kKind != OptimizerKind::kSgd;
    constexpr bool kHasState1 =
        kHasState0 && kKind != OptimizerKind::kMomentum && kKind != OptimizerKind::kLion;
    const UpdateScalars s = scalars;  // a local copy, which no store can change
    auto* __restrict param = arrays.param;
    const auto* __restrict grad = arrays.grad;
    auto* __restrict state0 = arrays.state0;
    auto* __restrict state1 = arrays.state1;
    for (std::int64_t i = 0; i < arrays.count; ++i) {
      typename UpdateStep<Element, kRoundEach, kKind>::Values old = {Element::Load(param[i]), 0.0F,
                                                                     0.0F};
      if constexpr (kHasState0) {
        old.state0 = Element::Load(state0[i]);
      }
      if constexpr (kHasState1) {
        old.state1 = Element::Load(state1[i]);
      }
      const auto updated =
          UpdateStep<Element, kRoundEach, kKind>::Step(old, Element::Load(grad[i]), s);
      param[i] = Element::Store(updated.param);
      if constexpr (kHasState0) {
        state0[i] = Element::Store(updated.state0);
      }
      if constexpr (kHasState1) {
        state1[i] = Element::Store(updated.state1);
      }
    }
  }

  // std::fma means the same with and without such an instruction; with it the loops are fast.
  SW_TARGET_FMA static void LoopWithFma(const Arrays<Element>& a, const UpdateScalars& s) {
    Loop(a, s);
  }

  static void Run(const Arrays<Element>& arrays, const UpdateScalars& scalars) {
    if (HasFma()) {
      LoopWithFma(arrays, scalars);
    } else {
      Loop(arrays, scalars);
    }
  }
};

template <class Element, bool kRoundEach>
void UpdateRange(OptimizerKind kind, const Arrays<Element>& arrays, const UpdateScalars& scalars) {
  switch (kind) {
    case OptimizerKind::kSgd:
      return Update<Element, kRoundEach, OptimizerKind::kSgd>::Run(arrays, scalars);
    case OptimizerKind::kMomentum:
      return Update<Element, kRoundEach, OptimizerKind::kMomentum>::Run(arrays, scalars);
    case OptimizerKind::kAdam:
      return Update<Element, kRoundEach, OptimizerKind::kAdam>::Run(arrays, scalars);
    case OptimizerKind::kAdamW:
      return Update<Element, kRoundEach, OptimizerKind::kAdamW>::Run(arrays, scalars);
    case OptimizerKind::kAdadelta:
      return Update<Element, kRoundEach, OptimizerKind::kAdadelta>::Run(arrays, scalars);
    case OptimizerKind::kLion:
      return Update<Element, kRoundEach, OptimizerKind::kLion>::Run(arrays, scalars);
    case OptimizerKind::kAdafactor:  // UpdateShard
      break;
  }
}

template <class Element, bool kRoundEach>
void UpdateRanges(const OptimizerCall& call, const OptimizerOptions& options) {
  using Stored = typename Element::Stored;
  for (const OptimizerRange& range : call.ranges) {
    const auto state = [&](std::size_t k) {
      return call.states[k] == nullptr ? nullptr
                                       : static_cast<Stored*>(call.states[k]) + range.state_offset;
    };
    const Arrays<Element> arrays = {static_cast<Stored*>(call.params) + range.param_offset,
                                    static_cast<const Stored*>(call.grads) + range.grad_offset,
                                    state(0), state(1), range.count};
    UpdateRange<Element, kRoundEach>(call.spec.kind, arrays,
                                     MakeUpdateScalars(call, options, range.weight_decay));
  }
}

// Transformers' Adafactor.step of one parameter, pass by pass: its temporaries are local.
void UpdateFactored(const OptimizerCall& call, const OptimizerRange& range) {
  constexpr float kEpsilon = 1e-30F;
  constexpr double kDecay = -0.8;
  float* param = static_cast<float*>(call.params) + range.param_offset;
  const float* grad = static_cast<const float*>(call.grads) + range.grad_offset;
  float* state = static_cast<float*>(call.states[0]) + range.state_offset;
  const double kept = 1.0 - std::pow(static_cast<double>(call.step), kDecay);
  const auto blend = [&](float& mean, double value) {
    mean = std::fma(static_cast<float>(1.0 - kept), static_cast<float>(value),
                    mean * static_cast<float>(kept));
  };
  std::vector<float> update(static_cast<std::size_t>(range.count));
  const auto square = [&](std::int64_t i) { return grad[i] * grad[i] + kEpsilon; };
  if (range.columns == 0) {
    for (std::int64_t i = 0; i < range.count; ++i) {
      blend(state[i], square(i));
      update[static_cast<std::size_t>(i)] = 1.0F / std::sqrt(state[i]) * grad[i];
    }
  } else {
    const std::int64_t columns = range.columns, rows = range.count / columns;
    std::vector<double> by_column(static_cast<std::size_t>(columns), 0.0);
    double all_rows = 0.0;
    for (std::int64_t r = 0; r < rows; ++r) {
      double by_row = 0.0;
      for (std::int64_t c = 0; c < columns; ++c) {
        const double value = square(r * columns + c);
        by_row += value;
        by_column[static_cast<std::size_t>(c)] += value;
      }
      blend(state[r], by_row / static_cast<double>(columns));
      all_rows += state[r];
    }
    float* column = state + rows;
    for (std::int64_t c = 0; c < columns; ++c) {
      blend(column[c], by_column[static_cast<std::size_t>(c)] / static_cast<double>(rows));
    }
    const auto mean = static_cast<float>(all_rows / static_cast<double>(rows));
    for (std::int64_t i = 0; i < range.count; ++i) {
      const float row_factor = 1.0F / std::sqrt(state[i / columns] / mean);
      update[static_cast<std::size_t>(i)] =
          row_factor * (1.0F / std::sqrt(column[i % columns])) * grad[i];
    }
  }
  const double root = std::sqrt(SumOfSquares(DType::kFp32, update.data(), range.count) /
                                static_cast<double>(range.count));
  const float clipped = std::max(static_cast<float>(root), 1.0F);
  const auto rate = static_cast<float>(call.learning_rate);
  const auto decay = static_cast<float>(-range.weight_decay * call.learning_rate);
  for (std::int64_t i = 0; i < range.count; ++i) {
    const float decayed = std::fma(decay, param[i], param[i]);
    param[i] = decayed - update[static_cast<std::size_t>(i)] / clipped * rate;
  }
}

// Sixteen partial sums, whatever the instruction set: one chain of additions would wait for itself,
// and the order of the sum does not depend on the machine. Squares of fp32 are exact in fp64.
template <class Element>
struct Squares {
  SW_INLINE static double Loop(const typename Element::Stored* values, std::int64_t count) {
    constexpr std::int64_t kSums = 16;
    std::array<double, kSums> sums = {};
    std::int64_t i = 0;
    for (; i + kSums <= count; i += kSums) {
      for (std::int64_t k = 0; k < kSums; ++k) {
        const auto value = static_cast<double>(Element::Load(values[i + k]));
        sums[static_cast<std::size_t>(k)] += value * value;
      }
    }
    double sum = 0.0;
    for (; i < count; ++i) {
      const auto value = static_cast<double>(Element::Load(values[i]));
      sum += value * value;
    }
    for (const double partial : sums) {
      sum += partial;
    }
    return sum;
  }

  SW_TARGET_FMA static double LoopWithFma(const typename Element::Stored* values,
                                          std::int64_t count) {
    return Loop(values, count);
  }

  static double Of(const void* data, std::int64_t count) {
    const auto* values = static_cast<const typename Element::Stored*>(data);
    return HasFma() ? LoopWithFma(values, count) : Loop(values, count);
  }
};

}  // namespace

bool HasWeightDecay(const Parameter& param, const OptimizerOptions& options) {
  if (options.decay_matrices_only && param.shape.size() < 2) {
    return false;
  }
  return NoneOf(options.no_decay,
                [&](const std::string& glob) { return MatchesGlob(glob, param.fqn); });
}

UpdateScalars MakeUpdateScalars(const OptimizerCall& call, const OptimizerOptions& options,
                                double weight_decay) {
  const auto step = static_cast<double>(call.step);
  const double correction1 = 1.0 - std::pow(options.beta1, step);
  const double correction2 = 1.0 - std::pow(options.beta2, step);
  UpdateScalars s;
  s.weight_decay = static_cast<float>(weight_decay);
  s.minus_learning_rate = static_cast<float>(-call.learning_rate);
  s.momentum = static_cast<float>(options.momentum);
  s.one_minus_dampening = static_cast<float>(1.0 - options.dampening);
  s.lerp_weight = static_cast<float>(1.0 - options.beta1);
  s.lerp_from_start = s.lerp_weight < 0.5F;
  s.lerp_weight -= s.lerp_from_start ? 0.0F : 1.0F;
  s.beta1 = static_cast<float>(options.beta1);
  s.one_minus_beta1 = static_cast<float>(1.0 - options.beta1);
  s.beta2 = static_cast<float>(options.beta2);
  s.one_minus_beta2 = static_cast<float>(1.0 - options.beta2);
  s.correction2_root = static_cast<float>(std::sqrt(correction2));
  s.epsilon = static_cast<float>(options.epsilon);
  s.minus_step_size = static_cast<float>(-(call.learning_rate / correction1));
  s.decoupled = static_cast<float>(1.0 - call.learning_rate * weight_decay);
  s.rho = static_cast<float>(options.rho);
  s.one_minus_rho = static_cast<float>(1.0 - options.rho);
  s.has_decay = weight_decay != 0.0;
  s.is_first = call.step == 1;
  s.is_nesterov = options.nesterov;
  return s;
}

void UpdateShard(const OptimizerCall& call, const OptimizerOptions& options) {
  SW_CHECK(call.step >= 1, std::to_string(call.step));
  if (call.spec.kind == OptimizerKind::kAdafactor) {
    for (const OptimizerRange& range : call.ranges) {
      UpdateFactored(call, range);
    }
    return;
  }
  const bool round_each = call.spec.impl != OptimizerImpl::kFused;
  switch (call.dtype) {
    case DType::kFp32:
      return UpdateRanges<Fp32, false>(call, options);  // fp32 arithmetic rounds by itself
    case DType::kBf16:
      return round_each ? UpdateRanges<Bf16, true>(call, options)
                        : UpdateRanges<Bf16, false>(call, options);
    case DType::kFp16:
      return round_each ? UpdateRanges<Fp16, true>(call, options)
                        : UpdateRanges<Fp16, false>(call, options);
    default:
      SW_CHECK(false, "parameters are fp32, bf16 or fp16");
  }
}

void CheckUpdates(const OptimizerSpec& spec, DType master) {
  if (spec.matrices != MatrixRule::kNone) {
    throw InputError("plan: job.optimizer.matrices",
                     '"' + std::string(NameIn(kMatrixRuleNames, spec.matrices)) + '"',
                     "none, since the executor has no such update");
  }
  const bool is_fp32 = spec.states == StateFormat::kFp32 && master == DType::kFp32;
  if (spec.kind == OptimizerKind::kAdafactor && !is_fp32) {
    throw InputError("plan: job.precision.master", "16 bits with \"adafactor\"",
                     "fp32, which the executor has such updates in");
  }
  if (spec.states != StateFormat::kMaster && !is_fp32) {
    throw InputError("plan: job.optimizer.states",
                     '"' + std::string(NameIn(kStateFormatNames, spec.states)) + '"',
                     "master, since the executor has states in the dtype of the masters alone");
  }
}

void CheckFrozen(const Job& job) {
  if (job.trains_by != TrainsBy::kOwn) {
    throw InputError("plan: job.trains_by",
                     '"' + std::string(NameIn(kTrainsByNames, job.trains_by)) + '"',
                     "own, since the executor trains by the model's own loss alone");
  }
  if (!job.lora_saved.empty()) {
    throw InputError("plan: job.lora_saved", '"' + job.lora_saved.front() + '"',
                     "none, since the executor neither copies, loads nor exports such modules");
  }
  if (!job.fp32_masters.empty()) {
    throw InputError("plan: job.fp32_masters", Quoted(job.fp32_masters.front()),
                     "none, since the executor keeps all parameters in one dtype");
  }
  const FrozenFormat format = job.frozen_format;
  if (format != FrozenFormat::kMaster) {
    throw InputError("plan: job.frozen_format",
                     '"' + std::string(NameIn(kFrozenFormatNames, format)) + '"',
                     "master, since the executor keeps all parameters in one dtype");
  }
}

std::span<const std::string_view> OptimizerStateNames(OptimizerKind kind) {
  static constexpr std::array<std::string_view, 1> kMomentum = {"momentum_buffer"};
  static constexpr std::array<std::string_view, 1> kLion = {"exp_avg"};
  static constexpr std::array<std::string_view, 2> kAdam = {"exp_avg", "exp_avg_sq"};
  static constexpr std::array<std::string_view, 2> kAdadelta = {"square_avg", "acc_delta"};
  switch (kind) {
    case OptimizerKind::kSgd:
      return {};
    case OptimizerKind::kMomentum:
      return kMomentum;
    case OptimizerKind::kLion:
      return kLion;
    case OptimizerKind::kAdafactor:  // no checkpoint has its states
      return {};
    case OptimizerKind::kAdam:
    case OptimizerKind::kAdamW:
      return kAdam;
    case OptimizerKind::kAdadelta:
      return kAdadelta;
  }
  return {};
}

double SumOfSquares(DType dtype, const void* data, std::int64_t count) {
  switch (dtype) {
    case DType::kFp32:
      return Squares<Fp32>::Of(data, count);
    case DType::kBf16:
      return Squares<Bf16>::Of(data, count);
    case DType::kFp16:
      return Squares<Fp16>::Of(data, count);
    default:
      SW_CHECK(false, "gradients are fp32, bf16 or fp16");
  }
}

float ClipCoefficient(double norm, double max_norm) {
  // PyTorch divides a Python number by a tensor: the tensor's reciprocal, times the number.
  const float reciprocal = 1.0F / (static_cast<float>(norm) + 1e-6F);
  return std::min(reciprocal * static_cast<float>(max_norm), 1.0F);
}

void ScaleInPlace(DType dtype, void* data, std::int64_t count, float factor) {
  if (dtype == DType::kFp32) {
    auto* values = static_cast<float*>(data);
    for (std::int64_t i = 0; i < count; ++i) {
      values[i] *= factor;
    }
    return;
  }
  for (std::int64_t i = 0; i < count; ++i) {
    StoreFloat(dtype, data, i, LoadFloat(dtype, data, i) * factor);
  }
}

void LossScaler::Update(bool overflowed, const LossScaleOptions& options) {
  if (overflowed) {
    scale *= options.backoff_factor;
    good_steps = 0;
    return;
  }
  if (++good_steps == options.growth_interval) {
    const double grown = scale * options.growth_factor;
    scale = std::isfinite(static_cast<float>(grown)) ? grown : scale;
    good_steps = 0;
  }
}

}  // namespace shardwright
