// libshardwright_cuda.so with an emulated GPU in the place of a real one.

#include <string>

#include "executor/cuda/plugin.h"
#include "tests/executor/cuda/emulation/emulated_gpu.h"

extern "C" [[gnu::visibility("default")]] shardwright::Gpu* ShardwrightMakeGpu(int version,
                                                                               int device,
                                                                               char* problem,
                                                                               std::size_t size) {
  const std::string text = shardwright::DescribeOtherPlugin(version);
  shardwright::WriteProblem(text, problem, size);
  return text.empty()
             ? shardwright::MakeEmulatedGpu({.seed = static_cast<std::uint64_t>(device + 1)})
                   .release()
             : nullptr;
}
