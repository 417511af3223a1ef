#include "cli/run_session.h"

#include <cstdio>
#include <utility>

#include "executor/cuda/plugin.h"

namespace shardwright {

RunSession::RunSession(const SessionInput& input, const HostOptions& host, RunOptions run,
                       bool on_gpu) {
  if (!on_gpu) {
    host_ = std::make_unique<HostSession>(input, host, std::move(run));
    return;
  }
  CheckCudaPlan(input);  // before a GPU is looked for: a wrong plan is wrong everywhere
  gpu_ = OpenGpu(0);
  const GpuInfo& info = gpu_->Info();
  std::fprintf(stderr, "%s, %lld multiprocessors, driver for CUDA %d.%d, matrices by %s\n",
               info.name.c_str(), static_cast<long long>(info.multiprocessors),
               info.driver_version / 1000, info.driver_version % 1000 / 10, info.library.c_str());
  cuda_ = std::make_unique<CudaSession>(input, CudaOptions{.timeout = host.timeout}, *gpu_,
                                        std::move(run));
}

}  // namespace shardwright
