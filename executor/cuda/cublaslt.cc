// Products by cuBLASLt: translation of the product, proposals of algorithms, cache.
//
// The library is column-major. Our row-major c (m, n) is its c^T (n, m), and c^T = b^T a^T: its A
// is our b, its B our a. Nothing is copied. Example: a linear layer of 8 rows, 512 in, 1,024 out, y
// = x W^T.
//
//   our a = x     (8, 512), row_stride 512        its B: 512 x 8, leading 512, not transposed
//   our b = W^T   (512, 1,024), column_stride 512   its A: 512 x 1,024, leading 512, transposed
//   our c = y     (8, 1,024)                      its C: 1,024 x 8, leading 1,024
//
// The first call of a shape makes descriptors and asks for proposals, which takes the library some
// time on the host; later calls find the entry in O(log entries). With SHARDWRIGHT_PRODUCTS eight
// proposals are timed, four runs each, and the fastest is kept in a file (product_choices.cc).

#include "executor/cuda/cublaslt.h"

#include <bit>
#include <limits>
#include <utility>

#include "core/error.h"
#include "core/library.h"
#include "core/ranges.h"

#ifndef SHARDWRIGHT_CUBLASLT_LIBRARY
#define SHARDWRIGHT_CUBLASLT_LIBRARY ""
#endif

namespace shardwright {
namespace {

int TypeOf(DType dtype) {
  switch (dtype) {
    case DType::kBf16:
      return LtNumbers::kRealBf16;
    case DType::kFp16:
      return LtNumbers::kRealFp16;
    default:
      return LtNumbers::kRealFp32;
  }
}
int TypeOf(DType dtype, Fp8Format format) {
  const int fp8 = format == Fp8Format::kE4m3 ? LtNumbers::kRealE4m3 : LtNumbers::kRealE5m2;
  return dtype == DType::kFp8 ? fp8 : TypeOf(dtype);
}

// The library is column-major and computes c^T = b^T a^T. An operand of ours as its column-major
// matrix: transposed or not.
struct ColumnMajor {
  std::int64_t rows = 0, columns = 0, leading = 0;
  bool is_transposed = false;  // what has to be multiplied is its transpose
};
ColumnMajor TransposeOf(const gpu::Matrix& matrix, std::int64_t rows, std::int64_t columns) {
  if (matrix.column_stride == 1) {
    return {columns, rows, matrix.row_stride, false};
  }
  return {rows, columns, matrix.column_stride, true};
}

// Work of the library beside the product, with a vector that is read (a bias) or written (sums over
// k). Its a is our b.
struct Epilogue {
  int number = 0;  // 0: nothing
  gpu::Array vector = {};
};
// Work in the epilogue saves a pass over c. Example: the gradient of a bias, sums of dy over rows,
// comes beside dW = dy^T x, which reads dy anyway: row_sums, the library's sums of B.
Epilogue EpilogueOf(const gpu::GemmArgs& p) {
  if (p.gelu == gpu::GemmGelu::kDerivative) {
    return {LtNumbers::kEpilogueGeluGrad, {}};
  }
  if (p.gelu == gpu::GemmGelu::kApply) {
    return {p.bias.data == nullptr ? LtNumbers::kEpilogueGelu : LtNumbers::kEpilogueGeluBias,
            p.bias};
  }
  if (p.bias.data != nullptr) {
    return {LtNumbers::kEpilogueBias, p.bias};
  }
  if (p.row_sums.data != nullptr) {
    return {LtNumbers::kEpilogueSumsOfB, p.row_sums};
  }
  return {p.column_sums.data == nullptr ? 0 : LtNumbers::kEpilogueSumsOfA, p.column_sums};
}

// Refusals that are known before the library is asked. Example: bf16 times fp32, or an operand
// whose rows and columns both have strides.
bool IsTaken(const gpu::GemmArgs& p) {
  const auto is_plain = [](const gpu::Matrix& m) {
    return m.column_stride == 1 || m.row_stride == 1;
  };
  const DType type = p.a.array.dtype;
  const gpu::Array vector = EpilogueOf(p).vector;
  const bool types_fit =
      p.b.array.dtype == type &&
      (p.c.array.dtype == type || p.c.array.dtype == DType::kFp32 || type == DType::kFp8) &&
      (vector.data == nullptr || vector.dtype == p.c.array.dtype);
  // In fp8 the library has none of the epilogues but a bias.
  if (type == DType::kFp8 && (p.gelu != gpu::GemmGelu::kNone || p.row_sums.data != nullptr ||
                              p.column_sums.data != nullptr)) {
    return false;
  }
  // The auxiliary matrix has the result's type unless it is told otherwise; its rows begin at
  // multiples of eight elements.
  if (p.gelu != gpu::GemmGelu::kNone &&
      (p.gelu_input.dtype != p.c.array.dtype || p.c.row_stride % 8 != 0 || p.adds)) {
    return false;
  }
  return types_fit && is_plain(p.a) && is_plain(p.b) && p.c.column_stride == 1;
}

// The largest power of two up to 256, the library's default, that divides the address.
// Example: address 0x1040 is a multiple of 64 and not of 128, so 64. An address of 16 allows loads
// of 16 bytes, which the fastest algorithms need.
std::uint32_t AlignmentOf(const void* data) {
  const auto address = reinterpret_cast<std::uintptr_t>(data);
  return static_cast<std::uint32_t>(std::min<std::uintptr_t>(256, address & (~address + 1)));
}

// For a person who wonders what is slow.
std::string DescribeRefusal(const gpu::GemmArgs& p, int status) {
  const int epilogue = EpilogueOf(p).number;
  const DType dtype = p.a.array.dtype;
  const char* const name = dtype == DType::kBf16   ? "bf16"
                           : dtype == DType::kFp16 ? "fp16"
                           : dtype == DType::kFp32 ? "fp32"
                           : p.fp8.by_row          ? "fp8 with a scale per row"
                                                   : "fp8";
  return "cuBLASLt has nothing for a product of " + std::to_string(p.m) + " x " +
         std::to_string(p.n) + " x " + std::to_string(p.k) + " in " + name +
         (epilogue == 0                          ? ""
          : epilogue == LtNumbers::kEpilogueBias ? " with a bias"
          : p.gelu == gpu::GemmGelu::kApply      ? " with GELU"
          : p.gelu == gpu::GemmGelu::kDerivative ? " with GELU's derivative"
                                                 : " with sums beside it") +
         " (status " + std::to_string(status) + "): by our own kernel";
}

// Fills the table. Returns why the library will not do, or an empty text.
std::string Fill(void* library, CublasLtTable* table) {
  const bool is_whole =
      FindFunction(library, "cublasLtGetVersion", &table->version) &&
      FindFunction(library, "cublasLtCreate", &table->create) &&
      FindFunction(library, "cublasLtDestroy", &table->destroy) &&
      FindFunction(library, "cublasLtMatmulDescCreate", &table->desc_create) &&
      FindFunction(library, "cublasLtMatmulDescDestroy", &table->desc_destroy) &&
      FindFunction(library, "cublasLtMatmulDescSetAttribute", &table->desc_set) &&
      FindFunction(library, "cublasLtMatrixLayoutCreate", &table->layout_create) &&
      FindFunction(library, "cublasLtMatrixLayoutDestroy", &table->layout_destroy) &&
      FindFunction(library, "cublasLtMatmulPreferenceCreate", &table->preference_create) &&
      FindFunction(library, "cublasLtMatmulPreferenceDestroy", &table->preference_destroy) &&
      FindFunction(library, "cublasLtMatmulPreferenceSetAttribute", &table->preference_set) &&
      FindFunction(library, "cublasLtMatmulAlgoGetHeuristic", &table->heuristic) &&
      FindFunction(library, "cublasLtMatmul", &table->matmul);
  return is_whole ? std::string() : "libcublasLt lacks functions that CUDA 12 and 13 have";
}

// A version that is newer than the driver is complete and refuses every handle.
std::string TryHandle(const CublasLtTable& table) {
  void* handle = nullptr;
  const int status = table.create(&handle);
  if (status != LtNumbers::kSuccess) {
    return "cublasLtCreate of version " + std::to_string(table.version()) + ": cuBLAS status " +
           std::to_string(status);
  }
  (void)table.destroy(handle);
  return {};
}

std::string Load(CublasLtTable* table, bool tries_handle) {
  std::string problem;
  void* const library = LoadLibrary(
      "SHARDWRIGHT_CUBLASLT", {"libcublasLt.so.13", "libcublasLt.so.12", "libcublasLt.so"},
      SHARDWRIGHT_CUBLASLT_LIBRARY, &problem, [&](void* opened) {
        std::string wrong = Fill(opened, table);
        return wrong.empty() && tries_handle ? TryHandle(*table) : wrong;
      });
  return library == nullptr ? problem : std::string();
}

}  // namespace

std::string LoadCublasLt(CublasLtTable* table) {
  return Load(table, false);
}

std::string LoadCublasLtForGpu(CublasLtTable* table) {
  return Load(table, true);
}

CublasLt::CublasLt(const CublasLtTable& table, std::function<void(const std::string&)> say,
                   ProductTuning tuning)
    : table_(table), say_(std::move(say)), tuning_(tuning) {
  void* handle = nullptr;
  Check(table_.create(&handle), "cublasLtCreate");
  handle_ = Owned(handle, table_.destroy);
}

void CublasLt::Check(int status, const char* call) const {
  if (status != LtNumbers::kSuccess) {
    throw RunError(std::string(call) + ": cuBLAS status " + std::to_string(status));
  }
}

// Two products with one key may use one entry. `kind` packs the rest into 55 bits: epilogue and
// `adds`, dtype and alignment of each of five arrays, 4 bits each, and the fp8 formats.
CublasLt::Key CublasLt::KeyOf(const gpu::GemmArgs& p, std::int64_t workspace_bytes) {
  const auto stride_of = [](const gpu::Matrix& m) {
    return m.column_stride == 1 ? m.row_stride : -m.column_stride;
  };
  const Epilogue epilogue = EpilogueOf(p);
  std::uint64_t kind = static_cast<std::uint64_t>(epilogue.number) * 2 + (p.adds ? 1 : 0);
  constexpr std::uint64_t kNone = 15;
  const auto append = [&](std::uint64_t value) { kind = kind * 16 + value; };
  for (const gpu::Array& array : {p.a.array, p.b.array, p.c.array, epilogue.vector, p.gelu_input}) {
    const auto alignment = static_cast<std::uint64_t>(std::countr_zero(AlignmentOf(array.data)));
    append(static_cast<std::uint64_t>(array.dtype));
    append(array.data == nullptr ? kNone : alignment);
  }
  append(static_cast<std::uint64_t>(p.fp8.a_format) * 4 +
         static_cast<std::uint64_t>(p.fp8.b_format) * 2 + (p.fp8.by_row ? 1 : 0));
  return {p.m, p.n, p.k, stride_of(p.a), stride_of(p.b), p.c.row_stride, kind, workspace_bytes};
}

// Example: 1,000,000 bytes at address 384. 384 is 128 past a multiple of 256, so the workspace
// begins at 512. It has 999,744 bytes: 256 less, wherever it lies.
CublasLt::Workspace CublasLt::Aligned(void* data, std::int64_t bytes) {
  constexpr std::int64_t kAlignment = 256;
  const auto past = reinterpret_cast<std::uintptr_t>(data) % kAlignment;
  if (past == 0) {
    return {data, bytes};
  }
  if (bytes <= kAlignment) {
    return {};
  }
  return {static_cast<std::byte*>(data) + (kAlignment - past), bytes - kAlignment};
}

CublasLt::Entry CublasLt::MakeEntry(const gpu::GemmArgs& p, std::int64_t workspace_bytes) const {
  Entry entry;
  if (p.fp8.by_row && table_.version() < LtNumbers::kFirstWithLines) {
    (void)IsRefused(p, LtNumbers::kNotSupported, "cublasLtMatmul");
    return entry;
  }
  SetOperation(p, entry);
  FindProposals(p, workspace_bytes, entry);
  return entry;
}

// Descriptors of the operation and of the three matrices. Sums are fp32 (kComputeFp32).
void CublasLt::SetOperation(const gpu::GemmArgs& p, Entry& entry) const {
  const ColumnMajor left = TransposeOf(p.b, p.k, p.n);
  const ColumnMajor right = TransposeOf(p.a, p.m, p.k);
  void* made = nullptr;
  Check(table_.desc_create(&made, LtNumbers::kComputeFp32, LtNumbers::kRealFp32),
        "cublasLtMatmulDescCreate");
  entry.desc = Owned(made, table_.desc_destroy);
  const auto set = [&](int attribute, const auto& value) {
    Check(table_.desc_set(entry.desc.get(), attribute, &value, sizeof value),
          "cublasLtMatmulDescSetAttribute");
  };
  set(LtNumbers::kDescTransA,
      left.is_transposed ? LtNumbers::kTransposeYes : LtNumbers::kTransposeNo);
  set(LtNumbers::kDescTransB,
      right.is_transposed ? LtNumbers::kTransposeYes : LtNumbers::kTransposeNo);
  if (const Epilogue epilogue = EpilogueOf(p); epilogue.number != 0) {
    set(LtNumbers::kDescEpilogue, epilogue.number);
    if (epilogue.vector.data != nullptr) {
      set(LtNumbers::kDescBiasType, TypeOf(epilogue.vector.dtype));
    }
  }
  if (p.gelu != gpu::GemmGelu::kNone) {
    set(LtNumbers::kDescAuxLeading, p.c.row_stride);
  }
  if (p.fp8.by_row) {
    set(LtNumbers::kDescScaleModeA, LtNumbers::kScalePerLine);
    set(LtNumbers::kDescScaleModeB, LtNumbers::kScalePerLine);
  }
  Point(p, entry);
  const auto layout = [&](int type, std::int64_t rows, std::int64_t columns, std::int64_t leading) {
    Check(table_.layout_create(&made, type, static_cast<std::uint64_t>(rows),
                               static_cast<std::uint64_t>(columns), leading),
          "cublasLtMatrixLayoutCreate");
    return Owned(made, table_.layout_destroy);
  };
  entry.a = layout(TypeOf(p.b.array.dtype, p.fp8.b_format), left.rows, left.columns, left.leading);
  entry.b =
      layout(TypeOf(p.a.array.dtype, p.fp8.a_format), right.rows, right.columns, right.leading);
  entry.c = layout(TypeOf(p.c.array.dtype), p.n, p.m, p.c.row_stride);
}

// The library orders proposals by its own estimate, and proposes only what runs with this workspace
// and these alignments.
void CublasLt::FindProposals(const gpu::GemmArgs& p, std::int64_t workspace_bytes,
                             Entry& entry) const {
  void* made = nullptr;
  Check(table_.preference_create(&made), "cublasLtMatmulPreferenceCreate");
  const Owned preference(made, table_.preference_destroy);
  const auto prefer = [&](int attribute, const auto& value) {
    Check(table_.preference_set(preference.get(), attribute, &value, sizeof value),
          "cublasLtMatmulPreferenceSetAttribute");
  };
  prefer(LtNumbers::kPreferenceWorkspace, static_cast<std::uint64_t>(workspace_bytes));
  const void* const operands[] = {p.b.array.data, p.a.array.data, p.c.array.data, p.c.array.data};
  for (int i = 0; i < 4; ++i) {
    prefer(LtNumbers::kPreferenceAlignmentA + i, AlignmentOf(operands[i]));
  }
  constexpr int kTimed = 8;
  LtHeuristic results[kTimed] = {};
  int found = 0;
  const int asked = table_.heuristic(handle_.get(), entry.desc.get(), entry.a.get(), entry.b.get(),
                                     entry.c.get(), entry.c.get(), preference.get(),
                                     tuning_.timer == nullptr ? 1 : kTimed, results, &found);
  const int status = asked == LtNumbers::kSuccess && found == 0 ? LtNumbers::kNotSupported
                     : asked == LtNumbers::kSuccess             ? results[0].state
                                                                : asked;
  entry.is_taken = !IsRefused(p, status, "cublasLtMatmulAlgoGetHeuristic");
  for (int i = 0; entry.is_taken && i < found; ++i) {
    if (results[i].state == LtNumbers::kSuccess) {
      entry.proposals.push_back(results[i].algorithm);
    }
  }
  entry.algorithm = results[0].algorithm;
}

// Invalid value, architecture mismatch, not supported: the library will never take this product.
// Anything else, such as no memory, may pass, and ends the run instead.
bool CublasLt::IsRefused(const gpu::GemmArgs& p, int status, const char* call) const {
  if (status != LtNumbers::kInvalidValue && status != LtNumbers::kArchMismatch &&
      status != LtNumbers::kNotSupported) {
    Check(status, call);
    return false;
  }
  say_(DescribeRefusal(p, status));
  return true;
}

// Addresses change from call to call while the descriptors are kept, so they are set before each
// call.
void CublasLt::Point(const gpu::GemmArgs& p, const Entry& entry) const {
  const auto point = [&](int attribute, const void* data) {
    if (data != nullptr) {
      Check(table_.desc_set(entry.desc.get(), attribute, &data, sizeof data),
            "cublasLtMatmulDescSetAttribute");
    }
  };
  point(LtNumbers::kDescBiasPointer, EpilogueOf(p).vector.data);
  point(LtNumbers::kDescAuxPointer, p.gelu_input.data);
  point(LtNumbers::kDescScaleA, p.fp8.b_inverses);
  point(LtNumbers::kDescScaleB, p.fp8.a_inverses);
}

// c^T = 1 b^T a^T + beta c^T; beta is 1 where the product is added to c.
int CublasLt::Call(const gpu::GemmArgs& p, const Entry& entry, const LtAlgorithm& algorithm,
                   const Workspace& workspace, void* to, void* stream) const {
  const float alpha = 1.0F;
  const float beta = p.adds ? 1.0F : 0.0F;
  return table_.matmul(handle_.get(), entry.desc.get(), &alpha, p.b.array.data, entry.a.get(),
                       p.a.array.data, entry.b.get(), &beta, p.c.array.data, entry.c.get(),
                       to == nullptr ? p.c.array.data : to, entry.c.get(), &algorithm,
                       workspace.data, static_cast<std::size_t>(workspace.bytes), stream);
}

// Cost: 8 proposals x 4 runs for each shape, once. A product of 100 us takes 3 ms more in its first
// step. A choice from the file counts only where the library still proposes it.
void CublasLt::Choose(const gpu::GemmArgs& p, const Key& key, const Workspace& workspace,
                      void* stream, Entry& entry) {
  std::string name;
  std::apply([&](const auto&... part) { ((name += std::to_string(part) + ','), ...); }, key);
  const auto is_proposed = [&](const LtAlgorithmData& data) {
    return IsIn(entry.proposals, data, &LtAlgorithm::data);
  };
  if (const auto before = tuning_.choices->Find(name); before && is_proposed(*before)) {
    entry.algorithm.data = *before;
    return;
  }
  // A product that adds to its result would do so at every run.
  const std::int64_t bytes = p.m * p.c.row_stride * SizeOf(p.c.array.dtype);
  const std::shared_ptr<void> apart = p.adds ? tuning_.timer->Borrow(bytes) : nullptr;
  if (!tuning_.timer->CanTime(stream) || (p.adds && apart == nullptr)) {
    return;
  }
  double least = std::numeric_limits<double>::infinity();
  for (const LtAlgorithm& proposal : entry.proposals) {
    int status = LtNumbers::kSuccess;
    const double time = tuning_.timer->Time(
        [&] {
          const int one = Call(p, entry, proposal, workspace, apart.get(), stream);
          status = one == LtNumbers::kSuccess ? status : one;
        },
        stream);
    if (status == LtNumbers::kSuccess && time < least) {
      least = time;
      entry.algorithm = proposal;
    }
  }
  tuning_.choices->Add(name, entry.algorithm.data);
}

// The lock covers the call, too: descriptors hold the addresses of one product at a time.
bool CublasLt::Multiply(const gpu::GemmArgs& p, void* workspace, std::int64_t workspace_bytes,
                        void* stream) {
  if (!IsTaken(p)) {
    return false;
  }
  const Workspace aligned = Aligned(workspace, workspace_bytes);
  const std::lock_guard lock(mutex_);
  const Key key = KeyOf(p, aligned.bytes);
  auto at = cache_.find(key);
  if (at == cache_.end()) {
    at = cache_.emplace(key, MakeEntry(p, aligned.bytes)).first;
    if (at->second.proposals.size() > 1) {
      Choose(p, key, aligned, stream, at->second);
    }
  }
  Entry& entry = at->second;
  if (!entry.is_taken) {
    return false;
  }
  Point(p, entry);
  const int status = Call(p, entry, entry.algorithm, aligned, nullptr, stream);
  entry.is_taken = !IsRefused(p, status, "cublasLtMatmul");  // before anything was launched
  return entry.is_taken;
}

}  // namespace shardwright
