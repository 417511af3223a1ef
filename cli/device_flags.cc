#include "cli/device_flags.h"

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdlib>
#include <string_view>

#include "cli/flag_values.h"
#include "cli/run_processes.h"
#include "core/error.h"
#include "executor/cuda/session.h"
#include "executor/host/tcp_handshake.h"
#include "topologies/mesh.h"

namespace shardwright {

Launch LaunchOf(const Arguments& arguments) {
  Launch launch = ReadLaunch();
  if (launch.is_own) {
    return launch;  // what the command line says was for its parent
  }
  launch.is_insecure = arguments.Has("--insecure-network");
  const Flag file = arguments.Get("--rendezvous-key");
  if (file.is_given()) {
    if (launch.is_insecure) {
      throw UsageError("--rendezvous-key and --insecure-network contradict each other");
    }
    if (launch.size > 1 && launch.address.empty()) {
      throw UsageError(
          "--rendezvous-key is for ranks that meet by TCP; under mpirun MPI joins "
          "them");
    }
    launch.key = tcp::ReadKeyFile(file.text);
  }
  if (launch.is_insecure) {
    launch.key.clear();
  }
  const bool needs_key = launch.size > 1 && !launch.address.empty() && launch.key.empty();
  if (needs_key && !launch.is_insecure && !IsLoopback(launch.address)) {
    throw UsageError("ranks that meet at " + launch.address +
                     " need a key: --rendezvous-key FILE (openssl rand -hex 32 makes one), or "
                     "--insecure-network; all on this machine: MASTER_ADDR=127.0.0.1");
  }
  return launch;
}

void SetTimeouts(const Arguments& arguments, HostOptions& host) {
  arguments.Set("--timeout", host.timeout, ReadTimeout);
  arguments.Set("--timeout", host.set_up_timeout, ReadTimeout);
}

int LocalGpu(const Launch& launch) {
  const char* const visible = std::getenv("CUDA_VISIBLE_DEVICES");
  const std::string text = visible == nullptr ? "" : visible;
  const bool sees_one = !text.empty() && text.find(',') == std::string::npos;
  if (launch.local_rank < 0 && !sees_one) {
    throw InputError("environment: " + launch.local_rank_name, "nothing",
                     "the number of this process's GPU on its machine, from 0",
                     "or CUDA_VISIBLE_DEVICES with one GPU per process");
  }
  return std::max(launch.local_rank, 0);
}

DeviceFlags ReadDeviceFlags(const Arguments& arguments) {
  static constexpr std::array<std::string_view, 2> kDevices = {"host", "cuda"};
  constexpr std::int64_t kMostRanks = std::int64_t{1} << 32;
  DeviceFlags flags;
  std::size_t device = 0;
  arguments.SetChoice("--device", kDevices, device);
  flags.on_gpu = device == 1;
  arguments.SetCount("--loopback", kMostRanks, flags.loopback);
  if (!flags.on_gpu && flags.loopback > 0) {
    throw UsageError("--loopback needs --device cuda");
  }
  return flags;
}

void CheckLoopback(DeviceFlags& flags, std::int64_t ranks, const Launch& launch) {
  if (flags.loopback > 0 && flags.loopback != ranks) {
    throw InputError("--loopback: got " + std::to_string(flags.loopback) + ", expected " +
                     std::to_string(ranks) + ", the ranks of the plan");
  }
  flags.is_loopback = flags.on_gpu && (ranks == 1 || flags.loopback > 0);
  if (launch.size > 1 && flags.is_loopback) {
    throw UsageError("--loopback runs all ranks in one process, but " + launch.launcher +
                     " started " + std::to_string(launch.size));
  }
  (void)flags.GpuOf(launch);  // before any rank waits for this one
}

bool NeedsProcesses(const Launch& launch, const DeviceFlags& flags) {
  return flags.on_gpu && !flags.is_loopback && launch.size == 1;
}

int StartProcesses(const SessionInput& input, const std::string& plan) {
  CheckCudaPlan(input);
  if (plan == "-") {
    throw UsageError("several GPUs need a plan that is a file, not standard input");
  }
  return RunLocalProcesses(MeshOf(input.program).RankCount());
}

}  // namespace shardwright
