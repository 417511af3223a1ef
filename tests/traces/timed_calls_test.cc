// Traces made by hand: which kernels belong to which call is read off the launches.

#include "traces/timed_calls.h"

#include <string>

#include <doctest/doctest.h>

#include "core/error.h"
#include "tests/traces/kineto_lines.h"
#include "tests/traces/temporary_file.h"

namespace shardwright {
namespace {

using testing::KinetoLines;
using testing::TemporaryFile;

TimedCalls Read(const KinetoLines& lines, const std::string& header = "") {
  const TemporaryFile file("{" + header + "\"traceEvents\":" + lines.List() + "}", ".json");
  return ReadTimedCalls(file.name());
}

std::string Inputs(const std::string& dims, const std::string& types,
                   const std::string& scalars = "[]") {
  return "\"Input Dims\":" + dims + ",\"Input type\":" + types + ",\"Concrete Inputs\":" + scalars;
}

TEST_CASE("TimedCalls: kernels belong to the innermost call of the thread that launched them") {
  KinetoLines lines;
  lines.Slice("cpu_op", "aten::linear", 0, 50);
  lines.Slice("cpu_op", "aten::addmm", 2, 40,
              Inputs("[[64],[128,32],[32,64],[],[]]",
                     R"(["c10::BFloat16","c10::BFloat16","c10::BFloat16","Scalar","Scalar"])"));
  lines.Kernel("nvjet_tst_128x64", 5, 100, 7, "", 30).Kernel("splitKreduce", 8, 130, 7, "", 4);
  lines.Slice("cpu_op", "aten::mul", 60, 10, Inputs("[[8,4],[4]]", R"(["float","float"])"));
  lines.Kernel("vectorized_elementwise_kernel", 62, 140, 7, "", 3);
  // At the same time on another thread, where no call is known.
  lines.Slice("cpu_op", "aten::foo", 61, 5, "", 2);
  lines.Slice("cuda_runtime", "cudaLaunchKernel", 63, 1, "\"correlation\":900", 2);
  lines.Slice("kernel", "triton_poi_fused", 150, 11, "\"correlation\":900,\"stream\":7", 7);
  lines.Slice("kernel", "ncclDevKernel_AllGather", 150, 99, "\"correlation\":901,\"stream\":9", 9);
  const TimedCalls found =
      Read(lines, R"("deviceProperties":[{"id":0,"name":"NVIDIA H100 80GB HBM3"},{"name":"x"}],)");
  CHECK(found.device == "NVIDIA H100 80GB HBM3");
  CHECK(found.on_device);
  CHECK(found.has_shapes);
  REQUIRE(found.calls.size() == 2);
  const TimedCall& product = found.calls[0];
  CHECK(product.kind == TimedCallKind::kProduct);
  CHECK(product.dtype == DType::kBf16);
  CHECK(product.batch == 1);
  CHECK(product.m == 128);
  CHECK(product.n == 64);
  CHECK(product.k == 32);
  CHECK(product.time.value == doctest::Approx(34e-6));
  const TimedCall& pass = found.calls[1];
  CHECK(pass.kind == TimedCallKind::kElementwise);
  CHECK(pass.read == Bytes(4 * (32 + 4)));
  CHECK(pass.written == Bytes(4 * 32));
  CHECK(pass.time.value == doctest::Approx(3e-6));
  CHECK(found.total.value == doctest::Approx(48e-6));  // collectives are not in it
  REQUIRE(found.untold.size() == 1);
  CHECK(found.untold[0].first == "triton_poi_fused");
  CHECK(found.untold[0].second.value == doctest::Approx(11e-6));
}

TEST_CASE("TimedCalls: attention, norms, casts, and what says too little") {
  KinetoLines lines;
  double at = 0;
  const auto call = [&](const std::string& name, const std::string& args) {
    lines.Slice("cpu_op", name, at, 8, args);
    lines.Kernel("kernel", at + 2, 1000 + at, 7, "", 5);
    at += 10;
  };
  const std::string half = R"(["c10::Half","c10::Half","c10::Half","c10::Half"])";
  call("aten::_scaled_dot_product_flash_attention",
       Inputs("[[2,8,512,64],[2,4,256,64],[2,4,256,64],[],[]]", half,
              R"(["","","","0.","True","False",""])"));
  call("aten::_scaled_dot_product_cudnn_attention_backward",
       Inputs("[[2,8,512,64],[2,8,512,64],[2,8,512,64],[2,8,512,64]]", half,
              R"(["","","","","","","","","","","","512","512","0.","False",""])"));
  // Without its scalars nothing says whether half of the scores are masked.
  call("aten::_scaled_dot_product_flash_attention",
       Inputs("[[2,8,512,64],[2,8,512,64],[2,8,512,64]]", half));
  call("aten::native_layer_norm_backward",
       Inputs("[[2,16,96],[2,16,96],[],[2,16,1]]", R"(["float","float","","float"])"));
  call("aten::copy_", Inputs("[[64,2],[64,2],[]]", R"(["c10::BFloat16","float","Scalar"])"));
  call("aten::mm", Inputs("[[4,8],[8,4]]", R"(["long int","long int"])"));
  call("aten::convolution", Inputs("[[1,3,8,8],[4,3,3,3]]", R"(["float","float"])"));
  const TimedCalls found = Read(lines);
  CHECK(found.device.empty());
  REQUIRE(found.calls.size() == 4);
  const TimedCall& forward = found.calls[0];
  CHECK(forward.kind == TimedCallKind::kAttentionForward);
  CHECK(forward.dtype == DType::kFp16);
  CHECK(forward.causal);
  CHECK_FALSE(forward.is_cudnn);
  CHECK(forward.batch == 2);
  CHECK(forward.heads == 8);
  CHECK(forward.kv_heads == 4);
  CHECK(forward.m == 512);
  CHECK(forward.n == 256);
  CHECK(forward.k == 64);
  CHECK(found.calls[1].kind == TimedCallKind::kAttentionBackward);
  CHECK(found.calls[1].is_cudnn);
  CHECK_FALSE(found.calls[1].causal);
  CHECK(found.calls[2].kind == TimedCallKind::kLayerNormBackward);
  CHECK(found.calls[2].m == 32);
  CHECK(found.calls[2].n == 96);
  CHECK(found.calls[3].kind == TimedCallKind::kCopy);
  CHECK(found.calls[3].written == Bytes(256));
  CHECK(found.calls[3].read == Bytes(512));
  REQUIRE(found.untold.size() == 1);
  CHECK(found.untold[0].second.value == doctest::Approx(15e-6));
}

TEST_CASE("TimedCalls: on a CPU operators are the work, and calls take their part of them") {
  KinetoLines lines;
  lines.Slice("cpu_op", "aten::linear", 0, 50);
  lines.Slice("cpu_op", "aten::addmm", 5, 40,
              Inputs("[[64],[128,32],[32,64]]", R"(["float","float","float"])"));
  lines.Slice("cpu_op", "aten::embedding", 60, 7);
  const TimedCalls found = Read(lines);
  CHECK_FALSE(found.on_device);
  REQUIRE(found.calls.size() == 1);
  CHECK(found.calls[0].time.value == doctest::Approx(40e-6));
  CHECK(found.total.value == doctest::Approx(57e-6));
  REQUIRE(found.untold.size() == 2);
  CHECK(found.untold[0].first == "aten::linear");
  CHECK(found.untold[0].second.value == doctest::Approx(10e-6));
  CHECK(found.untold[1].second.value == doctest::Approx(7e-6));
}

TEST_CASE("TimedCalls: a trace of nothing") {
  KinetoLines lines;
  lines.Slice("user_annotation", "ProfilerStep#1", 0, 10);
  CHECK_THROWS_AS((void)Read(lines), InputError);
}

}  // namespace
}  // namespace shardwright
