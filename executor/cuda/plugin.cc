#include "executor/cuda/plugin.h"

#include <filesystem>
#include <system_error>
#include <vector>

#include <dlfcn.h>

#include "core/error.h"

namespace shardwright {
namespace {

constexpr const char* kModule = "libshardwright_cuda.so";

std::vector<std::string> Candidates(const std::string& path) {
  if (!path.empty()) {
    return {path};
  }
  std::error_code ignored;
  const std::filesystem::path program = std::filesystem::read_symlink("/proc/self/exe", ignored);
  return {(program.parent_path() / kModule).string(), kModule};
}

}  // namespace

std::unique_ptr<Gpu> OpenGpu(int device, const std::string& path) {
  std::string problem;
  void* module = nullptr;
  for (const std::string& candidate : Candidates(path)) {
    module = dlopen(candidate.c_str(), RTLD_NOW | RTLD_LOCAL);
    if (module != nullptr) {
      break;
    }
    problem = problem.empty() ? dlerror() : problem;
  }
  if (module == nullptr) {
    throw EnvironmentError("device cuda: " + problem +
                           "; this build has no CUDA module: build it where nvcc is, with "
                           "-DSHARDWRIGHT_CUDA=ON");
  }
  const auto open = reinterpret_cast<OpenGpuFunction>(dlsym(module, "ShardwrightOpenGpu"));
  if (open == nullptr) {
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
