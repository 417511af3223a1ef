// Bounds against random plans: none is faster.

#include <algorithm>
#include <array>
#include <cmath>
#include <random>
#include <string>
#include <utility>
#include <vector>

#include <doctest/doctest.h>

#include "models/cut_context.h"
#include "models/cut_experts.h"
#include "models/cut_tensor.h"
#include "models/loader.h"
#include "planner/local.h"
#include "planner/measure.h"
#include "planner/search.h"
#include "planner/space.h"
#include "schedule/dialect_facts.h"
#include "schedule/plan_file.h"
#include "schedule/wrap.h"
#include "tests/planner/random_jobs.h"
#include "tests/sanitizers.h"

namespace shardwright {
namespace {

using testing::Case;
using testing::Draw;
using testing::DrawCase;
using testing::IsDeep;
using testing::NativeSearch;
using testing::Simulated;
using testing::SimulatePlan;
using testing::UnitsOf;

// A part of the shard group that can keep a copy, of any size; none if there is no such part.
Reshard DrawGroup(std::mt19937& random, std::int64_t shard_size) {
  std::vector<std::int64_t> sizes;
  for (std::int64_t size = 2; size < shard_size; ++size) {
    if (shard_size % size == 0) {
      sizes.push_back(size);
    }
  }
  if (sizes.empty()) {
    return {};
  }
  return {Reshard::Kind::kToGroup,
          sizes[static_cast<std::size_t>(Draw(random, 0, std::ssize(sizes) - 1))]};
}

// Any plan of the space that docs/planning.md describes, with parts of any size.
Plan DrawPlan(std::mt19937& random, const Case& c, int blocks) {
  Plan plan;
  plan.dialect = Dialect::kNative;
  const std::int64_t ranks = c.cluster.RankCount();
  do {
    plan.shard_size = Draw(random, 1, ranks);
  } while (ranks % plan.shard_size != 0);
  plan.replicate_size = ranks / plan.shard_size;
  const std::int64_t samples = c.job.global_batch / ranks;
  do {
    plan.micro_batch = Draw(random, 1, samples);
  } while (samples % plan.micro_batch != 0);
  plan.accumulation = samples / plan.micro_batch;
  if (plan.accumulation > 1) {
    plan.sync = Draw(random, 0, 1) == 1 ? SyncMode::kLast : SyncMode::kEvery;
    if (plan.replicate_size > 1 && Draw(random, 0, 2) == 0) {
      plan.sync = SyncMode::kReplicateLast;
    }
  }
  plan.in_flight = Draw(random, 1, 6);
  plan.transfers = Draw(random, 0, 1) == 1 ? Transfers::kInTurn : Transfers::kAtOnce;
  plan.offload.activations = Draw(random, 0, 3) == 0;
  plan.moments_piece = c.moments_piece;
  const std::array<bool*, 3> kinds = {&plan.offload.parameters, &plan.offload.optimizer,
                                      &plan.offload.moments};
  *kinds[static_cast<std::size_t>(Draw(random, 0, 2))] = Draw(random, 0, 3) == 0;
  plan.units = UnitsOf(blocks, static_cast<unsigned>(Draw(random, 0, (1 << (blocks - 1)) - 1)), {});
  for (UnitPlan& unit : plan.units) {
    const std::int64_t reshard = Draw(random, 0, 3);
    if (reshard == 0) {
      unit.reshard = {Reshard::Kind::kNever, 0};
    } else if (reshard == 1) {
      unit.reshard = DrawGroup(random, plan.shard_size);
    }
    const UnitPlan& other =
        plan.units[static_cast<std::size_t>(Draw(random, 0, std::ssize(plan.units) - 1))];
    if (Draw(random, 0, 4) == 0 && other.name != unit.name) {
      (Draw(random, 0, 1) == 1 ? unit.forward_prefetch : unit.backward_prefetch)
          .push_back(other.name);
    }
  }
  for (int b = 0; b < blocks; ++b) {
    const std::int64_t kind = Draw(random, 0, 3);
    if (kind < 2) {
      plan.recompute.push_back({"block" + std::to_string(b),
                                kind == 0 ? RecomputeKind::kFull : RecomputeKind::kSelective,
                                Draw(random, 1, 3)});
    }
  }
  return plan;
}

// What the stem and the first blocks hold learns nothing, as in fine-tuning: its gathers wait for
// no update, and some of it has no backward.
void Freeze(std::int64_t blocks, Model& model) {
  for (Parameter& param : model.params) {
    param.trainable = !param.fqn.starts_with("stem.");
    for (std::int64_t b = 0; b < blocks; ++b) {
      param.trainable =
          param.trainable && !param.fqn.starts_with("block" + std::to_string(b) + ".");
    }
  }
}

// The root holds a matrix, as large as all the rest, that nothing reads.
void AddSpare(Model& model) {
  Parameter spare;
  spare.fqn = "spare";
  spare.shape = {CountParameters(model), 1};
  spare.module = ModuleId(0);
  model.modules[0].params.emplace_back(static_cast<std::uint32_t>(model.params.size()));
  model.params.push_back(spare);
}

// A plan with this one's mesh, batch and offload, which the bounds are of; none where the search
// does not tell it apart (SyncMode::kReplicateLast without shards).
const Candidate* CandidateOf(const SearchResult& result, const Plan& plan) {
  for (const Candidate& c : result.candidates) {
    if (c.plan.shard_size == plan.shard_size && c.plan.micro_batch == plan.micro_batch &&
        c.plan.sync == plan.sync && c.plan.offload == plan.offload) {
      return &c;
    }
  }
  return nullptr;
}

// The bound of all such plans, or of all plans.
Seconds BoundOf(const SearchResult& result, const Plan& plan) {
  const Candidate* const candidate = CandidateOf(result, plan);
  return candidate != nullptr ? candidate->bound : result.lower_bound;
}

// What the host's memory alone rules out needs more of it than there is. Returns how many plans.
int CheckHost(Case c, const SearchOptions& options,
              const std::vector<std::pair<Simulated, Plan>>& all) {
  c.cluster.node.pinned_limit = Bytes(0);
  for (const auto& [simulated, plan] : all) {
    c.cluster.node.pinned_limit = std::max(c.cluster.node.pinned_limit, simulated.host / 3);
  }
  if (c.cluster.node.pinned_limit == Bytes(0)) {
    return 0;
  }
  const SearchResult result = Search(c, options);
  int ruled_out = 0;
  for (const auto& [simulated, plan] : all) {
    const Candidate* const candidate = CandidateOf(result, plan);
    if (candidate != nullptr && candidate->status == CandidateStatus::kPrunedMemory &&
        candidate->memory_bound <= result.memory_limit) {
      CHECK(simulated.host >= c.cluster.node.pinned_limit + candidate->deficit);
      ++ruled_out;
    }
  }
  return ruled_out;
}

TEST_CASE("No random plan is faster than the bound") {
  const int jobs = IsDeep() ? 100 : testing::kHasSanitizer ? 3 : 10;
  const int plans = IsDeep() ? 1000 : testing::kHasSanitizer ? 20 : 100;
  int fitting = 0;
  int ruled_out = 0;
  double tightest = INFINITY;
  for (int i = 0; i < jobs; ++i) {
    std::mt19937 random(static_cast<unsigned>(1000 + i));
    const int blocks = static_cast<int>(Draw(random, 2, 8));
    Case c = DrawCase(random, blocks);
    if (i % 4 == 3) {
      Freeze(Draw(random, 0, blocks - 1), c.model);
    } else if (i % 8 == 6) {
      c.job.mode = JobMode::kForward;
    }
    SearchOptions options = NativeSearch(c);
    options.effort = 0;
    std::vector<std::pair<Simulated, Plan>> all;
    for (int p = 0; p < plans; ++p) {
      const Plan plan = DrawPlan(random, c, blocks);
      all.emplace_back(SimulatePlan(c, plan), plan);
    }
    options.memory_limit = all[0].first.memory;
    for (const auto& [simulated, plan] : all) {
      options.memory_limit = Draw(random, 0, 3) == 0
                                 ? std::max(options.memory_limit, simulated.memory)
                                 : options.memory_limit;
    }
    const SearchResult result = Search(c, options);
    ruled_out += CheckHost(c, options, all);
    for (const auto& [simulated, plan] : all) {
      if (simulated.memory > options.memory_limit) {
        continue;
      }
      ++fitting;
      CAPTURE(i);
      CAPTURE(plan.shard_size);
      CAPTURE(plan.micro_batch);
      CAPTURE(plan.offload.activations);
      CHECK(result.lower_bound.value <= simulated.seconds);
      const Seconds own = BoundOf(result, plan);
      CHECK(own.value <= simulated.seconds);
      tightest = std::min(tightest, simulated.seconds / own.value - 1);
      if (const Candidate* const candidate = CandidateOf(result, plan); candidate != nullptr) {
        CHECK(candidate->memory_bound <= simulated.memory);
      }
    }
  }
  CHECK(ruled_out > 0);  // not vacuous
  MESSAGE(ruled_out << " random plans that need too much of the host");
  MESSAGE(fitting << " random plans that fit; their bound is below the nearest by " << tightest);
}

// A model whose experts ranks share out or whose layers or tokens they cut, as `base` says, with
// any mesh, batch, units, resharding and checkpointed blocks.
Plan DrawShared(std::mt19937& random, const Case& c, const Plan& base) {
  Plan plan;
  plan.expert_size = base.expert_size;
  plan.tensor_size = base.tensor_size;
  plan.context_size = base.context_size;
  plan.context_method = base.context_method;
  const std::int64_t ranks = c.cluster.RankCount() / plan.tensor_size;
  const std::int64_t least = plan.expert_size * plan.context_size;  // one of the two is 1
  do {
    plan.shard_size = least * Draw(random, 1, ranks / least);
  } while (ranks % plan.shard_size != 0);
  if (IsRing(plan.context_method)) {
    plan.shard_size = ranks;
  }
  plan.replicate_size = ranks / plan.shard_size;
  const std::int64_t samples = c.job.global_batch / MeshOf(plan).DataCount();
  plan.micro_batch = Draw(random, 0, 1) == 1 ? samples : 1;
  plan.accumulation = samples / plan.micro_batch;
  plan.sync = plan.accumulation > 1 && Draw(random, 0, 1) == 1 ? SyncMode::kLast : SyncMode::kEvery;
  const char* const rule = Draw(random, 0, 1) == 1 ? "block" : "torchtitan";
  plan.units = Wrap(c.model, ParseWrap(rule, "test"), {}, Dialect::kFsdp2, "test");
  AddExpertUnits(c.model, plan.units);
  for (UnitPlan& unit : plan.units) {
    unit.reshard = {Draw(random, 0, 2) == 0 ? Reshard::Kind::kNever : Reshard::Kind::kAlways, 0};
  }
  for (const ModuleId block : BlocksOf(c.model)) {
    if (Draw(random, 0, 2) > 0) {
      plan.recompute.push_back({c.model.modules[block.value].fqn, RecomputeKind::kFull, 1});
    }
  }
  return plan;
}

void CheckParts(const std::string& model, std::int64_t Plan::*parts,
                ContextMethod method = ContextMethod::kGather) {
  const int jobs = IsDeep() ? 24 : 2;
  double tightest = INFINITY;
  for (int i = 0; i < jobs; ++i) {
    std::mt19937 random(static_cast<unsigned>(70 + i));
    Case c = DrawCase(random, 2);
    c.cluster = LoadCluster(i % 2 == 0 ? "dgx-h100" : "p4d", i % 3 + 1, 0);
    c.kernels = FindKernelSet(i % 4 < 2 ? "torch-eager" : "torch-compile", "test");
    c.profile = DefaultProfile(c.cluster.gpu, c.kernels.name);
    c.job = Job();
    c.job.sequence_length = 512;
    c.job.global_batch = 2 * c.cluster.RankCount();
    LoadOptions load;
    load.sequence_length = c.job.sequence_length;
    c.model = {LoadModel(model, load)};
    SearchOptions options;
    options.base.*parts = std::int64_t{1} << Draw(random, 1, 3);
    options.base.context_method = method;
    CutExperts(c.model, options.base.expert_size, "test");
    CutTensor(c.model, options.base.tensor_size, "test");
    CutContext(c.model, options.base.context_size, options.base.context_method, "test");
    options.effort = 0;
    std::vector<std::pair<Simulated, Plan>> all;
    for (int p = 0; p < (IsDeep() ? 60 : 6); ++p) {
      const Plan plan = DrawShared(random, c, options.base);
      all.emplace_back(SimulatePlan(c, plan), plan);
      options.memory_limit = std::max(options.memory_limit, all.back().first.memory);
    }
    const SearchResult result = Search(c, options);
    for (const auto& [simulated, plan] : all) {
      CAPTURE(i);
      CAPTURE(plan.shard_size);
      CAPTURE(plan.expert_size);
      CAPTURE(plan.tensor_size);
      CAPTURE(plan.context_size);
      const Seconds own = BoundOf(result, plan);
      CHECK(own.value <= simulated.seconds);
      tightest = std::min(tightest, simulated.seconds / own.value - 1);
      if (const Candidate* const candidate = CandidateOf(result, plan); candidate != nullptr) {
        CHECK(candidate->memory_bound <= simulated.memory);
      }
    }
  }
  MESSAGE("their bound is below the nearest by " << tightest);
}

TEST_CASE("No random plan that shares out experts is faster than the bound") {
  CheckParts("mixtral-8x7b", &Plan::expert_size);
}

TEST_CASE("No random plan that cuts layers is faster than the bound") {
  CheckParts("llama-3-8b", &Plan::tensor_size);
}

TEST_CASE("No random plan that cuts tokens is faster than the bound") {
  CheckParts("llama-3-8b", &Plan::context_size);
  CheckParts("llama-3-8b", &Plan::context_size, ContextMethod::kRing);
  CheckParts("llama-3-8b", &Plan::context_size, ContextMethod::kUlysses);
}

// A plan of a chain of `runs` blocks as one of a model with many: each block becomes a run of them.
Plan Spread(Plan plan, const std::string& prefix, int blocks, int runs) {
  const auto layers = [&](const std::string& block) {
    std::vector<std::string> names;
    const int run = std::stoi(block.substr(std::string("block").size()));
    for (int layer = run * blocks / runs; layer < (run + 1) * blocks / runs; ++layer) {
      names.push_back(prefix + std::to_string(layer));
    }
    return names;
  };
  for (UnitPlan& unit : plan.units) {
    std::vector<std::string> modules;
    for (const std::string& module : unit.modules) {
      const std::vector<std::string> names =
          module.empty() ? std::vector<std::string>{""} : layers(module);
      modules.insert(modules.end(), names.begin(), names.end());
    }
    unit.modules = modules;
  }
  std::vector<RecomputeRegion> regions;
  for (const RecomputeRegion& region : plan.recompute) {
    for (const std::string& name : layers(region.module)) {
      regions.push_back({name, region.kind, region.keep_every});
    }
  }
  plan.recompute = regions;
  return plan;
}

TEST_CASE("No random plan of Llama-3-70B on 1,024 GPUs is faster than the bound") {
  if (!IsDeep()) {
    return;
  }
  Case c;
  c.cluster = LoadCluster("dgx-h100", 128);
  c.cluster.node.pinned_limit = Bytes(0);  // some of the plans need more
  c.kernels = FindKernelSet("torch-eager", "test");
  c.profile = DefaultProfile(c.cluster.gpu, c.kernels.name);
  c.job.sequence_length = 2048;
  c.job.global_batch = 1024;
  c.model = LoadModelForJob("llama-3-70b", c.job, Path("test"));
  constexpr int kBlocks = 80, kRuns = 30, kPlans = 500;
  std::mt19937 random(70);
  std::vector<std::pair<Simulated, Plan>> all;
  std::vector<Bytes> memory;
  for (int p = 0; p < kPlans; ++p) {
    const Plan plan = Spread(DrawPlan(random, c, kRuns), "model.layers.", kBlocks, kRuns);
    all.emplace_back(SimulatePlan(c, plan), plan);
    memory.push_back(all.back().first.memory);
  }
  std::sort(memory.begin(), memory.end());
  for (const Bytes limit : {memory.back(), memory[kPlans / 2], memory[kPlans / 10]}) {
    SearchOptions options = NativeSearch(c);
    options.effort = 0;
    options.memory_limit = limit;
    const SearchResult result = Search(c, options);
    double tightest = INFINITY;
    for (const auto& [simulated, plan] : all) {
      if (simulated.memory <= limit) {
        const Seconds own = BoundOf(result, plan);
        CHECK(result.lower_bound.value <= simulated.seconds);
        CHECK(own.value <= simulated.seconds);
        tightest = std::min(tightest, simulated.seconds / own.value - 1);
      }
    }
    MESSAGE("the bound is below the nearest random plan by " << tightest);
  }
}

// Any plan of another dialect that reduces gradients.
Plan DrawPlanOf(Dialect dialect, std::mt19937& random, const Case& c, int blocks) {
  Plan plan = DrawPlan(random, c, blocks);
  plan.dialect = dialect;
  plan.in_flight = Plan().in_flight;
  plan.transfers = Plan().transfers;
  plan.offload.optimizer = plan.offload.moments = false;
  plan.moments_piece = Plan().moments_piece;
  if (dialect == Dialect::kDdp) {
    plan.shard_size = 1;
    plan.replicate_size = c.cluster.RankCount();
    plan.offload.parameters = false;
  }
  if (dialect == Dialect::kZero3) {
    plan.offload.optimizer = !plan.offload.parameters && Draw(random, 0, 3) == 0;
    plan.zero.prefetch_bucket = Draw(random, 0, 1) == 1 ? 0 : plan.zero.prefetch_bucket;
    plan.zero.max_reuse_distance = Draw(random, 0, 1) == 1 ? 0 : plan.zero.max_reuse_distance;
  } else if (IsZero(dialect)) {
    plan.offload.parameters = false;
  }
  if (IsZero(dialect)) {
    plan.zero.reduce_bucket = Draw(random, 1, 1'000'000);
  }
  if (dialect != Dialect::kFsdp2) {
    plan.sync = plan.sync == SyncMode::kReplicateLast ||
                        (dialect == Dialect::kFsdp1 && plan.offload.parameters)
                    ? SyncMode::kLast
                    : plan.sync;
    // One module per unit; what is in none belongs to the root.
    plan.units = UnitsOf(blocks, (1U << (blocks - 1)) - 1, {});
    std::erase_if(plan.units, [&](const UnitPlan& unit) {
      return unit.name != "root" && (dialect == Dialect::kDdp || Draw(random, 0, 3) == 0);
    });
    for (UnitPlan& unit : plan.units) {
      const bool keeps = !IsZero(dialect) && Draw(random, 0, 1) == 0;
      unit.reshard = keeps ? Reshard{Reshard::Kind::kNever, 0} : Reshard();
    }
  }
  plan.sync = IsZero(dialect) ? SyncMode::kEvery : plan.sync;
  plan.forward_prefetch = dialect == Dialect::kFsdp1 && Draw(random, 0, 1) == 1;
  return plan;
}

// Units that never reshard are gathered once per step without synchronisation (fsdp1), and
// never where nothing learns.
TEST_CASE("No random plan of another dialect is faster than the bound") {
  const int jobs = IsDeep() ? 60 : testing::kHasSanitizer ? 3 : 6;
  const int plans = IsDeep() ? 300 : 30;
  for (const Dialect dialect : {Dialect::kFsdp2, Dialect::kFsdp1, Dialect::kDdp, Dialect::kZero1,
                                Dialect::kZero2, Dialect::kZero3}) {
    CAPTURE(NameOf(dialect));
    int ruled_out = 0;
    double tightest = INFINITY;
    for (int i = 0; i < jobs; ++i) {
      CAPTURE(i);
      std::mt19937 random(static_cast<unsigned>(2000 + i));
      const int blocks = static_cast<int>(Draw(random, 2, 6));
      Case c = DrawCase(random, blocks);
      c.job.global_batch = 4 * c.cluster.RankCount();
      if (i % 4 == 3) {
        Freeze(Draw(random, 0, blocks - 1), c.model);
      } else if (i % 4 == 1 && dialect != Dialect::kDdp) {  // which refuses it
        AddSpare(c.model);
      } else if (i % 4 == 2) {
        c.job.mode = JobMode::kForward;
      }
      SearchOptions options = NativeSearch(c);
      options.base.dialect = dialect;
      options.base.moments_piece = Plan().moments_piece;
      options.effort = 0;
      const SearchResult result = Search(c, options);
      std::vector<std::pair<Simulated, Plan>> all;
      for (int p = 0; p < plans; ++p) {
        const Plan plan = DrawPlanOf(dialect, random, c, blocks);
        const Simulated simulated = SimulatePlan(c, plan);
        all.emplace_back(simulated, plan);
        const Seconds own = BoundOf(result, plan);
        CAPTURE(plan.shard_size);
        CAPTURE(plan.micro_batch);
        CAPTURE(plan.offload.parameters);
        CAPTURE(plan.offload.activations);
        CAPTURE(static_cast<int>(plan.sync));
        CHECK(own.value <= simulated.seconds);
        tightest = std::min(tightest, simulated.seconds / own.value - 1);
        if (const Candidate* const candidate = CandidateOf(result, plan); candidate != nullptr) {
          CHECK(candidate->memory_bound <= simulated.memory);
        }
      }
      ruled_out += CheckHost(c, options, all);
    }
    // Of ZeRO's plans few are candidates here.
    CHECK((ruled_out > 0 || FactsOf(dialect).offload == Offload() || IsZero(dialect)));
    MESSAGE(NameOf(dialect) << ": the bound is below the nearest plan by " << tightest);
  }
}

// What does not fit is not tried with more checkpointing where that cannot save enough.
TEST_CASE("No step of the ladder takes less than it promises") {
  const int jobs = IsDeep() ? 200 : testing::kHasSanitizer ? 4 : 20;
  std::int64_t plans = 0;
  double tightest = INFINITY;  // in bytes that one block keeps
  for (int i = 0; i < jobs; ++i) {
    CAPTURE(i);
    std::mt19937 random(static_cast<unsigned>(3000 + i));
    const Case c = DrawCase(random, static_cast<int>(Draw(random, 4, 8)));
    SearchOptions options = NativeSearch(c);
    options.base.dialect = i % 2 == 0 ? Dialect::kNative : Dialect::kFsdp2;
    options.base.moments_piece = Plan().moments_piece;
    const Space space = MakeSpace(c, options);
    const std::int64_t micro_batch = Draw(random, 1, 4);
    const MixLadder ladder(space, Measure(c, options, space, micro_batch), false);
    Case any_batch = c;
    any_batch.job.global_batch = 0;
    for (const UnitFamily& family : space.families) {
      std::vector<Bytes> memory;
      for (std::size_t step = 0; step <= ladder.steps(); ++step) {
        Plan plan = options.base;
        plan.shard_size = c.cluster.RankCount();
        plan.micro_batch = micro_batch;
        plan.accumulation = 1 + i % 3;
        plan.units = family.units;
        plan.recompute = ladder.Regions(space, step);
        if (CanRecompute(plan)) {
          memory.push_back(SimulatePlan(any_batch, plan).memory);
        } else {
          memory.push_back(Bytes(0));
        }
      }
      for (std::size_t step = 0; step < ladder.steps(); ++step) {
        for (std::size_t later = step + 1; later <= ladder.steps(); ++later) {
          if (memory[step] > Bytes(0) && memory[later] > Bytes(0)) {
            CAPTURE(step);
            const auto saved = static_cast<double>((memory[step] - memory[later]).value);
            CHECK(saved <= ladder.MostSavedFrom(step));
            tightest = std::min(tightest, (ladder.MostSavedFrom(step) - saved) *
                                              static_cast<double>(ladder.blocks()) /
                                              ladder.Saved(ladder.steps()));
            ++plans;
          }
        }
      }
    }
  }
  CHECK(plans > 10 * jobs);  // not vacuous
  MESSAGE(plans << " pairs of plans; " << tightest << " blocks to spare at least");
}

}  // namespace
}  // namespace shardwright
