// libshardwright_cuda.so with an emulated GPU in the place of a real one.

#include <string>

#include "executor/cuda/plugin.h"
#include "tests/executor/cuda/emulation/emulated_gpu.h"

extern "C" [[gnu::visibility("default")]] shardwright::Gpu* ShardwrightOpenGpu(
    int version, int device, std::string* problem) {
  if (version != shardwright::kPluginVersion) {
    *problem = "of another build";
    return nullptr;
  }
  return shardwright::MakeEmulatedGpu({.seed = static_cast<std::uint64_t>(device + 1)}).release();
}
