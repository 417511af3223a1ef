// The CUDA device's kernels, as loops on the CPU.

#include "tests/executor/kernels/emulated_subject.h"

#include <list>
#include <memory>
#include <string>
#include <unordered_map>

#include "core/error.h"
#include "executor/cuda/kernels/array.h"
#include "executor/cuda/ops/model_ops.h"
#include "tests/executor/cuda/emulation/emulated_gpu.h"
#include "tests/executor/kernels/harness.h"

namespace shardwright::testing {

std::array<std::int64_t, 2> last_moved;

namespace {

// Sectors of memory, the one used last in front.
class Cache {
 public:
  static constexpr std::uintptr_t kSector = 32;
  void Touch(std::uintptr_t address, std::int64_t bytes) {
    const std::uintptr_t end = address + static_cast<std::uintptr_t>(bytes);
    for (std::uintptr_t sector = address / kSector; sector * kSector < end; ++sector) {
      const auto at = places_.find(sector);
      if (at != places_.end()) {
        used_.splice(used_.begin(), used_, at->second);
        continue;
      }
      moved_ += kSector;
      used_.push_front(sector);
      places_[sector] = used_.begin();
      if (used_.size() > kMost) {
        places_.erase(used_.back());
        used_.pop_back();
      }
    }
  }
  // The bytes since the last call.
  [[nodiscard]] std::int64_t Take() {
    const auto moved = static_cast<std::int64_t>(moved_);
    *this = {};
    return moved;
  }

 private:
  static constexpr std::size_t kMost = 32 * 1024 / kSector;
  std::uintptr_t moved_ = 0;
  std::list<std::uintptr_t> used_;
  std::unordered_map<std::uintptr_t, std::list<std::uintptr_t>::iterator> places_;
};
Cache cache;

void Run(const ModelOpCall& call, bool is_backward) {
  const std::unique_ptr<Gpu> gpu = MakeEmulatedGpu({});
  gpu::Fault fault;
  const GpuStream stream = gpu->NewStream(false);
  const GpuEvent event = gpu->NewEvent(false);
  gpu::access_watch = [](const void* address, std::int64_t bytes) {
    cache.Touch(reinterpret_cast<std::uintptr_t>(address), bytes);
  };
  SubmitModelOp(call, is_backward, {*gpu, stream, &fault});
  gpu->Record(event, stream);
  gpu->Synchronize(event);
  gpu::access_watch = nullptr;
  last_moved[is_backward ? 1 : 0] = cache.Take();
  if (const std::string text = DescribeFault(fault); !text.empty()) {
    throw InputError(text);
  }
}

}  // namespace

const Subject& SubjectUnderTest() {
  // bf16's unit roundoff; fp16 is finer.
  static const Subject subject = {"shardwright-cuda-plain", Run, 0x1p-8};
  return subject;
}

}  // namespace shardwright::testing
