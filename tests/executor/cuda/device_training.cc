#include "tests/executor/cuda/device_training.h"

#include <memory>

#include "core/error.h"
#include "executor/cuda/session.h"
#include "schedule/lower.h"
#include "schedule/verify.h"
#include "schedule/wrap.h"
#include "tests/executor/cuda/test_gpu.h"

namespace shardwright::testing {
namespace {

void ClipWithOffloadedMoments(Setup& s) {
  s.job.clip_gradients = true;
  s.training.clip_norm = 0.05;
  s.plan.offload.moments = true;
  s.plan.moments_piece = Bytes(1000);
}

}  // namespace

Program LowerForCuda(const Setup& setup, const char* kernels) {
  const KernelSetOptions set = KernelsOf(setup, kernels);
  Program program = Lower({setup.model, set, setup.job, setup.plan});
  const auto illegal = Verify(program);
  SW_CHECK(illegal.empty(), illegal.front().text);
  return program;
}

Outcome TrainOnGpu(const Setup& setup, std::uint64_t seed, const char* kernels) {
  const Program program = LowerForCuda(setup, kernels);
  const std::unique_ptr<Gpu> gpu = MakeTestGpu(seed);
  RunOptions run = setup.run;
  run.poison = true;
  run.trace = true;
  const KernelSetOptions set = KernelsOf(setup, kernels);
  CudaSession session({setup.model, set, setup.job, program, setup.training}, {}, *gpu, run);
  return RunToEnd(setup, program, session.runtime());
}

std::vector<Variant> Variants() {
  const auto nothing = [](Setup&) {};
  const auto clip = [](Setup& s) {
    s.job.clip_gradients = true;
    s.training.clip_norm = 0.05;
  };
  const auto half = [](DType dtype) {
    return [dtype](Setup& s) { s.job.precision = {DType::kFp32, dtype, dtype}; };
  };
  return {
      {"one rank", Dialect::kNative, 1, nothing, kFp32Bound},
      {"native", Dialect::kNative, 2, nothing, kFp32Bound},
      {"native, four ranks", Dialect::kNative, 4, nothing, kFp32Bound},
      {"native, eight ranks", Dialect::kNative, 8, nothing, kFp32Bound},
      {"fsdp2", Dialect::kFsdp2, 2, nothing, kFp32Bound},
      {"fsdp1", Dialect::kFsdp1, 2, nothing, kFp32Bound},
      {"ddp", Dialect::kDdp, 3, nothing, kFp32Bound},
      {"zero1", Dialect::kZero1, 2, nothing, kFp32Bound},
      {"zero2", Dialect::kZero2, 2, nothing, kFp32Bound},
      {"zero3", Dialect::kZero3, 2, nothing, kFp32Bound},
      // The norm leaves the gradients as they are, and the clipping divides them.
      {"zero2, clipping", Dialect::kZero2, 2, clip, kFp32Bound},
      // Parts that lie apart.
      {"zero1, weights gathered in pieces", Dialect::kZero1, 2,
       [](Setup& s) { s.plan.zero.allgather_bucket = 60; }, kFp32Bound},
      {"hybrid", Dialect::kNative, 4,
       [](Setup& s) {
         s.plan.shard_size = 2;
         s.plan.replicate_size = 2;
       },
       kFp32Bound},
      {"accumulation", Dialect::kFsdp2, 2, [](Setup& s) { s.plan.accumulation = 3; }, kFp32Bound},
      {"recompute", Dialect::kNative, 2,
       [](Setup& s) {
         s.plan.recompute = RecomputeBlocks(s.model, RecomputeKind::kFull, 1, "test");
       },
       kFp32Bound},
      {"offload of activations", Dialect::kNative, 2,
       [](Setup& s) { s.plan.offload.activations = true; }, kFp32Bound},
      {"offload of the optimizer", Dialect::kNative, 2,
       [](Setup& s) { s.plan.offload.optimizer = true; }, kFp32Bound},
      {"offload of moments", Dialect::kNative, 2, ClipWithOffloadedMoments, kFp32Bound},
      {"clipping", Dialect::kFsdp2, 2, clip, kFp32Bound},
      {"clipping in host memory", Dialect::kFsdp2, 2,
       [clip](Setup& s) {
         clip(s);
         s.plan.offload.parameters = true;
       },
       kFp32Bound},
      {"bf16", Dialect::kNative, 2, half(DType::kBf16), kHalfBound},
      {"zero3, clipped in sub-groups", Dialect::kZero3, 2,
       [clip](Setup& s) {
         clip(s);
         s.plan.zero.sub_group = 1;
       },
       kFp32Bound},
      // Several clippings, of which the first decides whether the step is skipped.
      {"zero2 in fp16 with a loss scale", Dialect::kZero2, 2,
       [clip, half](Setup& s) {
         clip(s);
         half(DType::kFp16)(s);
       },
       kHalfBound},
      {"fp16 with a loss scale", Dialect::kFsdp2, 2,
       [clip, half](Setup& s) {
         clip(s);
         half(DType::kFp16)(s);
       },
       kHalfBound},
  };
}

Setup SetupOf(const Variant& variant) {
  Setup setup = TinySetup(variant.dialect, variant.ranks);
  setup.kernel = HostKernel;
  setup.job.optimizer.kind = OptimizerKind::kSgd;  // Adam amplifies rounding of small gradients
  setup.training.optimizer.learning_rate = 0.5;
  variant.change(setup);
  return setup;
}

}  // namespace shardwright::testing
