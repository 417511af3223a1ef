#pragma once

// The arithmetic of one optimizer update of one element, in the order of operations of torch.optim.
// The host and the CUDA device compile the same text, so that both compute the same bits.

#include <cmath>

#include "executor/optimizer.h"

#if defined(__CUDACC__)
#define SW_STEP __device__ __forceinline__
#else
#define SW_STEP [[gnu::always_inline]] inline
#endif

namespace shardwright {

// The result of one PyTorch operation on tensors of this type: kept as the type holds it.
template <class Element, bool kRoundEach>
SW_STEP float Rounded(float value) {
  return kRoundEach ? Element::Load(Element::Store(value)) : value;
}

// What one range's arithmetic depends on, as PyTorch passes it: Python computes scalars in fp64,
// kernels take them in fp32.
struct UpdateScalars {
  float weight_decay = 0, minus_learning_rate = 0;
  float momentum = 0, one_minus_dampening = 0;
  float lerp_weight = 0, beta2 = 0, one_minus_beta2 = 0;
  float correction2_root = 0, epsilon = 0, minus_step_size = 0;
  float decoupled = 1;  // 1 - learning rate * weight decay
  float rho = 0, one_minus_rho = 0;
  float beta1 = 0, one_minus_beta1 = 0;
  bool lerp_from_start = true;  // 1 - beta1 is below one half
  bool has_decay = false, is_first = false, is_nesterov = false;
};

// The scalars of a range with this weight decay. The call names step and learning rate.
[[nodiscard]] UpdateScalars MakeUpdateScalars(const OptimizerCall& call,
                                              const OptimizerOptions& options, double weight_decay);

// One element: its new parameter and states. PyTorch's add with a factor, addcmul and lerp end in
// a fused multiply-add, on the CPU by intrinsics and on the GPU by the compiler.
template <class Element, bool kRoundEach, OptimizerKind kKind>
struct UpdateStep {
  struct Values {
    float param, state0, state1;
  };

  SW_STEP static float R(float value) { return Rounded<Element, kRoundEach>(value); }
  // A product and a sum with one rounding, then kept as the type holds it.
  SW_STEP static float Fused(float a, float b, float c) { return R(std::fma(a, b, c)); }

  SW_STEP static Values Momentum(const Values& old, float grad, const UpdateScalars& s) {
    // The first buffer is the gradient itself, without dampening.
    const float buffer =
        s.is_first ? grad : Fused(s.one_minus_dampening, grad, R(old.state0 * s.momentum));
    const float direction = s.is_nesterov ? Fused(s.momentum, buffer, grad) : buffer;
    return {std::fma(s.minus_learning_rate, direction, old.param), buffer, 0.0F};
  }

  SW_STEP static Values Adam(const Values& old, float grad, const UpdateScalars& s) {
    // torch.lerp takes the form that is exact at the nearer end.
    const float mean =
        Fused(s.lerp_weight, grad - old.state0, s.lerp_from_start ? old.state0 : grad);
    const float square = Fused(s.one_minus_beta2 * grad, grad, R(old.state1 * s.beta2));
    const float denominator = R(R(R(std::sqrt(square)) / s.correction2_root) + s.epsilon);
    return {old.param + s.minus_step_size * mean / denominator, mean, square};
  }

  SW_STEP static Values Adadelta(const Values& old, float grad, const UpdateScalars& s) {
    const float square = Fused(s.one_minus_rho * grad, grad, R(old.state0 * s.rho));
    const float deviation = R(std::sqrt(R(square + s.epsilon)));
    const float delta = R(R(R(std::sqrt(R(old.state1 + s.epsilon))) / deviation) * grad);
    return {std::fma(s.minus_learning_rate, delta, old.param), square,
            std::fma(s.one_minus_rho * delta, delta, R(old.state1 * s.rho))};
  }

  SW_STEP static Values Lion(const Values& old, float grad, const UpdateScalars& s) {
    const float update = Fused(s.one_minus_beta1, grad, R(old.state0 * s.beta1));
    const float sign = static_cast<float>(update > 0.0F) - static_cast<float>(update < 0.0F);
    return {std::fma(s.minus_learning_rate, sign, old.param),
            std::fma(s.one_minus_beta2, grad, R(old.state0 * s.beta2)), 0.0F};
  }

  SW_STEP static Values Step(Values old, float grad, const UpdateScalars& s) {
    if constexpr (kKind == OptimizerKind::kAdamW) {
      old.param = R(old.param * s.decoupled);
      return Adam(old, grad, s);
    }
    if constexpr (kKind == OptimizerKind::kLion) {
      old.param = R(old.param * s.decoupled);
      return Lion(old, grad, s);
    }
    grad = s.has_decay ? Fused(s.weight_decay, old.param, grad) : grad;
    if constexpr (kKind == OptimizerKind::kSgd) {
      return {std::fma(s.minus_learning_rate, grad, old.param), 0.0F, 0.0F};
    } else if constexpr (kKind == OptimizerKind::kMomentum) {
      return Momentum(old, grad, s);
    } else if constexpr (kKind == OptimizerKind::kAdam) {
      return Adam(old, grad, s);
    } else {
      return Adadelta(old, grad, s);
    }
  }
};

#undef SW_STEP

}  // namespace shardwright
