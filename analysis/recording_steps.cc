#include "analysis/recording_steps.h"

#include <deque>
#include <map>
#include <utility>

#include "core/error.h"
#include "core/ranges.h"

namespace shardwright {
namespace {

// Follows the compute queue and charges its idle time.
class QueueWalk {
 public:
  QueueWalk(const ProfilerRecording& recording, std::uint32_t queue) : recording_(recording) {
    for (const Activity& activity : recording.activities) {
      (activity.queue == queue ? own_ : other_).push_back(&activity);
    }
    StableSort(other_, [](const Activity* a, const Activity* b) {
      return std::pair(a->start, a->end) < std::pair(b->start, b->end);
    });
  }

  std::vector<RecordingStep> Run() {
    std::vector<RecordingStep> steps(recording_.steps.size());
    std::vector<bool> has_work(steps.size(), false), counts(steps.size(), false);
    for (const Activity& activity : recording_.activities) {
      const auto index = static_cast<std::size_t>(ClassOf(activity));
      const double seconds = ToSeconds(activity.end - activity.start).value;
      steps[activity.step].busy[index] += seconds;
      ++steps[activity.step].pieces[index];
    }
    SimTime end;
    bool is_first = true;
    for (const Activity* activity : own_) {
      RecordingStep& step = steps[activity->step];
      if (is_first) {
        end = recording_.steps[activity->step].begin;
      } else if (!has_work[activity->step]) {
        counts[activity->step] = true;
      }
      is_first = false;
      const bool begins_step = !has_work[activity->step];
      has_work[activity->step] = true;
      const double idle_before = step.parts.host_issue + step.parts.other;
      const std::size_t waits_before = step.waits.size();
      Wait(*activity, end, step);
      const double idle = step.parts.host_issue + step.parts.other - idle_before;
      if (begins_step) {
        step.before_first = idle;
      } else if (idle > 0) {
        const bool any_wait = step.waits.size() > waits_before;
        step.idle.push_back({any_wait ? step.waits.back().activity : IndexOf(*activity), idle});
      }
      const SimTime begin = std::max(end, activity->start);
      if (activity->end > begin) {
        step.parts.run[static_cast<std::size_t>(ClassOf(*activity))] +=
            ToSeconds(activity->end - begin).value;
      }
      end = std::max(begin, activity->end);  // idle time is charged once, also before empty work
    }
    const bool any = IsIn(counts, true);
    std::vector<RecordingStep> result;
    for (std::size_t i = 0; i < steps.size(); ++i) {
      steps[i].step = static_cast<std::uint32_t>(i);
      steps[i].parts.period = steps[i].parts.Sum();
      if (any ? counts[i] : has_work[i]) {
        result.push_back(steps[i]);
      }
    }
    return result;
  }

 private:
  // Charges the idle time from `from` to the start of `next`.
  void Wait(const Activity& next, SimTime from, RecordingStep& step) {
    StepBreakdown& parts = step.parts;
    const SimTime idle_from = from;
    if (recording_.on_device && next.has_issue) {
      const SimTime issued = std::min(next.issue_end, next.start);
      if (issued > from) {
        parts.host_issue += ToSeconds(issued - from).value;
        from = issued;
      }
    }
    for (; next_other_ < other_.size() && other_[next_other_]->start < next.start; ++next_other_) {
      if (running_.empty() || running_.back()->end < other_[next_other_]->end) {
        running_.push_back(other_[next_other_]);
      }
    }
    while (!running_.empty() && from < next.start) {
      const Activity* activity = running_.front();
      const SimTime begin = std::max(from, activity->start);
      const SimTime end = std::min(next.start, activity->end);
      if (end > begin) {
        Idle(parts) += ToSeconds(begin - from).value;
        parts.wait[static_cast<std::size_t>(StreamOf(*activity))] += ToSeconds(end - begin).value;
        step.waits.push_back(
            {IndexOf(*activity), ToSeconds(end - begin).value, activity->start >= idle_from});
        from = end;
      }
      if (activity->end > from) {
        break;  // it goes on
      }
      running_.pop_front();
    }
    if (next.start > from) {
      Idle(parts) += ToSeconds(next.start - from).value;
    }
  }

  [[nodiscard]] std::size_t IndexOf(const Activity& activity) const {
    return static_cast<std::size_t>(&activity - recording_.activities.data());
  }

  // Where the host itself computes, what nothing else explains is what it does between two ops.
  [[nodiscard]] double& Idle(StepBreakdown& parts) const {
    return recording_.on_device ? parts.other : parts.host_issue;
  }

  const ProfilerRecording& recording_;
  std::vector<const Activity*> own_, other_;  // by start
  std::size_t next_other_ = 0;
  // That began before the next piece of work, by start. One that ends no later than those before it
  // explains nothing more and is left out, so that they are by end, too.
  std::deque<const Activity*> running_;
};

}  // namespace

OpClass ClassOf(const Activity& activity) {
  if (activity.kind == ActivityKind::kCollective) {
    return activity.collective == OpCode::kAllGather       ? OpClass::kAllGather
           : activity.collective == OpCode::kReduceScatter ? OpClass::kReduceScatter
           : activity.collective == OpCode::kAllReduce     ? OpClass::kAllReduce
                                                           : OpClass::kOtherCollective;
  }
  return activity.kind == ActivityKind::kKernel         ? ClassOf(activity.kernel)
         : activity.kind == ActivityKind::kWithinDevice ? OpClass::kDeviceCopy
                                                        : OpClass::kHostCopy;
}

Stream StreamOf(const Activity& activity) {
  if (activity.kind == ActivityKind::kCollective) {
    return activity.collective == OpCode::kAllGather       ? Stream::kGather
           : activity.collective == OpCode::kReduceScatter ? Stream::kReduce
                                                           : Stream::kReplicate;
  }
  return activity.kind == ActivityKind::kToDevice       ? Stream::kH2d
         : activity.kind == ActivityKind::kToHost       ? Stream::kD2h
         : activity.kind == ActivityKind::kWithinDevice ? Stream::kCopyIn
                                                        : Stream::kCompute;
}

std::uint32_t BusiestQueue(const ProfilerRecording& recording) {
  std::map<std::uint32_t, std::int64_t> busy;
  for (const Activity& activity : recording.activities) {
    if (activity.kind == ActivityKind::kKernel) {
      busy[activity.queue] += (activity.end - activity.start).value;
    }
  }
  const auto largest = std::max_element(
      busy.begin(), busy.end(), [](const auto& a, const auto& b) { return a.second < b.second; });
  if (largest == busy.end()) {
    throw InputError(recording.file, "no compute work inside of steps",
                     "the kernels or ops of at least one training step");
  }
  return largest->first;
}

std::vector<RecordingStep> FindSteps(const ProfilerRecording& recording) {
  return QueueWalk(recording, BusiestQueue(recording)).Run();
}

}  // namespace shardwright
