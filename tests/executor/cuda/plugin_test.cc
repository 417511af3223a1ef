// What the user is told when there is no GPU.

#include "executor/cuda/plugin.h"

#include <array>
#include <string>
#include <type_traits>

#include <doctest/doctest.h>

#include "core/error.h"

namespace shardwright::testing {
namespace {

std::string MessageOf(const std::string& path) {
  try {
    (void)OpenGpu(0, path);
  } catch (const EnvironmentError& error) {
    return error.what();
  }
  return "a GPU";
}

TEST_CASE("OpenGpu.NamesAMissingModule") {
  CHECK(MessageOf("/nonexistent/libshardwright_cuda.so") ==
        "device cuda: /nonexistent/libshardwright_cuda.so: cannot open shared object file: No such "
        "file or directory; this build has no CUDA module: build it where nvcc is, with "
        "-DSHARDWRIGHT_CUDA=ON");
}

TEST_CASE("OpenGpu.RefusesAnotherLibrary") {
  CHECK(MessageOf("libm.so.6") ==
        "device cuda: libshardwright_cuda.so is of another program: it has no ShardwrightMakeGpu");
}

// Before both are known to be of one kind, nothing of C++ goes between them.
TEST_CASE("OpenGpu.AnotherStandardLibraryIsAnotherBuild") {
  static_assert(std::is_same_v<OpenGpuFunction, Gpu* (*)(int, int, char*, std::size_t)>);
  CHECK(DescribeOtherPlugin(kPluginVersion).empty());
  const int other = kPluginVersion / 10 * 10 + (kStandardLibrary == 2 ? 1 : 2);
  CHECK(DescribeOtherPlugin(other) ==
        "libshardwright_cuda.so is of another build: its interface is number " +
            std::to_string(kPluginVersion) + ", the program's is number " + std::to_string(other) +
            " (built with another C++ standard library)");
  CHECK(DescribeOtherPlugin(7).find("standard library") == std::string::npos);
  std::array<char, 4> room{'x', 'x', 'x', 'x'};
  WriteProblem("abcdef", room.data(), room.size());
  CHECK(std::string(room.data()) == "abc");
}

// Numbers as driver_types.h has them: 34 cudaErrorStubLibrary, 35 cudaErrorInsufficientDriver,
// 100 cudaErrorNoDevice, 999 cudaErrorUnknown.
TEST_CASE("DescribeNoGpu.EveryCaseHasItsWords") {
  CHECK(DescribeNoGpu(0, 13000, 13000, 1).empty());
  CHECK(DescribeNoGpu(35, 0, 13000, 0) ==
        "this machine has no NVIDIA driver (libcuda.so.1 was not found)");
  CHECK(DescribeNoGpu(35, 12040, 13000, 0) ==
        "the NVIDIA driver is for CUDA 12.4, expected at least 13.0");
  CHECK(DescribeNoGpu(34, 0, 13000, 0) ==
        "libcuda.so.1 is the toolkit's stub, not the driver; take its folder out of "
        "LD_LIBRARY_PATH");
  const std::string no_device =
      "there is an NVIDIA driver, but no GPU that it lets this process use (see nvidia-smi and "
      "CUDA_VISIBLE_DEVICES)";
  CHECK(DescribeNoGpu(100, 13000, 13000, 0) == no_device);
  CHECK(DescribeNoGpu(0, 13000, 13000, 0) == no_device);
  CHECK(DescribeNoGpu(999, 13000, 13000, 0) == "CUDA error 999");
}

// srun may show every process one GPU, number 0; torchrun shows all of them to all.
TEST_CASE("VisibleDevice.TheOnlyOneIsMeant") {
  CHECK(VisibleDevice(3, 1) == 0);
  CHECK(VisibleDevice(3, 8) == 3);
}

}  // namespace
}  // namespace shardwright::testing
