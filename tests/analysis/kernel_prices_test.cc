// Prices of single kernels against the formulas of docs/cost_model.md, computed by hand.

#include "analysis/kernel_prices.h"

#include <cstddef>
#include <cstdint>
#include <sstream>
#include <string>
#include <vector>

#include <doctest/doctest.h>

#include "topologies/cluster.h"
#include "topologies/profile.h"

namespace shardwright {
namespace {

// A row with the columns gpu, stack, op, direction, dtype, batch, m, n, k, layout, groups,
// sequence, kv_sequence, heads, kv_heads, head_dim, value_dim, causal, dropout, rows, features;
// what follows is not read.
KernelRow RowOf(const std::string& line) {
  std::vector<std::string> fields;
  std::istringstream text(line);
  for (std::string field; std::getline(text, field, ',');) {
    fields.push_back(field);
  }
  fields.resize(21);  // an empty last field has no comma behind it
  const auto count = [&](std::size_t i) {
    return fields[i].empty() ? std::int64_t{0} : std::stoll(fields[i]);
  };
  KernelRow row;
  row.gpu = fields[0];
  row.stack = fields[1];
  row.op = fields[2];
  row.direction = fields[3];
  row.dtype = fields[4];
  row.batch = count(5);
  row.m = count(6);
  row.n = count(7);
  row.k = count(8);
  row.groups = count(10);
  row.sequence = count(11);
  row.kv_sequence = count(12);
  row.heads = count(13);
  row.kv_heads = count(14);
  row.head_dim = count(15);
  row.value_dim = count(16);
  row.causal = count(17) == 1;
  row.rows = count(19);
  row.features = count(20);
  return row;
}

double PriceBy(const std::string& profile, const std::string& row) {
  const KernelPrice price = PriceKernel(RowOf(row), profile);
  CAPTURE(price.error);
  REQUIRE(price.error.empty());
  CHECK(price.profile == profile);
  return price.time.value;
}

double PredictedSeconds(const std::string& row) {
  return PriceBy("h100-torch-eager", row);
}

const Profile& H100Profile() {
  static const Profile profile = LoadProfile("h100-torch-eager");
  return profile;
}

double Peak() {
  return PeakFlops(FindGpu("h100-80", "test"), MathType::kBf16)->value;
}

double MemoryRate() {
  return FindGpu("h100-80", "test").memory_bandwidth.value.value;
}

TEST_CASE("PriceKernel: a product takes whole waves of tiles") {
  const ComputeProfile& compute = H100Profile().compute;
  const double rate = Peak() * compute.gemm[static_cast<std::size_t>(MathType::kBf16)]->value;
  // 128 x 128 tiles of 64 x 64 on 132 multiprocessors: 125 waves, where 124.12 would do; larger
  // tiles waste more.
  const double flops = 2.0 * 8192 * 8192 * 8192 * (125.0 * 132 * 64 * 64) / (8192.0 * 8192);
  CHECK(
      PredictedSeconds("h100-80,cublas,gemm,forward,bf16,1,8192,8192,8192,TN,,,,,,,,,,,,1500,,,") ==
      doctest::Approx(flops / rate + compute.gemm_ramp.value.value).epsilon(1e-9));
}

TEST_CASE("PriceKernel: causal attention runs the tiles on and below the diagonal") {
  const ComputeProfile& compute = H100Profile().compute;
  // 16 samples of 16 heads; 8 rows of tiles of 128 x 128, of which 36 run.
  const double pairs = 36.0 * 128 * 128 * 16 * 16;
  // A mean query sees 576 keys, and as many more as a tile takes to start and to mask; the last of
  // 2048 tiles sees all 1024.
  const double more = compute.attention.start.value + 64;
  const double schedule = ((576 + more) + (1024 + more) * 132 / 2048) / 576;
  const double forward =
      schedule * 2 * pairs * (128 + 128) / (Peak() * compute.attention.forward.value);
  // Backward has two more kernels: row sums of output times its gradient (4 bytes per query and
  // head), and a cast of the queries' gradient from fp32.
  const double tensor = 2.0 * 16 * 1024 * 16 * 128;
  const double passes = (2 * tensor + 4.0 * 16 * 1024 * 16) + (2 * tensor + tensor);
  const double gap = compute.kernel_gap.value.value;
  const double backward =
      schedule * 2 * pairs * (3 * 128 + 2 * 128) / (Peak() * compute.attention.backward.value) +
      passes / (MemoryRate() * compute.elementwise.value) + 2 * gap;
  const auto row = [](const std::string& direction) {
    return "h100-80,flash-attention-2,attention," + direction +
           ",fp16,16,,,,,,1024,1024,16,16,128,128,1,,,,1000,,,";
  };
  CHECK(PredictedSeconds(row("forward")) == doctest::Approx(forward).epsilon(1e-9));
  CHECK(PredictedSeconds(row("backward")) == doctest::Approx(backward).epsilon(1e-9));
  // One after the other, with a gap.
  CHECK(PredictedSeconds(row("both")) == doctest::Approx(forward + backward + gap).epsilon(1e-9));
}

TEST_CASE("PriceKernel: a norm moves its rows once each way") {
  // Input and output of 4096 x 16384 fp32 numbers, weight and bias, mean and deviation per row.
  const double bytes = 4.0 * (2 * 4096 * 16384 + 2 * 16384 + 2 * 4096);
  CHECK(PredictedSeconds("h100-80,torch-eager,layer_norm,forward,fp32,,,,,,,,,,,,,,,4096,"
                         "16384,300,,,") ==
        doctest::Approx(bytes / (MemoryRate() * H100Profile().compute.reduction.value))
            .epsilon(1e-9));
}

TEST_CASE("PriceKernel: Liger's kernels stream, and its loss makes the gradient") {
  const ComputeProfile& compute = H100Profile().compute;
  // 4,096 rows of 1,024 numbers of a table of 8,192 rows: the rows are read and written, 8 bytes
  // say which.
  CHECK(
      PredictedSeconds("h100-80,liger-0.2.1,embedding,forward,fp32,,,8192,,,,,,,,,,,,4096,1024") ==
      doctest::Approx((2 * 4.0 * 4096 * 1024 + 8.0 * 4096) /
                      (MemoryRate() * compute.elementwise.value))
          .epsilon(1e-9));
  // Rows of 64 KiB stay in the cache between both passes; the gradient is scaled in backward.
  const double logits = 4.0 * 4096 * 16384;
  const double forward = 2 * logits / (MemoryRate() * compute.rows.value);
  const double backward = 2 * logits / (MemoryRate() * compute.elementwise.value);
  const std::string row = ",fp32,,,,,,,,,,,,,,,4096,16384,400,,,";
  CHECK(PredictedSeconds("h100-80,liger-0.2.1,cross_entropy,forward" + row) ==
        doctest::Approx(forward).epsilon(1e-9));
  CHECK(PredictedSeconds("h100-80,liger-0.2.1,cross_entropy,both" + row) ==
        doctest::Approx(forward + backward + compute.kernel_gap.value.value).epsilon(1e-9));
}

TEST_CASE("PriceKernel: flash-attention's benchmark scales scores in their product") {
  // One sample, one head of 64 features, 2,048 tokens: both products, the softmax, the output's
  // copy.
  const ComputeProfile& compute = H100Profile().compute;
  const double one = PredictedSeconds(
      "h100-80,torch-unfused,attention,forward,fp16,1,,,,,,2048,2048,1,1,64,64,0,,,,100,,,");
  const double masked = PredictedSeconds(
      "h100-80,torch-unfused,attention,forward,fp16,1,,,,,,2048,2048,1,1,64,64,1,,,,100,,,");
  const double scores = 2.0 * 2048 * 2048;
  CHECK(masked - one == doctest::Approx(2 * scores / (MemoryRate() * compute.elementwise.value) +
                                        compute.kernel_gap.value.value)
                            .epsilon(1e-9));  // the mask, alone
  // The passes that are left: scores written, softmax both ways, scores read.
  CHECK(one < 5 * scores / (MemoryRate() * compute.reduction.value) +
                  2 * compute.gemm_ramp.value.value + 8e-6);
}

TEST_CASE("PriceKernel: a loss reads long rows again, and adds up in one block") {
  const ComputeProfile& compute = H100Profile().compute;
  const double rate = MemoryRate() * compute.rows.value;
  const double gap = compute.kernel_gap.value.value;
  // 4096 labels by 32 threads, each a label and then its element.
  const double sum = 4096 / 32 * 2 * compute.load.value.value;
  const auto row = [](const std::string& direction, const std::string& words) {
    return "h100-80,torch-eager,cross_entropy," + direction + ",fp32,,,,,,,,,,,,,,,4096," + words +
           ",3000,,,";
  };
  // 8,192 words of 4 bytes fit into shared memory: read and written once.
  CHECK(PredictedSeconds(row("forward", "8192")) ==
        doctest::Approx(2 * 4.0 * 4096 * 8192 / rate + gap + sum).epsilon(1e-9));
  // Of 131,072 words, 264 rows of 512 KiB at a time do not fit into the cache: read three times.
  const double logits = 4.0 * 4096 * 131072;
  const double forward = 4 * logits / rate + gap + sum;
  CHECK(PredictedSeconds(row("forward", "131072")) == doctest::Approx(forward).epsilon(1e-9));
  // Zeros, the labels' places (a short kernel), the gradient; then the leaf's, added to what is
  // there.
  const double plain = MemoryRate() * compute.elementwise.value;
  const double backward = logits / plain + compute.kernel_floor.value.value + 4 * logits / rate +
                          3 * logits / plain + 4 * gap;
  CHECK(PredictedSeconds(row("both", "131072")) ==
        doctest::Approx(forward + backward).epsilon(1e-9));
}

TEST_CASE("PriceKernel: a group's weight gradient is added to what is there") {
  const ComputeProfile& compute = H100Profile().compute;
  const double ramp = compute.gemm_ramp.value.value;
  const double hidden = compute.grouped_overlap.value;
  const double rate = Peak() * compute.gemm[static_cast<std::size_t>(MathType::kBf16)]->value;
  // 64 groups of 128 rows: (4096, 128) x (128, 1024).
  const double multiplying = 64 * 2.0 * 128 * 4096 * 1024 / rate;
  const double bytes = 64 * 2.0 * (128 * (4096 + 1024) + 2.0 * 4096 * 1024);
  const double moving = bytes / (MemoryRate() * compute.elementwise.value);
  REQUIRE(moving > multiplying);
  CHECK(PredictedSeconds("h100-80,transformer-engine,grouped_gemm,bwd_grad_w,bf16,,128,4096,"
                         "1024,,64,,,,,,,,,,,1000,,,") ==
        doctest::Approx(moving + multiplying * (1 - hidden) + ramp).epsilon(1e-9));
}

TEST_CASE("PriceKernel: MI300X's attention by library, and products in fp8") {
  const auto predicted = [](const std::string& row) { return PriceBy("cdna3-torch-eager", row); };
  const auto attention = [&](const std::string& stack) {
    return predicted("mi300x," + stack +
                     ",attention,forward,bf16,1,,,,,,4096,4096,16,16,128,128,0,,,,1000,,,");
  };
  // 512 tiles that each see 4096 keys and as many more as a start costs, and a last one: on 304
  // multiprocessors.
  const ComputeProfile compute = LoadProfile("cdna3-torch-eager").compute;
  const auto by_hand = [&](const AttentionProfile& library) {
    const double schedule = (4096 + library.start.value) / 4096 * (1 + 304.0 / 512);
    return schedule * 4.0 * 16 * 4096 * 4096 * 128 / (1307e12 * library.forward.value);
  };
  CHECK(attention("torch-sdpa") == doctest::Approx(by_hand(compute.attention)).epsilon(1e-6));
  for (const char* stack : {"ck", "composable-kernel", "aiter", "aiter-0.1"}) {
    CHECK(attention(stack) == doctest::Approx(by_hand(compute.ck_attention)).epsilon(1e-6));
  }
  // 0.77 GB take longer than their operations.
  CHECK(
      predicted("mi300x,hipblaslt,gemm,forward,fp8,1,802816,192,768,TN,,,,,,,,,,,,391,,,") ==
      doctest::Approx((802816.0 * (768 + 192) + 192 * 768) / (5300e9 * compute.gemm_memory.value) +
                      compute.gemm_ramp.value.value)
          .epsilon(1e-6));
}

TEST_CASE("PriceKernel: Transformer Engine asks for grouped products one by one") {
  const auto predicted = [](const std::string& stack) {
    const std::string row =
        "b200-180," + stack + ",grouped_gemm,fwd,bf16,1,16,128,128,,512,,,,,,,,,,,1000,,,";
    return PriceBy("b200-torch-eager", row);
  };
  const Profile b200 = LoadProfile("b200-torch-eager");
  CHECK(predicted("transformer-engine") ==
        doctest::Approx(512 * b200.compute.grouped_call.value.value));
  CHECK(predicted("cublas") < 0.01 * predicted("transformer-engine"));
}

TEST_CASE("PriceKernel: rows that cannot be priced say why") {
  const auto error_of = [](const std::string& row) { return PriceKernel(RowOf(row), "").error; };
  CHECK(error_of("h100-80,triton,sort,forward,bf16,,,,,,,,,,,,,,,8,8") == "no such op: sort");
  CHECK(error_of("TPU,cublas,gemm,forward,bf16,1,8,8,8,,,,,,,,,,,,") ==
        "GPU not in the catalog: TPU");
  CHECK(error_of("h100-80,cublas,gemm,forward,int4,1,8,8,8,,,,,,,,,,,,,") == "dtype int4");
  CHECK(error_of("h100-80,cublas,gemm,forward,bf16,1,8,,8,,,,,,,,,,,,,") == "a size is missing");
  CHECK(error_of("h100-80,a,layer_norm,forward,bf16,1,,,,,,,,,,,,,,1000000000000000,"
                 "1000000000000000") == "sizes of more than 2^56 together");
}

}  // namespace
}  // namespace shardwright
