// Calls whose times come from a formula: the numbers behind them must be found again.

#include "analysis/calibrate_calls.h"

#include <string>
#include <utility>
#include <vector>

#include <doctest/doctest.h>

#include "core/error.h"

namespace shardwright {
namespace {

const Origin kOrigin{NumberKind::kMeasured, "a test", "2026-11-28"};

GpuSpec H100() {
  return LoadCluster("h100-80 x1", 0, 0).gpu;
}

// One pass over `mib` MiB in and as much out, at `rate` of the memory's bandwidth.
TimedCall Pass(const GpuSpec& gpu, double mib, double rate) {
  TimedCall call;
  call.kind = TimedCallKind::kElementwise;
  call.dtype = DType::kBf16;
  call.read = call.written = Bytes(static_cast<std::int64_t>(mib * 1024 * 1024));
  call.time = Seconds(2 * mib * 1024 * 1024 / (gpu.memory_bandwidth.value.value * rate));
  return call;
}

// 132 multiprocessors compute 132 tiles of 256 x 128, so that all of them are busy all the time:
// flops / (peak x rate), and what filling takes.
TimedCall Product(const GpuSpec& gpu, std::int64_t k, double rate, Seconds ramp) {
  TimedCall call;
  call.dtype = DType::kBf16;
  call.m = std::int64_t{256} * 12;
  call.n = std::int64_t{128} * 11;
  call.k = k;
  const double flops = 2.0 * static_cast<double>(call.m * call.n * k);
  const double peak = gpu.peak_flops[static_cast<std::size_t>(MathType::kBf16)]->value.value;
  call.time = Seconds(flops / (peak * rate)) + ramp;
  return call;
}

const CallNumber* Find(const CallCalibration& result, const std::string& field) {
  for (const CallNumber& number : result.numbers) {
    if (number.field == field) {
      return &number;
    }
  }
  return nullptr;
}

TEST_CASE("CalibrateCalls: a bandwidth and a product's fraction are found again") {
  const GpuSpec gpu = H100();
  const Profile start = DefaultProfile(gpu, "torch-eager");
  TimedCalls calls;
  for (int i = 1; i <= 8; ++i) {
    calls.calls.push_back(Pass(gpu, 100.0 * i, 0.625));
    calls.calls.push_back(Product(gpu, 4096 * i, 0.55, start.compute.gemm_ramp.value));
    calls.total += calls.calls[calls.calls.size() - 2].time + calls.calls.back().time;
  }
  const CallCalibration result = CalibrateCalls({calls}, gpu, start, kOrigin);
  const CallNumber* const bandwidth = Find(result, "compute.elementwise");
  REQUIRE(bandwidth != nullptr);
  CHECK(bandwidth->after == doctest::Approx(0.625).epsilon(1e-4));
  CHECK(bandwidth->fitted == 4);
  CHECK(bandwidth->held == 4);
  CHECK(bandwidth->error_before > 0.05);
  CHECK(bandwidth->error_after < 1e-3);
  CHECK(bandwidth->is_kept);
  CHECK(result.profile.compute.elementwise.value == doctest::Approx(0.625).epsilon(1e-4));
  CHECK(result.profile.compute.elementwise.origin.source == "a test");
  const CallNumber* const product = Find(result, "compute.gemm.bf16");
  REQUIRE(product != nullptr);
  CHECK(product->after == doctest::Approx(0.55).epsilon(1e-3));
  CHECK(product->error_after < 1e-3);
  // What no call tells stays as it was.
  CHECK(result.numbers.size() == 2);
  CHECK(result.profile.compute.attention == start.compute.attention);
  CHECK(result.profile.compute.reduction == start.compute.reduction);
  REQUIRE(result.coverage.size() == 2);
  CHECK(result.coverage[0].shapes + result.coverage[1].shapes == 16);
}

// Without a mask: two products of a query and a key forward, five backward, where row sums of
// output times gradient come before (0.625 of the bandwidth) and a cast of the fp32 sum behind
// (0.7).
TimedCall Attention(const GpuSpec& gpu, std::int64_t tokens, bool is_forward, bool is_cudnn,
                    double rate) {
  TimedCall call;
  call.kind = is_forward ? TimedCallKind::kAttentionForward : TimedCallKind::kAttentionBackward;
  call.dtype = DType::kBf16;
  call.is_cudnn = is_cudnn;
  call.batch = 2;
  call.m = call.n = tokens;
  call.heads = call.kv_heads = 32;
  call.k = 128;
  const double pairs = 2.0 * 32 * static_cast<double>(tokens * tokens);
  const double peak = gpu.peak_flops[static_cast<std::size_t>(MathType::kBf16)]->value.value;
  call.time = Seconds(pairs * (is_forward ? 4 : 10) * 128 / (peak * rate));
  if (!is_forward) {
    const double rows = 2.0 * 32 * static_cast<double>(tokens);
    const double bandwidth = gpu.memory_bandwidth.value.value;
    call.time += Seconds(rows * (2 * 128 * 2 + 4) / (0.625 * bandwidth));
    call.time += Seconds(rows * (128 * 4 + 128 * 2) / (0.7 * bandwidth));
  }
  return call;
}

TEST_CASE("CalibrateCalls: attention of two libraries and copies are found again") {
  const GpuSpec gpu = H100();
  Profile start = DefaultProfile(gpu, "torch-eager");
  start.compute.attention.start.value = 0;          // shapes of all sizes reach the fraction
  start.compute.cudnn_attention.forward.value = 0;  // as the usual one
  start.compute.copies.value = 0;                   // as element-wise operators
  TimedCalls calls;
  for (int i = 1; i <= 8; ++i) {
    calls.calls.push_back(Attention(gpu, 2048 * i, true, false, 0.5));
    calls.calls.push_back(Attention(gpu, 2048 * i, false, false, 0.4));
    calls.calls.push_back(Attention(gpu, 2048 * i, true, true, 0.66));
    calls.calls.push_back(Attention(gpu, 2048 * i, false, true, 0.55));
    calls.calls.push_back(Pass(gpu, 100.0 * i, 0.7));
    calls.calls.back().kind = TimedCallKind::kCopy;
    calls.calls.push_back(Pass(gpu, 100.0 * i, 0.625));
  }
  const ComputeProfile found = CalibrateCalls({calls}, gpu, start, kOrigin).profile.compute;
  for (const auto& [number, value] : {std::pair(found.attention.forward, 0.5),
                                      {found.attention.backward, 0.4},
                                      {found.cudnn_attention.forward, 0.66},
                                      {found.cudnn_attention.backward, 0.55},
                                      {found.copies, 0.7},
                                      {found.elementwise, 0.625}}) {
    CHECK(number.value == doctest::Approx(value).epsilon(1e-3));
    CHECK(number.origin.source == "a test");
  }
}

TEST_CASE("CalibrateCalls: copies that no call tells stay as element-wise operators") {
  const GpuSpec gpu = H100();
  Profile start = DefaultProfile(gpu, "torch-eager");
  start.compute.copies.value = 0;
  TimedCalls calls;
  for (int i = 1; i <= 8; ++i) {
    calls.calls.push_back(Pass(gpu, 100.0 * i, 0.625));
  }
  CHECK(CalibrateCalls({calls}, gpu, start, kOrigin).profile.compute.copies.value == 0);
}

TEST_CASE("CalibrateCalls: a number that does not help the other half is not kept") {
  const GpuSpec gpu = H100();
  Profile start = DefaultProfile(gpu, "torch-eager");
  start.compute.elementwise.value = 0.9;
  TimedCalls calls;
  for (int i = 1; i <= 8; ++i) {  // every second shape is right as it is, the others run at a third
    calls.calls.push_back(Pass(gpu, 100.0 * i, i % 2 == 1 ? 0.3 : 0.9));
  }
  const CallCalibration result = CalibrateCalls({calls}, gpu, start, kOrigin);
  REQUIRE(result.numbers.size() == 1);
  CHECK(result.numbers[0].after == doctest::Approx(0.3).epsilon(1e-3));
  CHECK_FALSE(result.numbers[0].is_kept);
  CHECK(result.profile.compute.elementwise.value == 0.9);
}

TEST_CASE(
    "CalibrateCalls: small passes tell nothing of a bandwidth, and no shapes nothing at all") {
  const GpuSpec gpu = H100();
  const Profile start = DefaultProfile(gpu, "torch-eager");
  TimedCalls calls;
  calls.file = "t.json";
  calls.calls.push_back(Pass(gpu, 0.001, 0.001));
  CHECK(CalibrateCalls({calls}, gpu, start, kOrigin).numbers.empty());
  calls.calls.clear();
  CHECK_THROWS_WITH_AS((void)CalibrateCalls({calls}, gpu, start, kOrigin),
                       "t.json: got no call with a shape that is known, expected a trace of "
                       "PyTorch's profiler with record_shapes=True",
                       InputError);
}

}  // namespace
}  // namespace shardwright
