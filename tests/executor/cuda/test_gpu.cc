#include "tests/executor/cuda/test_gpu.h"

namespace shardwright::testing {
namespace {

void CopyAndWait(Gpu& gpu, void* to, const void* from, std::int64_t bytes) {
  const GpuStream stream = gpu.NewStream(false);
  const GpuEvent event = gpu.NewEvent(false);
  gpu.Copy(to, from, bytes, stream);
  gpu.Record(event, stream);
  gpu.Synchronize(event);
}

}  // namespace

void Put(Gpu& gpu, void* device, const void* host, std::int64_t bytes) {
  CopyAndWait(gpu, device, host, bytes);
}

void Get(Gpu& gpu, void* host, const void* device, std::int64_t bytes) {
  CopyAndWait(gpu, host, device, bytes);
}

}  // namespace shardwright::testing
