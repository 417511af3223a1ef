#include "cli/collect_trace.h"

#include <array>
#include <cstddef>
#include <cstring>
#include <string>
#include <type_traits>
#include <vector>

#include "core/error.h"
#include "executor/host/together.h"
#include "traces/waits.h"

namespace shardwright {
namespace {

template <class Row>
void Collect(MessagePassing& processes, const std::vector<Row>& mine, std::vector<Row>& all) {
  static_assert(std::is_trivially_copyable_v<Row>);
  std::vector<std::byte> bytes(mine.size() * sizeof(Row));
  if (!bytes.empty()) {
    std::memcpy(bytes.data(), mine.data(), bytes.size());
  }
  const auto parts = CollectBytes(processes, MessagePassing::kAll, {"trace"}, std::move(bytes));
  for (std::size_t r = 0; r < parts.size(); ++r) {
    const std::vector<std::byte>& part = parts[r];
    const std::size_t before = all.size();
    if (part.size() % sizeof(Row) != 0) {
      throw RunError("trace: rank " + std::to_string(r) + " sent " + std::to_string(part.size()) +
                     " bytes, no whole number of rows");
    }
    all.resize(before + part.size() / sizeof(Row));
    if (!part.empty()) {
      std::memcpy(all.data() + before, part.data(), part.size());
    }
    for (std::size_t i = before; i < all.size(); ++i) {
      if (all[i].rank.value != r) {
        throw RunError("trace: rank " + std::to_string(r) + " sent a row of rank " +
                       std::to_string(all[i].rank.value));
      }
    }
  }
}

// What writers of traces rely on, before they look an op up.
void CheckOps(const Program& program, const Trace& trace) {
  const std::array<const Body*, 3> bodies = {&program.init, &program.warmup, &program.step};
  for (const Span& span : trace.spans) {
    const auto body = static_cast<std::size_t>(span.body);
    if (body >= bodies.size() || span.op.value >= bodies[body]->ops.size() ||
        static_cast<std::size_t>(span.stream) >= kStreamCount) {
      throw RunError("trace: rank " + std::to_string(span.rank.value) + " sent a row of op " +
                     std::to_string(span.op.value) + ", which the plan does not have");
    }
  }
}

}  // namespace

Trace CollectTrace(MessagePassing& processes, const Trace& mine) {
  Trace all;
  Collect(processes, mine.spans, all.spans);
  Collect(processes, mine.memory, all.memory);
  return all;
}

Trace TakeWholeTrace(RunSession& session, const Program& program, MessagePassing* processes) {
  Trace trace = session.TakeTrace();
  if (processes != nullptr) {
    trace = CollectTrace(*processes, trace);
    CheckOps(program, trace);
  }
  if (session.is_on_gpu()) {
    DeriveWaits(program, trace);
  }
  return trace;
}

}  // namespace shardwright
