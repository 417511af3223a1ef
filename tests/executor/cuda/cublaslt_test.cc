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
#include "executor/cuda/ops/launch.h"
#include "executor/fp8.h"
#include "tests/executor/cuda/emulation/emulated_gpu.h"
#include "tests/executor/cuda/forwarding_gpu.h"
#include "tests/executor/scratch_folder.h"

namespace shardwright::testing {
namespace {

const KernelSetOptions kOptions;  // products as they are

ModelOpCall CallOf(const OpSpec& spec) {
  ModelOpCall call;
  call.spec = &spec;
  call.options = &kOptions;
  return call;
}

struct FakeDesc {
  int transposes_a = 0, transposes_b = 0, epilogue = 1, bias_type = -1;
  int scale_mode_a = 0, scale_mode_b = 0;
  const float *scale_a = nullptr, *scale_b = nullptr;
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
int proposals = 1;                  // of the heuristic
std::vector<std::uint64_t> called;  // algorithms, in order
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
  const std::map<int, void*> ints = {{3, &d->transposes_a},  {4, &d->transposes_b},
                                     {7, &d->epilogue},      {26, &d->bias_type},
                                     {31, &d->scale_mode_a}, {32, &d->scale_mode_b}};
  if (attribute == 17 || attribute == 18) {
    CHECK(bytes == sizeof d->scale_a);
    std::memcpy(attribute == 17 ? &d->scale_a : &d->scale_b, value, bytes);
    return 0;
  }
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
  CHECK(requested >= proposals);
  for (int i = 0; i < proposals; ++i) {
    results[i] = {};
    results[i].algorithm.data[0] = 4711 + static_cast<std::uint64_t>(i);
  }
  *found = refuses || heuristic_status != 0 ? 0 : proposals;
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

bool IsFp8(const FakeLayout& layout) {
  return layout.type == 28 || layout.type == 29;  // CUDA_R_8F_E4M3, E5M2
}

// The only way in which tensor cores take it, and not two of e5m2.
bool IsTakenInFp8(const FakeDesc& op, const FakeLayout& a, const FakeLayout& b) {
  CHECK(op.scale_mode_a == op.scale_mode_b);
  return op.transposes_a == 1 && op.transposes_b == 0 && IsFp8(b) &&
         (a.type == 28 || b.type == 28) && op.scale_a != nullptr && op.scale_b != nullptr;
}

float ElementOf(const void* data, const FakeLayout& l, std::int64_t i, std::int64_t j, bool swaps) {
  const std::int64_t place = swaps ? i * l.leading + j : j * l.leading + i;
  return IsFp8(l) ? Fp8ToFloat(static_cast<const std::uint8_t*>(data)[place],
                               l.type == 28 ? Fp8Format::kE4m3 : Fp8Format::kE5m2)
                  : static_cast<const float*>(data)[place];
}

int Matmul(void* /*handle*/, void* desc, const void* alpha, const void* a, void* a_layout,
           const void* b, void* b_layout, const void* beta, const void* c, void* c_layout, void* d,
           void* /*d_layout*/, const LtAlgorithm* algorithm, void* workspace, std::size_t bytes,
           void* /*stream*/) {
  CHECK(algorithm->data[0] >= 4711);
  called.push_back(algorithm->data[0]);
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
  const bool is_fp8 = IsFp8(la);
  if (is_fp8 && (!IsTakenInFp8(op, la, lb) || depth % 16 != 0 || ld.rows % 16 != 0)) {
    return 15;
  }
  const auto at = ElementOf;
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
      const float bias = op.epilogue == 4 || op.epilogue == 164 ? op.bias[i] : 0.0F;
      float sum = is_fp8 ? 0.0F : bias;
      for (std::int64_t k = 0; k < depth; ++k) {
        sum += at(a, la, i, k, op.transposes_a != 0) * at(b, lb, k, j, op.transposes_b != 0);
      }
      if (is_fp8) {  // CUBLASLT_MATMUL_MATRIX_SCALE_SCALAR_32F, OUTER_VEC_32F
        const bool by_line = op.scale_mode_a == 3;
        sum = sum * (op.scale_a[by_line ? i : 0] * op.scale_b[by_line ? j : 0]) + bias;
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

constexpr CublasLtTable kFake = {.version = [] { return std::size_t{130100}; },
                                 .create = Create,
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

void Finish(Gpu& gpu, GpuStream stream) {
  const GpuEvent event = gpu.NewEvent(false);
  gpu.Record(event, stream);
  gpu.Synchronize(event);
}

// A GPU that has the library, and no kernels of its own unless it is told.
class FakeLtGpu : public ForwardingGpu {
 public:
  explicit FakeLtGpu(bool has_kernels = false)
      : ForwardingGpu(MakeEmulatedGpu({})), has_kernels_(has_kernels) {}
  [[nodiscard]] bool Multiply(const gpu::GemmArgs& product, void* workspace, std::int64_t bytes,
                              GpuStream stream) override {
    ++products;
    if (has_kernels_) {  // the product is made at once, so what it reads must be there
      Finish(*this, stream);
    }
    return library_.Multiply(product, workspace, bytes, nullptr);
  }
  void Launch(const KernelLaunch& launch, GpuStream stream) override {
    if (!has_kernels_) {
      throw RunError("a kernel");
    }
    ForwardingGpu::Launch(launch, stream);
  }
  int products = 0;

 private:
  const bool has_kernels_;
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
    ModelOpCall call = CallOf(spec);
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
    ModelOpCall call = CallOf(up);
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
  ModelOpCall call = CallOf(down);
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

// c (5, 16) = a (5, 32) b (32, 16) in fp8, with one scale each or one per row and column.
TEST_CASE("CublasLt.MultipliesFp8WithItsScales") {
  constexpr std::int64_t kM = 5, kN = 16, kK = 32;
  for (const bool by_row : {false, true}) {
    CAPTURE(by_row);
    // Numbers that both formats have.
    std::vector<float> a = Counting(kM * kK, 0.5F), b = Counting(kN * kK, 0.25F);
    std::vector<std::uint8_t> a8, b8;
    for (float& x : a) {
      a8.push_back(FloatToFp8(x, Fp8Format::kE5m2));
      x = Fp8ToFloat(a8.back(), Fp8Format::kE5m2);
    }
    for (float& x : b) {
      b8.push_back(FloatToFp8(x, Fp8Format::kE4m3));
      x = Fp8ToFloat(b8.back(), Fp8Format::kE4m3);
    }
    std::vector<float> of_a, of_b, bias = Counting(kN, 2.0F), c(kM * kN);
    for (std::int64_t i = 0; i < kN; ++i) {
      of_a.push_back(0.5F + static_cast<float>(i));
      of_b.push_back(2.0F + static_cast<float>(3 * i));
    }
    gpu::GemmArgs p;
    p.m = kM;
    p.n = kN;
    p.k = kK;
    p.a = {{a8.data(), DType::kFp8}, kK, 1};
    p.b = {{b8.data(), DType::kFp8}, 1, kK};
    p.c = {{c.data(), DType::kFp32}, kN, 1};
    p.bias = {bias.data(), DType::kFp32};
    p.fp8 = {of_a.data(), of_b.data(), Fp8Format::kE5m2, Fp8Format::kE4m3, by_row};
    CublasLt library(kFake, [](const std::string&) {});
    REQUIRE(library.Multiply(p, nullptr, 0, nullptr));
    for (std::int64_t i = 0; i < kM; ++i) {
      for (std::int64_t j = 0; j < kN; ++j) {
        float sum = 0.0F;
        for (std::int64_t k = 0; k < kK; ++k) {
          sum += a[static_cast<std::size_t>(i * kK + k)] * b[static_cast<std::size_t>(j * kK + k)];
        }
        sum *= of_a[static_cast<std::size_t>(by_row ? i : 0)] *
               of_b[static_cast<std::size_t>(by_row ? j : 0)];
        CHECK(c[static_cast<std::size_t>(i * kN + j)] ==
              doctest::Approx(sum + bias[static_cast<std::size_t>(j)]));
      }
    }
    // Formats and scales are part of what a shape is.
    p.fp8.a_format = Fp8Format::kE4m3;
    REQUIRE(library.Multiply(p, nullptr, 0, nullptr));
    CHECK(library.cached_count() == 2);
    // No sums and no GELU beside it; the caller does them.
    p.bias = {};
    p.row_sums = {bias.data(), DType::kFp32};
    CHECK_FALSE(library.Multiply(p, nullptr, 0, nullptr));
  }
}

// Scales per row came with CUDA 12.9.
TEST_CASE("CublasLt.OldVersionsHaveOneScalePerMatrix") {
  CublasLtTable old = kFake;
  old.version = [] { return std::size_t{120800}; };
  std::vector<std::string> said;
  CublasLt library(old, [&](const std::string& text) { said.push_back(text); });
  std::vector<std::uint8_t> ones(256, FloatToFp8(1.0F, Fp8Format::kE4m3));
  std::vector<float> c(256), scales(16, 1.0F);
  gpu::GemmArgs p;
  p.m = p.n = p.k = 16;
  p.a = {{ones.data(), DType::kFp8}, 16, 1};
  p.b = {{ones.data(), DType::kFp8}, 1, 16};
  p.c = {{c.data(), DType::kFp32}, 16, 1};
  p.fp8 = {scales.data(), scales.data()};
  CHECK(library.Multiply(p, nullptr, 0, nullptr));
  CHECK(c[17] == 16.0F);
  p.fp8.by_row = true;
  CHECK_FALSE(library.Multiply(p, nullptr, 0, nullptr));
  CHECK_FALSE(library.Multiply(p, nullptr, 0, nullptr));
  CHECK(said == std::vector<std::string>{
                    "cuBLASLt has nothing for a product of 16 x 16 x 16 in fp8 with a scale per "
                    "row (status 15): by our own kernel"});
}

// A layer by the library and by our own kernel: its three products, whichever way the weight lies.
TEST_CASE("CublasLt.Fp8LayersAreThoseOfOurKernels") {
  constexpr std::int64_t kRows = 32, kIn = 48, kOut = 16;
  for (const int ways : {0, 1, 2, 3}) {
    CAPTURE(ways);
    OpSpec spec;
    spec.kind = OpKind::kLinear;
    spec.rows = kRows;
    spec.in = kIn;
    spec.out = kOut;
    spec.transposed = (ways & 1) != 0;
    KernelSetOptions options = FindKernelSet("shardwright-cuda-plain", "test");
    options.fp8 = (ways & 2) != 0 ? Fp8Products::kPerRow : Fp8Products::kPerTensor;
    const OpKernels kernels = LowerOp(spec, 1, DType::kFp32, options);
    std::vector<float> x = Counting(kRows * kIn, 0.37F), w = Counting(kIn * kOut, 0.23F);
    std::vector<float> dy = Counting(kRows * kOut, 0.71F);
    w[5] = 40.0F;
    std::vector<float> results[2];
    for (const bool by_library : {false, true}) {
      FakeLtGpu with_library(true);
      const std::unique_ptr<Gpu> without = MakeEmulatedGpu({});
      Gpu& gpu = by_library ? static_cast<Gpu&>(with_library) : *without;
      std::vector<float> y(kRows * kOut), dx(kRows * kIn), dw(kIn * kOut);
      const auto bytes = std::max(kernels.forward_workspace, kernels.backward_workspace);
      std::vector<std::byte> memory(static_cast<std::size_t>(bytes.value) + 256);
      ModelOpCall call;
      call.spec = &spec;
      call.options = &options;
      call.compute = DType::kFp32;
      call.inputs = {{x.data(), DType::kFp32, kRows * kIn}};
      call.params = {{w.data(), DType::kFp32, kIn * kOut}};
      call.outputs = {{y.data(), DType::kFp32, kRows * kOut}};
      call.output_grads = {{dy.data(), DType::kFp32, kRows * kOut}};
      call.input_grads = {{dx.data(), DType::kFp32, kRows * kIn}};
      call.param_grads = {{{dw.data(), DType::kFp32, kIn * kOut}, false}};
      call.workspace = memory;
      const GpuStream stream = gpu.NewStream(false);
      for (const bool is_backward : {false, true}) {
        ops::SubmitLinear(call, is_backward, {gpu, stream, nullptr});
        Finish(gpu, stream);
      }
      CHECK(with_library.products == (by_library ? 3 : 0));
      for (const auto* part : {&y, &dx, &dw}) {
        results[by_library ? 1 : 0].insert(results[by_library ? 1 : 0].end(), part->begin(),
                                           part->end());
      }
    }
    for (std::size_t i = 0; i < results[0].size(); ++i) {
      CHECK(results[0][i] == doctest::Approx(results[1][i]).epsilon(1e-5));
    }
  }
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

// The algorithm with number 4713 is the fastest.
class FakeTimer : public ProductTimer {
 public:
  [[nodiscard]] bool CanTime(void* /*stream*/) override { return can_time; }
  [[nodiscard]] double Time(const std::function<void()>& launch, void* /*stream*/) override {
    ++timed;
    launch();
    launch();
    return called.back() == 4713 ? 1.0 : 2.0;
  }
  [[nodiscard]] std::shared_ptr<void> Borrow(std::int64_t bytes) override {
    const auto memory = std::make_shared<std::vector<std::byte>>(static_cast<std::size_t>(bytes));
    return lends ? std::shared_ptr<void>(memory, memory->data()) : nullptr;
  }
  bool can_time = true, lends = true;
  int timed = 0;
};

struct Tuned {
  Tuned(const std::string& file, const std::string& gpu)
      : choices(file, gpu), library(kFake, [](const std::string&) {}, {&timer, &choices}) {
    p.m = p.n = p.k = 4;
    p.a = p.b = {{a.data(), DType::kFp32}, 4, 1};
    p.c = {{c.data(), DType::kFp32}, 4, 1};
  }
  // The algorithm that is used in the end.
  std::uint64_t Multiply() {
    REQUIRE(library.Multiply(p, nullptr, 0, nullptr));
    return called.back();
  }
  std::vector<float> a = std::vector<float>(16, 1.0F), c = std::vector<float>(16, 10.0F);
  gpu::GemmArgs p;
  FakeTimer timer;
  ProductChoices choices;
  CublasLt library;
};

TEST_CASE("CublasLt.TimesWhatTheLibraryProposes") {
  const ScratchFolder folder;
  const std::string file = folder.path() + "/products";
  proposals = 5;
  {
    Tuned first(file, "a GPU");
    first.p.adds = true;
    CHECK(first.Multiply() == 4713);
    CHECK(first.timer.timed == 5);
    CHECK(first.c == std::vector<float>(16, 14.0F));  // once, whatever was timed
    CHECK(first.Multiply() == 4713);
    CHECK(first.timer.timed == 5);
  }
  const auto add_once = [](Tuned& tuned) {
    tuned.p.adds = true;
    return tuned.Multiply();
  };
  Tuned again(file, "a GPU");
  CHECK(add_once(again) == 4713);
  CHECK(again.timer.timed == 0);
  Tuned other(file, "another GPU");
  CHECK(add_once(other) == 4713);
  CHECK(other.timer.timed == 5);
  // Nothing to time with: the first proposal, and nothing is kept.
  Tuned poor(file, "a third GPU");
  poor.timer.lends = false;
  CHECK(add_once(poor) == 4711);
  poor.p.adds = false;
  poor.timer.can_time = false;
  CHECK(poor.Multiply() == 4711);
  CHECK(poor.timer.timed == 0);
  Tuned fresh(file, "a third GPU");
  CHECK(add_once(fresh) == 4713);
  CHECK(fresh.timer.timed == 5);
  // A choice that the library no longer proposes.
  proposals = 2;
  Tuned fewer(file, "a third GPU");
  CHECK(add_once(fewer) == 4711);
  CHECK(fewer.timer.timed == 2);
  proposals = 1;
}

TEST_CASE("ProductChoices.KeepsWhatOthersChose") {
  const ScratchFolder folder;
  const std::string file = folder.path() + "/products";
  ProductChoices one(file, "a GPU"), two(file, "a GPU");
  one.Add("1,2", {7, 0, ~std::uint64_t{0}});
  two.Add("3,4", {8});
  const ProductChoices both(file, "a GPU");
  CHECK(both.Find("1,2") == LtAlgorithmData{7, 0, ~std::uint64_t{0}});
  CHECK(both.Find("3,4") == LtAlgorithmData{8});
  CHECK_FALSE(both.Find("5,6").has_value());
  (void)folder.Write("products", "something else\n");
  CHECK_THROWS_WITH_AS(ProductChoices(file, "a GPU"),
                       (file + ": line 1: expected \"shardwright products 1: ...\"; remove the "
                               "file, and products are timed again")
                           .c_str(),
                       RunError);
  for (const char* line :
       {"1,2 7 0 0 0 0 0 0\n", "1,2 7 0 0 0 0 0 0 0 0\n", "1,2 x 0 0 0 0 0 0 0\n", "\n"}) {
    (void)folder.Write("products", std::string("shardwright products 1: a GPU\n") + line);
    CHECK_THROWS_WITH_AS(
        ProductChoices(file, "a GPU"),
        (file + ": line 2: expected a product and eight hexadecimal numbers; remove "
                "the file, and products are timed again")
            .c_str(),
        RunError);
  }
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
