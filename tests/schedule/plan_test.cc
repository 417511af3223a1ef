#include "schedule/plan.h"

#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include <doctest/doctest.h>

#include "core/error.h"
#include "tests/schedule/chain_model.h"
#include "tests/schedule/tiny_model.h"

namespace shardwright {
namespace {

using testing::TinyModel;

UnitPlan Unit(std::string name, std::vector<std::string> modules) {
  UnitPlan unit;
  unit.name = std::move(name);
  unit.modules = std::move(modules);
  return unit;
}

Plan PlanOf(Dialect dialect, std::vector<UnitPlan> units) {
  Plan plan;
  plan.dialect = dialect;
  plan.shard_size = 4;
  plan.units = std::move(units);
  return plan;
}

Plan BlockPlan(Dialect dialect = Dialect::kFsdp2) {
  return PlanOf(dialect, {Unit("layers.0", {"layers.0"}), Unit("layers.1", {"layers.1"}),
                          Unit("root", {""})});
}

std::vector<std::string> Names(const Model& model, const ResolvedUnit& unit) {
  std::vector<std::string> names;
  for (const ParamId id : unit.params) {
    names.push_back(model.params[id.value].fqn);
  }
  return names;
}

using Strings = std::vector<std::string>;

std::string ResolveError(const Model& model, const Plan& plan) {
  try {
    (void)ResolveUnits(model, plan, "p.json: plan");
  } catch (const InputError& error) {
    return error.what();
  }
  return "";
}

std::string ValidateError(const Plan& plan, const Job& job = {}) {
  try {
    ValidatePlan(TinyModel(), job, plan, "p.json: plan");
  } catch (const InputError& error) {
    return error.what();
  }
  return "";
}

// Orders worked out by hand from the two walks: pre-order takes a module's own parameters before
// its children's, post-order after them.
TEST_CASE("ResolveUnits: communication order follows the dialect's walk") {
  const Model model = TinyModel();
  const Strings root = {"embed.weight", "norm.weight", "head.weight"};

  const std::vector<ResolvedUnit> fsdp2 = ResolveUnits(model, BlockPlan(), "p");
  REQUIRE(fsdp2.size() == 3);
  CHECK(fsdp2[0].name == "layers.0");
  CHECK(fsdp2[0].modules == std::vector<ModuleId>{FindModule(model, "layers.0")});
  CHECK(Names(model, fsdp2[0]) ==
        Strings{"layers.0.lin.weight", "layers.0.lin.bias", "layers.0.scale"});
  CHECK(Names(model, fsdp2[2]) == root);

  for (const Dialect dialect : {Dialect::kFsdp1, Dialect::kNative}) {
    const std::vector<ResolvedUnit> units = ResolveUnits(model, BlockPlan(dialect), "p");
    CHECK(Names(model, units[1]) ==
          Strings{"layers.1.scale", "layers.1.lin.weight", "layers.1.lin.bias"});
    CHECK(Names(model, units[2]) == root);
  }
  const Plan ddp = PlanOf(Dialect::kDdp, {Unit("root", {""})});
  CHECK(Names(model, ResolveUnits(model, ddp, "p")[0]) ==
        Strings{"embed.weight", "layers.0.scale", "layers.0.lin.weight", "layers.0.lin.bias",
                "layers.1.scale", "layers.1.lin.weight", "layers.1.lin.bias", "norm.weight",
                "head.weight"});
}

TEST_CASE("ResolveUnits: inner units take first, whatever the order of the list") {
  const Model model = TinyModel();
  const Plan inner_first =
      PlanOf(Dialect::kFsdp1,
             {Unit("lin", {"layers.0.lin"}), Unit("block", {"layers.0"}), Unit("root", {""})});
  const Plan outer_first =
      PlanOf(Dialect::kFsdp1,
             {Unit("block", {"layers.0"}), Unit("lin", {"layers.0.lin"}), Unit("root", {""})});
  const auto a = ResolveUnits(model, inner_first, "p");
  const auto b = ResolveUnits(model, outer_first, "p");
  CHECK(Names(model, a[0]) == Strings{"layers.0.lin.weight", "layers.0.lin.bias"});
  CHECK(Names(model, a[1]) == Strings{"layers.0.scale"});
  CHECK(Names(model, b[0]) == Names(model, a[1]));
  CHECK(Names(model, b[1]) == Names(model, a[0]));
}

TEST_CASE("ResolveUnits: groups keep the listed order, the root may be left without parameters") {
  const Model model = TinyModel();
  const Plan plan = PlanOf(
      Dialect::kFsdp2,
      {Unit("tail", {"head", "norm"}), Unit("rest", {"embed", "layers"}), Unit("root", {""})});
  const auto units = ResolveUnits(model, plan, "p");
  CHECK(Names(model, units[0]) == Strings{"head.weight", "norm.weight"});
  CHECK(units[1].params.size() == 7);
  CHECK(units[2].params.empty());
}

// Every storage lies in exactly one unit, on random subsets of modules as units.
TEST_CASE("ResolveUnits: units partition the storages") {
  const Model model = TinyModel(true);
  std::uint32_t state = 1;
  for (int round = 0; round < 200; ++round) {
    std::vector<UnitPlan> units;
    for (const Module& module : model.modules) {
      state = state * 1664525U + 1013904223U;
      // embed and head are tied: leave both to the root.
      const bool tied = module.fqn == "embed" || module.fqn == "head";
      if (!module.fqn.empty() && !tied && (state >> 16) % 3 == 0) {
        units.push_back(Unit(module.fqn, {module.fqn}));
      }
    }
    units.push_back(Unit("root", {""}));
    const Dialect dialect = round % 2 == 0 ? Dialect::kFsdp1 : Dialect::kFsdp2;
    std::vector<int> seen(model.params.size(), 0);
    for (const ResolvedUnit& unit : ResolveUnits(model, PlanOf(dialect, units), "p")) {
      for (const ParamId id : unit.params) {
        ++seen[id.value];
      }
    }
    for (std::size_t i = 0; i < seen.size(); ++i) {
      CHECK(seen[i] == (model.params[i].tied_to.valid() ? 0 : 1));
    }
  }
}

TEST_CASE("ResolveUnits: a tied storage is counted once, where the walk meets it first") {
  const Model model = TinyModel(true);
  const Plan plan =
      PlanOf(Dialect::kFsdp2, {Unit("ends", {"head", "norm", "embed"}), Unit("root", {""})});
  // "head" comes first, but the storage is named after the parameter that owns it.
  CHECK(Names(model, ResolveUnits(model, plan, "p")[0]) == Strings{"embed.weight", "norm.weight"});
}

TEST_CASE("ResolveUnits: errors") {
  const Model model = TinyModel();
  CHECK(ResolveError(model, PlanOf(Dialect::kFsdp2,
                                   {Unit("a", {"embed", "layer.0"}), Unit("root", {""})})) ==
        "p.json: plan.units[0].modules[1]: got \"layer.0\", expected the FQN of a module; "
        "did you mean \"layers.0\"?");
  CHECK(ResolveError(model, PlanOf(Dialect::kFsdp2, {Unit("a", {"embed"}), Unit("b", {"embed"}),
                                                     Unit("root", {""})})) ==
        "p.json: plan.units[1].modules[0]: got \"embed\", expected a module that no other entry "
        "names; unit \"a\" has it already");
  CHECK(ResolveError(model, PlanOf(Dialect::kFsdp2, {Unit("a", {"embed"})})) ==
        "p.json: plan.units: got no unit for parameter \"layers.0.scale\", expected units that "
        "cover every parameter; add the unit {\"name\": \"root\", \"modules\": [\"\"]}");
  Plan prefetch = BlockPlan();
  prefetch.units[0].backward_prefetch = {"layers.1", "layers.2"};
  CHECK(ResolveError(model, prefetch) ==
        "p.json: plan.units[0].backward_prefetch[1]: got \"layers.2\", expected the name of a "
        "unit; did you mean \"layers.0\"?");
  CHECK(ResolveError(TinyModel(true), PlanOf(Dialect::kFsdp2, {Unit("tail", {"norm", "head"}),
                                                               Unit("root", {""})})) ==
        "p.json: plan.units: got tied parameters \"embed.weight\" in unit \"root\" and "
        "\"head.weight\" in unit \"tail\", expected both in one unit; list both modules in one "
        "unit, or leave both to the root");
}

TEST_CASE("ValidatePlan: accepts plans of every dialect") {
  for (const Dialect dialect : {Dialect::kNative, Dialect::kFsdp2, Dialect::kFsdp1}) {
    CHECK(ValidateError(BlockPlan(dialect)) == "");
  }
  Plan ddp = PlanOf(Dialect::kDdp, {Unit("root", {""})});
  ddp.shard_size = 1;
  ddp.replicate_size = 4;
  ddp.bucket = 5 * kMiB;
  CHECK(ValidateError(ddp) == "");
  Job job;
  job.global_batch = 24;
  Plan accumulated = BlockPlan();
  accumulated.micro_batch = 2;
  accumulated.accumulation = 3;
  CHECK(ValidateError(accumulated, job) == "");
}

TEST_CASE("ValidatePlan: sizes") {
  Plan plan = BlockPlan();
  plan.shard_size = 0;
  CHECK(ValidateError(plan) ==
        "p.json: plan.shard_size: got 0, expected an integer in [1, 16777216]");
  plan = BlockPlan();
  plan.micro_batch = -1;
  CHECK(ValidateError(plan) ==
        "p.json: plan.micro_batch: got -1, expected an integer in [1, 16777216]");
  plan = BlockPlan();
  plan.replicate_size = 1 << 23;
  CHECK(ValidateError(plan) ==
        "p.json: plan.replicate_size: got 8388608, expected at most 16777216 ranks in all");
  Job job;
  job.global_batch = 5;
  CHECK(ValidateError(BlockPlan(), job) ==
        "p.json: plan: got 4 ranks x micro_batch 1 x accumulation 1, expected the job's "
        "global_batch 5");
  job = {};
  job.sequence_length = 0;
  CHECK(ValidateError(BlockPlan(), job) ==
        "p.json: plan: got a job with sequence_length 0, expected an integer in [1, 1073741824]");
  job = {};
  job.memory_margin = 1.0;
  CHECK(ValidateError(BlockPlan(), job) ==
        "p.json: plan: got a job with memory_margin 1.000000, expected a fraction in [0, 1)");
}

TEST_CASE("ValidatePlan: settings of the caching allocator") {
  Job job;
  job.allocator = {.max_split_size = 20 * kMiB};
  CHECK(ValidateError(BlockPlan(), job) ==
        "p.json: plan: got a job with allocator.max_split_size 20 MiB, expected 0 B (no limit), or "
        "whole MiB above 20 MiB and at most 1 TiB");
  job.allocator = {.max_split_size = 21 * kMiB + Bytes(1)};
  CHECK(ValidateError(BlockPlan(), job).find("expected 0 B (no limit), or whole MiB") !=
        std::string::npos);
  job.allocator = {.garbage_collection_threshold = 1.0};
  CHECK(ValidateError(BlockPlan(), job) ==
        "p.json: plan: got a job with allocator.garbage_collection_threshold 1.000000, expected a "
        "fraction in [0, 1)");
  job.allocator = {.expandable_segments = true,
                   .max_split_size = 512 * kMiB,
                   .garbage_collection_threshold = 0.8};
  CHECK(ValidateError(BlockPlan(), job).empty());
}

TEST_CASE("ValidatePlan: a micro-batch beyond an exabyte of activations") {
  Model model = TinyModel();
  Tensor tensor;
  tensor.elements = std::int64_t{1} << 40;
  model.tensors.push_back(tensor);
  Plan plan = BlockPlan();
  plan.micro_batch = 1 << 17;  // 2^40 elements x 8 bytes x 2^17 = 1.15e18
  CHECK_THROWS_WITH_AS(ValidatePlan(model, Job(), plan, "p"),
                       "p: micro_batch: got 131072, expected a micro-batch whose activations stay "
                       "below 1e18 bytes",
                       InputError);
  plan.micro_batch = 1 << 16;
  CHECK_NOTHROW(ValidatePlan(model, Job(), plan, "p"));
}

TEST_CASE("ValidatePlan: units") {
  Plan plan = BlockPlan();
  plan.units.pop_back();
  CHECK(ValidateError(plan) ==
        "p.json: plan.units: got no root unit at the end, expected the unit {\"name\": \"root\", "
        "\"modules\": [\"\"]} last");
  plan = BlockPlan();
  plan.units[1].name = "layers.0";
  CHECK(ValidateError(plan) ==
        "p.json: plan.units[1].name: got \"layers.0\", expected a name that no other unit has");
  plan = BlockPlan();
  plan.units[0].modules.clear();
  CHECK(ValidateError(plan) ==
        "p.json: plan.units[0].modules: got an empty list, expected at least one FQN");
  plan = BlockPlan();
  plan.units[0].modules = {"layers.0", ""};
  CHECK(ValidateError(plan) ==
        "p.json: plan.units[0].modules: got the root module \"\", expected it in the last unit "
        "only");
  plan = BlockPlan(Dialect::kFsdp1);
  plan.units[0].modules = {"layers.0", "norm"};
  CHECK(ValidateError(plan) ==
        "p.json: plan.units[0].modules: got 2 modules, expected one module; dialect fsdp1 cannot "
        "group modules");
  plan = BlockPlan();
  plan.units[0].gap = Gap::kRegather;
  CHECK(ValidateError(plan) ==
        "p.json: plan.units[0].gap: got \"regather\", expected \"hold\"; only dialects "
        "native and zero3 gather a unit more than once per pass");
  plan = BlockPlan();
  plan.units[0].forward_prefetch = {"layers.0"};
  CHECK(ValidateError(plan) ==
        "p.json: plan.units[0].forward_prefetch[0]: got \"layers.0\", expected another unit");
  plan = BlockPlan();
  plan.units[0].forward_prefetch = {"layers.1", "layers.1"};
  CHECK(ValidateError(plan) ==
        "p.json: plan.units[0].forward_prefetch[1]: got \"layers.1\", expected each unit once");
  plan = BlockPlan(Dialect::kFsdp1);
  plan.units[0].forward_prefetch = {"layers.1"};
  CHECK(ValidateError(plan) ==
        "p.json: plan.units[0].forward_prefetch: got a list, expected none; dialect fsdp1 has no "
        "explicit prefetch lists");
}

TEST_CASE("ValidatePlan: reshard groups") {
  const auto with_group = [](std::int64_t group, Dialect dialect = Dialect::kFsdp2) {
    Plan plan = BlockPlan(dialect);
    plan.units[1].reshard = {Reshard::Kind::kToGroup, group};
    return ValidateError(plan);
  };
  CHECK(with_group(2) == "");
  CHECK(with_group(3) ==
        "p.json: plan.units[1].reshard: got 3, expected a divisor of shard_size 4");
  CHECK(with_group(1) ==
        "p.json: plan.units[1].reshard: got 1, expected a divisor of shard_size between 1 and 4; "
        "one rank per copy is \"never\"");
  CHECK(with_group(4) ==
        "p.json: plan.units[1].reshard: got 4, expected a divisor of shard_size between 1 and 4; "
        "the whole shard group is \"always\"");
  CHECK(with_group(2, Dialect::kFsdp1) ==
        "p.json: plan.units[1].reshard: got 2, expected \"always\" or \"never\"; dialect fsdp1 "
        "cannot reshard to a smaller group");
}

TEST_CASE("ValidatePlan: options of other dialects") {
  Plan plan = BlockPlan();
  plan.limit_all_gathers = false;
  CHECK(ValidateError(plan) ==
        "p.json: plan.limit_all_gathers: got an option of dialect fsdp1 in a plan of dialect "
        "fsdp2, expected its default");
  plan.dialect = Dialect::kFsdp1;
  CHECK(ValidateError(plan) == "");
  plan.in_flight = 3;
  CHECK(ValidateError(plan) ==
        "p.json: plan.in_flight: got an option of dialect native in a plan of dialect fsdp1, "
        "expected its default");
  plan = PlanOf(Dialect::kDdp, {Unit("root", {""})});
  CHECK(ValidateError(plan) ==
        "p.json: plan.shard_size: got 4, expected 1; dialect ddp replicates; set replicate_size");
  plan = BlockPlan();
  plan.sync = SyncMode::kReplicateLast;
  CHECK(ValidateError(plan) ==
        "p.json: plan.sync: got \"replicate_last\", expected a replicate_size above 1 with it");
  plan.replicate_size = 2;
  CHECK(ValidateError(plan) == "");
  plan.dialect = Dialect::kFsdp1;
  CHECK(ValidateError(plan) ==
        "p.json: plan.sync: got \"replicate_last\", expected \"every\" or \"last\"; dialect fsdp1 "
        "cannot delay it");
}

TEST_CASE("ValidatePlan: offloading that no lowering would do") {
  Plan plan = BlockPlan();
  plan.offload.optimizer = true;
  CHECK(
      ValidateError(plan) ==
      "p.json: plan.offload.optimizer: got an option of dialect native in a plan of dialect fsdp2, "
      "expected its default");
  plan.dialect = Dialect::kNative;
  CHECK(ValidateError(plan) == "");
  plan.offload.activations = true;
  CHECK(ValidateError(plan) == "");
  plan.offload.moments = true;
  CHECK(ValidateError(plan) ==
        "p.json: plan.offload.moments: got true, expected false; the moments go wherever the "
        "optimizer goes");
  plan.offload.optimizer = false;
  CHECK(ValidateError(plan) == "");
  plan.dialect = Dialect::kFsdp2;
  CHECK(ValidateError(plan) ==
        "p.json: plan.offload.moments: got an option of dialect native in a plan of dialect fsdp2, "
        "expected its default");
}

TEST_CASE("ValidatePlan: recompute regions") {
  Plan plan = BlockPlan();
  plan.recompute = {{"layers.0", RecomputeKind::kFull, 1}, {"layers.1", RecomputeKind::kFull, 1}};
  CHECK(ValidateError(plan) == "");
  plan.recompute[1].module = "layer.1";
  CHECK(ValidateError(plan) ==
        "p.json: plan.recompute[1].module: got \"layer.1\", expected the FQN of a module; did you "
        "mean \"layers.1\"?");
  plan.recompute[1].module = "layers.0.lin";
  CHECK(ValidateError(plan) ==
        "p.json: plan.recompute[1].module: got \"layers.0.lin\", expected regions that do not "
        "overlap; it lies inside \"layers.0\"");
  plan.recompute[1].module = "layers.0";
  CHECK(ValidateError(plan) ==
        "p.json: plan.recompute[1].module: got \"layers.0\", expected each module once");
}

TEST_CASE("ValidatePlan: fully_shard casts no gradients of a unit that nothing calls") {
  Model model = testing::ChainModel(testing::ChainSpec());
  const ModuleId spare = testing::AddModule(model, ModuleId(0), "spare");
  testing::AddParam(model, spare, "weight", {8, 8});
  Plan plan = PlanOf(Dialect::kFsdp2,
                     {Unit("block0", {"block0"}), Unit("spare", {"spare"}), Unit("root", {""})});
  plan.accumulation = 2;
  plan.sync = SyncMode::kLast;
  const auto error = [&](DType reduce, const Plan& tried) {
    Job job;
    job.precision = {DType::kFp32, DType::kBf16, reduce};
    try {
      ValidatePlan(model, job, tried, "p.json: plan");
    } catch (const InputError& e) {
      return std::string(e.what());
    }
    return std::string();
  };
  CHECK(error(DType::kFp32, plan) ==
        "p.json: plan.units[1].modules: got unit \"spare\", which nothing calls, expected one that "
        "runs, with sync \"last\" and a reduce dtype of its own; torch fails: 'FSDPParam' object "
        "has no attribute '_unsharded_param'; leave the module to a unit around it");
  CHECK(error(DType::kBf16, plan).empty());
  plan.sync = SyncMode::kEvery;
  CHECK(error(DType::kFp32, plan).empty());
  plan.sync = SyncMode::kLast;
  plan.units.erase(plan.units.begin() + 1);  // the root has it
  CHECK(error(DType::kFp32, plan).empty());
}

// What torch 2.13 cannot run, or the applier not wrap.
TEST_CASE("ValidatePlan: regions and units that fully_shard cannot have") {
  Plan plan = BlockPlan();
  plan.recompute = {{"", RecomputeKind::kFull, 1}};
  CHECK(ValidateError(plan) ==
        "p.json: plan.recompute[0].module: got the root module \"\", expected modules inside of "
        "it; the whole model has no parent that could hold a checkpoint wrapper");
  plan.recompute = {};
  plan.units = {Unit("a", {"layers.0", "layers.1.lin"}), Unit("b", {"layers.1", "layers.0.lin"}),
                Unit("root", {""})};
  CHECK(ValidateError(plan) ==
        "p.json: plan.units[0].modules: got a module inside of unit \"b\", which has one inside of "
        "this unit, expected one of the two around the other; fully_shard wraps inner units first");
  plan.units = {Unit("all", {"layers"}), Unit("root", {""})};
  CHECK(
      ValidateError(plan) ==
      "p.json: plan.units[0].modules[0]: got \"layers\", expected modules with a forward; it is a "
      "ModuleList, which torch never calls");
  plan.dialect = Dialect::kNative;
  CHECK(ValidateError(plan) == "");
}

TEST_CASE("ValidatePlan: FSDP1 without use_orig_params wants uniform requires_grad") {
  Model model = TinyModel();
  model.params[1].trainable = false;  // layers.0.scale
  Plan plan = BlockPlan(Dialect::kFsdp1);
  CHECK_NOTHROW(ValidatePlan(model, Job(), plan, "p"));
  plan.use_orig_params = false;
  CHECK_THROWS_WITH_AS(
      ValidatePlan(model, Job(), plan, "p"),
      "p: units[0].modules: got trainable and frozen parameters (\"layers.0.scale\", "
      "\"layers.0.lin.weight\"), expected all trainable or all frozen with use_orig_params false",
      InputError);
}

}  // namespace
}  // namespace shardwright
