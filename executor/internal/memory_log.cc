#include "executor/internal/memory_log.h"

namespace shardwright {

void MemoryLog::Apply(std::span<const MemoryPoint> points) {
  for (const MemoryPoint& point : points) {
    const Buffer& buffer = program_.buffers[point.buffer.value];
    Bytes& bytes = (buffer.on_host ? host_ : device_)[static_cast<std::size_t>(buffer.category)];
    switch (point.kind) {
      case PointKind::kAlloc:
        bytes += buffer.size;
        break;
      case PointKind::kFree:
        bytes -= buffer.size;
        break;
      case PointKind::kAllocOnce:
        if (!allocated_once_[point.buffer.value]) {
          allocated_once_[point.buffer.value] = true;
          bytes += buffer.size;
        }
        break;
    }
  }
}

MemorySample MemoryLog::Sample(std::uint32_t step, Rank rank, SimTime time) const {
  MemorySample sample;
  sample.step = step;
  sample.rank = rank;
  sample.time = time;
  sample.device = device_;
  sample.host = host_;
  return sample;
}

}  // namespace shardwright
