// Plans by problem and workspace. Example: 24 layers with one shape of attention have two plans,
// forward and backward. The first call of each may take seconds, the others one look-up, O(log
// plans).
//
// A shape without plan is remembered as well, so cuDNN is asked once. The lock is held while a plan
// is submitted, as the handle has one stream at a time.

#include "executor/cuda/cudnn_plans.h"

#include <array>

#include "core/error.h"

namespace shardwright {

CudnnPlans::CudnnPlans(const CudnnTable& table, std::function<void(const std::string&)> say)
    : table_(table), say_(std::move(say)) {
  void* handle = nullptr;
  Check(table_.create(&handle), "cudnnCreate");
  handle_ = {handle, table_.destroy};
  device_ = CudnnDevice(table_, handle);
}

void CudnnPlans::Check(int status, const std::string& call) const {
  if (status != CudnnNumbers::kSuccess) {
    throw RunError(call + ": " + table_.error_string(status));
  }
}

void CudnnPlans::SayOnce(const std::string& text) {
  if (said_.insert(text).second) {
    say_(text);
  }
}

template <class Problem>
bool CudnnPlans::Run(Cache<Problem>& cache, const Problem& problem, const std::string& kind,
                     const Memory& memory, void* stream) {
  const std::lock_guard lock(mutex_);
  const auto [at, is_new] = cache.try_emplace({problem, memory.workspace_bytes});
  CudnnPlan& plan = at->second;
  if (is_new) {
    plan = MakeCudnnPlan(table_, device_, problem, memory.workspace_bytes);
    SayOnce(plan.plan.get() != nullptr
                ? kind + " by cuDNN"
                : kind + " by our own kernel, where cuDNN has no plan: " + plan.problem);
  }
  if (plan.plan.get() == nullptr) {
    return false;
  }
  Check(table_.set_stream(handle_.get(), stream), "cudnnSetStream");
  const int status = RunCudnnPlan(table_, handle_.get(), plan, memory.pointers, memory.workspace);
  // A failure during execution (in a capture that is invalid) says nothing of the plan.
  if (is_new && status != CudnnNumbers::kSuccess && status < CudnnNumbers::kExecutionFailed) {
    SayOnce(kind +
            " by our own kernel, where cuDNN's plan does not run: " + table_.error_string(status));
    plan = {};
    return false;
  }
  Check(status, "cudnnBackendExecute, " + kind);
  return true;
}

bool CudnnPlans::Attend(const gpu::AttentionArgs& args, bool is_backward, void* workspace,
                        std::int64_t workspace_bytes, void* stream, bool is_captured) {
  // Release notes of cuDNN frontend 1.16.0: before 9.15.1 gradients in a replayed graph read
  // invalid memory where the length of the keys is no multiple of 128 and there is no padding mask.
  // Like TransformerEngine we do without both passes there.
  constexpr std::size_t kLastWithFaultyGraphs = 91500;
  constexpr std::int64_t kTile = 128;
  const bool crashes =
      is_captured && args.seq_k % kTile != 0 && table_.get_version() <= kLastWithFaultyGraphs;
  if (!IsForCudnn(args, is_backward)) {
    return false;
  }
  const std::string kind = is_backward ? "attention's gradients" : "attention";
  if (crashes) {
    const std::size_t version = table_.get_version();
    const std::lock_guard lock(mutex_);
    SayOnce(kind + " in graphs by our own kernel, where keys fill no tile of " +
            std::to_string(kTile) + ": cuDNN " + std::to_string(version / 10'000) + '.' +
            std::to_string(version / 100 % 100) + '.' + std::to_string(version % 100) +
            " reads invalid memory there, 9.15.1 does not");
    return false;
  }
  return Run(attention_, CudnnProblemOf(args, is_backward), kind,
             {CudnnPointersOf(args, is_backward), workspace, workspace_bytes}, stream);
}

bool CudnnPlans::Convolve(const gpu::ConvArgs& args, ConvPass pass, void* workspace,
                          std::int64_t workspace_bytes, void* stream) {
  constexpr std::array kKinds = {"convolutions", "convolutions' data gradients",
                                 "convolutions' weight gradients"};
  return IsForCudnn(args, pass) &&
         Run(convolution_, CudnnProblemOf(args, pass), kKinds[static_cast<std::size_t>(pass)],
             {CudnnPointersOf(args, pass), workspace, workspace_bytes}, stream);
}

}  // namespace shardwright
