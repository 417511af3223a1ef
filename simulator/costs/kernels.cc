#include "simulator/costs/kernels.h"

#include <algorithm>
#include <cmath>
#include <string>

#include "core/error.h"

namespace shardwright {
namespace {

// The rate for `dtype`; what the matrix units cannot do runs as fp32.
FlopsPerSecond RateOf(const std::array<FlopsPerSecond, kMathTypeCount>& rates, DType dtype) {
  const FlopsPerSecond rate = rates[static_cast<std::size_t>(MathTypeOf(dtype))];
  if (rate.value > 0) {
    return rate;
  }
  const FlopsPerSecond fp32 = rates[static_cast<std::size_t>(MathType::kFp32)];
  if (fp32.value > 0) {
    return fp32;
  }
  throw InputError("profile: compute.gemm", "no rate for fp32",
                   "a fraction of the peak for every type that the model multiplies");
}

struct Tile {
  std::int64_t m = 0;
  std::int64_t n = 0;
};
// Output tiles that CUTLASS instantiates for tensor cores by default, largest first
// (NVIDIA/cutlass, tools/library; cuBLAS picks from the same sizes).
constexpr std::array<Tile, 6> kTiles = {
    {{256, 128}, {128, 256}, {128, 128}, {128, 64}, {64, 128}, {64, 64}}};

// How far the largest of n exponentially distributed delays lies above their mean, in means: the
// harmonic number 1 + 1/2 + ... + 1/n, by Euler and Maclaurin (to 0.0005 from n = 2), less 1.
double LargestDelay(std::int64_t count) {
  if (count <= 1) {
    return 0;
  }
  constexpr double kEuler = 0.5772156649;
  const auto n = static_cast<double>(count);
  return std::log(n) + kEuler + 1 / (2 * n) - 1 / (12 * n * n) - 1;
}

}  // namespace

double TileOverhead(std::int64_t batch, std::int64_t m, std::int64_t n, std::int64_t sm_count) {
  if (batch <= 0 || m <= 0 || n <= 0) {
    return 1;
  }
  const double useful =
      static_cast<double>(batch) * static_cast<double>(m) * static_cast<double>(n);
  double best = 0;
  for (const Tile& tile : kTiles) {
    // Tiles per multiprocessor, rounded up: the last wave is as long as the others.
    const auto tiles = static_cast<double>(batch) * static_cast<double>(CeilDiv(m, tile.m)) *
                       static_cast<double>(CeilDiv(n, tile.n));
    const double waves = std::ceil(tiles / static_cast<double>(sm_count));
    const double computed =
        waves * static_cast<double>(sm_count) * static_cast<double>(tile.m * tile.n);
    const double overhead = std::max(1.0, computed / useful);
    best = best == 0 ? overhead : std::min(best, overhead);
  }
  return best;
}

KernelRates FindKernelRates(const GpuSpec& gpu, const ComputeProfile& profile, std::int64_t ranks) {
  KernelRates rates;
  const double slowest = 1 + profile.rank_spread.value * LargestDelay(ranks);
  for (std::size_t i = 0; i < kMathTypeCount; ++i) {
    std::optional<FlopsPerSecond> peak = PeakFlops(gpu, static_cast<MathType>(i));
    if (!peak.has_value()) {
      continue;
    }
    *peak = *peak * (1 / slowest);
    if (profile.gemm[i].has_value()) {
      rates.gemm[i] = *peak * profile.gemm[i]->value;
    }
    rates.attention_forward[i] = *peak * profile.attention_forward.value;
    rates.attention_backward[i] = *peak * profile.attention_backward.value;
  }
  const BytesPerSecond memory = gpu.memory_bandwidth.value * (1 / slowest);
  rates.elementwise = memory * profile.elementwise.value;
  rates.reduction = memory * profile.reduction.value;
  rates.optimizer = memory * profile.optimizer.value;
  const auto like_updates = [&](const Number<double>& fraction) {
    return fraction.value > 0 ? memory * fraction.value : rates.optimizer;
  };
  rates.grad_norm = like_updates(profile.grad_norm);
  rates.grad_clip = like_updates(profile.grad_clip);
  rates.gemm_ramp = profile.gemm_ramp.value;
  rates.floor = profile.kernel_floor.value;
  rates.gap = profile.kernel_gap.value;
  rates.qr_column = profile.qr_column.value;
  rates.sm_count = std::max<std::int64_t>(gpu.sm_count.value, 1);
  return rates;
}

Seconds KernelTime(const Kernel& kernel, const KernelRates& rates) {
  const Bytes bytes = kernel.read + kernel.written;
  // What has to cross the memory bus takes at least this long, whatever is computed meanwhile.
  const Seconds streaming = bytes / rates.elementwise;
  Seconds time;
  switch (kernel.kind) {
    case KernelClass::kGemm:
    case KernelClass::kGroupedGemm:
    case KernelClass::kConv: {
      const double overhead = TileOverhead(kernel.batch, kernel.m, kernel.n, rates.sm_count);
      const Seconds multiplying = kernel.flops / RateOf(rates.gemm, kernel.dtype) * overhead;
      time = std::max(multiplying, streaming) + rates.gemm_ramp;
      break;
    }
    case KernelClass::kAttentionForward:
      time = std::max(kernel.flops / RateOf(rates.attention_forward, kernel.dtype), streaming);
      break;
    case KernelClass::kAttentionBackward:
      time = std::max(kernel.flops / RateOf(rates.attention_backward, kernel.dtype), streaming);
      break;
    case KernelClass::kNorm:
    case KernelClass::kSoftmax:
      time = bytes / rates.reduction;
      break;
    case KernelClass::kOptimizer:
      time = bytes / rates.optimizer;
      break;
    case KernelClass::kElementwise:
    case KernelClass::kGatherScatter:
    case KernelClass::kCopy:
      time = streaming;
      break;
    case KernelClass::kQr:
      // Column depends on column; a share of a QR has that share of the columns.
      time = kernel.flops / RateOf(rates.gemm, kernel.dtype) +
             rates.qr_column * (static_cast<double>(kernel.m) / static_cast<double>(kernel.batch));
      break;
  }
  return std::max(time, rates.floor);
}

}  // namespace shardwright
