#pragma once

// A plan on one GPU, every rank a thread with its own streams and arena (loopback).

#include <memory>

#include "executor/cuda/device.h"
#include "executor/host/session.h"
#include "executor/runtime.h"

namespace shardwright {

// The refusals of CudaSession that need no GPU: InputError for a kernel set that is not the CUDA
// device's, an op without a kernel, or anything else that only the host device runs.
void CheckCudaPlan(const SessionInput& input);

class CudaSession {
 public:
  // Refuses before any memory is taken: InputError as CheckCudaPlan, or for an op of the program
  // that no device knows. RunError when memory does not suffice. Keeps references.
  CudaSession(const SessionInput& input, const CudaOptions& options, Gpu& gpu, RunOptions run);

  [[nodiscard]] Runtime& runtime() { return *runtime_; }
  [[nodiscard]] const Placement& placement() const { return placement_; }
  [[nodiscard]] FaultBoard& faults() { return world_->faults; }
  // The ops that every rank of this process has under way, a line each. Any thread, also while a
  // rank hangs.
  [[nodiscard]] std::string DescribeRanks() const { return world_->DescribeRanks(); }
  // How NCCL gathers, in words; empty: loopback.
  [[nodiscard]] std::string paths() const { return world_->paths(); }
  // "118 graphs of 1034 ops, 0 refused" of this process's ranks; empty: none were asked for.
  [[nodiscard]] std::string graphs() const;
  // Spans that the runtime has recorded since the last call; DeriveWaits completes the trace of all
  // ranks.
  [[nodiscard]] Trace TakeTrace();

 private:
  const Placement placement_;
  const ExecutorInput input_;
  const ExecuteContext context_;
  ActivityLog* const activities_;
  std::unique_ptr<CudaWorld> world_;
  std::unique_ptr<Runtime> runtime_;
};

}  // namespace shardwright
