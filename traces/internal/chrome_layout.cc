#include "traces/internal/chrome_layout.h"

#include <algorithm>
#include <limits>

#include "core/error.h"

namespace shardwright::internal {
namespace {

constexpr std::uint32_t kNoSpan = std::numeric_limits<std::uint32_t>::max();

// Cuts the spans into steps.
std::vector<StepSpans> FindSteps(const Trace& trace, ChromeProfile profile) {
  std::vector<StepSpans> steps;
  for (std::size_t i = 0; i < trace.spans.size(); ++i) {
    const Span& span = trace.spans[i];
    const Span& before = trace.spans[i > 0 ? i - 1 : 0];
    const bool is_init = span.body == BodyKind::kInit;
    if (i == 0 || span.rank != before.rank || span.step != before.step ||
        is_init != (before.body == BodyKind::kInit)) {
      steps.push_back({.first = i, .last = i, .is_init = is_init});
    }
    steps.back().last = i + 1;
  }
  if (profile == ChromeProfile::kHta) {
    // Of two or more steps the analysis drops the last, which is the one worth analysing here.
    const auto is_early = [&](const StepSpans& step) {
      const bool is_last = step.last == trace.spans.size() ||
                           trace.spans[step.last].rank != trace.spans[step.first].rank;
      return !is_last;
    };
    steps.erase(std::remove_if(steps.begin(), steps.end(), is_early), steps.end());
  }
  return steps;
}

// The ends of the slices placed so far, by track of one rank.
class Tracks {
 public:
  explicit Tracks(ChromeProfile profile) : stretches_(profile == ChromeProfile::kHta) {}

  // Makes room for slices that rounding squeezed together, where the profile wants that.
  void Fit(Stream stream, std::int64_t& begin, std::int64_t& end) {
    std::int64_t& last = ends_[static_cast<std::size_t>(stream)];
    if (stretches_) {
      begin = std::max(begin, last);
      end = std::max(end, begin + 1);
    }
    last = std::max(last, end);
    is_known_[static_cast<std::size_t>(stream)] = true;
  }
  // Since when the track is free for an op that starts at `start`.
  [[nodiscard]] std::int64_t FreeFor(Stream stream, std::int64_t start) const {
    const auto s = static_cast<std::size_t>(stream);
    return is_known_[s] ? std::min(ends_[s], start) : start;
  }
  // Steps follow that were not recorded.
  void Forget() { is_known_.fill(false); }
  // The recording begins with all tracks free.
  void Begin() { is_known_.fill(true); }

 private:
  bool stretches_;
  std::array<bool, kStreamCount> is_known_{};
  std::array<std::int64_t, kStreamCount> ends_{};
};

// Splits the gap before a device op; docs/execution_model.md, section 4. A GPU's latency before an
// op that waits for no rank counts with its edges.
void SplitWait(const Span& span, bool is_collective, std::int64_t unit, const Tracks& tracks,
               PlacedSpan& placed) {
  const std::int64_t start = RoundTicks(span.start, unit);
  const std::int64_t free = tracks.FreeFor(span.stream, start);
  const std::int64_t arrival =
      is_collective ? std::clamp(RoundTicks(span.arrival, unit), free, start) : start;
  const std::int64_t issued = std::clamp(RoundTicks(span.issued, unit), free, arrival);
  const std::int64_t ready =
      is_collective ? std::clamp(RoundTicks(span.ready, unit), issued, arrival) : arrival;
  placed.wait_host = issued - free;
  placed.wait_edges = ready - issued;
  placed.wait_communicator = arrival - ready;
  placed.wait_peers = start - arrival;
}

PlacedSpan Place(const Span& span, bool is_collective, std::int64_t unit, Tracks& tracks) {
  PlacedSpan placed;
  placed.is_written = true;
  placed.end = RoundTicks(span.end, unit);
  if (span.stream == Stream::kHost) {
    placed.begin = RoundTicks(span.issue_begin, unit);
    tracks.Fit(Stream::kHost, placed.begin, placed.end);
    placed.issue_begin = placed.begin;
    placed.issue_end = placed.end;
    return placed;
  }
  placed.issue_begin = RoundTicks(span.issue_begin, unit);
  placed.issue_end = RoundTicks(span.issue_end, unit);
  tracks.Fit(Stream::kHost, placed.issue_begin, placed.issue_end);
  SplitWait(span, is_collective, unit, tracks, placed);
  placed.begin = RoundTicks(span.start, unit);
  tracks.Fit(span.stream, placed.begin, placed.end);
  return placed;
}

struct Input {
  const Program& program;
  const Trace& trace;
  bool is_hta;
};

// Places the spans of one step. Those that the profile leaves out stay unplaced.
void PlaceStep(const Input& input, StepSpans& step, Tracks& tracks, Layout& layout) {
  bool is_empty = true;
  for (std::size_t i = step.first; i < step.last; ++i) {
    const Span& span = input.trace.spans[i];
    const Body& body = BodyOf(input.program, span.body);
    SW_CHECK(span.op.value < body.size(), "a span of no op");
    const OpCode code = input.program.ShapeOf(body.ops[span.op.value]).code;
    if (input.is_hta && code == OpCode::kStreamWait) {
      continue;  // takes no time, so it must not take a microsecond
    }
    const PlacedSpan& placed = layout.placed[i] =
        Place(span, InfoOf(code).is_collective, layout.unit, tracks);
    layout.ranks.back().used[static_cast<std::size_t>(span.stream)] = true;
    step.begin = is_empty ? placed.issue_begin : std::min(step.begin, placed.issue_begin);
    step.end = is_empty ? placed.issue_end : std::max(step.end, placed.issue_end);
    is_empty = false;
  }
}

// Finds the arrows: one for each edge between two tracks.
class FlowFinder {
 public:
  FlowFinder(const Program& program, const Trace& trace, Layout& layout)
      : program_(program), trace_(trace), layout_(layout) {}

  void Run() {
    const std::vector<Span>& spans = trace_.spans;
    std::size_t end = 0;
    for (std::size_t first = 0; first < spans.size(); first = end) {
      const Span& head = spans[first];
      end = first + 1;
      while (end < spans.size() && spans[end].rank == head.rank && spans[end].step == head.step &&
             spans[end].body == head.body) {
        ++end;
      }
      if (first == 0 || spans[first - 1].rank != head.rank ||
          head.step > spans[first - 1].step + 1) {
        // What the steps between would have carried over is not known.
        slots_.assign(program_.carry_slot_count, kNoSpan);
        for (std::vector<std::uint32_t>& waiting : waiting_) {
          waiting.clear();
        }
      }
      RunBody(BodyOf(program_, head.body), first, end);
    }
  }

 private:
  void RunBody(const Body& body, std::size_t first, std::size_t end) {
    span_of_op_.assign(body.size(), kNoSpan);
    for (std::size_t i = first; i < end; ++i) {
      const Span& span = trace_.spans[i];
      for (const Edge edge : body.EdgesOf(span.op)) {
        const std::uint32_t from =
            edge.is_carried() ? slots_[edge.slot()] : span_of_op_[edge.value];
        if (from != kNoSpan && trace_.spans[from].stream != span.stream && IsVisible(from)) {
          waiting_[static_cast<std::size_t>(span.stream)].push_back(from);
        }
      }
      Deliver(static_cast<std::uint32_t>(i), span.stream);
      span_of_op_[span.op.value] = static_cast<std::uint32_t>(i);
    }
    for (std::size_t s = 0; s < body.carries.size(); ++s) {
      if (body.carries[s].valid()) {
        slots_[s] = span_of_op_[body.carries[s].value];
      }
    }
  }

  // An arrow needs a slice with an inside at both ends. One that leads to an op without duration (a
  // stream wait) goes to the next op of that stream, which is what waits.
  void Deliver(std::uint32_t to, Stream stream) {
    std::vector<std::uint32_t>& waiting = waiting_[static_cast<std::size_t>(stream)];
    if (IsVisible(to)) {
      for (const std::uint32_t from : waiting) {
        layout_.flows.push_back({from, to});
      }
    }
    if (IsVisible(to) || stream == Stream::kHost) {
      waiting.clear();
    }
  }
  [[nodiscard]] bool IsVisible(std::uint32_t span) const {
    return layout_.placed[span].end > layout_.placed[span].begin;
  }

  const Program& program_;
  const Trace& trace_;
  Layout& layout_;
  std::vector<std::uint32_t> span_of_op_;
  std::vector<std::uint32_t> slots_;
  std::array<std::vector<std::uint32_t>, kStreamCount> waiting_;
};

}  // namespace

Layout BuildLayout(const Program& program, const Trace& trace, ChromeProfile profile) {
  constexpr std::int64_t kPicosecondsPerMicrosecond = 1'000'000;
  Layout layout;
  const bool is_hta = profile == ChromeProfile::kHta;
  layout.unit = is_hta ? kPicosecondsPerMicrosecond : kPicosecondsPerNanosecond;
  SW_CHECK(trace.spans.size() < kNoSpan, "more spans than 32 bits count");
  layout.placed.resize(trace.spans.size());
  layout.steps = FindSteps(trace, profile);
  Tracks tracks(profile);
  std::uint32_t last_step = 0;
  for (StepSpans& step : layout.steps) {
    const Span& head = trace.spans[step.first];
    if (layout.ranks.empty() || layout.ranks.back().rank != head.rank) {
      layout.ranks.push_back({head.rank, {}});
      layout.ranks.back().used[static_cast<std::size_t>(Stream::kHost)] = true;
      tracks = Tracks(profile);
      if (head.step == 0) {
        tracks.Begin();
      }
    } else if (head.step > last_step + 1) {
      tracks.Forget();
    }
    last_step = head.step;
    PlaceStep({program, trace, is_hta}, step, tracks, layout);
  }
  if (!is_hta) {
    FlowFinder(program, trace, layout).Run();
  }
  return layout;
}

}  // namespace shardwright::internal
