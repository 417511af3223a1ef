#pragma once

// Pictures made of characters.

#include <cstddef>
#include <string>

#include "analysis/report/recording.h"
#include "schedule/program.h"

namespace shardwright {

struct PlotStyle {
  std::size_t width = 80;  // characters of a line, at least 40
  bool unicode = true;     // eighths of blocks; otherwise "#", "+", "-", "."
};

// A line per stream: how busy it is, one character per equal stretch of the step.
[[nodiscard]] std::string TimelinePlot(const Program& program, const Recording& recording,
                                       const PlotStyle& style);

// Bytes in buffers over the step as bars, the largest of each stretch; the top line is the peak.
[[nodiscard]] std::string MemoryPlot(const Recording& recording, const PlotStyle& style);

}  // namespace shardwright
