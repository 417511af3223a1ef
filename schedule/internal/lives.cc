#include "schedule/internal/lives.h"

#include <utility>

namespace shardwright {
namespace {

constexpr std::uint32_t kNoLife = 0xffffffffu;

class LifeCollector {
 public:
  explicit LifeCollector(const Program& program)
      : program_(program), walk_(program), current_(program.buffers.size(), kNoLife) {
    result_.passes = ConcatenatedPasses(program);
    result_.passes.pop_back();
    result_.first_step = static_cast<std::uint32_t>(result_.passes.size() - 2);
    result_.is_allocated_once.resize(program.buffers.size());
    result_.lives.reserve(program.init.points.size() / 2 + program.warmup.points.size() / 2 +
                          program.step.points.size());
  }

  Lives Run() {
    for (pass_ = 0; pass_ < result_.passes.size(); ++pass_) {
      const Body& body = *result_.passes[pass_].body;
      walk_.BeginBody(body);
      for (std::size_t i = 0; i < body.size(); ++i) {
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
    life.last_use = position;
  }

  const Program& program_;
  ClockWalk walk_;
  std::size_t pass_ = 0;
  std::vector<std::uint32_t> current_;  // by buffer, its life now
  Lives result_;
};

}  // namespace

Lives CollectLives(const Program& program) {
  return LifeCollector(program).Run();
}

}  // namespace shardwright
