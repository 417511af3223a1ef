#include "traces/check.h"

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <map>
#include <tuple>

#include "core/json.h"
#include "topologies/mesh.h"
#include "traces/internal/chrome_layout.h"

namespace shardwright {
namespace {

constexpr std::uint32_t kNoSpan = std::numeric_limits<std::uint32_t>::max();

// Spans [first, end): one run of one body on one rank.
struct Run {
  std::size_t first = 0, end = 0;
};

// The time in which a collective ran on all ranks seen so far.
struct Window {
  SimTime start, end;
  Rank last_starter, first_finisher;
};
// Group, its first member, step, body, op.
using CollectiveKey =
    std::tuple<std::uint32_t, std::int64_t, std::uint32_t, BodyKind, std::uint32_t>;

class Checker {
 public:
  Checker(const Program& program, const Trace& trace) : program_(program), spans_(trace.spans) {}

  std::vector<std::string> Check() {
    for (std::size_t i = 0; i < spans_.size(); ++i) {
      if (spans_[i].op.value >= BodyOf(spans_[i]).size()) {
        Report(Where(i) + "no op has number " + std::to_string(spans_[i].op.value));
        return findings_;
      }
    }
    FindRuns();
    CheckSteps();
    for (std::size_t r = 0; r < runs_.size(); ++r) {
      const Span& head = spans_[runs_[r].first];
      const Span* before = r > 0 ? &spans_[runs_[r - 1].first] : nullptr;
      if (before == nullptr || before->rank != head.rank) {
        Forget();
      } else if (head.step > before->step + 1) {
        // What is carried over from the steps between is not known. Order and queues still hold.
        slots_.assign(program_.carry_slot_count, kNoSpan);
      }
      CheckRun(runs_[r]);
    }
    CheckWindows();
    return findings_;
  }

 private:
  void FindRuns();
  void CheckSteps();
  void CheckRun(const Run& run);
  void CheckOnce(const Run& run);
  void CheckTimes(std::size_t i);
  void CheckEdges(std::size_t i);
  void CheckQueues(std::size_t i);
  void AddWindow(std::size_t i);
  void CheckWindows();
  void Forget();
  // Reports when span `i` starts before `before` ends.
  void CheckAfter(std::size_t i, std::uint32_t before, const std::string& relation);

  void Report(std::string finding) {
    if (findings_.size() < kMostFindings) {
      findings_.push_back(std::move(finding));
    }
  }
  [[nodiscard]] const Body& BodyOf(const Span& span) const {
    return shardwright::BodyOf(program_, span.body);
  }
  [[nodiscard]] const OpShape& ShapeOf(std::size_t i) const {
    return program_.ShapeOf(BodyOf(spans_[i]).ops[spans_[i].op.value]);
  }
  [[nodiscard]] std::string Name(std::size_t i) const {
    return OpName(program_, BodyOf(spans_[i]).ops[spans_[i].op.value]);
  }
  [[nodiscard]] static std::string Where(const Span& span) {
    return "rank " + std::to_string(span.rank.value) + ", step " + std::to_string(span.step) + ": ";
  }
  [[nodiscard]] std::string Where(std::size_t i) const { return Where(spans_[i]); }

  const Program& program_;
  const std::vector<Span>& spans_;
  std::vector<std::string> findings_;
  std::vector<Run> runs_;
  // Of the rank being checked: the last span of each stream and communicator, what the carry slots
  // hold, the span of each op of the running body.
  std::array<std::uint32_t, kStreamCount> last_on_stream_{};
  std::vector<std::uint32_t> last_of_group_, slots_, span_of_op_;
  SimTime host_free_;
  std::map<CollectiveKey, Window> windows_;
};

void Checker::Forget() {
  last_on_stream_.fill(kNoSpan);
  last_of_group_.assign(program_.groups.size(), kNoSpan);
  slots_.assign(program_.carry_slot_count, kNoSpan);
  host_free_ = SimTime(std::numeric_limits<std::int64_t>::min());
}

void Checker::FindRuns() {
  for (std::size_t i = 0; i < spans_.size(); ++i) {
    const auto key = [](const Span& s) { return std::tuple(s.rank, s.step, s.body); };
    if (i == 0 || key(spans_[i]) != key(spans_[i - 1])) {
      runs_.push_back({i, i});
    }
    runs_.back().end = i + 1;
  }
}

// Each rank records the same bodies, in the order in which they run.
void Checker::CheckSteps() {
  using Recorded = std::vector<std::pair<std::uint32_t, BodyKind>>;
  std::map<Rank, Recorded> ranks;
  for (const Run& run : runs_) {
    const Span& head = spans_[run.first];
    const BodyKind first = program_.warmup.ops.empty() ? BodyKind::kStep : BodyKind::kWarmup;
    const BodyKind expected = head.step == 0 ? first : BodyKind::kStep;
    if (head.body != expected && !(head.step == 0 && head.body == BodyKind::kInit)) {
      Report(Where(head) + "has a body that does not run in this step");
    }
    Recorded& recorded = ranks[head.rank];
    const std::pair<std::uint32_t, BodyKind> entry = {head.step, head.body};
    if (!recorded.empty() && entry <= recorded.back()) {
      Report(Where(head) + "stands behind a later step or body, or twice");
    }
    recorded.push_back(entry);
  }
  for (const auto& [rank, recorded] : ranks) {
    if (recorded != ranks.begin()->second) {
      Report("rank " + std::to_string(rank.value) + ": other steps are recorded than on rank " +
             std::to_string(ranks.begin()->first.value));
    }
    if (!recorded.empty() && recorded.front().second == BodyKind::kInit &&
        (recorded.size() == 1 || recorded[1].first != 0)) {
      Report("rank " + std::to_string(rank.value) + ": init is recorded, but not the first step");
    }
  }
}

void Checker::CheckOnce(const Run& run) {
  const Body& body = BodyOf(spans_[run.first]);
  span_of_op_.assign(body.size(), kNoSpan);
  for (std::size_t i = run.first; i < run.end; ++i) {
    std::uint32_t& seen = span_of_op_[spans_[i].op.value];
    if (seen != kNoSpan) {
      Report(Where(i) + Name(i) + " runs twice");
    } else if (i > run.first && spans_[i].op < spans_[i - 1].op) {
      Report(Where(i) + Name(i) + " is issued before " + Name(i - 1) + " but stands behind it");
    }
    seen = static_cast<std::uint32_t>(i);
  }
  for (std::size_t op = 0; op < body.size(); ++op) {
    if (span_of_op_[op] == kNoSpan) {
      Report(Where(run.first) + OpName(program_, body.ops[op]) + " is missing");
    }
  }
}

void Checker::CheckRun(const Run& run) {
  CheckOnce(run);
  for (std::size_t i = run.first; i < run.end; ++i) {
    CheckTimes(i);
    CheckEdges(i);
    CheckQueues(i);
    AddWindow(i);
  }
  const Body& body = BodyOf(spans_[run.first]);
  for (std::size_t s = 0; s < body.carries.size(); ++s) {
    if (body.carries[s].valid()) {
      slots_[s] = span_of_op_[body.carries[s].value];
    }
  }
}

void Checker::CheckTimes(std::size_t i) {
  const Span& span = spans_[i];
  struct Order {
    SimTime earlier, later;
    const char* text;
  };
  const std::array<Order, 6> orders = {{
      {span.issue_begin, span.issued, "is issued before the host begins to issue it"},
      {span.issued, span.issue_end, "is issued after the host has issued all of it"},
      {span.issued, span.start, "starts before it is issued"},
      {span.arrival, span.start, "starts before it could"},
      {span.start, span.end, "ends before it starts"},
      {span.issue_end, span.end, "ends before the host has issued all of it"},
  }};
  for (const Order& order : orders) {
    if (order.earlier > order.later) {
      Report(Where(i) + Name(i) + ' ' + order.text);
    }
  }
}

void Checker::CheckAfter(std::size_t i, std::uint32_t before, const std::string& relation) {
  const SimTime early = spans_[before].end - spans_[i].start;
  if (early > SimTime(0)) {
    Report(Where(i) + Name(i) + " starts " + Format(ToSeconds(early)) + " before " + Name(before) +
           " ends, " + relation);
  }
}

void Checker::CheckEdges(std::size_t i) {
  for (const Edge edge : BodyOf(spans_[i]).EdgesOf(spans_[i].op)) {
    const std::uint32_t target = edge.is_carried() ? slots_[edge.slot()] : span_of_op_[edge.value];
    if (target != kNoSpan) {
      CheckAfter(
          i, target,
          edge.is_carried() ? "which it waits for from the body before" : "which it waits for");
    }
  }
}

void Checker::CheckQueues(std::size_t i) {
  const Span& span = spans_[i];
  const OpShape& shape = ShapeOf(i);
  const bool on_host = InfoOf(shape.code).runs_on_host;
  const Stream stream = on_host ? Stream::kHost : shape.stream;
  if (span.stream != stream) {
    Report(Where(i) + Name(i) + " runs on stream " + std::string(NameOf(span.stream)) +
           " and not on " + std::string(NameOf(stream)));
    return;
  }
  if (span.issue_begin < host_free_) {
    Report(Where(i) + Name(i) + " is issued " + Format(ToSeconds(host_free_ - span.issue_begin)) +
           " before the host is free");
  }
  host_free_ = std::max(host_free_, on_host ? span.end : span.issue_end);
  std::uint32_t& before = last_on_stream_[static_cast<std::size_t>(stream)];
  if (before != kNoSpan) {
    CheckAfter(i, before, "which is before it on stream " + std::string(NameOf(stream)));
  }
  before = static_cast<std::uint32_t>(i);
  if (InfoOf(shape.code).is_collective && shape.group.valid()) {
    std::uint32_t& collective = last_of_group_[shape.group.value];
    if (collective != kNoSpan && spans_[collective].stream != span.stream) {
      CheckAfter(i, collective,
                 "which is before it in group " + program_.groups[shape.group.value].name);
    }
    collective = static_cast<std::uint32_t>(i);
  }
}

void Checker::AddWindow(std::size_t i) {
  const Span& span = spans_[i];
  const OpShape& shape = ShapeOf(i);
  if (!InfoOf(shape.code).is_collective || !shape.group.valid()) {
    return;
  }
  const std::int64_t first_member =
      PlaceInGroup(program_.groups[shape.group.value], span.rank).base;
  const Window own = {span.start, span.end, span.rank, span.rank};
  const auto [found, is_new] = windows_.try_emplace(
      CollectiveKey{shape.group.value, first_member, span.step, span.body, span.op.value}, own);
  Window& window = found->second;
  if (span.start > window.start) {
    window.start = span.start;
    window.last_starter = span.rank;
  }
  if (span.end < window.end) {
    window.end = span.end;
    window.first_finisher = span.rank;
  }
}

void Checker::CheckWindows() {
  for (const auto& [key, window] : windows_) {
    if (window.start > window.end) {
      const Body& body = shardwright::BodyOf(program_, std::get<3>(key));
      Report("rank " + std::to_string(window.last_starter.value) + ", step " +
             std::to_string(std::get<2>(key)) + ": " +
             OpName(program_, body.ops[std::get<4>(key)]) + " starts " +
             Format(ToSeconds(window.start - window.end)) + " after it ends on rank " +
             std::to_string(window.first_finisher.value));
    }
  }
}

}  // namespace

std::vector<std::string> CheckTrace(const Program& program, const Trace& trace) {
  return Checker(program, trace).Check();
}

}  // namespace shardwright
