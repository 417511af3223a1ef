#include "schedule/place.h"

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <span>
#include <utility>

#include "core/error.h"
#include "schedule/happens_before.h"
#include "schedule/internal/arena.h"
#include "schedule/internal/lives.h"

namespace shardwright {
namespace {

enum class Lifetime : std::uint8_t {
  kUnused,     // no op touches it: any bytes will do
  kExclusive,  // bytes of its own
  kInit,       // lives inside init
  kWarmup,     // lives inside warmup
  kStep,       // lives inside each step
  kCarried,    // allocated by each step, freed by the next
};

constexpr std::uint32_t kNoLife = 0xffffffffu;

// The lives of one buffer.
struct BufferLives {
  std::uint32_t before_steps = kNoLife;  // in init or warmup; the later one
  std::uint32_t first_step = kNoLife;
  std::uint32_t second_step = kNoLife;
  bool is_irregular = false;  // two lives in one pass, or one each in init and in warmup
  Lifetime lifetime = Lifetime::kUnused;
};

// First uses of one pass on each stream, in host order.
class Births {
 public:
  void Add(const Life& life) {
    of_stream_[static_cast<std::size_t>(life.birth_stream)].push_back(
        {life.birth, &life.before_birth});
  }
  void Sort() {
    for (auto& births : of_stream_) {
      std::stable_sort(births.begin(), births.end(),
                       [](const Birth& a, const Birth& b) { return a.position < b.position; });
    }
  }
  // Per stream, the position of the first birth after `from` that comes after all of `last`.
  [[nodiscard]] std::array<std::int32_t, kStreamCount> ReleaseOf(const Clock& last,
                                                                 std::int32_t from) const {
    std::array<std::int32_t, kStreamCount> release{};
    for (std::size_t s = 0; s < kStreamCount; ++s) {
      const std::vector<Birth>& births = of_stream_[s];
      const auto begin = std::partition_point(
          births.begin(), births.end(), [&](const Birth& b) { return b.position <= from; });
      const auto found = std::partition_point(
          begin, births.end(), [&](const Birth& b) { return !b.before->Covers(last); });
      release[s] = found == births.end() ? ArenaItem::kNever : found->position;
    }
    return release;
  }
  // Does all of `last` come before every birth of the pass?
  [[nodiscard]] bool AllCover(const Clock& last) const {
    return std::all_of(of_stream_.begin(), of_stream_.end(), [&](const auto& births) {
      return births.empty() || births.front().before->Covers(last);
    });
  }

 private:
  struct Birth {
    std::int32_t position;
    const Clock* before;
  };
  std::array<std::vector<Birth>, kStreamCount> of_stream_;
};

// Places the buffers of one arena.
class Placer {
 public:
  Placer(const Program& program, const PlaceOptions& options, const Lives& lives,
         std::vector<BufferLives>& buffers, bool on_host)
      : program_(program),
        alignment_(options.alignment.value),
        lives_(lives),
        buffers_(buffers),
        on_host_(on_host),
        births_(lives.passes.size()) {}

  // Writes offsets, returns the size of the arena.
  Bytes Run(std::vector<Bytes>& offsets) {
    CollectBirths();
    SeparateUnordered();
    std::int64_t end = Stack(Lifetime::kExclusive, 0, offsets);
    const std::int64_t shared_begin = end;
    end = Stack(Lifetime::kCarried, end, offsets);
    const std::int64_t carried_end = end;
    end = std::max(end, PlaceStep(shared_begin, offsets));
    end = std::max(end, PlaceOnce(Lifetime::kInit, carried_end, offsets));
    end = std::max(end, PlaceOnce(Lifetime::kWarmup, carried_end, offsets));
    for (std::size_t b = 0; b < buffers_.size(); ++b) {
      if (Is(b, Lifetime::kUnused)) {
        end = std::max(end, SizeOf(b));
      }
    }
    return Bytes(end);
  }

 private:
  [[nodiscard]] bool Is(std::size_t b, Lifetime lifetime) const {
    return buffers_[b].lifetime == lifetime && program_.buffers[b].on_host == on_host_;
  }
  [[nodiscard]] std::int64_t SizeOf(std::size_t b) const {
    return RoundUp(program_.buffers[b].size.value, alignment_);
  }
  [[nodiscard]] const Life& LifeOf(std::uint32_t index) const { return lives_.lives[index]; }

  void CollectBirths() {
    for (const Life& life : lives_.lives) {
      const std::size_t b = life.buffer.value;
      if (Is(b, Lifetime::kInit) || Is(b, Lifetime::kWarmup) || Is(b, Lifetime::kStep) ||
          Is(b, Lifetime::kCarried)) {
        if (life.birth >= 0) {
          births_[life.pass].Add(life);
        }
      }
    }
    for (Births& births : births_) {
      births.Sort();
    }
  }

  // What lives in init or warmup shares bytes with later passes only if it ends before all of
  // their births; otherwise it gets bytes of its own.
  void SeparateUnordered() {
    for (std::size_t b = 0; b < buffers_.size(); ++b) {
      if (!Is(b, Lifetime::kInit) && !Is(b, Lifetime::kWarmup)) {
        continue;
      }
      const Life& life = LifeOf(buffers_[b].before_steps);
      for (std::uint32_t pass = life.pass + 1; pass <= lives_.first_step; ++pass) {
        if (!births_[pass].AllCover(life.last)) {
          buffers_[b].lifetime = Lifetime::kExclusive;
        }
      }
    }
  }

  std::int64_t Stack(Lifetime lifetime, std::int64_t begin, std::vector<Bytes>& offsets) {
    for (std::size_t b = 0; b < buffers_.size(); ++b) {
      if (Is(b, lifetime)) {
        offsets[b] = Bytes(begin);
        begin += SizeOf(b);
      }
    }
    return begin;
  }

  struct Owned {
    ArenaItem item;
    std::uint32_t buffer = 0;
  };

  // Sorts by birth, packs, and tries which lives are best placed first. Long lives go first in
  // most programs, since short ones fit around them; how long is long depends on the program.
  std::int64_t PackBest(std::vector<Owned>& owned, std::int64_t base, std::int32_t length,
                        std::vector<Bytes>& offsets) const {
    std::stable_sort(owned.begin(), owned.end(), [](const Owned& a, const Owned& b) {
      return a.item.birth < b.item.birth;
    });
    std::vector<ArenaItem> best;
    std::int64_t best_end = 0;
    for (const std::int32_t longest_short : {length / 16, 0}) {
      std::vector<ArenaItem> items;
      items.reserve(owned.size());
      for (const Owned& entry : owned) {
        items.push_back(entry.item);
        if (items.back().offset < 0) {
          const std::int32_t release =
              entry.item.release[static_cast<std::size_t>(Stream::kCompute)];
          items.back().level = release - entry.item.birth > longest_short ? 1 : 2;
        }
      }
      const std::int64_t end = PackArena(items, base);
      if (best.empty() || end < best_end) {
        best = std::move(items);
        best_end = end;
      }
    }
    for (std::size_t i = 0; i < owned.size(); ++i) {
      offsets[owned[i].buffer] = Bytes(best[i].offset);
    }
    return std::max(best_end, base);
  }

  std::int64_t PlaceOnce(Lifetime lifetime, std::int64_t base, std::vector<Bytes>& offsets) const {
    std::vector<Owned> owned;
    std::int32_t length = 0;
    for (std::size_t b = 0; b < buffers_.size(); ++b) {
      if (Is(b, lifetime)) {
        const Life& life = LifeOf(buffers_[b].before_steps);
        owned.push_back({ItemOf(life, births_[life.pass]), static_cast<std::uint32_t>(b)});
        length = static_cast<std::int32_t>(lives_.passes[life.pass].body->size());
      }
    }
    return owned.empty() ? 0 : PackBest(owned, base, length, offsets);
  }

  [[nodiscard]] ArenaItem ItemOf(const Life& life, const Births& births) const {
    ArenaItem item;
    item.size = SizeOf(life.buffer.value);
    item.birth = life.birth;
    item.stream = life.birth_stream;
    item.release = births.ReleaseOf(life.last, life.last_use);
    item.last = life.last;
    return item;
  }

  std::int64_t PlaceStep(std::int64_t base, std::vector<Bytes>& offsets) const {
    const Births& births = births_[lives_.first_step];
    const Births& next_births = births_[lives_.first_step + 1];
    std::vector<Owned> owned;
    Clock all_last;
    for (std::size_t b = 0; b < buffers_.size(); ++b) {
      if (Is(b, Lifetime::kStep)) {
        const Life& life = LifeOf(buffers_[b].first_step);
        Owned& entry =
            owned.emplace_back(Owned{ItemOf(life, births), static_cast<std::uint32_t>(b)});
        entry.item.precedes_next_run = next_births.AllCover(life.last);
        entry.item.before_next_birth = LifeOf(buffers_[b].second_step).before_birth;
        all_last.Join(life.last);
      } else if (Is(b, Lifetime::kCarried)) {
        AddCarried(b, offsets[b], owned);
      }
    }
    for (Owned& entry : owned) {
      entry.item.follows_last_run =
          entry.item.offset >= 0 || entry.item.before_next_birth.Covers(all_last);
    }
    return owned.empty() ? 0
                         : PackBest(owned, base, static_cast<std::int32_t>(program_.step.size()),
                                    offsets);
  }

  // A carried buffer holds its bytes twice in a step: until the last step's life is done, and from
  // its birth on.
  void AddCarried(std::size_t b, Bytes offset, std::vector<Owned>& owned) const {
    const BufferLives& lives = buffers_[b];
    ArenaItem old;
    old.size = SizeOf(b);
    old.offset = offset.value;
    old.birth = -1;
    old.release = births_[lives_.first_step + 1].ReleaseOf(LifeOf(lives.first_step).last, -1);
    if (lives.before_steps != kNoLife) {
      const auto first =
          births_[lives_.first_step].ReleaseOf(LifeOf(lives.before_steps).last, -1);
      for (std::size_t s = 0; s < kStreamCount; ++s) {
        old.release[s] = std::max(old.release[s], first[s]);
      }
    }
    owned.push_back({old, static_cast<std::uint32_t>(b)});
    const Life& life = LifeOf(lives.first_step);
    ArenaItem item = old;
    item.birth = life.birth;
    item.stream = life.birth_stream;
    item.release.fill(ArenaItem::kNever);
    owned.push_back({item, static_cast<std::uint32_t>(b)});
  }

  const Program& program_;
  std::int64_t alignment_;
  const Lives& lives_;
  std::vector<BufferLives>& buffers_;
  bool on_host_;
  std::vector<Births> births_;  // by pass; of lives that share bytes
};

Lifetime LifetimeOf(const Program& program, const Lives& all, const BufferLives& buffer,
                    std::size_t b) {
  const bool is_used = buffer.before_steps != kNoLife || buffer.first_step != kNoLife;
  if (!is_used) {
    return Lifetime::kUnused;
  }
  if (buffer.is_irregular || all.is_allocated_once[b] || program.buffers[b].zero_filled) {
    return Lifetime::kExclusive;
  }
  if (buffer.first_step == kNoLife) {
    const Life& life = all.lives[buffer.before_steps];
    if (life.free_pass != life.pass) {
      return Lifetime::kExclusive;
    }
    return life.birth < 0 ? Lifetime::kUnused
           : life.pass == 0 ? Lifetime::kInit
                            : Lifetime::kWarmup;
  }
  const Life& life = all.lives[buffer.first_step];
  if (life.free_pass == life.pass) {
    return buffer.before_steps != kNoLife ? Lifetime::kExclusive
           : life.birth < 0               ? Lifetime::kUnused
                                          : Lifetime::kStep;
  }
  // A carried life must be used first by the step that allocates it, as its bytes are kept from
  // there on.
  return life.birth >= 0 && life.free_pass == life.pass + 1 ? Lifetime::kCarried
                                                            : Lifetime::kExclusive;
}

std::vector<BufferLives> Classify(const Program& program, const Lives& all) {
  std::vector<BufferLives> buffers(program.buffers.size());
  for (std::uint32_t i = 0; i < all.lives.size(); ++i) {
    const Life& life = all.lives[i];
    BufferLives& buffer = buffers[life.buffer.value];
    std::uint32_t& slot = life.pass < all.first_step    ? buffer.before_steps
                          : life.pass == all.first_step ? buffer.first_step
                                                        : buffer.second_step;
    const bool goes_on = slot != kNoLife && life.pass < all.first_step &&
                         all.lives[slot].free_pass == life.pass;
    buffer.is_irregular = buffer.is_irregular || (slot != kNoLife && !goes_on);
    slot = i;
  }
  for (std::size_t b = 0; b < buffers.size(); ++b) {
    buffers[b].lifetime = LifetimeOf(program, all, buffers[b], b);
  }
  return buffers;
}

}  // namespace

Placement Place(const Program& program, const PlaceOptions& options) {
  const std::int64_t a = options.alignment.value;
  SW_CHECK(a > 0 && (a & (a - 1)) == 0, "alignment " + std::to_string(a));
  const Lives lives = CollectLives(program);
  std::vector<BufferLives> buffers = Classify(program, lives);
  Placement placement;
  placement.offsets.resize(program.buffers.size());
  placement.device_size =
      Placer(program, options, lives, buffers, /*on_host=*/false).Run(placement.offsets);
  placement.host_size =
      Placer(program, options, lives, buffers, /*on_host=*/true).Run(placement.offsets);
  return placement;
}

Bytes PeakAllocated(const Program& program) {
  std::vector<bool> exists(program.buffers.size());
  Bytes now{0};
  Bytes peak{0};
  for (const Pass& pass : ConcatenatedPasses(program)) {
    for (const MemoryPoint& point : pass.body->points) {
      const Buffer& buffer = program.buffers[point.buffer.value];
      const bool is_alloc = point.kind != PointKind::kFree;
      if (buffer.on_host || exists[point.buffer.value] == is_alloc) {
        continue;
      }
      exists[point.buffer.value] = is_alloc;
      now += is_alloc ? buffer.size : Bytes(0) - buffer.size;
      peak = std::max(peak, now);
    }
  }
  return peak;
}

}  // namespace shardwright
