#pragma once

// A run's ranks on the device that the user chose.

#include <memory>
#include <optional>
#include <string>

#include "executor/cuda/gpu.h"
#include "executor/cuda/session.h"
#include "executor/evaluation.h"
#include "executor/host/session.h"

namespace shardwright {

// Where a GPU's memory went, as cudaMemGetInfo tells it.
struct GpuMemory {
  Bytes total{0};
  Bytes before{0};  // CUDA's context, the libraries opened so far, other programs
  Bytes arenas{0};  // the placement's (with test data: placements'), of all ranks on this GPU
  Bytes set_up{0};  // taken beside them until the first op: streams, events, communicators
  Bytes since{0};   // until now: kernels loaded when first used, libraries' own memory
};

class RunSession;

// Where a session runs, and who counts its losses.
struct RunPlace {
  std::optional<int> gpu;        // the number of the GPU on this machine; none: the host device
  RunSession* beside = nullptr;  // a session whose GPU this one shares, and whose memory it adds to
  EvaluationCounter* counter = nullptr;  // of evaluations
  bool graphs = false;                   // on a GPU
};

class RunSession {
 public:
  // Opens the device and takes its memory. Throws as HostSession and CudaSession do, and
  // EnvironmentError where there is no such GPU, or no NCCL for ranks in processes.
  // `inputs`: by stage of the pipeline; one where there is none.
  RunSession(std::span<const SessionInput> inputs, const HostOptions& host, RunOptions run,
             const RunPlace& place);

  [[nodiscard]] Runtime& runtime() { return cuda_ ? cuda_->runtime() : host_->runtime(); }
  // What was recorded since the last call; DeriveWaits completes the trace of all ranks on GPUs.
  [[nodiscard]] Trace TakeTrace() {
    return cuda_ ? cuda_->TakeTrace() : host_->runtime().TakeTrace();
  }
  [[nodiscard]] FaultBoard& faults() { return cuda_ ? cuda_->faults() : host_->faults(); }
  [[nodiscard]] bool is_on_gpu() const { return gpu_ != nullptr; }
  // What every rank of this process is in, on GPUs; any thread.
  [[nodiscard]] std::string DescribeRanks() const {
    return cuda_ ? where_ + cuda_->DescribeRanks() : std::string();
  }
  // What became of graphs; empty: none were asked for.
  [[nodiscard]] std::string graphs() const { return cuda_ ? cuda_->graphs() : std::string(); }
  [[nodiscard]] GpuMemory gpu_memory();  // all 0 on the host device
  // "host", or the GPU's name.
  [[nodiscard]] std::string device() const { return gpu_ ? gpu_->Info().name : "host"; }

 private:
  std::unique_ptr<HostSession> host_;
  NcclTable nccl_ = {};
  std::unique_ptr<ActivityLog> activities_;
  std::shared_ptr<Gpu> gpu_;  // outlives the ranks on it
  std::unique_ptr<CudaSession> cuda_;
  std::string where_;  // a line, of a rank in a process of its own
  GpuMemory memory_;
};

}  // namespace shardwright
