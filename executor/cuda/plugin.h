#pragma once

// How the program finds a GPU: libshardwright_cuda.so beside it, loaded when a run asks for it.

#include <memory>
#include <string>

#include "executor/cuda/gpu.h"

namespace shardwright {

// What the shared object exports, as `ShardwrightOpenGpu`. Returns null and writes why when there
// is no GPU.
using OpenGpuFunction = Gpu* (*)(int version, int device, std::string* problem);
// Raised whenever Gpu, KernelLaunch or a kernel's arguments change.
inline constexpr int kPluginVersion = 7;

// GPU number `device` of this machine. `path` empty: the shared object in the program's folder,
// then where the loader looks. Throws EnvironmentError naming exactly what is missing: the module,
// the driver, a GPU.
[[nodiscard]] std::unique_ptr<Gpu> OpenGpu(int device, const std::string& path = {});

// The numbers with which CUDA says that there is no GPU, in words. `status`: of cudaGetDeviceCount;
// `driver` and `runtime`: as CUDA numbers versions, 0 for no driver. Empty: there is one.
[[nodiscard]] std::string DescribeNoGpu(int status, int driver, int runtime, int device_count);

// The GPU that a process means by number `device`: where launchers show every process one GPU only,
// that one.
[[nodiscard]] int VisibleDevice(int device, int device_count);

}  // namespace shardwright
