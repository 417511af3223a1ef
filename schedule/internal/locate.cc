#include "schedule/internal/locate.h"

#include "core/error.h"

namespace shardwright {
namespace {

// Points before `op`, or at the end of the body.
std::span<const MemoryPoint> PointsAt(const Body& body, OpId op) {
  return op.value < body.size() ? body.PointsBefore(op) : body.PointsAtEnd();
}

}  // namespace

std::string NameAt(const Program& program, std::span<const Pass> passes, Position position) {
  const Pass& pass = passes[position.pass];
  const std::string name = std::string(pass.name) + ": ";
  return position.op.value < pass.body->size()
             ? name + OpName(program, pass.body->ops[position.op.value])
             : name + "end";
}

Position FindInStream(const Program& program, std::span<const Pass> passes, Stream stream,
                      std::int32_t number) {
  std::int32_t seen = 0;
  for (std::size_t p = 0; p < passes.size(); ++p) {
    const std::vector<Op>& ops = passes[p].body->ops;
    for (std::size_t i = 0; i < ops.size(); ++i) {
      if (program.ShapeOf(ops[i]).stream == stream && ++seen == number) {
        return {p, OpId(i)};
      }
    }
  }
  SW_CHECK(false, "stream has fewer than " + std::to_string(number) + " ops");
}

std::optional<Position> FindPointBefore(std::span<const Pass> passes, BufferId buffer, bool is_free,
                                        Position here, const MemoryPoint* self) {
  std::optional<Position> found;
  for (std::size_t p = 0; p <= here.pass; ++p) {
    const Body& body = *passes[p].body;
    const std::size_t last_op = p == here.pass ? here.op.value : body.size();
    for (std::size_t i = 0; i <= last_op; ++i) {
      for (const MemoryPoint& point : PointsAt(body, OpId(i))) {
        if (p == here.pass && &point == self) {
          return found;
        }
        if (point.buffer == buffer && (point.kind == PointKind::kFree) == is_free) {
          found = Position{p, OpId(i)};
        }
      }
    }
  }
  return found;
}

std::optional<Position> FindFirstAlloc(std::span<const Pass> passes, BufferId buffer) {
  for (std::size_t p = 0; p < passes.size(); ++p) {
    const Body& body = *passes[p].body;
    for (std::size_t i = 0; i <= body.size(); ++i) {
      for (const MemoryPoint& point : PointsAt(body, OpId(i))) {
        if (point.buffer == buffer && point.kind != PointKind::kFree) {
          return Position{p, OpId(i)};
        }
      }
    }
  }
  return std::nullopt;
}

}  // namespace shardwright
