#pragma once

// The happens-before order of docs/execution_model.md section 3, as vector clocks with one entry
// per stream. All ops of a stream are ordered, so an op knows of a stream only how many of its ops
// come before: that number is all that any question about order needs.

#include <array>
#include <cstddef>
#include <cstdint>
#include <vector>

#include "schedule/program.h"

namespace shardwright {

// count[s]: how many ops of stream s happen before an op. The clock of an op counts the op itself.
struct Clock {
  std::array<std::int32_t, kStreamCount> count{};

  [[nodiscard]] std::int32_t Of(Stream s) const { return count[static_cast<std::size_t>(s)]; }
  std::int32_t& Of(Stream s) { return count[static_cast<std::size_t>(s)]; }

  // Entry-wise maximum: what is known after both.
  void Join(const Clock& other) {
    for (std::size_t s = 0; s < kStreamCount; ++s) {
      count[s] = count[s] < other.count[s] ? other.count[s] : count[s];
    }
  }
  // Does everything in `other` come before? Entry-wise other <= this.
  [[nodiscard]] bool Covers(const Clock& other) const {
    std::int32_t least = 0;
    for (std::size_t s = 0; s < kStreamCount; ++s) {
      const std::int32_t spare = count[s] - other.count[s];
      least = spare < least ? spare : least;
    }
    return least >= 0;
  }

  bool operator==(const Clock&) const = default;
};

// Walks bodies one after the other, each op by op in host order, and tells each op's clock.
// Requires ids in range (rule 1 of section 3). O((ops + edges) * streams); allocates in the
// constructor only.
class ClockWalk {
 public:
  explicit ClockWalk(const Program& program);

  void BeginBody(const Body& body);
  // Must be called for op 0, 1, 2, ... of the body. The reference lives until EndBody.
  const Clock& Issue(OpId op);
  void EndBody();

  // What comes before anything the host gives to `stream` from now on, whatever its edges.
  [[nodiscard]] Clock Next(Stream stream) const {
    Clock clock = last_[static_cast<std::size_t>(stream)];
    clock.Join(last_[static_cast<std::size_t>(Stream::kHost)]);
    return clock;
  }

 private:
  const Program& program_;
  const Body* body_ = nullptr;
  std::array<Clock, kStreamCount> last_;  // clock of the last op of each stream
  std::vector<Clock> clocks_;             // of the ops of the current body
  std::vector<Clock> slots_;              // of the op that set each carry slot; zero = none yet
};

struct NamedBody {
  const Body* body = nullptr;
  const char* name = "";  // "init", "warmup", "step"
};
[[nodiscard]] std::array<NamedBody, 3> BodiesOf(const Program& program);

// One pass over a body in the concatenation init, warmup, step, step, step, which covers all that
// a step can hand to the next ones.
struct Pass {
  const Body* body = nullptr;
  const char* name = "";  // "init", "warmup", "step 1", "step 2", "step 3"
};
// Leaves out an empty warm-up.
[[nodiscard]] std::vector<Pass> ConcatenatedPasses(const Program& program);

}  // namespace shardwright
