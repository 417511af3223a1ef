#pragma once

// What placement needs to know of each allocation: when it is first and last used, as clocks.

#include <cstdint>
#include <vector>

#include "schedule/happens_before.h"
#include "schedule/program.h"

namespace shardwright {

// One life of a buffer, from an alloc point to its free.
//
// In a program that Verify accepts, all uses of a life come after its first use: that one writes,
// or else rule 4 would break, and rules 4 and 5 put the others behind it. (Not so for zero-filled
// buffers.) So all uses of life A happen before all uses of life B exactly if
// B.before_birth.Covers(A.last).
struct Life {
  BufferId buffer;
  std::uint32_t pass = 0;        // of the alloc point; index into Lives::passes
  std::uint32_t free_pass = 0;   // kNeverFreed: none in the passes looked at
  std::uint32_t birth_pass = 0;  // of the first use
  std::int32_t birth = -1;       // host position in its body of the first use; -1: never used
  std::uint32_t last_use_pass = 0;
  std::int32_t last_use = -1;  // host position of the last use, in the pass of that use
  Stream birth_stream = Stream::kHost;
  Clock before_birth;  // clock of the first use without that use itself
  Clock last;          // per stream, the last use

  static constexpr std::uint32_t kNeverFreed = 0xffffffffu;
};

// All lives in init, warmup (if any), step, step.
struct Lives {
  std::vector<Pass> passes;
  std::vector<Life> lives;              // in order of their alloc points
  std::vector<bool> is_allocated_once;  // by buffer
  std::uint32_t first_step = 0;         // pass of the first `step`; the next is the last pass
};
[[nodiscard]] Lives CollectLives(const Program& program);

// How a buffer's lives lie in the passes, which decides with whom it can share bytes.
enum class Lifetime : std::uint8_t {
  kUnused,     // no op touches it: any bytes will do
  kExclusive,  // bytes of its own
  kInit,       // lives inside init
  kWarmup,     // lives inside warmup
  kStep,       // lives inside each step
  kCarried,    // allocated by each step, freed by the next
  kLate,       // allocated by warmup or, once, by the first step, and never freed
};

inline constexpr std::uint32_t kNoLife = 0xffffffffu;

// The lives of one buffer.
struct BufferLives {
  std::uint32_t before_steps = kNoLife;  // in init or warmup; the later one
  std::uint32_t first_step = kNoLife;
  std::uint32_t second_step = kNoLife;
  bool lives_from_init = false;  // init allocates it
  bool is_irregular = false;     // two lives in one pass
  Lifetime lifetime = Lifetime::kUnused;
};

// By buffer.
[[nodiscard]] std::vector<BufferLives> ClassifyBuffers(const Program& program, const Lives& all);

}  // namespace shardwright
