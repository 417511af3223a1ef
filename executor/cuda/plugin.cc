#include "executor/cuda/plugin.h"

#include <vector>

#include "core/error.h"
#include "core/library.h"

namespace shardwright {
namespace {

constexpr const char* kModule = "libshardwright_cuda.so";

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
  if (!FindFunction(module, "ShardwrightOpenGpu", &open)) {
    throw EnvironmentError("device cuda: " + std::string(kModule) +
                           " is of another program: it has no ShardwrightOpenGpu");
  }
  // The module stays loaded: its code runs until the process ends.
  std::unique_ptr<Gpu> gpu(open(kPluginVersion, device, &problem));
  if (gpu == nullptr) {
    throw EnvironmentError("device cuda: " + problem);
  }
  return gpu;
}

}  // namespace shardwright
