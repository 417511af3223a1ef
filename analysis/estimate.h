#pragma once

// The first answer to "can I train this, and what does it take?": a short search of the planner for
// each micro-batch, without the proof and the refinement of `shardwright plan`.

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "analysis/confidence.h"
#include "analysis/rollout.h"
#include "planner/evaluate.h"
#include "planner/fixes.h"
#include "planner/search.h"
#include "schedule/plan_file.h"

namespace shardwright {

struct Estimate {
  bool fits = false;
  PlanFile file;  // the job; where it fits with the plan and its global batch
  // Where it fits.
  Outcome outcome;  // with the caching allocator
  Confidence confidence;
  std::optional<RolloutPhases> phases;  // of GRPO; then rates count tokens of whole steps
  // Tokens per second and GPU of a plan that offloads and is faster, but by no more than its
  // prediction may be off; 0: there is none.
  double offloading = 0;
  // Where it does not fit.
  MemoryFloor floor;  // of the plan that needs least
  Bytes limit;        // of the device
  std::vector<Fix> fixes;
};

// Searches with PyTorch's fully_shard. A global batch of 0
// means that it is free: the micro-batch, without accumulation, is then the smallest power of two
// within 1 % of the highest throughput. Throws InputError as Search does.
// `given` fixes choices: micro_batch and offload of its base where its `fixed` says so.
// Without `explains_misfits` a job that does not fit gets no `floor` and no `fixes`.
[[nodiscard]] Estimate EstimateJob(const Problem& problem, std::int64_t global_batch,
                                   const SearchOptions& given = {}, bool explains_misfits = true);

// Search by step time, but a plan that offloads gives way to the fastest one without offloading if
// that is slower by no more than the prediction may be off. `offloading` then gets the step time of
// the plan that gave way. The lower bound is that of all plans. At most twice the time of Search.
[[nodiscard]] SearchResult SearchSimplest(const Problem& problem, const SearchOptions& options,
                                          std::optional<Seconds>* offloading = nullptr);

// The linear modules that get LoRA adapters where nobody says which, as PEFT chooses them by the
// names of a model's modules: {"q_proj", "v_proj"} of Llama, {"c_attn"} of GPT-2. Empty: not known.
[[nodiscard]] std::vector<std::string> DefaultLoraTargets(const Model& model);

// "nothing recomputed", "every block recomputed", "12 of 32 blocks recomputed, 4 in part", ...
[[nodiscard]] std::string RecomputeWords(const PlanFile& file);

}  // namespace shardwright
