#include "planner/warnings.h"

#include <algorithm>
#include <cstdint>
#include <numeric>

#include "core/error.h"
#include "models/stacked_experts.h"
#include "schedule/dialect_facts.h"
#include "topologies/mesh.h"

namespace shardwright {
namespace {

// The first dimension of experts in one tensor is their number. Empty: nothing padded.
std::string PaddedExperts(const PlanFile& file) {
  const Plan& plan = file.plan;
  if (!FactsOf(plan).cuts_first_dimension || plan.shard_size <= plan.expert_size) {
    return {};
  }
  const std::int64_t shards = MeshOf(plan).SameExperts().size;
  std::int64_t experts = 0;
  for (const ModelOp& op : file.model.ops) {
    const OpSpec& spec = file.model.SpecOf(op);
    const bool is_stacked = op.params.size() == 2 || StacksExperts(file.kernels.name);
    if (spec.kind == OpKind::kExperts && is_stacked &&
        RoundUp(spec.experts, shards) != spec.experts &&
        (plan.expert_size == 1 || spec.experts > shards)) {
      experts = std::max(experts, spec.experts);
    }
  }
  if (experts == 0) {
    return {};
  }
  const std::int64_t padded = RoundUp(experts, shards);
  const std::int64_t fitting = std::gcd(experts, MeshOf(plan).RankCount());
  return "fully_shard cuts the " + std::to_string(experts) +
         " experts of a layer, one tensor, over " + std::to_string(shards) +
         " ranks: they are stored, gathered and reduced as " + std::to_string(padded) +
         " experts; --shard " + std::to_string(fitting) + " with replicas pads nothing, " +
         (plan.expert_size == 1 ? "--shard " + std::to_string(plan.shard_size) +
                                      ",ep=any of a search shares them out, "
                                : "") +
         "another dimension (shard_placement_fn) is yours to code";
}

}  // namespace

std::vector<std::string> WarningsOf(const PlanFile& file) {
  std::vector<std::string> warnings = file.model.warnings;
  if (std::string experts = PaddedExperts(file); !experts.empty()) {
    warnings.push_back(std::move(experts));
  }
  return warnings;
}

}  // namespace shardwright
