#include "executor/host/kernels/gemm.h"

#include <array>
#include <atomic>
#include <cstdlib>
#include <limits>
#include <mutex>
#include <optional>
#include <string_view>
#include <vector>

#include <sys/mman.h>

#include "core/error.h"
#include "core/library.h"
#include "core/ranges.h"
#include "executor/half.h"
#include "executor/host/kernels/rows.h"
#include "executor/host/kernels/vector.h"
#include "models/kernels/host.h"

namespace shardwright {
namespace {

// A matrix as sgemm takes it: fp32, its rows contiguous and `leading` elements apart, or its
// columns if it is transposed.
struct Matrix {
  const float* data = nullptr;
  bool transposed = false;
  std::int64_t leading = 0;
};

// Rows of contiguous elements, `leading` elements apart.
struct Sum {
  float* data = nullptr;
  std::int64_t leading = 0;
  bool add = false;  // to what is there
};

#if SHARDWRIGHT_OPENBLAS
// Variables that OpenBLAS reads when it is loaded. A rank's threads share its products themselves,
// so it shall start none, which one that is there already, say NumPy's, may have done. They are put
// back for the processes that this one starts.
class LoadingVariables {
 public:
  // `core`: the processor to multiply for, null: the one that it finds.
  explicit LoadingVariables(const char* core) {
    Set("OPENBLAS_NUM_THREADS", "1");
    Set("OMP_NUM_THREADS", "1");  // of its builds with OpenMP
    if (core != nullptr) {
      Set("OPENBLAS_CORETYPE", core);
    }
  }
  ~LoadingVariables() {
    for (const Variable& variable : variables_) {
      if (variable.before.has_value()) {
        ::setenv(variable.name, variable.before->c_str(), 1);
      } else {
        ::unsetenv(variable.name);
      }
    }
  }
  LoadingVariables(const LoadingVariables&) = delete;
  LoadingVariables& operator=(const LoadingVariables&) = delete;

 private:
  struct Variable {
    const char* name;
    std::optional<std::string> before;
  };
  void Set(const char* name, const char* value) {
    const char* const before = std::getenv(name);
    variables_.push_back({name, before == nullptr ? std::optional<std::string>() : before});
    ::setenv(name, value, 1);
  }
  std::vector<Variable> variables_;
};

// As cblas.h declares them, its enumerations as the numbers that they are: the header of OpenBLAS
// is not needed to build.
using BlasInt = int;
using SgemmFunction = void (*)(int order, int transpose_a, int transpose_b, BlasInt m, BlasInt n,
                               BlasInt k, float alpha, const float* a, BlasInt lda, const float* b,
                               BlasInt ldb, float beta, float* c, BlasInt ldc);
using SetThreadsFunction = void (*)(int threads);
using CoreNameFunction = const char* (*)();
constexpr int kRowMajor = 101;
constexpr int kNoTranspose = 111;
constexpr int kTranspose = 112;

struct OpenBlas {
  void* library = nullptr;
  SgemmFunction sgemm = nullptr;
  SetThreadsFunction set_threads = nullptr;
  CoreNameFunction core_name = nullptr;
};

// PyPI's build of OpenBLAS, scipy-openblas32, has names of its own.
bool FindFunctions(const std::string& prefix, OpenBlas& blas) {
  const auto find = [&](const char* name, auto* function) {
    return FindFunction(blas.library, (prefix + name).c_str(), function);
  };
  return find("cblas_sgemm", &blas.sgemm) && find("openblas_set_num_threads", &blas.set_threads) &&
         find("openblas_get_corename", &blas.core_name);
}

OpenBlas LoadOpenBlas(const char* core) {
  std::string problem;
  const LoadingVariables variables(core);
  OpenBlas blas;
  blas.library = LoadLibrary("SHARDWRIGHT_OPENBLAS", {"libopenblas.so.0", "libscipy_openblas.so"},
                             SHARDWRIGHT_OPENBLAS_LIBRARY, &problem);
  if (blas.library == nullptr) {
    throw EnvironmentError("matrix products need OpenBLAS: " + problem +
                           "; install libopenblas0 or set SHARDWRIGHT_OPENBLAS to its path");
  }
  if (!FindFunctions("", blas) && !FindFunctions("scipy_", blas)) {
    throw EnvironmentError("libopenblas lacks functions that OpenBLAS 0.3.21 has");
  }
  return blas;
}

// A version older than the processor takes it for one without AVX: 0.3.21 of 2022 an Emerald Rapids
// for a Prescott of 2004, which is a fifth of its speed. Then what the processor can do decides.
// Null: what it found stands.
const char* BetterCore(const std::string& found) {
#if defined(__x86_64__)
  static constexpr std::array<std::string_view, 6> kWithoutAvx = {"Prescott", "Core2",   "Nehalem",
                                                                  "Generic",  "generic", "Unknown"};
  const bool is_old = IsIn(kWithoutAvx, found);
  if (!is_old || std::getenv("OPENBLAS_CORETYPE") != nullptr) {
    return nullptr;
  }
  const bool has_avx2 = __builtin_cpu_supports("avx2") != 0 && __builtin_cpu_supports("fma") != 0;
  const bool has_avx512 =
      __builtin_cpu_supports("avx512f") != 0 && __builtin_cpu_supports("avx512bw") != 0 &&
      __builtin_cpu_supports("avx512dq") != 0 && __builtin_cpu_supports("avx512vl") != 0;
  return has_avx512 ? "SKYLAKEX" : has_avx2 ? "HASWELL" : nullptr;
#else
  (void)found;
  return nullptr;
#endif
}

// OpenBLAS maps memory for each product that runs beside others for the first time, and asks for it
// for ever where there is none: a limit on address space (ulimit -v) has to be seen before.
class ProductMemory {
 public:
  ProductMemory() {
    if (++running_ <= mapped_) {
      return;
    }
    first_ = std::unique_lock(mutex_);  // until it has its memory
    beside_ = running_;
    try {
      Probe();
    } catch (...) {
      --running_;
      throw;
    }
  }
  ~ProductMemory() {
    if (first_.owns_lock()) {
      mapped_ = std::max(mapped_.load(), beside_);
    }
    --running_;
  }
  ProductMemory(const ProductMemory&) = delete;
  ProductMemory& operator=(const ProductMemory&) = delete;

  static void Probe() {
    constexpr std::size_t kBytes = std::size_t{132} << 20;  // 128 MiB and what lies around it
    void* const memory = ::mmap(nullptr, kBytes, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (memory == MAP_FAILED) {
      throw EnvironmentError(
          "a matrix product needs 132 MiB of address space for each thread that multiplies, and "
          "there is less; raise ulimit -v or take fewer ranks or threads");
    }
    ::munmap(memory, kBytes);
  }

 private:
  static inline std::mutex mutex_;
  static inline std::atomic<int> running_{0};
  static inline std::atomic<int> mapped_{0};  // products at a time that have their memory
  std::unique_lock<std::mutex> first_;
  int beside_ = 0;
};

OpenBlas LoadOpenBlas() {
  OpenBlas blas = LoadOpenBlas(nullptr);
  if (const char* const core = BetterCore(blas.core_name())) {
    ::dlclose(blas.library);  // it asks for its processor once, when it is loaded
    blas = LoadOpenBlas(core);
  }
  blas.set_threads(1);
  ProductMemory::Probe();  // what is sure to fail does so before a run
  return blas;
}

// Threads that need it at the same time wait for the first.
const OpenBlas& Blas() {
  static const OpenBlas blas = LoadOpenBlas();
  return blas;
}

void Sgemm(const GemmSize& size, const Matrix& a, const Matrix& b, const Sum& c) {
  const OpenBlas& blas = Blas();
  const ProductMemory memory;
  const auto integer = [](std::int64_t value) {
    SW_CHECK(value <= std::numeric_limits<BlasInt>::max(), "a matrix too large for OpenBLAS");
    return static_cast<BlasInt>(value);
  };
  blas.sgemm(kRowMajor, a.transposed ? kTranspose : kNoTranspose,
             b.transposed ? kTranspose : kNoTranspose, integer(size.m), integer(size.n),
             integer(size.k), 1.0F, a.data, integer(a.leading), b.data, integer(b.leading),
             c.add ? 1.0F : 0.0F, c.data, integer(c.leading));
}
#else
// The reference, for sanitizers: they see nothing of what a library does that they did not compile.
void Sgemm(const GemmSize& size, const Matrix& a, const Matrix& b, const Sum& c) {
  const auto at = [](const Matrix& o, std::int64_t row, std::int64_t column) {
    return o.data[o.transposed ? column * o.leading + row : row * o.leading + column];
  };
  for (std::int64_t i = 0; i < size.m; ++i) {
    for (std::int64_t j = 0; j < size.n; ++j) {
      float sum = 0.0F;
      for (std::int64_t k = 0; k < size.k; ++k) {
        sum += at(a, i, k) * at(b, k, j);
      }
      float& result = c.data[i * c.leading + j];
      result = c.add ? result + sum : sum;
    }
  }
}
#endif

// The operand where it lies, if sgemm can read it there.
std::optional<Matrix> InPlace(const GemmOperand& o, std::int64_t rows, std::int64_t columns) {
  if (o.dtype != DType::kFp32 || o.fp8.scales != nullptr) {
    return std::nullopt;
  }
  const auto* const data = static_cast<const float*>(o.data);
  // The stride of a dimension of one element may be anything.
  if ((o.column_stride == 1 || columns == 1) && (o.row_stride >= columns || rows == 1)) {
    return Matrix{data, false, rows == 1 ? columns : o.row_stride};
  }
  if ((o.row_stride == 1 || rows == 1) && (o.column_stride >= rows || columns == 1)) {
    return Matrix{data, true, columns == 1 ? rows : o.column_stride};
  }
  return std::nullopt;
}

GemmOperand Shifted(const GemmOperand& o, std::int64_t row, std::int64_t column) {
  GemmOperand shifted = o;
  shifted.data = static_cast<const std::byte*>(o.data) +
                 (row * o.row_stride + column * o.column_stride) * SizeOf(o.dtype);
  if (o.fp8.scales != nullptr) {
    shifted.fp8.scales += row * o.fp8.row_stride + column * o.fp8.column_stride;
  }
  return shifted;
}

// A line of an operand as fp8 has it, times its scale or its elements' scales.
void RoundLine(const GemmRounding& fp8, std::int64_t line, bool transposed, std::int64_t n,
               float* x) {
  const std::int64_t line_stride = transposed ? fp8.column_stride : fp8.row_stride;
  const float* const scales = fp8.scales + line * line_stride;
  if ((transposed ? fp8.row_stride : fp8.column_stride) == 0) {
    VectorScale(*scales, x, x, n);
  } else {
    VectorProduct(x, scales, x, n);
  }
  VectorRoundToFp8(fp8.format, x, n);
}

// A copy in fp32 at `to`: in the order of the operand, so that both are walked along.
Matrix Converted(const GemmOperand& o, std::int64_t rows, std::int64_t columns, float* to) {
  const bool transposed = o.column_stride != 1 && o.row_stride == 1;
  const std::int64_t lines = transposed ? columns : rows;
  const std::int64_t length = transposed ? rows : columns;
  const std::int64_t line_stride = transposed ? o.column_stride : o.row_stride;
  const std::int64_t stride = transposed ? o.row_stride : o.column_stride;
  const ConstView from{o.data, o.dtype, 0};
  for (std::int64_t line = 0; line < lines; ++line) {
    float* const row = to + line * length;
    if (stride == 1) {
      LoadFloats(from, line * line_stride, length, row);
    } else {
      for (std::int64_t i = 0; i < length; ++i) {
        row[i] = LoadFloat(o.dtype, o.data, line * line_stride + i * stride);
      }
    }
    if (o.fp8.scales != nullptr) {
      RoundLine(o.fp8, line, transposed, length, row);
    }
  }
  return {to, transposed, length};
}

// An operand of a product, block by block.
class Blocks {
 public:
  // `panel` holds a converted block.
  Blocks(const GemmOperand& operand, std::int64_t rows, std::int64_t columns, float* panel)
      : operand_(operand), in_place_(InPlace(operand, rows, columns)), panel_(panel) {}

  [[nodiscard]] bool is_converted() const { return !in_place_.has_value(); }

  [[nodiscard]] Matrix At(std::int64_t row, std::int64_t rows, std::int64_t column,
                          std::int64_t columns) const {
    if (!in_place_.has_value()) {
      return Converted(Shifted(operand_, row, column), rows, columns, panel_);
    }
    Matrix block = *in_place_;
    block.data += block.transposed ? column * block.leading + row : row * block.leading + column;
    return block;
  }

 private:
  GemmOperand operand_;
  std::optional<Matrix> in_place_;
  float* panel_;
};

struct Panels {
  float* a;
  float* b;
};

// c = or += a * b. What lies in memory as sgemm wants it is not cut into blocks.
void Multiply(const GemmSize& size, const GemmOperand& a, const GemmOperand& b, const Sum& c,
              const Panels& panels) {
  const Blocks left(a, size.m, size.k, panels.a);
  const Blocks right(b, size.k, size.n, panels.b);
  const std::int64_t rows = left.is_converted() ? kGemmBlockM : size.m;
  const std::int64_t columns = right.is_converted() ? kGemmBlockN : size.n;
  const std::int64_t depth = left.is_converted() || right.is_converted() ? kGemmBlockK : size.k;
  for (std::int64_t column = 0; column < size.n; column += columns) {
    for (std::int64_t k = 0; k < size.k; k += depth) {
      GemmSize part{0, std::min(columns, size.n - column), std::min(depth, size.k - k)};
      const Matrix y = right.At(k, part.k, column, part.n);
      for (std::int64_t row = 0; row < size.m; row += rows) {
        part.m = std::min(rows, size.m - row);
        Sgemm(part, left.At(row, part.m, k, part.k), y,
              {c.data + row * c.leading + column, c.leading, c.add || k > 0});
      }
    }
  }
}

void AddBias(const float* bias, std::int64_t rows, std::int64_t columns, const Sum& c) {
  for (std::int64_t i = 0; bias != nullptr && i < rows; ++i) {
    float* const row = c.data + i * c.leading;
    for (std::int64_t j = 0; j < columns; ++j) {
      row[j] += bias[j];
    }
  }
}

// The tile's sums over the scales of what was rounded: rows of a and columns of b begin where the
// tile does.
void Unscale(const GemmRounding& a, const GemmRounding& b, const GemmSize& part, float* tile) {
  for (std::int64_t i = 0; i < part.m; ++i) {
    const float of_row = 1.0F / a.scales[i * a.row_stride];
    float* const row = tile + i * part.n;
    for (std::int64_t j = 0; j < part.n; ++j) {
      row[j] *= of_row * (1.0F / b.scales[j * b.column_stride]);
    }
  }
}

// Rows of an fp32 tile into the result, whose element `start` is the first.
void RoundTile(const float* tile, std::int64_t rows, std::int64_t columns, const GemmResult& c,
               std::int64_t start) {
  const View result{c.data, c.dtype, 0};
  for (std::int64_t i = 0; i < rows; ++i) {
    if (c.accumulate) {
      AddFloats(tile + i * columns, columns, result, start + i * c.row_stride);
    } else {
      StoreFloats(tile + i * columns, columns, result, start + i * c.row_stride);
    }
  }
}

// What one thread multiplies.
void MultiplyPart(const GemmSize& size, const GemmOperand& a, const GemmOperand& b,
                  const GemmResult& c, const float* bias, std::span<std::byte> workspace) {
  const std::int64_t rows = std::min(kGemmBlockM, size.m);
  const std::int64_t columns = std::min(kGemmBlockN, size.n);
  const std::int64_t depth = std::min(kGemmBlockK, size.k);
  Scratch scratch(workspace);
  const Panels panels{scratch.Floats(rows * depth), scratch.Floats(columns * depth)};
  const bool is_fp8 = a.fp8.scales != nullptr;
  if (c.dtype == DType::kFp32 && !c.finish_first && !is_fp8) {
    const Sum sum{static_cast<float*>(c.data), std::max(c.row_stride, size.n), c.accumulate};
    Multiply(size, a, b, sum, panels);
    AddBias(bias, size.m, size.n, sum);
    return;
  }
  float* const tile = scratch.Floats(rows * columns);
  for (std::int64_t row = 0; row < size.m; row += rows) {
    for (std::int64_t column = 0; column < size.n; column += columns) {
      const GemmSize part{std::min(rows, size.m - row), std::min(columns, size.n - column), size.k};
      const Sum sum{tile, part.n};
      const GemmOperand left = Shifted(a, row, 0), right = Shifted(b, 0, column);
      Multiply(part, left, right, sum, panels);
      if (is_fp8) {
        Unscale(left.fp8, right.fp8, part, tile);
      }
      AddBias(bias == nullptr ? nullptr : bias + column, part.m, part.n, sum);
      RoundTile(tile, part.m, part.n, c, row * c.row_stride + column);
    }
  }
}

}  // namespace

void LoadHostProducts() {
#if SHARDWRIGHT_OPENBLAS
  (void)Blas();
#endif
}

// Threads share rows or columns of the result, whichever are more, in groups that OpenBLAS's inner
// loops take whole. Its kernels for AVX2 add up the last few rows or columns in another order, so
// the number of threads may change last bits.
void HostGemm(const GemmSize& size, const GemmOperand& a, const GemmOperand& b, const GemmResult& c,
              const float* bias, std::span<std::byte> workspace, Team* team) {
  SW_CHECK(size.m >= 1 && size.n >= 1 && size.k >= 1, "a matrix product without elements");
  SW_CHECK(!(c.accumulate && bias != nullptr), "a bias is added to new results only");
  SW_CHECK((a.fp8.scales == nullptr) == (b.fp8.scales == nullptr), "one operand in fp8");
  SW_CHECK(c.row_stride >= size.n || size.m == 1, "rows of a result that overlap");
  constexpr std::int64_t kGroup = 64;
  constexpr std::int64_t kLeastProducts = std::int64_t{1} << 21;  // some 40 us of a thread
  const bool by_rows = size.m > size.n;
  const std::int64_t length = by_rows ? size.m : size.n;
  const std::int64_t products = std::min(length, kGroup) * (by_rows ? size.n : size.m) * size.k;
  ForEachPart(team, (length + kGroup - 1) / kGroup, kLeastProducts / products + 1,
              [&](std::int64_t begin, std::int64_t end, std::size_t worker) {
                const std::int64_t first = begin * kGroup;
                const std::int64_t count = std::min(end * kGroup, length) - first;
                GemmSize part = size;
                GemmResult result = c;
                (by_rows ? part.m : part.n) = count;
                result.data = static_cast<std::byte*>(c.data) +
                              first * (by_rows ? c.row_stride : 1) * SizeOf(c.dtype);
                MultiplyPart(part, by_rows ? Shifted(a, first, 0) : a,
                             by_rows ? b : Shifted(b, 0, first), result,
                             bias == nullptr || by_rows ? bias : bias + first,
                             worker == 0 ? workspace : team->Memory(worker, workspace.size()));
              });
}

}  // namespace shardwright
