#pragma once

// The plans that cuDNN made for the shapes of one GPU's calls, and their submission.

#include <cstddef>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <set>
#include <string>
#include <utility>

#include "executor/cuda/cudnn_problems.h"

namespace shardwright {

// Of one GPU; any thread. The first call of a shape makes its plan, which takes up to seconds.
class CudnnPlans {
 public:
  // `say` gets, once per kind of call, who computes it and why. Throws RunError when the library
  // refuses to start.
  CudnnPlans(const CudnnTable& table, std::function<void(const std::string&)> say);
  CudnnPlans(const CudnnPlans&) = delete;
  CudnnPlans& operator=(const CudnnPlans&) = delete;

  // False: the library does not take this call, nothing was done. Throws RunError when it fails.
  // `is_captured`: the stream makes a graph.
  [[nodiscard]] bool Attend(const gpu::AttentionArgs& args, bool is_backward, void* workspace,
                            std::int64_t workspace_bytes, void* stream, bool is_captured = false);
  [[nodiscard]] bool Convolve(const gpu::ConvArgs& args, ConvPass pass, void* workspace,
                              std::int64_t workspace_bytes, void* stream);
  [[nodiscard]] std::size_t cached_count() const { return attention_.size() + convolution_.size(); }

 private:
  template <class Problem>
  using Cache = std::map<std::pair<Problem, std::int64_t>, CudnnPlan>;  // by problem and workspace
  struct Memory {
    CudnnPointers pointers;
    void* workspace = nullptr;
    std::int64_t workspace_bytes = 0;
  };
  // `kind`: what the problem is, for messages.
  template <class Problem>
  bool Run(Cache<Problem>& cache, const Problem& problem, const std::string& kind,
           const Memory& memory, void* stream);
  void SayOnce(const std::string& text);
  void Check(int status, const std::string& call) const;

  const CudnnTable table_;
  const std::function<void(const std::string&)> say_;
  // Outlives all that is made of it.
  std::unique_ptr<void, int (*)(void*)> handle_{nullptr, nullptr};
  CudnnDescriptor device_;
  std::mutex mutex_;
  // All guarded by mutex_, like the handle's stream.
  Cache<CudnnAttention> attention_;
  Cache<CudnnConvolution> convolution_;
  std::set<std::string> said_;
};

}  // namespace shardwright
