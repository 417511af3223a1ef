// Emission forgets nothing: one field of a plan is changed, and what an emitter returns says so.
// Either files or duties change, or the loss is listed and the plan is priced without it.

#include <algorithm>
#include <array>
#include <cstdlib>
#include <map>
#include <optional>
#include <set>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include <doctest/doctest.h>
#include <nlohmann/json.hpp>

#include "core/error.h"
#include "models/loader.h"
#include "planner/emitters/emitters.h"
#include "planner/evaluate.h"
#include "schedule/plan_names.h"
#include "schedule/wrap.h"

namespace shardwright {
namespace {

using Json = nlohmann::ordered_json;
using Pointer = Json::json_pointer;

// One change of a plan document: the field's name and what stands there then.
struct Change {
  std::string field;
  Json document;
};

Json Document(const PlanFile& file) {
  Json json = Json::parse(PlanFileJson(file));
  for (const char* part : {"model", "cluster", "profile"}) {
    json[part].erase("hash");
  }
  return json;
}

PlanFile BaseOf(const char* model, const char* cluster, std::int64_t nodes, Dialect dialect,
                bool rich) {
  PlanFile file;
  file.cluster = LoadCluster(cluster, nodes);
  file.job.sequence_length = 256;
  file.model = LoadModelForJob(model, file.job, Path("test"));
  file.kernels = FindKernelSet("torch-eager", "test");
  file.profile = DefaultProfile(file.cluster.gpu, file.kernels.name);
  Plan& plan = file.plan;
  plan.dialect = dialect;
  plan.shard_size = dialect == Dialect::kDdp ? 1 : file.cluster.RankCount();
  plan.replicate_size = file.cluster.RankCount() / plan.shard_size;
  plan.micro_batch = 2;
  plan.accumulation = rich ? 2 : 1;
  file.job.global_batch = file.cluster.RankCount() * plan.micro_batch * plan.accumulation;
  const bool whole =
      dialect == Dialect::kDdp || dialect == Dialect::kZero1 || dialect == Dialect::kZero2;
  const WrapSpec::Kind wrap = whole                        ? WrapSpec::Kind::kRoot
                              : dialect == Dialect::kZero3 ? WrapSpec::Kind::kModule
                                                           : WrapSpec::Kind::kBlock;
  plan.units = Wrap(file.model, {wrap, 0, ""}, {}, dialect, "test");
  if (rich) {
    for (const ModuleId block : BlocksOf(file.model)) {
      plan.recompute.push_back({file.model.modules[block.value].fqn});
    }
    plan.offload.parameters =
        dialect == Dialect::kFsdp2 || dialect == Dialect::kFsdp1 || dialect == Dialect::kZero3;
    plan.offload.moments = dialect == Dialect::kNative;
  }
  return file;
}

// Other values that a leaf could have, by its kind; those that the plan refuses are skipped.
std::vector<Json> OthersOf(const Json& leaf) {
  if (leaf.is_boolean()) {
    return {!leaf.get<bool>()};
  }
  if (leaf.is_number_integer()) {
    const auto value = leaf.get<std::int64_t>();
    return {value * 2, value / 2, value + 1, value - 1, 4};
  }
  if (leaf.is_number()) {
    return {0.25, 0.75};
  }
  if (!leaf.is_string()) {
    return {};
  }
  std::vector<Json> names = {"64 MiB", "5 MiB"};
  for (const NameList list :
       {NameList(kJobModeNames), NameList(kOptimizerNames), NameList(kOptimizerImplNames),
        NameList(kDialectNames), NameList(kTorchNames), NameList(kBackwardPrefetchNames),
        NameList(kSyncNames), NameList(kTransfersNames), NameList(kGradientReductionNames),
        NameList(kOverlapNames), NameList(kFp8Names), NameList(kAttentionNames),
        NameList(kMoeDispatchNames), NameList(kTrainingDTypeNames)}) {
    names.insert(names.end(), list.begin(), list.end());
  }
  std::erase(names, leaf);
  return names;
}

void AddLeaves(const Json& base, const std::string& path, std::vector<Change>& changes) {
  const Json& value = base.at(Pointer(path));
  if (value.is_object()) {
    for (const auto& [key, child] : value.items()) {
      AddLeaves(base, path + "/" + key, changes);
    }
    return;
  }
  for (const Json& other : OthersOf(value)) {
    Change change = {path, base};
    change.document[Pointer(path)] = other;
    changes.push_back(std::move(change));
  }
}

// Fields that are not one leaf: lists, and numbers that change together.
void AddTogether(const Json& base, const PlanFile& file, std::vector<Change>& changes) {
  const auto add = [&](const std::string& name,
                       const std::vector<std::pair<const char*, Json>>& set) {
    Change change = {name, base};
    for (const auto& [path, value] : set) {
      change.document[Pointer(path)] = value;
    }
    changes.push_back(std::move(change));
  };
  const Plan& plan = file.plan;
  const std::int64_t ranks = file.cluster.RankCount();
  add("mesh", {{"/plan/shard_size", ranks / 2}, {"/plan/replicate_size", 2}});
  add("micro_batch", {{"/plan/micro_batch", plan.micro_batch * 2},
                      {"/job/global_batch", file.job.global_batch * 2}});
  add("accumulation", {{"/plan/accumulation", plan.accumulation * 2},
                       {"/job/global_batch", file.job.global_batch * 2}});
  add("frozen", {{"/job/frozen", {"*embed*"}}});
  add("lora", {{"/job/lora_rank", 8}, {"/job/lora_targets", {"*dense*"}}});
  add("lora_rank of adapters", {{"/job/lora_rank", 16}, {"/job/lora_targets", {"*dense*"}}});
  add("allocator", {{"/job/allocator",
                     {{"expandable_segments", true},
                      {"max_split_size", "0 B"},
                      {"garbage_collection_threshold", 0.0}}}});
  add("max_split_size", {{"/job/allocator",
                          {{"expandable_segments", false},
                           {"max_split_size", "512 MiB"},
                           {"garbage_collection_threshold", 0.0}}}});
  add("kernel set", {{"/kernel_set/name", "hf-liger"}});
  add("bf16", {{"/job/precision", {{"master", "bf16"}, {"param", "bf16"}, {"reduce", "bf16"}}}});
  add("matrices", {{"/job/optimizer/matrices", "muon"}});
  add("fp8", {{"/kernel_set/fp8", "per_tensor"}});
  add("nodes", {{"/cluster/nodes", file.cluster.node_count * 2},
                {"/plan/shard_size", plan.shard_size * (plan.shard_size > 1 ? 2 : 1)},
                {"/plan/replicate_size", plan.replicate_size * (plan.shard_size > 1 ? 1 : 2)},
                {"/job/global_batch", file.job.global_batch * 2}});
  for (const char* kind : {"full", "selective"}) {
    for (const std::int64_t step : {1, 2, 3}) {
      Json regions = Json::array();
      for (std::size_t b = 0; b < BlocksOf(file.model).size();
           b += static_cast<std::size_t>(step)) {
        regions.push_back({{"module", file.model.modules[BlocksOf(file.model)[b].value].fqn},
                           {"kind", kind},
                           {"keep_every", std::string_view(kind) == "full" ? 1 : step}});
      }
      add(std::string("recompute ") + kind + " " + std::to_string(step),
          {{"/plan/recompute", regions}});
      regions.erase(regions.begin());
      add(std::string("recompute all but one ") + kind, {{"/plan/recompute", regions}});
    }
  }
}

void AddUnits(const Json& base, const PlanFile& file, std::vector<Change>& changes) {
  const std::size_t count = file.plan.units.size();
  for (const std::size_t u : std::set<std::size_t>{0, count / 2, count - 1}) {
    const std::string unit = "/plan/units/" + std::to_string(u);
    const auto add = [&](const char* field, const Json& value) {
      Change change = {unit + "/" + field, base};
      change.document[Pointer(unit)][field] = value;
      changes.push_back(std::move(change));
    };
    for (const Json& reshard : {Json("never"), Json("always"), Json(2)}) {
      if (base.at(Pointer(unit)).at("reshard") != reshard) {
        add("reshard", reshard);
      }
    }
    add("gap", "regather");
    if (u + 1 < count) {
      add("forward_prefetch", {file.plan.units[u + 1].name});
      add("backward_prefetch", {file.plan.units[u + 1].name});
      Change merged = {unit + "/modules", base};
      Json& units = merged.document[Pointer("/plan/units")];
      if (u + 2 < count) {
        units[u]["modules"].push_back(units[u + 1]["modules"][0]);
      }
      units.erase(units.begin() + static_cast<std::ptrdiff_t>(u + (u + 2 < count ? 1 : 0)));
      changes.push_back(std::move(merged));
    }
  }
}

std::vector<Change> ChangesOf(const PlanFile& file) {
  const Json base = Document(file);
  std::vector<Change> changes;
  for (const char* part : {"/kernel_set", "/job", "/plan"}) {
    AddLeaves(base, part, changes);
  }
  AddTogether(base, file, changes);
  AddUnits(base, file, changes);
  return changes;
}

std::optional<PlanFile> Read(const Json& document) {
  try {
    return ParsePlanFile(document.dump(), "plan");
  } catch (const InputError&) {
    return std::nullopt;
  }
}

// Prices of plans, each found once.
class Prices {
 public:
  const std::string& Of(const PlanFile& file) {
    const std::string key = PlanFileJson(file);
    const auto [it, is_new] = known_.try_emplace(key);
    if (is_new) {
      it->second = Priced(file);
    }
    return it->second;
  }

 private:
  static std::string Priced(const PlanFile& file) {
    try {
      const Outcome o = Evaluate(file, file.plan, {.reserved = false});
      return std::to_string(ToSimTime(o.step_time).value) + " ps, " +
             std::to_string(o.device_peak.total.value) + " bytes, host " +
             std::to_string(o.host_peak.value) + ", exposed " +
             std::to_string(ToSimTime(o.exposed_comm).value);
    } catch (const InputError& error) {
      return error.what();  // refused aloud
    }
  }

  std::map<std::string, std::string> known_;
};

std::string Said(const Emission& emission) {
  std::string text;
  for (const EmittedFile& file : emission.files) {
    text += file.text + "\n";
  }
  for (const std::string& duty : emission.by_hand) {
    text += duty + "\n";
  }
  return text;
}

std::optional<Emission> Emitted(const Emitter& emitter, const PlanFile& file) {
  try {
    return Emit(emitter, file, {});
  } catch (const InputError&) {
    return std::nullopt;  // refused aloud
  }
}

// Is the field part of a larger one that is listed as lost? Options of a dialect go with the
// dialect, choices of units with the units.
bool IsLostWhole(const std::string& field, const std::vector<Loss>& losses) {
  const bool of_dialect = field.starts_with("/plan/zero/") || field == "/plan/moments_piece" ||
                          field == "/plan/torch" || field.starts_with("/plan/units/");
  return std::any_of(losses.begin(), losses.end(), [&](const Loss& loss) {
    return (loss.field == "plan.dialect" && of_dialect) ||
           (loss.field == "plan.units" && field.starts_with("/plan/units/"));
  });
}

struct Tally {
  int plans = 0;
  int checked = 0;
  std::set<std::string> tried, valid;
};

void CheckBase(const PlanFile& file, Tally& tally) {
  Prices prices;
  std::map<std::string_view, std::optional<Emission>> emitted;
  for (const Emitter& emitter : Emitters()) {
    emitted[emitter.name] = Emitted(emitter, file);
  }
  for (const Change& change : ChangesOf(file)) {
    tally.tried.insert(change.field);
    const std::optional<PlanFile> changed = Read(change.document);
    if (!changed) {
      continue;
    }
    tally.valid.insert(change.field);
    ++tally.plans;
    CAPTURE(change.field);
    const std::string value =
        change.field.starts_with("/") ? change.document.at(Pointer(change.field)).dump() : "";
    CAPTURE(value);
    const bool matters = prices.Of(file) != prices.Of(*changed);
    for (const Emitter& emitter : Emitters()) {
      if (emitter.name == "slurm" || emitter.name == "torchrun") {
        continue;  // they say in one duty that the plan is another target's
      }
      CAPTURE(emitter.name);
      CAPTURE(NameOf(file.plan.dialect));
      const std::optional<Emission>& a = emitted[emitter.name];
      const std::optional<Emission> b = Emitted(emitter, *changed);
      if (!a || !b) {
        continue;
      }
      ++tally.checked;
      const std::string& price = prices.Of(b->as_emitted);
      CHECK_MESSAGE((price == prices.Of(*changed) || !b->losses.empty()),
                    "the emitted plan is priced otherwise, and no loss is listed");
      if (Said(*a) != Said(*b)) {
        continue;
      }
      CHECK_MESSAGE(price == prices.Of(a->as_emitted),
                    "equal files and duties, priced differently");
      CHECK_MESSAGE((!matters || a->losses != b->losses || IsLostWhole(change.field, b->losses)),
                    "equal files, duties and losses");
    }
  }
}

// SHARDWRIGHT_DEEP=1: plans of all dialects, plain and with recomputation, accumulation and
// offload.
TEST_CASE("a change of any field of a plan is in the files, in the duties or in the losses") {
  Tally tally;
  const bool is_deep = std::getenv("SHARDWRIGHT_DEEP") != nullptr;
  for (std::size_t d = 0; d < kDialectNames.size(); ++d) {
    for (const bool rich : {false, true}) {
      const auto dialect = static_cast<Dialect>(d);
      const bool is_sample = dialect == (rich ? Dialect::kFsdp2 : Dialect::kDdp);
      if (is_deep || is_sample) {
        CheckBase(BaseOf("pythia-70m", "dgx-h100", 1, dialect, rich), tally);
      }
    }
  }
  MESSAGE(tally.plans, " plans, ", tally.checked, " emissions");
  CHECK(tally.plans > 100);
  CHECK(tally.checked > 1000);
}

}  // namespace
}  // namespace shardwright
