#include "analysis/calibration_samples.h"

#include <array>
#include <functional>
#include <numeric>
#include <queue>
#include <span>
#include <utility>

#include "analysis/piecewise_fit.h"
#include "analysis/step_breakdown.h"
#include "core/error.h"
#include "core/ranges.h"

namespace shardwright {
namespace {

// Beside another op for less than this part of its time, an op is as good as alone.
constexpr double kAloneShare = 0.02;

std::vector<std::size_t> StepsThatCount(const std::vector<RecordedStep>& steps) {
  std::vector<std::size_t> later, last;
  for (std::size_t i = 0; i < steps.size(); ++i) {
    if (steps[i].previous != RecordedStep::kNoStep) {
      later.push_back(i);
    }
    if (i + 1 == steps.size() || steps[i + 1].rank != steps[i].rank) {
      last.push_back(i);
    }
  }
  return later.empty() ? last : later;
}

std::vector<RecordedStep> StepsOf(const CalibrationRun& run) {
  std::vector<RecordedStep> steps = FindRecordedSteps(run.program, run.trace);
  if (steps.empty()) {
    throw InputError(run.name, "no complete step", "all ops of at least one step");
  }
  return steps;
}

// By span of one step: how long other streams of the rank were busy meanwhile, in seconds.
std::vector<double> OverlapOf(std::span<const Span> spans) {
  std::vector<std::size_t> order(spans.size());
  std::iota(order.begin(), order.end(), std::size_t{0});
  StableSort(order, [&](std::size_t a, std::size_t b) { return spans[a].start < spans[b].start; });
  std::vector<double> overlap(spans.size(), 0);
  std::array<std::size_t, kStreamCount> latest{};
  latest.fill(spans.size());
  for (const std::size_t i : order) {
    if (spans[i].stream == Stream::kHost) {
      continue;
    }
    const auto own = static_cast<std::size_t>(spans[i].stream);
    for (std::size_t stream = 0; stream < kStreamCount; ++stream) {
      const std::size_t other = latest[stream];
      if (stream == own || other == spans.size() || spans[other].end <= spans[i].start) {
        continue;
      }
      const double both =
          ToSeconds(std::min(spans[other].end, spans[i].end) - spans[i].start).value;
      overlap[i] += both;
      overlap[other] += both;
    }
    latest[own] = i;
  }
  return overlap;
}

// What is known about one shape so far. The better kinds of spans replace the worse ones.
struct Gathered {
  std::vector<double> alone, beside_others, held_by_issue, issue;
  std::vector<double> lasted, computed;
  std::int64_t ops = 0;
};

// Ops that the host has issued and that have not ended. A driver's queue holds about a thousand
// launches; when it is full, issuing one lasts until another ends, which says nothing of the host.
class Outstanding {
 public:
  static constexpr std::size_t kMost = 256;  // an op has several launches

  // Before the op of this span, in the order of issue.
  [[nodiscard]] bool HoldsBack(const Span& span) {
    while (!ends_.empty() && ends_.top() <= span.issue_begin) {
      ends_.pop();
    }
    const bool is_full = ends_.size() >= kMost;
    ends_.push(span.end);
    return is_full;
  }

 private:
  std::priority_queue<SimTime, std::vector<SimTime>, std::greater<>> ends_;
};

// From when an op could have started until it ended: handing it to its stream is part of its price,
// as the gap between kernels is. `before` is the end of the op before it on its stream. Waiting for
// other ranks is not, nor for a core, where the trace says what the op's thread computed: where
// ranks take turns, how long an op lasted says more about the others.
double SecondsOf(const CalibrationRun& run, std::span<const Span> spans, std::size_t op,
                 SimTime before) {
  const Body& body = run.program.step;
  const Span& span = spans[op];
  SimTime begin = std::max(span.issued, before);
  bool is_known = span.stream == Stream::kCompute && before.value > 0 &&
                  !InfoOf(run.program.ShapeOf(body.ops[op]).code).is_collective;
  for (const Edge& edge : body.EdgesOf(OpId(op))) {
    is_known = is_known && !edge.is_carried();
    begin = edge.is_carried() ? begin : std::max(begin, spans[edge.op().value].end);
  }
  const SimTime handing = is_known ? span.start - std::min(begin, span.start) : SimTime(0);
  const bool is_collective = InfoOf(run.program.ShapeOf(body.ops[op]).code).is_collective;
  const bool counts_cpu = span.cpu > SimTime(0) && (!is_collective || run.cluster.RanksTakeTurns());
  return ToSeconds(handing + (counts_cpu ? span.cpu : span.end - span.start)).value;
}

void AddStep(const CalibrationRun& run, const RecordedStep& step, Outstanding& outstanding,
             std::vector<Gathered>& shapes, std::vector<double>& wakes) {
  const Body& body = run.program.step;
  const auto spans = std::span(run.trace.spans).subspan(step.first, body.size());
  const std::vector<double> overlap = OverlapOf(spans);
  std::array<SimTime, kStreamCount> ends{};
  for (std::size_t i = 0; i < body.size(); ++i) {
    const Span& span = spans[i];
    SimTime& before = ends[static_cast<std::size_t>(span.stream)];
    const double seconds = SecondsOf(run, spans, i, before);
    before = span.end;
    const bool was_held_back = outstanding.HoldsBack(span);
    if (run.program.ShapeOf(body.ops[i]).code == OpCode::kHostWait) {
      if (span.ready > span.issue_begin) {  // it did wait
        wakes.push_back(ToSeconds(span.start - span.ready).value);
      }
      continue;
    }
    Gathered& shape = shapes[body.ops[i].shape.value];
    ++shape.ops;
    if (!was_held_back) {
      shape.issue.push_back(ToSeconds(span.issue_end - span.issue_begin).value);
    }
    // An op ends no earlier than its last launch plus its last kernel. When half of it or more lies
    // behind the last launch that rule was not what ended it, however many kernels it has.
    if (ToSeconds(span.issue_end - span.start).value > seconds / 2) {
      shape.held_by_issue.push_back(seconds);
    } else if (overlap[i] <= kAloneShare * seconds) {
      shape.alone.push_back(seconds);
      if (span.stream == Stream::kCompute && span.cpu > SimTime(0)) {
        shape.lasted.push_back(ToSeconds(span.end - span.start).value);
        shape.computed.push_back(ToSeconds(span.cpu).value);
      }
    } else {
      shape.beside_others.push_back(seconds);
    }
  }
}

// A step that counts for nothing, but whose ops may be under way when the next one begins.
void SkipStep(const CalibrationRun& run, const RecordedStep& step, Outstanding& outstanding) {
  for (const Span& span : std::span(run.trace.spans).subspan(step.first, run.program.step.size())) {
    (void)outstanding.HoldsBack(span);
  }
}

}  // namespace

CalibrationSamples CollectSamples(const std::vector<CalibrationRun>& runs) {
  CalibrationSamples samples;
  for (std::size_t r = 0; r < runs.size(); ++r) {
    const CalibrationRun& run = runs[r];
    if (run.shapes != nullptr) {
      for (ShapeSample sample : *run.shapes) {
        sample.run = r;
        samples.shapes.push_back(sample);
      }
      continue;
    }
    if (run.recordings != nullptr) {
      AddRecordings(runs, r, samples);
      continue;
    }
    const std::vector<RecordedStep> steps = StepsOf(run);
    std::vector<Gathered> shapes(run.program.shapes.size());
    const std::vector<std::size_t> counted = StepsThatCount(steps);
    Outstanding outstanding;
    for (std::size_t i = 0; i < steps.size(); ++i) {
      if (i > 0 && steps[i].rank != steps[i - 1].rank) {
        outstanding = {};
      }
      if (std::binary_search(counted.begin(), counted.end(), i)) {
        AddStep(run, steps[i], outstanding, shapes, samples.wakes);
      } else {
        SkipStep(run, steps[i], outstanding);
      }
    }
    for (std::size_t s = 0; s < shapes.size(); ++s) {
      const Gathered& from = shapes[s];
      if (from.ops == 0) {
        continue;  // in init or warmup only
      }
      ShapeSample sample;
      sample.run = r;
      sample.shape = ShapeId(s);
      sample.issue = from.issue.empty() ? 0 : MedianOf(from.issue);
      sample.ops = from.ops;
      // What issuing held up says nothing about kernels.
      const std::vector<double>& best = from.alone.empty() ? from.beside_others : from.alone;
      sample.seconds = best.empty() ? 0 : MedianOf(best);
      sample.lasted = from.lasted.empty() ? 0 : MedianOf(from.lasted);
      sample.computed = from.computed.empty() ? 0 : MedianOf(from.computed);
      samples.shapes.push_back(sample);
    }
  }
  return samples;
}

Seconds MeasuredStepTime(const CalibrationRun& run) {
  if (run.recordings != nullptr) {
    return RecordedStepTime(*run.recordings);
  }
  const std::vector<RecordedStep> steps = StepsOf(run);
  const std::vector<std::size_t> chosen = StepsThatCount(steps);
  std::vector<double> periods = Mapped<double>(chosen, [&](const std::size_t index) {
    return BreakDown(run.program, run.trace, steps, index).period;
  });
  return Seconds(MedianOf(std::move(periods)));
}

}  // namespace shardwright
