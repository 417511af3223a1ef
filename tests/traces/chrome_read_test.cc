// What was written is read back to the nanosecond; anything else is refused with its place.

#include "traces/chrome_read.h"

#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <filesystem>
#include <fstream>
#include <random>
#include <string>

#include <doctest/doctest.h>
#include <unistd.h>

#include "core/error.h"
#include "core/json.h"
#include "tests/traces/simulated_traces.h"
#include "tests/traces/tiny_program.h"
#include "traces/check.h"
#include "traces/chrome_write.h"
#include "traces/gzip.h"

namespace shardwright {
namespace {

using testing::DrawTrace;
using testing::SimulatedTrace;
using testing::TinyProgram;
using testing::TinyTrace;

// A file name of this process that is gone at the end.
class TemporaryFile {
 public:
  explicit TemporaryFile(const std::string& ending)
      : name_((std::filesystem::temp_directory_path() /
               ("shardwright_read_test." + std::to_string(::getpid()) + ending))
                  .string()) {}
  ~TemporaryFile() { std::remove(name_.c_str()); }
  TemporaryFile(const TemporaryFile&) = delete;
  TemporaryFile& operator=(const TemporaryFile&) = delete;
  [[nodiscard]] const std::string& name() const { return name_; }

 private:
  std::string name_;
};

// The rounding rule: nearest nanosecond, halves up. Times here are not negative.
SimTime Rounded(SimTime time) {
  return SimTime((time.value + 500) / 1000 * 1000);
}

Trace Rounded(Trace trace) {
  for (Span& span : trace.spans) {
    for (SimTime Span::*member : {&Span::issue_begin, &Span::issued, &Span::issue_end, &Span::ready,
                                  &Span::arrival, &Span::start, &Span::end}) {
      span.*member = Rounded(span.*member);
    }
  }
  for (MemorySample& sample : trace.memory) {
    sample.time = Rounded(sample.time);
  }
  return trace;
}

TEST_CASE("A header carries the plan and the step time, and is read without the events") {
  const TemporaryFile file(".json.gz");
  const Program program = TinyProgram("layers.0", "layers.0.linear");
  ChromeOptions options;
  options.source = "measured on host";
  options.plan = "{\n  \"format\": \"shardwright-plan\"\n}\n";
  options.step_time = SimTime(20'000'400);  // rounds to 20 us, the nearest nanosecond
  WriteChromeTrace(program, TinyTrace(), options, file.name());
  const TraceHeader header = ReadTraceHeader(file.name());
  CHECK(header.source == options.source);
  CHECK(header.plan == options.plan);
  REQUIRE(header.step_time.has_value());
  CHECK(header.step_time->value == 20'000'000);
  CHECK(ReadChromeTrace(file.name(), program).spans == TinyTrace().spans);
  WriteChromeTrace(program, TinyTrace(), {}, file.name());
  CHECK(ReadTraceHeader(file.name()).plan.empty());
  CHECK_FALSE(ReadTraceHeader(file.name()).step_time.has_value());
}

TEST_CASE("Simulated traces come back to the nanosecond, and still pass the check") {
  const unsigned seed = 31;
  CAPTURE(seed);
  std::mt19937 random(seed);
  const TemporaryFile plain(".json");
  const TemporaryFile packed(".json.gz");
  for (int trial = 0; trial < 60; ++trial) {
    const SimulatedTrace simulated = DrawTrace(random, trial % 3 == 0);
    CAPTURE(trial);
    CAPTURE(simulated.description);
    const std::string& file = trial % 2 == 0 ? plain.name() : packed.name();
    WriteChromeTrace(simulated.program, simulated.trace, {}, file);
    const Trace back = ReadChromeTrace(file, simulated.program);
    const Trace expected = Rounded(simulated.trace);
    CHECK(back.spans == expected.spans);
    CHECK(back.memory == expected.memory);
    CHECK(CheckTrace(simulated.program, back).empty());
  }
  CHECK(ReadTextFile(packed.name()).substr(0, 2) == "\x1f\x8b");
}

TEST_CASE("Days of recording keep their nanoseconds") {
  constexpr std::int64_t kDay = 86400LL * 1'000'000'000'000;  // in picoseconds
  const Program program = TinyProgram("layer", "layer.linear");
  Trace trace = TinyTrace();
  for (Span& span : trace.spans) {
    for (SimTime Span::*member : {&Span::issue_begin, &Span::issued, &Span::issue_end, &Span::ready,
                                  &Span::arrival, &Span::start, &Span::end}) {
      span.*member += SimTime(40 * kDay + 1000);
    }
  }
  const TemporaryFile file(".json");
  WriteChromeTrace(program, trace, {}, file.name());
  CHECK(ReadChromeTrace(file.name(), program).spans == trace.spans);
}

TEST_CASE("What an op's thread computed is kept where it was measured") {
  const Program program = TinyProgram("layer", "layer.linear");
  Trace trace = TinyTrace();
  trace.spans[2].cpu = SimTime(1'234'000);
  trace.spans[3].cpu = SimTime(1'000);
  const TemporaryFile file(".json");
  WriteChromeTrace(program, trace, {}, file.name());
  CHECK(ReadChromeTrace(file.name(), program).spans == trace.spans);
}

TEST_CASE("Hostile names come back, and the order in the file does not matter") {
  const Program program = TinyProgram("a\"b\\\n]", "\t{\"");
  const TemporaryFile file(".json");
  WriteChromeTrace(program, TinyTrace(), {}, file.name());
  CHECK(ReadChromeTrace(file.name(), program).spans == TinyTrace().spans);
  Trace reversed = TinyTrace();
  std::swap(reversed.spans[1], reversed.spans[3]);
  WriteChromeTrace(program, reversed, {}, file.name());
  CHECK(ReadChromeTrace(file.name(), program).spans == TinyTrace().spans);
}

// The error of reading `text` as a trace of TinyProgram, without the file's name.
std::string ErrorOf(const std::string& text) {
  const TemporaryFile file(".json");
  WriteFileAtomically(file.name(), text);
  try {
    (void)ReadChromeTrace(file.name(), TinyProgram("layer", "layer.linear"));
  } catch (const InputError& error) {
    const std::string what = error.what();
    return what.starts_with(file.name()) ? what.substr(file.name().size()) : what;
  }
  return "no error";
}

// The hand-written trace with its first `from` replaced.
std::string Edited(const std::string& from, const std::string& to) {
  std::string text = ReadTextFile("traces/tiny_trace.json");
  const std::size_t at = text.find(from);
  REQUIRE(at != std::string::npos);
  return text.replace(at, from.size(), to);
}

TEST_CASE("The hand-written trace is read") {
  CHECK(ErrorOf(ReadTextFile("traces/tiny_trace.json")) == "no error");
}

TEST_CASE("Traces of other programs and other tools are refused") {
  const std::string rule = "a trace that \"shardwright simulate --trace\" wrote";
  CHECK(ErrorOf(R"({"schemaVersion": 1, "traceEvents": [{"ph": "X", "name": "aten::mm"}]})") ==
        ": got no \"shardwright\" header before the events, expected " + rule);
  CHECK(ErrorOf(R"([{"ph": "X", "name": "x", "ts": 1, "dur": 1}])") ==
        ": got a list of events without a header, expected " + rule);
  CHECK(ErrorOf(R"({"format": "shardwright-plan"})") ==
        ": got no \"traceEvents\", expected " + rule);
  CHECK(ErrorOf(Edited("\"version\": 1", "\"version\": 2")) ==
        ": shardwright.version: got 2, expected 1");
  const Program program = TinyProgram("layer", "layer.linear");
  CHECK(
      ErrorOf(ChromeTraceText(program, TinyTrace(), {.profile = ChromeProfile::kHta})) ==
      ": shardwright.profile: got \"hta\", expected \"perfetto\"; times of other profiles are not "
      "exact");
  CHECK(ErrorOf(Edited("\"op\":\"mb0.layer.linear.bwd\"", "\"op\":\"mb0.layer2.linear.bwd\"")) ==
        ": traceEvents[22].args.op: got \"mb0.layer2.linear.bwd\", expected an op of the program; "
        "does the trace belong to this plan?");
}

TEST_CASE("Damaged traces are refused with the place") {
  const std::string text = ReadTextFile("traces/tiny_trace.json");
  CHECK(ErrorOf("") == ": got broken JSON at byte 0: the end of the file, expected a whole trace");
  CHECK(ErrorOf(text.substr(0, 1000)) ==
        ": got broken JSON at byte 1000: the end of the file, expected a whole trace");
  CHECK(ErrorOf(text + "x") == ": got broken JSON at byte " + std::to_string(text.size()) +
                                   ": an unexpected x, expected a whole trace");
  const std::string event = ": traceEvents[12].";
  CHECK(ErrorOf(Edited("\"body\":\"init\"", "\"body\":\"end\"")) ==
        event + "args.body: got \"end\", expected init, warmup or step");
  CHECK(ErrorOf(Edited("\"step\":0", "\"step\":-1")) ==
        event + "args.step: got -1, expected an integer in [0, 4294967295]");
  CHECK(ErrorOf(Edited("\"step\":0", "\"step\":0.5")) ==
        event + "args.step: got another number, expected an integer in [0, 4294967295]");
  CHECK(ErrorOf(Edited("\"ready_us\":0.000,", "")) ==
        event + "args.ready_us: got nothing, expected a time in microseconds");
  CHECK(ErrorOf(Edited("\"ts\":1.000", "\"ts\":1e30")) ==
        event + "ts: got a time beyond 50 days, expected a time in microseconds");
  CHECK(ErrorOf(Edited("\"parameter_shard\":1000", "\"parameter_shard\":\"1 GB\"")) ==
        ": traceEvents[34].args.total: got 1024, expected the sum of the categories, 24");
  CHECK(ErrorOf(Edited("\"name\":\"memory\"", "\"name\":\"mem\"")) ==
        ": traceEvents[35]: got \"host memory\" alone, expected \"memory\" of the same rank before "
        "it");
}

TEST_CASE("A truncated gzip file is one error") {
  const Program program = TinyProgram("layer", "layer.linear");
  const TemporaryFile file(".json.gz");
  WriteChromeTrace(program, TinyTrace(), {}, file.name());
  const std::string packed = ReadTextFile(file.name());
  WriteFileAtomically(file.name(), packed.substr(0, packed.size() / 2));
  CHECK_THROWS_WITH_AS(
      (void)ReadChromeTrace(file.name(), program),
      (file.name() + ": got compressed data that ends too early, expected a whole gzip file")
          .c_str(),
      InputError);
}

// Without the sync to disk of WriteFileAtomically, which would take most of the time. File systems
// sync a file that is cut to nothing and written again, too, so it is a new one each time.
void WriteQuickly(const std::string& file, const std::string& content) {
  std::remove(file.c_str());
  std::ofstream(file, std::ios::binary) << content;
}

// Whether reading ends well or with an InputError that names the file.
bool IsReadOrRefused(const std::string& file, const Program& program) {
  try {
    (void)ReadChromeTrace(file, program);
  } catch (const InputError& error) {
    return std::string(error.what()).starts_with(file);
  }
  return true;
}

TEST_CASE("Random damage to text or gzip is read or refused, never worse") {
  const unsigned seed = 77;
  CAPTURE(seed);
  std::mt19937 random(seed);
  const Program program = TinyProgram("layer", "layer.linear");
  const std::string text = ReadTextFile("traces/tiny_trace.json");
  TextSink sink(true);
  sink.Append(text);
  const std::string packed = sink.Finish();
  const TemporaryFile file(".json");
  const std::string characters = "0123456789{}[]\",:.-e\\ \n\xff";
  for (int trial = 0; trial < 2000; ++trial) {
    CAPTURE(trial);
    std::string damaged = trial % 2 == 0 ? text : packed;
    for (unsigned change = 0; change <= random() % 3; ++change) {
      const std::size_t at = random() % damaged.size();
      switch (random() % 3) {
        case 0:
          damaged[at] = characters[random() % characters.size()];
          break;
        case 1:
          damaged.erase(at, 1 + random() % 20);
          break;
        default:
          damaged.insert(at, damaged.substr(random() % damaged.size(), random() % 20));
      }
    }
    WriteQuickly(file.name(), damaged);
    CHECK(IsReadOrRefused(file.name(), program));
  }
  for (std::size_t size = 0; size < packed.size(); ++size) {
    CAPTURE(size);
    WriteQuickly(file.name(), packed.substr(0, size));
    CHECK_THROWS_AS((void)ReadChromeTrace(file.name(), program), InputError);
  }
}

}  // namespace
}  // namespace shardwright
