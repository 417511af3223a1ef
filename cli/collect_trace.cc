#include "cli/collect_trace.h"

#include <cstring>
#include <type_traits>
#include <vector>

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
  for (const std::vector<std::byte>& part :
       CollectBytes(processes, MessagePassing::kAll, {"trace"}, std::move(bytes))) {
    const std::size_t before = all.size();
    all.resize(before + part.size() / sizeof(Row));
    if (!part.empty()) {
      std::memcpy(all.data() + before, part.data(), part.size());
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
  }
  if (session.is_on_gpu()) {
    DeriveWaits(program, trace);
  }
  return trace;
}

}  // namespace shardwright
