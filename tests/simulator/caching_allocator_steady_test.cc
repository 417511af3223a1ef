// Counts host allocations, by replacing operator new of this whole program; hence a program of its
// own.

#include <cstddef>
#include <cstdint>
#include <vector>

#include <doctest/doctest.h>

#include "core/units.h"
#include "simulator/caching_allocator.h"
#include "tests/counting_new.h"

namespace shardwright {
namespace {

// 64 layers of 20 buffers; capacity for about half of the cached segments, so that retries happen
// too.
void ReplayStep(CachingAllocator& allocator, std::vector<BlockHandle>& kept, SimTime& now) {
  const Bytes sizes[] = {Bytes(512), kKiB * 3, kKiB * 700, kMiB * 2, kMiB * 9, kMiB * 33};
  kept.clear();
  for (int layer = 0; layer < 64; ++layer) {
    now += SimTime(10);
    const BlockHandle weights = allocator.Alloc(kMiB * 50, 1, now).block;
    for (int i = 0; i < 20; ++i) {
      kept.push_back(allocator.Alloc(sizes[(layer + i) % 6], 0, now).block);
    }
    const PendingUse use{0, now + SimTime(25)};
    allocator.Free(weights, {&use, 1});
  }
  for (std::size_t i = 0; i < kept.size(); i += 2) {
    allocator.Free(kept[i]);
  }
  for (std::size_t i = 1; i < kept.size(); i += 2) {
    allocator.Free(kept[i]);
  }
  // Too large for what is left, so the cache is emptied.
  allocator.Free(allocator.Alloc(allocator.options().capacity - kMiB * 2, 2, now).block);
}

TEST_CASE("CachingAllocator: a steady program allocates no host memory") {
  for (const bool expandable : {false, true}) {
    CAPTURE(expandable);
    CachingAllocator allocator({.capacity = kGiB * 20, .expandable_segments = expandable});
    std::vector<BlockHandle> kept;
    kept.reserve(std::size_t{64} * 20);
    SimTime now;
    for (int warm_up = 0; warm_up < 3; ++warm_up) {
      ReplayStep(allocator, kept, now);
      (void)allocator.Fingerprint(now, kept);
    }
    const std::int64_t retries = allocator.counters().retry_count;
    const std::int64_t before = host_allocation_count;
    for (int round = 0; round < 5; ++round) {
      ReplayStep(allocator, kept, now);
      (void)allocator.Fingerprint(now, {});
    }
    CHECK(host_allocation_count == before);
    CHECK(allocator.counters().retry_count > retries);
    CHECK(allocator.counters().out_of_memory_count == 0);
    CHECK(allocator.counters().allocated == Bytes(0));
  }
  // The counter counts.
  const std::int64_t before = host_allocation_count;
  const std::vector<int> one(1);
  CHECK(host_allocation_count == before + 1);
  CHECK(one.size() == 1);
}

}  // namespace
}  // namespace shardwright
