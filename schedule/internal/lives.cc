#include "schedule/internal/lives.h"

#include <utility>

#include "core/threads.h"

namespace shardwright {
namespace {

class LifeCollector {
 public:
  explicit LifeCollector(const Program& program)
      : program_(program), walk_(program), current_(program.buffers.size(), kNoLife) {
    result_.passes = ConcatenatedPasses(program);
    result_.passes.pop_back();
    result_.first_step = static_cast<std::uint32_t>(result_.passes.size() - 2);
    result_.is_allocated_once.resize(program.buffers.size());
  }

  Lives Run() {
    std::size_t points = 0;
    for (const Pass& pass : result_.passes) {
      points += pass.body->points.size();
    }
    result_.lives.reserve(points);  // growing would hold them twice; what is not used costs nothing
    for (pass_ = 0; pass_ < result_.passes.size(); ++pass_) {
      const Body& body = *result_.passes[pass_].body;
      walk_.BeginBody(body);
      for (std::size_t i = 0; i < body.size(); ++i) {
        ThrowIfStopped();
        for (const MemoryPoint& point : body.PointsBefore(OpId(i))) {
          Visit(point);
        }
        const Clock& clock = walk_.Issue(OpId(i));
        const Stream stream = program_.ShapeOf(body.ops[i]).stream;
        for (const Access& access : body.AccessesOf(OpId(i))) {
          const std::uint32_t current = current_[access.buffer.value];
          if (current != kNoLife) {
            Use(result_.lives[current], static_cast<std::int32_t>(i), stream, clock);
          }
        }
      }
      for (const MemoryPoint& point : body.PointsAtEnd()) {
        Visit(point);
      }
      walk_.EndBody();
    }
    return std::move(result_);
  }

 private:
  void Visit(const MemoryPoint& point) {
    std::uint32_t& current = current_[point.buffer.value];
    if (point.kind == PointKind::kFree) {
      if (current != kNoLife) {
        result_.lives[current].free_pass = static_cast<std::uint32_t>(pass_);
      }
      current = kNoLife;
      return;
    }
    if (point.kind == PointKind::kAllocOnce) {
      result_.is_allocated_once[point.buffer.value] = true;
      if (current != kNoLife) {
        return;
      }
    }
    current = static_cast<std::uint32_t>(result_.lives.size());
    Life& life = result_.lives.emplace_back();
    life.buffer = point.buffer;
    life.pass = static_cast<std::uint32_t>(pass_);
    life.free_pass = Life::kNeverFreed;
  }

  void Use(Life& life, std::int32_t position, Stream stream, const Clock& clock) const {
    if (life.birth < 0) {
      life.birth_pass = static_cast<std::uint32_t>(pass_);
      life.birth = position;
      life.birth_stream = stream;
      life.before_birth = clock;
      --life.before_birth.Of(stream);
    }
    life.last.Of(stream) = clock.Of(stream);
    life.last_use_pass = static_cast<std::uint32_t>(pass_);
    life.last_use = position;
  }

  const Program& program_;
  ClockWalk walk_;
  std::size_t pass_ = 0;
  std::vector<std::uint32_t> current_;  // by buffer, its life now
  Lives result_;
};

bool IsLate(const Lives& all, const Life& life) {
  return life.pass > 0 && life.birth >= 0 && life.birth_pass <= all.first_step &&
         life.free_pass == Life::kNeverFreed;
}

// For a buffer that no step allocates.
Lifetime LifetimeBeforeSteps(const Lives& all, const BufferLives& buffer) {
  const Life& life = all.lives[buffer.before_steps];
  if (life.pass > 0 && buffer.lives_from_init) {
    return Lifetime::kExclusive;
  }
  if (life.free_pass == life.pass) {
    return life.birth < 0   ? Lifetime::kUnused
           : life.pass == 0 ? Lifetime::kInit
                            : Lifetime::kWarmup;
  }
  return IsLate(all, life) ? Lifetime::kLate : Lifetime::kExclusive;
}

Lifetime LifetimeOf(const Program& program, const Lives& all, const BufferLives& buffer,
                    std::size_t b) {
  if (buffer.before_steps == kNoLife && buffer.first_step == kNoLife) {
    return Lifetime::kUnused;
  }
  if (buffer.is_irregular || program.buffers[b].zero_filled) {
    return Lifetime::kExclusive;
  }
  if (all.is_allocated_once[b]) {
    const bool is_only_life = (buffer.before_steps == kNoLife) != (buffer.first_step == kNoLife) &&
                              buffer.second_step == kNoLife && !buffer.lives_from_init;
    const Life& life =
        all.lives[buffer.first_step == kNoLife ? buffer.before_steps : buffer.first_step];
    return is_only_life && IsLate(all, life) ? Lifetime::kLate : Lifetime::kExclusive;
  }
  if (buffer.first_step == kNoLife) {
    return LifetimeBeforeSteps(all, buffer);
  }
  const Life& life = all.lives[buffer.first_step];
  if (life.free_pass == life.pass) {
    return buffer.before_steps != kNoLife ? Lifetime::kExclusive
           : life.birth < 0               ? Lifetime::kUnused
                                          : Lifetime::kStep;
  }
  // A carried life must be used first by the step that allocates it, as its bytes are kept from
  // there on.
  const bool is_born_here = life.birth >= 0 && life.birth_pass == life.pass;
  return is_born_here && life.free_pass == life.pass + 1 ? Lifetime::kCarried
                                                         : Lifetime::kExclusive;
}

}  // namespace

Lives CollectLives(const Program& program) {
  return LifeCollector(program).Run();
}

std::vector<BufferLives> ClassifyBuffers(const Program& program, const Lives& all) {
  std::vector<BufferLives> buffers(program.buffers.size());
  for (std::uint32_t i = 0; i < all.lives.size(); ++i) {
    ThrowIfStopped();
    const Life& life = all.lives[i];
    BufferLives& buffer = buffers[life.buffer.value];
    std::uint32_t& slot = life.pass < all.first_step    ? buffer.before_steps
                          : life.pass == all.first_step ? buffer.first_step
                                                        : buffer.second_step;
    const bool begins_anew = slot == kNoLife || all.lives[slot].pass != life.pass;
    buffer.is_irregular = buffer.is_irregular || !begins_anew;
    buffer.lives_from_init = buffer.lives_from_init || life.pass == 0;
    slot = i;
  }
  for (std::size_t b = 0; b < buffers.size(); ++b) {
    buffers[b].lifetime = LifetimeOf(program, all, buffers[b], b);
  }
  return buffers;
}

}  // namespace shardwright
