// Time of each kernel of the CUDA device on GPU 0, and the fraction of what the GPU could do at
// best: bytes that must cross the memory bus over its bandwidth, or products over the rate of its
// matrix units, whichever takes longer (the roofline).
//
// Every op runs kWarmUps times, then kRuns times between two events; the median is printed. Buffers
// are larger than the L2 cache in sum, but one op's operands may stay in it: small fractions are
// safe, large ones are for ops that move gigabytes. Data are random numbers: multiplying zeros
// takes less power, so that a GPU keeps a higher clock than it has in training. The rates that
// count as 1 are data sheets' in bf16 (nvidia.com/en-us/data-center/h200 and h100, read
// 2026-11-21): 989 TFLOP/s, and 4.8 TB/s on an H200, 3.35 on an H100; on another GPU give them as
// arguments: cuda_kernels_bench TB_PER_S TFLOP_PER_S. Products in fp8 count at twice that rate.

#include <array>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <memory>
#include <random>
#include <string>
#include <utility>
#include <vector>

#include "core/error.h"
#include "core/ranges.h"
#include "executor/cuda/ops/model_ops.h"
#include "executor/cuda/plugin.h"
#include "executor/half.h"
#include "models/kernel_set.h"
#include "tests/executor/cuda/forwarding_gpu.h"

namespace shardwright {
namespace {

constexpr int kWarmUps = 3;
constexpr int kRuns = 11;
constexpr int kNoGpu = 77;

struct Rates {
  double bytes_per_s = 4.8e12;
  double flops_per_s = 989e12;
};

// One op with the numbers of elements of its tensors.
struct Case {
  const char* name;
  OpSpec spec;
  std::int64_t batch = 1;
  std::vector<std::int64_t> inputs, params, outputs;
  std::size_t index_input = SIZE_MAX;  // which one holds ids; none
  bool by_own_kernels = false;         // no cuDNN
  Fp8Products fp8 = Fp8Products::kNone;
};

constexpr std::int64_t kRows = 4096, kHidden = 4096, kWide = 14336, kHeads = 32, kKvHeads = 8;
constexpr std::int64_t kVocab = 128256, kExperts = 8, kExpertsPerToken = 2;
constexpr std::int64_t kImages = 64, kChannels = 64, kSide = 56;
constexpr std::int64_t kShard = std::int64_t{1} << 28;  // elements of an update

constexpr std::int64_t kAll = kRows * kHidden, kKeys = kRows * kKvHeads * 128;

Case Of(const char* name, const OpSpec& spec, std::vector<std::int64_t> inputs,
        std::vector<std::int64_t> params, std::vector<std::int64_t> outputs) {
  return {name, spec, 1, std::move(inputs), std::move(params), std::move(outputs)};
}

// An op on rows of features.
OpSpec Rows(OpKind kind, std::int64_t in = kHidden) {
  return {.kind = kind, .rows = kRows, .in = in, .epsilon = 1e-5};
}

Case Linear(const char* name, std::int64_t out, Fp8Products fp8 = Fp8Products::kNone) {
  OpSpec spec = Rows(OpKind::kLinear);
  spec.out = out;
  Case c = Of(name, spec, {kAll}, {kHidden * out}, {kRows * out});
  c.fp8 = fp8;
  return c;
}

OpSpec Heads(OpKind kind) {
  return {.kind = kind,
          .rows = kRows,
          .heads = kHeads,
          .kv_heads = kKvHeads,
          .head_dim = 128,
          .value_dim = 128,
          .seq_q = kRows,
          .seq_k = kRows,
          .causal = true,
          .rope = {.dim = 128, .theta = 5e5}};
}

Case Attention(const char* name, bool by_own_kernels) {
  Case c = Of(name, Heads(OpKind::kAttention), {kAll, kKeys, kKeys}, {}, {kAll});
  c.by_own_kernels = by_own_kernels;
  return c;
}

std::vector<Case> Cases() {
  OpSpec gated = Rows(OpKind::kGatedActivation, kWide);
  gated.activation = Activation::kSilu;
  const OpSpec embedding{
      .kind = OpKind::kEmbedding, .rows = kRows, .out = kHidden, .vocab = kVocab};
  std::vector<Case> cases = {
      Linear("linear 4096 x 4096 x 4096", kHidden),
      Linear("linear 4096 x 4096 x 14336", kWide),
      Linear("linear 4096 x 4096 x 14336, fp8", kWide, Fp8Products::kPerTensor),
      Linear("linear 4096 x 4096 x 14336, fp8-rowwise", kWide, Fp8Products::kPerRow),
      Attention("attention, causal, GQA 32/8, 4096", false),
      Attention("the same by our own kernel", true),
      Of("RMS norm", Rows(OpKind::kRmsNorm), {kAll}, {kHidden}, {kAll}),
      Of("residual sum inside an RMS norm", Rows(OpKind::kRmsNorm), {kAll, kAll}, {kHidden},
         {kAll, kAll}),
      Of("rope", Heads(OpKind::kRope), {kAll, kKeys}, {}, {kAll, kKeys}),
      Of("SwiGLU", gated, {kRows * kWide, kRows * kWide}, {}, {kRows * kWide}),
      Of("cross-entropy, 128256 classes", Rows(OpKind::kCrossEntropy, kVocab),
         {kRows * kVocab, kRows}, {}, {1}),
      Of("embedding", embedding, {kRows}, {kVocab * kHidden}, {kAll}),
  };
  cases[cases.size() - 2].index_input = 1;
  cases.back().index_input = 0;
  return cases;
}

// Of Mixtral 8x7B.
std::vector<Case> ExpertCases() {
  OpSpec router = Rows(OpKind::kRouter);
  router.experts = kExperts;
  router.experts_per_token = kExpertsPerToken;
  router.normalizes_top_k = true;
  OpSpec experts = router;
  experts.kind = OpKind::kExperts;
  experts.out = kWide;
  experts.gated = true;
  experts.activation = Activation::kSilu;
  return {Of("router, 8 experts", router, {kAll}, {kExperts * kHidden}, {kRows * kExperts}),
          Of("8 experts of 14336, 2 per token", experts, {kAll, kRows * kExperts},
             std::vector<std::int64_t>(3 * kExperts, kHidden * kWide), {kAll})};
}

// Of GPT-2 and its like.
std::vector<Case> RowCases() {
  OpSpec gelu = Rows(OpKind::kActivation, kWide), dropout = Rows(OpKind::kDropout);
  gelu.activation = Activation::kGeluTanh;
  dropout.dropout_p = 0.1;
  return {Of("layer norm", Rows(OpKind::kLayerNorm), {kAll}, {kHidden, kHidden}, {kAll}),
          Of("GELU, tanh form", gelu, {kRows * kWide}, {}, {kRows * kWide}),
          Of("residual sum", Rows(OpKind::kAdd), {kAll, kAll}, {}, {kAll}),
          Of("dropout", dropout, {kAll}, {}, {kAll})};
}

// Of a ResNet's first stage.
std::vector<Case> ImageCases() {
  const std::int64_t images = kImages * kChannels * kSide * kSide;
  const auto of = [&](const char* name, OpKind kind, std::vector<std::int64_t> params) {
    OpSpec spec{.kind = kind,
                .in = kChannels,
                .out = kChannels,
                .height = kSide,
                .width = kSide,
                .height_out = kSide,
                .width_out = kSide,
                .epsilon = 1e-5};
    if (kind != OpKind::kBatchNorm) {
      spec.kernel = 3;
      spec.stride = spec.padding = 1;
    }
    Case c = Of(name, spec, {images}, std::move(params), {images});
    c.batch = kImages;
    return c;
  };
  return {of("convolution 3 x 3, 64 x 56 x 56", OpKind::kConv2d, {kChannels * kChannels * 9}),
          of("batch norm", OpKind::kBatchNorm, {kChannels, kChannels}),
          of("max pool 3 x 3", OpKind::kMaxPool, {}),
          of("average pool 3 x 3", OpKind::kAvgPool, {})};
}

// A GPU without cuDNN's attention.
class WithoutCudnn : public testing::ForwardingGpu {
 public:
  using testing::ForwardingGpu::ForwardingGpu;
  [[nodiscard]] bool Attend(const gpu::AttentionArgs& /*args*/, bool /*is_backward*/,
                            void* /*workspace*/, std::int64_t /*bytes*/,
                            GpuStream /*stream*/) override {
    return false;
  }
};

class Bench {
 public:
  Bench(Gpu& gpu, const Rates& rates) : gpu_(gpu), rates_(rates) {
    options_ = FindKernelSet("shardwright-cuda-plain", "bench");
    fault_ = reinterpret_cast<gpu::Fault*>(Zeros(sizeof(gpu::Fault)));
  }

  void Run(const Case& c) {
    options_.fp8 = c.fp8;
    OpKernels kernels = LowerOp(c.spec, c.batch, DType::kBf16, options_);
    ModelOpCall call;
    call.spec = &c.spec;
    call.options = &options_;
    call.batch = c.batch;
    call.compute = DType::kBf16;
    for (std::size_t i = 0; i < c.inputs.size(); ++i) {
      const bool is_index = i == c.index_input;
      const DType dtype = is_index ? DType::kInt64 : DType::kBf16;
      const std::int64_t classes = c.spec.kind == OpKind::kEmbedding ? c.spec.vocab : c.spec.in;
      call.inputs.push_back(
          {is_index ? Indices(c.inputs[i], classes) : Random(c.inputs[i]), dtype, c.inputs[i]});
      call.input_grads.push_back({is_index ? nullptr : Zeros(c.inputs[i] * 2), dtype, c.inputs[i]});
    }
    for (const std::int64_t n : c.params) {
      call.params.push_back({Random(n), DType::kBf16, n});
      call.param_grads.push_back({{Zeros(n * 2), DType::kBf16, n}, false});
    }
    for (const std::int64_t n : c.outputs) {
      const DType dtype = n == 1 ? DType::kFp32 : DType::kBf16;
      call.outputs.push_back({Zeros(n * 4), dtype, n});
      call.output_grads.push_back({n == 1 ? Uniform(1) : Random(n), dtype, n});
    }
    if (c.spec.kind == OpKind::kExperts) {
      SpreadRows(c, call.inputs[1]);
    }
    if (c.spec.kind == OpKind::kRmsNorm && c.inputs.size() == 2) {  // as lowering has it
      const Bytes sum(c.inputs[1] * 2);
      kernels.forward.back().read += sum;
      kernels.forward.back().written += sum;
      kernels.backward_data.back().read += sum;
      call.adds_input_grads = true;
    }
    call.saved = Span(kernels.extra_saved);
    call.workspace = Span(std::max(kernels.forward_workspace, kernels.backward_workspace));
    TimeOp(c, call, false, kernels.forward);
    std::vector<Kernel> backward = kernels.backward_data;
    backward.insert(backward.end(), kernels.backward_weight.begin(), kernels.backward_weight.end());
    TimeOp(c, call, true, backward);
  }

  // The norm of gradients in fp32, for clipping.
  void RunNorm() {
    const std::vector<ElementRange> ranges = {{Uniform(kShard), kShard, DType::kFp32}};
    auto* const partial = reinterpret_cast<double*>(Zeros(NormPartials(ranges) * 8));
    auto* const norm = reinterpret_cast<float*>(Zeros(4));
    Time("norm of gradients", "clipping", static_cast<double>(kShard * 4) / rates_.bytes_per_s,
         [&] {
           SubmitGradientNorm(ranges, 1.0, partial, norm, {gpu_, stream_, fault_});
         });
  }

  // Parameters, gradients and states in fp32.
  void RunUpdates() {
    struct Update {
      const char* name;
      OptimizerKind kind;
      std::int64_t arrays_read, arrays_written;
    };
    std::array<std::byte*, 4> arrays{};
    for (std::byte*& array : arrays) {
      array = Uniform(kShard);
    }
    const std::vector<OptimizerRange> ranges = {{.count = kShard, .weight_decay = 0.1}};
    for (const Update& update : {Update{"AdamW, fused", OptimizerKind::kAdamW, 4, 3},
                                 Update{"Adadelta, fused", OptimizerKind::kAdadelta, 4, 3},
                                 Update{"SGD, fused", OptimizerKind::kSgd, 2, 1}}) {
      OptimizerCall call;
      call.spec = {.kind = update.kind, .impl = OptimizerImpl::kFused};
      call.params = arrays[0];
      call.grads = arrays[1];
      call.states = {arrays[2], arrays[3]};
      call.ranges = ranges;
      call.learning_rate = 1e-3;
      const auto bytes =
          static_cast<double>((update.arrays_read + update.arrays_written) * kShard * 4);
      Time(update.name, "update", bytes / rates_.bytes_per_s, [&] {
        SubmitShardUpdate(call, OptimizerOptions(), {gpu_, stream_, fault_});
      });
    }
  }

 private:
  [[nodiscard]] std::byte* Zeros(std::int64_t bytes) {
    std::byte* const data = gpu_.Allocate(Bytes(bytes), false);
    gpu_.Fill(data, 0, bytes, stream_);
    return data;
  }
  // Device memory with copies of these elements, one after the other.
  template <class T>
  [[nodiscard]] std::byte* Repeated(const std::vector<T>& elements, std::int64_t count) {
    const auto block = static_cast<std::int64_t>(elements.size() * sizeof(T));
    std::byte* const staged = gpu_.Allocate(Bytes(block), true);
    std::memcpy(staged, elements.data(), elements.size() * sizeof(T));
    const std::int64_t bytes = count * static_cast<std::int64_t>(sizeof(T));
    std::byte* const data = gpu_.Allocate(Bytes(bytes), false);
    for (std::int64_t at = 0; at < bytes; at += block) {
      gpu_.Copy(data + at, staged, std::min(block, bytes - at), stream_);
    }
    return data;
  }
  // Normal numbers in bf16; uniform ones from 0 to 1 in fp32, since sums of squares are not
  // negative.
  [[nodiscard]] std::byte* Random(std::int64_t count) {
    std::normal_distribution<float> normal;
    std::vector<std::uint16_t> block(kBlock);
    for (std::size_t i = 0; i < block.size(); ++i) {
      StoreFloat(DType::kBf16, block.data(), static_cast<std::int64_t>(i), normal(random_));
    }
    return Repeated(block, count);
  }
  [[nodiscard]] std::byte* Uniform(std::int64_t count) {
    std::uniform_real_distribution<float> uniform;
    std::vector<float> block(kBlock);
    std::generate(block.begin(), block.end(), [&] { return uniform(random_); });
    return Repeated(block, count);
  }
  [[nodiscard]] std::byte* Indices(std::int64_t count, std::int64_t limit) {
    std::uniform_int_distribution<std::int64_t> uniform(0, limit - 1);
    std::vector<std::int64_t> block(static_cast<std::size_t>(count));
    std::generate(block.begin(), block.end(), [&] { return uniform(random_); });
    return Repeated(block, count);
  }
  // Every row goes to as many experts as it should, each expert gets as many rows as another.
  void SpreadRows(const Case& c, const ConstView& weights) {
    const std::int64_t bytes = weights.elements * 2;
    auto* const staged = reinterpret_cast<std::uint16_t*>(gpu_.Allocate(Bytes(bytes), true));
    std::fill_n(staged, weights.elements, std::uint16_t{0});
    for (std::int64_t i = 0; i < c.spec.rows * c.spec.experts_per_token; ++i) {
      constexpr std::uint16_t kHalf = 0x3f00;  // in bf16
      staged[i / c.spec.experts_per_token * c.spec.experts + i % c.spec.experts] = kHalf;
    }
    gpu_.Copy(const_cast<void*>(weights.data), staged, bytes, stream_);
  }
  [[nodiscard]] std::span<std::byte> Span(Bytes size) {
    return {Zeros(size.value + 1), static_cast<std::size_t>(size.value)};
  }

  void TimeOp(const Case& c, const ModelOpCall& call, bool is_backward,
              const std::vector<Kernel>& kernels) {
    double best = 0.0;
    for (const Kernel& kernel : kernels) {
      best +=
          std::max(static_cast<double>((kernel.read + kernel.written).value) / rates_.bytes_per_s,
                   kernel.flops.value / rates_.flops_per_s / (kernel.dtype == DType::kFp8 ? 2 : 1));
    }
    Time(c.name, is_backward ? "backward" : "forward", best, [&] {
      SubmitModelOp(call, is_backward, {gpu_, stream_, fault_});
    });
  }

  // `best`: seconds, by the roofline.
  template <class Submit>
  void Time(const char* name, const char* pass, double best, const Submit& submit) {
    std::vector<double> seconds;
    for (int run = 0; run < kWarmUps + kRuns; ++run) {
      gpu_.Record(begin_, stream_);
      submit();
      gpu_.Record(end_, stream_);
      gpu_.Synchronize(end_);
      if (run >= kWarmUps) {
        seconds.push_back(ToSeconds(gpu_.Between(begin_, end_)).value);
      }
    }
    SortAll(seconds);
    const double median = seconds[seconds.size() / 2];
    std::printf("%-36s %-8s %10.1f us  %5.1f %% of the roofline  (%.1f to %.1f us)\n", name, pass,
                median * 1e6, 100.0 * best / median, seconds.front() * 1e6, seconds.back() * 1e6);
  }

  static constexpr std::size_t kBlock = std::size_t{1000003};  // elements; no multiple of a row
  Gpu& gpu_;
  const Rates rates_;
  std::mt19937_64 random_{1};
  KernelSetOptions options_;
  GpuStream stream_ = gpu_.NewStream(false);
  GpuEvent begin_ = gpu_.NewEvent(true);
  GpuEvent end_ = gpu_.NewEvent(true);
  gpu::Fault* fault_ = nullptr;
};

int Main(int count, char** arguments) {
  try {
    Rates rates;
    if (OpenGpu(0)->Info().name.find("H100") != std::string::npos) {
      rates.bytes_per_s = 3.35e12;
    }
    if (count == 3) {
      rates = {std::atof(arguments[1]) * 1e12, std::atof(arguments[2]) * 1e12};
    }
    std::printf("the roofline: %.2f TB/s, %.0f TFLOP/s\n", rates.bytes_per_s * 1e-12,
                rates.flops_per_s * 1e-12);
    std::vector<Case> cases = Cases();
    for (const std::vector<Case>& more : {ExpertCases(), RowCases(), ImageCases()}) {
      cases.insert(cases.end(), more.begin(), more.end());
    }
    for (const Case& c : cases) {
      std::unique_ptr<Gpu> gpu = OpenGpu(0);  // a fresh one: its memory goes with it
      if (c.by_own_kernels) {
        gpu = std::make_unique<WithoutCudnn>(std::move(gpu));
      }
      Bench(*gpu, rates).Run(c);
    }
    const std::unique_ptr<Gpu> gpu = OpenGpu(0);
    Bench bench(*gpu, rates);
    bench.RunNorm();
    bench.RunUpdates();
  } catch (const EnvironmentError& error) {
    std::fprintf(stderr, "%s\n", error.what());
    return kNoGpu;
  }
  return 0;
}

}  // namespace
}  // namespace shardwright

int main(int count, char** arguments) {
  return shardwright::Main(count, arguments);
}
