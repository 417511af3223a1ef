#pragma once

// A model of PyTorch's CUDA caching allocator: how much memory a rank *reserves* from the driver
// when a program allocates and frees buffers in host order on several streams.
//
// The rules are those of c10/cuda/CUDACachingAllocator.cpp in its 2024-2025 versions (public source
// of pytorch/pytorch), restated here:
//  - A request is rounded up to 512 B. Up to 1 MiB it uses the small pool, above it the large pool.
//  - The driver is asked for segments: 2 MiB for the small pool; for the large pool 20 MiB below 10
//  MiB,
//    else the request rounded up to 2 MiB. Segments are cut into blocks.
//  - Free blocks are kept per pool and stream. A request takes the smallest block of its own stream
//  that
//    is large enough, the lowest address among equals. A block of another stream is never used.
//  - A found block is split when the rest is worth keeping: at least 512 B in the small pool; more
//  than
//    1 MiB in the large pool, and only for requests below max_split_size. Otherwise the whole block
//    is handed out.
//  - Freed blocks merge with free neighbours of their segment. A block that other streams used
//  waits for
//    one event per such stream; each Alloc first polls the events, per stream in order of the
//    frees, and stops at the first unfinished one.
//  - When no block fits: garbage collection (if on), cudaMalloc, release of oversize blocks (if
//    max_split_size is set) and cudaMalloc, and last the *retry*: wait for all events, return every
//    segment without a used block to the driver, cudaMalloc. Then out of memory.
// Not modelled: power-of-two rounding, private pools of CUDA graphs, user callbacks, several
// devices.

#include <array>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <span>
#include <vector>

#include "core/error.h"
#include "core/units.h"
#include "simulator/internal/free_list.h"

namespace shardwright {

struct AllocatorOptions {
  // Bytes that segments may take from the driver: device memory minus what lives outside the
  // allocator (context, communicators), times the process's memory fraction if one is set. 1 B to 1
  // PiB.
  Bytes capacity{0};
  // Requests of at least this size are not split and blocks of at least this size serve only such
  // requests (max_split_size_mb). More than 20 MiB; the default, no limit, is PyTorch's.
  Bytes max_split_size{std::numeric_limits<std::int64_t>::max()};
  // Share of `capacity` above which unsplit large blocks are collected by age before the driver is
  // asked (garbage_collection_threshold; PyTorch obeys it only when a memory fraction is set).
  // Below 1; the default 0 means off, as in PyTorch. Expandable segments are never collected.
  double gc_threshold = 0;
  // One growing address range per pool and stream, mapped in pages of 2 MiB (small pool) or 20 MiB.
  // `capacity` then limits the mapped pages. Off by default, as in PyTorch.
  bool expandable_segments = false;

  bool operator==(const AllocatorOptions&) const = default;
};

// A block handed out by CachingAllocator. The default, no block, stands for an allocation of 0 B.
using BlockHandle = Id<struct AllocatorBlockTag>;

// A stream other than the owner that used a block (recordStream), and when its last use completes.
struct PendingUse {
  int stream = 0;
  SimTime done;
};

struct AllocResult {
  BlockHandle block;           // none when out of memory, and for a request of 0 B
  bool out_of_memory = false;  // the retry did not help either
  bool retried = false;        // the last resort ran: the host waited for all pending events
  int cuda_malloc_count = 0;   // cudaMalloc calls that succeeded (mappings, if expandable)
  // cudaFree calls (unmappings) of this request, from any path. Each one synchronises the device.
  int segments_freed = 0;
  Bytes freed_by_retry;  // bytes returned to the driver by the retry
  SimTime sync_until;    // when the last event that the retry waits for completes; else host_now
};

struct AllocatorCounters {
  Bytes allocated;  // blocks in the hands of the program, after rounding
  Bytes active;     // allocated, plus blocks that were freed but wait for another stream
  Bytes reserved;   // segments (mapped pages, if expandable)
  Bytes peak_allocated;
  Bytes peak_active;
  Bytes peak_reserved;
  std::int64_t retry_count = 0;  // num_alloc_retries
  std::int64_t out_of_memory_count = 0;
  std::int64_t cuda_malloc_count = 0;
  std::int64_t cuda_free_count = 0;

  bool operator==(const AllocatorCounters&) const = default;
};

enum class BlockState : std::uint8_t {
  kFree,       // cached
  kAllocated,  // handed out
  kWaiting,    // freed, but an event of another stream is still unfinished or unnoticed
  kUnmapped,   // address space of an expandable segment without memory
};

// A listing for tests and explanations.
struct AllocatorBlockView {
  Bytes offset;  // from the start of the segment
  Bytes size;
  BlockState state = BlockState::kFree;
  BlockHandle block;  // equals the handle of Alloc while the block is allocated
};
struct AllocatorSegmentView {
  int stream = 0;
  bool is_small = false;  // small pool
  std::vector<AllocatorBlockView> blocks;
};

// One device's allocator. Copyable: a copy continues from the same state. Not thread-safe.
//
// Addresses are virtual: a new segment lies above all earlier ones, which decides ties between
// blocks of equal size (with CUDA the driver decides). Once the tables have grown to their largest
// size, Alloc and Free allocate no memory.
class CachingAllocator {
 public:
  // Requires options in their ranges.
  explicit CachingAllocator(const AllocatorOptions& options);

  // Requests `size` bytes for `stream` when the host clock shows `host_now`. Requires size >= 0,
  // 0 <= stream < 65536, and a host_now that never decreases. A request of 0 B does nothing at all.
  AllocResult Alloc(Bytes size, int stream, SimTime host_now);

  // The program frees a block that `uses` other streams worked on. Uses on the owner's stream are
  // ignored, since work on one stream is ordered anyway. Freeing "no block" does nothing.
  void Free(BlockHandle block, std::span<const PendingUse> uses = {});

  [[nodiscard]] const AllocatorCounters& counters() const { return counters_; }
  [[nodiscard]] const AllocatorOptions& options() const { return options_; }
  // Bytes of an allocated block: the request after rounding, plus a rest too small to split off.
  [[nodiscard]] Bytes SizeOf(BlockHandle block) const;
  // All segments by address; within one, all blocks by offset.
  [[nodiscard]] std::vector<AllocatorSegmentView> Segments() const;

  // A hash of everything that future results depend on, except absolute time and addresses: two
  // equal states answer the same future calls, shifted in time, equally. Segments are told apart by
  // pool, stream and address order, events by the time they still need after `host_now`. Which
  // allocated block is which buffer is the caller's knowledge: `live` lists the handles in an order
  // of the caller's choice, and states are equal only if entries of equal index lie at equal
  // places. Counters and peaks do not enter. With gc_threshold, ages do. O(blocks + live).
  [[nodiscard]] std::uint64_t Fingerprint(SimTime host_now, std::span<const BlockHandle> live = {});

  // Peaks continue from the current values.
  void ResetPeaks();
  // Back to the state after construction, but keeps the memory of the tables.
  void Reset();

 private:
  static constexpr std::uint32_t kNone = 0xffffffffu;

  struct Block {
    std::int64_t address = 0;
    std::int64_t size = 0;
    std::int64_t age_base = 0;   // searches of the pool when the block became free
    std::uint32_t prev = kNone;  // neighbours in the segment
    std::uint32_t next = kNone;
    // Of the first block of a segment: the first blocks of the segments around it, by address.
    std::uint32_t segment_before = kNone;
    std::uint32_t segment_after = kNone;
    std::uint32_t pool = 0;         // index into pools_
    std::uint16_t event_count = 0;  // unfinished events of other streams
    BlockState state = BlockState::kFree;
  };
  // Free blocks of one stream in the large (even index) or small (odd index) pool.
  struct Pool {
    internal::FreeList free;
    std::vector<std::uint32_t> unmapped;  // expandable only; by address
  };
  struct Event {
    SimTime done;
    std::uint32_t block = kNone;
  };
  // Events of one stream in order of the frees; those before `head` are finished.
  struct EventQueue {
    std::vector<Event> events;
    std::size_t head = 0;
  };

  // caching_allocator.cc
  void EnsureStream(int stream);
  [[nodiscard]] std::uint32_t NewBlock();
  [[nodiscard]] std::uint32_t CutTail(std::uint32_t block, std::int64_t size);
  void AbsorbNext(std::uint32_t block);
  [[nodiscard]] internal::FreeList::Position FindFit(const Pool& pool, std::int64_t size) const;
  [[nodiscard]] bool ShouldSplit(const Block& block, std::int64_t size) const;
  void SplitNew(std::uint32_t block, std::int64_t size);
  [[nodiscard]] std::uint32_t TakeFit(Pool& pool, internal::FreeList::Position position,
                                      std::int64_t size);
  [[nodiscard]] std::int64_t Releasable(const Block& block) const;
  void InsertFree(std::uint32_t block);
  void RemoveFree(std::uint32_t block);
  void Recycle(std::uint32_t block);
  void PollEvents(SimTime host_now);
  void FinishEvent(const Event& event);

  // caching_allocator_miss.cc
  [[nodiscard]] std::uint32_t AllocMiss(std::uint32_t pool, std::int64_t size, AllocResult& result);
  [[nodiscard]] std::uint32_t NewSegment(std::uint32_t pool, std::int64_t size,
                                         AllocResult& result);
  [[nodiscard]] std::uint32_t AppendSegment(std::uint32_t pool, std::int64_t size);
  void ForgetSegment(std::uint32_t block);
  void CollectGarbage(AllocResult& result);
  [[nodiscard]] bool ReleaseOversize(std::uint32_t pool, std::int64_t size, AllocResult& result);
  void SynchronizeAndRelease(AllocResult& result);
  void ReleaseSegment(std::uint32_t block, AllocResult& result);

  // caching_allocator_expandable.cc
  [[nodiscard]] std::int64_t PageSize(std::uint32_t pool) const;
  [[nodiscard]] std::int64_t ExpandedSize(std::uint32_t block) const;
  [[nodiscard]] std::uint32_t FindExpandable(std::uint32_t pool, std::int64_t size);
  [[nodiscard]] std::uint32_t Expand(std::uint32_t pool, std::int64_t size, AllocResult& result);
  [[nodiscard]] std::uint32_t Map(std::uint32_t block, std::int64_t size, AllocResult& result);
  void Unmap(std::uint32_t block, AllocResult& result);
  void InsertUnmapped(std::uint32_t block);
  void RemoveUnmapped(std::uint32_t block);

  [[nodiscard]] static bool IsSmall(std::uint32_t pool) { return (pool & 1u) != 0; }
  [[nodiscard]] bool IsSplit(const Block& b) const { return b.prev != kNone || b.next != kNone; }

  AllocatorOptions options_;
  AllocatorCounters counters_;
  std::vector<Block> blocks_;
  std::vector<std::uint32_t> unused_blocks_;  // slots of blocks_ that stand for nothing
  std::uint32_t first_segment_ = kNone;       // first blocks of the lowest and the highest
  std::uint32_t last_segment_ = kNone;
  std::vector<Pool> pools_;         // two per stream
  std::vector<EventQueue> events_;  // one per stream
  std::size_t pending_event_count_ = 0;
  std::int64_t next_address_ = 0;
  std::array<std::int64_t, 2>
      search_count_{};  // large, small pool; counted only if gc_threshold > 0
  std::vector<std::uint32_t> scratch_;
  // Scratch of Fingerprint: a block's number in its pool; a pool's hash and number of blocks so
  // far.
  std::vector<std::uint32_t> block_number_;
  std::vector<std::uint64_t> pool_hash_;
  std::vector<std::uint32_t> pool_block_count_;
};

}  // namespace shardwright
