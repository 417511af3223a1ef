#include "executor/host/kernels/vector.h"

#include <algorithm>
#include <array>
#include <bit>
#include <cmath>
#include <cstddef>
#include <limits>

#include "executor/fp8.h"
#include "executor/host/kernels/clones.h"

namespace shardwright {
namespace {

// All of these are inlined into the clones below; they have no branches, so that loops over them
// become vector code.

// e^x. x = n ln 2 + r with |r| <= ln 2 / 2; e^r = 1 + r + r^2 q(r), where q is a least-squares fit
// at Chebyshev points with a relative error of 1e-8. Above 88.7: infinity; below -87.3: 0.
inline float Exp(float x) {
  constexpr float kRound = 12582912.0F;  // 1.5 * 2^23: adding it rounds to an integer
  constexpr float kLog2e = 1.44269504F;
  constexpr float kLn2High = 0.693359375F;  // few bits, so that n * kLn2High is exact
  constexpr float kLn2Low = -2.12194440e-4F;
  const float clamped = x < -87.3F ? -87.3F : (x > 88.7F ? 88.7F : x);
  const float shifted = clamped * kLog2e + kRound;
  const float n = shifted - kRound;
  const float r = (clamped - n * kLn2High) - n * kLn2Low;
  float q = 0.00139336532F;
  q = q * r + 0.00836318173F;
  q = q * r + 0.0416664630F;
  q = q * r + 0.166665763F;
  q = q * r + 0.5F;
  const float e = 1.0F + (r + r * r * q);
  const std::uint32_t exponent =
      std::bit_cast<std::uint32_t>(shifted) - std::bit_cast<std::uint32_t>(kRound) + 127U;
  const float power = std::bit_cast<float>(exponent << 23U);
  const float result = e * power;
  const float low = x < -87.3F ? 0.0F : result;
  return x > 88.7F ? std::numeric_limits<float>::infinity() : low;
}

inline float Sigmoid(float x) {
  return 1.0F / (1.0F + Exp(-x));
}

// tanh: by the exponential, or by its series where that would cancel.
inline float Tanh(float x) {
  const float magnitude = std::fabs(x);
  const float square = x * x;
  float series = -0.0539682540F;  // -17 / 315
  series = series * square + 0.133333333F;
  series = series * square - 0.333333333F;
  const float small = x + x * square * series;
  const float large = 1.0F - 2.0F / (Exp(2.0F * magnitude) + 1.0F);
  return magnitude < 0.2F ? small : std::copysign(large, x);
}

struct NormalDistribution {
  float below = 0;    // Phi(x)
  float density = 0;  // phi(x)
};

// Phi(x) = erfc(-x / sqrt 2) / 2; erfc(z) = e^(-z^2) erfcx(z), and erfcx(z) is a polynomial in
// t = 1 / (1 + 0.35 z) for z >= 0, fitted like Exp's.
inline NormalDistribution Normal(float x) {
  const float z = std::fabs(x) * 0.707106781F;
  const float t = 1.0F / (1.0F + 0.35F * z);
  float p = 0.0390718020F;
  p = p * t - 0.162569000F;
  p = p * t + 0.190017540F;
  p = p * t - 0.0391107500F;
  p = p * t + 0.0965018000F;
  p = p * t + 0.140951540F;
  p = p * t + 0.152947290F;
  p = p * t + 0.187524360F;
  p = p * t + 0.197184000F;
  p = p * t + 0.197481420F;
  const float decay = Exp(-0.5F * x * x);
  const float tail = 0.5F * decay * p * t;
  return {x < 0.0F ? tail : 1.0F - tail, decay * 0.398942280F};
}

// sqrt(2 / pi) (x + 0.044715 x^3), the argument of GELU's tanh form.
constexpr float kGeluScale = 0.797884561F;
constexpr float kGeluCube = 0.044715F;

constexpr std::int64_t kLanes = 16;
using Lanes = std::array<float, kLanes>;

inline float Fold(Lanes& lanes) {
  for (std::int64_t width = kLanes / 2; width > 0; width /= 2) {
    for (std::int64_t i = 0; i < width; ++i) {
      lanes[static_cast<std::size_t>(i)] += lanes[static_cast<std::size_t>(i + width)];
    }
  }
  return lanes[0];
}

// The sum of term(i) over i < n.
template <class Term>
__attribute__((always_inline)) inline float SumTerms(std::int64_t n, const Term& term) {
  Lanes lanes{};
  float* const sums = lanes.data();
  std::int64_t i = 0;
  for (; i + kLanes <= n; i += kLanes) {
    for (std::int64_t lane = 0; lane < kLanes; ++lane) {
      sums[lane] += term(i + lane);
    }
  }
  for (std::int64_t lane = 0; i < n; ++i, ++lane) {
    sums[lane] += term(i);
  }
  return Fold(lanes);
}

}  // namespace

SHARDWRIGHT_CLONES float VectorSum(const float* x, std::int64_t n) {
  return SumTerms(n, [x](std::int64_t i) { return x[i]; });
}

SHARDWRIGHT_CLONES float VectorDot(const float* x, const float* y, std::int64_t n) {
  return SumTerms(n, [x, y](std::int64_t i) { return x[i] * y[i]; });
}

SHARDWRIGHT_CLONES float VectorSquares(const float* x, float shift, std::int64_t n) {
  return SumTerms(n, [x, shift](std::int64_t i) { return (x[i] - shift) * (x[i] - shift); });
}

SHARDWRIGHT_CLONES float VectorMax(const float* x, std::int64_t n) {
  Lanes lanes;
  lanes.fill(-std::numeric_limits<float>::infinity());
  float* const largest = lanes.data();
  std::int64_t i = 0;
  for (; i + kLanes <= n; i += kLanes) {
    for (std::int64_t lane = 0; lane < kLanes; ++lane) {
      largest[lane] = x[i + lane] > largest[lane] ? x[i + lane] : largest[lane];
    }
  }
  for (; i < n; ++i) {
    largest[0] = std::max(largest[0], x[i]);
  }
  return *std::max_element(lanes.begin(), lanes.end());
}

SHARDWRIGHT_CLONES float VectorMaxMagnitude(const float* x, std::int64_t n) {
  Lanes lanes{};
  float* const largest = lanes.data();
  std::int64_t i = 0;
  for (; i + kLanes <= n; i += kLanes) {
    for (std::int64_t lane = 0; lane < kLanes; ++lane) {
      const float size = std::fabs(x[i + lane]);
      largest[lane] = size > largest[lane] ? size : largest[lane];
    }
  }
  for (; i < n; ++i) {
    largest[0] = std::fabs(x[i]) > largest[0] ? std::fabs(x[i]) : largest[0];
  }
  return *std::max_element(lanes.begin(), lanes.end());
}

SHARDWRIGHT_CLONES void VectorLargerMagnitude(const float* x, float* y, std::int64_t n) {
  for (std::int64_t i = 0; i < n; ++i) {
    const float size = std::fabs(x[i]);
    y[i] = size > y[i] ? size : y[i];
  }
}

namespace {

// The format's constants are constants of the loop where this is inlined.
[[gnu::always_inline]] inline void RoundAll(const Fp8Constants& format, float* x, std::int64_t n) {
  for (std::int64_t i = 0; i < n; ++i) {
    x[i] = RoundToFp8(x[i], format);
  }
}

}  // namespace

SHARDWRIGHT_CLONES void VectorRoundToFp8(Fp8Format format, float* x, std::int64_t n) {
  if (format == Fp8Format::kE4m3) {
    RoundAll(Fp8ConstantsOf(Fp8Format::kE4m3), x, n);
  } else {
    RoundAll(Fp8ConstantsOf(Fp8Format::kE5m2), x, n);
  }
}

namespace {

// `stride` is a constant where this is inlined.
[[gnu::always_inline]] inline void FindMaxima(const float* __restrict x, std::int64_t width,
                                              std::int64_t kernel, std::int64_t stride,
                                              std::int64_t n, float* __restrict largest,
                                              std::int32_t* __restrict place) {
  for (std::int64_t i = 0; i < n; ++i) {
    largest[i] = -std::numeric_limits<float>::infinity();
    place[i] = static_cast<std::int32_t>(i * stride);
  }
  for (std::int64_t at = 0; at < kernel * kernel; ++at) {
    const std::int64_t offset = at / kernel * width + at % kernel;
    for (std::int64_t i = 0; i < n; ++i) {
      const float value = x[offset + i * stride];
      const bool is_larger = value > largest[i];
      const bool takes = is_larger | (value != value);
      largest[i] = takes ? value : largest[i];
      place[i] = takes ? static_cast<std::int32_t>(offset + i * stride) : place[i];
    }
  }
}

}  // namespace

SHARDWRIGHT_CLONES void MaxOfWindows(const float* x, std::int64_t width, std::int64_t kernel,
                                     std::int64_t stride, std::int64_t n, float* largest,
                                     std::int32_t* place) {
  if (stride == 2) {
    FindMaxima(x, width, kernel, 2, n, largest, place);
  } else {
    FindMaxima(x, width, kernel, stride, n, largest, place);
  }
}

SHARDWRIGHT_CLONES float VectorExp(const float* x, float shift, float* y, std::int64_t n) {
  for (std::int64_t i = 0; i < n; ++i) {
    y[i] = Exp(x[i] - shift);
  }
  return SumTerms(n, [y](std::int64_t i) { return y[i]; });
}

SHARDWRIGHT_CLONES void VectorAdd(float factor, const float* x, float* y, std::int64_t n) {
  for (std::int64_t i = 0; i < n; ++i) {
    y[i] += factor * x[i];
  }
}

SHARDWRIGHT_CLONES void VectorScale(float factor, const float* x, float* y, std::int64_t n) {
  for (std::int64_t i = 0; i < n; ++i) {
    y[i] = factor * x[i];
  }
}

SHARDWRIGHT_CLONES void VectorProduct(const float* x, const float* y, float* z, std::int64_t n) {
  for (std::int64_t i = 0; i < n; ++i) {
    z[i] = x[i] * y[i];
  }
}

SHARDWRIGHT_CLONES void VectorSoftCap(float cap, float* x, std::int64_t n) {
  const float inverse = 1.0F / cap;
  for (std::int64_t i = 0; i < n; ++i) {
    x[i] = cap * Tanh(x[i] * inverse);
  }
}

namespace {

SHARDWRIGHT_CLONES void Relu(const float* x, float* y, std::int64_t n) {
  for (std::int64_t i = 0; i < n; ++i) {
    y[i] = x[i] > 0.0F ? x[i] : 0.0F * x[i];  // NaN stays NaN
  }
}

SHARDWRIGHT_CLONES void Gelu(const float* x, float* y, std::int64_t n) {
  for (std::int64_t i = 0; i < n; ++i) {
    y[i] = x[i] * Normal(x[i]).below;
  }
}

// 1 + tanh(u) = 2 sigmoid(2 u).
SHARDWRIGHT_CLONES void GeluTanh(const float* x, float* y, std::int64_t n) {
  for (std::int64_t i = 0; i < n; ++i) {
    const float u = kGeluScale * (x[i] + kGeluCube * x[i] * x[i] * x[i]);
    y[i] = x[i] * Sigmoid(2.0F * u);
  }
}

SHARDWRIGHT_CLONES void Silu(const float* x, float* y, std::int64_t n) {
  for (std::int64_t i = 0; i < n; ++i) {
    y[i] = x[i] * Sigmoid(x[i]);
  }
}

SHARDWRIGHT_CLONES void TanhOf(const float* x, float* y, std::int64_t n) {
  for (std::int64_t i = 0; i < n; ++i) {
    y[i] = Tanh(x[i]);
  }
}

SHARDWRIGHT_CLONES void SigmoidOf(const float* x, float* y, std::int64_t n) {
  for (std::int64_t i = 0; i < n; ++i) {
    y[i] = Sigmoid(x[i]);
  }
}

SHARDWRIGHT_CLONES void ReluGrad(const float* y, const float* dy, float* dx, std::int64_t n) {
  for (std::int64_t i = 0; i < n; ++i) {
    dx[i] = y[i] > 0.0F ? dy[i] : 0.0F;
  }
}

SHARDWRIGHT_CLONES void GeluGrad(const float* x, const float* dy, float* dx, std::int64_t n) {
  for (std::int64_t i = 0; i < n; ++i) {
    const NormalDistribution normal = Normal(x[i]);
    dx[i] = dy[i] * (normal.below + x[i] * normal.density);
  }
}

SHARDWRIGHT_CLONES void GeluTanhGrad(const float* x, const float* dy, float* dx, std::int64_t n) {
  for (std::int64_t i = 0; i < n; ++i) {
    const float square = x[i] * x[i];
    const float u = kGeluScale * (x[i] + kGeluCube * square * x[i]);
    const float s = Sigmoid(2.0F * u);
    const float slope = kGeluScale * (1.0F + 3.0F * kGeluCube * square);
    dx[i] = dy[i] * (s + 2.0F * x[i] * s * (1.0F - s) * slope);
  }
}

SHARDWRIGHT_CLONES void SiluGrad(const float* x, const float* dy, float* dx, std::int64_t n) {
  for (std::int64_t i = 0; i < n; ++i) {
    const float s = Sigmoid(x[i]);
    dx[i] = dy[i] * (s * (1.0F + x[i] * (1.0F - s)));
  }
}

SHARDWRIGHT_CLONES void TanhGrad(const float* y, const float* dy, float* dx, std::int64_t n) {
  for (std::int64_t i = 0; i < n; ++i) {
    dx[i] = dy[i] * (1.0F - y[i] * y[i]);
  }
}

SHARDWRIGHT_CLONES void SigmoidGrad(const float* y, const float* dy, float* dx, std::int64_t n) {
  for (std::int64_t i = 0; i < n; ++i) {
    dx[i] = dy[i] * (y[i] * (1.0F - y[i]));
  }
}

}  // namespace

void VectorActivate(Activation function, const float* x, float* y, std::int64_t n) {
  switch (function) {
    case Activation::kNone:
      std::copy_n(x, n, y);
      return;
    case Activation::kRelu:
      return Relu(x, y, n);
    case Activation::kGelu:
      return Gelu(x, y, n);
    case Activation::kGeluTanh:
      return GeluTanh(x, y, n);
    case Activation::kSilu:
      return Silu(x, y, n);
    case Activation::kTanh:
      return TanhOf(x, y, n);
    case Activation::kSigmoid:
      return SigmoidOf(x, y, n);
  }
}

void VectorActivateGrad(Activation function, const float* kept, const float* dy, float* dx,
                        std::int64_t n) {
  switch (function) {
    case Activation::kNone:
      std::copy_n(dy, n, dx);
      return;
    case Activation::kRelu:
      return ReluGrad(kept, dy, dx, n);
    case Activation::kGelu:
      return GeluGrad(kept, dy, dx, n);
    case Activation::kGeluTanh:
      return GeluTanhGrad(kept, dy, dx, n);
    case Activation::kSilu:
      return SiluGrad(kept, dy, dx, n);
    case Activation::kTanh:
      return TanhGrad(kept, dy, dx, n);
    case Activation::kSigmoid:
      return SigmoidGrad(kept, dy, dx, n);
  }
}

bool ActivationKeepsResult(Activation function) {
  return function == Activation::kRelu || function == Activation::kTanh ||
         function == Activation::kSigmoid;
}

}  // namespace shardwright
