// That the installed cuDNN makes plans of our graphs for GPUs that are described to it, since none
// is here: attention and convolutions, with the memory that models/kernels/cuda.cc declares.
// Skipped where the library, or NVIDIA's run-time compiler that it needs for attention, is not
// installed.
//
//   cudnn_library_test LIBCUDA LIBCUBLASLT: paths of the fakes

#include <cstdio>
#include <string>

#include <dlfcn.h>

#define DOCTEST_CONFIG_IMPLEMENT
#include <doctest/doctest.h>

#include "executor/cuda/cudnn_problems.h"
#include "models/kernels/cuda.h"
#include "tests/skip.h"

namespace shardwright::testing {
namespace {

CudnnTable cudnn;
int (*kernels_found)() = nullptr;  // of the fake libcuda

// What cudaGetDeviceProperties says of an A100 and an H100, in cuDNN's keys.
std::string DeviceJson(int sm) {
  const bool is_hopper = sm == 90;
  return R"({"deviceName": "described", "cudaDeviceId": 0, "deviceVer": )" +
         std::to_string(10 * sm) + R"(, "multiProcessorCount": )" + (is_hopper ? "132" : "108") +
         R"(, "driverVer": 13000, "totalGlobalMem": 85899345920, "maxSharedMemoryPerBlock": 49152,
             "maxSharedMemoryPerBlockOptin": )" +
         (is_hopper ? "232448" : "166912") +
         R"(, "reservedSharedMemoryPerBlock": 1024, "maxGridSize": [2147483647, 65535, 65535],
             "maxBlockSize": [1024, 1024, 64], "regsPerBlock": 65536, "maxRegistersPerSM": 65536,
             "maxCtasPerSM": 32, "maxThreadsPerBlock": 1024, "maxThreadsPerSM": 2048,
             "warpSize": 32, "pciDeviceId": 0, "isTccDriver": 0, "supportCoopLaunch": 1,
             "smClockRateKHz": 1410000, "memClockRateKHz": 1593000, "l2CacheSize": )" +
         (is_hopper ? "52428800" : "41943040") + "}";
}

OpSpec AttentionSpec(const CudnnAttention& p) {
  return {.kind = OpKind::kAttention,
          .rows = p.seq_q,
          .heads = p.heads,
          .kv_heads = p.kv_heads,
          .head_dim = p.head_dim,
          .value_dim = p.value_dim,
          .seq_q = p.seq_q,
          .seq_k = p.seq_k,
          .causal = p.causal};
}

// q, k and v in one row of all heads, gradients likewise.
CudnnAttention Problem(std::int64_t heads, std::int64_t kv_heads, std::int64_t features,
                       std::int64_t tokens) {
  CudnnAttention p;
  p.causal = true;
  p.batch = 2;
  p.heads = heads;
  p.kv_heads = kv_heads;
  p.head_dim = p.value_dim = features;
  p.seq_q = p.seq_k = tokens;
  p.q = p.k = p.v = p.dq = p.dk = p.dv = {(heads + 2 * kv_heads) * features, features};
  return p;
}

void CheckPlan(int sm, const CudnnAttention& problem) {
  const CudnnDescriptor device = CudnnDevice(cudnn, DeviceJson(sm));
  REQUIRE(device.get() != nullptr);
  const std::int64_t declared = problem.is_backward
                                    ? CudnnAttentionGradWorkspace(AttentionSpec(problem), 2)
                                    : kCudnnDescriptors;
  CAPTURE(sm);
  CAPTURE(problem.is_backward);
  CAPTURE(problem.head_dim);
  CAPTURE(problem.kv_heads);
  CAPTURE(problem.seq_q);
  const CudnnPlan plan = MakeCudnnPlan(cudnn, device, problem, std::int64_t{1} << 40);
  CHECK(plan.problem == "");
  REQUIRE(plan.plan.get() != nullptr);
  CHECK(plan.workspace_bytes <= declared);
  // Not more than needed either, but for descriptors.
  CHECK(plan.workspace_bytes + kCudnnDescriptors >= declared);
  CHECK(kernels_found() > 0);  // the code was compiled and loaded
}

TEST_CASE("CudnnLibrary.PlansAttention") {
  for (const int sm : {80, 90}) {
    for (const bool is_backward : {false, true}) {
      CudnnAttention gpt2 = Problem(12, 12, 64, 1024);
      gpt2.is_backward = is_backward;
      CheckPlan(sm, gpt2);
      CudnnAttention llama = Problem(8, 2, 128, 200);  // grouped; no whole tiles
      llama.is_backward = is_backward;
      CheckPlan(sm, llama);
    }
    CudnnAttention vit = Problem(4, 4, 64, 197);
    vit.causal = false;
    vit.dtype = DType::kFp16;
    CheckPlan(sm, vit);
  }
}

// What simulate takes for granted (HasWideCudnnGradients): where the library has no plan, our own
// kernel runs, tens of times slower.
TEST_CASE("CudnnLibrary.GradientsOfWideHeadsAreHoppersAlone") {
  struct Heads {
    std::int64_t key, value;
  };
  struct Chip {
    int sm;
    const char* architecture;
  };
  for (const Chip& chip : {Chip{80, "ampere"}, Chip{89, "ada"}, Chip{90, "hopper"},
                           Chip{100, "blackwell"}, Chip{120, "blackwell-rtx"}}) {
    const CudnnDescriptor device = CudnnDevice(cudnn, DeviceJson(chip.sm));
    REQUIRE(device.get() != nullptr);
    for (const Heads& heads : {Heads{128, 128}, Heads{192, 128}, Heads{256, 256}}) {
      if (heads.key == 128 && (chip.sm == 80 || chip.sm == 90)) {
        continue;  // asked for above; a plan takes the compiler seconds
      }
      CudnnAttention problem = Problem(4, 4, heads.key, 512);
      problem.is_backward = true;
      problem.value_dim = heads.value;
      problem.v = problem.dv = {4 * heads.value, heads.value};
      const CudnnPlan plan = MakeCudnnPlan(cudnn, device, problem, std::int64_t{1} << 40);
      CAPTURE(chip.sm);
      CAPTURE(heads.key);
      CAPTURE(plan.problem);
      CHECK((plan.plan.get() != nullptr) ==
            (heads.key <= kWidestCudnnGradient || HasWideCudnnGradients(chip.architecture)));
    }
  }
}

OpSpec ConvolutionSpec(const CudnnConvolution& p) {
  return {.kind = OpKind::kConv2d,
          .in = p.in,
          .out = p.out,
          .height = p.height,
          .width = p.width,
          .height_out = p.height_out,
          .width_out = p.width_out,
          .kernel = p.kernel,
          .stride = p.stride,
          .padding = p.padding,
          .groups = p.groups};
}

TEST_CASE("CudnnLibrary.PlansConvolutions") {
  // Of ResNet-50: its first one, one in the middle, one that widens, one at the end; and a vision
  // transformer's patches.
  struct Shape {
    std::int64_t in, out, height, kernel, stride, padding;
  };
  for (const int sm : {80, 90}) {
    const CudnnDescriptor device = CudnnDevice(cudnn, DeviceJson(sm));
    for (const Shape& s :
         {Shape{3, 64, 224, 7, 2, 3}, Shape{64, 64, 56, 3, 1, 1}, Shape{256, 512, 28, 1, 2, 0},
          Shape{512, 512, 7, 3, 1, 1}, Shape{3, 768, 224, 16, 16, 0}}) {
      for (const ConvPass pass : {ConvPass::kForward, ConvPass::kDataGrad, ConvPass::kWeightGrad}) {
        CudnnConvolution p;
        p.pass = pass;
        p.adds = pass == ConvPass::kWeightGrad;
        p.batch = 64;
        p.in = s.in;
        p.out = s.out;
        p.height = p.width = s.height;
        p.kernel = s.kernel;
        p.stride = s.stride;
        p.padding = s.padding;
        p.height_out = p.width_out = (s.height + 2 * s.padding - s.kernel) / s.stride + 1;
        CAPTURE(sm);
        CAPTURE(s.in);
        CAPTURE(s.height);
        CAPTURE(static_cast<int>(pass));
        const CudnnPlan plan = MakeCudnnPlan(
            cudnn, device, p,
            CudnnConvolutionWorkspace(ConvolutionSpec(p), p.batch, pass != ConvPass::kForward));
        CHECK(plan.problem == "");
        CHECK(plan.plan.get() != nullptr);
        CHECK_FALSE(plan.is_fallback);  // hundreds of times slower
        // The library's best guess, which takes no more where there is more.
        const CudnnPlan best = MakeCudnnPlan(cudnn, device, p, std::int64_t{1} << 40);
        CHECK(plan.workspace_bytes == best.workspace_bytes);
      }
    }
  }
}

// Returns an empty text, or what is missing.
std::string Load(const char* libcuda, const char* libcublaslt) {
  // cuDNN finds by name what is loaded already.
  void* const driver = dlopen(libcuda, RTLD_NOW);
  if (driver == nullptr || dlopen(libcublaslt, RTLD_NOW) == nullptr) {
    std::printf("%s\n", dlerror());
    std::exit(1);
  }
  kernels_found = reinterpret_cast<int (*)()>(dlsym(driver, "FakeLibcudaKernels"));
  if (dlopen("libnvrtc.so.13", RTLD_NOW) == nullptr) {
    return dlerror();
  }
  return LoadCudnn(&cudnn);
}

}  // namespace
}  // namespace shardwright::testing

int main(int count, char** arguments) {
  if (count != 3) {
    std::printf("usage: %s LIBCUDA LIBCUBLASLT\n", arguments[0]);
    return 2;
  }
  const std::string missing = shardwright::testing::Load(arguments[1], arguments[2]);
  if (!missing.empty()) {
    std::printf("skipped: %s\n", missing.c_str());
    return shardwright::kSkipExitCode;
  }
  std::printf("cuDNN %zu\n", shardwright::testing::cudnn.get_version());
  return doctest::Context().run();
}
