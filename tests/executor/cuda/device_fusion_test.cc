// Passes that run inside the kernels beside them, on an emulated GPU, against the host device.

#include <algorithm>
#include <cstddef>
#include <string>
#include <vector>

#include <doctest/doctest.h>

#include "schedule/wrap.h"
#include "tests/executor/cuda/device_training.h"
#include "tests/executor/tiny_training.h"
#include "traces/check.h"
#include "traces/waits.h"

namespace shardwright::testing {
namespace {

// Three blocks of a GELU each: its passes are gone, and the numbers are as without.
TEST_CASE("CudaDevice.GeluRunsInsideTheProductsBesideIt") {
  const std::vector<Variant> variants = {
      {"plain", Dialect::kNative, 1, [](Setup&) {}, kFp32Bound},
      {"fsdp2, accumulation", Dialect::kFsdp2, 2, [](Setup& s) { s.plan.accumulation = 2; },
       kFp32Bound},
      {"recompute", Dialect::kNative, 2,
       [](Setup& s) {
         s.plan.recompute = RecomputeBlocks(s.model, RecomputeKind::kFull, 1, "test");
       },
       kFp32Bound},
      {"offload of activations", Dialect::kNative, 2,
       [](Setup& s) { s.plan.offload.activations = true; }, kFp32Bound},
      {"bf16", Dialect::kNative, 2,
       [](Setup& s) {
         s.job.precision = {DType::kFp32, DType::kBf16, DType::kBf16};
       },
       kHalfBound},
  };
  constexpr const char* kGelu = "shardwright-cuda-gelu";
  for (const Variant& variant : variants) {
    CAPTURE(std::string(variant.name));
    Setup setup = SetupOf(variant);
    setup.model = TinyNetwork(3, false, true);
    setup.plan.recompute.clear();
    variant.change(setup);
    const Program program = LowerForCuda(setup, kGelu);
    const auto passes = [&](const Program& p) {
      return std::count_if(p.step.ops.begin(), p.step.ops.end(), [&](const Op& op) {
        return p.shapes[op.shape.value].code == OpCode::kCompute &&
               setup.model.SpecOf(setup.model.ops[op.subject]).kind == OpKind::kActivation;
      });
    };
    CHECK(passes(LowerForCuda(setup)) >= 6 * setup.plan.accumulation);
    CHECK(passes(program) == 0);
    const Outcome host = Train(setup);
    const Outcome first = TrainOnGpu(setup, 1, kGelu);
    CHECK(RelativeDifference(host, first) < variant.bound);
    CHECK(TrainOnGpu(setup, 2, kGelu).weights == first.weights);
    Trace trace = first.trace;
    DeriveWaits(program, trace);
    for (const std::string& finding : CheckTrace(program, trace)) {
      FAIL_CHECK(finding);
    }
  }
}

// Some of what lies between is kept and some run again: the GELU stays an op of its own.
TEST_CASE("CudaDevice.GeluRunsAloneWhereItIsRecomputedAlone") {
  Setup setup = SetupOf(Variants()[1]);
  setup.model = TinyNetwork(3, false, true);
  setup.plan.recompute = RecomputeBlocks(setup.model, RecomputeKind::kSelective, 1, "test");
  const Outcome host = Train(setup);
  CHECK(RelativeDifference(host, TrainOnGpu(setup, 1, "shardwright-cuda-gelu")) < kFp32Bound);
}

// Three blocks with two sums each: a norm behind every one of them makes it, but where blocks are
// run again one by one and the norm is another block's or nobody's.
TEST_CASE("CudaDevice.NormsMakeTheSumsBeforeThem") {
  const auto recompute = [](RecomputeKind kind) {
    return [kind](Setup& s) { s.plan.recompute = RecomputeBlocks(s.model, kind, 1, "test"); };
  };
  const auto freeze = [](Setup& s) {
    for (Parameter& p : s.model.params) {
      p.trainable = p.fqn.find("norm") == std::string::npos && p.fqn.find("stem") != 0 &&
                    p.fqn.find("block0") != 0;
    }
  };
  struct Fused {
    Variant variant;
    std::ptrdiff_t sums_left;
  };
  const std::vector<Fused> all = {
      {{"one rank", Dialect::kNative, 1, [](Setup&) {}, kFp32Bound}, 0},
      {{"fsdp2, accumulation", Dialect::kFsdp2, 2, [](Setup& s) { s.plan.accumulation = 2; },
        kFp32Bound},
       0},
      {{"recompute", Dialect::kNative, 2, recompute(RecomputeKind::kFull), kFp32Bound}, 3},
      {{"selective", Dialect::kFsdp2, 2, recompute(RecomputeKind::kSelective), kFp32Bound}, 3},
      {{"frozen", Dialect::kNative, 2, freeze, kFp32Bound}, 0},
      {{"offload of activations", Dialect::kNative, 2,
        [](Setup& s) { s.plan.offload.activations = true; }, kFp32Bound},
       0},
      {{"bf16", Dialect::kNative, 2,
        [](Setup& s) {
          s.job.precision = {DType::kFp32, DType::kBf16, DType::kBf16};
        },
        kHalfBound},
       0},
  };
  constexpr const char* kFused = "shardwright-cuda-fused";
  for (const Fused& fused : all) {
    const Variant& variant = fused.variant;
    CAPTURE(std::string(variant.name));
    Setup setup = SetupOf(variant);
    setup.model = TinyTransformer(3);
    setup.plan.recompute.clear();
    variant.change(setup);
    const Program program = LowerForCuda(setup, kFused);
    const auto sums =
        std::count_if(program.step.ops.begin(), program.step.ops.end(), [&](const Op& op) {
          return program.ShapeOf(op).code == OpCode::kCompute && op.phase == Phase::kForward &&
                 setup.model.SpecOf(setup.model.ops[op.subject]).kind == OpKind::kAdd;
        });
    CHECK(sums == fused.sums_left);
    const Outcome host = Train(setup);
    const Outcome first = TrainOnGpu(setup, 1, kFused);
    CHECK(RelativeDifference(host, first) < variant.bound);
    CHECK(RelativeDifference(TrainOnGpu(setup, 1), first) < variant.bound);
    CHECK(TrainOnGpu(setup, 2, kFused).weights == first.weights);
    Trace trace = first.trace;
    DeriveWaits(program, trace);
    for (const std::string& finding : CheckTrace(program, trace)) {
      FAIL_CHECK(finding);
    }
  }
}

// The head and the loss behind it run in backward, chunk by chunk of three rows and one.
TEST_CASE("CudaDevice.LossRunsInChunks") {
  for (const Variant& variant : Variants()) {
    CAPTURE(std::string(variant.name));
    Setup setup = SetupOf(variant);
    const Program whole = LowerForCuda(setup);
    const Outcome host = Train(setup);
    setup.loss_chunks = 2;
    const Program program = LowerForCuda(setup);
    const auto losses = [&](const Program& p) {
      return std::count_if(p.step.ops.begin(), p.step.ops.end(), [&](const Op& op) {
        return p.ShapeOf(op).code == OpCode::kCompute &&
               setup.model.SpecOf(setup.model.ops[op.subject]).kind == OpKind::kCrossEntropy;
      });
    };
    CHECK(losses(whole) == 2 * setup.plan.accumulation);
    CHECK(losses(program) == 0);
    // The head's forward pass and both of the loss.
    CHECK(std::ssize(whole.step.ops) - std::ssize(program.step.ops) == 3 * setup.plan.accumulation);
    const Outcome first = TrainOnGpu(setup, 1);
    CHECK(RelativeDifference(host, first) < variant.bound);
    CHECK(RelativeDifference(host, Train(setup)) < variant.bound);
    CHECK(TrainOnGpu(setup, 2).weights == first.weights);
    REQUIRE(first.losses.size() == host.losses.size());
    for (std::size_t i = 0; i < host.losses.size(); ++i) {
      CHECK(first.losses[i] == doctest::Approx(host.losses[i]).epsilon(variant.bound));
    }
    Trace trace = first.trace;
    DeriveWaits(program, trace);
    for (const std::string& finding : CheckTrace(program, trace)) {
      FAIL_CHECK(finding);
    }
  }
}

// In forward every number is that of the sum and the norm apart: the sum is rounded before it is
// normalized. In evaluation, too.
TEST_CASE("CudaDevice.ForwardWithSumsInNormsHasTheSameBits") {
  for (const DType dtype : {DType::kFp32, DType::kBf16}) {
    Setup setup = TinySetup(Dialect::kNative, 2);
    setup.kernel = HostKernel;
    setup.model = TinyTransformer(3);
    setup.job.mode = JobMode::kForward;
    setup.job.precision = {DType::kFp32, dtype, dtype};
    setup.plan.recompute.clear();
    const Program program = LowerForCuda(setup, "shardwright-cuda-fused");
    CHECK(program.step.ops.size() + 6 == LowerForCuda(setup).step.ops.size());
    const Outcome fused = TrainOnGpu(setup, 1, "shardwright-cuda-fused");
    REQUIRE(!fused.losses.empty());
    CHECK(fused.losses == TrainOnGpu(setup, 1).losses);
  }
}

}  // namespace
}  // namespace shardwright::testing
