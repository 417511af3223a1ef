#include "planner/stage_parts.h"

#include <algorithm>
#include <set>

#include "models/cut_stage.h"

namespace shardwright {
namespace {

// The model of `rank` of `ranks`, with the blocks that it has.
StagePart PartOf(const Problem& input, const Space& space, const Plan& plan, std::int64_t rank,
                 std::int64_t ranks) {
  StagePart part{input, space, {}, {}};
  Model& model = part.problem.model;
  CutStage(model, plan.pipeline_size * plan.pipeline_stages, rank, ranks, "plan: pipeline_size",
           plan.pipeline_edge_layers, IsVShaped(plan.pipeline_schedule));
  std::set<std::uint32_t> with_ops;  // modules
  for (const ModelOp& op : model.ops) {
    for (ModuleId m = op.module; m.valid(); m = model.modules[m.value].parent) {
      with_ops.insert(m.value);
    }
  }
  std::erase_if(part.space.blocks, [&](const std::string& fqn) {
    return !with_ops.contains(FindModule(model, fqn).value);
  });
  return part;
}

// What a rank keeps at one moment of a step, when gradients of all its parameters are there.
// Example: 1F1B on the first of 4 ranks has 4 micro-batches in flight, on the last one and its
// tail.
struct Moment {
  std::int64_t in_flight = 0;  // micro-batches of each stage, between forward and backward
  bool has_tail = false;       // the last stage is right behind its forward of one of them
};

// The one with the most in flight. When the last pass is over there are none.
Moment FullestMoment(const Pipeline& pipeline, std::int64_t rank) {
  Moment fullest;
  const auto ranks = static_cast<std::int32_t>(pipeline.ranks);
  const auto stages = static_cast<std::size_t>(pipeline.stages_per_rank);
  std::vector<std::int64_t> in_flight(stages, 0);
  std::set<std::size_t> have_gradients;
  StageAction before;
  for (const StageAction& pass : ActionsOf(pipeline, rank)) {
    const auto stage = static_cast<std::size_t>(pass.stage / ranks);
    using Kind = StageAction::Kind;
    const bool is_forward = pass.kind == Kind::kForward;
    const bool ends = pass.kind == Kind::kBackward || pass.kind == Kind::kWeightGrads;
    const bool all_have = have_gradients.size() == stages || pipeline.micro_batches == 1;
    const std::int64_t least = *std::min_element(in_flight.begin(), in_flight.end());
    if (!is_forward && pass.kind != Kind::kWeightGrads && stage + 1 == stages && all_have &&
        least >= fullest.in_flight) {
      const bool follows = before.kind == Kind::kForward && before.stage == pass.stage &&
                           before.micro_batch == pass.micro_batch;
      fullest = {least, follows};
    }
    in_flight[stage] += is_forward ? 1 : ends ? -1 : 0;
    if (ends) {
      have_gradients.insert(stage);
    }
    before = pass;
  }
  return fullest;
}

void KeepInFlight(const Moment& moment, Measured& measured) {
  const auto times = static_cast<double>(moment.in_flight);
  for (BlockClass& c : measured.classes) {
    for (BlockCost& cost : c.costs) {
      cost.kept_bytes *= times;
      cost.staying_bytes *= times;
    }
  }
  if (!moment.has_tail) {
    measured.tail_bytes = measured.staying_tail_bytes = 0;
  }
}

}  // namespace

std::vector<StagePart> StageParts(const Problem& input, const SearchOptions& options,
                                  const Space& space, Workers& workers) {
  const std::int64_t ranks = options.base.pipeline_size;
  const std::int64_t stages = ranks * options.base.pipeline_stages;
  std::map<std::int64_t, std::int64_t> micro_batches;  // how many, by their size
  for (const OuterChoice& outer : space.outer) {
    micro_batches[outer.micro_batch] = outer.accumulation;
  }
  std::vector<StagePart> parts, firsts;  // what each rank has, and its first stage
  SearchOptions one = options;           // stage of each rank
  one.base.pipeline_stages = 1;
  for (std::int64_t rank = 0; rank < ranks; ++rank) {
    parts.push_back(PartOf(input, space, options.base, rank, ranks));
    firsts.push_back(PartOf(input, space, options.base, rank, stages));
    firsts.back().space.patterns.resize(1);
    for (const auto& [size, count] : micro_batches) {
      parts.back().measured[size] = firsts.back().measured[size] = {};
    }
  }
  const auto sizes = static_cast<std::int64_t>(micro_batches.size());
  workers.ForEach(static_cast<std::size_t>(ranks * sizes), [&](std::size_t i, Evaluator&) {
    const auto rank = static_cast<std::int64_t>(i) / sizes;
    const auto [size, count] =
        *std::next(micro_batches.begin(), static_cast<std::int64_t>(i) % sizes);
    StagePart& part = parts[static_cast<std::size_t>(rank)];
    StagePart& first = firsts[static_cast<std::size_t>(rank)];
    Measured& measured = part.measured.at(size);
    measured = Measure(part.problem, options, part.space, size, rank);
    Pipeline pipeline = PipelineOf(options.base);
    pipeline.micro_batches = count;
    KeepInFlight(FullestMoment(pipeline, rank), measured);
    first.measured.at(size) = Measure(first.problem, one, first.space, size, rank);
  });
  for (const auto& [size, count] : micro_batches) {
    double before = 0;
    for (std::size_t rank = 0; rank < parts.size(); ++rank) {
      parts[rank].bubble[size] = before;
      before += SplitsBackward(options.base.pipeline_schedule)
                    ? 0
                    : firsts[rank].measured.at(size).base.Total();
    }
  }
  return parts;
}

}  // namespace shardwright
