// Finds the rank that all others wait for. Example: 4 ranks, time-out 60 s. Rank 2 hangs before it
// issues collective 12 of the group. Rank 0 has submitted 14 collectives; number 12 has begun on
// its stream, 11 are over.
//
// After 60 s in collective 12 rank 0 looks at what the others told last. Ranks 1 and 3 have begun
// 12. Rank 2 has begun 11, which is not more than rank 0 has finished, so rank 2 is missing. The
// message: "rank 0, op ...: waited 60000 ms for rank 2 (collective 12 of group shard; rank 2 has
// begun 11 and issued 11)". Without such reports every rank would blame all others.
//
// Progress is found with two events around each collective: `begin` over says that the stream came
// to it, `end` over says that it is finished. Only the oldest one under way of each communicator is
// asked for, O(communicators) queries every 50 ms.

#include "executor/cuda/collective_watch.h"

#include <algorithm>
#include <utility>

#include "core/error.h"
#include "core/text.h"
#include "core/threads.h"

namespace shardwright {
namespace {

// "rank 3", or "ranks 1, 3".
std::string RanksText(const std::set<std::int64_t>& ranks) {
  return (ranks.size() == 1 ? "rank " : "ranks ") + Listed(ranks);
}

}  // namespace

CollectiveWatch::CollectiveWatch(std::int64_t rank, std::chrono::milliseconds timeout,
                                 std::chrono::milliseconds first, Hooks hooks)
    : rank_(rank), timeout_(timeout), first_(first), hooks_(std::move(hooks)) {}

CollectiveWatch::~CollectiveWatch() {
  {
    const std::lock_guard lock(mutex_);
    stopping_ = true;
    stopped_.notify_all();
  }
  if (thread_.joinable()) {
    thread_.join();
  }
}

std::size_t CollectiveWatch::AddCommunicator(const GroupRanks& ranks, const std::string& name) {
  const std::lock_guard lock(mutex_);
  communicators_.push_back({.ranks = ranks, .name = name, .progress = {}, .under_way = {}});
  return communicators_.size() - 1;
}

CollectiveWatch::Events CollectiveWatch::Next(std::size_t communicator) {
  const std::lock_guard lock(mutex_);
  ++communicators_[communicator].progress.submitted;
  Events events;
  for (GpuEvent* const event : {&events.begin, &events.end}) {
    if (free_events_.empty()) {
      *event = hooks_.new_event();
    } else {
      *event = free_events_.back();
      free_events_.pop_back();
    }
  }
  return events;
}

void CollectiveWatch::Submitted(std::size_t communicator, const std::string& op,
                                const Events& events) {
  const std::lock_guard lock(mutex_);
  communicators_[communicator].under_way.push_back({op, events, std::nullopt});
}

// Collectives of a communicator run in order, so those that are over are at the front.
void CollectiveWatch::Update(Communicator& communicator, Clock::time_point now) {
  std::deque<Flight>& under_way = communicator.under_way;
  while (!under_way.empty() && hooks_.is_over(under_way.front().events.end)) {
    free_events_.push_back(under_way.front().events.begin);
    free_events_.push_back(under_way.front().events.end);
    under_way.pop_front();
    ++communicator.progress.over;
  }
  communicator.progress.begun = communicator.progress.over;
  if (!under_way.empty()) {
    Flight& first = under_way.front();
    if (!first.begun.has_value() && hooks_.is_over(first.events.begin)) {
      first.begun = now;
    }
    communicator.progress.begun += first.begun.has_value() ? 1 : 0;
  }
}

std::set<std::int64_t> CollectiveWatch::Missing(std::size_t index,
                                                const Communicator& communicator) const {
  std::set<std::int64_t> late, all;
  for (std::int64_t m = 0; m < communicator.ranks.size; ++m) {
    const std::int64_t rank = communicator.ranks.first + m * communicator.ranks.stride;
    if (rank == rank_) {
      continue;
    }
    all.insert(rank);
    const std::vector<CollectiveProgress> told = hooks_.told_by(rank);
    if (index < told.size() && told[index].begun <= communicator.progress.over) {
      late.insert(rank);
    }
  }
  const std::set<std::int64_t>& missing = late.empty() ? all : late;
  return hooks_.at_fault ? hooks_.at_fault(missing) : missing;
}

std::string CollectiveWatch::Place(const Communicator& communicator) const {
  std::string text = "rank " + std::to_string(rank_);
  if (!communicator.under_way.empty()) {
    text += ", op " + communicator.under_way.front().op;
  }
  return text;
}

// The message of the example above.
std::string CollectiveWatch::DescribeStuck(std::size_t index,
                                           const Communicator& communicator) const {
  const std::set<std::int64_t> missing = Missing(index, communicator);
  std::string text = Place(communicator) + ": waited " +
                     std::to_string(LimitOf(communicator).count()) + " ms for " +
                     RanksText(missing) + " (collective " +
                     std::to_string(communicator.progress.over + 1) + " of " + communicator.name;
  for (const std::int64_t rank : missing) {
    const std::vector<CollectiveProgress> told = hooks_.told_by(rank);
    if (index < told.size()) {
      text += "; rank " + std::to_string(rank) + " has begun " + std::to_string(told[index].begun) +
              " and issued " + std::to_string(told[index].submitted);
    }
  }
  return text + ')';
}

// Example: with a time-out of 60 s progress is told every 7.5 s at most, and only when it has
// changed.
void CollectiveWatch::Tell(Clock::time_point now) {
  constexpr int kPerTimeout = 8;
  std::vector<CollectiveProgress> mine;
  {
    const std::lock_guard lock(mutex_);
    for (Communicator& communicator : communicators_) {
      Update(communicator, now);
      mine.push_back(communicator.progress);
    }
  }
  // Not under the lock, for which launches wait: the connection may be slow.
  if (mine != told_ && (!told_at_.has_value() || now - *told_at_ >= timeout_ / kPerTimeout)) {
    told_at_ = now;
    told_ = mine;
    hooks_.tell(mine);
  }
}

// Errors that NCCL itself reports come first: they are faster than a time-out.
std::string CollectiveWatch::Look(Clock::time_point now) {
  Tell(now);
  const std::lock_guard lock(mutex_);
  for (std::size_t c = 0; c < communicators_.size(); ++c) {
    const Communicator& communicator = communicators_[c];
    const std::string problem = hooks_.problem_of(c);
    if (!problem.empty()) {
      return Place(communicator) + ": " + problem + " (" + communicator.name + ')';
    }
    if (!communicator.under_way.empty() && communicator.under_way.front().begun.has_value() &&
        now - *communicator.under_way.front().begun > LimitOf(communicator)) {
      return DescribeStuck(c, communicator);
    }
  }
  return {};
}

void CollectiveWatch::Start() {
  thread_ = StartThread([this] {
    constexpr std::chrono::milliseconds kPause{50};
    std::string cause;
    for (bool goes_on = true; goes_on;) {
      try {
        cause = Look(Clock::now());
      } catch (const RunError& error) {  // the GPU or a connection is lost
        cause = "rank " + std::to_string(rank_) + ": " + error.what();
      }
      std::unique_lock lock(mutex_);
      goes_on = cause.empty() &&
                !stopped_.wait_for(lock, std::min(kPause, timeout_ / 4), [&] { return stopping_; });
    }
    if (!cause.empty()) {
      hooks_.fail(cause);
    }
  });
}

}  // namespace shardwright
