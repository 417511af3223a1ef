#pragma once

// How the program finds a GPU: libshardwright_cuda.so beside it, loaded when a run asks for it.

#include <cstddef>
#include <memory>
#include <string>

#include "executor/cuda/gpu.h"

namespace shardwright {

// The function that the shared object exports as `ShardwrightMakeGpu`. Returns null and writes why,
// as a text that ends with a zero, when there is no GPU. Until both are known to have the same
// number, program and shared object exchange C types only. (Up to number 7 it was another
// function.)
using OpenGpuFunction = Gpu* (*)(int version, int device, char* problem, std::size_t size);
// Raised whenever Gpu, KernelLaunch or a kernel's arguments change. Its last digit is the standard
// library, whose texts and exceptions pass between the two: 0 libstdc++ with texts of before
// C++11, 1 libstdc++, 2 libc++.
#if defined(_LIBCPP_VERSION)
inline constexpr int kStandardLibrary = 2;
#else
inline constexpr int kStandardLibrary = _GLIBCXX_USE_CXX11_ABI;
#endif
inline constexpr int kPluginVersion = 8 * 10 + kStandardLibrary;

// For the shared object: what to tell where `version` is not its own; else an empty text.
[[nodiscard]] inline std::string DescribeOtherPlugin(int version) {
  if (version == kPluginVersion) {
    return {};
  }
  return "libshardwright_cuda.so is of another build: its interface is number " +
         std::to_string(kPluginVersion) + ", the program's is number " + std::to_string(version) +
         (version / 10 == kPluginVersion / 10 ? " (built with another C++ standard library)" : "");
}
// Writes as much of `text` as there is room for.
inline void WriteProblem(const std::string& text, char* problem, std::size_t size) {
  problem[text.copy(problem, size - 1)] = '\0';
}

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
