// That cuBLASLt is asked for the right product: its functions are replaced by ones that multiply
// column-major matrices in plain loops, as cublasLt.h documents it.

#include "executor/cuda/cublaslt.h"

#include <cmath>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <map>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include <doctest/doctest.h>

#include "core/error.h"
#include "executor/cuda/emulation/emulated_gpu.h"
#include "executor/cuda/ops/launch.h"
#include "tests/executor/cuda/forwarding_gpu.h"

namespace shardwright::testing {
namespace {

struct FakeDesc {
  int transposes_a = 0, transposes_b = 0, epilogue = 1, bias_type = -1;
  float *bias = nullptr, *aux = nullptr;
  std::int64_t aux_leading = 0;
};
struct FakeLayout {
  int type = 0;
  std::int64_t rows = 0, columns = 0, leading = 0;
};

int objects = 0;  // of the library, that are not destroyed
template <class T>
int Destroy(void* object) {
  CHECK(object != nullptr);
  delete static_cast<T*>(object);
  --objects;
  return 0;
}

int heuristics_asked = 0;
std::uint64_t workspace_asked = 0;
std::span<std::byte> workspace_given;
std::vector<std::uint32_t> alignments_asked;
bool refuses = false;
int heuristic_status = 0, matmul_status = 0;

int Create(void** handle) {
  *handle = new int();
  ++objects;
  return 0;
}
int DescCreate(void** desc, int compute, int scale) {
  CHECK(compute == 68);  // CUBLAS_COMPUTE_32F
  CHECK(scale == 0);     // CUDA_R_32F
  *desc = new FakeDesc();
  ++objects;
  return 0;
}
int DescSet(void* desc, int attribute, const void* value, std::size_t bytes) {
  auto* const d = static_cast<FakeDesc*>(desc);
  const std::map<int, void*> ints = {
      {3, &d->transposes_a}, {4, &d->transposes_b}, {7, &d->epilogue}, {26, &d->bias_type}};
  if (attribute == 8 || attribute == 11) {
    CHECK(bytes == sizeof d->bias);
    std::memcpy(attribute == 8 ? &d->bias : &d->aux, value, bytes);
    return 0;
  }
  if (attribute == 12) {
    CHECK(bytes == sizeof d->aux_leading);
    std::memcpy(&d->aux_leading, value, bytes);
    CHECK(d->aux_leading % 8 == 0);
    return 0;
  }
  REQUIRE(ints.contains(attribute));
  CHECK(bytes == sizeof(int));
  std::memcpy(ints.at(attribute), value, bytes);
  return 0;
}
int LayoutCreate(void** layout, int type, std::uint64_t rows, std::uint64_t columns,
                 std::int64_t leading) {
  CHECK(leading >= static_cast<std::int64_t>(rows));  // column-major
  *layout = new FakeLayout{type, static_cast<std::int64_t>(rows),
                           static_cast<std::int64_t>(columns), leading};
  ++objects;
  return 0;
}
int PreferenceCreate(void** preference) {
  *preference = new int();
  ++objects;
  return 0;
}
int PreferenceSet(void* /*preference*/, int attribute, const void* value, std::size_t bytes) {
  if (attribute == 1) {
    CHECK(bytes == 8);
    std::memcpy(&workspace_asked, value, bytes);
  } else {
    CHECK(bytes == 4);
    std::memcpy(&alignments_asked.emplace_back(), value, bytes);
  }
  return 0;
}
int Heuristic(void* /*handle*/, void* /*desc*/, void* /*a*/, void* /*b*/, void* /*c*/, void* /*d*/,
              void* /*preference*/, int requested, LtHeuristic* results, int* found) {
  ++heuristics_asked;
  CHECK(requested == 1);
  results[0] = {};
  results[0].algorithm.data[0] = 4711;
  *found = refuses || heuristic_status != 0 ? 0 : 1;
  return refuses ? 15 : heuristic_status;  // CUBLAS_STATUS_NOT_SUPPORTED
}
// Its tanh form, as the library's documentation has it, and its derivative.
double Gelu(double x) {
  return 0.5 * x * (1 + std::tanh(std::sqrt(2 / 3.14159265358979) * (x + 0.044715 * x * x * x)));
}
double GeluSlope(double x) {
  const double slope = std::sqrt(2 / 3.14159265358979);
  const double t = std::tanh(slope * (x + 0.044715 * x * x * x));
  return 0.5 * (1 + t) + 0.5 * x * (1 - t * t) * slope * (1 + 3 * 0.044715 * x * x);
}

int Matmul(void* /*handle*/, void* desc, const void* alpha, const void* a, void* a_layout,
           const void* b, void* b_layout, const void* beta, const void* c, void* c_layout, void* d,
           void* /*d_layout*/, const LtAlgorithm* algorithm, void* workspace, std::size_t bytes,
           void* /*stream*/) {
  CHECK(algorithm->data[0] == 4711);
  if (reinterpret_cast<std::uintptr_t>(workspace) % 256 != 0) {
    return 7;  // CUBLAS_STATUS_INVALID_VALUE
  }
  workspace_given = {static_cast<std::byte*>(workspace), bytes};
  if (matmul_status != 0) {
    return matmul_status;
  }
  CHECK(*static_cast<const float*>(alpha) == 1.0F);
  const FakeDesc& op = *static_cast<FakeDesc*>(desc);
  const FakeLayout& la = *static_cast<FakeLayout*>(a_layout);
  const FakeLayout& lb = *static_cast<FakeLayout*>(b_layout);
  const FakeLayout& ld = *static_cast<FakeLayout*>(c_layout);
  const std::int64_t depth = op.transposes_a != 0 ? la.rows : la.columns;
  CHECK((op.transposes_a != 0 ? la.columns : la.rows) == ld.rows);
  CHECK((op.transposes_b != 0 ? lb.rows : lb.columns) == ld.columns);
  CHECK((op.transposes_b != 0 ? lb.columns : lb.rows) == depth);
  const auto at = [](const void* data, const FakeLayout& l, std::int64_t i, std::int64_t j,
                     bool swaps) {
    return static_cast<const float*>(data)[swaps ? i * l.leading + j : j * l.leading + i];
  };
  // CUBLASLT_EPILOGUE_BGRADA and BGRADB
  for (std::int64_t i = 0; i < ld.rows && op.epilogue == 256; ++i) {
    op.bias[i] = 0.0F;
    for (std::int64_t k = 0; k < depth; ++k) {
      op.bias[i] += at(a, la, i, k, op.transposes_a != 0);
    }
  }
  for (std::int64_t j = 0; j < ld.columns && op.epilogue == 512; ++j) {
    op.bias[j] = 0.0F;
    for (std::int64_t k = 0; k < depth; ++k) {
      op.bias[j] += at(b, lb, k, j, op.transposes_b != 0);
    }
  }
  for (std::int64_t j = 0; j < ld.columns; ++j) {
    for (std::int64_t i = 0; i < ld.rows; ++i) {
      // CUBLASLT_EPILOGUE_BIAS, GELU_AUX_BIAS
      float sum = op.epilogue == 4 || op.epilogue == 164 ? op.bias[i] : 0.0F;
      for (std::int64_t k = 0; k < depth; ++k) {
        sum += at(a, la, i, k, op.transposes_a != 0) * at(b, lb, k, j, op.transposes_b != 0);
      }
      if (op.epilogue == 160 || op.epilogue == 164) {  // GELU_AUX, GELU_AUX_BIAS
        op.aux[j * op.aux_leading + i] = sum;
        sum = static_cast<float>(Gelu(sum));
      } else if (op.epilogue == 192) {  // DGELU
        sum *= static_cast<float>(GeluSlope(op.aux[j * op.aux_leading + i]));
      }
      const float old = static_cast<const float*>(c)[j * ld.leading + i];
      static_cast<float*>(d)[j * ld.leading + i] = sum + *static_cast<const float*>(beta) * old;
    }
  }
  return 0;
}

constexpr CublasLtTable kFake = {.create = Create,
                                 .destroy = Destroy<int>,
                                 .desc_create = DescCreate,
                                 .desc_destroy = Destroy<FakeDesc>,
                                 .desc_set = DescSet,
                                 .layout_create = LayoutCreate,
                                 .layout_destroy = Destroy<FakeLayout>,
                                 .preference_create = PreferenceCreate,
                                 .preference_destroy = Destroy<int>,
                                 .preference_set = PreferenceSet,
                                 .heuristic = Heuristic,
                                 .matmul = Matmul};

// A GPU that has the library and no kernels of its own.
class FakeLtGpu : public ForwardingGpu {
 public:
  FakeLtGpu() : ForwardingGpu(MakeEmulatedGpu({})) {}
  [[nodiscard]] bool Multiply(const gpu::GemmArgs& product, void* workspace, std::int64_t bytes,
                              GpuStream /*stream*/) override {
    ++products;
    return library_.Multiply(product, workspace, bytes, nullptr);
  }
  void Launch(const KernelLaunch& /*launch*/, GpuStream /*stream*/) override {
    throw RunError("a kernel");
  }
  int products = 0;

 private:
  CublasLt library_{kFake, [](const std::string&) {}};
};

std::vector<float> Counting(std::int64_t n, float step) {
  std::vector<float> values(static_cast<std::size_t>(n));
  for (std::size_t i = 0; i < values.size(); ++i) {
    values[i] = static_cast<float>(i % 7) * step - 1.0F;
  }
  return values;
}

TEST_CASE("CublasLt.WhatItMadeIsDestroyed") {
  const int before = objects;
  {
    std::vector<float> matrix(16, 1.0F);
    CublasLt library(kFake, [](const std::string&) {});
    gpu::GemmArgs p;
    p.m = p.n = p.k = 4;
    p.a = p.b = p.c = {{matrix.data(), DType::kFp32}, 4, 1};
    REQUIRE(library.Multiply(p, nullptr, 1024, nullptr));
    refuses = true;  // the second, of another shape, is made and not taken
    p.m = 3;
    CHECK(!library.Multiply(p, nullptr, 1024, nullptr));
    refuses = false;
    CHECK(objects > before);
  }
  CHECK(objects == before);
}

// c (3, 4) = a (3, 5) b (5, 4) for every way to store a and b.
TEST_CASE("CublasLt.AsksForTheProductThatIsMeant") {
  constexpr std::int64_t kM = 3, kN = 4, kK = 5;
  std::vector<float> a = Counting(kM * kK, 0.5F);
  std::vector<float> b = Counting(kK * kN, 0.25F);
  std::vector<float> bias = Counting(kN, 3.0F);
  CublasLt library(kFake, [](const std::string&) {});
  for (int ways = 0; ways < 16; ++ways) {
    const bool swaps_a = (ways & 1) != 0, swaps_b = (ways & 2) != 0;
    const bool has_bias = (ways & 4) != 0, adds = (ways & 8) != 0;
    std::vector<float> c(kM * kN, 10.0F);
    gpu::GemmArgs p;
    p.m = kM;
    p.n = kN;
    p.k = kK;
    p.a = {{a.data(), DType::kFp32}, swaps_a ? 1 : kK, swaps_a ? kM : 1};
    p.b = {{b.data(), DType::kFp32}, swaps_b ? 1 : kN, swaps_b ? kK : 1};
    p.c = {{c.data(), DType::kFp32}, kN, 1};
    p.bias = {has_bias ? bias.data() : nullptr, DType::kFp32};
    p.adds = adds;
    REQUIRE(library.Multiply(p, nullptr, 1024, nullptr));
    for (std::int64_t i = 0; i < kM; ++i) {
      for (std::int64_t j = 0; j < kN; ++j) {
        float sum = has_bias ? bias[static_cast<std::size_t>(j)] : 0.0F;
        for (std::int64_t k = 0; k < kK; ++k) {
          sum += a[static_cast<std::size_t>(i * p.a.row_stride + k * p.a.column_stride)] *
                 b[static_cast<std::size_t>(k * p.b.row_stride + j * p.b.column_stride)];
        }
        sum += adds ? 10.0F : 0.0F;
        CHECK(c[static_cast<std::size_t>(i * kN + j)] == doctest::Approx(sum));
      }
    }
  }
  CHECK(workspace_asked == 1024);
}

// A linear layer's weight and bias gradients, weights stored either way, in one call.
TEST_CASE("CublasLt.SumsBesideTheProduct") {
  constexpr std::int64_t kRows = 5, kIn = 4, kOut = 3;
  for (const bool transposed : {false, true}) {
    CAPTURE(transposed);
    std::vector<float> x = Counting(kRows * kIn, 0.5F);
    std::vector<float> dy = Counting(kRows * kOut, 0.25F);
    std::vector<float> weight(kIn * kOut, 1.0F);
    std::vector<float> dw(kIn * kOut), db(kOut, 7.0F);
    FakeLtGpu gpu;
    OpSpec spec;
    spec.kind = OpKind::kLinear;
    spec.rows = kRows;
    spec.in = kIn;
    spec.out = kOut;
    spec.has_bias = true;
    spec.transposed = transposed;
    ModelOpCall call;
    call.spec = &spec;
    call.batch = 1;
    call.inputs = {{x.data(), DType::kFp32, kRows * kIn}};
    call.params = {{weight.data(), DType::kFp32, kIn * kOut}, {db.data(), DType::kFp32, kOut}};
    call.output_grads = {{dy.data(), DType::kFp32, kRows * kOut}};
    call.param_grads = {{{dw.data(), DType::kFp32, kIn * kOut}, false},
                        {{db.data(), DType::kFp32, kOut}, false}};
    ops::SubmitLinear(call, true, {gpu, {}, nullptr});
    CHECK(gpu.products == 1);  // and nothing else, which would have thrown
    for (std::int64_t o = 0; o < kOut; ++o) {
      float sum = 0.0F;
      for (std::int64_t r = 0; r < kRows; ++r) {
        sum += dy[static_cast<std::size_t>(r * kOut + o)];
      }
      CHECK(db[static_cast<std::size_t>(o)] == doctest::Approx(sum));
      for (std::int64_t i = 0; i < kIn; ++i) {
        float product = 0.0F;
        for (std::int64_t r = 0; r < kRows; ++r) {
          product +=
              dy[static_cast<std::size_t>(r * kOut + o)] * x[static_cast<std::size_t>(r * kIn + i)];
        }
        const std::int64_t at = transposed ? i * kOut + o : o * kIn + i;
        CHECK(dw[static_cast<std::size_t>(at)] == doctest::Approx(product));
      }
    }
  }
}

// A GELU between two linear layers, with what the first one's bias gives it.
TEST_CASE("CublasLt.GeluEndsTheProductsBesideIt") {
  constexpr std::int64_t kRows = 3, kIn = 5, kWide = 8;
  std::vector<float> x = Counting(kRows * kIn, 0.3F);
  std::vector<float> weight = Counting(kWide * kIn, 0.25F);
  std::vector<float> bias = Counting(kWide, 0.5F);
  std::vector<float> before(kRows * kWide), after(kRows * kWide);
  const auto spec_of = [](std::int64_t in, std::int64_t out, bool has_bias) {
    OpSpec spec;
    spec.kind = OpKind::kLinear;
    spec.rows = kRows;
    spec.in = in;
    spec.out = out;
    spec.has_bias = has_bias;
    return spec;
  };
  for (const bool has_bias : {false, true}) {
    FakeLtGpu gpu;
    const OpSpec up = spec_of(kIn, kWide, has_bias);
    ModelOpCall call;
    call.spec = &up;
    call.inputs = {{x.data(), DType::kFp32, kRows * kIn}};
    call.params = {{weight.data(), DType::kFp32, kWide * kIn}, {bias.data(), DType::kFp32, kWide}};
    call.outputs = {{before.data(), DType::kFp32, kRows * kWide},
                    {after.data(), DType::kFp32, kRows * kWide}};
    ops::SubmitLinear(call, false, {gpu, {}, nullptr});
    CHECK(gpu.products == 1);  // and no kernel, which would have thrown
    for (std::int64_t r = 0; r < kRows; ++r) {
      for (std::int64_t o = 0; o < kWide; ++o) {
        double sum = has_bias ? bias[static_cast<std::size_t>(o)] : 0.0;
        for (std::int64_t i = 0; i < kIn; ++i) {
          sum += double{x[static_cast<std::size_t>(r * kIn + i)]} *
                 weight[static_cast<std::size_t>(o * kIn + i)];
        }
        const auto at = static_cast<std::size_t>(r * kWide + o);
        CHECK(before[at] == doctest::Approx(sum));
        CHECK(after[at] == doctest::Approx(Gelu(sum)));
      }
    }
  }
  // The layer behind it: five outputs.
  FakeLtGpu gpu;
  const OpSpec down = spec_of(kWide, kIn, false);
  std::vector<float> dy = Counting(kRows * kIn, 0.4F), dx(kRows * kWide);
  ModelOpCall call;
  call.spec = &down;
  call.inputs = {{after.data(), DType::kFp32, kRows * kWide},
                 {before.data(), DType::kFp32, kRows * kWide}};
  call.params = {{weight.data(), DType::kFp32, kWide * kIn}};
  call.output_grads = {{dy.data(), DType::kFp32, kRows * kIn}};
  call.input_grads = {{dx.data(), DType::kFp32, kRows * kWide}};
  ops::SubmitLinear(call, true, {gpu, {}, nullptr});
  CHECK(gpu.products == 1);
  for (std::int64_t r = 0; r < kRows; ++r) {
    for (std::int64_t i = 0; i < kWide; ++i) {
      double sum = 0;
      for (std::int64_t o = 0; o < kIn; ++o) {
        sum += double{dy[static_cast<std::size_t>(r * kIn + o)]} *
               weight[static_cast<std::size_t>(o * kWide + i)];
      }
      const auto at = static_cast<std::size_t>(r * kWide + i);
      CHECK(dx[at] == doctest::Approx(sum * GeluSlope(before[at])));
    }
  }
  // What the library does not take: rows of another length, sums added to what is there.
  gpu::GemmArgs p;
  p.m = p.n = p.k = 1;
  p.a = p.b = p.c = {{dx.data(), DType::kFp32}, 1, 1};
  p.gelu = gpu::GemmGelu::kApply;
  p.gelu_input = {dy.data(), DType::kFp32};
  CublasLt library(kFake, [](const std::string&) {});
  CHECK_FALSE(library.Multiply(p, nullptr, 0, nullptr));
}

TEST_CASE("CublasLt.ChoosesOncePerShape") {
  std::vector<float> a(64, 1.0F), b(64, 1.0F), c(64, 0.0F);
  std::vector<std::string> said;
  CublasLt library(kFake, [&](const std::string& text) { said.push_back(text); });
  gpu::GemmArgs p;
  p.m = p.n = p.k = 8;
  p.a = {{a.data(), DType::kFp32}, 8, 1};
  p.b = {{b.data(), DType::kFp32}, 8, 1};
  p.c = {{c.data(), DType::kFp32}, 8, 1};
  heuristics_asked = 0;
  for (int i = 0; i < 3; ++i) {
    REQUIRE(library.Multiply(p, nullptr, 0, nullptr));
  }
  CHECK(heuristics_asked == 1);
  CHECK(library.cached_count() == 1);
  p.k = 4;
  REQUIRE(library.Multiply(p, nullptr, 0, nullptr));
  CHECK(heuristics_asked == 2);
  // What the library has no algorithm for is left to our own kernel, and asked for once.
  refuses = true;
  p.k = 2;
  CHECK_FALSE(library.Multiply(p, nullptr, 0, nullptr));
  CHECK_FALSE(library.Multiply(p, nullptr, 0, nullptr));
  refuses = false;
  CHECK(heuristics_asked == 3);
  CHECK(said == std::vector<std::string>{"cuBLASLt has nothing for a product of 8 x 8 x 2 in fp32 "
                                         "(status 15): by our own kernel"});
  // So is what a call refuses.
  matmul_status = 7;
  p.k = 1;
  p.bias = {c.data(), DType::kFp32};
  CHECK_FALSE(library.Multiply(p, nullptr, 0, nullptr));
  CHECK(said.back() ==
        "cuBLASLt has nothing for a product of 8 x 8 x 1 in fp32 with a bias (status 7): by our "
        "own kernel");
  p.k = 4;
  p.bias = {};
  CHECK_FALSE(library.Multiply(p, nullptr, 0, nullptr));
  CHECK(said.back() ==
        "cuBLASLt has nothing for a product of 8 x 8 x 4 in fp32 (status 7): by our own kernel");
  matmul_status = 0;
  CHECK_FALSE(library.Multiply(p, nullptr, 0, nullptr));
  CHECK(said.size() == 3);
}

// As in a capture that is invalid, where every call fails.
TEST_CASE("CublasLt.WhatFailsIsNoRefusal") {
  std::vector<float> matrix(64, 1.0F);
  CublasLt library(kFake, [](const std::string& text) { CHECK(text.empty()); });
  gpu::GemmArgs p;
  p.m = p.n = p.k = 8;
  p.a = p.b = p.c = {{matrix.data(), DType::kFp32}, 8, 1};
  heuristic_status = 14;  // CUBLAS_STATUS_INTERNAL_ERROR
  CHECK_THROWS_WITH_AS((void)library.Multiply(p, nullptr, 0, nullptr),
                       "cublasLtMatmulAlgoGetHeuristic: cuBLAS status 14", RunError);
  heuristic_status = 0;
  matmul_status = 14;
  CHECK_THROWS_WITH_AS((void)library.Multiply(p, nullptr, 0, nullptr),
                       "cublasLtMatmul: cuBLAS status 14", RunError);
  matmul_status = 0;
  CHECK(library.Multiply(p, nullptr, 0, nullptr));
}

TEST_CASE("CublasLt.GivesTheLibraryAnAlignedWorkspace") {
  std::vector<float> matrix(16, 1.0F);
  alignas(256) std::byte memory[2048];
  CublasLt library(kFake, [](const std::string& text) { CHECK(text.empty()); });
  gpu::GemmArgs p;
  p.m = p.n = p.k = 4;
  p.a = p.b = p.c = {{matrix.data(), DType::kFp32}, 4, 1};
  REQUIRE(library.Multiply(p, memory, 1024, nullptr));
  CHECK(workspace_given.data() == memory);
  CHECK(workspace_given.size() == 1024);
  // The size, and with it the algorithm, is the same wherever the workspace lies.
  for (const std::int64_t past : {64, 192}) {
    REQUIRE(library.Multiply(p, memory + past, 1024, nullptr));
    CHECK(workspace_given.data() == memory + 256);
    CHECK(workspace_given.size() == 768);
    CHECK(workspace_asked == 768);
  }
  CHECK(library.cached_count() == 2);
  REQUIRE(library.Multiply(p, memory + 64, 200, nullptr));
  CHECK(workspace_given.empty());
}

// Of a, b, c and d as the library names them.
TEST_CASE("CublasLt.TellsHowAddressesAreAligned") {
  alignas(256) float numbers[128] = {};
  CublasLt library(kFake, [](const std::string&) {});
  gpu::GemmArgs p;
  p.m = p.n = p.k = 2;
  p.a = {{numbers + 16, DType::kFp32}, 2, 1};
  p.b = {{numbers + 2, DType::kFp32}, 2, 1};
  p.c = {{numbers + 64, DType::kFp32}, 2, 1};
  alignments_asked.clear();
  REQUIRE(library.Multiply(p, nullptr, 0, nullptr));
  CHECK(alignments_asked == std::vector<std::uint32_t>{8, 64, 256, 256});
}

TEST_CASE("CublasLt.LeavesMixedTypesAlone") {
  CublasLt library(kFake, [](const std::string&) {});
  gpu::GemmArgs p;
  p.m = p.n = p.k = 1;
  float number = 1.0F;
  p.a = {{&number, DType::kFp32}, 1, 1};
  p.b = {{&number, DType::kBf16}, 1, 1};
  p.c = {{&number, DType::kFp32}, 1, 1};
  CHECK_FALSE(library.Multiply(p, nullptr, 0, nullptr));
}

TEST_CASE("CublasLt.SaysWhatIsMissing") {
  CublasLtTable table{};
  ::setenv("SHARDWRIGHT_CUBLASLT", "/nonexistent/libcublasLt.so.13", 1);
  CHECK(LoadCublasLt(&table) ==
        "/nonexistent/libcublasLt.so.13: cannot open shared object file: No such file or "
        "directory");
  ::setenv("SHARDWRIGHT_CUBLASLT", "libm.so.6", 1);
  CHECK(LoadCublasLt(&table) == "libcublasLt lacks functions that CUDA 12 and 13 have");
  ::unsetenv("SHARDWRIGHT_CUBLASLT");
}

}  // namespace
}  // namespace shardwright::testing
