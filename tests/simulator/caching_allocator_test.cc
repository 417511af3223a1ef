#include "simulator/caching_allocator.h"

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <ctime>
#include <filesystem>
#include <fstream>
#include <map>
#include <random>
#include <sstream>
#include <string>
#include <vector>

#include <doctest/doctest.h>

#include "core/error.h"
#include "core/units.h"
#include "tests/simulator/allocator_script.h"
#include "tests/simulator/slow_allocator.h"

namespace shardwright {
namespace {

// Each script's expectations are derived by hand in its comment.
TEST_CASE("CachingAllocator: hand-made scripts") {
  std::vector<std::filesystem::path> paths;
  for (const auto& entry : std::filesystem::directory_iterator("simulator/allocator_scripts")) {
    paths.push_back(entry.path());
  }
  std::sort(paths.begin(), paths.end());
  CHECK(paths.size() == 67);
  for (const std::filesystem::path& path : paths) {
    std::ifstream file(path);
    std::stringstream text;
    text << file.rdbuf();
    const std::string name = path.stem().string();
    CAPTURE(name);
    for (const std::string& failure : RunAllocatorScript(name, text.str())) {
      FAIL_CHECK(failure);
    }
  }
}

// The script runner itself reports what is wrong.
TEST_CASE("CachingAllocator: a wrong script fails") {
  const std::vector<std::string> failures = RunAllocatorScript("wrong",
                                                               "options capacity=1GiB\n"
                                                               "alloc a 1MiB\n"
                                                               "segments\n"
                                                               "  small s0: a=1MiB free=512KiB\n"
                                                               "end\n"
                                                               "counters allocated=2MiB\n");
  REQUIRE(failures.size() == 3);
  CHECK(failures[0] == "wrong:2: expected mallocs 0, got 1");
  CHECK(failures[1] ==
        "wrong:5: expected segments\n    small s0: a=1048576 free=524288\n  got\n"
        "    small s0: a=1048576 free=1048576");
  CHECK(failures[2] == "wrong:6: expected allocated 2097152, got 1048576");
}

// Half a million segments go back at once. Looking for each among all, or moving all that lie above
// it, takes minutes.
TEST_CASE("CachingAllocator: a retry is linear in the segments that it returns") {
  constexpr std::int64_t kSegment = 2 << 20;
  constexpr std::int64_t kCount = 500'000;
  CachingAllocator allocator({.capacity = Bytes(kCount * 10 * kSegment)});
  std::vector<BlockHandle> blocks;
  for (std::int64_t i = 0; i < kCount; ++i) {
    // Falling and rising sizes of at least 10 MiB have segments of their own.
    blocks.push_back(allocator.Alloc(Bytes(kSegment * (i % 2 == 0 ? 9 : 7)), 0, SimTime(0)).block);
  }
  for (const BlockHandle block : blocks) {
    allocator.Free(block);
  }
  const std::clock_t begin = std::clock();
  const AllocResult result = allocator.Alloc(allocator.options().capacity, 0, SimTime(0));
  CHECK(static_cast<double>(std::clock() - begin) / CLOCKS_PER_SEC < 5);
  CHECK(result.retried);
  CHECK(result.segments_freed == kCount);
  CHECK(allocator.Segments().size() == 1);
  CHECK(allocator.counters().reserved == allocator.options().capacity);
}

// One random script, driven through both implementations at once.
class Pair {
 public:
  Pair(const AllocatorOptions& options, std::uint64_t seed)
      : fast_(options), slow_(options), random_(seed) {
    // Few different sizes, so that states repeat and blocks fit exactly; near all boundaries.
    constexpr std::int64_t kBoundaries[] = {1 << 9,   1 << 16,  1 << 20,  3 << 20,
                                            10 << 20, 19 << 20, 21 << 20, 40 << 20};
    for (const std::int64_t b : kBoundaries) {
      sizes_.push_back(b + Pick(3) * 512 - 512);
    }
    sizes_.push_back(1 + Pick(60 << 20));
    stream_count_ = 1 + static_cast<int>(Pick(3));
    max_step_ = 1 + Pick(40);
  }

  CachingAllocator& fast() { return fast_; }
  SlowAllocator& slow() { return slow_; }
  [[nodiscard]] std::int64_t now() const { return now_; }
  [[nodiscard]] std::size_t live_count() const { return handles_.size(); }
  [[nodiscard]] const std::vector<BlockHandle>& handles() const { return handles_; }
  [[nodiscard]] const std::vector<std::int64_t>& pieces() const { return pieces_; }

  void Step() {
    now_ += Pick(max_step_);
    // Phases of growth and shrinkage, so that both full and empty states occur.
    const bool grows = (step_++ / 25) % 2 == 0;
    if (handles_.empty() || Pick(10) < (grows ? 6 : 4)) {
      AllocOne();
    } else {
      FreeOne();
    }
  }

  void AllocOne() {
    const std::int64_t size = sizes_[static_cast<std::size_t>(Pick(std::ssize(sizes_)))];
    const int stream = static_cast<int>(Pick(stream_count_));
    const AllocResult a = fast_.Alloc(Bytes(size), stream, SimTime(now_));
    const SlowAllocator::Result b = slow_.Alloc(size, stream, now_);
    REQUIRE(a.out_of_memory == b.out_of_memory);
    REQUIRE(a.retried == b.retried);
    REQUIRE(a.cuda_malloc_count == b.mallocs);
    REQUIRE(a.segments_freed == b.frees);
    REQUIRE(a.freed_by_retry.value == b.freed_by_retry);
    REQUIRE(a.sync_until.value == b.sync_until);
    retries_ += a.retried ? 1 : 0;
    ooms_ += a.out_of_memory ? 1 : 0;
    mallocs_ += a.cuda_malloc_count;
    frees_ += a.segments_freed;
    now_ = a.sync_until.value;  // the host waits
    if (!a.out_of_memory) {
      handles_.push_back(a.block);
      pieces_.push_back(b.piece);
    }
    peak_allocated_ = std::max(peak_allocated_, slow_.Allocated());
    peak_active_ = std::max(peak_active_, slow_.Active());
  }

  void FreeOne() {
    const auto index = static_cast<std::ptrdiff_t>(Pick(std::ssize(handles_)));
    std::vector<PendingUse> uses;
    for (int stream = 0; stream < stream_count_; ++stream) {
      if (Pick(4) == 0) {
        uses.push_back({stream, SimTime(now_ + Pick(200) - 20)});
      }
    }
    fast_.Free(handles_[static_cast<std::size_t>(index)], uses);
    slow_.Free(pieces_[static_cast<std::size_t>(index)], uses);
    handles_.erase(handles_.begin() + index);
    pieces_.erase(pieces_.begin() + index);
  }

  // The whole state and all counters agree.
  void Compare() {
    std::vector<std::string> lines;
    for (const AllocatorSegmentView& segment : fast_.Segments()) {
      lines.push_back(Line(segment));
    }
    REQUIRE(lines == slow_.Listing());
    const AllocatorCounters& c = fast_.counters();
    REQUIRE(c.allocated.value == slow_.Allocated());
    REQUIRE(c.active.value == slow_.Active());
    REQUIRE(c.reserved.value == slow_.Reserved());
    REQUIRE(c.peak_allocated.value == peak_allocated_);
    REQUIRE(c.peak_active.value == peak_active_);
    REQUIRE(c.peak_reserved.value == slow_.PeakReserved());
    REQUIRE(c.reserved <= fast_.options().capacity);
    REQUIRE(c.retry_count == retries_);
    REQUIRE(c.out_of_memory_count == ooms_);
    REQUIRE(c.cuda_malloc_count == mallocs_);
    REQUIRE(c.cuda_free_count == frees_);
  }

  [[nodiscard]] std::int64_t retries() const { return retries_; }
  [[nodiscard]] std::int64_t ooms() const { return ooms_; }
  [[nodiscard]] std::int64_t frees() const { return frees_; }

 private:
  std::int64_t Pick(std::int64_t count) {
    return static_cast<std::int64_t>(random_() % static_cast<std::uint64_t>(count));
  }

  [[nodiscard]] std::string Line(const AllocatorSegmentView& segment) const {
    std::string line =
        std::string(segment.is_small ? "small" : "large") + " s" + std::to_string(segment.stream);
    for (const AllocatorBlockView& block : segment.blocks) {
      std::string state;
      switch (block.state) {
        case BlockState::kFree:
          state = "free";
          break;
        case BlockState::kWaiting:
          state = "waiting";
          break;
        case BlockState::kUnmapped:
          state = "unmapped";
          break;
        case BlockState::kAllocated: {
          const auto it = std::find(handles_.begin(), handles_.end(), block.block);
          REQUIRE(it != handles_.end());
          state = std::to_string(pieces_[static_cast<std::size_t>(it - handles_.begin())]);
          break;
        }
      }
      line += " " + state + "@" + std::to_string(block.offset.value) + "=" +
              std::to_string(block.size.value);
    }
    return line;
  }

  CachingAllocator fast_;
  SlowAllocator slow_;
  std::mt19937_64 random_;
  std::vector<std::int64_t> sizes_;
  int stream_count_ = 1;
  std::int64_t max_step_ = 1;
  std::int64_t step_ = 0;
  std::int64_t now_ = 0;
  std::vector<BlockHandle> handles_;
  std::vector<std::int64_t> pieces_;
  std::int64_t peak_allocated_ = 0;
  std::int64_t peak_active_ = 0;
  std::int64_t retries_ = 0;
  std::int64_t ooms_ = 0;
  std::int64_t mallocs_ = 0;
  std::int64_t frees_ = 0;
};

AllocatorOptions RandomOptions(std::uint64_t seed) {
  std::mt19937_64 random(seed + 0x5eed);
  AllocatorOptions options;
  options.capacity = kMiB * static_cast<std::int64_t>(20 + random() % 400);
  if (random() % 3 == 0) {
    options.max_split_size = kMiB * static_cast<std::int64_t>(21 + random() % 30);
  }
  if (random() % 3 == 0) {
    options.gc_threshold = static_cast<double>(random() % 95) / 100;
  }
  options.expandable_segments = random() % 3 == 0;
  return options;
}

TEST_CASE("CachingAllocator: equals a brute-force implementation on random scripts") {
  constexpr std::uint64_t kScripts = 3000;
  std::int64_t retries = 0;
  std::int64_t ooms = 0;
  std::int64_t frees = 0;
  for (std::uint64_t seed = 1; seed <= kScripts; ++seed) {
    CAPTURE(seed);
    Pair pair(RandomOptions(seed), seed);
    for (int step = 0; step < 120; ++step) {
      CAPTURE(step);
      pair.Step();
      pair.Compare();
    }
    retries += pair.retries();
    ooms += pair.ooms();
    frees += pair.frees();
  }
  // The scripts reach the paths that they are meant to test.
  CHECK(retries > 1000);
  CHECK(ooms > 1000);
  CHECK(frees > 1000);
}

// The same with hundreds of cached blocks per pool, by scripts that first only allocate.
TEST_CASE("CachingAllocator: equals a brute-force implementation with many blocks") {
  for (std::uint64_t seed = 1; seed <= 6; ++seed) {
    CAPTURE(seed);
    AllocatorOptions options = RandomOptions(seed);
    options.capacity = kGiB * 64;
    Pair pair(options, seed);
    for (int i = 0; i < 600; ++i) {
      pair.AllocOne();
    }
    // A random half is freed, which leaves many separate holes.
    for (int i = 0; i < 300; ++i) {
      pair.FreeOne();
    }
    for (int step = 0; step < 200; ++step) {
      CAPTURE(step);
      pair.Step();
      if (step % 10 == 0) {
        pair.Compare();
      }
    }
    while (pair.live_count() > 0) {
      pair.FreeOne();
    }
    pair.AllocOne();
    pair.Compare();
  }
}

// Over many random states: equal fingerprints if and only if equal canonical texts (from the slow
// implementation). Small scripts of few sizes, so that states repeat by themselves.
TEST_CASE("CachingAllocator: the fingerprint tells states apart exactly") {
  std::int64_t repeats = 0;
  for (std::uint64_t group = 1; group <= 60; ++group) {
    CAPTURE(group);
    const AllocatorOptions options = RandomOptions(group);
    std::map<std::uint64_t, std::string> text_of;
    std::map<std::string, std::uint64_t> fingerprint_of;
    for (std::uint64_t run = 1; run <= 10; ++run) {
      CAPTURE(run);
      Pair pair(options, group);  // the same sizes and streams in each run
      for (std::uint64_t skip = 0; skip < run; ++skip) {
        pair.Step();
      }
      for (int step = 0; step < 60; ++step) {
        pair.Step();
        const std::string text = pair.slow().Canonical(pair.now(), pair.pieces());
        const std::uint64_t print = pair.fast().Fingerprint(SimTime(pair.now()), pair.handles());
        const bool is_new = fingerprint_of.emplace(text, print).second;
        repeats += is_new ? 0 : 1;
        REQUIRE(fingerprint_of.at(text) == print);
        REQUIRE(text_of.emplace(print, text).first->second == text);
      }
    }
  }
  CHECK(repeats > 1000);
}

// A steady loop of 300 ps: buffers of three layers gathered on stream 1 at 100, 200, 300 and freed
// at once, with a use on stream 0 that ends 450 later. That is after the same layer's gather of the
// next round and before the one after it, so two sets of segments alternate, and from the second
// round on the state repeats every second round: at its end (600, 900, ...) the events of two
// layers of the older set have 50 and 150 left, those of the newer set 250, 350 and 450.
TEST_CASE("CachingAllocator: the fingerprint repeats in a periodic program") {
  const auto round = [](CachingAllocator& a, SimTime start) {
    std::vector<std::int64_t> mallocs;
    for (int layer = 0; layer < 3; ++layer) {
      const SimTime now = start + SimTime(std::int64_t{100} * (layer + 1));
      const AllocResult weights = a.Alloc(kMiB * (40 + 10 * layer), 1, now);
      const AllocResult activation = a.Alloc(kMiB * 3, 0, now);
      mallocs.push_back(weights.cuda_malloc_count + activation.cuda_malloc_count);
      a.Free(activation.block);
      const PendingUse use{0, now + SimTime(450)};
      a.Free(weights.block, {&use, 1});
    }
    return mallocs;
  };
  using Counts = std::vector<std::int64_t>;
  CachingAllocator allocator({.capacity = kMiB * 600});
  std::vector<std::uint64_t> prints;
  std::vector<CachingAllocator> copies;
  for (int i = 0; i < 8; ++i) {
    const Counts mallocs = round(allocator, SimTime(std::int64_t{300} * i));
    CHECK(mallocs == (i == 0 ? Counts{2, 1, 1} : i == 1 ? Counts{1, 1, 1} : Counts{0, 0, 0}));
    prints.push_back(allocator.Fingerprint(SimTime(std::int64_t{300} * (i + 1))));
    copies.push_back(allocator);
  }
  CHECK(allocator.counters().reserved == kMiB * (2 * (40 + 50 + 60) + 20));
  CHECK(prints[0] != prints[1]);
  CHECK(prints[1] != prints[2]);
  for (std::size_t i = 3; i < prints.size(); ++i) {
    CAPTURE(i);
    CHECK(prints[i] == prints[i - 2]);
  }
  // A different time left is a different state.
  CHECK(allocator.Fingerprint(SimTime(2401)) != prints[7]);
  // From equal states on, anything gives equal results: here a request that only a retry can serve.
  // It waits 450 for the last event and returns all segments but none of the used ones, of which
  // there are none.
  for (const std::size_t i : {1u, 3u, 5u, 7u}) {
    CAPTURE(i);
    const auto now = SimTime(300 * (static_cast<std::int64_t>(i) + 1));
    const AllocResult result = copies[i].Alloc(kMiB * 500, 1, now);
    CHECK(result.retried);
    CHECK(result.sync_until == now + SimTime(450));
    CHECK(result.freed_by_retry == kMiB * 320);
    CHECK(result.segments_freed == 7);
  }
}

// Which of two equal blocks is which buffer matters only through `live`.
TEST_CASE("CachingAllocator: the fingerprint knows the caller's buffers") {
  CachingAllocator allocator({.capacity = kGiB});
  const BlockHandle a = allocator.Alloc(kMiB * 10, 0, SimTime(0)).block;
  const BlockHandle b = allocator.Alloc(kMiB * 10, 0, SimTime(0)).block;
  const BlockHandle none;
  const BlockHandle ab[] = {a, b};
  const BlockHandle ba[] = {b, a};
  const BlockHandle anb[] = {a, none, b};
  const std::uint64_t print = allocator.Fingerprint(SimTime(0), ab);
  CHECK(print != allocator.Fingerprint(SimTime(0), ba));
  CHECK(print != allocator.Fingerprint(SimTime(0), anb));
  CHECK(print == allocator.Fingerprint(SimTime(7), ab));
}

// An event that is finished but not yet noticed has no time left, however long ago it finished: the
// next allocation will notice it either way.
TEST_CASE("CachingAllocator: the fingerprint does not count time after an event") {
  CachingAllocator allocator({.capacity = kGiB});
  const BlockHandle a = allocator.Alloc(kMiB * 10, 0, SimTime(0)).block;
  const PendingUse use{1, SimTime(50)};
  allocator.Free(a, {&use, 1});
  CHECK(allocator.Fingerprint(SimTime(50)) == allocator.Fingerprint(SimTime(70)));
  CHECK(allocator.Fingerprint(SimTime(49)) != allocator.Fingerprint(SimTime(50)));
}

// Two segments of 10 MiB, or one of 20 MiB cut in the middle: the same blocks, but they merge
// differently.
TEST_CASE("CachingAllocator: the fingerprint sees where segments begin") {
  CachingAllocator two({.capacity = kGiB});
  CachingAllocator one({.capacity = kGiB});
  one.Free(one.Alloc(kMiB * 20, 0, SimTime(0)).block);
  for (int i = 0; i < 2; ++i) {
    (void)two.Alloc(kMiB * 10, 0, SimTime(0));
    (void)one.Alloc(kMiB * 10, 0, SimTime(0));
  }
  REQUIRE(two.Segments().size() == 2);
  REQUIRE(one.Segments().size() == 1);
  CHECK(two.Fingerprint(SimTime(0)) != one.Fingerprint(SimTime(0)));
}

// Segments of different pools interleave differently, which has no influence on anything.
TEST_CASE("CachingAllocator: the fingerprint ignores the order of unrelated segments") {
  CachingAllocator a({.capacity = kGiB});
  CachingAllocator b({.capacity = kGiB});
  (void)a.Alloc(kMiB * 10, 0, SimTime(0));
  (void)a.Alloc(kMiB * 10, 1, SimTime(0));
  (void)b.Alloc(kMiB * 10, 1, SimTime(0));
  (void)b.Alloc(kMiB * 10, 0, SimTime(0));
  CHECK(a.Fingerprint(SimTime(0)) == b.Fingerprint(SimTime(0)));
}

// Reset gives the state after construction, whatever happened before, and peaks restart from now.
TEST_CASE("CachingAllocator: Reset and ResetPeaks") {
  for (std::uint64_t seed = 1; seed <= 50; ++seed) {
    CAPTURE(seed);
    const AllocatorOptions options = RandomOptions(seed);
    Pair used(options, seed);
    for (int step = 0; step < 100; ++step) {
      used.Step();
    }
    CachingAllocator& allocator = used.fast();
    allocator.ResetPeaks();
    CHECK(allocator.counters().peak_allocated == allocator.counters().allocated);
    CHECK(allocator.counters().peak_active == allocator.counters().active);
    CHECK(allocator.counters().peak_reserved == allocator.counters().reserved);
    allocator.Reset();
    CachingAllocator fresh(options);
    CHECK(allocator.counters() == AllocatorCounters());
    CHECK(allocator.Segments().empty());
    CHECK(allocator.Fingerprint(SimTime(0)) == fresh.Fingerprint(SimTime(0)));
    for (int i = 1; i <= 40; ++i) {
      const Bytes size = kKiB * (i * i * 37 % 30'000);
      const BlockHandle a = allocator.Alloc(size, i % 3, SimTime(i)).block;
      const BlockHandle b = fresh.Alloc(size, i % 3, SimTime(i)).block;
      if (i % 4 == 0) {
        allocator.Free(a);
        fresh.Free(b);
      }
      CHECK(allocator.Fingerprint(SimTime(i)) == fresh.Fingerprint(SimTime(i)));
    }
    CHECK(allocator.counters() == fresh.counters());
  }
}

}  // namespace
}  // namespace shardwright
