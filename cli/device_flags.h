#pragma once

// The flags that say which device the ranks of a plan run on, for `run` and `eval`.

#include <cstdint>
#include <optional>
#include <string>

#include "cli/command.h"
#include "executor/host/launch.h"
#include "executor/host/session.h"

namespace shardwright {

// Of the environment, --rendezvous-key and --insecure-network. Throws UsageError where ranks would
// meet over a network with nothing to prove.
[[nodiscard]] Launch LaunchOf(const Arguments& arguments);

// --timeout, for steps and what is before them.
void SetTimeouts(const Arguments& arguments, HostOptions& host);

// The number of the GPU that this process takes. Throws InputError where its launcher does not say
// and it sees several.
[[nodiscard]] int LocalGpu(const Launch& launch);

struct DeviceFlags {
  bool on_gpu = false;
  std::int64_t loopback = 0;  // what --loopback says; 0: not given
  bool is_loopback = false;   // all ranks are threads on one GPU

  // The number of this process's GPU; none: the host device.
  [[nodiscard]] std::optional<int> GpuOf(const Launch& launch) const {
    return on_gpu ? std::optional(LocalGpu(launch)) : std::nullopt;
  }
};

// Throws UsageError for what is wrong whatever the plan is.
[[nodiscard]] DeviceFlags ReadDeviceFlags(const Arguments& arguments);
// Throws InputError when --loopback is not the number of ranks of the plan, or as LocalGpu does;
// UsageError when a launcher has started processes for it.
void CheckLoopback(DeviceFlags& flags, std::int64_t ranks, const Launch& launch);

// Several GPUs of this machine, and nobody who has started their processes.
[[nodiscard]] bool NeedsProcesses(const Launch& launch, const DeviceFlags& flags);
// Refuses what the processes would all refuse, then runs them. `plan`: the command line's.
[[nodiscard]] int StartProcesses(const SessionInput& input, const std::string& plan);

}  // namespace shardwright
