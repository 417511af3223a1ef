// Which calls are cuDNN's, which plans are kept, and what is said where it is missing.

#include <array>
#include <cmath>
#include <cstdint>
#include <cstdlib>
#include <string>
#include <vector>

#include <doctest/doctest.h>

#include "core/error.h"
#include "executor/cuda/cudnn_plans.h"
#include "tests/executor/cuda/fake_cudnn.h"

namespace shardwright::testing {
namespace {

// Attention of one head over two positions of eight features, all of them zero.
struct Small {
  alignas(64) std::array<std::array<std::uint16_t, 16>, 8> memory = {};
  std::array<float, 2> log_sums = {}, products = {};
  gpu::AttentionArgs args;

  Small() {
    const auto heads = [this](std::size_t i) {
      return gpu::HeadArray{{memory[i].data(), DType::kBf16}, 8, 0, 8};
    };
    args.q = heads(0);
    args.k = heads(1);
    args.v = heads(2);
    args.dq = heads(3);
    args.dk = heads(4);
    args.dv = heads(5);
    args.y = heads(6).array;
    args.dy = heads(7).array;
    args.log_sums = log_sums.data();
    args.products = products.data();
    args.batch = args.heads = args.kv_heads = 1;
    args.head_dim = args.value_dim = 8;
    args.seq_q = args.seq_k = 2;
    args.multiply_as = DType::kBf16;
  }
};

TEST_CASE("Cudnn.TakesPlainAttentionOnly") {
  const Small plain;
  CHECK(IsForCudnn(plain.args, false));
  CHECK(IsForCudnn(plain.args, true));
  const auto is_taken = [&](auto change) {
    gpu::AttentionArgs args = plain.args;
    change(args);
    return IsForCudnn(args, true);
  };
  using Args = gpu::AttentionArgs;
  CHECK(is_taken([](Args& a) { a.causal = true; }));
  CHECK_FALSE(is_taken([](Args& a) { a.drops = true; }));
  CHECK_FALSE(is_taken([](Args& a) { a.window = 1; }));
  CHECK_FALSE(is_taken([](Args& a) { a.soft_cap = 30.0F; }));
  CHECK_FALSE(is_taken([](Args& a) { a.alibi_max = 8.0; }));
  CHECK_FALSE(is_taken([](Args& a) { a.bias = a.y; }));
  CHECK_FALSE(is_taken([](Args& a) { a.head_dim = 12; }));
  CHECK_FALSE(is_taken([](Args& a) { a.q.array.dtype = DType::kFp32; }));
  CHECK_FALSE(is_taken([](Args& a) { a.q.first = 1; }));              // an odd address
  CHECK_FALSE(is_taken([](Args& a) { a.k.row = 12; }));               // odd rows
  CHECK_FALSE(is_taken([](Args& a) { a.dv.array.data = nullptr; }));  // not wanted
  // Which key the first query sees depends on who asks when there are more keys.
  CHECK_FALSE(is_taken([](Args& a) {
    a.causal = true;
    a.seq_k = 4;
  }));
}

TEST_CASE("Cudnn.TakesConvolutionsOfOneType") {
  alignas(64) std::array<std::uint16_t, 8> memory = {};
  const gpu::Array array = {memory.data(), DType::kFp16};
  gpu::ConvArgs args;
  args.x = args.w = args.y = args.grad = array;
  CHECK(IsForCudnn(args, ConvPass::kForward));
  CHECK(IsForCudnn(args, ConvPass::kWeightGrad));
  args.grad.dtype = DType::kFp32;
  CHECK_FALSE(IsForCudnn(args, ConvPass::kWeightGrad));
  args.bias = array;
  CHECK_FALSE(IsForCudnn(args, ConvPass::kForward));
  CHECK(IsForCudnn(args, ConvPass::kDataGrad));
  args.x.dtype = DType::kFp32;
  CHECK_FALSE(IsForCudnn(args, ConvPass::kDataGrad));
}

constexpr std::int64_t kScores = 2 * 2 * 2;  // bytes of those of Small

TEST_CASE("Cudnn.MakesOnePlanPerShapeAndSaysOnceWhoComputes") {
  FakeCudnn() = {.workspace_size = kScores};
  std::vector<std::string> said;
  {
    CudnnPlans plans(FakeCudnnTable(), [&](const std::string& text) { said.push_back(text); });
    Small a;
    for (int i = 0; i < 3; ++i) {
      REQUIRE(plans.Attend(a.args, false, nullptr, kScores, nullptr));
    }
    CHECK(FakeCudnn().heuristics_asked == 1);
    CHECK(FakeCudnn().executed == 3);
    REQUIRE(plans.Attend(a.args, true, nullptr, kScores, nullptr));
    a.args.causal = true;  // another problem, nothing new to say
    REQUIRE(plans.Attend(a.args, true, nullptr, kScores, nullptr));
    CHECK(plans.cached_count() == 3);
    CHECK(said == std::vector<std::string>{"attention by cuDNN", "attention's gradients by cuDNN"});
    // Two equal scores: each key has half the weight, and the log-sum is log 2.
    CHECK(a.log_sums[1] == doctest::Approx(std::log(2.0)));
  }
  CHECK(FakeCudnn().descriptors == 0);
  CHECK(FakeCudnn().handles == 0);
  CHECK(FakeCudnn().left_behind == 0);
}

TEST_CASE("Cudnn.WhatItHasNoPlanForIsOursAndAskedForOnce") {
  FakeCudnn() = {.refuses = true};
  std::vector<std::string> said;
  CudnnPlans plans(FakeCudnnTable(), [&](const std::string& text) { said.push_back(text); });
  Small a;
  for (int i = 0; i < 3; ++i) {
    CHECK_FALSE(plans.Attend(a.args, false, nullptr, 0, nullptr));
  }
  CHECK(FakeCudnn().heuristics_asked == 2);  // two lists: best guesses, and what always runs
  // A plan that wants more memory than is declared, and one that does not repeat bit by bit.
  FakeCudnn() = {.workspace_size = 4096};
  CHECK_FALSE(plans.Attend(a.args, true, nullptr, 4095, nullptr));
  CHECK(plans.Attend(a.args, true, nullptr, 4096, nullptr));
  FakeCudnn() = {.notes = {0, 4}};  // tensor cores, CUDNN_NUMERICAL_NOTE_NONDETERMINISTIC
  a.args.causal = true;
  CHECK_FALSE(plans.Attend(a.args, true, nullptr, 0, nullptr));
  // One that does not run.
  FakeCudnn() = {.execute_status = 3000};
  CHECK_FALSE(plans.Attend(a.args, false, nullptr, 0, nullptr));
  CHECK_FALSE(plans.Attend(a.args, false, nullptr, 0, nullptr));
  CHECK(FakeCudnn().executed == 1);
  // One that fails all the same is asked again.
  FakeCudnn() = {.execute_status = 5000};
  a.args.causal = false;
  CHECK_THROWS_AS((void)plans.Attend(a.args, false, nullptr, 64, nullptr), RunError);
  FakeCudnn() = {};
  CHECK(plans.Attend(a.args, false, nullptr, 64, nullptr));
  CHECK(said ==
        std::vector<std::string>{
            "attention by our own kernel, where cuDNN has no plan: none of its engines "
            "(CUDNN_LOGLEVEL_DBG=2 CUDNN_LOGDEST_DBG=stderr says why)",
            "attention's gradients by our own kernel, where cuDNN has no plan: a workspace of 4096 "
            "bytes",
            "attention's gradients by cuDNN",
            "attention's gradients by our own kernel, where cuDNN has no plan: plans that do not "
            "repeat bit by bit",
            "attention by cuDNN",
            "attention by our own kernel, where cuDNN's plan does not run: FAKE_ERROR"});
  FakeCudnn() = {};
}

// The form with atomics has no memory for all scores, and no note says that it has atomics.
TEST_CASE("Cudnn.GradientsThatAreSummedByAtomicsAreNotTaken") {
  std::string said;
  const auto is_taken = [&](std::int64_t workspace) {
    FakeCudnn() = {.workspace_size = workspace};
    CudnnPlans plans(FakeCudnnTable(), [&](const std::string& text) { said = text; });
    Small a;
    return plans.Attend(a.args, true, nullptr, 4096, nullptr);
  };
  CHECK(is_taken(kScores));
  CHECK_FALSE(is_taken(kScores - 1));
  CHECK(
      said ==
      "attention's gradients by our own kernel, where cuDNN has no plan: plans that do not repeat "
      "bit by bit");
  FakeCudnn() = {};
}

TEST_CASE("Cudnn.GraphsOfKeysThatFillNoTileAreOursWhereTheyCrash") {
  CudnnTable table = FakeCudnnTable();
  std::string said;
  const auto is_taken = [&](std::size_t (*version)(), std::int64_t keys, bool is_captured) {
    table.get_version = version;
    said.clear();
    CudnnPlans plans(table, [&](const std::string& text) { said = text; });
    Small a;
    a.args.seq_k = keys;
    if (keys > 2) {  // the fake reads no more than there is
      a.args.batch = 0;
    }
    return plans.Attend(a.args, false, nullptr, 0, nullptr, is_captured);
  };
  constexpr auto kFaulty = []() -> std::size_t { return 91500; };
  constexpr auto kRight = []() -> std::size_t { return 91501; };
  CHECK(is_taken(kFaulty, 2, false));
  CHECK_FALSE(is_taken(kFaulty, 2, true));
  CHECK(said ==
        "attention in graphs by our own kernel, where keys fill no tile of 128: cuDNN 9.15.0 reads "
        "invalid memory there, 9.15.1 does not");
  CHECK(is_taken(kRight, 2, true));
  CHECK(is_taken(kFaulty, 128, true));
}

TEST_CASE("Cudnn.SaysWhatIsMissing") {
  ::setenv("SHARDWRIGHT_CUDNN", "/nonexistent/libcudnn.so.9", 1);
  CudnnTable table{};
  CHECK(LoadCudnn(&table) ==
        "/nonexistent/libcudnn.so.9: cannot open shared object file: No such file or directory");
  ::setenv("SHARDWRIGHT_CUDNN", "libm.so.6", 1);
  CHECK(LoadCudnn(&table) == "libcudnn lacks functions that cuDNN 9 has");
  ::setenv("SHARDWRIGHT_CUDNN", SW_FAKE_LIBCUDNN, 1);
  CHECK(LoadCudnn(&table) ==
        "libcudnn needs another library: libcublasLt.so.99: cannot open shared object file: No "
        "such file or directory");
  ::unsetenv("SHARDWRIGHT_CUDNN");
  CHECK(DescribeCudnnVersion(91900).empty());
  CHECK(DescribeCudnnVersion(91002).empty());
  CHECK(DescribeCudnnVersion(91001) == "libcudnn is version 9.10.1, expected at least 9.10.2");
  CHECK(DescribeCudnnVersion(8907) == "libcudnn is version 8.9.7, expected at least 9.10.2");
}

}  // namespace
}  // namespace shardwright::testing
