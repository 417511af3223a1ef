#pragma once

// The optimizer's update of many ranges of a shard in one launch.
//
// Example: two ranges of 5,000 and 3,000 elements. A block covers 256 x 8 = 2,048 elements, so
// first_block is (0, 3), the launch has 5 blocks, and block 4 updates elements 2,048 to 2,999 of
// the second range. Ranges differ in their scalars, such as the weight decay.
//
// AdamW in fp32 reads 16 and writes 12 bytes per element: parameter, gradient and two states. For
// 10^9 elements of a shard 28 GB move, 5.8 ms at 4.8 TB/s.
//
// The arithmetic is UpdateStep's (executor/update_step.h), which the host device compiles, too, so
// both make the same bits. `rounds_each` rounds behind each PyTorch operation, as the
// implementations without fused kernels do on 16-bit parameters.

#include <cstdint>

#include "executor/cuda/kernels/array.h"
#include "executor/cuda/kernels/block.h"
#include "executor/cuda/kernels/kernel_id.h"
#include "executor/update_step.h"

namespace shardwright::gpu {

inline constexpr int kMostRanges = 16;

struct UpdateRange {
  std::int64_t param = 0, grad = 0, state = 0;  // first elements
  std::int64_t count = 0;
  UpdateScalars scalars;
};
struct UpdateArgs {
  OptimizerKind kind = OptimizerKind::kAdamW;
  DType dtype = DType::kFp32;
  bool rounds_each = false;
  void* params = nullptr;
  const void* grads = nullptr;
  void* states[2] = {};
  UpdateRange ranges[kMostRanges];
  std::int64_t first_block[kMostRanges] = {};  // of each range
  int range_count = 0;
};

// How UpdateStep reads and rounds.
template <class T>
struct StepElement {
  using Stored = T;
  static SW_DEVICE float Load(T stored) { return ToFloat(stored); }
  static SW_DEVICE T Store(float value) {
    T stored;
    FromFloat(value, &stored);
    return stored;
  }
};

struct UpdateKernel : KernelTraits<KernelId::kUpdate, UpdateArgs, 256> {
  static constexpr std::int64_t kPerBlock = std::int64_t{kThreads} * kVector;

  static SW_DEVICE void Run(Block& block, const Args& args) {
    int r = args.range_count - 1;
    while (args.first_block[r] > block.index()) {
      --r;
    }
    const UpdateRange& range = args.ranges[r];
    block.Each([&](int t) {
      const std::int64_t i =
          (block.index() - args.first_block[r]) * kPerBlock + std::int64_t{t} * kVector;
      if (i >= range.count) {
        return;
      }
      switch (args.dtype) {
        case DType::kBf16:
          return args.rounds_each ? RunKind<Bf16, true>(args, range, i)
                                  : RunKind<Bf16, false>(args, range, i);
        case DType::kFp16:
          return args.rounds_each ? RunKind<Fp16, true>(args, range, i)
                                  : RunKind<Fp16, false>(args, range, i);
        default:
          return RunKind<float, false>(args, range, i);
      }
    });
  }

 private:
  template <class T, bool kRoundEach>
  static SW_DEVICE void RunKind(const Args& args, const UpdateRange& range, std::int64_t i) {
    switch (args.kind) {
      case OptimizerKind::kSgd:
        return RunEight<T, kRoundEach, OptimizerKind::kSgd>(args, range, i);
      case OptimizerKind::kMomentum:
        return RunEight<T, kRoundEach, OptimizerKind::kMomentum>(args, range, i);
      case OptimizerKind::kAdam:
        return RunEight<T, kRoundEach, OptimizerKind::kAdam>(args, range, i);
      case OptimizerKind::kAdamW:
        return RunEight<T, kRoundEach, OptimizerKind::kAdamW>(args, range, i);
      case OptimizerKind::kAdadelta:
        return RunEight<T, kRoundEach, OptimizerKind::kAdadelta>(args, range, i);
      case OptimizerKind::kLion:
        return RunEight<T, kRoundEach, OptimizerKind::kLion>(args, range, i);
      case OptimizerKind::kAdafactor:  // CheckUpdates
        return;
    }
  }

  template <class T, bool kRoundEach, OptimizerKind kKind>
  static SW_DEVICE void RunEight(const Args& args, const UpdateRange& range, std::int64_t i) {
    using Step = UpdateStep<StepElement<T>, kRoundEach, kKind>;
    // An optimizer without this state has a null pointer there.
    constexpr bool kHasState0 = kKind != OptimizerKind::kSgd;
    constexpr bool kHasState1 =
        kHasState0 && kKind != OptimizerKind::kMomentum && kKind != OptimizerKind::kLion;
    const Array arrays[3] = {
        {args.params, args.dtype}, {args.states[0], args.dtype}, {args.states[1], args.dtype}};
    const std::int64_t at[3] = {range.param + i, range.state + i, range.state + i};
    const std::int64_t count = range.count - i;
    const Eight grads =
        LoadEight({const_cast<void*>(args.grads), args.dtype}, range.grad + i, count);
    Eight eights[3] = {};
    eights[0] = LoadEight(arrays[0], at[0], count);
    if constexpr (kHasState0) {
      eights[1] = LoadEight(arrays[1], at[1], count);
    }
    if constexpr (kHasState1) {
      eights[2] = LoadEight(arrays[2], at[2], count);
    }
    float grad[kVector], numbers[3][kVector];
    Unpack(grads, args.dtype, grad);
    SW_UNROLL
    for (int a = 0; a < 3; ++a) {
      Unpack(eights[a], args.dtype, numbers[a]);
    }
    SW_UNROLL
    for (int k = 0; k < kVector; ++k) {
      const auto updated =
          Step::Step({numbers[0][k], numbers[1][k], numbers[2][k]}, grad[k], range.scalars);
      numbers[0][k] = updated.param;
      numbers[1][k] = updated.state0;
      numbers[2][k] = updated.state1;
    }
    StoreEight(arrays[0], at[0], Pack(numbers[0], args.dtype), count);
    if constexpr (kHasState0) {
      StoreEight(arrays[1], at[1], Pack(numbers[1], args.dtype), count);
    }
    if constexpr (kHasState1) {
      StoreEight(arrays[2], at[2], Pack(numbers[2], args.dtype), count);
    }
  }
};

}  // namespace shardwright::gpu
