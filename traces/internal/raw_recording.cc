#include "traces/internal/raw_recording.h"

#include <numeric>
#include <tuple>
#include <utility>

#include "core/error.h"
#include "core/ranges.h"
#include "traces/internal/training_place.h"

namespace shardwright::internal {
namespace {

constexpr std::int64_t kPicoseconds = 1000;  // per nanosecond
// A row takes up to 250 bytes until its place is known.
constexpr std::int64_t kMostRows = 4'000'000;
constexpr std::int64_t kMostNames = std::int64_t{256} << 20;
// A recording of more than this is a damaged clock; the times of a Recording stay far from
// overflow.
constexpr std::int64_t kLongest = std::int64_t{50} * 24 * 3600 * 1'000'000'000;

std::optional<HostRangeKind> RangeOfName(std::string_view name) {
  if (name.starts_with("enumerate(DataLoader)")) {
    return HostRangeKind::kDataLoader;
  }
  if (name.starts_with("Optimizer.step")) {
    return HostRangeKind::kOptimizer;
  }
  if (name.starts_with("Torch-Compiled Region")) {
    return HostRangeKind::kCompiledRegion;
  }
  return std::nullopt;
}

class Resolver {
 public:
  explicit Resolver(RawRecording& raw) : raw_(raw) {}

  ProfilerRecording Run() {
    result_.on_device = !raw_.work.empty();
    if (!result_.on_device) {
      raw_.work = WorkOfHost(raw_);
    }
    if (raw_.work.empty()) {
      throw InputError(raw_.file, "no kernels, collectives or ops",
                       "a recording of training steps, with CPU activities at least");
    }
    std::vector<RawSpan> host = std::exchange(raw_.host, {});
    host.insert(host.end(), raw_.ranges.begin(), raw_.ranges.end());
    FindBase();
    PlaceFinder places(raw_);
    AddActivities(places);
    if (!places.has_units()) {
      FixTails();
    }
    AddCalls();
    Describe(places);
    AddRanges(host);
    return std::move(result_);
  }

 private:
  void FindBase() {
    base_ = INT64_MAX;
    std::int64_t last = INT64_MIN;
    const auto widen = [&](std::int64_t begin, std::int64_t end) {
      base_ = std::min(base_, begin);
      last = std::max(last, end);
    };
    for (const RawWork& row : raw_.work) {
      widen(row.span.begin, row.span.end);
    }
    for (const RawLaunch& row : raw_.launches) {
      widen(row.begin, row.end);
    }
    for (const RawSpan& row : raw_.ranges) {
      widen(row.begin, row.end);
    }
    for (const auto* samples : {&raw_.device_memory, &raw_.host_memory}) {
      for (const RawRecording::Sample& row : *samples) {
        widen(row.time, row.time);
      }
    }
    // Unsigned: the difference of two damaged times can pass the range.
    if (static_cast<std::uint64_t>(last) - static_cast<std::uint64_t>(base_) >
        static_cast<std::uint64_t>(kLongest)) {
      throw InputError(raw_.file, "times that are more than 50 days apart", "one clock");
    }
  }

  [[nodiscard]] SimTime At(std::int64_t nanoseconds) const {
    return SimTime((nanoseconds - base_) * kPicoseconds);
  }

  // Index of the launch of each piece of work; none: kNoSubject.
  [[nodiscard]] std::vector<std::uint32_t> FindLaunches() {
    SortAll(raw_.launches, [](const RawLaunch& a, const RawLaunch& b) {
      return std::tie(a.correlation, a.begin) < std::tie(b.correlation, b.begin);
    });
    std::vector<std::uint32_t> launches(raw_.work.size(), kNoSubject);
    for (std::size_t i = 0; i < raw_.work.size(); ++i) {
      const std::int64_t wanted = raw_.work[i].correlation;
      const auto found = std::lower_bound(
          raw_.launches.begin(), raw_.launches.end(), wanted,
          [](const RawLaunch& launch, std::int64_t number) { return launch.correlation < number; });
      if (result_.on_device && found != raw_.launches.end() && found->correlation == wanted) {
        launches[i] = static_cast<std::uint32_t>(found - raw_.launches.begin());
      }
    }
    return launches;
  }

  void AddActivities(PlaceFinder& places) {
    const std::vector<std::uint32_t> launches = FindLaunches();
    // When the host gave each piece of work away; for the host's own work, when it began.
    const auto given = [&](std::size_t i) {
      return !result_.on_device          ? raw_.work[i].correlation
             : launches[i] != kNoSubject ? raw_.launches[launches[i]].begin
                                         : raw_.work[i].span.begin;
    };
    std::vector<std::uint32_t> order(raw_.work.size());
    std::iota(order.begin(), order.end(), 0U);
    SortAll(order, [&](std::uint32_t a, std::uint32_t b) {
      return std::pair(given(a), a) < std::pair(given(b), b);
    });
    const std::vector<KernelClass> classes = Mapped<KernelClass>(
        raw_.names.names(), [&](const std::string& name) { return ClassOfKernelName(name); });
    for (const std::uint32_t i : order) {
      const TrainingPlace place = places.At(given(i));
      if (place.step == kNoSubject) {
        ++outside_;
        continue;
      }
      Add(raw_.work[i], place, classes[raw_.work[i].span.name]);
      Activity& last = result_.activities.back();
      last.has_issue = !result_.on_device || launches[i] != kNoSubject;
      last.issue_begin = last.has_issue ? At(given(i)) : last.start;
      last.issue_end = last.has_issue && result_.on_device ? At(raw_.launches[launches[i]].end)
                                                           : last.issue_begin;
      unknown_launches_ += last.has_issue ? 0 : 1;
    }
    StableSortBy(result_.activities, &Activity::start);
  }

  void Add(const RawWork& row, const TrainingPlace& place, KernelClass kernel) {
    Activity activity;
    activity.start = At(row.span.begin);
    activity.end = At(row.span.end);
    activity.bytes = row.bytes;
    activity.name = row.span.name;
    activity.queue = row.span.thread;
    activity.step = place.step;
    activity.unit = place.unit;
    activity.group_size = row.group_size;
    activity.micro_batch = place.micro_batch;
    activity.kind = row.kind;
    activity.kernel = kernel;
    activity.collective = row.collective;
    activity.phase = place.phase;
    if (row.kind == ActivityKind::kKernel) {
      if (kernel == KernelClass::kCopy) {
        activity.kind = ActivityKind::kWithinDevice;
      } else if (place.phase == Phase::kOptimizer) {
        activity.kernel = KernelClass::kOptimizer;
      }
    }
    result_.activities.push_back(activity);
  }

  void AddCalls() {
    SortBy(raw_.model_calls, &RawModelCall::begin);
    PlaceFinder places(raw_);
    for (const RawModelCall& row : raw_.model_calls) {
      const TrainingPlace place = places.At(row.begin);
      if (place.step != kNoSubject && place.phase != Phase::kOptimizer) {
        result_.calls.push_back(row.call);
        result_.calls.back().step = place.step;
      }
    }
  }

  // Steps are described already.
  void AddRanges(const std::vector<RawSpan>& host) {
    for (const RawSpan& span : host) {
      const std::optional<HostRangeKind> kind = RangeOfName(result_.names[span.name]);
      const SimTime begin = At(span.begin);
      const auto after =
          std::partition_point(result_.steps.begin(), result_.steps.end(),
                               [&](const RecordedInterval& step) { return step.begin <= begin; });
      if (kind && after != result_.steps.begin() && begin < (after - 1)->end) {
        const auto step = static_cast<std::uint32_t>(after - result_.steps.begin() - 1);
        result_.ranges.push_back({*kind, step, begin, At(span.end)});
      }
    }
    StableSortBy(result_.ranges, &HostRange::begin);
  }

  // Without units nothing says where backward ends for good: what follows a step's last backward
  // work is not a forward of its own but clipping and the like.
  void FixTails() {
    std::vector<std::pair<SimTime, std::uint16_t>> last(raw_.ranges.size() + 1);
    std::uint32_t steps = 0;
    for (const Activity& activity : result_.activities) {
      steps = std::max(steps, activity.step + 1);
    }
    last.assign(steps, {SimTime(-1), 0});
    for (const Activity& activity : result_.activities) {
      if (activity.phase == Phase::kBackward && activity.issue_begin > last[activity.step].first) {
        last[activity.step] = {activity.issue_begin, activity.micro_batch};
      }
    }
    for (Activity& activity : result_.activities) {
      const auto [time, micro_batch] = last[activity.step];
      if (time >= SimTime(0) && activity.issue_begin > time) {
        activity.phase = Phase::kOptimizer;
        activity.micro_batch = micro_batch;
      }
    }
  }

  void Describe(const PlaceFinder& places) {
    result_.file = raw_.file;
    result_.source = raw_.source;
    result_.rank = raw_.rank;
    result_.ranks = raw_.ranks;
    result_.events = raw_.events;
    result_.has_units = places.has_units();
    result_.units = places.units();
    for (const RawSpan& step : places.steps()) {
      const std::string name =
          raw_.names.names().empty() ? std::string() : raw_.names.names()[step.name];
      result_.steps.push_back({name, At(step.begin), At(step.end)});
    }
    auto& samples = raw_.device_memory.empty() ? raw_.host_memory : raw_.device_memory;
    StableSort(samples, [](const auto& a, const auto& b) { return a.time < b.time; });
    for (const RawRecording::Sample& sample : samples) {
      result_.memory.push_back({At(sample.time), Bytes(sample.allocated), Bytes(sample.reserved)});
    }
    result_.names = raw_.names.Take();
    if (!places.note().empty()) {
      result_.notes.push_back(places.note());
    }
    if (outside_ > 0) {
      result_.notes.push_back(std::to_string(outside_) + " pieces of work outside all steps");
    }
    if (unknown_launches_ > 0) {
      result_.notes.push_back(std::to_string(unknown_launches_) +
                              " pieces of work without a launch: placed by when they ran");
    }
    if (!result_.has_units) {
      result_.notes.emplace_back("no FSDP:: ranges: units are told by the order of collectives");
    }
  }

  RawRecording& raw_;
  ProfilerRecording result_;
  std::int64_t base_ = 0;
  std::int64_t outside_ = 0;
  std::int64_t unknown_launches_ = 0;
};

}  // namespace

NameTable::NameTable(const std::string& file) : bytes_(file, "bytes of names", kMostNames) {}

RawRecording::RawRecording(const std::string& from, std::string by)
    : file(from), source(std::move(by)), rows(from, "rows of work", kMostRows), names(from) {}

std::uint32_t NameTable::Find(std::string_view text) {
  const auto found = numbers_.find(text);
  if (found != numbers_.end()) {
    return found->second;
  }
  constexpr std::int64_t kEntry = 100;  // a node of the table and two strings
  bytes_.Take(kEntry + 2 * std::ssize(text));
  const auto number = static_cast<std::uint32_t>(names_.size());
  names_.emplace_back(text);
  numbers_.emplace(names_.back(), number);
  return number;
}

ProfilerRecording Resolve(RawRecording raw) {
  return Resolver(raw).Run();
}

}  // namespace shardwright::internal
