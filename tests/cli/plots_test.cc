// Plots of a step whose times and bytes are set by hand.

#include "cli/plots.h"

#include <string>

#include <doctest/doctest.h>

#include "tests/traces/tiny_program.h"

namespace shardwright {
namespace {

constexpr std::int64_t kMicrosecond = 1'000'000;

// The width of 53 leaves 40 columns: one per half microsecond of a step of 20.
constexpr PlotStyle kAscii{53, false};

Recording TwentyMicroseconds(const Program& program) {
  Recording recording;
  recording.period = SimTime(20 * kMicrosecond);
  recording.spans.resize(program.step.size());
  for (std::size_t i = 0; i < recording.spans.size(); ++i) {
    recording.spans[i].op = OpId(i);
    recording.spans[i].stream = program.ShapeOf(program.step.ops[i]).stream;
  }
  return recording;
}

TEST_CASE("Each stream is as full as it is busy") {
  const Program program = testing::TinyProgram("layers.0", "layers.0.linear");
  Recording recording = TwentyMicroseconds(program);
  recording.spans[0].end = SimTime(5 * kMicrosecond);  // a quarter of the gather stream
  recording.spans[1].start = SimTime(10 * kMicrosecond);
  recording.spans[1].end = SimTime(20 * kMicrosecond);
  const std::string text = TimelinePlot(program, recording, kAscii);
  CHECK(text.find("compute     " + std::string(20, ' ') + std::string(20, '#') + "\n") !=
        std::string::npos);
  CHECK(text.find("gather      " + std::string(10, '#') + std::string(30, ' ') + "\n") !=
        std::string::npos);
  CHECK(text.ends_with("20 us\n"));
}

TEST_CASE("Memory rises where it rises and the top is the peak") {
  const Program program = testing::TinyProgram("layers.0", "layers.0.linear");
  Recording recording = TwentyMicroseconds(program);
  recording.memory.resize(2);
  recording.memory[0].device[0] = kMiB * 3;
  recording.memory[1].time = SimTime(10 * kMicrosecond);
  recording.memory[1].device[0] = kMiB * 6;
  // Six lines for 6 MiB: three are full all the time, three in the second half.
  const std::string half = std::string(20, ' ') + std::string(20, '#') + "\n";
  const std::string full = std::string(40, '#') + "\n";
  CHECK(MemoryPlot(recording, kAscii) ==
        "6 MiB       " + half + std::string(12, ' ') + half + std::string(12, ' ') + half +
            std::string(12, ' ') + full + std::string(12, ' ') + full + "0           " + full);
  CHECK(MemoryPlot(Recording(), kAscii).find('#') == std::string::npos);
}

}  // namespace
}  // namespace shardwright
