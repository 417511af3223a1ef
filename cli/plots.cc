#include "cli/plots.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <string_view>
#include <vector>

#include "core/json.h"

namespace shardwright {
namespace {

constexpr std::size_t kNames = 12;  // columns of the names at the left
constexpr std::size_t kHeight = 6;  // lines of the memory plot
constexpr std::array<std::string_view, 9> kBlocks = {
    " ", "\u2581", "\u2582", "\u2583", "\u2584", "\u2585", "\u2586", "\u2587", "\u2588"};
constexpr std::array<std::string_view, 9> kAscii = {" ", ".", ".", "-", "-", "+", "+", "#", "#"};

// A character for a share of a cell, from 0 to 1. What is above 0 is seen.
std::string_view Cell(double share, bool unicode) {
  const double eighths = std::clamp(share, 0.0, 1.0) * 8.0;
  const auto index =
      static_cast<std::size_t>(eighths > 0.0 ? std::max(1.0, std::round(eighths)) : 0.0);
  return unicode ? kBlocks[index] : kAscii[index];
}

std::string Padded(std::string text) {
  text.resize(kNames, ' ');
  return text;
}

std::size_t ColumnsOf(const PlotStyle& style) {
  return std::max<std::size_t>(style.width, 40) - kNames - 1;
}

// Adds the share of each column that [begin, end) takes of a period.
void AddBusy(std::vector<double>& columns, SimTime begin, SimTime end, SimTime period) {
  const auto count = static_cast<double>(columns.size());
  const double from = std::max(Ratio(begin, period) * count, 0.0);
  const double to = std::min(Ratio(end, period) * count, count);
  for (auto i = static_cast<std::size_t>(from); i < columns.size() && static_cast<double>(i) < to;
       ++i) {
    const auto left = static_cast<double>(i);
    columns[i] += std::max(std::min(to, left + 1) - std::max(from, left), 0.0);
  }
}

}  // namespace

std::string TimelinePlot(const Program& program, const Recording& recording,
                         const PlotStyle& style) {
  std::string text;
  for (std::size_t s = 1; s < kStreamCount; ++s) {
    std::vector<double> busy(ColumnsOf(style), 0.0);
    bool is_used = false;
    for (const Span& span : recording.spans) {
      if (span.stream == static_cast<Stream>(s) &&
          InfoOf(program.ShapeOf(program.step.ops[span.op.value]).code).code !=
              OpCode::kStreamWait) {
        AddBusy(busy, span.start, span.end, recording.period);
        is_used = true;
      }
    }
    if (!is_used) {
      continue;
    }
    text += Padded(std::string(NameOf(static_cast<Stream>(s))));
    for (const double share : busy) {
      text += Cell(share, style.unicode);
    }
    text += "\n";
  }
  const std::string end = Format(ToSeconds(recording.period));
  return text + Padded("") + "0" + std::string(ColumnsOf(style) - 1 - end.size(), ' ') + end + "\n";
}

std::string MemoryPlot(const Recording& recording, const PlotStyle& style) {
  std::vector<double> columns(ColumnsOf(style), 0.0);
  Bytes peak(0);
  double before = 0.0;
  std::size_t last = 0;
  for (const MemorySample& sample : recording.memory) {
    Bytes sum;
    for (const Bytes bytes : sample.device) {
      sum += bytes;
    }
    peak = std::max(peak, sum);
    const double share = std::clamp(Ratio(sample.time, recording.period), 0.0, 1.0);
    const auto at = std::min(static_cast<std::size_t>(share * static_cast<double>(columns.size())),
                             columns.size() - 1);
    for (std::size_t i = last + 1; i < at; ++i) {  // nothing changed in between
      columns[i] = before;
    }
    columns[at] = std::max(columns[at], static_cast<double>(sum.value));
    before = static_cast<double>(sum.value);
    last = at;
  }
  std::fill(columns.begin() + static_cast<std::ptrdiff_t>(std::min(last + 1, columns.size())),
            columns.end(), before);
  std::string text;
  for (std::size_t line = 0; line < kHeight; ++line) {
    text += Padded(line == 0 ? Format(peak) : line + 1 == kHeight ? "0" : "");
    for (const double bytes : columns) {
      const double lines =
          peak > Bytes(0) ? bytes / static_cast<double>(peak.value) * kHeight : 0.0;
      text += Cell(lines - static_cast<double>(kHeight - 1 - line), style.unicode);
    }
    text += "\n";
  }
  return text;
}

}  // namespace shardwright
