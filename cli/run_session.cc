#include "cli/run_session.h"

#include <array>
#include <utility>

#include <unistd.h>

#include "core/error.h"
#include "core/printable.h"
#include "executor/cuda/nccl.h"
#include "executor/cuda/plugin.h"

namespace shardwright {
namespace {

// Null, with a word on stderr, where times come from CUDA's events.
std::unique_ptr<ActivityLog> StartActivities(bool says_why) {
  CuptiTable cupti{};
  std::string problem = LoadCupti(&cupti);
  std::unique_ptr<ActivityLog> log;
  if (problem.empty()) {
    log = ActivityLog::Start(cupti, &problem);
  }
  if (says_why && log == nullptr) {
    Say("no CUPTI (" + problem + "): the trace's times come from CUDA events");
  }
  return log;
}

}  // namespace

RunSession::RunSession(std::span<const SessionInput> inputs, const HostOptions& host,
                       RunOptions run, const RunPlace& place) {
  if (!place.gpu.has_value()) {
    HostSession::KernelWrapper watch;
    if (place.counter != nullptr) {
      watch = [&](ModelKernel kernel) { return place.counter->Watch(std::move(kernel)); };
    }
    host_ = std::make_unique<HostSession>(inputs, host, std::move(run), watch);
    return;
  }
  const SessionInput& input = inputs.front();
  CheckCudaPlan(input);  // before a GPU is looked for: a wrong plan is wrong everywhere
  const bool is_first = host.processes == nullptr || host.processes->rank() == 0;
  if (run.trace) {
    activities_ = StartActivities(is_first);
  }
  gpu_ = place.beside != nullptr ? place.beside->gpu_ : OpenGpu(*place.gpu);
  if (host.processes != nullptr) {
    if (const std::string missing = LoadNccl(&nccl_); !missing.empty()) {
      throw EnvironmentError("device cuda: " + missing);
    }
  }
  const GpuInfo& info = gpu_->Info();
  const Bytes free = gpu_->FreeMemory();
  if (is_first && place.beside == nullptr) {
    Say(info.name + ", " + std::to_string(info.multiprocessors) +
        " multiprocessors, driver for CUDA " + std::to_string(info.driver_version / 1000) + '.' +
        std::to_string(info.driver_version % 1000 / 10) + ", matrices by " + info.library);
  }
  const CudaOptions options{.timeout = host.timeout,
                            .processes = host.processes,
                            .nccl = &nccl_,
                            .activities = activities_.get(),
                            .counter = place.counter,
                            .memory_limit = host.memory_limit,
                            .graphs = place.graphs};
  cuda_ = std::make_unique<CudaSession>(input, options, *gpu_, std::move(run));
  if (host.processes != nullptr) {
    std::array<char, 64> machine{};
    (void)::gethostname(machine.data(), machine.size() - 1);
    where_ = "rank " + std::to_string(host.processes->rank()) + ": local rank " +
             std::to_string(*place.gpu) + " of " + machine.data() + ", " + info.name +
             "; `dmesg | grep Xid` there shows what its driver reports\n";
  }
  if (is_first && place.beside == nullptr && !cuda_->paths().empty()) {
    Say("NCCL: " + cuda_->paths());
  }
  memory_.total = info.memory;
  memory_.before = info.memory - free;
  memory_.arenas = std::ssize(cuda_->runtime().LocalRanks()) * cuda_->placement().device_size;
  memory_.set_up = free - gpu_->FreeMemory() - memory_.arenas;
  if (place.beside != nullptr) {
    place.beside->memory_.arenas += memory_.arenas;
    place.beside->memory_.set_up += memory_.set_up;
  }
}

GpuMemory RunSession::gpu_memory() {
  GpuMemory memory = memory_;
  if (gpu_ != nullptr) {
    memory.since =
        memory.total - gpu_->FreeMemory() - memory.before - memory.arenas - memory.set_up;
  }
  return memory;
}

}  // namespace shardwright
