#include "simulator/stages.h"

#include <algorithm>
#include <cstdlib>
#include <map>
#include <memory>
#include <utility>

#include "core/error.h"
#include "schedule/verify.h"
#include "simulator/internal/event_loop.h"
#include "topologies/mesh.h"

namespace shardwright {
namespace {

using internal::EventLoop;
using internal::kNotDone;

// What neighbours, or all stages, do together, one at a time.
struct Meeting {
  std::size_t member_count = 0;
  std::int64_t duration = 0;
  std::int64_t end_bound = 0;                                // no earlier, because of launches
  std::vector<std::pair<std::size_t, std::size_t>> members;  // stage, stream
};

struct StageState {
  internal::EventState events;
  std::vector<Meeting*> meetings;  // by group; null: within the stage
  std::unique_ptr<EventLoop> loop;
  const Speeds* speeds = &internal::kFullSpeeds;
  std::int64_t next_event = 0;
  bool is_changed = true;  // at this moment
};

class Stages final : public internal::Peers {
 public:
  Stages(std::span<const Program> programs, std::span<const PriceTable> prices,
         const EngineOptions& options);
  PipelineTiming Run();
  [[nodiscard]] std::vector<Trace> Traces(std::uint32_t ranks_of_stage, std::uint32_t last) const;
  void Arrive(std::size_t stage, std::size_t stream) override;

 private:
  [[nodiscard]] Meeting* MeetingAt(const StageState& stage, std::size_t stream) const;
  void FindMeetings(const Program& program, std::size_t stage);
  void UpdateSpeeds();
  [[nodiscard]] PipelineTiming Timing() const;

  std::vector<StageState> stages_;
  std::map<std::size_t, Meeting> meetings_;  // by the first of two neighbours; last: of all
};

Stages::Stages(std::span<const Program> programs, std::span<const PriceTable> prices,
               const EngineOptions& options)
    : stages_(programs.size()) {
  for (std::size_t s = 0; s < programs.size(); ++s) {
    StageState& stage = stages_[s];
    internal::BuildCosts(programs[s], prices[s], stage.events.costs);
    internal::CheckRange(programs[s], stage.events.costs, options, programs.size());
    FindMeetings(programs[s], s);
    stage.loop =
        std::make_unique<EventLoop>(programs[s], prices[s], options, stage.events, this, s);
  }
}

void Stages::FindMeetings(const Program& program, std::size_t s) {
  stages_[s].meetings.resize(program.groups.size());
  for (const OpShape& shape : program.shapes) {
    if (SpansStages(program, shape)) {
      const bool is_transfer = IsTransfer(shape.code);
      const std::size_t place = !is_transfer ? stages_.size()
                                : shape.stream == Stream::kNext
                                    ? s
                                    : (s + stages_.size() - 1) % stages_.size();
      meetings_[place].member_count = is_transfer ? 2 : stages_.size();
      stages_[s].meetings[shape.group.value] = &meetings_[place];
    }
  }
}

// Of the head of a stream.
Meeting* Stages::MeetingAt(const StageState& stage, std::size_t stream) const {
  const std::uint32_t group = stage.loop->HeadOf(stream).cost->group;
  return group == internal::kNone ? nullptr : stage.meetings[group];
}

void Stages::Arrive(std::size_t s, std::size_t stream) {
  const internal::StreamHead& head = stages_[s].loop->HeadOf(stream);
  const std::int64_t bound = stages_[s].loop->RecordOf(head.op).issue_end + head.cost->tail;
  Meeting* meeting = MeetingAt(stages_[s], stream);
  if (meeting == nullptr) {
    stages_[s].loop->Start(stream, head.cost->duration, bound);
    return;
  }
  if (meeting->members.size() == meeting->member_count) {  // the one before is over
    meeting->members.clear();
    meeting->duration = meeting->end_bound = 0;
  }
  meeting->members.emplace_back(s, stream);
  meeting->duration = std::max(meeting->duration, head.cost->duration);
  meeting->end_bound = std::max(meeting->end_bound, bound);
  if (meeting->members.size() == meeting->member_count) {
    for (const auto& [member, of_member] : meeting->members) {
      stages_[member].loop->Start(of_member, meeting->duration, meeting->end_bound);
    }
  }
}

// What several do is as slow as on the slowest of them. Marks the stages whose next event may
// change.
void Stages::UpdateSpeeds() {
  for (StageState& stage : stages_) {
    if (stage.loop->SpeedsMayChange()) {
      stage.speeds = &stage.loop->FindSpeeds();
      stage.is_changed = true;
    }
  }
  for (std::size_t s = 0; s < stages_.size(); ++s) {
    if (!stages_[s].is_changed) {
      continue;
    }
    for (const std::size_t stream : stages_[s].loop->Running()) {
      double speed = (*stages_[s].speeds)[stream];
      const Meeting* meeting = MeetingAt(stages_[s], stream);
      if (meeting == nullptr) {
        stages_[s].loop->SetSpeed(stream, speed);
        continue;
      }
      for (const auto& [member, of_member] : meeting->members) {
        speed = std::min(speed, (*stages_[member].speeds)[of_member]);
      }
      for (const auto& [member, of_member] : meeting->members) {
        stages_[member].loop->SetSpeed(of_member, speed);
        stages_[member].next_event = stages_[member].loop->NextEvent();
      }
    }
  }
}

// Of the stages, only those go on in which something ends or can start.
PipelineTiming Stages::Run() {
  for (std::int64_t next = 0; next != kNotDone;) {
    for (StageState& stage : stages_) {
      stage.is_changed = stage.next_event <= next;
      if (stage.is_changed) {
        stage.loop->StartDue();
      }
    }
    UpdateSpeeds();
    next = kNotDone;
    for (StageState& stage : stages_) {
      if (stage.is_changed) {
        stage.next_event = stage.loop->NextEvent();
      }
      next = std::min(next, stage.next_event);
    }
    for (const StageState& stage : stages_) {
      if (stage.next_event > next) {
        stage.loop->AdvanceTo(next);
      } else if (next != kNotDone) {
        stage.loop->FinishDue(next);
      }
    }
  }
  return Timing();
}

std::vector<Trace> Stages::Traces(std::uint32_t ranks_of_stage, std::uint32_t last) const {
  std::vector<Trace> traces(stages_.size());
  for (std::size_t s = 0; s < stages_.size(); ++s) {
    stages_[s].loop->AppendSpans(traces[s].spans, [&](const internal::BodyRun& run) {
      return run.step == 0 || run.step == last;
    });
    for (Span& span : traces[s].spans) {
      span.rank = Rank(static_cast<std::uint32_t>(s) * ranks_of_stage);
    }
  }
  return traces;
}

PipelineTiming Stages::Timing() const {
  PipelineTiming timing;
  std::vector<std::int64_t> fronts(stages_.front().events.runs.size(), 0);  // of all stages
  for (const StageState& stage : stages_) {
    const std::vector<internal::BodyRun>& runs = stage.events.runs;
    SW_CHECK(runs.size() == fronts.size() && runs.back().IsComplete(),
             "stages wait for each other; VerifyRanks rejects that");
    for (std::size_t i = 0; i < runs.size(); ++i) {
      fronts[i] = std::max({fronts[i], runs[i].last_end, runs[i].host_end});
    }
    timing.last.push_back(runs.back().totals);
  }
  const std::size_t n = fronts.size() - 1;
  const std::int64_t last = fronts[n] - fronts[n - 1], before = fronts[n - 1] - fronts[n - 2];
  timing.step_time = SimTime(last);
  timing.is_steady = std::abs(last - before) <= last / 1'000'000'000;  // contended ones are rounded
  return timing;
}

}  // namespace

PipelineTiming RunStages(std::span<const Program> programs, std::span<const PriceTable> prices,
                         const EngineOptions& options, std::vector<Trace>* traces) {
  Stages stages(programs, prices, options);
  const PipelineTiming timing = stages.Run();
  if (traces != nullptr) {
    *traces = stages.Traces(static_cast<std::uint32_t>(MeshOf(programs.front()).StageRanks()),
                            static_cast<std::uint32_t>(options.max_steps - 1));
  }
  return timing;
}

SimTime PipelineResult::Bubble(std::size_t stage) const {
  SimTime bubble;  // what all stages do together stands on the compute stream itself
  for (const Stream stream : {Stream::kPrevious, Stream::kNext, Stream::kCompute}) {
    bubble += timing.last[stage].compute_idle[static_cast<std::size_t>(stream)];
  }
  return bubble;
}

SimulationResult SumOf(const PipelineResult& result) {
  SimulationResult sum;
  sum.step_time = result.timing.step_time;
  const auto ranks = std::ssize(result.memory);
  for (std::size_t s = 0; s < result.timing.last.size(); ++s) {
    sum.bubble += result.Bubble(s) / ranks;
    sum.exposed_comm += result.timing.last[s].ExposedCommunication() / ranks;
  }
  sum.memory = *std::max_element(
      result.memory.begin(), result.memory.end(),
      [](const SimulatedMemory& a, const SimulatedMemory& b) { return a.Needs() < b.Needs(); });
  return sum;
}

PipelineResult MemoryOfStages(std::span<const Program> programs, const Cluster& cluster,
                              const Profile& profile) {
  Simulator simulator(cluster, profile);
  PipelineResult result;
  for (const Program& program : programs) {
    result.memory.push_back(simulator.Allocated(program));
  }
  return result;
}

PipelineTiming TimeOfStages(std::span<const Program> programs, const Cluster& cluster,
                            const Profile& profile, bool contention, std::vector<Trace>* traces) {
  Pricer pricer(cluster, profile);
  std::vector<PriceTable> prices(programs.size());
  for (std::size_t s = 0; s < programs.size(); ++s) {
    pricer.Price(programs[s], prices[s]);
  }
  constexpr int kSteps = 4;
  EngineOptions options;
  options.contention = contention;
  options.max_steps = kSteps;
  return RunStages(programs, prices, options, traces);
}

}  // namespace shardwright
