// The text of traces: one written by hand, and the rules of docs/trace_format.md as properties of
// simulated traces, read with another JSON parser.

#include "traces/chrome_write.h"

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <map>
#include <random>
#include <set>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include <doctest/doctest.h>
#include <nlohmann/json.hpp>

#include "core/json.h"
#include "tests/traces/simulated_traces.h"
#include "tests/traces/tiny_program.h"

namespace shardwright {
namespace {

using Json = nlohmann::json;
using testing::DrawTrace;
using testing::SimulatedTrace;
using testing::TinyProgram;
using testing::TinyTrace;

// A slice with times in nanoseconds (or microseconds for the other profile).
struct Slice {
  std::int64_t begin = 0, end = 0;
  Json event;
};
using TrackKey = std::pair<std::int64_t, std::int64_t>;  // pid, tid

std::int64_t Ticks(const Json& microseconds, double per_microsecond) {
  return std::llround(microseconds.get<double>() * per_microsecond);
}

// Slices by track, by time; those that begin together in the order of the file.
std::map<TrackKey, std::vector<Slice>> SlicesOf(const Json& events, double per_microsecond) {
  std::map<TrackKey, std::vector<Slice>> tracks;
  for (const Json& event : events) {
    if (event["ph"] == "X") {
      const std::int64_t begin = Ticks(event["ts"], per_microsecond);
      tracks[{event["pid"], event["tid"]}].push_back(
          {begin, begin + Ticks(event["dur"], per_microsecond), event});
    }
  }
  for (auto& [key, slices] : tracks) {
    std::stable_sort(slices.begin(), slices.end(),
                     [](const Slice& a, const Slice& b) { return a.begin < b.begin; });
  }
  return tracks;
}

// Whether each slice lies inside all slices that are open when it begins.
bool Nests(const std::vector<Slice>& slices) {
  std::vector<std::int64_t> open;
  for (const Slice& slice : slices) {
    while (!open.empty() && open.back() <= slice.begin) {
      open.pop_back();
    }
    if (slice.end < slice.begin || (!open.empty() && slice.end > open.back())) {
      return false;
    }
    open.push_back(slice.end);
  }
  return true;
}

// Whether no two slices share more than a moment.
bool IsFlat(const std::vector<Slice>& slices) {
  for (std::size_t i = 1; i < slices.size(); ++i) {
    if (slices[i].begin < slices[i - 1].end) {
      return false;
    }
  }
  return true;
}

Trace OneStepOfOneRank() {
  Trace trace = TinyTrace();
  std::erase_if(trace.spans, [](const Span& s) { return s.rank != Rank(0) || s.step != 0; });
  return trace;
}

TEST_CASE("A small trace is exactly the text written by hand") {
  Trace trace = OneStepOfOneRank();
  // Rounding to nanoseconds, halves up: 15.000499 us is 15.000, 18.0000005 us is 18.001.
  trace.spans[1].end = trace.spans[2].start = trace.spans[2].arrival = SimTime(15'000'499);
  trace.spans[2].end = trace.spans[3].ready = SimTime(18'000'500);
  trace.spans[3].arrival = trace.spans[3].start = SimTime(18'000'500);
  MemorySample sample;
  sample.time = SimTime(10'000'000);
  sample.device[static_cast<std::size_t>(Category::kParameterShard)] = Bytes(1000);
  sample.device[static_cast<std::size_t>(Category::kAllGather)] = Bytes(24);
  sample.host[static_cast<std::size_t>(Category::kInput)] = Bytes(7);
  sample.reserved = Bytes(2097152);
  trace.memory.push_back(sample);
  CHECK(ChromeTraceText(TinyProgram("layer", "layer.linear"), trace, {}) ==
        ReadTextFile("traces/tiny_trace.json"));
}

TEST_CASE("Hostile names stay valid JSON and come back as they were") {
  const std::string unit = "a\"b\\c\n\x01]}</script>\xc3\xa4";
  const std::string text = ChromeTraceText(TinyProgram(unit, "x\ty\"]"), TinyTrace(), {});
  const Json trace = Json::parse(text);
  std::set<std::string> units, ops;
  for (const Json& event : trace["traceEvents"]) {
    if (event["ph"] == "X" && event["args"].contains("op")) {
      ops.insert(event["args"]["op"].get<std::string>());
      if (event["args"].contains("unit")) {
        units.insert(event["args"]["unit"].get<std::string>());
      }
    }
  }
  CHECK(units == std::set<std::string>{unit});
  CHECK(ops.contains("mb0.x\ty\"].fwd"));
  CHECK(ops.contains("mb0." + unit + ".bwd.reduce_scatter"));
  // One event per line, whatever the names: 2 lines of header, 1 at the end.
  CHECK(std::count(text.begin(), text.end(), '\n') ==
        static_cast<std::ptrdiff_t>(trace["traceEvents"].size()) + 3);
  // A byte that is not UTF-8 becomes U+FFFD.
  const Json replaced =
      Json::parse(ChromeTraceText(TinyProgram("layer", "\xff"), OneStepOfOneRank(), {}));
  CHECK(replaced.dump().find("mb0.\xef\xbf\xbd.fwd") != std::string::npos);
}

TEST_CASE("An empty trace is valid") {
  const Json trace = Json::parse(ChromeTraceText(TinyProgram("a", "b"), Trace(), {}));
  CHECK(trace["traceEvents"].empty());
}

// The op whose slice holds `time`, or empty.
std::string OpAt(const std::vector<Slice>& slices, std::int64_t time) {
  auto slice = std::upper_bound(slices.begin(), slices.end(), time,
                                [](std::int64_t t, const Slice& s) { return t < s.begin; });
  while (slice != slices.begin()) {
    --slice;
    if (time < slice->end && slice->event["args"].contains("op")) {
      return slice->event["args"]["op"];
    }
  }
  return "";
}

// Flows start and end inside slices, and go forward in time. Returns the pairs of ops they join.
std::multiset<std::pair<std::string, std::string>> CheckFlows(
    const Json& events, const std::map<TrackKey, std::vector<Slice>>& tracks) {
  struct Ends {
    std::vector<std::string> from, to;
    std::int64_t begin = 0, end = 0;
  };
  std::map<std::int64_t, Ends> flows;
  bool is_uniform = true;
  for (const Json& event : events) {
    if (event["ph"] != "s" && event["ph"] != "f") {
      continue;
    }
    const std::int64_t time = Ticks(event["ts"], 1000);
    const std::string op = OpAt(tracks.at({event["pid"], event["tid"]}), time);
    is_uniform = is_uniform && event["cat"] == "dependency" && event["name"] == "dependency" &&
                 (event["ph"] == "s" || event["bp"] == "e");
    Ends& ends = flows[event["id"]];
    if (event["ph"] == "s") {
      ends.from.push_back(op);
      ends.begin = time;
    } else {
      ends.to.push_back(op);
      ends.end = time;
    }
  }
  CHECK(is_uniform);
  std::multiset<std::pair<std::string, std::string>> pairs;
  for (const auto& flow : flows) {
    const Ends& ends = flow.second;
    CAPTURE(flow.first);
    REQUIRE(ends.from.size() == 1);
    REQUIRE(ends.to.size() == 1);
    CHECK(!ends.from[0].empty());
    CHECK(!ends.to[0].empty());
    CHECK(ends.begin <= ends.end);
    pairs.insert({ends.from[0], ends.to[0]});
  }
  return pairs;
}

// The arrows that the program asks for, without those that start or end at a stream wait.
std::set<std::pair<std::string, std::string>> DirectFlows(const SimulatedTrace& simulated) {
  const Program& program = simulated.program;
  std::set<std::pair<std::string, std::string>> pairs;
  const auto is_visible = [&](const Span& span) {
    const std::int64_t begin =
        span.stream == Stream::kHost ? span.issue_begin.value : span.start.value;
    return (begin + 500) / 1000 < (span.end.value + 500) / 1000;
  };
  std::map<std::tuple<Rank, std::uint32_t, BodyKind, OpId>, Span> spans;
  for (const Span& span : simulated.trace.spans) {
    const Body& body = span.body == BodyKind::kInit     ? program.init
                       : span.body == BodyKind::kWarmup ? program.warmup
                                                        : program.step;
    spans[{span.rank, span.step, span.body, span.op}] = span;
    for (const Edge edge : body.EdgesOf(span.op)) {
      if (edge.is_carried()) {
        continue;
      }
      const Span& from = spans.at({span.rank, span.step, span.body, edge.op()});
      if (from.stream != span.stream && is_visible(from) && is_visible(span)) {
        pairs.insert(
            {OpName(program, body.ops[from.op.value]), OpName(program, body.ops[span.op.value])});
      }
    }
  }
  return pairs;
}

// Time stamps of each counter ascend, and its parts make its total.
void CheckCounters(const Json& events) {
  std::map<std::pair<std::int64_t, std::string>, double> last;
  bool ascends = true;
  bool adds_up = true;
  for (const Json& event : events) {
    if (event["ph"] != "C") {
      continue;
    }
    const auto time = event["ts"].get<double>();
    double& before = last.try_emplace({event["pid"], event["name"]}, time).first->second;
    ascends = ascends && before <= time;
    before = time;
    std::int64_t sum = 0;
    for (const auto& [key, value] : event["args"].items()) {
      adds_up = adds_up && value.is_number_integer();
      sum += key == "total" || key == "reserved" ? 0 : value.get<std::int64_t>();
    }
    adds_up = adds_up && sum == event["args"]["total"].get<std::int64_t>();
  }
  CHECK(ascends);
  CHECK(adds_up);
}

TEST_CASE("Simulated traces: slices nest, flows bind, counters ascend, waits fill the gaps") {
  const unsigned seed = 11;
  CAPTURE(seed);
  std::mt19937 random(seed);
  for (int trial = 0; trial < 40; ++trial) {
    const SimulatedTrace simulated = DrawTrace(random, trial % 4 == 0);
    CAPTURE(trial);
    CAPTURE(simulated.description);
    const Json trace = Json::parse(ChromeTraceText(simulated.program, simulated.trace, {}));
    const Json& events = trace["traceEvents"];
    const auto tracks = SlicesOf(events, 1000);
    std::size_t op_slices = 0;
    for (const auto& track : tracks) {
      const TrackKey key = track.first;
      const std::vector<Slice>& slices = track.second;
      CAPTURE(key.second);
      CHECK(Nests(slices));
      CHECK((key.second == 100 || IsFlat(slices)));
      std::int64_t free = 0;
      std::int64_t last_step = 0;
      int wrong_waits = 0;
      for (const Slice& slice : slices) {
        const Json& args = slice.event["args"];
        if (slice.event["cat"] == "wait" || !args.contains("op")) {
          continue;
        }
        ++op_slices;
        const std::int64_t step = args["step"];
        if (key.second != 100 && step <= last_step + 1) {
          std::int64_t waited = 0;
          for (const char* part :
               {"wait_host_us", "wait_edges_us", "wait_communicator_us", "wait_peers_us"}) {
            waited += args.contains(part) ? Ticks(args[part], 1000) : 0;
          }
          wrong_waits += waited != slice.begin - free;
        }
        free = slice.end;
        last_step = step;
      }
      CHECK(wrong_waits == 0);
    }
    CHECK(op_slices == simulated.trace.spans.size());
    const auto flows = CheckFlows(events, tracks);
    for (const auto& pair : DirectFlows(simulated)) {
      CHECK_MESSAGE(flows.contains(pair), (pair.first + " -> " + pair.second));
    }
    CheckCounters(events);
  }
}

TEST_CASE("The hta profile: whole microseconds, flat tracks, one step, every kernel launched") {
  const unsigned seed = 12;
  CAPTURE(seed);
  std::mt19937 random(seed);
  for (int trial = 0; trial < 40; ++trial) {
    const SimulatedTrace simulated = DrawTrace(random, trial % 4 == 0);
    CAPTURE(trial);
    CAPTURE(simulated.description);
    const std::string text =
        ChromeTraceText(simulated.program, simulated.trace, {.profile = ChromeProfile::kHta});
    // Holistic Trace Analysis 0.6 finds the rank by the pattern "rank":\s+(\d+), anywhere.
    CHECK(text.substr(std::min(text.find("\"rank\":"), text.size()), 10) == "\"rank\": 0,");
    const Json trace = Json::parse(text);
    std::map<std::int64_t, int> steps;  // per rank
    std::set<std::int64_t> launched, kernels;
    for (const auto& [key, slices] : SlicesOf(trace["traceEvents"], 1)) {
      CHECK(Nests(slices));
      CHECK((key.second == 100 || IsFlat(slices)));
      bool is_whole = true;
      for (const Slice& slice : slices) {
        is_whole = is_whole && slice.event["ts"].is_number_integer() &&
                   slice.event["dur"].is_number_integer() && slice.end > slice.begin;
        steps[key.first] += slice.event["name"].get<std::string>().starts_with("ProfilerStep#");
        const Json& args = slice.event["args"];
        if (args.contains("correlation")) {
          (key.second == 100 ? launched : kernels).insert(args["correlation"].get<std::int64_t>());
        }
      }
      CHECK(is_whole);
    }
    CHECK(launched == kernels);
    CHECK(!kernels.empty());
    for (const auto& [rank, count] : steps) {
      CHECK(count == 1);
    }
  }
}

}  // namespace
}  // namespace shardwright
