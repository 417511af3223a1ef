// Stretches of ops that are launched as graphs, on an emulated GPU.

#include <chrono>
#include <cstdint>
#include <span>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include <doctest/doctest.h>

#include "core/error.h"
#include "executor/cuda/graphs.h"
#include "executor/cuda/session.h"
#include "schedule/wrap.h"
#include "tests/executor/cuda/device_training.h"
#include "tests/executor/cuda/emulation/emulated_gpu.h"
#include "tests/executor/cuda/forwarding_gpu.h"
#include "tests/executor/cuda/test_gpu.h"

namespace shardwright::testing {
namespace {

struct GraphRun {
  Outcome outcome;
  std::string graphs;
};
GraphRun TrainUntraced(Setup setup, Gpu& gpu, bool graphs) {
  setup.steps = 4;  // a warm-up in some dialects, op by op, captured, launched again
  setup.run.poison = true;
  const Program program = LowerForCuda(setup);
  CudaSession session(
      {setup.model, FindKernelSet(kPlainKernels, "test"), setup.job, program, setup.training},
      {.graphs = graphs}, gpu, setup.run);
  GraphRun run;
  run.outcome = RunToEnd(setup, program, session.runtime());
  run.graphs = session.graphs();
  return run;
}

// What changes by step and lies in a graph all the same would be that of the step that was
// captured; a graph that is launched before what it waits for computes with NaNs.
TEST_CASE("CudaDevice.GraphsHaveTheBitsOfSingleLaunches") {
  for (const Variant& variant : Variants()) {
    CAPTURE(std::string(variant.name));
    const Setup setup = SetupOf(variant);
    const GraphRun plain = TrainUntraced(setup, *MakeTestGpu(1), false);
    const GraphRun graphs = TrainUntraced(setup, *MakeTestGpu(2), true);
    CHECK(graphs.outcome.weights == plain.outcome.weights);
    CHECK(graphs.outcome.losses == plain.outcome.losses);
    CHECK(graphs.outcome.scaler == plain.outcome.scaler);
    CHECK(plain.graphs.empty());
    CHECK(graphs.graphs.ends_with(" ops, 0 refused"));
    CHECK(!graphs.graphs.starts_with("0 "));
  }
}

// While it is late, a graph starts 50 ms after all before it in its stream is over.
class LateGpu : public ForwardingGpu {
 public:
  LateGpu() : ForwardingGpu(MakeEmulatedGpu({})), event_(NewEvent(false)) {}
  void LaunchGraph(GpuGraph graph, GpuStream stream) override {
    if (is_late_) {
      Record(event_, stream);
      Synchronize(event_);
      std::this_thread::sleep_for(std::chrono::milliseconds(50));
    }
    ForwardingGpu::LaunchGraph(graph, stream);
  }
  void set_late(bool is_late) { is_late_ = is_late; }

 private:
  const GpuEvent event_;
  bool is_late_ = false;
};

TEST_CASE("CudaDevice.AStepWhoseLastOpsAreAGraphEndsWithThem") {
  Setup setup = TinySetup(Dialect::kNative, 1);
  setup.job.mode = JobMode::kForward;
  setup.model.ops.pop_back();  // the loss, which is in no graph
  setup.model.tensors.pop_back();
  setup.plan.units = Wrap(setup.model, ParseWrap("root", "test"), {}, Dialect::kNative, "test");
  LateGpu gpu;
  setup.run.inputs = [&](const BatchKey& key, std::span<const View> /*tensors*/) {
    gpu.set_late(key.step == 3);
  };
  const GraphRun run = TrainUntraced(setup, gpu, true);
  CHECK(!run.graphs.starts_with("0 "));
  REQUIRE(run.outcome.ends.size() == 4);
  CHECK(ToSeconds(run.outcome.ends[3] - run.outcome.ends[2]).value > 0.04);
}

// The driver ends every third capture with an error; a library fails in the middle of another.
class RefusingGpu : public ForwardingGpu {
 public:
  RefusingGpu() : ForwardingGpu(MakeTestGpu(2)) {}
  void BeginCapture(GpuStream stream) override {
    ForwardingGpu::BeginCapture(stream);
    fails_ = ++captures_ % 3 == 2;
    is_capturing_ = true;
  }
  [[nodiscard]] GpuGraph EndCapture(GpuStream stream) override {
    is_capturing_ = false;
    if (captures_ % 3 == 1) {
      throw RunError("cudaStreamEndCapture: operation failed due to a previous error");
    }
    return ForwardingGpu::EndCapture(stream);
  }
  void DropCapture(GpuStream stream) noexcept override {
    is_capturing_ = false;
    ForwardingGpu::DropCapture(stream);
  }
  [[nodiscard]] bool Multiply(const gpu::GemmArgs& product, void* workspace, std::int64_t bytes,
                              GpuStream stream) override {
    if (is_capturing_ && fails_) {
      throw RunError("cublasLtMatmul: cuBLAS status 14");
    }
    return ForwardingGpu::Multiply(product, workspace, bytes, stream);
  }

 private:
  int captures_ = 0;
  bool fails_ = false, is_capturing_ = false;
};

TEST_CASE("CudaDevice.WhatTheDriverOrALibraryWillNotCaptureRunsOpByOp") {
  const Setup setup = SetupOf(Variants()[0]);  // one rank
  RefusingGpu gpu;
  const GraphRun graphs = TrainUntraced(setup, gpu, true);
  const GraphRun plain = TrainUntraced(setup, *MakeTestGpu(1), false);
  CHECK(graphs.outcome.weights == plain.outcome.weights);
  CHECK(!graphs.graphs.ends_with(" 0 refused"));
  CHECK(!graphs.graphs.starts_with("0 "));
}

// Two ops of the compute stream in a row, the second of which is what the case says.
std::vector<std::vector<std::uint32_t>> StretchesWith(Call call, bool scales_loss = false) {
  Body body;
  body.ops.resize(2);
  std::vector<Call> calls = {DivideCall{}, std::move(call)};
  std::vector<Work> works(2);
  works[0].call = calls.data();
  works[1].call = calls.data() + 1;
  return FindStretches(body, works, scales_loss);
}

TEST_CASE("CudaDevice.NumbersThatChangeByStepAreInNoGraph") {
  const std::vector<std::vector<std::uint32_t>> both = {{0, 1}};
  const std::vector<std::vector<std::uint32_t>> none;
  OpSpec spec;
  const auto model = [&](OpKind kind, double dropout, bool is_training) {
    spec.kind = kind;
    spec.dropout_p = dropout;
    ModelCall call;
    call.call.spec = &spec;
    call.call.is_training = is_training;
    return StretchesWith(call);
  };
  CHECK(model(OpKind::kLinear, 0.0, true) == both);
  CHECK(model(OpKind::kDropout, 0.1, true) == none);
  CHECK(model(OpKind::kDropout, 0.1, false) == both);
  CHECK(model(OpKind::kAttention, 0.1, true) == none);
  CHECK(model(OpKind::kAttention, 0.0, true) == both);
  CHECK(model(OpKind::kCrossEntropy, 0.0, true) == none);
  CHECK(model(OpKind::kNllLoss, 0.0, true) == none);
  CHECK(StretchesWith(CopyCall{}) == both);
  CopyCall inputs;
  inputs.loads_inputs = true;
  CHECK(StretchesWith(inputs) == none);
  CHECK(StretchesWith(UpdateCall{}) == none);
  for (const bool scales_loss : {false, true}) {
    CHECK(StretchesWith(NormCall{}, scales_loss) == (scales_loss ? none : both));
    CHECK(StretchesWith(ClipCall{}, scales_loss) == (scales_loss ? none : both));
  }
}

}  // namespace
}  // namespace shardwright::testing
