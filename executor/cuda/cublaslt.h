#pragma once

// Matrix products by cuBLASLt. Its functions come from a table, which is filled with dlsym, so that
// nothing links the library and tests put their own functions there. Descriptors and the chosen
// algorithm are kept per shape: the library's first proposal or, where somebody can time them, the
// fastest of its first eight.

#include <cstddef>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <tuple>
#include <vector>

#include "executor/cuda/kernels/gemm.h"
#include "executor/cuda/product_choices.h"

namespace shardwright {

// The numbers of cublasLt.h, library_types.h and cublas_api.h that are used; the same in CUDA 12
// and 13 (tests/executor/cuda/cublaslt_abi_check.cc compares them with the headers where those are
// installed).
struct LtNumbers {
  static constexpr int kSuccess = 0, kInvalidValue = 7, kArchMismatch = 8, kNotSupported = 15;
  static constexpr int kRealFp32 = 0, kRealFp16 = 2, kRealBf16 = 14, kRealE4m3 = 28, kRealE5m2 = 29;
  static constexpr int kComputeFp32 = 68;
  static constexpr int kTransposeNo = 0, kTransposeYes = 1;
  static constexpr int kDescTransA = 3, kDescTransB = 4, kDescEpilogue = 7, kDescBiasPointer = 8,
                       kDescAuxPointer = 11, kDescAuxLeading = 12, kDescScaleA = 17,
                       kDescScaleB = 18, kDescBiasType = 26, kDescScaleModeA = 31,
                       kDescScaleModeB = 32;
  // A scale per row of the product or per column, from CUDA 12.9 on; before there is one for all.
  static constexpr int kScalePerLine = 3;
  static constexpr std::size_t kFirstWithLines = 120900;
  static constexpr int kEpilogueBias = 4, kEpilogueSumsOfA = 256, kEpilogueSumsOfB = 512;
  // GELU's tanh form; its input goes to or comes from the auxiliary matrix.
  static constexpr int kEpilogueGelu = 160, kEpilogueGeluBias = 164, kEpilogueGeluGrad = 192;
  static constexpr int kPreferenceWorkspace = 1, kPreferenceAlignmentA = 5;  // 5 to 8: A, B, C, D
};

struct LtAlgorithm {
  LtAlgorithmData data;
};
struct LtHeuristic {
  LtAlgorithm algorithm;
  std::size_t workspace_bytes;
  int state;
  float waves;
  int reserved[4];
};

// Handles are opaque; functions return 0 or cuBLAS's status.
struct CublasLtTable {
  std::size_t (*version)();
  int (*create)(void** handle);
  int (*destroy)(void* handle);
  int (*desc_create)(void** desc, int compute_type, int scale_type);
  int (*desc_destroy)(void* desc);
  int (*desc_set)(void* desc, int attribute, const void* value, std::size_t bytes);
  int (*layout_create)(void** layout, int type, std::uint64_t rows, std::uint64_t columns,
                       std::int64_t leading);
  int (*layout_destroy)(void* layout);
  int (*preference_create)(void** preference);
  int (*preference_destroy)(void* preference);
  int (*preference_set)(void* preference, int attribute, const void* value, std::size_t bytes);
  int (*heuristic)(void* handle, void* desc, void* a, void* b, void* c, void* d, void* preference,
                   int requested, LtHeuristic* results, int* found);
  int (*matmul)(void* handle, void* desc, const void* alpha, const void* a, void* a_layout,
                const void* b, void* b_layout, const void* beta, const void* c, void* c_layout,
                void* d, void* d_layout, const LtAlgorithm* algorithm, void* workspace,
                std::size_t workspace_bytes, void* stream);
};

// Fills the table from SHARDWRIGHT_CUBLASLT (a path), libcublasLt.so where the loader looks, or
// where it was when this program was built. Returns what is missing, or an empty text.
[[nodiscard]] std::string LoadCublasLt(CublasLtTable* table);
// The same of a library that makes a handle, which needs a GPU: where the driver is too old for
// version 13, version 12 is taken.
[[nodiscard]] std::string LoadCublasLtForGpu(CublasLtTable* table);

// Services of a GPU for choosing algorithms by time.
class ProductTimer {
 public:
  ProductTimer() = default;
  ProductTimer(const ProductTimer&) = delete;
  ProductTimer& operator=(const ProductTimer&) = delete;
  virtual ~ProductTimer() = default;

  // May work be timed on the stream now? Not while it is being captured.
  [[nodiscard]] virtual bool CanTime(void* stream) = 0;
  // Microseconds of what `launch` submits to the stream: the shortest of several runs.
  [[nodiscard]] virtual double Time(const std::function<void()>& launch, void* stream) = 0;
  // Device memory until the pointer goes; null: there is none to spare.
  [[nodiscard]] virtual std::shared_ptr<void> Borrow(std::int64_t bytes) = 0;
};

// Both or none.
struct ProductTuning {
  ProductTimer* timer = nullptr;
  ProductChoices* choices = nullptr;
};

// Of one GPU; any thread.
class CublasLt {
 public:
  // `say` gets, once per shape, what the library should take and does not, and why. Throws RunError
  // when the library refuses to start.
  CublasLt(const CublasLtTable& table, std::function<void(const std::string&)> say,
           ProductTuning tuning = {});

  // False: the library does not take this product (dtypes or strides, or it has no algorithm that
  // runs), nothing was done. Throws RunError when it fails for another reason, which says nothing
  // of the product: it will be asked for again.
  [[nodiscard]] bool Multiply(const gpu::GemmArgs& product, void* workspace,
                              std::int64_t workspace_bytes, void* stream);
  [[nodiscard]] std::size_t cached_count() const { return cache_.size(); }

 private:
  using Owned = std::unique_ptr<void, int (*)(void*)>;  // by the library's function to destroy it
  struct Entry {
    bool is_taken = false;
    Owned desc{nullptr, nullptr};
    Owned a{nullptr, nullptr}, b{nullptr, nullptr}, c{nullptr, nullptr};  // layouts
    std::vector<LtAlgorithm> proposals;                                   // the best first
    LtAlgorithm algorithm = {};
  };
  struct Workspace {
    void* data = nullptr;
    std::int64_t bytes = 0;
  };
  // The library refuses a workspace at any other address than multiples of 256, as an invalid
  // value. How much is cut off does not depend on where it lies, since algorithms are chosen by its
  // size.
  [[nodiscard]] static Workspace Aligned(void* data, std::int64_t bytes);
  using Key = std::tuple<std::int64_t, std::int64_t, std::int64_t, std::int64_t, std::int64_t,
                         std::int64_t, std::uint64_t, std::int64_t>;
  // Whether the status says that the library does not take the product, which is then said. Throws
  // what else went wrong.
  [[nodiscard]] bool IsRefused(const gpu::GemmArgs& product, int status, const char* call) const;
  [[nodiscard]] static Key KeyOf(const gpu::GemmArgs& product, std::int64_t workspace_bytes);
  [[nodiscard]] Entry MakeEntry(const gpu::GemmArgs& product, std::int64_t workspace_bytes) const;
  void SetOperation(const gpu::GemmArgs& product, Entry& entry) const;
  void FindProposals(const gpu::GemmArgs& product, std::int64_t workspace_bytes,
                     Entry& entry) const;
  // Whose epilogue's vectors lie where the product says.
  void Point(const gpu::GemmArgs& product, const Entry& entry) const;
  // The status of the call. `to`: where the result goes, null: the product's c.
  [[nodiscard]] int Call(const gpu::GemmArgs& product, const Entry& entry,
                         const LtAlgorithm& algorithm, const Workspace& workspace, void* to,
                         void* stream) const;
  // Among the proposals: what was chosen before or is the fastest now.
  void Choose(const gpu::GemmArgs& product, const Key& key, const Workspace& workspace,
              void* stream, Entry& entry);
  void Check(int status, const char* call) const;

  const CublasLtTable table_;
  const std::function<void(const std::string&)> say_;
  const ProductTuning tuning_;
  Owned handle_{nullptr, nullptr};
  std::mutex mutex_;
  std::map<Key, Entry> cache_;  // guarded by mutex_, like the descriptors' vectors
};

}  // namespace shardwright
