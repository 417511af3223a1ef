// Steps of many ranks with noise, side by side.
//
// Example: 64 ranks, each op's duration with a deviation of 2 %. A collective behind 10 ms of
// independent ops of 1 ms each starts when the slowest rank arrives. Arrivals deviate by 0.02 x 1
// ms x sqrt(10) = 63 us. The latest of 64 is 2.3 deviations late: 148 us per such collective.
//
// Beyond 64 ranks 64 are followed, the slow ones first. The last arrival of the others is drawn as
// the largest of that many normal deviates, by inversion: O(1) for any number of ranks.
//
// Why not the event loop of internal/event_loop.h: tried on 2026-12-01 with 64 unequal ranks of
// llama-2-7b (1,815 ops). This loop takes 27 ns of CPU per rank and op with noise, 4.4 without. An
// EventLoop per rank takes 480 where only ranks with an event are touched, and 50 by itself. Its
// mean step, with exact contention, was 0.04 % shorter.

#include "simulator/jitter.h"

#include <cmath>
#include <random>
#include <string>

#include <boost/math/special_functions/erf.hpp>

#include "core/error.h"
#include "core/ranges.h"
#include "simulator/internal/engine_state.h"
#include "topologies/mesh.h"

namespace shardwright {
namespace {

using internal::Cost;
using internal::kNever;
using internal::kNone;

constexpr int kLeastSettlingSteps = 20;  // a transient may repeat for a while
constexpr int kMostSettlingSteps = 100;  // left out, until the host's lead and the streams settle
constexpr int kMostCycle = 12;           // steps in which an alternating step time repeats
constexpr double kLeastFactor = 0.1;

std::int64_t Rounded(double value) {
  return std::llround(value);
}

// Ranks that are followed: the slowest ones (at most half), then from rank 0 on.
std::vector<SlowRank> Followed(const JitterOptions& options) {
  const auto most = static_cast<std::int64_t>(kMostSimulatedRanks);
  std::vector<SlowRank> slow = options.slow_ranks;
  StableSortBy(slow, &SlowRank::factor, std::greater<>());
  if (options.ranks > most) {
    slow.resize(std::min(slow.size(), kMostSimulatedRanks / 2));
  }
  std::vector<SlowRank> followed = slow;
  for (std::int64_t r = 0; r < options.ranks && std::ssize(followed) < most; ++r) {
    if (!IsIn(slow, r, &SlowRank::rank)) {
      followed.push_back({r, 1.0});
    }
  }
  SortBy(followed, &SlowRank::rank);
  return followed;
}

// The followed members of one instance of a communicator.
struct Party {
  std::vector<std::uint32_t> members;
  std::int64_t others = 0;  // members that are not followed
};

std::vector<Party> PartiesOf(const Group& group, const std::vector<SlowRank>& followed) {
  std::vector<Party> parties;
  std::vector<std::int64_t> firsts;  // lowest rank of each
  for (std::uint32_t i = 0; i < followed.size(); ++i) {
    const std::int64_t first =
        PlaceInGroup(group, Rank(static_cast<std::size_t>(followed[i].rank))).base;
    const auto known = FindIn(firsts, first);
    if (known == firsts.end()) {
      firsts.push_back(first);
      parties.push_back({{i}, group.size - 1});
    } else {
      Party& party = parties[static_cast<std::size_t>(known - firsts.begin())];
      party.members.push_back(i);
      --party.others;
    }
  }
  return parties;
}

// Runs steps of the followed ranks side by side, op by op in issue order: an op waits only for ops
// issued before it, so one pass knows all times.
class Lockstep {
 public:
  Lockstep(const Program& program, const PriceTable& prices, std::span<const Span> steady,
           const JitterOptions& options);

  // Runs one step; returns the time by which everything is complete on all ranks.
  std::int64_t RunStep();
  [[nodiscard]] double waiting() const { return waiting_; }
  [[nodiscard]] std::size_t followed() const { return ranks_.size(); }
  void ResetWaiting() { waiting_ = 0; }

 private:
  [[nodiscard]] std::int64_t* EndsOf(std::uint32_t op) { return ends_.data() + op * ranks_.size(); }
  void FindReady(std::uint32_t op);
  void RunHostOp(std::uint32_t op, const Cost& cost);
  void RunOwnOp(std::uint32_t op, const Cost& cost);
  void RunCollective(std::uint32_t op, const Cost& cost);
  void Meet(const Party& party);
  void FindSpread();
  double Factor(double sigma);
  double LargestOf(std::int64_t count);

  const Program& program_;
  const JitterOptions& options_;
  std::vector<SlowRank> ranks_;
  // With noise of ranks: the followed rank that gets the speed of the slowest rank outside of the
  // followed ones, or keeps its own if that is slower. Such a rank is slow all through a step, so
  // it decides when noise of ranks is larger than noise of ops.
  std::size_t deputy_ = kNone;
  std::vector<Cost> costs_;                  // by shape
  std::vector<std::int64_t> durations_;      // by op
  std::vector<std::vector<Party>> parties_;  // by group
  std::vector<std::int64_t> ends_;           // by op, then rank; of this step
  std::vector<std::int64_t> slots_;          // by carry slot, then rank
  // By rank; streams and communicators: by index, then rank.
  std::vector<std::int64_t> host_, ready_, issued_, arrival_, start_;
  std::vector<double> speed_;  // factors on durations in this step
  std::vector<std::int64_t> stream_free_, group_free_;
  double mean_arrival_ = 0, arrival_deviation_ = 0;
  double waiting_ = 0;  // summed over collectives, mean over ranks
  std::mt19937_64 random_;
  std::normal_distribution<double> normal_;
};

Lockstep::Lockstep(const Program& program, const PriceTable& prices, std::span<const Span> steady,
                   const JitterOptions& options)
    : program_(program), options_(options), ranks_(Followed(options)), random_(options.seed) {
  internal::BuildCosts(program, prices, costs_);
  const Body& body = program.step;
  SW_CHECK(steady.size() == body.size(), "one span per op of a step is needed");
  durations_.resize(body.size());
  for (std::uint32_t i = 0; i < body.size(); ++i) {
    const Span& span = steady[i];
    const Cost& cost = costs_[body.ops[i].shape.value];
    SW_CHECK(span.op == OpId(i), "the spans of a step are in op order");
    // Where an op ended with its last launch, its span tells nothing about its work.
    const bool is_launch_bound = span.end.value <= span.issue_end.value + cost.tail;
    durations_[i] =
        cost.on_host || is_launch_bound ? cost.duration : span.end.value - span.start.value;
  }
  if (options.rank_sigma > 0.0 && options.ranks > std::ssize(ranks_)) {
    const auto alike = FindIn(ranks_, 1.0, &SlowRank::factor);
    deputy_ = static_cast<std::size_t>(alike - ranks_.begin());
  }
  for (const Group& group : program.groups) {
    parties_.push_back(PartiesOf(group, ranks_));
  }
  const std::size_t n = ranks_.size();
  ends_.resize(body.size() * n);
  slots_.assign(program.carry_slot_count * n, kNever);
  for (auto* by_rank : {&host_, &ready_, &issued_, &arrival_, &start_}) {
    by_rank->assign(n, 0);
  }
  speed_.assign(n, 1.0);
  stream_free_.assign(kStreamCount * n, 0);
  group_free_.assign(program.groups.size() * n, kNever);
}

double Lockstep::Factor(double sigma) {
  return sigma > 0.0 ? std::max(kLeastFactor, 1.0 + sigma * normal_(random_)) : 1.0;
}

// The largest of `count` standard normal deviates, which exceeds x with 1 - P(z <= x)^count.
double Lockstep::LargestOf(std::int64_t count) {
  const double u = std::uniform_real_distribution<double>(0.0, 1.0)(random_);
  const double tail = -std::expm1(std::log(std::max(u, 1e-300)) / static_cast<double>(count));
  return NormalUpperQuantile(std::clamp(tail, 1e-300, 1.0 - 1e-16));
}

// When what an op's edges stand for has ended, by rank.
void Lockstep::FindReady(std::uint32_t op) {
  const std::size_t n = ranks_.size();
  std::fill(ready_.begin(), ready_.end(), kNever);
  for (const Edge edge : internal::EdgesOf(program_.step, op)) {
    const std::int64_t* ends =
        edge.is_carried() ? slots_.data() + edge.slot() * n : EndsOf(edge.value);
    for (std::size_t r = 0; r < n; ++r) {
      ready_[r] = std::max(ready_[r], ends[r]);
    }
  }
}

void Lockstep::RunHostOp(std::uint32_t op, const Cost& cost) {
  std::int64_t* ends = EndsOf(op);
  for (std::size_t r = 0; r < ranks_.size(); ++r) {
    host_[r] = std::max(host_[r], ready_[r] + cost.first) + cost.duration;
    ends[r] = host_[r];
  }
}

void Lockstep::RunOwnOp(std::uint32_t op, const Cost& cost) {
  const std::size_t n = ranks_.size();
  std::int64_t* ends = EndsOf(op);
  std::int64_t* stream_free = stream_free_.data() + cost.stream * n;
  const auto duration = static_cast<double>(durations_[op]);
  for (std::size_t r = 0; r < n; ++r) {
    const std::int64_t start = std::max({ready_[r], stream_free[r], host_[r] + cost.first});
    host_[r] += cost.issue;
    const double factor = speed_[r] * (duration > 0 ? Factor(options_.op_sigma) : 1.0);
    ends[r] = std::max(start + Rounded(duration * factor), host_[r] + cost.tail);
    stream_free[r] = ends[r];
  }
}

// Mean and deviation of the arrivals of ranks that are not slow by themselves.
void Lockstep::FindSpread() {
  double sum = 0, squares = 0, count = 0;
  const auto origin = static_cast<double>(arrival_[0]);
  for (std::size_t r = 0; r < ranks_.size(); ++r) {
    if (ranks_[r].factor == 1.0) {
      const double x = static_cast<double>(arrival_[r]) - origin;
      sum += x;
      squares += x * x;
      ++count;
    }
  }
  mean_arrival_ = origin + sum / count;
  const double variance = (squares - sum * sum / count) / std::max(count - 1, 1.0);
  arrival_deviation_ = std::sqrt(std::max(variance, 0.0));
}

// Sets when the collective of one party can start: behind the last arrival, those of members that
// are not followed included.
void Lockstep::Meet(const Party& party) {
  std::int64_t last = kNever;
  for (const std::uint32_t r : party.members) {
    last = std::max(last, arrival_[r]);
  }
  if (party.others > 0 && deputy_ == kNone) {
    const double others = mean_arrival_ + arrival_deviation_ * LargestOf(party.others);
    last = std::max(last, Rounded(others));
  }
  for (const std::uint32_t r : party.members) {
    start_[r] = last;
    waiting_ += static_cast<double>(last - arrival_[r]) / static_cast<double>(ranks_.size());
  }
}

void Lockstep::RunCollective(std::uint32_t op, const Cost& cost) {
  const std::size_t n = ranks_.size();
  std::int64_t* ends = EndsOf(op);
  std::int64_t* stream_free = stream_free_.data() + cost.stream * n;
  std::int64_t* group_free = group_free_.data() + cost.group * n;
  bool needs_spread = false;
  for (const Party& party : parties_[cost.group]) {
    needs_spread = needs_spread || party.others > 0;
  }
  for (std::size_t r = 0; r < n; ++r) {
    arrival_[r] = std::max({ready_[r], stream_free[r], group_free[r], host_[r] + cost.first});
    host_[r] += cost.issue;
  }
  if (needs_spread) {
    FindSpread();
  }
  for (const Party& party : parties_[cost.group]) {
    Meet(party);
    // The launches of the latest host bound the end on all.
    std::int64_t launched = kNever;
    for (const std::uint32_t r : party.members) {
      launched = std::max(launched, host_[r] + cost.tail);
    }
    for (const std::uint32_t r : party.members) {
      ends[r] = std::max(start_[r] + durations_[op], launched);
      stream_free[r] = group_free[r] = ends[r];
    }
  }
}

std::int64_t Lockstep::RunStep() {
  const Body& body = program_.step;
  const std::size_t n = ranks_.size();
  for (std::size_t r = 0; r < n; ++r) {
    const bool is_deputy = r == deputy_ && options_.rank_sigma > 0.0;
    const double draw = is_deputy ? LargestOf(options_.ranks - std::ssize(ranks_) + 1) : 0.0;
    speed_[r] = is_deputy ? 1.0 + options_.rank_sigma * draw
                          : ranks_[r].factor * Factor(options_.rank_sigma);
  }
  for (std::uint32_t op = 0; op < body.size(); ++op) {
    const Cost& cost = costs_[body.ops[op].shape.value];
    FindReady(op);
    if (cost.on_host) {
      RunHostOp(op, cost);
    } else if (cost.group == kNone) {
      RunOwnOp(op, cost);
    } else {
      RunCollective(op, cost);
    }
  }
  for (std::size_t slot = 0; slot < body.carries.size(); ++slot) {
    if (body.carries[slot].valid()) {
      std::copy_n(EndsOf(body.carries[slot].value), n, slots_.data() + slot * n);
    }
  }
  const std::int64_t hosts = *std::max_element(host_.begin(), host_.end());
  return std::max(hosts, *std::max_element(stream_free_.begin(), stream_free_.end()));
}

void CheckOptions(const JitterOptions& options) {
  SW_CHECK(options.ranks > 0 && options.samples > 0, "a job has ranks and is sampled");
  for (const SlowRank& slow : options.slow_ranks) {
    if (slow.rank < 0 || slow.rank >= options.ranks) {
      throw InputError("slow rank", std::to_string(slow.rank),
                       "a rank from 0 to " + std::to_string(options.ranks - 1));
    }
  }
}

// Runs steps without noise and slow ranks until they repeat. Returns how many came before, and the
// time of one.
int Settle(const Program& program, const PriceTable& prices, std::span<const Span> steady,
           const JitterOptions& options, SimTime& nominal) {
  JitterOptions still = options;
  still.op_sigma = still.rank_sigma = 0.0;
  still.slow_ranks.clear();
  still.ranks = 1;  // all are alike
  Lockstep ranks(program, prices, steady, still);
  std::int64_t front = ranks.RunStep();
  int steps = 0;
  for (int equal = 0; (equal < 3 || steps < kLeastSettlingSteps) && steps < kMostSettlingSteps;
       ++steps) {
    const std::int64_t next = ranks.RunStep();
    equal = next - front == nominal.value ? equal + 1 : 0;
    nominal = SimTime(next - front);
    front = next;
  }
  if (steps == kMostSettlingSteps) {
    // The step time may alternate for ever; then its mean is what counts.
    std::int64_t end = front;
    for (int step = 0; step < kMostCycle; ++step) {
      end = ranks.RunStep();
    }
    nominal = SimTime((end - front) / kMostCycle);
  }
  return steps;
}

void FindMoments(StepDistribution& result) {
  double sum = 0, squares = 0;
  for (const SimTime time : result.sorted) {
    const auto x = static_cast<double>(time.value - result.nominal.value);
    sum += x;
    squares += x * x;
  }
  const auto count = static_cast<double>(result.sorted.size());
  result.mean = SimTime(result.nominal.value + Rounded(sum / count));
  const double variance = (squares - sum * sum / count) / std::max(count - 1, 1.0);
  result.deviation = SimTime(Rounded(std::sqrt(std::max(variance, 0.0))));
}

}  // namespace

double NormalUpperQuantile(double tail) {
  return std::sqrt(2.0) * boost::math::erfc_inv(2.0 * tail);
}

SimTime StepDistribution::Percentile(double q) const {
  const double rank = std::ceil(q * static_cast<double>(sorted.size()));
  const auto index = static_cast<std::size_t>(std::max(rank, 1.0)) - 1;
  return sorted[std::min(index, sorted.size() - 1)];
}

StepDistribution SampleSteps(const Program& program, const PriceTable& prices,
                             std::span<const Span> steady, const JitterOptions& options) {
  CheckOptions(options);
  StepDistribution result;
  const int settling = Settle(program, prices, steady, options, result.nominal);
  Lockstep ranks(program, prices, steady, options);
  std::int64_t front = ranks.RunStep();
  for (int step = 0; step < settling; ++step) {
    front = ranks.RunStep();
  }
  ranks.ResetWaiting();
  for (int sample = 0; sample < options.samples; ++sample) {
    const std::int64_t next = ranks.RunStep();
    result.sorted.emplace_back(next - front);
    front = next;
  }
  result.waiting = SimTime(Rounded(ranks.waiting() / options.samples));
  result.followed = static_cast<std::int64_t>(ranks.followed());
  FindMoments(result);
  SortAll(result.sorted);
  return result;
}

}  // namespace shardwright
