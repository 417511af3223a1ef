#include "traces/chrome_read.h"

#include <array>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <string_view>
#include <tuple>
#include <unordered_map>
#include <vector>

#include "core/error.h"
#include "core/json.h"
#include "core/ranges.h"
#include "traces/internal/chrome_events.h"
#include "traces/internal/chrome_layout.h"

namespace shardwright {
namespace {

using internal::ChromeEvent;
using internal::EventNumber;
using internal::kBodyNames;

// Below this many microseconds (50 days) a double holds each nanosecond.
constexpr double kMostMicroseconds = 4398046511104.0;

class Reader {
 public:
  Reader(const std::string& file, const Program& program) : path_(file), program_(program) {
    for (std::size_t kind = 0; kind < ops_.size(); ++kind) {
      const Body& body = BodyOf(program, static_cast<BodyKind>(kind));
      for (std::size_t i = 0; i < body.size(); ++i) {
        const std::string name = OpName(program, body.ops[i]);
        SW_CHECK(ops_[kind].emplace(name, OpId(i)).second, "two ops have the name " + name);
      }
    }
  }

  void Add(const ChromeEvent& event) {
    if (event.phase == "X" && !event.op.empty() && event.category != "wait") {
      AddSpan(event);
    } else if (event.phase == "C" && event.name == "memory") {
      AddSample(event);
    } else if (event.phase == "C" && event.name == "host memory") {
      AddHostBytes(event);
    }
  }

  Trace Finish() {
    const auto key = [](const Span& span) {
      return std::tuple(span.rank, span.step, span.body, span.op);
    };
    StableSort(trace_.spans, [&](const Span& a, const Span& b) { return key(a) < key(b); });
    return std::move(trace_);
  }

 private:
  struct Place {
    const ChromeEvent& event;
    bool in_args = false;
  };

  void AddSpan(const ChromeEvent& event);
  void AddSample(const ChromeEvent& event);
  void AddHostBytes(const ChromeEvent& event);
  void ReadBytes(const ChromeEvent& event, std::array<Bytes, kCategoryCount>& bytes) const;

  [[nodiscard]] Path PathOf(const ChromeEvent& event) const {
    return path_.Field("traceEvents").Index(event.index);
  }
  [[nodiscard]] Path PathOf(Place place, std::string_view key) const {
    const Path path = PathOf(place.event);
    return place.in_args ? path.Field("args").Field(key) : path.Field(key);
  }
  static const EventNumber* Find(Place place, std::string_view key) {
    const std::vector<EventNumber>& all = place.in_args ? place.event.args : place.event.numbers;
    const auto found = FindIn(all, key, &EventNumber::key);
    return found == all.end() ? nullptr : &*found;
  }
  [[nodiscard]] SimTime TimeAt(Place place, std::string_view key) const;
  [[nodiscard]] std::int64_t CountAt(Place place, std::string_view key, std::int64_t max) const;
  [[nodiscard]] Rank RankOf(const ChromeEvent& event) const {
    return Rank(static_cast<std::uint32_t>(CountAt({event, false}, "pid", UINT32_MAX - 1)));
  }

  Path path_;
  const Program& program_;
  std::array<std::unordered_map<std::string, OpId>, kBodyNames.size()> ops_;
  Trace trace_;
};

SimTime Reader::TimeAt(Place place, std::string_view key) const {
  const EventNumber* number = Find(place, key);
  if (number == nullptr) {
    throw InputError(PathOf(place, key).str(), "nothing", "a time in microseconds");
  }
  if (!(std::abs(number->value) < kMostMicroseconds)) {
    throw InputError(PathOf(place, key).str(), "a time beyond 50 days", "a time in microseconds");
  }
  return SimTime(std::llround(number->value * 1000.0) * internal::kPicosecondsPerNanosecond);
}

std::int64_t Reader::CountAt(Place place, std::string_view key, std::int64_t max) const {
  const EventNumber* number = Find(place, key);
  const std::string rule = "an integer in [0, " + std::to_string(max) + "]";
  if (number == nullptr) {
    throw InputError(PathOf(place, key).str(), "nothing", rule);
  }
  if (!number->is_integer || number->integer < 0 || number->integer > max) {
    throw InputError(PathOf(place, key).str(),
                     number->is_integer ? std::to_string(number->integer) : "another number", rule);
  }
  return number->integer;
}

void Reader::AddSpan(const ChromeEvent& event) {
  const Place outer = {event, false};
  const Place args = {event, true};
  const auto body = FindIn(kBodyNames, event.body);
  if (body == kBodyNames.end()) {
    throw InputError(PathOf(args, "body").str(), '"' + event.body + '"', "init, warmup or step");
  }
  const auto kind = static_cast<std::size_t>(body - kBodyNames.begin());
  const auto found = ops_[kind].find(event.op);
  if (found == ops_[kind].end()) {
    throw InputError(PathOf(args, "op").str(), '"' + event.op + '"',
                     "an op of the program; does the trace belong to this plan?");
  }
  Span span;
  span.body = static_cast<BodyKind>(kind);
  span.op = found->second;
  const OpShape& shape = program_.ShapeOf(BodyOf(program_, span.body).ops[span.op.value]);
  span.stream = InfoOf(shape.code).runs_on_host ? Stream::kHost : shape.stream;
  span.rank = RankOf(event);
  span.step = static_cast<std::uint32_t>(CountAt(args, "step", UINT32_MAX));
  span.issue_begin = TimeAt(args, "issue_begin_us");
  span.issued = TimeAt(args, "issued_us");
  span.issue_end = TimeAt(args, "issue_end_us");
  span.ready = TimeAt(args, "ready_us");
  span.arrival = TimeAt(args, "arrival_us");
  const SimTime begin = TimeAt(outer, "ts");
  span.start = span.stream == Stream::kHost ? TimeAt(args, "start_us") : begin;
  span.end = begin + TimeAt(outer, "dur");
  if (Find(args, "cpu_us") != nullptr) {
    span.cpu = TimeAt(args, "cpu_us");
  }
  trace_.spans.push_back(span);
}

// Categories that are not there are 0; the total shows whether one is there but not readable.
void Reader::ReadBytes(const ChromeEvent& event, std::array<Bytes, kCategoryCount>& bytes) const {
  const Place args = {event, true};
  std::int64_t total = 0;
  for (std::size_t c = 0; c < kCategoryCount; ++c) {
    const std::string_view name = NameOf(static_cast<Category>(c));
    const bool is_there = Find(args, name) != nullptr;
    bytes[c] = Bytes(is_there ? CountAt(args, name, JsonValue::kMaxCount) : 0);
    total += bytes[c].value;
  }
  const std::int64_t expected = CountAt(args, "total", JsonValue::kMaxCount);
  if (total != expected) {
    throw InputError(PathOf(args, "total").str(), std::to_string(expected),
                     "the sum of the categories, " + std::to_string(total));
  }
}

void Reader::AddSample(const ChromeEvent& event) {
  const Place outer = {event, false};
  const Place args = {event, true};
  MemorySample sample;
  sample.step = static_cast<std::uint32_t>(CountAt(outer, "step", UINT32_MAX));
  sample.rank = RankOf(event);
  sample.time = TimeAt(outer, "ts");
  ReadBytes(event, sample.device);
  if (Find(args, "reserved") != nullptr) {
    sample.reserved = Bytes(CountAt(args, "reserved", JsonValue::kMaxCount));
  }
  if (!trace_.memory.empty() && trace_.memory.back().rank == sample.rank) {
    sample.host = trace_.memory.back().host;  // unless the next event says that it changed
  }
  trace_.memory.push_back(sample);
}

// Follows the event of the device's memory at the same time.
void Reader::AddHostBytes(const ChromeEvent& event) {
  if (trace_.memory.empty() || trace_.memory.back().rank != RankOf(event)) {
    throw InputError(PathOf(event).str(), "\"host memory\" alone",
                     "\"memory\" of the same rank before it");
  }
  ReadBytes(event, trace_.memory.back().host);
}

}  // namespace

Trace ReadChromeTrace(const std::string& file, const Program& program) {
  Reader reader(file, program);
  internal::ForEachEvent(file, [&reader](const ChromeEvent& event) { reader.Add(event); });
  return reader.Finish();
}

TraceHeader ReadTraceHeader(const std::string& file) {
  const internal::ChromeHeader raw = internal::ReadHeader(file);
  TraceHeader header{raw.source, raw.plan, std::nullopt};
  if (raw.step_time_us) {
    if (!(*raw.step_time_us > 0 && *raw.step_time_us < kMostMicroseconds)) {
      throw InputError(Path(file).Field("shardwright").Field("step_time_us").str(),
                       "a time that no step has", "microseconds, more than 0, below 50 days");
    }
    header.step_time = SimTime(std::llround(*raw.step_time_us * 1e6));
  }
  return header;
}

}  // namespace shardwright
