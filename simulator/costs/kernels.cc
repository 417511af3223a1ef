// Time of one kernel alone: operations over the reachable rate, or bytes over the reachable
// bandwidth.
//
// Example of tiles: a product of 1,024 x 1,024 on 132 multiprocessors. With tiles of 128 x 128
// there are 64 tiles and 68 multiprocessors idle: 2.06 times the ideal time. With tiles of 128 x 64
// there are 128 tiles: 1.03 times. The least overhead of six tile shapes counts, as cuBLAS picks
// among them.
//
// Example of ranks: with a spread of 1 % the slowest of 8 GPUs is 1.7 spreads behind the mean, so
// rates are 1.7 % lower. All ranks wait for it at the next collective.

#include "simulator/costs/kernels.h"

#include <algorithm>
#include <cmath>
#include <utility>

#include "core/error.h"
#include "models/kernels/cuda.h"

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
  if (batch <= 0 || m <= 0 || n <= 0 || sm_count <= 1) {
    return 1;  // a core's tiles are of its registers' size, and nobody waits for the last one
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

double PaddingOverhead(std::int64_t m, std::int64_t n) {
  constexpr std::int64_t kTile = 128;
  if (m <= 0 || n <= 0) {
    return 1;
  }
  const auto padded = [](std::int64_t size) {
    return static_cast<double>(CeilDiv(size, kTile) * kTile) / static_cast<double>(size);
  };
  return padded(m) * padded(n);
}

// Two rows per multiprocessor are worked on at a time, and each half of the cache serves its part
// of the multiprocessors (A100 and later).
Bytes RowTraffic(const Kernel& kernel, Bytes cache, std::int64_t sm_count) {
  const Bytes bytes = kernel.read + kernel.written;
  const bool stays = cache.value <= 0 || kernel.row * (2 * sm_count) * 2 <= cache;
  return stays ? bytes : bytes + kernel.reread;
}

const AttentionProfile& AttentionOf(const ComputeProfile& profile, AttentionImpl attention) {
  const AttentionProfile& own = attention == AttentionImpl::kCudnn    ? profile.cudnn_attention
                                : attention == AttentionImpl::kFlash3 ? profile.flash3_attention
                                : attention == AttentionImpl::kTriton ? profile.triton_attention
                                : attention == AttentionImpl::kCk     ? profile.ck_attention
                                : attention == AttentionImpl::kOwn    ? profile.own_attention
                                                                      : profile.attention;
  return own.forward.value > 0 ? own : profile.attention;
}

AttentionProfile& AttentionOf(ComputeProfile& profile, AttentionImpl attention) {
  return const_cast<AttentionProfile&>(AttentionOf(std::as_const(profile), attention));
}

double AttentionOverhead(const Kernel& kernel, double softmax, double start, std::int64_t sm_count,
                         double group) {
  if (kernel.attention == AttentionImpl::kTriton) {
    return 1;  // one fraction for all shapes: they were timed in steps, and with one shape
  }
  if (kernel.attention == AttentionImpl::kOwn) {
    // Its time goes by scores, not by their features: on an H200 heads of 64 reached half of the
    // FLOPs that heads of 128 did (docs/measurements.md, "The CUDA device on an H200").
    return kernel.k > 0 ? 128 / static_cast<double>(kernel.k) : 1;
  }
  if (start <= 0 || kernel.batch <= 0 || kernel.m <= 0 || kernel.k <= 0 ||
      kernel.flops.value <= 0) {
    return 1;
  }
  constexpr std::int64_t kTile = 128;
  const bool is_forward = kernel.kind == KernelClass::kAttentionForward;
  const bool longest_first = group > 0;
  const std::int64_t tile = longest_first && is_forward ? static_cast<std::int64_t>(group) : kTile;
  const auto dim = static_cast<double>(kernel.k);
  const double queries = static_cast<double>(kernel.batch) * static_cast<double>(kernel.m);
  // Two products of 2 k operations per query and key, five in backward.
  const double keys = kernel.flops.value / (queries * (is_forward ? 4 : 10) * dim);
  const auto all = static_cast<double>(kernel.n);
  const bool is_masked = keys < all;
  const double more = start + (is_masked ? static_cast<double>(kTile) / 2 : 0);
  // A causal mask lets the last tile see twice as many keys as the mean one.
  const double longest = (is_masked ? std::min(all, 2 * keys) : keys) + more;
  const double tiles =
      static_cast<double>(kernel.batch) * static_cast<double>(CeilDiv(kernel.m, tile));
  const double padded = tiles * static_cast<double>(tile) / queries;
  const double last = longest * static_cast<double>(sm_count) / tiles;
  const double scheduled =
      padded * (longest_first ? std::max(keys + more, last) : keys + more + last);
  return scheduled / keys * (1 - softmax + softmax * 128 / dim);
}

bool IsOwnGroupedKnown(const ComputeProfile& profile, MathType type) {
  return profile.own_grouped.value > 0 && (type == MathType::kBf16 || type == MathType::kFp16);
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
      rates.own_grouped[i] = IsOwnGroupedKnown(profile, static_cast<MathType>(i))
                                 ? *peak * profile.own_grouped.value
                                 : rates.gemm[i];
    }
    for (std::size_t library = 0; library < kAttentionImplCount; ++library) {
      const AttentionProfile& attention = AttentionOf(profile, static_cast<AttentionImpl>(library));
      rates.attention[library].forward[i] = *peak * attention.forward.value;
      rates.attention[library].backward[i] = *peak * attention.backward.value;
      rates.attention[library].softmax = attention.softmax.value;
      rates.attention[library].start = attention.start.value;
      rates.attention[library].group = attention.group.value;
      rates.attention[library].wide = attention.wide.value;
    }
  }
  rates.fp8_rowwise = profile.fp8_rowwise.value > 0 ? profile.fp8_rowwise.value : 1;
  const BytesPerSecond memory = gpu.memory_bandwidth.value * (1 / slowest);
  rates.elementwise = memory * profile.elementwise.value;
  rates.reduction = memory * profile.reduction.value;
  rates.optimizer = memory * profile.optimizer.value;
  const auto like_updates = [&](const Number<double>& fraction) {
    return fraction.value > 0 ? memory * fraction.value : rates.optimizer;
  };
  rates.grad_norm = like_updates(profile.grad_norm);
  rates.grad_clip = like_updates(profile.grad_clip);
  rates.copies = profile.copies.value > 0 ? memory * profile.copies.value : rates.elementwise;
  rates.rows = profile.rows.value > 0 ? memory * profile.rows.value : rates.elementwise;
  rates.gather = profile.gather.value > 0 ? memory * profile.gather.value : rates.elementwise;
  rates.operands = memory * profile.gemm_operands.value;
  rates.gemm_memory =
      profile.gemm_memory.value > 0 ? memory * profile.gemm_memory.value : rates.elementwise;
  rates.streaming = std::max(rates.elementwise, rates.copies);
  rates.gemm_ramp = profile.gemm_ramp.value;
  rates.floor = profile.kernel_floor.value;
  rates.gap = profile.kernel_gap.value;
  rates.qr_column = profile.qr_column.value;
  rates.load = profile.load.value;
  rates.grouped_overlap = profile.grouped_overlap.value;
  rates.grouped_call = profile.grouped_call.value;
  rates.cache = gpu.l2.value;
  rates.sm_count = std::max<std::int64_t>(gpu.sm_count.value, 1);
  rates.has_wide_cudnn_gradients = HasWideCudnnGradients(gpu.architecture);
  return rates;
}

AttentionImpl AttentionOn(const Kernel& kernel, bool has_wide_cudnn_gradients) {
  const bool has_no_plan = kernel.is_own && kernel.kind == KernelClass::kAttentionBackward &&
                           kernel.k > kWidestCudnnGradient && !has_wide_cudnn_gradients;
  return has_no_plan ? AttentionImpl::kOwn : kernel.attention;
}

namespace {

// Products of many weights: their operands are brought while others are multiplied, but not all.
Seconds GroupedTime(const Kernel& kernel, const KernelRates& rates) {
  const Seconds streaming = (kernel.read + kernel.written) / rates.gemm_memory;
  const auto& of_peak = kernel.is_own ? rates.own_grouped : rates.gemm;
  const Seconds multiplying =
      kernel.flops / RateOf(of_peak, kernel.dtype) * PaddingOverhead(kernel.m, kernel.n);
  return std::max(multiplying, streaming) +
         std::min(multiplying, streaming) * (1 - rates.grouped_overlap);
}

}  // namespace

Seconds KernelTime(const Kernel& kernel, const KernelRates& rates) {
  const AttentionImpl attention_on_gpu = AttentionOn(kernel, rates.has_wide_cudnn_gradients);
  if (attention_on_gpu != kernel.attention) {
    Kernel other = kernel;
    other.attention = attention_on_gpu;
    return KernelTime(other, rates);
  }
  const Bytes bytes = kernel.read + kernel.written;
  // Bytes that cross the memory bus take at least this long, whatever is computed meanwhile.
  const Seconds streaming = bytes / rates.elementwise;
  Seconds time;
  switch (kernel.kind) {
    case KernelClass::kGemm:
    case KernelClass::kGroupedGemm:
    case KernelClass::kConv: {
      const double overhead = TileOverhead(kernel.batch, kernel.m, kernel.n, rates.sm_count);
      if (kernel.kind == KernelClass::kGroupedGemm && rates.sm_count > 1) {
        time = std::max(GroupedTime(kernel, rates) + rates.gemm_ramp,
                        rates.grouped_call * static_cast<double>(kernel.calls));
        break;
      }
      const double share = kernel.scaled_by_row ? rates.fp8_rowwise : 1;
      const Seconds multiplying =
          kernel.flops / RateOf(rates.gemm, kernel.dtype) * overhead / share;
      time = rates.operands.value > 0 ? multiplying + bytes / rates.operands
                                      : std::max(multiplying, bytes / rates.gemm_memory);
      time += rates.gemm_ramp;
      break;
    }
    case KernelClass::kAttentionForward:
    case KernelClass::kAttentionBackward: {
      const AttentionRates& attention = rates.attention[static_cast<std::size_t>(kernel.attention)];
      const auto& at =
          kernel.kind == KernelClass::kAttentionForward ? attention.forward : attention.backward;
      constexpr std::int64_t kUsualHead = 128;
      const bool is_wide = attention.wide > 0 && kernel.k > kUsualHead &&
                           kernel.kind == KernelClass::kAttentionBackward;
      const double overhead = AttentionOverhead(kernel, attention.softmax, attention.start,
                                                rates.sm_count, attention.group) *
                              (is_wide ? attention.wide : 1);
      time = std::max(kernel.flops / RateOf(at, kernel.dtype) * overhead, streaming);
      break;
    }
    case KernelClass::kNorm:
    case KernelClass::kSoftmax:
      time = kernel.row > Bytes(0) ? RowTraffic(kernel, rates.cache, rates.sm_count) / rates.rows
                                   : bytes / rates.reduction;
      break;
    case KernelClass::kOptimizer:
      time = bytes / rates.optimizer;
      break;
    case KernelClass::kElementwise:
      time = streaming;
      break;
    case KernelClass::kGatherScatter:
      // By elements: what is looked up again comes from a cache, but no sooner.
      time = std::max((bytes + kernel.reread) / rates.gather,
                      rates.load * static_cast<double>(kernel.waits));
      break;
    case KernelClass::kCopy:
      time = bytes / rates.copies;
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
