#pragma once

// Kernels without sums: activations, sums and products of tensors, copies with a cast, dropout.
//
// All are limited by memory, not by arithmetic. Example: c = a + b of 2^26 bf16 numbers moves 3 x
// 128 MiB, 84 us at 4.8 TB/s. So threads keep several loads of 16 bytes in flight, and fusions such
// as kGated save a whole pass over memory.

#include <cmath>
#include <cstdint>

#include "executor/cuda/kernels/array.h"
#include "executor/cuda/kernels/block.h"
#include "executor/cuda/kernels/kernel_id.h"
#include "models/model.h"

namespace shardwright::gpu {

// Activations as PyTorch defines them. Of a 16-bit result the instructions' own exponential and
// division are exact enough.
SW_DEVICE float Sigmoid(float x, bool is_half = false) {
#if defined(__CUDACC__)
  if (is_half) {
    return __fdividef(1.0F, 1.0F + __expf(-x));
  }
#else
  (void)is_half;
#endif
  return 1.0F / (1.0F + expf(-x));
}

// f(x).
// Example: SiLU of 2 is 2 / (1 + e^-2) = 1.762; GELU of 1 is 0.841, its tanh form 0.841, too.
SW_DEVICE float Activate(Activation function, float x, bool is_half = false) {
  switch (function) {
    case Activation::kNone:
      return x;
    case Activation::kRelu:
      return x > 0.0F ? x : 0.0F * x;  // NaN stays NaN
    case Activation::kGelu:
      return x * (0.5F * erfcf(-x * 0.707106781F));
    case Activation::kGeluTanh:  // 1 + tanh(u) = 2 sigmoid(2 u)
      return x * Sigmoid(2.0F * 0.797884561F * (x + 0.044715F * x * x * x), is_half);
    case Activation::kSilu:
      return x * Sigmoid(x, is_half);
    case Activation::kTanh:
      return tanhf(x);
    case Activation::kSigmoid:
      return Sigmoid(x, is_half);
  }
  return x;
}

// f'(x) * dy. `kept` is x, or f(x) for ReLU, tanh and sigmoid.
// ReLU, tanh and sigmoid need only their result: f'(x) = 1 - f(x)^2 for tanh. PyTorch saves the
// result of these three as well.
SW_DEVICE float ActivateGrad(Activation function, float kept, float dy, bool is_half = false) {
  const float x = kept;
  switch (function) {
    case Activation::kNone:
      return dy;
    case Activation::kRelu:
      return x > 0.0F ? dy : 0.0F;
    case Activation::kGelu:
      return dy * (0.5F * erfcf(-x * 0.707106781F) + x * 0.398942280F * expf(-0.5F * x * x));
    case Activation::kGeluTanh: {
      const float u = 0.797884561F * (x + 0.044715F * x * x * x);
      const float s = Sigmoid(2.0F * u, is_half);
      const float slope = 0.797884561F * (1.0F + 3.0F * 0.044715F * x * x);
      return dy * (s + 2.0F * x * s * (1.0F - s) * slope);
    }
    case Activation::kSilu: {
      const float s = Sigmoid(x, is_half);
      return dy * (s * (1.0F + x * (1.0F - s)));
    }
    case Activation::kTanh:
      return dy * (1.0F - x * x);
    case Activation::kSigmoid:
      return dy * (x * (1.0F - x));
  }
  return dy;
}

SW_DEVICE bool KeepsResult(Activation function) {
  return function == Activation::kRelu || function == Activation::kTanh ||
         function == Activation::kSigmoid;
}

enum class MapOp : std::uint8_t {
  kCopy,          // a
  kAdd,           // a + b
  kMul,           // a * b
  kScale,         // a * factor
  kDivide,        // a / factor
  kActivate,      // f(a)
  kActivateGrad,  // f'(a) b
  kGated,         // f(a) b
  kGateGrad,      // gradient of the gate: f'(a) (b c), where b is up and c the output's gradient
  kGatedGrad,     // the same, and into z2 that of up: f(a) c
};

// z[i] = op(a[i], b[j], c[i]) for i < n, where j is i, or i % period (b repeats), or i / plane (one
// b per plane). With `adds` the result is added to z. Arrays in `wide` have rows of twice `row`
// elements, of which the map takes one half: the first, or the one at which `data` points. z2 lies
// as z does. Examples: a bias of 4,096 features on rows has period 4,096. A factor per channel of
// images of 7 x 7 has plane 49. An array (rows, 200) that holds gate and up side by side is `wide`
// with row 100. Element 250 of a half lies at 250 + 2 x 100 = 450, which is column 50 of row 2.
struct MapArgs {
  MapOp op = MapOp::kCopy;
  Activation activation = Activation::kNone;
  bool adds = false;
  float factor = 1.0F;
  std::int64_t n = 0;
  std::int64_t period = 0;  // 0: j = i
  std::int64_t plane = 0;   // 0: no planes
  std::int64_t row = 0;
  std::uint32_t wide = 0;  // 1: a, 2: b, 4: c, 8: z; not with period or plane
  Array a = {}, b = {}, c = {}, z = {}, z2 = {};
};

// The function of an op's activation as a constant, so that loops over elements do not ask for it.
template <class F>
SW_DEVICE void WithActivation(Activation function, const F& f) {
  switch (function) {
    case Activation::kSilu:
      return f([] { return Activation::kSilu; });
    case Activation::kGelu:
      return f([] { return Activation::kGelu; });
    case Activation::kGeluTanh:
      return f([] { return Activation::kGeluTanh; });
    default:
      return f([function] { return function; });
  }
}

// Two vectors of eight 16-bit numbers per thread, or as many bytes of fp32; one where three arrays
// are read, for which there are no more registers. Blocks cover n.
// Example: 10,000 bf16 numbers in blocks of 256 x 8 x 2 = 4,096 are 3 blocks, the last for 1,808.
struct MapKernel : KernelTraits<KernelId::kMap, MapArgs, 256> {
  static constexpr int kMinBlocks = 4;

  static SW_DEVICE bool AreHalf(const Args& args) {
    const auto is_half = [](const Array& a) { return a.data == nullptr || IsHalf(a.dtype); };
    return is_half(args.a) && is_half(args.b) && is_half(args.c) && is_half(args.z);
  }
  // Elements of a block.
  static SW_DEVICE std::int64_t PerBlock(const Args& args) {
    return std::int64_t{kThreads} * kVector * (AreHalf(args) && !ReadsC(args.op) ? 2 : 1);
  }

  static SW_DEVICE void Run(Block& block, const Args& args) {
    switch (args.op) {
      case MapOp::kCopy:
        return RunOp<MapOp::kCopy>(block, args, Activation::kNone);
      case MapOp::kAdd:
        return RunOp<MapOp::kAdd>(block, args, Activation::kNone);
      case MapOp::kMul:
        return RunOp<MapOp::kMul>(block, args, Activation::kNone);
      case MapOp::kScale:
        return RunOp<MapOp::kScale>(block, args, Activation::kNone);
      case MapOp::kDivide:
        return RunOp<MapOp::kDivide>(block, args, Activation::kNone);
      case MapOp::kActivate:
        return RunActivation<MapOp::kActivate>(block, args);
      case MapOp::kActivateGrad:
        return RunActivation<MapOp::kActivateGrad>(block, args);
      case MapOp::kGated:
        return RunActivation<MapOp::kGated>(block, args);
      case MapOp::kGateGrad:
        return RunActivation<MapOp::kGateGrad>(block, args);
      case MapOp::kGatedGrad:
        return RunActivation<MapOp::kGatedGrad>(block, args);
    }
  }

 private:
  static constexpr bool ReadsB(MapOp op) {
    return op != MapOp::kCopy && op != MapOp::kScale && op != MapOp::kDivide &&
           op != MapOp::kActivate;
  }
  static constexpr bool ReadsC(MapOp op) {
    return op == MapOp::kGateGrad || op == MapOp::kGatedGrad;
  }

  template <MapOp kOp>
  static SW_DEVICE void RunActivation(Block& block, const Args& args) {
    WithActivation(args.activation, [&](auto function) { RunOp<kOp>(block, args, function()); });
  }

  // z, and z2 of kGatedGrad.
  struct Result {
    float z, z2;
  };
  template <MapOp kOp>
  static SW_DEVICE Result One(const Args& args, Activation function, float a, float b, float c) {
    const bool is_half = IsHalf(args.z.dtype);
    if constexpr (kOp == MapOp::kCopy) {
      return {a, 0.0F};
    } else if constexpr (kOp == MapOp::kAdd) {
      return {a + b, 0.0F};
    } else if constexpr (kOp == MapOp::kMul) {
      return {a * b, 0.0F};
    } else if constexpr (kOp == MapOp::kScale) {
      return {a * args.factor, 0.0F};
    } else if constexpr (kOp == MapOp::kDivide) {
      return {a / args.factor, 0.0F};
    } else if constexpr (kOp == MapOp::kActivate) {
      return {Activate(function, a, is_half), 0.0F};
    } else if constexpr (kOp == MapOp::kActivateGrad) {
      return {ActivateGrad(function, a, b, is_half), 0.0F};
    } else if constexpr (kOp == MapOp::kGated) {
      return {Activate(function, a, is_half) * b, 0.0F};
    } else {
      const float y = Activate(function, a, is_half);
      const float kept = KeepsResult(function) ? y : a;
      return {ActivateGrad(function, kept, b * c, is_half), y * c};
    }
  }

  template <MapOp kOp>
  static SW_DEVICE void RunOp(Block& block, const Args& args, Activation function) {
    if (AreHalf(args)) {
      RunVectors<kOp, true>(block, args, function);
    } else {
      RunVectors<kOp, false>(block, args, function);
    }
  }

  template <MapOp kOp, bool kHalf>
  static SW_DEVICE void RunVectors(Block& block, const Args& args, Activation function) {
    constexpr int kVectors = kHalf && !ReadsC(kOp) ? 2 : 1;
    constexpr std::int64_t kApart = std::int64_t{kThreads} * kVector;
    const bool is_split = args.wide != 0 && args.row % kVector != 0;
    const bool in_vectors = args.period == 0 && args.plane == 0 && !is_split;
    block.Each([&](int t) {
      const std::int64_t first = block.index() * kApart * kVectors + std::int64_t{t} * kVector;
      if (in_vectors) {
        RunThread<kOp, kHalf>(args, function, first);
        return;
      }
      for (int v = 0; v < kVectors; ++v) {
        const std::int64_t begin = first + v * kApart;
        SW_NO_UNROLL
        for (std::int64_t i = begin; i < begin + kVector && i < args.n; ++i) {
          RunScalar<kOp>(args, function, i);
        }
      }
    });
  }

  // Where element i of an array lies.
  static SW_DEVICE std::int64_t At(const Args& args, std::uint32_t array, std::int64_t i) {
    return (args.wide & array) != 0 ? i + i / args.row * args.row : i;
  }

  template <MapOp kOp>
  static SW_DEVICE void RunScalar(const Args& args, Activation function, std::int64_t i) {
    const std::int64_t j =
        args.period > 0 ? i % args.period : (args.plane > 0 ? i / args.plane : i);
    const float b = ReadsB(kOp) ? Load(args.b, At(args, 2, j)) : 0.0F;
    const float c = ReadsC(kOp) ? Load(args.c, At(args, 4, i)) : 0.0F;
    const Result result = One<kOp>(args, function, Load(args.a, At(args, 1, i)), b, c);
    StoreOrAdd(args.z, At(args, 8, i), result.z, args.adds);
    if constexpr (kOp == MapOp::kGatedGrad) {
      Store(args.z2, At(args, 8, i), result.z2);
    }
  }

  template <MapOp kOp, bool kHalf>
  static SW_DEVICE void RunThread(const Args& args, Activation function, std::int64_t first) {
    constexpr int kVectors = kHalf && !ReadsC(kOp) ? 2 : 1;
    constexpr std::int64_t kApart = std::int64_t{kThreads} * kVector;
    const Array a = Known<kHalf>(args.a), b = Known<kHalf>(args.b), c = Known<kHalf>(args.c);
    const Array z = Known<kHalf>(args.z), z2 = Known<kHalf>(args.z2);
    Eight as[kVectors], bs[kVectors], cs[kVectors], zs[kVectors];
    SW_UNROLL
    for (int v = 0; v < kVectors; ++v) {
      const std::int64_t i = first + v * kApart;
      const std::int64_t count = args.n - i;
      if (count <= 0) {
        continue;
      }
      as[v] = LoadEight(a, At(args, 1, i), count);
      if constexpr (ReadsB(kOp)) {
        bs[v] = LoadEight(b, At(args, 2, i), count);
      }
      if constexpr (ReadsC(kOp)) {
        cs[v] = LoadEight(c, At(args, 4, i), count);
      }
      if (args.adds) {
        zs[v] = LoadEight(z, At(args, 8, i), count);
      }
    }
    SW_UNROLL
    for (int v = 0; v < kVectors; ++v) {
      const std::int64_t i = first + v * kApart;
      const std::int64_t count = args.n - i;
      if (count <= 0) {
        continue;
      }
      float xs[kVector], ys[kVector] = {}, ws[kVector] = {}, sums[kVector] = {}, seconds[kVector];
      Unpack(as[v], a.dtype, xs);
      if constexpr (ReadsB(kOp)) {
        Unpack(bs[v], b.dtype, ys);
      }
      if constexpr (ReadsC(kOp)) {
        Unpack(cs[v], c.dtype, ws);
      }
      if (args.adds) {
        Unpack(zs[v], z.dtype, sums);
      }
      SW_UNROLL
      for (int k = 0; k < kVector; ++k) {
        const Result result = One<kOp>(args, function, xs[k], ys[k], ws[k]);
        sums[k] = args.adds ? sums[k] + result.z : result.z;
        seconds[k] = result.z2;
      }
      StoreEight(z, At(args, 8, i), Pack(sums, z.dtype), count);
      if constexpr (kOp == MapOp::kGatedGrad) {
        StoreEight(z2, At(args, 8, i), Pack(seconds, z2.dtype), count);
      }
    }
  }
};

// Copies rows of features between tensors with other row lengths, zeros where there is no source:
// row r of `count` gets its first `features` elements from from[from_first + r * from_stride], and
// lands at to[to_first + r * to_stride].
// Example: q of a fused (q, k, v) with 512 features each: features = 512, from_stride = 1,536,
// from_first = 0, to_stride = 512. For k from_first is 512.
struct CopyRowsArgs {
  Array from = {}, to = {};
  std::int64_t rows = 0, features = 0;
  std::int64_t from_first = 0, from_stride = 0;
  std::int64_t to_first = 0, to_stride = 0;
};
// Eight features per thread, or one where rows do not divide into eights.
struct CopyRowsKernel : KernelTraits<KernelId::kCopyRows, CopyRowsArgs, 256> {
  static SW_DEVICE std::int64_t PerThread(const Args& args) {
    return args.features % kVector == 0 ? kVector : 1;
  }
  // Threads of a launch.
  static SW_DEVICE std::int64_t Items(const Args& args) {
    return args.rows * (args.features / PerThread(args));
  }

  static SW_DEVICE void Run(Block& block, const Args& args) {
    block.Each([&](int t) {
      const std::int64_t i = block.index() * kThreads + t;
      if (i >= Items(args)) {
        return;
      }
      const std::int64_t pieces = args.features / PerThread(args);
      const std::int64_t row = i / pieces;
      const std::int64_t feature = i % pieces * PerThread(args);
      const std::int64_t from = args.from_first + row * args.from_stride + feature;
      const std::int64_t to = args.to_first + row * args.to_stride + feature;
      if (PerThread(args) == 1) {
        Store(args.to, to, Load(args.from, from));
        return;
      }
      float values[kVector];
      Unpack(LoadEight(args.from, from), args.from.dtype, values);
      StoreEight(args.to, to, Pack(values, args.to.dtype));
    });
  }
};

// Philox4x32-10, Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC 2011.
struct RandomBlock {
  std::uint32_t words[4];
};
// Four words from a counter of four words and a key, with no state: any thread can ask for any
// word.
SW_DEVICE RandomBlock PhiloxRounds(RandomBlock counter, std::uint64_t key) {
  auto key0 = static_cast<std::uint32_t>(key);
  auto key1 = static_cast<std::uint32_t>(key >> 32U);
  std::uint32_t* const w = counter.words;
  for (int round = 0; round < 10; ++round) {
    const std::uint64_t a = std::uint64_t{0xD2511F53U} * w[0];
    const std::uint64_t b = std::uint64_t{0xCD9E8D57U} * w[2];
    w[0] = static_cast<std::uint32_t>(b >> 32U) ^ w[1] ^ key0;
    w[1] = static_cast<std::uint32_t>(b);
    w[2] = static_cast<std::uint32_t>(a >> 32U) ^ w[3] ^ key1;
    w[3] = static_cast<std::uint32_t>(a);
    key0 += 0x9E3779B9U;
    key1 += 0xBB67AE85U;
  }
  return counter;
}

// The inputs of a mask, as the host's DropoutFactors has them. Element e of a sample uses word e %
// 4 of the counter (e / 4, sample, op, step). It is dropped when that word is below the threshold.
// Example: probability 0.1 has threshold 429,496,730 and keep 1.111. Element 10 of a sample uses
// word 2 of counter (2, sample, op, step).
//
// Samples are counted over the whole batch, so the mask does not depend on the number of ranks, and
// a recomputed forward pass drops the same elements. No mask is stored.
struct DropoutMask {
  std::uint64_t seed = 0;
  std::uint32_t step = 0, op = 0, first_sample = 0;
  std::uint32_t threshold = 0;  // probability times 2^32
  float keep = 1.0F;            // 1 / (1 - probability)
};
// The words of elements `first` to `first` + 3, where `first` is a multiple of four.
SW_DEVICE RandomBlock DropoutWords(const DropoutMask& mask, std::int64_t sample,
                                   std::int64_t first) {
  return PhiloxRounds(
      {{static_cast<std::uint32_t>(first / 4),
        mask.first_sample + static_cast<std::uint32_t>(sample), mask.op, mask.step}},
      mask.seed);
}
SW_DEVICE float DropoutFactor(const DropoutMask& mask, std::int64_t sample, std::int64_t element) {
  const RandomBlock random = DropoutWords(mask, sample, element);
  std::uint32_t word = random.words[0];
  SW_UNROLL
  for (int k = 1; k < 4; ++k) {  // an index that is no constant would put the words into memory
    word = element % 4 == k ? random.words[k] : word;
  }
  return word < mask.threshold ? 0.0F : mask.keep;
}

// y = x times the factors; `elements` per sample.
struct DropoutArgs {
  Array x = {}, y = {};
  std::int64_t samples = 0, elements = 0;
  DropoutMask mask;
};
// Eight elements per thread; of one sample, where samples divide into eights.
struct DropoutKernel : KernelTraits<KernelId::kDropout, DropoutArgs, 256> {
  static SW_DEVICE void Run(Block& block, const Args& args) {
    const bool in_vectors = args.elements % kVector == 0;
    const std::int64_t n = args.samples * args.elements;
    block.Each([&](int t) {
      const std::int64_t first = (block.index() * kThreads + t) * kVector;
      if (in_vectors && first < n) {
        DropEight(args, first);
        return;
      }
      for (std::int64_t i = first; i < first + kVector && i < n; ++i) {
        Store(args.y, i,
              Load(args.x, i) * DropoutFactor(args.mask, i / args.elements, i % args.elements));
      }
    });
  }

 private:
  static SW_DEVICE void DropEight(const Args& args, std::int64_t first) {
    const Eight eight = LoadEight(args.x, first);
    const std::int64_t sample = first / args.elements;
    const std::int64_t element = first % args.elements;
    const RandomBlock random[2] = {DropoutWords(args.mask, sample, element),
                                   DropoutWords(args.mask, sample, element + 4)};
    float values[kVector];
    Unpack(eight, args.x.dtype, values);
    SW_UNROLL
    for (int k = 0; k < kVector; ++k) {
      values[k] *= random[k / 4].words[k % 4] < args.mask.threshold ? 0.0F : args.mask.keep;
    }
    StoreEight(args.y, first, Pack(values, args.y.dtype));
  }
};

}  // namespace shardwright::gpu
