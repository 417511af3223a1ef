#pragma once

// Sizes in PyTorch's caching allocator (c10/cuda/CUDACachingAllocator.cpp), in bytes.

#include <cstdint>

namespace shardwright::internal {

inline constexpr std::int64_t kBlockGranularity = 512;           // every block is a multiple
inline constexpr std::int64_t kLargestSmallRequest = 1 << 20;    // above it: large pool
inline constexpr std::int64_t kSmallSegment = 2 << 20;           // also the page of the small pool
inline constexpr std::int64_t kLargeSegment = 20 << 20;          // also the page of the large pool
inline constexpr std::int64_t kSmallestOwnSegment = 10 << 20;    // from here a segment of its own
inline constexpr std::int64_t kOwnSegmentGranularity = 2 << 20;  // and its size is a multiple
inline constexpr std::int64_t kLargestCapacity = std::int64_t{1} << 50;
inline constexpr std::int64_t kLargestRequest = std::int64_t{1} << 60;
inline constexpr int kMaxStreams = 65536;

}  // namespace shardwright::internal
