#pragma once

// Loops over arrays of fp32 numbers that the compiler turns into vector code. Sums keep sixteen
// partial sums whatever the instruction set, so their order does not depend on it.

#include <cstdint>

#include "models/kernels/fp8.h"
#include "models/model.h"

namespace shardwright {

[[nodiscard]] float VectorSum(const float* x, std::int64_t n);
[[nodiscard]] float VectorDot(const float* x, const float* y, std::int64_t n);
// The sum of (x - shift)^2.
[[nodiscard]] float VectorSquares(const float* x, float shift, std::int64_t n);
// Minus infinity for n = 0.
[[nodiscard]] float VectorMax(const float* x, std::int64_t n);

// The largest magnitude, and the larger of y and x's magnitude in y. 0 for n = 0; NaNs are none.
[[nodiscard]] float VectorMaxMagnitude(const float* x, std::int64_t n);
void VectorLargerMagnitude(const float* x, float* y, std::int64_t n);
// x becomes the nearest number of the format, ties to even, at most its largest.
void VectorRoundToFp8(Fp8Format format, float* x, std::int64_t n);

// The maxima of `n` square windows of kernel * kernel numbers, each `stride` to the right of the
// one before, and how far from `x` each is: the first of equals, the last NaN, as PyTorch. Rows are
// `width` apart. Without branches, which the data would decide.
void MaxOfWindows(const float* x, std::int64_t width, std::int64_t kernel, std::int64_t stride,
                  std::int64_t n, float* largest, std::int32_t* place);
// y = exp(x - shift) with a relative error below 2^-22; returns the sum. y may be x.
float VectorExp(const float* x, float shift, float* y, std::int64_t n);
// y += factor * x.
void VectorAdd(float factor, const float* x, float* y, std::int64_t n);
// y = factor * x. y may be x.
void VectorScale(float factor, const float* x, float* y, std::int64_t n);
void VectorProduct(const float* x, const float* y, float* z, std::int64_t n);
// x = cap * tanh(x / cap).
void VectorSoftCap(float cap, float* x, std::int64_t n);

// y = f(x). PyTorch's definitions: kGelu is x * Phi(x), kGeluTanh its tanh form. Errors are below
// 2^-21 of the result and 2^-23 of x. kNone copies.
void VectorActivate(Activation function, const float* x, float* y, std::int64_t n);
// dx = f'(x) * dy. `kept` is x, or f(x) where ActivationKeepsResult. dx may be dy.
void VectorActivateGrad(Activation function, const float* kept, const float* dy, float* dx,
                        std::int64_t n);
// Is the derivative computed from the result (ReLU, tanh, sigmoid) rather than the input?
[[nodiscard]] bool ActivationKeepsResult(Activation function);

}  // namespace shardwright
