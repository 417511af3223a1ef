#include "analysis/report/figures.h"

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <utility>

#include "analysis/report/html_text.h"
#include "core/json.h"

namespace shardwright {
namespace {

constexpr double kWidth = 1000;
constexpr double kLeft = 110;  // of what is drawn; names stand before it
constexpr double kRight = kWidth - 10;
constexpr double kRow = 18;
constexpr double kGap = 4;
constexpr double kMerge = 0.5;  // pixels

class TimeScale {
 public:
  explicit TimeScale(const TimeRange& range)
      : begin_(range.begin), length_(std::max((range.end - range.begin).value, std::int64_t{1})) {}
  [[nodiscard]] double X(SimTime time) const {
    const double share = static_cast<double>((time - begin_).value) / static_cast<double>(length_);
    return kLeft + std::clamp(share, 0.0, 1.0) * (kRight - kLeft);
  }

 private:
  SimTime begin_;
  std::int64_t length_;
};

std::string Open(double height, const std::string& name) {
  return "<svg viewBox=\"0 0 " + Pixels(kWidth) + " " + Pixels(height) +
         "\" role=\"img\" aria-label=\"" + EscapeHtml(name) + "\">\n";
}

std::string TextAt(double x, double y, const char* style, const std::string& text) {
  return "<text x=\"" + Pixels(x) + "\" y=\"" + Pixels(y) + "\" class=\"" + style + "\">" +
         EscapeHtml(text) + "</text>\n";
}

std::string LineAt(double x1, double y1, double x2, double y2, const char* style) {
  return "<path class=\"" + std::string(style) + "\" d=\"M" + Pixels(x1) + " " + Pixels(y1) + "L" +
         Pixels(x2) + " " + Pixels(y2) + "\"/>\n";
}

// Bars of one colour in one track, merged as they come.
class Bars {
 public:
  void Add(double x0, double x1) {
    if (has_bar_ && x0 - x1_ < kMerge) {
      x1_ = std::max(x1_, x1);
      return;
    }
    Flush();
    x0_ = x0;
    x1_ = x1;
    has_bar_ = true;
  }
  // All bars as one path; nothing without any.
  [[nodiscard]] std::string Path(const std::string& style, double y) {
    y_ = y;
    Flush();
    return path_.empty() ? "" : "<path class=\"" + style + "\" d=\"" + path_ + "\"/>\n";
  }
  explicit Bars(double y) : y_(y) {}

 private:
  void Flush() {
    if (has_bar_) {
      const std::string width = Pixels(std::max(x1_ - x0_, 0.3));
      path_ += "M" + Pixels(x0_) + " " + Pixels(y_) + "h" + width + "v" + Pixels(kRow - kGap) +
               "h-" + width + "z";
    }
    has_bar_ = false;
  }
  std::string path_;
  double x0_ = 0;
  double x1_ = 0;
  double y_ = 0;
  bool has_bar_ = false;
};

// The host is ahead of the device: in a steady state it issues the next steps meanwhile.
constexpr int kStepsAhead = 3;

std::string TrackBars(const Program& program, const Recording& recording, Stream stream,
                      const TimeScale& scale, double y) {
  std::vector<Bars> bars(kOpColourCount, Bars(y));
  const auto add = [&](OpColour colour, SimTime begin, SimTime end) {
    if (scale.X(begin) < kRight && scale.X(end) > kLeft) {
      bars[static_cast<std::size_t>(colour)].Add(scale.X(begin), scale.X(end));
    }
  };
  if (stream == Stream::kHost) {
    for (int ahead = 0; ahead < (recording.is_steady() ? kStepsAhead : 1); ++ahead) {
      const SimTime shift = recording.period * ahead;
      for (const Span& span : recording.spans) {
        add(OpColour::kHost, span.issue_begin + shift, span.issue_end + shift);
      }
    }
  } else {
    for (std::size_t i = 0; i < recording.spans.size(); ++i) {
      const Span& span = recording.spans[i];
      if (span.stream == stream) {
        add(recording.is_foreign() ? recording.bars[i].colour
                                   : ColourOf(program, program.step.ops[span.op.value]),
            span.start, span.end);
      }
    }
  }
  std::string text;
  for (std::size_t c = 0; c < bars.size(); ++c) {
    text += bars[c].Path("op" + std::to_string(c), y);
  }
  if (stream == Stream::kCompute) {
    Bars waits(y);
    for (const ComputeWait& wait : recording.waits) {
      waits.Add(scale.X(wait.begin), scale.X(wait.end));
    }
    text += waits.Path("wait", y);
  }
  return text;
}

bool HasOps(const Recording& recording, Stream stream) {
  return std::any_of(recording.spans.begin(), recording.spans.end(), [&](const Span& span) {
    return stream == Stream::kHost ? span.issue_end > span.issue_begin : span.stream == stream;
  });
}

// Streams as they are stacked: the device's, then the host.
std::vector<Stream> StreamOrder() {
  std::vector<Stream> order;
  for (std::size_t s = 1; s < kStreamCount; ++s) {
    order.push_back(static_cast<Stream>(s));
  }
  order.push_back(Stream::kHost);
  return order;
}

Bytes SumOf(const MemorySample& sample) {
  Bytes sum;
  for (const Bytes bytes : sample.device) {
    sum += bytes;
  }
  return sum;
}

std::string TimeAxis(const TimeRange& range, double y) {
  const TimeScale scale(range);
  constexpr int kTicks = 5;
  std::string text = LineAt(kLeft, y, kRight, y, "axis");
  for (int i = 0; i <= kTicks; ++i) {
    const SimTime time = range.begin + SimTime((range.end - range.begin).value / kTicks * i);
    const bool is_negative = time < SimTime(0);
    const SimTime size = is_negative ? SimTime(-time.value) : time;
    text += LineAt(scale.X(time), y, scale.X(time), y + 5, "axis");
    text += TextAt(scale.X(time), y + 17, i == kTicks ? "end" : "middle",
                   (is_negative ? "-" : "") + Format(ToSeconds(size)));
  }
  return text;
}

constexpr double kMemoryTop = 12;
constexpr double kMemoryBottom = 220;
constexpr std::size_t kMemoryPoints = 240;

class MemoryScale {
 public:
  explicit MemoryScale(Bytes most) : most_(std::max(most, Bytes(1))) {}
  [[nodiscard]] double Y(Bytes bytes) const {
    return kMemoryBottom - Ratio(bytes, most_) * (kMemoryBottom - kMemoryTop);
  }

 private:
  Bytes most_;
};

// A corner of a path: "M10 20" for the first, "L10 20" for the others.
std::string Point(bool is_first, double x, double y) {
  return (is_first ? "M" : "L") + Pixels(x) + " " + Pixels(y);
}

// The area of category `c`, on top of the categories before it; steps, since bytes do not flow.
std::string AreaPath(const std::vector<MemorySample>& samples, std::size_t c, const TimeScale& x,
                     const MemoryScale& y, double right) {
  std::vector<std::string> back;  // the lower edge, from right to left in the end
  std::string path;
  for (std::size_t i = 0; i < samples.size(); ++i) {
    Bytes below;
    for (std::size_t k = 0; k < c; ++k) {
      below += samples[i].device[k];
    }
    const double left = x.X(samples[i].time);
    const double next = i + 1 < samples.size() ? x.X(samples[i + 1].time) : right;
    const double high = y.Y(below + samples[i].device[c]);
    path.append(Point(i == 0, left, high)).append(Point(false, next, high));
    back.push_back(Point(false, next, y.Y(below)).append(Point(false, left, y.Y(below))));
  }
  for (auto edge = back.rbegin(); edge != back.rend(); ++edge) {
    path += *edge;
  }
  return "<path class=\"memory" + std::to_string(c) + "\" d=\"" + path + "z\"/>\n";
}

std::string SumPath(const std::vector<MemorySample>& samples, const TimeScale& x,
                    const MemoryScale& y, double right) {
  std::string path;
  for (std::size_t i = 0; i < samples.size(); ++i) {
    const double next = i + 1 < samples.size() ? x.X(samples[i + 1].time) : right;
    const double high = y.Y(SumOf(samples[i]));
    path.append(Point(i == 0, x.X(samples[i].time), high)).append(Point(false, next, high));
  }
  return "<path class=\"measured\" d=\"" + path + "\"/>\n";
}

constexpr double kUnitsTop = 80;    // room for arrows above
constexpr double kUnitsBase = 220;  // where boxes stand
constexpr double kUnitsNames = 20;  // for names below
constexpr double kUnitsHeight = 300;

// One box of the picture, as pixels.
struct Box {
  double x = 0;
  double width = 0;
  double top = 0;
  [[nodiscard]] double middle() const { return x + width / 2; }
};

std::vector<Box> BoxesOf(const UnitPicture& picture) {
  Bytes largest(1);
  for (const UnitRow& row : picture.units) {
    largest = std::max(largest, row.gathered);
  }
  const double slot =
      (kWidth - 20) / static_cast<double>(std::max<std::size_t>(picture.runs.size(), 1));
  std::vector<Box> boxes;
  for (std::size_t i = 0; i < picture.runs.size(); ++i) {
    const double height = 4 + Ratio(picture.units[picture.runs[i].unit].gathered, largest) *
                                  (kUnitsBase - kUnitsTop - 4);
    boxes.push_back(
        {10 + slot * static_cast<double>(i), slot * (slot > 4 ? 0.85 : 1.0), kUnitsBase - height});
  }
  return boxes;
}

std::string UnitTip(const UnitRow& row) {
  std::string tip = row.name + ": " + std::to_string(row.parameters) + " parameters, " +
                    Format(row.gathered) + " gathered";
  tip += row.reshard.empty() ? "" : ", resharded after forward: " + row.reshard;
  return tip + (row.recompute.empty() ? "" : ", recomputed: " + row.recompute);
}

// The boxes of an arrow: of the units' several ones, the two that are nearest to each other.
std::pair<std::size_t, std::size_t> EndsOf(const UnitPicture& picture, const PrefetchArrow& arrow) {
  std::pair<std::size_t, std::size_t> best;
  std::size_t distance = picture.runs.size() + 1;
  for (std::size_t i = 0; i < picture.runs.size(); ++i) {
    for (std::size_t k = 0; picture.runs[i].unit == arrow.during && k < picture.runs.size(); ++k) {
      const std::size_t away = i > k ? i - k : k - i;
      if (picture.runs[k].unit == arrow.gathered && away < distance) {
        best = {i, k};
        distance = away;
      }
    }
  }
  return best;
}

std::string ArrowPath(const UnitPicture& picture, const std::vector<Box>& boxes,
                      const PrefetchArrow& arrow) {
  const auto [from, to] = EndsOf(picture, arrow);
  const bool is_forward = arrow.phase == Phase::kForward;
  const double x0 = boxes[from].middle();
  const double x1 = boxes[to].middle();
  const double reach = std::min(60.0, 14 + std::abs(x1 - x0) / 4);
  const double below = kUnitsBase + kUnitsNames;
  const double y0 = is_forward ? boxes[from].top : below;
  const double y1 = is_forward ? boxes[to].top : below;
  const double bend = is_forward ? std::min(y0, y1) - reach : below + reach;
  const std::string tip = picture.units[arrow.gathered].name + " is gathered while " +
                          picture.units[arrow.during].name + " computes " +
                          std::string(NameOf(arrow.phase));
  return "<path class=\"" + std::string(is_forward ? "ahead" : "ahead backward") +
         "\" marker-end=\"url(#head)\" d=\"M" + Pixels(x0) + " " + Pixels(y0) + "Q" +
         Pixels((x0 + x1) / 2) + " " + Pixels(bend) + " " + Pixels(x1) + " " + Pixels(y1) +
         "\"><title>" + EscapeHtml(tip) + "</title></path>\n";
}

constexpr double kCharacter = 6.5;  // pixels

// The whole name where all have room for it, else its last part.
std::string Label(const std::string& name, bool is_short) {
  const std::size_t dot = name.rfind('.');
  return is_short && dot != std::string::npos ? name.substr(dot + 1) : name;
}

// Names below the boxes: as many as do not run into each other.
std::string UnitNames(const UnitPicture& picture, const std::vector<Box>& boxes) {
  const double slot = boxes.size() > 1 ? boxes[1].x - boxes[0].x : kWidth;
  const auto longest = [&](bool is_short) {
    std::size_t length = 1;
    for (const UnitRow& row : picture.units) {
      length = std::max(length, Label(row.name, is_short).size());
    }
    return static_cast<double>(length + 1) * kCharacter;
  };
  const bool is_short = longest(false) > slot;
  const auto every = static_cast<std::size_t>(std::ceil(longest(is_short) / slot));
  std::string text;
  for (std::size_t i = 0; i < boxes.size(); i += every) {
    text += TextAt(
        std::clamp(boxes[i].middle(), longest(is_short) / 2, kWidth - longest(is_short) / 2),
        kUnitsBase + 14, "middle", Label(picture.units[picture.runs[i].unit].name, is_short));
  }
  return text;
}

}  // namespace

TimeRange RangeOf(const std::vector<Recording>& recordings) {
  TimeRange range;
  for (const Recording& recording : recordings) {
    range.end = std::max(range.end, recording.period);
    for (const Span& span : recording.spans) {
      if (span.stream != Stream::kHost) {
        range.begin = std::min(range.begin, span.start);
        range.end = std::max(range.end, span.end);
      }
    }
  }
  return range;
}

std::string TimelineFigure(const Program& program, const std::vector<Recording>& recordings) {
  const TimeRange range = RangeOf(recordings);
  const TimeScale scale(range);
  std::string body;
  double y = 0;
  for (std::size_t i = 0; i < recordings.size(); ++i) {
    y += 16;
    body += TextAt(0, y, "strong", i == 0 ? "simulated" : "measured");
    y += 6;
    for (const Stream stream : StreamOrder()) {
      if (HasOps(recordings[i], stream)) {
        body += TextAt(0, y + kRow - kGap - 3, "name", std::string(NameOf(stream)));
        body += TrackBars(program, recordings[i], stream, scale, y);
        y += kRow;
      }
    }
  }
  body += TimeAxis(range, y + 4);
  return Open(y + 26, "What each stream does during one step") + body + "</svg>\n";
}

std::string MemoryFigure(const std::vector<Recording>& recordings, Bytes limit) {
  const TimeRange range = RangeOf(recordings);
  const TimeScale x(range);
  std::vector<std::vector<MemorySample>> samples;
  Bytes most(1);
  for (const Recording& recording : recordings) {
    samples.push_back(ThinOut(recording.memory, kMemoryPoints));
    for (const MemorySample& sample : samples.back()) {
      most = std::max(most, SumOf(sample));
    }
  }
  // A limit far above everything would press the picture flat.
  constexpr std::int64_t kFar = 5;  // halves
  const bool is_far = limit.value > most.value * kFar / 2;
  most = is_far ? most : std::max(most, limit);
  const MemoryScale y(most * 105 / 100);
  std::string body;
  for (std::size_t c = 0; c < kCategoryCount; ++c) {
    const bool is_used =
        std::any_of(samples[0].begin(), samples[0].end(),
                    [&](const MemorySample& sample) { return sample.device[c] > Bytes(0); });
    body += is_used ? AreaPath(samples[0], c, x, y, kRight) : "";
  }
  if (samples.size() > 1 && !samples[1].empty()) {
    body += SumPath(samples[1], x, y, kRight);
  }
  constexpr int kTicks = 4;
  for (int i = 0; i <= kTicks; ++i) {
    const Bytes bytes = most / kTicks * i;
    body += LineAt(kLeft, y.Y(bytes), kRight, y.Y(bytes), "grid");
    body += TextAt(kLeft - 6, y.Y(bytes) + 4, "end", Format(bytes));
  }
  if (is_far) {
    body += TextAt(kRight, kMemoryTop, "end", "limit " + Format(limit) + ", above this picture");
  } else {
    body += LineAt(kLeft, y.Y(limit), kRight, y.Y(limit), "limit");
    body += TextAt(kRight, y.Y(limit) + 14, "end", "limit " + Format(limit));
  }
  body += TimeAxis(range, kMemoryBottom);
  return Open(kMemoryBottom + 24, "Allocated memory during one step, by category") + body +
         "</svg>\n";
}

std::string UnitsFigure(const UnitPicture& picture) {
  const std::vector<Box> boxes = BoxesOf(picture);
  const std::string head = Pixels(boxes.size() > 40 ? 3 : 5);
  std::string body =
      "<defs><marker id=\"head\" viewBox=\"0 0 8 8\" refX=\"7\" refY=\"4\" markerWidth=\"" + head +
      "\" markerHeight=\"" + head +
      "\" orient=\"auto\"><path class=\"head\" d=\"M0 0L8 4L0 8z\"/></marker>"
      "<pattern id=\"hatch\" width=\"6\" height=\"6\" patternUnits=\"userSpaceOnUse\" "
      "patternTransform=\"rotate(45)\"><path class=\"hatch\" d=\"M0 0V6\"/></pattern></defs>\n";
  for (std::size_t i = 0; i < boxes.size(); ++i) {
    const UnitRow& row = picture.units[picture.runs[i].unit];
    const Box& box = boxes[i];
    const std::string place = "x=\"" + Pixels(box.x) + "\" y=\"" + Pixels(box.top) + "\" width=\"" +
                              Pixels(box.width) + "\" height=\"" + Pixels(kUnitsBase - box.top) +
                              "\"";
    body +=
        "<g><title>" + EscapeHtml(UnitTip(row)) + "</title><rect class=\"unit\" " + place + "/>";
    if (row.reshard == "never") {
      body += "<rect fill=\"url(#hatch)\" " + place + "/>";
    }
    body += "</g>\n";
  }
  body += UnitNames(picture, boxes);
  for (const PrefetchArrow& arrow : picture.arrows) {
    body += ArrowPath(picture, boxes, arrow);
  }
  const bool has_forward =
      std::any_of(picture.arrows.begin(), picture.arrows.end(),
                  [](const PrefetchArrow& arrow) { return arrow.phase == Phase::kForward; });
  const double top = has_forward ? 0 : kUnitsTop - 4;
  return "<svg viewBox=\"0 " + Pixels(top) + " " + Pixels(kWidth) + " " +
         Pixels(kUnitsHeight - top) +
         "\" role=\"img\" aria-label=\"Units in the order of forward\">\n" + body + "</svg>\n";
}

}  // namespace shardwright
