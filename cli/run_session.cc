#include "cli/run_session.h"

#include <cstdio>
#include <utility>

#include "core/error.h"
#include "executor/cuda/nccl.h"
#include "executor/cuda/plugin.h"

namespace shardwright {

RunSession::RunSession(const SessionInput& input, const HostOptions& host, RunOptions run,
                       std::optional<int> gpu) {
  if (!gpu.has_value()) {
    host_ = std::make_unique<HostSession>(input, host, std::move(run));
    return;
  }
  CheckCudaPlan(input);  // before a GPU is looked for: a wrong plan is wrong everywhere
  gpu_ = OpenGpu(*gpu);
  if (host.processes != nullptr) {
    if (const std::string missing = LoadNccl(&nccl_); !missing.empty()) {
      throw EnvironmentError("device cuda: " + missing);
    }
  }
  const GpuInfo& info = gpu_->Info();
  if (host.processes == nullptr || host.processes->rank() == 0) {
    std::fprintf(stderr, "%s, %lld multiprocessors, driver for CUDA %d.%d, matrices by %s\n",
                 info.name.c_str(), static_cast<long long>(info.multiprocessors),
                 info.driver_version / 1000, info.driver_version % 1000 / 10, info.library.c_str());
  }
  const CudaOptions options{.timeout = host.timeout, .processes = host.processes, .nccl = &nccl_};
  cuda_ = std::make_unique<CudaSession>(input, options, *gpu_, std::move(run));
}

}  // namespace shardwright
