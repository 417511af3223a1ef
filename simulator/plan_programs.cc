// Steps of many micro-batches from programs with few.
//
// Example: 64 micro-batches. Programs with 2, 3 and 4 take 30, 40 and 50 ms per step. The
// differences are equal, no stream and not the host has more than 10 ms to do per micro-batch, and
// all peaks of memory agree. So the step takes 50 + 60 x 10 = 650 ms, at the cost of 9
// micro-batches. If the differences were 10 and 9.5, programs with 5, then 6, 7, 8, 32 and 128
// would be tried, and last the whole.
//
// Fewer than 12 micro-batches are simulated as they are.

#include "simulator/plan_programs.h"

#include <array>
#include <optional>
#include <tuple>
#include <utility>

#include "core/error.h"
#include "core/ranges.h"
#include "schedule/dialect_facts.h"
#include "schedule/place.h"

namespace shardwright {
namespace {

// Fewer are simulated as they are: three programs hold as many together.
constexpr std::int64_t kMany = 12;
// All kinds of micro-batches: a first one, one between, and a last one.
constexpr std::int64_t kRough = 3;
// Programs end with one of these numbers of micro-batches: one more each time as long as that is
// cheap, then many more, since it takes the host that long to lose its lead.
constexpr std::array<std::int64_t, 7> kEnds = {4, 5, 6, 7, 8, 32, 128};
constexpr std::array<std::int64_t, 2> kAverage = {8, 16};  // of Telling::kOnAverage

bool SamePeak(const MemoryPeak& a, const MemoryPeak& b) {
  return a.total == b.total && a.by_category == b.by_category;
}

auto PeaksOf(const ReservedMemory& reserved) {
  return std::tuple(reserved.peak_init, reserved.peak_first, reserved.peak_steady,
                    reserved.out_of_memory);
}

// Equal but for where in the program the peaks stand.
bool SameMemory(const SimulatedMemory& a, const SimulatedMemory& b) {
  constexpr std::array kPeaks = {&AllocatedMemory::device_init,  &AllocatedMemory::host_init,
                                 &AllocatedMemory::device_first, &AllocatedMemory::device_steady,
                                 &AllocatedMemory::host_first,   &AllocatedMemory::host_steady};
  const bool same_allocated =
      AllOf(kPeaks, [&](auto peak) { return SamePeak(a.allocated.*peak, b.allocated.*peak); });
  if (!same_allocated || a.reserved.has_value() != b.reserved.has_value()) {
    return false;
  }
  const auto fails = [](const SimulatedMemory& m) { return m.reserved->out_of_memory; };
  // A plan that fails with a few micro-batches fails with many.
  return !a.reserved || (fails(a) && fails(b)) || PeaksOf(*a.reserved) == PeaksOf(*b.reserved);
}

// Goes on with three values by equal differences, to the one with `more` more micro-batches than
// the third has. Remembers whether all differences were equal.
class Trend {
 public:
  explicit Trend(std::int64_t more) : more_(more) {}

  template <class T>
  [[nodiscard]] T Of(T first, T second, T third) {
    holds_ = holds_ && third - second == second - first;
    return third + (third - second) * more_;
  }
  // Member by member, into `third`.
  template <class Struct, class... Members>
  void Extend(const Struct& first, const Struct& second, Struct& third, Members... members) {
    ((third.*members = Of(first.*members, second.*members, third.*members)), ...);
  }
  void Extend(const StepTiming& first, const StepTiming& second, StepTiming& third);
  void Extend(std::vector<TimeShare> first, std::vector<TimeShare> second,
              std::vector<TimeShare>& third);
  [[nodiscard]] bool holds() const { return holds_; }

 private:
  std::int64_t more_;
  bool holds_ = true;
};

void Trend::Extend(const StepTiming& first, const StepTiming& second, StepTiming& third) {
  Extend(first, second, third, &StepTiming::time, &StepTiming::host_blocked,
         &StepTiming::host_issue, &StepTiming::collectives_on_compute);
  for (std::size_t s = 0; s < kStreamCount; ++s) {
    third.busy[s] = Of(first.busy[s], second.busy[s], third.busy[s]);
    third.compute_idle[s] =
        Of(first.compute_idle[s], second.compute_idle[s], third.compute_idle[s]);
  }
}

// Only where the three are shares of the same.
void Trend::Extend(std::vector<TimeShare> first, std::vector<TimeShare> second,
                   std::vector<TimeShare>& third) {
  const auto key = [](const TimeShare& share) {
    return std::tuple(share.use, share.code, share.phase, share.stream, share.unit);
  };
  const auto by_key = [&](const TimeShare& a, const TimeShare& b) { return key(a) < key(b); };
  for (std::vector<TimeShare>* shares : {&first, &second, &third}) {
    std::sort(shares->begin(), shares->end(), by_key);
  }
  holds_ = holds_ && first.size() == third.size() && second.size() == third.size();
  for (std::size_t i = 0; holds_ && i < third.size(); ++i) {
    holds_ = key(first[i]) == key(third[i]) && key(second[i]) == key(third[i]);
    Extend(first[i], second[i], third[i], &TimeShare::time, &TimeShare::count);
  }
  SortByTime(third);
}

// Do the host and all streams keep up? None of them may have more to do in one more micro-batch
// than `period`. Compute may wait for nothing less than before: a wait that gets shorter comes to
// an end, and then the period is another one.
bool AllKeepUp(const StepTiming& fewer, const StepTiming& more, SimTime period) {
  bool keep_up = more.host_issue - fewer.host_issue <= period;
  for (std::size_t s = 0; s < kStreamCount; ++s) {
    keep_up = keep_up && more.busy[s] - fewer.busy[s] <= period &&
              more.compute_idle[s] >= fewer.compute_idle[s];
  }
  return keep_up;
}

// How far ahead of the device the host is, op by op of the last micro-batch: when it issues an op
// before that starts.
std::vector<SimTime> LeadsOf(const Program& program, const std::vector<Span>& spans) {
  std::vector<SimTime> leads;
  for (const Span& span : spans) {
    if (span.body == BodyKind::kInit) {
      continue;
    }
    const Op& op =
        (span.body == BodyKind::kStep ? program.step : program.warmup).ops[span.op.value];
    if (op.micro_batch + 1 == program.micro_batch_count) {
      leads.push_back(span.start - span.issue_begin);
    }
  }
  return leads;
}

// The result with `count` micro-batches from those with n - 2, n - 1 and n; none where they do not
// tell.
std::optional<SimulationResult> Extrapolate(const std::array<const SimulationResult*, 3>& results,
                                            std::int64_t n, std::int64_t count) {
  const SimulationResult& first = *results[0];
  const SimulationResult& second = *results[1];
  const SimulationResult& third = *results[2];
  const SimTime period = third.step_time - second.step_time;
  const auto settles = [](const SimulationResult* r) {
    return r->timing.is_steady && !r->unsettled;
  };
  Trend trend(count - n);
  SimulationResult result = third;
  trend.Extend(first, second, result, &SimulationResult::step_time,
               &SimulationResult::exposed_comm);
  if (!trend.holds() || !AllOf(results, settles) ||
      !AllKeepUp(first.timing.steady, second.timing.steady, period) ||
      !AllKeepUp(second.timing.steady, third.timing.steady, period) ||
      !SameMemory(first.memory, second.memory) || !SameMemory(second.memory, third.memory)) {
    return std::nullopt;
  }
  if (third.memory.reserved && !third.memory.reserved->out_of_memory) {
    trend.Extend(*first.memory.reserved, *second.memory.reserved, *result.memory.reserved,
                 &ReservedMemory::retries_first, &ReservedMemory::retries_steady);
  }
  return trend.holds() ? std::optional(std::move(result)) : std::nullopt;
}

// Whether a step with n micro-batches tells nothing of the allocator, since it depends on a lead of
// the host that still grows.
bool LeadMayMatter(const Program& program, const std::vector<SimTime>& fewer,
                   const std::vector<SimTime>& more) {
  return RecordsStreams(program) && fewer != more;
}

// The answer of `tell` for the first n of kEnds that tells the whole; if none does, the whole is
// run.
template <class Run, class Tell>
auto TellOrRun(PlanPrograms& programs, const Run& run, const Tell& tell) {
  const std::int64_t count = programs.micro_batch_count();
  for (const std::int64_t n : kEnds) {
    if (count < std::max(kMany, 3 * n)) {
      break;
    }
    if (n - kEnds[0] + 1 < programs.CountUnlike()) {
      continue;
    }
    if (auto told = tell(n)) {
      return std::move(*told);
    }
  }
  return std::move(run(count));
}

// Whether the largest peaks with n - 1 and with n micro-batches stand before the same op of the
// plan.
bool SamePlace(PlanPrograms& programs, std::int64_t n, const MemoryPeak& fewer,
               const MemoryPeak& more) {
  if (fewer.body != more.body || fewer.before_op.valid() != more.before_op.valid()) {
    return false;
  }
  if (!more.before_op.valid()) {
    return true;
  }
  const Op& a = BodyOf(programs.With(n - 1), fewer.body).ops[fewer.before_op.value];
  const Op& b = BodyOf(programs.With(n), more.body).ops[more.before_op.value];
  return programs.InPlan(a, n - 1) == programs.InPlan(b, n) && a.subject == b.subject &&
         a.phase == b.phase && a.occurrence == b.occurrence &&
         programs.With(n - 1).ShapeOf(a).code == programs.With(n).ShapeOf(b).code;
}

// The account with `more` more micro-batches than `third` has; none where the three do not tell.
std::optional<AccountedStep> ExtrapolateAccount(const AccountedStep& first,
                                                const AccountedStep& second,
                                                const AccountedStep& third,
                                                SimulationResult&& result, std::int64_t more) {
  AccountedStep step{std::move(result), third.account};
  Trend trend(more);
  trend.Extend(first.result.timing.first, second.result.timing.first, step.result.timing.first);
  trend.Extend(first.result.timing.steady, second.result.timing.steady, step.result.timing.steady);
  step.result.first_step_time = step.result.timing.first.time;
  const StepAccount& a = first.account;
  const StepAccount& b = second.account;
  StepAccount& c = step.account;
  trend.Extend(a.device, b.device, c.device, &DeviceTime::total, &DeviceTime::computing,
               &DeviceTime::uncovered, &DeviceTime::idle, &DeviceTime::communicating,
               &DeviceTime::overlapped);
  trend.Extend(a.attribution, b.attribution, c.attribution, &Attribution::step_time,
               &Attribution::compute_busy);
  trend.Extend(a.attribution.idle, b.attribution.idle, c.attribution.idle);
  trend.Extend(a.attribution.critical, b.attribution.critical, c.attribution.critical);
  c.attribution.critical_path.clear();
  for (std::size_t i = 0; i < c.sums.size(); ++i) {
    c.sums[i] = trend.Of(a.sums[i], b.sums[i], c.sums[i]);
  }
  // Of what runs out of memory SimulatePlan is content with less.
  const ReservedMemory& held_a = *first.result.memory.reserved;
  const ReservedMemory& held_b = *second.result.memory.reserved;
  const ReservedMemory& held_c = *third.result.memory.reserved;
  if (held_c.out_of_memory) {
    trend.Extend(held_a, held_b, *step.result.memory.reserved, &ReservedMemory::retries_first,
                 &ReservedMemory::retries_steady);
  }
  const bool same_reserved =
      PeaksOf(held_a) == PeaksOf(held_b) && PeaksOf(held_b) == PeaksOf(held_c);
  const bool same_place = a.placed == b.placed && b.placed == c.placed;
  const auto keep_up = [](const SimulationResult& short_step, const SimulationResult& long_step) {
    return AllKeepUp(short_step.timing.first, long_step.timing.first,
                     long_step.step_time - short_step.step_time);
  };
  const bool tells = trend.holds() && same_place && same_reserved &&
                     keep_up(first.result, second.result) && keep_up(second.result, third.result);
  return tells ? std::optional(std::move(step)) : std::nullopt;
}

}  // namespace

PlanPrograms::PlanPrograms(const LowerInput& input)
    : model_(input.model),
      kernels_(input.kernels),
      job_(input.job),
      plan_(input.plan),
      micro_batch_count_(input.plan.accumulation) {
  ValidatePlan(input.model, input.job, input.plan, "plan");
  job_.global_batch = 0;  // that of fewer micro-batches is another one
}

const Program& PlanPrograms::With(std::int64_t micro_batches) {
  const auto known = programs_.find(micro_batches);
  if (known != programs_.end()) {
    return known->second;
  }
  plan_.accumulation = micro_batches;
  return programs_.emplace(micro_batches, Lower({model_, kernels_, job_, plan_})).first->second;
}

std::int64_t PlanPrograms::CountUnlike() {
  if (unlike_count_ == 0) {
    unlike_count_ = 1;
    if (FactsOf(plan_).early_gathers == EarlyGathers::kInFlight) {
      const Program& program = With(std::min(kRough, micro_batch_count_));
      const std::vector<Op>& ops = program.step.ops;
      const OpCode code = plan_.shard_size > 1 ? OpCode::kReduceScatter : OpCode::kAllReduce;
      const auto reductions = CountIf(ops, [&](const Op& op) {
        return op.micro_batch == 0 && op.phase == Phase::kBackward &&
               program.ShapeOf(op).code == code;
      });
      unlike_count_ = reductions == 0 ? 1 : CeilDiv(plan_.in_flight, reductions);
    }
  }
  return unlike_count_;
}

const Program& PlanPrograms::Largest() {
  return !programs_.empty()            ? programs_.rbegin()->second
         : micro_batch_count_ >= kMany ? With(kRough)
                                       : With(micro_batch_count_);
}

void PlanPrograms::NumberAsInPlan(std::int64_t micro_batches) {
  Program& program = programs_.at(micro_batches);
  for (Body* body : {&program.warmup, &program.step}) {
    for (Op& op : body->ops) {
      op.micro_batch = static_cast<std::uint16_t>(InPlan(op, micro_batches));
    }
  }
}

namespace {

std::int64_t StepRetries(const SimulationResult& result) {
  return result.memory.reserved ? result.memory.reserved->retries_steady : 0;
}

bool RunsOut(const SimulationResult& result) {
  return result.memory.reserved && result.memory.reserved->out_of_memory;
}

bool Retries(const SimulationResult& result) {
  return StepRetries(result) > 0 || RunsOut(result);
}

// The first answer that SimulatePlan may give.
SimulationResult SimulateRoughly(Simulator& simulator, PlanPrograms& programs,
                                 const SimulateOptions& options) {
  const std::int64_t count = programs.micro_batch_count();
  const std::int64_t few = std::min(kRough - 1 + programs.CountUnlike(), count);
  const SimulationResult fewer = simulator.Run(programs.With(few - 1), options);
  SimulationResult result = simulator.Run(programs.With(few), options);
  const std::int64_t rest = count - few;
  const auto go_on = [&](SimTime less, SimTime more) { return more + (more - less) * rest; };
  const StepTiming& less = fewer.timing.steady;
  const StepTiming& more = result.timing.steady;
  SimTime time =
      std::max(go_on(fewer.step_time, result.step_time), go_on(less.host_issue, more.host_issue));
  for (std::size_t s = 0; s < kStreamCount; ++s) {
    time = std::max(time, go_on(less.busy[s], more.busy[s]));
  }
  result.step_time = time;
  result.exposed_comm = go_on(fewer.exposed_comm, result.exposed_comm);
  return result;
}

// Goes on by what a micro-batch took on average between kAverage's two numbers of them.
SimulationResult OnAverage(const SimulationResult& fewer, SimulationResult more,
                           std::int64_t count) {
  constexpr std::int64_t few = kAverage[0], many = kAverage[1];
  const auto go_on = [&](auto low, auto& high) {
    high = high + (high - low) * (count - many) / (many - few);
  };
  go_on(fewer.step_time, more.step_time);
  go_on(fewer.exposed_comm, more.exposed_comm);
  go_on(fewer.memory.reserved->retries_first, more.memory.reserved->retries_first);
  go_on(fewer.memory.reserved->retries_steady, more.memory.reserved->retries_steady);
  return more;
}

// The result of a program with n micro-batches.
struct FewRun {
  SimulationResult result;
  std::vector<SimTime> leads;  // where they may matter
};

}  // namespace

SimulationResult SimulatePlan(Simulator& simulator, PlanPrograms& programs,
                              const SimulateOptions& options, Telling telling) {
  const std::int64_t count = programs.micro_batch_count();
  SW_CHECK(telling != Telling::kRoughly || !options.reserved,
           "what is reserved is not told roughly");
  if (telling == Telling::kRoughly && count >= kMany) {
    return SimulateRoughly(simulator, programs, options);
  }
  std::map<std::int64_t, FewRun> known;
  const auto run = [&](std::int64_t n) -> FewRun& {
    const auto [at, is_new] = known.try_emplace(n);
    if (is_new) {
      FewRun& k = at->second;
      SimulateOptions with_spans = options;
      with_spans.spans = options.reserved && n < count && RecordsStreams(programs.With(n));
      with_spans.steady_only = telling != Telling::kProven;
      k.result = simulator.Run(programs.With(n), with_spans);
      k.leads = LeadsOf(programs.With(n), k.result.trace.spans);
      k.result.trace = Trace();
    }
    return at->second;
  };
  return std::move(
      TellOrRun(programs, run, [&](std::int64_t n) -> std::optional<FewRun> {
        const FewRun& third = run(n);
        if (telling != Telling::kProven && RunsOut(third.result)) {
          return third;
        }
        // Where one of the three comes to no end, what the others do does not matter.
        if (!third.result.unsettled && !run(n - 1).result.unsettled) {
          const FewRun &first = run(n - 2), &second = run(n - 1);
          auto told = Extrapolate({&first.result, &second.result, &third.result}, n, count);
          if (told && !LeadMayMatter(programs.With(n), second.leads, third.leads)) {
            return FewRun{std::move(*told), {}};
          }
        }
        if (telling == Telling::kOnAverage && n <= kAverage[0] && count > kAverage[1] &&
            (third.result.unsettled || Retries(third.result))) {
          const SimulationResult &few = run(kAverage[0]).result, &many = run(kAverage[1]).result;
          if (StepRetries(many) >= StepRetries(few)) {  // else they come to an end
            return FewRun{OnAverage(few, many, count), {}};
          }
        }
        if (telling == Telling::kUntilRetries && Retries(third.result) &&
            Retries(run(n - 1).result) && Retries(run(n - 2).result)) {
          FewRun last{third.result, {}};
          last.result.step_time +=
              (third.result.step_time - run(n - 1).result.step_time) * (count - n);
          return last;
        }
        return std::nullopt;
      }).result);
}

Bytes PlacePlan(PlanPrograms& programs) {
  std::map<std::int64_t, Bytes> known;
  const auto run = [&](std::int64_t n) -> Bytes& {
    const auto [at, is_new] = known.try_emplace(n);
    if (is_new) {
      at->second = Place(programs.With(n)).device_size;
    }
    return at->second;
  };
  return TellOrRun(programs, run, [&](std::int64_t n) {
    return run(n - 2) == run(n - 1) && run(n - 1) == run(n) ? std::optional(run(n)) : std::nullopt;
  });
}

std::int64_t CountStepOps(PlanPrograms& programs) {
  const std::int64_t count = programs.micro_batch_count();
  std::int64_t whole = 0;
  const auto run = [&](std::int64_t n) -> std::int64_t& {
    return whole = std::ssize(programs.With(n).step.ops);
  };
  return TellOrRun(programs, run, [&](std::int64_t n) {
    Trend trend(count - n);
    const std::int64_t first = run(n - 2), second = run(n - 1), third = run(n);
    const std::int64_t told = trend.Of(first, second, third);
    return trend.holds() ? std::optional(told) : std::nullopt;
  });
}

StepAccount AccountFor(const Program& program, const SimulationResult& result,
                       const SumSpans& sum_spans) {
  return {Explain(program, result.trace.spans, result.step_time),
          TimeOfDevice(program, result.trace.spans), Place(program).device_size,
          sum_spans(program, result)};
}

AccountedStep AccountForPlan(Simulator& simulator, PlanPrograms& programs, SimulateOptions options,
                             const SumSpans& sum_spans) {
  options.trace = true;
  const std::int64_t count = programs.micro_batch_count();
  std::map<std::int64_t, AccountedStep> known;
  std::map<std::int64_t, std::vector<SimTime>> leads;
  const auto run = [&](std::int64_t n) -> AccountedStep& {
    if (const auto found = known.find(n); found != known.end()) {
      return found->second;
    }
    AccountedStep step{simulator.Run(programs.With(n), options), {}};
    step.account = AccountFor(programs.With(n), step.result, sum_spans);
    if (n < count) {
      leads[n] = LeadsOf(programs.With(n), step.result.trace.spans);
      step.result.trace = Trace();
    }
    return known.emplace(n, std::move(step)).first->second;
  };
  return TellOrRun(programs, run, [&](std::int64_t n) {
    const AccountedStep &first = run(n - 2), &second = run(n - 1), &third = run(n);
    auto result = Extrapolate({&first.result, &second.result, &third.result}, n, count);
    if (!result || LeadMayMatter(programs.With(n), leads.at(n - 1), leads.at(n)) ||
        !SamePlace(programs, n, second.result.memory.allocated.DevicePeak(),
                   third.result.memory.allocated.DevicePeak())) {
      return std::optional<AccountedStep>();
    }
    auto step = ExtrapolateAccount(first, second, third, std::move(*result), count - n);
    if (step) {
      programs.NumberAsInPlan(n);
    }
    return step;
  });
}

}  // namespace shardwright
