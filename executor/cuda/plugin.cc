// Finds and opens libshardwright_cuda.so. Each failure is an EnvironmentError with its own text: no
// module, a module of another program or build, no driver, no GPU.

#include "executor/cuda/plugin.h"

#include <array>
#include <vector>

#include "core/error.h"
#include "core/library.h"

namespace shardwright {
namespace {

constexpr const char* kModule = "libshardwright_cuda.so";

// A path of the user's counts alone; else beside the program, then where the loader looks.
std::vector<std::string> Candidates(const std::string& path) {
  if (!path.empty()) {
    return {path};
  }
  return {ProgramFolder() + kModule, kModule};
}

}  // namespace

std::unique_ptr<Gpu> OpenGpu(int device, const std::string& path) {
  std::string problem;
  void* module = nullptr;
  for (const std::string& candidate : Candidates(path)) {
    module = OpenLibrary(candidate, &problem);
    if (module != nullptr) {
      break;
    }
  }
  if (module == nullptr) {
    throw EnvironmentError("device cuda: " + problem +
                           "; this build has no CUDA module: build it where nvcc is, with "
                           "-DSHARDWRIGHT_CUDA=ON");
  }
  OpenGpuFunction open = nullptr;
  if (!FindFunction(module, "ShardwrightMakeGpu", &open)) {
    throw EnvironmentError("device cuda: " + std::string(kModule) +
                           " is of another program: it has no ShardwrightMakeGpu");
  }
  // The module stays loaded: its code runs until the process ends.
  std::array<char, 2048> why{};
  std::unique_ptr<Gpu> gpu(open(kPluginVersion, device, why.data(), why.size()));
  if (gpu == nullptr) {
    throw EnvironmentError(std::string("device cuda: ") + why.data());
  }
  return gpu;
}

}  // namespace shardwright
