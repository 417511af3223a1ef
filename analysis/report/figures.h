#pragma once

// Pictures as SVG text: what the page shows without JavaScript, and what it prints. Colours and
// hatching come from the page's style sheet by class.

#include <string>
#include <vector>

#include "analysis/report/recording.h"
#include "analysis/report/unit_picture.h"
#include "core/units.h"
#include "schedule/program.h"

namespace shardwright {

// The range of time that pictures of these recordings show: all ops, and the periods.
struct TimeRange {
  SimTime begin;
  SimTime end;
};
[[nodiscard]] TimeRange RangeOf(const std::vector<Recording>& recordings);

// A track per stream that has ops, simulated above measured. Neighbours of one colour that are less
// than half a pixel apart become one bar.
[[nodiscard]] std::string TimelineFigure(const Program& program,
                                         const std::vector<Recording>& recordings);

// Bytes by category over time of the first recording, with the limit for allocations; as a line,
// the sums of the second.
[[nodiscard]] std::string MemoryFigure(const std::vector<Recording>& recordings, Bytes limit);

// Boxes in forward order, heights by bytes; kept units hatched; arrows from a unit to the one that
// is gathered while it computes, forward above and backward below.
[[nodiscard]] std::string UnitsFigure(const UnitPicture& picture);

}  // namespace shardwright
