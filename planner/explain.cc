// Why a plan was chosen: its nearest alternatives, and the hardware on which its time hangs.
//
// Example, for the Llama of search.cc. Its rows mean:
//
//   reshard always, 0.4 % slower       the chosen plan with that one choice changed, simulated anew
//   shard size 2, 1.9 % slower         the best plan that the search found with shard 2
//   micro-batch 2, not below 8.14 ms   not simulated: its bound is above the chosen time
//   GPU arithmetic, 0.4 % less         the gain if peak FLOP/s were a tenth higher
//
// Cost: a few dozen simulations, without the allocator's model.

#include "planner/explain.h"

#include <map>
#include <optional>
#include <utility>

#include "core/error.h"
#include "core/json.h"
#include "core/ranges.h"
#include "planner/choose.h"
#include "planner/evaluator.h"
#include "planner/space.h"
#include "schedule/dialect_facts.h"
#include "schedule/lower.h"
#include "schedule/wrap.h"
#include "topologies/mesh.h"
#include "topologies/scale_links.h"

namespace shardwright {
namespace {

constexpr std::size_t kNearest = 2;  // of each choice
constexpr double kFaster = 1.1;

// Alternatives that may fit come first, by time or its bound; the others follow, by missing bytes.
bool IsNearer(const Alternative& a, const Alternative& b) {
  const bool a_is_open = a.deficit == Bytes(0);
  const bool b_is_open = b.deficit == Bytes(0);
  if (a_is_open != b_is_open) {
    return a_is_open;
  }
  return a_is_open ? a.step_time < b.step_time : a.deficit < b.deficit;
}

class Explainer {
 public:
  Explainer(const Problem& input, const SearchOptions& options, const SearchResult& result)
      : in_(input),
        options_(options),
        result_(result),
        chosen_(result.best.plan),
        space_(MakeSpace(input, options)),
        evaluator_(input),
        limits_{result.memory_limit, input.cluster.node.pinned_limit} {}

  Explanation Run() {
    OtherUnits();
    OtherReshards();
    OtherPrefetch();
    OtherRecompute();
    OtherOffloads();
    Refitted("shard size", [](const Plan& plan) { return std::to_string(plan.shard_size); });
    Refitted("micro-batch", [](const Plan& plan) { return std::to_string(plan.micro_batch); });
    FindSensitivities();
    Note();
    GroupByChoice();
    return std::move(explanation_);
  }

 private:
  // Rows of one choice stand together: other units with the same cuts are another resharding.
  void GroupByChoice() {
    std::map<std::string, std::size_t> place;
    for (const Alternative& row : explanation_.alternatives) {
      place.try_emplace(row.choice, place.size());
    }
    StableSort(explanation_.alternatives, [&](const Alternative& a, const Alternative& b) {
      return place.at(a.choice) < place.at(b.choice);
    });
  }

  // The alternatives of one choice; keeps the nearest.
  void Keep(std::vector<Alternative> found) {
    StableSort(found, IsNearer);
    found.resize(std::min(found.size(), kNearest));
    explanation_.alternatives.insert(explanation_.alternatives.end(), found.begin(), found.end());
  }

  // Simulates the chosen plan with one choice changed, whether or not the search has tried it. A
  // plan that the dialect cannot express gives no row.
  void Add(const char* choice, std::string value, const Plan& plan,
           std::vector<Alternative>& found) {
    if (plan == chosen_) {
      return;
    }
    const Outcome outcome = evaluator_.Try(plan);
    if (!outcome.is_allowed) {
      return;
    }
    Alternative a;
    a.choice = choice;
    a.value = std::move(value);
    const auto [status, deficit] = HoldAgainst(limits_, outcome);
    a.fits = status == CandidateStatus::kFits;
    a.step_time = outcome.step_time;
    a.memory = outcome.Memory();
    a.deficit = deficit;
    found.push_back(std::move(a));
  }

  // The families of units that the search tries. A family that cuts as the chosen plan does differs
  // by its resharding only, so it is a row of that choice.
  void OtherUnits() {
    std::vector<Alternative> found;
    for (const UnitFamily& family : space_.families) {
      Plan plan = chosen_;
      plan.units = family.units;
      if (!options_.fixed.units) {
        KeepFullPrecision(in_.model, in_.job.precision, plan);
      }
      const bool is_same = std::equal(
          plan.units.begin(), plan.units.end(), chosen_.units.begin(), chosen_.units.end(),
          [](const UnitPlan& a, const UnitPlan& b) { return a.modules == b.modules; });
      Add(is_same ? "reshard" : "units", is_same ? "as by default" : family.name, plan, found);
    }
    Keep(std::move(found));
  }

  // All units alike: freed after forward, kept, or resharded to groups that the mesh splits into.
  void OtherReshards() {
    std::vector<Alternative> found;
    for (const Reshard& reshard : space_.reshards) {
      Plan plan = chosen_;
      if (plan.shard_size == 1 ||
          (reshard.kind == Reshard::Kind::kToGroup && !MeshOf(plan).SplitsInto(reshard.group))) {
        continue;
      }
      for (UnitPlan& unit : plan.units) {
        unit.reshard = reshard;
      }
      const bool to_group = reshard.kind == Reshard::Kind::kToGroup;
      Add("reshard",
          to_group ? "to groups of " + std::to_string(reshard.group)
                   : (reshard.kind == Reshard::Kind::kAlways ? "always" : "never"),
          plan, found);
    }
    Keep(std::move(found));
  }

  // With units in flight (native): one less, one more, and the other order of transfers. With
  // switches (fsdp1): each switch. Dialects without either give no row.
  void OtherPrefetch() {
    std::vector<Alternative> found;
    const EarlyGathers early = FactsOf(chosen_).early_gathers;
    if (early == EarlyGathers::kInFlight) {
      for (const std::int64_t in_flight : {chosen_.in_flight - 1, chosen_.in_flight + 1}) {
        Plan plan = chosen_;
        plan.in_flight = std::max<std::int64_t>(in_flight, 1);
        Add("prefetch", std::to_string(plan.in_flight) + " units in flight", plan, found);
      }
      Plan plan = chosen_;
      const bool in_turn = chosen_.transfers == Transfers::kInTurn;
      plan.transfers = in_turn ? Transfers::kAtOnce : Transfers::kInTurn;
      Add("transfers", in_turn ? "at once" : "in turn", plan, found);
    } else if (early == EarlyGathers::kSwitches) {
      Plan plan = chosen_;
      plan.forward_prefetch = !plan.forward_prefetch;
      Add("prefetch", plan.forward_prefetch ? "also in forward" : "not in forward", plan, found);
      plan = chosen_;
      plan.backward_prefetch = BackwardPrefetch::kNone;
      Add("prefetch", "not in backward", plan, found);
    }
    Keep(std::move(found));
  }

  void OtherRecompute() {
    std::vector<Alternative> found;
    if (space_.blocks.empty() || in_.job.mode == JobMode::kForward) {
      return;
    }
    Plan plan = chosen_;
    plan.recompute.clear();
    Add("recompute", "none", plan, found);
    for (const RecomputeKind kind : {RecomputeKind::kSelective, RecomputeKind::kFull}) {
      const bool is_full = kind == RecomputeKind::kFull;
      plan.recompute = RecomputeBlocks(in_.model, kind, is_full ? 1 : 2, "explanation");
      Add("recompute", is_full ? "full" : "selective:2", plan, found);
    }
    Keep(std::move(found));
  }

  // Each of the four parts switched on or off, if the search could have chosen the result.
  void OtherOffloads() {
    if (options_.fixed.offload) {
      return;
    }
    std::vector<Alternative> found;
    const std::pair<bool Offload::*, const char*> kParts[] = {
        {&Offload::parameters, "parameters"},
        {&Offload::optimizer, "optimizer"},
        {&Offload::activations, "activations"},
        {&Offload::moments, "moments"}};
    for (const auto& [part, name] : kParts) {
      Plan plan = chosen_;
      const bool on = !(plan.offload.*part);
      plan.offload.*part = on;
      const bool is_in_space = IsIn(space_.outer, plan.offload, &OuterChoice::offload);
      if (is_in_space) {
        Add("offload", std::string(on ? "with " : "without ") + name, plan, found);
      }
    }
    Keep(std::move(found));
  }

  // The best of each other value of a choice of the search, with everything else as found there.
  //
  // Example: micro-batch 1 was chosen. Of micro-batch 2 the search has simulated a plan of 8.40 ms
  // and has pruned another by its bound, 8.14 ms. The row says "not below 8.14 ms".
  template <class F>
  void Refitted(const char* choice, F value_of) {
    std::map<std::string, Alternative> best;
    for (std::size_t i = 0; i < result_.candidates.size(); ++i) {
      const Candidate& c = result_.candidates[i];
      const std::string value = value_of(c.plan);
      if (value == value_of(chosen_) || c.status == CandidateStatus::kFragmented ||
          c.status == CandidateStatus::kRetries || c.status == CandidateStatus::kNotTried ||
          IsPassedOver(options_, result_, i)) {
        continue;
      }
      Alternative a;
      a.choice = choice;
      a.value = value;
      a.is_refitted = true;
      a.is_simulated = c.step_time.value > 0;
      a.fits = c.status == CandidateStatus::kFits;
      a.step_time = a.is_simulated ? c.step_time : c.bound;
      a.memory = a.is_simulated ? c.memory : c.memory_bound;
      a.deficit = c.deficit;
      const auto [it, is_new] = best.emplace(value, a);
      if (!is_new && IsNearer(a, it->second)) {
        it->second = a;  // a bound below what was simulated is what is known of this value
      }
    }
    std::vector<Alternative> found;
    for (auto& [value, alternative] : best) {
      found.push_back(std::move(alternative));
    }
    Keep(std::move(found));
  }

  // Example: 7.13 ms become 7.10 ms, so the gain is 1 - 7.10 / 7.13 = 0.4 %.
  void AddSensitivity(std::string what, const Cluster& cluster, const Profile& profile) {
    Problem faster = in_;
    faster.cluster = cluster;
    faster.profile = profile;
    const Seconds base = Evaluate(in_, chosen_, {.reserved = false}).step_time;
    const Seconds now = Evaluate(faster, chosen_, {.reserved = false}).step_time;
    explanation_.sensitivities.push_back(
        {std::move(what), 1 - Ratio(ToSimTime(now), ToSimTime(base))});
  }

  // A tenth more of each: bandwidth of each level of links, arithmetic, memory bandwidth, speed of
  // the host.
  void FindSensitivities() {
    for (const std::string& level : LinkLevels(in_.cluster)) {
      Cluster cluster = in_.cluster;
      ScaleLinks(cluster, level, kFaster, "explanation");
      AddSensitivity(level + " bandwidth", cluster, in_.profile);
    }
    Cluster cluster = in_.cluster;
    for (std::optional<Number<FlopsPerSecond>>& peak : cluster.gpu.peak_flops) {
      if (peak) {
        peak->value = FlopsPerSecond(peak->value.value * kFaster);
      }
    }
    AddSensitivity("GPU arithmetic", cluster, in_.profile);
    cluster = in_.cluster;
    cluster.gpu.memory_bandwidth.value =
        BytesPerSecond(cluster.gpu.memory_bandwidth.value.value * kFaster);
    AddSensitivity("GPU memory bandwidth", cluster, in_.profile);
    Profile profile = in_.profile;
    for (Number<Seconds> HostProfile::*number :
         {&HostProfile::kernel_launch, &HostProfile::op_issue, &HostProfile::collective_issue,
          &HostProfile::unit_hook, &HostProfile::copy_issue}) {
      (profile.host.*number).value = Seconds((profile.host.*number).value.value / kFaster);
    }
    AddSensitivity("host launches", in_.cluster, profile);
    StableSortBy(explanation_.sensitivities, &Sensitivity::gain, std::greater<>());
  }

  void Note() {
    const ChosenPlan& best = result_.best;
    const Alternative* held_back = nullptr;
    for (const Alternative& a : explanation_.alternatives) {
      const bool is_faster = a.is_simulated && a.step_time < best.step_time && !a.fits;
      if (is_faster && (held_back == nullptr || a.step_time < held_back->step_time)) {
        held_back = &a;
      }
    }
    const auto largest =
        std::max_element(best.peak.by_category.begin(), best.peak.by_category.end());
    const auto category = static_cast<Category>(largest - best.peak.by_category.begin());
    const std::string most = "the largest part of the peak is " + std::string(NameOf(category)) +
                             ", " + Format(*largest);
    if (held_back != nullptr) {
      explanation_.notes.push_back("Memory binds: " + held_back->choice + " " + held_back->value +
                                   " would take " + Format(held_back->step_time) + ", but " +
                                   Format(held_back->deficit) + " are missing; " + most + ".");
    } else {
      explanation_.notes.push_back(
          "Memory does not bind: none of these choices is faster and fails "
          "for memory; " +
          most + ".");
    }
    const Sensitivity& first = explanation_.sensitivities.front();
    explanation_.notes.push_back("Time hangs most on " + first.what + ".");
  }

  const Problem& in_;
  const SearchOptions& options_;
  const SearchResult& result_;
  const Plan& chosen_;
  Space space_;
  Evaluator evaluator_;
  Limits limits_;
  Explanation explanation_;
};

}  // namespace

Explanation ExplainChoice(const Problem& input, const SearchOptions& options,
                          const SearchResult& result) {
  SW_CHECK(result.is_feasible, "nothing was chosen");
  return Explainer(input, options, result).Run();
}

}  // namespace shardwright
