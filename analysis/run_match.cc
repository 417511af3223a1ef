#include "analysis/run_match.h"

#include <array>
#include <cmath>
#include <map>
#include <string_view>
#include <tuple>
#include <utility>

#include "analysis/recording_steps.h"
#include "core/error.h"
#include "core/json.h"
#include "core/ranges.h"

namespace shardwright {
namespace {

enum class CallGroup : std::uint8_t { kProducts, kAttention, kConvolutions, kCollectives };
constexpr std::size_t kGroupCount = 4;
constexpr std::array<std::string_view, kGroupCount> kGroupNames = {
    "matrix products", "attention calls", "convolutions", "collectives"};

// A training loop adds up losses and gradient norms; nobody plans these.
constexpr Bytes kLargestSumOfLoop{4096};
// Buckets are cut where they are full, which a plan knows up to a parameter.
constexpr double kSameSize = 0.02;
constexpr std::size_t kMostDifferences = 5;

// What makes two calls of a group equal. The sizes of a product are sorted: its gradients are
// products of the same three.
struct MatchedCall {
  int kind = 0;  // forward, backward; which collective
  std::array<std::int64_t, 4> sizes{};

  bool operator==(const MatchedCall&) const = default;
  // Emscripten's std::array has no <=>.
  bool operator<(const MatchedCall& other) const {
    return std::tie(kind, sizes) < std::tie(other.kind, other.sizes);
  }
};

using Calls = std::map<MatchedCall, std::int64_t>;
using StepCalls = std::array<Calls, kGroupCount>;

MatchedCall ProductOf(std::int64_t batch, std::int64_t m, std::int64_t n, std::int64_t k) {
  std::array<std::int64_t, 3> sizes = {m, n, k};
  SortAll(sizes);
  return {0, {batch, sizes[0], sizes[1], sizes[2]}};
}

double WorkOf(CallGroup group, const MatchedCall& call) {
  double work = 1;
  for (const std::int64_t size : call.sizes) {
    work *= group == CallGroup::kCollectives || size == 0 ? 1 : static_cast<double>(size);
  }
  return work;
}

std::string TextOf(CallGroup group, const MatchedCall& call) {
  const auto& s = call.sizes;
  switch (group) {
    case CallGroup::kProducts:
      return s[3] == 0 ? "product"
                       : "product " + (s[0] > 1 ? std::to_string(s[0]) + " x " : std::string()) +
                             std::to_string(s[1]) + " x " + std::to_string(s[2]) + " x " +
                             std::to_string(s[3]);
    case CallGroup::kAttention:
      return std::string(call.kind == 0 ? "attention forward" : "attention backward") +
             (s[1] == 0
                  ? ""
                  : " of " + std::to_string(s[0]) + " heads, " + std::to_string(s[1]) + " tokens");
    case CallGroup::kConvolutions:
      return "convolution";
    case CallGroup::kCollectives:
      break;
  }
  return std::string(InfoOf(static_cast<OpCode>(call.kind)).name) +
         (s[0] == 0 ? "" : " of " + Format(Bytes(s[0])));
}

Calls& In(StepCalls& step, CallGroup group) {
  return step[static_cast<std::size_t>(group)];
}

void AddOp(const Program& program, const Op& op, StepCalls& step) {
  const OpShape& shape = program.ShapeOf(op);
  if (InfoOf(shape.code).is_collective) {
    if (shape.code != OpCode::kBarrier && program.groups[shape.group.value].size > 1) {
      ++In(step, CallGroup::kCollectives)[{static_cast<int>(shape.code), {shape.bytes.value}}];
    }
    return;
  }
  if (op.phase == Phase::kOptimizer) {
    return;
  }
  bool has_convolution = false;
  for (const Kernel& kernel : program.KernelsOf(shape)) {
    switch (kernel.kind) {
      case KernelClass::kGemm:
        ++In(step, CallGroup::kProducts)[ProductOf(kernel.batch, kernel.m, kernel.n, kernel.k)];
        break;
      case KernelClass::kAttentionForward:
      case KernelClass::kAttentionBackward:
        ++In(step, CallGroup::kAttention)[{kernel.kind == KernelClass::kAttentionBackward ? 1 : 0,
                                           {kernel.batch, kernel.m, kernel.k}}];
        break;
      case KernelClass::kConv:
        has_convolution = true;
        break;
      default:
        break;
    }
  }
  In(step, CallGroup::kConvolutions)[{}] += has_convolution ? 1 : 0;
}

// The products of experts depend on what the router says: those of these weights count on neither
// side.
Calls ExpertProducts(const Program& program) {
  Calls experts;
  for (const Kernel& kernel : program.kernels) {
    if (kernel.kind == KernelClass::kGroupedGemm) {
      // Gate and up can be one weight, twice as wide.
      for (const auto& [a, b] : {std::pair(kernel.m, kernel.n), std::pair(kernel.n, kernel.k),
                                 std::pair(kernel.m, kernel.k), std::pair(2 * kernel.n, kernel.k),
                                 std::pair(kernel.n, 2 * kernel.k)}) {
        experts[{0, {std::min(a, b), std::max(a, b)}}] = 1;
      }
    }
  }
  return experts;
}

bool IsOfExpert(const Calls& experts, const MatchedCall& product) {
  const auto& s = product.sizes;
  return !experts.empty() &&
         (experts.contains({0, {s[1], s[2]}}) || experts.contains({0, {s[2], s[3]}}) ||
          experts.contains({0, {s[1], s[3]}}));
}

StepCalls StepOf(const Program& program) {
  StepCalls step;
  for (const Op& op : program.step.ops) {
    AddOp(program, op, step);
  }
  const Calls experts = ExpertProducts(program);
  std::erase_if(In(step, CallGroup::kProducts),
                [&](const auto& row) { return IsOfExpert(experts, row.first); });
  for (Calls& calls : step) {
    std::erase_if(calls, [](const auto& row) { return row.second == 0; });
  }
  return step;
}

// How a group was recorded, by the worst of all recordings.
struct Recorded {
  std::vector<StepCalls> steps;           // of all ranks
  std::vector<std::int64_t> written_out;  // by step: attention that is written out
  std::array<MatchedBy, kGroupCount> by{};
};

bool HasCalls(const ProfilerRecording& recording, CallGroup group, bool with_sizes) {
  bool any = false;
  for (const HostCall& call : recording.calls) {
    if (call.kind == CallKind::kAttentionWrittenOut) {
      continue;
    }
    const CallGroup own = call.kind == CallKind::kProduct       ? CallGroup::kProducts
                          : call.kind == CallKind::kConvolution ? CallGroup::kConvolutions
                                                                : CallGroup::kAttention;
    if (own == group) {
      any = true;
      if (with_sizes && call.m == 0) {
        return false;
      }
    }
  }
  return any;
}

// Kernels that only prepare or finish what another one does.
bool IsHelper(std::string_view name) {
  constexpr std::array<std::string_view, 5> kHelpers = {"splitKreduce", "dot_do_o", "convert_d",
                                                        "combine", "splitkreduce"};
  return AnyOf(kHelpers, [&](std::string_view part) { return name.find(part) != name.npos; });
}

void AddKernel(const ProfilerRecording& recording, const Activity& activity,
               const std::array<MatchedBy, kGroupCount>& by, StepCalls& step) {
  if (activity.kind != ActivityKind::kKernel || IsHelper(recording.names[activity.name])) {
    return;
  }
  const auto is_used = [&](CallGroup group) {
    return by[static_cast<std::size_t>(group)] == MatchedBy::kKernels;
  };
  const KernelClass kernel = activity.kernel;
  if (is_used(CallGroup::kProducts) &&
      (kernel == KernelClass::kGemm || kernel == KernelClass::kGroupedGemm)) {
    ++In(step, CallGroup::kProducts)[{}];
  }
  if (is_used(CallGroup::kConvolutions) && kernel == KernelClass::kConv) {
    ++In(step, CallGroup::kConvolutions)[{}];
  }
  if (is_used(CallGroup::kAttention) && IsAttention(kernel)) {
    ++In(step, CallGroup::kAttention)[{kernel == KernelClass::kAttentionBackward ? 1 : 0, {}}];
  }
}

void AddCall(const HostCall& call, const std::array<MatchedBy, kGroupCount>& by,
             const Calls& experts, StepCalls& step) {
  const auto of = [&](CallGroup group) { return by[static_cast<std::size_t>(group)]; };
  switch (call.kind) {
    case CallKind::kProduct: {
      const MatchedCall product = of(CallGroup::kProducts) == MatchedBy::kSizes
                                      ? ProductOf(call.batch, call.m, call.n, call.k)
                                      : MatchedCall();
      if (of(CallGroup::kProducts) != MatchedBy::kKernels && !IsOfExpert(experts, product)) {
        ++In(step, CallGroup::kProducts)[product];
      }
      return;
    }
    case CallKind::kConvolution:
      if (of(CallGroup::kConvolutions) != MatchedBy::kKernels) {
        ++In(step, CallGroup::kConvolutions)[{}];
      }
      return;
    case CallKind::kAttentionWrittenOut:
      return;
    case CallKind::kAttentionForward:
    case CallKind::kAttentionBackward:
      break;
  }
  if (of(CallGroup::kAttention) != MatchedBy::kKernels) {
    MatchedCall attention{call.kind == CallKind::kAttentionBackward ? 1 : 0, {}};
    if (of(CallGroup::kAttention) == MatchedBy::kSizes) {
      attention.sizes = {call.batch, call.m, call.k};
    }
    ++In(step, CallGroup::kAttention)[attention];
  }
}

Recorded RecordedOf(const Program& program, const std::vector<ProfilerRecording>& recordings) {
  Recorded result;
  for (const CallGroup group :
       {CallGroup::kProducts, CallGroup::kAttention, CallGroup::kConvolutions}) {
    MatchedBy& by = result.by[static_cast<std::size_t>(group)];
    by = group == CallGroup::kConvolutions ? MatchedBy::kNumber : MatchedBy::kSizes;
    for (const ProfilerRecording& recording : recordings) {
      // Without a device the calls are all there is: no attention calls, no fused attention.
      const MatchedBy own = HasCalls(recording, group, true)    ? MatchedBy::kSizes
                            : HasCalls(recording, group, false) ? MatchedBy::kNumber
                            : recording.on_device               ? MatchedBy::kKernels
                                                                : MatchedBy::kSizes;
      by = std::max(by, own);
    }
  }
  const Calls experts = ExpertProducts(program);
  for (const ProfilerRecording& recording : recordings) {
    const std::vector<RecordingStep> counted = FindSteps(recording);
    if (counted.empty()) {
      throw InputError(recording.file, "no step with work", "at least one training step");
    }
    std::vector<StepCalls> steps(recording.steps.size());
    std::vector<std::int64_t> written_out(recording.steps.size(), 0);
    for (const HostCall& call : recording.calls) {
      AddCall(call, result.by, experts, steps[call.step]);
      written_out[call.step] += call.kind == CallKind::kAttentionWrittenOut ? 1 : 0;
    }
    for (const Activity& activity : recording.activities) {
      AddKernel(recording, activity, result.by, steps[activity.step]);
      if (activity.kind == ActivityKind::kCollective && activity.collective != OpCode::kBarrier) {
        ++In(steps[activity.step], CallGroup::kCollectives)[{static_cast<int>(activity.collective),
                                                             {activity.bytes.value}}];
      }
    }
    for (const RecordingStep& step : counted) {
      result.steps.push_back(std::move(steps[step.step]));
      result.written_out.push_back(written_out[step.step]);
    }
  }
  return result;
}

// As `by` tells calls apart: without sizes, or without anything but their number.
Calls ToldBy(MatchedBy by, CallGroup group, const Calls& calls) {
  if (by == MatchedBy::kSizes) {
    return calls;
  }
  Calls told;
  for (const auto& [call, count] : calls) {
    told[{group == CallGroup::kAttention ? call.kind : 0, {}}] += count;
  }
  return told;
}

// Recorded collectives under the sizes of the plan, where they are as good as equal; those without
// a size take any that the plan has of their kind.
Calls UnderPlannedSizes(const Calls& recorded, const Calls& planned) {
  Calls result;
  Calls left = planned;
  for (const auto& [call, count] : recorded) {
    std::int64_t open = count;
    for (auto& [wanted, most] : left) {
      const double size = static_cast<double>(wanted.sizes[0]);
      const bool is_same = wanted.kind == call.kind &&
                           (call.sizes[0] == 0 || std::abs(static_cast<double>(call.sizes[0]) -
                                                           size) <= kSameSize * size);
      const std::int64_t taken = is_same ? std::min(open, most) : 0;
      if (taken > 0) {
        result[wanted] += taken;
        most -= taken;
        open -= taken;
      }
    }
    const auto code = static_cast<OpCode>(call.kind);
    const bool is_of_loop = code != OpCode::kAllGather && code != OpCode::kReduceScatter &&
                            call.sizes[0] <= kLargestSumOfLoop.value;
    if (open > 0 && !is_of_loop) {
      result[call] += open;
    }
  }
  return result;
}

// Recorded products without those that nobody planned of attention that is written out where the
// plan has one op of it: two of its forward, four of its backward.
Calls WithoutWrittenOut(const Calls& recorded, const Calls& planned, std::int64_t attention) {
  Calls result = recorded;
  std::int64_t left = 6 * attention;
  for (auto& [call, count] : result) {
    const auto found = planned.find(call);
    const std::int64_t wanted = found == planned.end() ? 0 : found->second;
    const std::int64_t taken = std::clamp<std::int64_t>(count - wanted, 0, left);
    count -= taken;
    left -= taken;
  }
  std::erase_if(result, [](const auto& row) { return row.second == 0; });
  return result;
}

// Sums over steps, and what differs.
class GroupMatch {
 public:
  GroupMatch(CallGroup group, MatchedBy by) : group_(group), by_(by) {}

  void Add(const Calls& planned, const Calls& recorded) {
    ++steps_;
    Count(planned, recorded, planned_, planned_work_, missing_);
    Count(recorded, planned, recorded_, recorded_work_, extra_);
    for (const auto& [call, count] : planned) {
      const auto found = recorded.find(call);
      const std::int64_t both = found == recorded.end() ? 0 : std::min(count, found->second);
      matched_ += static_cast<double>(both);
      matched_work_ += static_cast<double>(both) * WorkOf(group_, call);
    }
  }

  [[nodiscard]] MatchGroup Result() const {
    MatchGroup result;
    result.name = kGroupNames[static_cast<std::size_t>(group_)];
    result.by = by_;
    result.planned = planned_ / steps_;
    result.recorded = recorded_ / steps_;
    result.matched = matched_ / steps_;
    const double number = matched_ / std::max({planned_, recorded_, 1.0});
    const double work = matched_work_ / std::max({planned_work_, recorded_work_, 1e-300});
    result.score = std::min(number, work);
    result.missing = Differences(missing_);
    result.extra = Differences(extra_);
    return result;
  }

 private:
  void Count(const Calls& own, const Calls& other, double& number, double& work,
             Calls& more) const {
    for (const auto& [call, count] : own) {
      number += static_cast<double>(count);
      work += static_cast<double>(count) * WorkOf(group_, call);
      const auto found = other.find(call);
      const std::int64_t both = found == other.end() ? 0 : std::min(count, found->second);
      if (count > both) {
        more[call] += count - both;
      }
    }
  }

  [[nodiscard]] std::vector<MatchDifference> Differences(const Calls& calls) const {
    std::vector<std::pair<double, MatchDifference>> rows;
    for (const auto& [call, count] : calls) {
      const auto per_step =
          static_cast<std::int64_t>(std::llround(static_cast<double>(count) / steps_));
      if (per_step > 0) {
        rows.push_back(
            {static_cast<double>(count) * WorkOf(group_, call), {TextOf(group_, call), per_step}});
      }
    }
    StableSort(rows, [](const auto& a, const auto& b) { return a.first > b.first; });
    rows.resize(std::min(rows.size(), kMostDifferences));
    std::vector<MatchDifference> result;
    for (auto& [work, row] : rows) {
      result.push_back(std::move(row));
    }
    return result;
  }

  CallGroup group_;
  MatchedBy by_;
  double steps_ = 0;
  double planned_ = 0, recorded_ = 0, matched_ = 0;
  double planned_work_ = 0, recorded_work_ = 0, matched_work_ = 0;
  Calls missing_, extra_;
};

RunMatch Match(const StepCalls& planned, const Recorded& recorded) {
  RunMatch result;
  for (std::size_t g = 0; g < kGroupCount; ++g) {
    const auto group = static_cast<CallGroup>(g);
    GroupMatch match(group, recorded.by[g]);
    const Calls plan = ToldBy(recorded.by[g], group, planned[g]);
    for (std::size_t i = 0; i < recorded.steps.size(); ++i) {
      const Calls calls = ToldBy(recorded.by[g], group, recorded.steps[i][g]);
      match.Add(plan, group == CallGroup::kCollectives ? UnderPlannedSizes(calls, plan)
                      : group == CallGroup::kProducts
                          ? WithoutWrittenOut(calls, plan, recorded.written_out[i])
                          : calls);
    }
    MatchGroup row = match.Result();
    if (row.planned > 0 || row.recorded > 0) {
      result.groups.push_back(std::move(row));
    }
  }
  return result;
}

}  // namespace

bool MatchGroup::IsEnough() const {
  return score >= (by == MatchedBy::kKernels ? kLeastKernelMatch : kLeastMatch);
}

bool RunMatch::IsRun() const {
  return AllOf(groups, &MatchGroup::IsEnough);
}

std::string RunMatch::Verdict() const {
  std::string text = IsRun() ? "a run of this plan" : "not a run of this plan";
  for (const MatchGroup& group : groups) {
    text += &group == groups.data() ? ": " : ", ";
    text += std::to_string(std::llround(group.matched)) + " of " +
            std::to_string(std::llround(group.planned)) + " " + group.name;
    if (std::llround(group.recorded) > std::llround(group.matched)) {
      text += " and " + std::to_string(std::llround(group.recorded - group.matched)) + " others";
    }
  }
  return text;
}

RunMatch MatchRecordings(const Program& program, const std::vector<ProfilerRecording>& recordings) {
  SW_CHECK(!recordings.empty(), "nothing to match");
  return Match(StepOf(program), RecordedOf(program, recordings));
}

RunMatch MatchPrograms(const Program& program, const Program& ran) {
  return Match(StepOf(program), {{StepOf(ran)}, {0}, {}});
}

}  // namespace shardwright
