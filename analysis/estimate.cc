#include "analysis/estimate.h"

#include <algorithm>
#include <numeric>
#include <utility>

#include "core/ranges.h"
#include "planner/space.h"
#include "schedule/wrap.h"

namespace shardwright {
namespace {

// Larger ones gain nothing that this answer could tell.
constexpr std::int64_t kMostMicroBatch = 256;
// Simulations for each micro-batch: enough for a plan that recomputes and offloads no more than it
// has to. More of them gain less than the band of the answer.
constexpr std::int64_t kEffort = 10;
// Simulations before it is said that nothing fits.
constexpr std::int64_t kMisfitEffort = 100;
// A larger micro-batch has to be this much faster.
constexpr double kGain = 1.01;
// And so much faster, if its allocator retries and that of the smaller one does not.
constexpr double kEdgeGain = 1.5;

struct Searched {
  PlanFile file;
  SearchOptions options;
  SearchResult result;
  double offloading = 0;  // SamplesPerSecond of a faster plan that offloads and gave way; 0: none

  [[nodiscard]] double SamplesPerSecond() const {
    return static_cast<double>(file.job.global_batch) / result.best.step_time.value;
  }
  [[nodiscard]] bool Offloads() const { return result.best.plan.offload != Offload(); }
};

// A micro-batch of 0 is free, or `given`'s.
Searched SearchBatch(const Problem& problem, std::int64_t global_batch, std::int64_t micro_batch,
                     const SearchOptions& given) {
  Searched searched{{problem, {}}, given, {}};
  searched.file.job.global_batch = global_batch;
  SearchOptions& options = searched.options;
  options.base.dialect = Dialect::kFsdp2;
  options.effort = kEffort;
  if (micro_batch > 0) {
    options.fixed.micro_batch = true;
    options.base.micro_batch = micro_batch;
  }
  std::optional<Seconds> offloading;
  searched.result = SearchSimplest(searched.file, options, &offloading);
  if (!searched.result.is_feasible) {
    options.effort = kMisfitEffort;
    searched.result = SearchSimplest(searched.file, options, &offloading);
  }
  if (offloading) {
    searched.offloading = static_cast<double>(searched.file.job.global_batch) / offloading->value;
  }
  return searched;
}

// `plain`, which offloads nothing, unless `best` is faster by more than its prediction may be off.
Searched Simplest(Searched best, std::optional<Searched> plain) {
  best.file.plan = best.result.best.plan;
  const double rate = best.SamplesPerSecond();
  if (!plain || !best.Offloads() || plain->result.best.retries > best.result.best.retries ||
      rate > plain->SamplesPerSecond() * (1 + ConfidenceOf(best.file).band)) {
    return best;
  }
  plain->offloading = rate;
  return *std::move(plain);
}

// The fastest of the powers of two.
Searched SearchMicroBatches(const Problem& problem, const SearchOptions& given) {
  const std::int64_t ranks = DataRanks(problem.cluster, MeshOf(given.base));
  if (given.fixed.micro_batch) {
    return SearchBatch(problem, ranks * given.base.micro_batch, 0, given);
  }
  // Whole pairs, or whole groups of completions.
  const std::int64_t least = problem.job.trains_by == TrainsBy::kGrpo
                                 ? std::lcm(ranks, problem.job.rollout.generations) / ranks
                                 : SamplesPerExample(problem.job.trains_by);
  Searched best = SearchBatch(problem, ranks * least, 0, given);
  std::optional<Searched> plain;  // the best one before any offloaded
  bool gains = best.result.is_feasible;
  for (std::int64_t micro = 2 * least; micro <= kMostMicroBatch && gains; micro *= 2) {
    Searched next = SearchBatch(problem, ranks * micro, micro, given);
    if (next.result.is_feasible && next.result.best.retries > 0 && best.result.best.retries == 0 &&
        next.SamplesPerSecond() < kEdgeGain * best.SamplesPerSecond()) {
      continue;  // a plan on the edge; one with more samples may recompute more and have room
    }
    gains = next.result.is_feasible && next.SamplesPerSecond() >= kGain * best.SamplesPerSecond();
    if (gains && next.Offloads() && !best.Offloads()) {
      plain = std::move(best);
    }
    if (gains) {
      best = std::move(next);
    }
  }
  return Simplest(std::move(best), std::move(plain));
}

}  // namespace

SearchResult SearchSimplest(const Problem& problem, const SearchOptions& options,
                            std::optional<Seconds>* offloading) {
  SearchResult all = Search(problem, options);
  const bool is_stopped = options.stop != nullptr && options.stop->load();
  if (!all.is_feasible || all.best.plan.offload == Offload() || options.fixed.offload ||
      options.objective != Objective::kTime || options.previous != nullptr || is_stopped) {
    return all;
  }
  const PlanFile chosen{problem, all.best.plan};
  const Seconds most = all.best.step_time * (1 + ConfidenceOf(chosen).band);
  // No second search where none of its plans can be as fast.
  if (NoneOf(all.candidates, [&](const Candidate& c) {
        return c.plan.offload == Offload() && c.bound <= most &&
               (c.status == CandidateStatus::kFits || c.status == CandidateStatus::kRetries ||
                c.status == CandidateStatus::kPrunedTime || c.status == CandidateStatus::kNotTried);
      })) {
    return all;
  }
  SearchOptions without = options;
  without.fixed.offload = true;
  without.base.offload = {};
  SearchResult simple = Search(problem, without);
  if (!simple.is_feasible || simple.best.retries > all.best.retries ||
      simple.best.step_time > most) {
    return all;
  }
  if (offloading != nullptr) {
    *offloading = all.best.step_time;
  }
  simple.lower_bound = std::min(simple.lower_bound, all.lower_bound);
  simple.proven_gap = 1 - simple.lower_bound.value / simple.best.step_time.value;
  return simple;
}

Estimate EstimateJob(const Problem& problem, std::int64_t global_batch, const SearchOptions& given,
                     bool explains_misfits) {
  Estimate estimate;
  Searched found = global_batch > 0 ? SearchBatch(problem, global_batch, 0, given)
                                    : SearchMicroBatches(problem, given);
  estimate.fits = found.result.is_feasible;
  estimate.file = std::move(found.file);
  estimate.limit = found.result.memory_limit;
  if (!estimate.fits && !explains_misfits) {
    return estimate;
  }
  if (!estimate.fits) {
    estimate.floor = found.result.floor;
    estimate.fixes = FindFixes(estimate.file, found.options);
    return estimate;
  }
  estimate.file.plan = std::move(found.result.best.plan);
  estimate.outcome = Evaluate(estimate.file, estimate.file.plan);
  estimate.confidence = ConfidenceOf(estimate.file);
  estimate.phases = PhasesOf(estimate.file, estimate.outcome.step_time);
  if (estimate.phases) {
    estimate.confidence.band = estimate.phases->Band(estimate.confidence.band);
    estimate.confidence.text += "; none generates";
    estimate.outcome.rates = RatesOf(estimate.file, estimate.file.plan, estimate.phases->step);
  }
  estimate.offloading = found.offloading *
                        static_cast<double>(estimate.file.model.tokens_per_sample) /
                        static_cast<double>(estimate.file.cluster.RankCount());
  return estimate;
}

std::vector<std::string> DefaultLoraTargets(const Model& model) {
  // github.com/huggingface/peft, src/peft/utils/constants.py,
  // TRANSFORMERS_MODELS_TO_LORA_TARGET_MODULES_MAPPING: the choices there, by how many model types
  // have them.
  static const std::vector<std::vector<std::string>> kChoices = {
      {"q_proj", "v_proj"}, {"query_key_value"}, {"c_attn"}, {"query", "value"},
      {"q", "v"},           {"qkv_proj"},        {"in_proj"}};
  const auto has = [&](const std::string& name) {
    return AnyOf(model.ops, [&](const ModelOp& op) {
      return model.SpecOf(op).kind == OpKind::kLinear &&
             model.modules[op.module.value].name == name;
    });
  };
  for (const std::vector<std::string>& names : kChoices) {
    if (AllOf(names, has)) {
      return names;
    }
  }
  return {};
}

std::string RecomputeWords(const PlanFile& file) {
  const std::vector<RecomputeRegion>& regions = file.plan.recompute;
  if (regions.empty()) {
    return "nothing recomputed";
  }
  const std::vector<RecomputeRegion> blocks =
      RecomputeBlocks(file.model, RecomputeKind::kFull, 1, "plan");
  std::size_t full = 0;
  std::size_t part = 0;  // selectively, or some of its modules
  for (const RecomputeRegion& block : blocks) {
    const auto in_block = [&](const RecomputeRegion& region) {
      return region.module == block.module || region.module.starts_with(block.module + ".");
    };
    if (IsIn(regions, block)) {
      ++full;
    } else if (AnyOf(regions, in_block)) {
      ++part;
    }
  }
  const auto of_all = [&](std::size_t count) {
    return count == blocks.size()
               ? std::string("every block")
               : std::to_string(count) + " of " + std::to_string(blocks.size()) + " blocks";
  };
  return full == 0 ? of_all(part) + " recomputed in part"
                   : of_all(full) + " recomputed" +
                         (part == 0 ? "" : ", " + std::to_string(part) + " in part");
}

}  // namespace shardwright
