// Words for CUDA's numbers. Example: status 35 with driver 12040 and runtime 13000 is "the NVIDIA
// driver is for CUDA 12.4, expected at least 13.0". Apart from the CUDA module, so that tests need
// no CUDA.

#include <string>

#include "executor/cuda/plugin.h"

namespace shardwright {
namespace {

// "13.0" of 13000.
std::string CudaVersionText(int version) {
  return std::to_string(version / 1000) + '.' + std::to_string(version % 1000 / 10);
}

}  // namespace

std::string DescribeNoGpu(int status, int driver, int runtime, int device_count) {
  constexpr int kStubLibrary = 34;
  constexpr int kInsufficientDriver = 35;
  constexpr int kNoDevice = 100;
  if (status == kStubLibrary) {
    return "libcuda.so.1 is the toolkit's stub, not the driver; take its folder out of "
           "LD_LIBRARY_PATH";
  }
  if (driver == 0) {
    return "this machine has no NVIDIA driver (libcuda.so.1 was not found)";
  }
  if (status == kInsufficientDriver) {
    return "the NVIDIA driver is for CUDA " + CudaVersionText(driver) + ", expected at least " +
           CudaVersionText(runtime);
  }
  if (status == kNoDevice || (status == 0 && device_count == 0)) {
    return "there is an NVIDIA driver, but no GPU that it lets this process use (see nvidia-smi "
           "and "
           "CUDA_VISIBLE_DEVICES)";
  }
  return status == 0 ? std::string() : "CUDA error " + std::to_string(status);
}

// Example: a launcher gives each of 8 processes one GPU. Local rank 3 asks for GPU 3, and sees only
// 0.
int VisibleDevice(int device, int device_count) {
  return device_count == 1 ? 0 : device;
}

}  // namespace shardwright
