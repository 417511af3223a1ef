#pragma once

// The optimizer's update of many ranges of a shard in one launch.

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

struct UpdateKernel {
  static constexpr KernelId kId = KernelId::kUpdate;
  using Args = UpdateArgs;
  static constexpr int kThreads = 256;

  static SW_DEVICE void Run(Block& block, const Args& args) {
    int r = args.range_count - 1;
    while (args.first_block[r] > block.index()) {
      --r;
    }
    const UpdateRange& range = args.ranges[r];
    block.Each([&](int t) {
      const std::int64_t i = (block.index() - args.first_block[r]) * kThreads + t;
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
        return RunOne<T, kRoundEach, OptimizerKind::kSgd>(args, range, i);
      case OptimizerKind::kMomentum:
        return RunOne<T, kRoundEach, OptimizerKind::kMomentum>(args, range, i);
      case OptimizerKind::kAdam:
        return RunOne<T, kRoundEach, OptimizerKind::kAdam>(args, range, i);
      case OptimizerKind::kAdamW:
        return RunOne<T, kRoundEach, OptimizerKind::kAdamW>(args, range, i);
      case OptimizerKind::kAdadelta:
        return RunOne<T, kRoundEach, OptimizerKind::kAdadelta>(args, range, i);
    }
  }

  template <class T, bool kRoundEach, OptimizerKind kKind>
  static SW_DEVICE void RunOne(const Args& args, const UpdateRange& range, std::int64_t i) {
    using Element = StepElement<T>;
    constexpr bool kHasState0 = kKind != OptimizerKind::kSgd;
    constexpr bool kHasState1 = kHasState0 && kKind != OptimizerKind::kMomentum;
    T* const param = static_cast<T*>(args.params) + range.param + i;
    // An optimizer without this state has a null pointer there.
    T* const state0 = kHasState0 ? static_cast<T*>(args.states[0]) + range.state + i : nullptr;
    T* const state1 = kHasState1 ? static_cast<T*>(args.states[1]) + range.state + i : nullptr;
    typename UpdateStep<Element, kRoundEach, kKind>::Values old = {ToFloat(*param), 0.0F, 0.0F};
    if constexpr (kHasState0) {
      old.state0 = ToFloat(*state0);
    }
    if constexpr (kHasState1) {
      old.state1 = ToFloat(*state1);
    }
    const float grad = ToFloat(static_cast<const T*>(args.grads)[range.grad + i]);
    const auto updated = UpdateStep<Element, kRoundEach, kKind>::Step(old, grad, range.scalars);
    FromFloat(updated.param, param);
    if constexpr (kHasState0) {
      FromFloat(updated.state0, state0);
    }
    if constexpr (kHasState1) {
      FromFloat(updated.state1, state1);
    }
  }
};

}  // namespace shardwright::gpu
