#pragma once

// Graphs of operations for cuDNN, and the plans that it makes of them.
//
// cudnn_graph.cc has an example: a product and an addition.

#include <array>
#include <cstdint>
#include <map>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "executor/cuda/cudnn.h"

namespace shardwright {

// One of the library's descriptors, destroyed with the object.
class CudnnDescriptor {
 public:
  CudnnDescriptor() = default;
  CudnnDescriptor(const CudnnTable& table, int kind);
  CudnnDescriptor(CudnnDescriptor&& other) noexcept;
  CudnnDescriptor& operator=(CudnnDescriptor&& other) noexcept;
  ~CudnnDescriptor();

  [[nodiscard]] void* get() const { return desc_; }
  // All of them return the library's status.
  template <class T>
  int Set(int attribute, int type, const T& value) {
    return table_->desc_set(desc_, attribute, type, 1, &value);
  }
  template <class T>
  int Set(int attribute, int type, std::span<const T> values) {
    return table_->desc_set(desc_, attribute, type, static_cast<std::int64_t>(values.size()),
                            values.data());
  }
  int Finalize() { return table_->desc_finalize(desc_); }

 private:
  const CudnnTable* table_ = nullptr;
  void* desc_ = nullptr;
};

// The GPU that plans are made for: the one of a handle, or, without a GPU, one that is described as
// JSON (the keys are those that cuDNN writes itself).
[[nodiscard]] CudnnDescriptor CudnnDevice(const CudnnTable& table, void* handle);
[[nodiscard]] CudnnDescriptor CudnnDevice(const CudnnTable& table, const std::string& json);

using CudnnShape = std::array<std::int64_t, 4>;

struct CudnnTensor {
  enum class Kind { kMemory, kInside, kNumber };  // kNumber: one, passed by the host's address
  int type = CudnnNumbers::kFp32;
  CudnnShape dims = {1, 1, 1, 1};
  CudnnShape strides = {1, 1, 1, 1};  // in elements
  Kind kind = Kind::kMemory;
};
// Rows of the last dimension without gaps.
[[nodiscard]] CudnnShape CudnnPacked(const CudnnShape& dims);

struct CudnnPlan {
  // Descriptors that the plan was made of. They stand before it, so they are destroyed after it:
  // whether the library copies them is not documented.
  std::vector<CudnnDescriptor> parts;
  CudnnDescriptor plan;  // empty: there is none
  std::int64_t workspace_bytes = 0;
  bool is_fallback = false;  // none of the library's best guesses would do
  std::string problem;       // why there is none, mostly in the library's words
};

// A refusal of the library is kept as `problem` of the plan; later additions have no effect.
class CudnnGraph {
 public:
  using Uid = std::int64_t;  // at least 1

  explicit CudnnGraph(const CudnnTable& table) : table_(table) {}

  // `uid` 0: one that is not used yet.
  Uid Add(const CudnnTensor& tensor, Uid uid = 0);

  struct PointwiseOp {
    int mode = 0;
    Uid x = 0, b = 0, select = 0;  // 0: none
    std::int64_t axis = -1;        // of kIndex
    int math = CudnnNumbers::kFp32;
  };
  void Pointwise(const PointwiseOp& op, Uid y);
  void Multiply(Uid a, Uid b, Uid c);
  void Reduce(int operation, Uid x, Uid y);
  void Reshape(Uid x, Uid y);

  struct ConvolutionOp {
    int kind = CudnnNumbers::kConvForward;  // or kConvDataGrad, kConvWeightGrad
    Uid weight = 0, input = 0, output = 0;
    std::int64_t stride = 1, padding = 0;
    bool adds = false;  // to what is there
  };
  void Convolve(const ConvolutionOp& op);

  // The first plan of the library's list, best guess first, that computes in fp32, repeats bit by
  // bit and needs no more workspace. `exact_workspace`: with less a plan sums by atomics, which the
  // library's notes do not tell of attention. The graph is used up.
  [[nodiscard]] CudnnPlan Plan(const CudnnDescriptor& device, std::int64_t workspace_limit,
                               std::int64_t exact_workspace = 0);

 private:
  bool Check(int status, const char* what);
  [[nodiscard]] void* At(Uid uid) const;
  void SetTensor(CudnnDescriptor& op, int attribute, Uid uid);
  // Keeps an operation, or what goes with one.
  void Keep(CudnnDescriptor op, const char* what, bool is_operation);
  [[nodiscard]] std::vector<CudnnDescriptor> Configs(const CudnnDescriptor& graph,
                                                     const CudnnDescriptor& device, int mode);
  [[nodiscard]] CudnnPlan TryConfig(const CudnnDescriptor& config, const CudnnDescriptor& device);
  [[nodiscard]] bool IsExact(const CudnnDescriptor& config) const;

  const CudnnTable& table_;
  std::map<Uid, void*> tensors_;
  std::vector<CudnnDescriptor> kept_;
  std::vector<void*> operations_;
  std::string problem_;
};

// Submits a plan. `pointers`: of every tensor that is not inside, by its number.
[[nodiscard]] int RunCudnnPlan(const CudnnTable& table, void* handle, const CudnnPlan& plan,
                               std::span<const std::pair<CudnnGraph::Uid, void*>> pointers,
                               void* workspace);

}  // namespace shardwright
