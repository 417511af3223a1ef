// The host's matrix product against fp64 loops.

#include "executor/host/kernels/gemm.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <iterator>
#include <span>
#include <string>
#include <vector>

#include <dlfcn.h>
#include <doctest/doctest.h>
#include <link.h>

#include "executor/half.h"
#include "executor/host/kernels/rows.h"
#include "models/kernels/host.h"
#include "tests/executor/kernels/harness.h"
#include "tests/sanitizers.h"

namespace shardwright::testing {
namespace {

std::vector<float> Floats(const Numbers& values) {
  return {values.begin(), values.end()};
}

struct Product {
  GemmSize size;
  bool a_transposed = false;
  bool b_transposed = false;
};

GemmOperand OperandOf(const std::vector<float>& data, std::int64_t rows, std::int64_t columns,
                      bool transposed) {
  return {data.data(), DType::kFp32, transposed ? 1 : columns, transposed ? rows : 1};
}

// Runs in exactly the declared workspace, which ends where the vector does.
std::vector<float> Multiply(const Product& p, const std::vector<float>& a,
                            const std::vector<float>& b, const float* bias,
                            std::vector<float> c = {}) {
  const auto [m, n, k] = p.size;
  const bool accumulate = !c.empty();
  c.resize(static_cast<std::size_t>(m * n), NAN);
  const std::int64_t bytes = HostGemmWorkspace(m, n, k, DType::kFp32);
  std::vector<std::byte> memory(static_cast<std::size_t>(bytes) + 64, std::byte{0xFF});
  const auto address = reinterpret_cast<std::uintptr_t>(memory.data());
  const std::span<std::byte> workspace(memory.data() + (64 - address % 64) % 64,
                                       static_cast<std::size_t>(bytes));
  HostGemm(p.size, OperandOf(a, m, k, p.a_transposed), OperandOf(b, k, n, p.b_transposed),
           {c.data(), DType::kFp32, n, accumulate}, bias, workspace);
  return c;
}

double At(const std::vector<float>& data, const GemmOperand& o, std::int64_t i, std::int64_t j) {
  return static_cast<double>(
      data[static_cast<std::size_t>(i * o.row_stride + j * o.column_stride)]);
}

// Sum of k products in fp32: |error| <= k u sum |a b| (Higham, Accuracy and Stability, section
// 3.1), u = 2^-24; one more addition for the bias or the old value.
void CheckProduct(const Product& p, const std::vector<float>& a, const std::vector<float>& b,
                  const std::vector<float>& c, const std::vector<double>& added) {
  const std::int64_t m = p.size.m;
  const std::int64_t n = p.size.n;
  const std::int64_t k = p.size.k;
  const GemmOperand oa = OperandOf(a, m, k, p.a_transposed);
  const GemmOperand ob = OperandOf(b, k, n, p.b_transposed);
  double worst = 0.0;
  for (std::int64_t i = 0; i < m; ++i) {
    for (std::int64_t j = 0; j < n; ++j) {
      double sum = added[static_cast<std::size_t>(i * n + j)];
      double magnitude = std::fabs(sum);
      for (std::int64_t l = 0; l < k; ++l) {
        const double product = At(a, oa, i, l) * At(b, ob, l, j);
        sum += product;
        magnitude += std::fabs(product);
      }
      const double bound = static_cast<double>(k + 1) * 0x1p-24 * magnitude;
      const double actual = static_cast<double>(c[static_cast<std::size_t>(i * n + j)]);
      worst = std::fmax(worst, std::fabs(actual - sum) / bound);
      REQUIRE(std::isfinite(actual));
    }
  }
  INFO(m << " x " << n << " x " << k);
  CHECK(worst <= 1.0);
}

std::span<std::byte> LargeWorkspace() {
  alignas(64) static std::array<std::byte, 2 << 20> workspace;
  return workspace;
}

std::vector<std::int64_t> SmallIntegers(std::int64_t n, std::int64_t step) {
  std::vector<std::int64_t> values;
  for (std::int64_t i = 0; i < n; ++i) {
    values.push_back(i * step % 1009 % 23 - 11);
  }
  return values;
}

std::vector<std::int64_t> MultiplyIntegers(const GemmSize& size, const std::vector<std::int64_t>& a,
                                           const std::vector<std::int64_t>& b) {
  std::vector<std::int64_t> c(static_cast<std::size_t>(size.m * size.n));
  for (std::int64_t i = 0; i < size.m; ++i) {
    for (std::int64_t k = 0; k < size.k; ++k) {
      for (std::int64_t j = 0; j < size.n; ++j) {
        c[static_cast<std::size_t>(i * size.n + j)] += a[static_cast<std::size_t>(i * size.k + k)] *
                                                       b[static_cast<std::size_t>(k * size.n + j)];
      }
    }
  }
  return c;
}

enum class Layout { kRows, kColumns, kApart };  // what is contiguous

// A matrix in memory of some dtype and layout.
class Stored {
 public:
  Stored(const std::vector<std::int64_t>& values, std::int64_t rows, std::int64_t columns,
         DType dtype, Layout layout)
      : memory_(3 * values.size(), NAN) {
    const std::int64_t apart = layout == Layout::kApart ? 2 : 1;
    operand_ = {memory_.data(), dtype, columns * apart + (apart - 1), apart};
    if (layout == Layout::kColumns) {
      operand_ = {memory_.data(), dtype, 1, rows};
    }
    for (std::int64_t i = 0; i < rows * columns; ++i) {
      StoreFloat(dtype, memory_.data(),
                 i / columns * operand_.row_stride + i % columns * operand_.column_stride,
                 static_cast<float>(values[static_cast<std::size_t>(i)]));
    }
  }
  Stored(const Stored&) = delete;
  Stored& operator=(const Stored&) = delete;

  [[nodiscard]] const GemmOperand& operand() const { return operand_; }

 private:
  std::vector<float> memory_;
  GemmOperand operand_;
};

}  // namespace

TEST_CASE("HostGemm.EveryShapeAndLayout") {
  // Single elements, rows and columns, and across the blocks (384, 512, 256).
  const std::vector<GemmSize> sizes = {{1, 1, 1},     {1, 33, 7},    {12, 32, 256}, {13, 31, 257},
                                       {385, 40, 30}, {20, 515, 11}, {96, 512, 3},  {5, 3, 600}};
  for (const GemmSize& size : sizes) {
    const std::vector<float> a = Floats(Normal(size.m * size.k, 1));
    const std::vector<float> b = Floats(Normal(size.k * size.n, 2));
    const std::vector<float> bias = Floats(Normal(size.n, 3));
    for (const bool a_transposed : {false, true}) {
      for (const bool b_transposed : {false, true}) {
        const Product p{size, a_transposed, b_transposed};
        std::vector<double> added(static_cast<std::size_t>(size.m * size.n), 0.0);
        CheckProduct(p, a, b, Multiply(p, a, b, nullptr), added);
        for (std::size_t i = 0; i < added.size(); ++i) {
          added[i] = static_cast<double>(bias[i % static_cast<std::size_t>(size.n)]);
        }
        CheckProduct(p, a, b, Multiply(p, a, b, bias.data()), added);
        std::fill(added.begin(), added.end(), 2.0);
        CheckProduct(p, a, b, Multiply(p, a, b, nullptr, std::vector<float>(added.size(), 2.0F)),
                     added);
      }
    }
  }
}

// Ranks with equal micro-batches agree bit by bit, wherever their arenas lie. OpenBLAS chooses its
// loops by the sizes of a product, so rows are only compared between products of equal sizes.
TEST_CASE("HostGemm.EqualSizesGiveEqualBitsAtAnyAddress") {
  for (const GemmSize& size : {GemmSize{130, 70, 300}, {7, 9, 5}, {1, 512, 64}, {64, 64, 64}}) {
    INFO(size.m << " x " << size.n << " x " << size.k);
    const std::vector<float> a = Floats(Normal(size.m * size.k, 4));
    const std::vector<float> b = Floats(Normal(size.k * size.n, 5));
    const std::vector<float> expected = Multiply({size}, a, b, nullptr);
    for (const std::size_t shift : {0U, 1U, 4U, 9U, 64U}) {
      std::vector<float> shifted_a(shift);
      shifted_a.insert(shifted_a.end(), a.begin(), a.end());
      std::vector<float> shifted_b(3 * shift);
      shifted_b.insert(shifted_b.end(), b.begin(), b.end());
      std::vector<float> c(5 * shift + expected.size());
      HostGemm(size, {shifted_a.data() + shift, DType::kFp32, size.k, 1},
               {shifted_b.data() + 3 * shift, DType::kFp32, size.n, 1},
               {c.data() + 5 * shift, DType::kFp32, size.n}, nullptr, LargeWorkspace());
      CHECK(std::memcmp(c.data() + 5 * shift, expected.data(), expected.size() * sizeof(float)) ==
            0);
    }
  }
}

// Numbers are integers up to 11 in magnitude, so all sums are below 11 * 11 * 300 + 12, exact in
// fp32 and the same in any order; a 16-bit result is the exact sum rounded once. Blocks are of 384
// rows, 512 columns and 256 elements in between.
TEST_CASE("HostGemm.EveryTypeAndLayoutIsExactUpToOneRounding") {
  for (const GemmSize& size : {GemmSize{390, 35, 300}, {20, 515, 300}}) {
    const std::vector<std::int64_t> a = SmallIntegers(size.m * size.k, 7919);
    const std::vector<std::int64_t> b = SmallIntegers(size.k * size.n, 104729);
    std::vector<float> bias(static_cast<std::size_t>(size.n), 3.0F);
    const std::vector<std::int64_t> product = MultiplyIntegers(size, a, b);
    for (const DType dtype : {DType::kFp32, DType::kBf16, DType::kFp16}) {
      for (const Layout layout : {Layout::kRows, Layout::kColumns, Layout::kApart}) {
        const Stored left(a, size.m, size.k, dtype, layout);
        const Stored right(b, size.k, size.n, dtype, layout);
        for (const bool accumulate : {false, true}) {
          std::vector<float> memory(product.size());
          for (std::size_t i = 0; i < product.size(); ++i) {
            StoreFloat(dtype, memory.data(), static_cast<std::int64_t>(i), 1.0F);
          }
          HostGemm(size, left.operand(), right.operand(),
                   {memory.data(), dtype, size.n, accumulate}, accumulate ? nullptr : bias.data(),
                   LargeWorkspace());
          std::size_t wrong = 0;
          for (std::size_t i = 0; i < product.size(); ++i) {
            float stored = 0.0F;
            StoreFloat(dtype, &stored, 0, static_cast<float>(product[i] + (accumulate ? 1 : 3)));
            wrong += LoadFloat(dtype, &stored, 0) ==
                             LoadFloat(dtype, memory.data(), static_cast<std::int64_t>(i))
                         ? 0
                         : 1;
          }
          CHECK(wrong == 0);
        }
      }
    }
  }
}

TEST_CASE("HostGemm.WorkspaceByHand") {
  // 2 x 40 numbers of a and 40 x 3 of b, in whole lines of 64 bytes; no tile for an fp32 result.
  CHECK(HostGemmWorkspace(2, 3, 40, DType::kFp32) == 320 + 512);
  CHECK(HostGemmWorkspace(2, 3, 40, DType::kBf16) == 320 + 512 + 64);
  // Blocks bound it: (384 + 512) x 256 numbers, and a tile of 384 x 512.
  CHECK(HostGemmWorkspace(1 << 20, 1 << 20, 1 << 20, DType::kFp32) == (384 + 512) * 256 * 4);
  CHECK(HostGemmWorkspace(1 << 20, 1 << 20, 1 << 20, DType::kBf16) ==
        (384 + 512) * 256 * 4 + 384 * 512 * 4);
}

// What makes W micro-batches on one rank equal one micro-batch on W ranks: long sums of several
// blocks, several tiles of the result.
TEST_CASE("A finished product has the bits of one that was kept apart, stored or added") {
  const GemmSize size{500, 700, 900};
  const std::vector<float> a = Floats(Normal(size.m * size.k, 1));
  const std::vector<float> b = Floats(Normal(size.k * size.n, 2));
  const std::vector<float> before = Floats(Normal(size.m * size.n, 3));
  const std::int64_t bytes = HostGemmWorkspace(size.m, size.n, size.k, DType::kBf16);
  std::vector<std::byte> memory(static_cast<std::size_t>(bytes) + 64);
  const auto address = reinterpret_cast<std::uintptr_t>(memory.data());
  const std::span<std::byte> workspace(memory.data() + (64 - address % 64) % 64,
                                       static_cast<std::size_t>(bytes));
  for (const bool transposed : {false, true}) {
    CAPTURE(transposed);
    const GemmOperand left = OperandOf(a, size.m, size.k, transposed);
    const GemmOperand right = OperandOf(b, size.k, size.n, false);
    std::vector<float> apart(before.size());
    HostGemm(size, left, right, {apart.data(), DType::kFp32, size.n, false, true}, nullptr,
             workspace);
    std::vector<float> added = before;
    HostGemm(size, left, right, {added.data(), DType::kFp32, size.n, true, true}, nullptr,
             workspace);
    std::size_t different = 0;
    for (std::size_t i = 0; i < before.size(); ++i) {
      different += added[i] == before[i] + apart[i] ? 0U : 1U;
    }
    CHECK(different == 0);
  }
}

// Whole numbers up to 255, which bf16 and fp16 hold, in more than one chunk and from an odd place
// on.
TEST_CASE("Sums into 16-bit numbers") {
  constexpr std::int64_t kOffset = 3, kCount = 2 * kChunk + 500;
  for (const DType dtype : {DType::kBf16, DType::kFp16}) {
    std::vector<std::uint16_t> to(static_cast<std::size_t>(kOffset + kCount + 1), 0);
    const View view{to.data(), dtype, std::ssize(to)};
    std::vector<float> from(static_cast<std::size_t>(kCount));
    for (std::size_t i = 0; i < from.size(); ++i) {
      from[i] = static_cast<float>(i % 101);
    }
    AddFloats(from.data(), kCount, view, kOffset);
    AddFloats(from.data(), kCount, view, kOffset);
    std::vector<float> sums(to.size());
    LoadFloats({to.data(), dtype, std::ssize(to)}, 0, std::ssize(to), sums.data());
    bool is_right = sums[0] == 0 && sums[2] == 0 && sums.back() == 0;
    for (std::size_t i = 0; i < from.size(); ++i) {
      is_right = is_right && sums[i + kOffset] == 2 * from[i];
    }
    CHECK(is_right);
  }
}

// OpenBLAS would start one for every processor when it is loaded.
TEST_CASE("Products start no threads" * doctest::skip(kHasSanitizer)) {
  const std::string tasks = "/proc/self/task";
  const auto count = [&] {
    return std::distance(std::filesystem::directory_iterator(tasks),
                         std::filesystem::directory_iterator());
  };
  const auto before = ::getenv("OPENBLAS_NUM_THREADS");
  LoadHostProducts();
  CHECK(count() == 1);
  CHECK(::getenv("OPENBLAS_NUM_THREADS") == before);
}

// The processor that the loops of the OpenBLAS in this process are for, as it calls it: "SkylakeX";
// empty: there is none.
std::string CoreOfProducts() {
  std::string path;
  (void)::dl_iterate_phdr(
      [](dl_phdr_info* info, std::size_t /*size*/, void* found) {
        if (std::strstr(info->dlpi_name, "openblas") != nullptr) {
          *static_cast<std::string*>(found) = info->dlpi_name;
        }
        return 0;
      },
      &path);
  void* const library = path.empty() ? nullptr : ::dlopen(path.c_str(), RTLD_NOW | RTLD_NOLOAD);
  for (const char* name : {"openblas_get_corename", "scipy_openblas_get_corename"}) {
    if (void* const function = library == nullptr ? nullptr : ::dlsym(library, name)) {
      return reinterpret_cast<const char* (*)()>(function)();
    }
  }
  return "";
}

// OpenBLAS 0.3.21 takes processors that came after it for some of 2004.
TEST_CASE("Products use the vectors that the processor has") {
#if defined(__x86_64__)
  LoadHostProducts();
  const std::string core = CoreOfProducts();
  CAPTURE(core);
  if (!core.empty() && std::getenv("OPENBLAS_CORETYPE") == nullptr &&
      __builtin_cpu_supports("avx2") != 0 && __builtin_cpu_supports("fma") != 0) {
    CHECK(core != "Prescott");
    CHECK(core != "Core2");
    CHECK(core != "Nehalem");
  }
#endif
}

}  // namespace shardwright::testing
