// Traces without a device: the host's ops are the work, and gloo's threads are the network.

#include <cstdint>
#include <deque>
#include <map>
#include <set>
#include <string_view>
#include <tuple>

#include "core/ranges.h"
#include "traces/internal/raw_recording.h"

namespace shardwright::internal {
namespace {

constexpr std::string_view kGloo = "gloo:";

// An op that does something, not a frame around others ("AddmmBackward0").
bool IsWork(std::string_view name) {
  return name.find("::") != std::string_view::npos && !name.starts_with("autograd::");
}

// gloo reduces and scatters by an all-reduce (torch 2.13), so a call is done by either.
bool Fits(OpCode call, OpCode done) {
  return call == done || (call == OpCode::kReduceScatter && done == OpCode::kAllReduce);
}

// Calls and what gloo did, each in order: a call's work is the first that fits and begins later.
void JoinCalls(const RawRecording& raw, std::vector<RawSpan> gloo, std::vector<RawWork>& work) {
  const std::vector<std::string>& names = raw.names.names();
  const auto by_begin = [](const auto& a, const auto& b) { return a.begin < b.begin; };
  SortAll(gloo, by_begin);
  std::vector<RawCall> calls = raw.calls;
  SortAll(calls, [&](const RawCall& a, const RawCall& b) { return by_begin(a.span, b.span); });
  // What was done, by kind. Calls come in order, so that each piece is looked at once.
  std::map<OpCode, std::deque<RawSpan>> done;
  for (const RawSpan& span : gloo) {
    if (const auto code = CollectiveOfName(names[span.name])) {
      done[*code].push_back(span);
    }
  }
  for (const RawCall& call : calls) {
    RawWork row;
    row.kind = ActivityKind::kCollective;
    row.collective = call.collective;
    row.bytes = call.bytes;
    row.span = call.span;
    std::deque<RawSpan>* first = nullptr;
    for (auto& [code, spans] : done) {
      if (!Fits(call.collective, code)) {
        continue;
      }
      while (!spans.empty() && spans.front().begin < call.span.begin) {
        spans.pop_front();
      }
      if (!spans.empty() && (first == nullptr || spans.front().begin < first->front().begin)) {
        first = &spans;
      }
    }
    if (first != nullptr) {
      const RawSpan& span = first->front();
      row.span = {span.begin, span.end, call.span.name, span.thread};
      first->pop_front();
    }
    // The place in training is that of the call.
    row.correlation = call.span.begin;
    work.push_back(row);
  }
}

}  // namespace

std::vector<RawWork> WorkOfHost(const RawRecording& raw) {
  const std::vector<std::string>& names = raw.names.names();
  std::set<std::uint32_t> threads;  // that run the model
  for (const RawSpan& range : raw.ranges) {
    threads.insert(range.thread);
  }
  std::vector<RawSpan> host = raw.host;
  SortAll(host, [](const RawSpan& a, const RawSpan& b) {
    return std::tie(a.thread, a.begin, b.end) < std::tie(b.thread, b.begin, a.end);
  });
  std::vector<RawWork> work;
  std::vector<RawSpan> gloo;
  std::uint32_t thread = kNoSubject;
  std::int64_t covered = INT64_MIN;  // end of the last outermost piece of work of the thread
  for (const RawSpan& span : host) {
    if (span.thread != thread) {
      thread = span.thread;
      covered = INT64_MIN;
    }
    const std::string_view name = names[span.name];
    if (span.begin < covered || !(IsWork(name) || name.starts_with(kGloo))) {
      continue;
    }
    covered = span.end;
    if (name.starts_with(kGloo)) {
      gloo.push_back(span);
    } else if (!name.starts_with("c10d::") && (threads.empty() || threads.contains(thread))) {
      RawWork row;
      row.span = span;
      row.correlation = span.begin;
      work.push_back(row);
    }
  }
  JoinCalls(raw, std::move(gloo), work);
  return work;
}

}  // namespace shardwright::internal
