// Speed of the host kernels on the ops of one GPT-2-small layer and its head, 1024 tokens, and on
// a convolution, fp32, one thread; bench/host_kernels_torch.py runs the same ops in PyTorch. CPU
// time is what counts: the machine may be shared. Each op is run forward, or forward and backward.

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include <benchmark/benchmark.h>

#include "executor/host/kernels/table.h"
#include "executor/model_op.h"
#include "models/kernel_set.h"

namespace shardwright {
namespace {

struct alignas(64) Line {
  float values[16];
};

// Aligned memory of fp32 numbers that are neither zero nor denormal.
class Memory {
 public:
  explicit Memory(std::int64_t bytes = 0) : lines_(static_cast<std::size_t>((bytes + 63) / 64)) {
    float value = -0.5F;
    for (Line& line : lines_) {
      for (float& v : line.values) {
        v = value;
        value = value > 0.5F ? -0.5F : value + 0.0123F;
      }
    }
  }
  [[nodiscard]] void* data() { return lines_.data(); }
  [[nodiscard]] std::span<std::byte> bytes() {
    return {reinterpret_cast<std::byte*>(lines_.data()), lines_.size() * sizeof(Line)};
  }

 private:
  std::vector<Line> lines_;
};

// One op with all its memory.
class OpBench {
 public:
  OpBench(const OpSpec& spec, const std::vector<std::int64_t>& inputs,
          const std::vector<std::int64_t>& params, std::int64_t output, std::int64_t batch = 1)
      : spec_(spec), options_(FindKernelSet("shardwright-host", "bench")) {
    const OpKernels kernels = LowerOp(spec_, batch, DType::kFp32, options_);
    const auto add = [this](std::int64_t bytes) {
      memory_.emplace_back(bytes);
      return memory_.back().data();
    };
    memory_.reserve(64);
    call_.spec = &spec_;
    call_.batch = batch;
    call_.options = &options_;
    for (const std::int64_t n : inputs) {
      call_.inputs.push_back({add(n * 4), DType::kFp32, n});
      call_.input_grads.push_back({add(n * 4), DType::kFp32, n});
    }
    for (const std::int64_t n : params) {
      call_.params.push_back({add(n * 4), DType::kFp32, n});
      call_.param_grads.push_back({{add(n * 4), DType::kFp32, n}, false});
    }
    call_.outputs.push_back({add(output * 4), DType::kFp32, output});
    call_.output_grads.push_back({add(output * 4), DType::kFp32, output});
    (void)add(kernels.extra_saved.value);
    call_.saved = memory_.back().bytes();
    (void)add(std::max(kernels.forward_workspace.value, kernels.backward_workspace.value));
    call_.workspace = memory_.back().bytes();
  }

  // The last input holds ids: labels below `limit`.
  void SetIds(std::size_t input, std::int64_t rows, std::int64_t limit) {
    ids_.resize(static_cast<std::size_t>(rows));
    for (std::size_t i = 0; i < ids_.size(); ++i) {
      ids_[i] = static_cast<std::int64_t>(i * 7919) % limit;
    }
    call_.inputs[input] = {ids_.data(), DType::kInt64, rows};
    call_.input_grads[input] = {nullptr, DType::kInt64, rows};
  }

  void Run(benchmark::State& state, bool backward, double flops) {
    for (auto _ : state) {
      ForwardOnHost(call_);
      if (backward) {
        BackwardOnHost(call_);
      }
      benchmark::ClobberMemory();
    }
    if (flops > 0) {
      state.counters["GFLOP/s"] =
          benchmark::Counter(flops * 1e-9, benchmark::Counter::kIsIterationInvariantRate);
    }
  }

 private:
  OpSpec spec_;
  KernelSetOptions options_;
  std::vector<Memory> memory_;
  std::vector<std::int64_t> ids_;
  ModelOpCall call_;
};

// A 3 x 3 convolution of a small ConvNet: 16 images of 32 channels, 28 x 28, to 64 channels.
constexpr std::int64_t kImages = 16;
constexpr std::int64_t kSide = 28;

void Conv(benchmark::State& state, bool backward) {
  constexpr std::int64_t kIn = 32;
  constexpr std::int64_t kOut = 64;
  constexpr std::int64_t kPixels = kImages * kSide * kSide;
  OpBench op({.kind = OpKind::kConv2d,
              .in = kIn,
              .out = kOut,
              .has_bias = true,
              .height = kSide,
              .width = kSide,
              .height_out = kSide,
              .width_out = kSide,
              .kernel = 3,
              .stride = 1,
              .padding = 1,
              .groups = 1},
             {kPixels * kIn}, {kOut * kIn * 9, kOut}, kPixels * kOut, kImages);
  const auto one = static_cast<double>(2 * kPixels * kOut * kIn * 9);
  op.Run(state, backward, backward ? 3 * one : one);
}

constexpr std::int64_t kTokens = 1024;
constexpr std::int64_t kHidden = 768;
constexpr std::int64_t kVocabulary = 50257;

void Linear(benchmark::State& state, std::int64_t in, std::int64_t out, bool backward) {
  OpBench op({.kind = OpKind::kLinear, .rows = kTokens, .in = in, .out = out, .has_bias = true},
             {kTokens * in}, {in * out, out}, kTokens * out);
  const auto one = static_cast<double>(2 * kTokens * in * out);
  op.Run(state, backward, backward ? 3 * one : one);
}

void Attention(benchmark::State& state, bool backward) {
  OpBench op({.kind = OpKind::kAttention,
              .rows = kTokens,
              .heads = 12,
              .kv_heads = 12,
              .head_dim = 64,
              .value_dim = 64,
              .seq_q = kTokens,
              .seq_k = kTokens,
              .causal = true},
             {3 * kTokens * kHidden}, {}, kTokens * kHidden);
  op.Run(state, backward, 0);
}

void Norm(benchmark::State& state, bool backward) {
  OpBench op({.kind = OpKind::kLayerNorm,
              .rows = kTokens,
              .in = kHidden,
              .has_bias = true,
              .epsilon = 1e-5},
             {kTokens * kHidden}, {kHidden, kHidden}, kTokens * kHidden);
  op.Run(state, backward, 0);
}

void Gelu(benchmark::State& state, bool backward) {
  OpBench op({.kind = OpKind::kActivation,
              .rows = kTokens,
              .in = 4 * kHidden,
              .activation = Activation::kGeluTanh},
             {4 * kTokens * kHidden}, {}, 4 * kTokens * kHidden);
  op.Run(state, backward, 0);
}

void Add(benchmark::State& state, bool backward) {
  OpBench op({.kind = OpKind::kAdd, .rows = kTokens, .in = kHidden},
             {kTokens * kHidden, kTokens * kHidden}, {}, kTokens * kHidden);
  op.Run(state, backward, 0);
}

void CrossEntropy(benchmark::State& state, bool backward) {
  OpBench op({.kind = OpKind::kCrossEntropy, .rows = kTokens, .in = kVocabulary},
             {kTokens * kVocabulary, kTokens}, {}, 1);
  op.SetIds(1, kTokens, kVocabulary);
  op.Run(state, backward, 0);
}

void Embedding(benchmark::State& state, bool backward) {
  OpBench op({.kind = OpKind::kEmbedding, .rows = kTokens, .out = kHidden, .vocab = kVocabulary},
             {kTokens}, {kVocabulary * kHidden}, kTokens * kHidden);
  op.SetIds(0, kTokens, kVocabulary);
  op.Run(state, backward, 0);
}

void Register(const std::string& name, void (*run)(benchmark::State&, bool)) {
  for (const bool backward : {false, true}) {
    benchmark::RegisterBenchmark((name + (backward ? "/both" : "/forward")).c_str(),
                                 [run, backward](benchmark::State& state) { run(state, backward); })
        ->Unit(benchmark::kMillisecond);
  }
}

void RegisterAll() {
  Register("qkv", [](benchmark::State& s, bool b) { Linear(s, kHidden, 3 * kHidden, b); });
  Register("projection", [](benchmark::State& s, bool b) { Linear(s, kHidden, kHidden, b); });
  Register("up", [](benchmark::State& s, bool b) { Linear(s, kHidden, 4 * kHidden, b); });
  Register("down", [](benchmark::State& s, bool b) { Linear(s, 4 * kHidden, kHidden, b); });
  Register("attention", Attention);
  Register("layer_norm", Norm);
  Register("gelu", Gelu);
  Register("add", Add);
  Register("head", [](benchmark::State& s, bool b) { Linear(s, kHidden, kVocabulary, b); });
  Register("cross_entropy", CrossEntropy);
  Register("embedding", Embedding);
  Register("conv", Conv);
}

}  // namespace
}  // namespace shardwright

int main(int argc, char** argv) {
  shardwright::RegisterAll();
  benchmark::Initialize(&argc, argv);
  benchmark::RunSpecifiedBenchmarks();
  return 0;
}
