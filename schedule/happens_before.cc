#include "schedule/happens_before.h"

#include <algorithm>

namespace shardwright {

ClockWalk::ClockWalk(const Program& program)
    : program_(program),
      clocks_(std::max({program.init.size(), program.warmup.size(), program.step.size()})),
      slots_(program.carry_slot_count) {}

void ClockWalk::BeginBody(const Body& body) {
  body_ = &body;
}

const Clock& ClockWalk::Issue(OpId op) {
  const Body& body = *body_;
  const OpShape& shape = program_.ShapeOf(body.ops[op.value]);
  Clock& last = last_[static_cast<std::size_t>(shape.stream)];
  Clock clock = last;
  // Everything issued after a host op comes after it. A stream that counts the host's last op has
  // that op's whole clock already.
  const Clock& host = last_[static_cast<std::size_t>(Stream::kHost)];
  if (clock.Of(Stream::kHost) < host.Of(Stream::kHost)) {
    clock.Join(host);
  }
  for (const Edge edge : body.EdgesOf(op)) {
    clock.Join(edge.is_carried() ? slots_[edge.slot()] : clocks_[edge.value]);
  }
  ++clock.Of(shape.stream);
  last = clock;
  clocks_[op.value] = clock;
  return clocks_[op.value];
}

void ClockWalk::EndBody() {
  for (std::size_t slot = 0; slot < body_->carries.size(); ++slot) {
    if (body_->carries[slot].valid()) {
      slots_[slot] = clocks_[body_->carries[slot].value];
    }
  }
  body_ = nullptr;
}

std::array<NamedBody, 3> BodiesOf(const Program& program) {
  return {{{&program.init, "init"}, {&program.warmup, "warmup"}, {&program.step, "step"}}};
}

std::vector<Pass> ConcatenatedPasses(const Program& program) {
  std::vector<Pass> passes = {{&program.init, "init"}};
  const bool has_warmup = program.warmup.size() > 0 || !program.warmup.points.empty();
  if (has_warmup) {
    passes.push_back({&program.warmup, "warmup"});
  }
  passes.push_back({&program.step, "step 1"});
  passes.push_back({&program.step, "step 2"});
  passes.push_back({&program.step, "step 3"});
  return passes;
}

}  // namespace shardwright
