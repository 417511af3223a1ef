#include "planner/emitters/plan_data.h"

#include <cstddef>
#include <span>
#include <vector>

#include <nlohmann/json.hpp>

#include "core/embedded.h"
#include "core/error.h"
#include "core/printable.h"
#include "core/ranges.h"
#include "planner/emit_python.h"
#include "planner/emit_templates.h"
#include "planner/emitters/fqn.h"
#include "schedule/plan_names.h"
#include "schedule/wrap.h"
#include "topologies/mesh.h"

namespace shardwright {
namespace {

using Json = nlohmann::ordered_json;

Json ReshardJson(const Reshard& reshard) {
  const bool is_group = reshard.kind == Reshard::Kind::kToGroup;
  return is_group ? Json(reshard.group) : Json(reshard.kind == Reshard::Kind::kAlways);
}

Json UnitsJson(const PlanFile& file, FqnDialect fqns) {
  Json units = Json::array();
  for (const UnitPlan& unit : file.plan.units) {
    Json json;
    json["name"] = unit.name;
    json["modules"] = Mapped<Json>(
        unit.modules, [&](const std::string& fqn) { return ModuleName(file.model, fqn, fqns); });
    json["reshard_after_forward"] = ReshardJson(unit.reshard);
    if (unit.full_precision) {
      json["full_precision"] = true;
    }
    if (!unit.forward_prefetch.empty()) {
      json["forward_prefetch"] = unit.forward_prefetch;
    }
    if (!unit.backward_prefetch.empty()) {
      json["backward_prefetch"] = unit.backward_prefetch;
    }
    units.push_back(json);
  }
  return units;
}

Json RecomputeJson(const PlanFile& file, FqnDialect fqns) {
  Json regions = Json::array();
  for (const RecomputeRegion& region : file.plan.recompute) {
    Json json;
    json["module"] = ModuleName(file.model, region.module, fqns);
    json["kind"] = NameIn(kRecomputeNames, region.kind);
    if (region.kind == RecomputeKind::kSelective) {
      json["keep_every"] = region.keep_every;
    }
    regions.push_back(json);
  }
  return regions;
}

Json ParametersJson(const PlanFile& file, FqnDialect fqns) {
  const Model& model = file.model;
  std::map<ParamId, std::size_t> unit_of;  // by storage
  const std::vector<ResolvedUnit> units = ResolveUnits(model, file.plan, "plan");
  for (std::size_t u = 0; u < units.size(); ++u) {
    for (const ParamId id : units[u].params) {
      unit_of[id] = u;
    }
  }
  Json params = Json::array();
  for (const NamedParameter& param : NamedParameters(model, fqns)) {
    Json json;
    json["fqn"] = param.fqn;
    json["shape"] = param.shape;
    const ParamId source = param.sources[0];
    const ParamId tied_to = model.params[source.value].tied_to;
    json["unit"] = unit_of.at(tied_to.valid() ? tied_to : source);
    if (!param.tied_to.empty()) {
      json["tied_to"] = param.tied_to;
    }
    if (!param.trainable) {
      json["trainable"] = false;
    }
    params.push_back(json);
  }
  return params;
}

Json TrainingJson(const PlanFile& file) {
  const Job& job = file.job;
  Json json;
  json["sequence_length"] = job.sequence_length;
  json["micro_batch"] = file.plan.micro_batch;
  json["accumulation"] = file.plan.accumulation;
  json["sync"] = NameIn(kSyncNames, file.plan.sync);
  if (file.plan.keeps_gathered) {
    json["keeps_gathered"] = true;
  }
  json["optimizer"] = NameIn(kOptimizerNames, job.optimizer.kind);
  json["optimizer_impl"] = NameIn(kOptimizerImplNames, job.optimizer.impl);
  json["weight_decay"] = job.optimizer.weight_decay;
  json["clip_gradients"] = job.clip_gradients;
  return json;
}

// One document line per unit, region and parameter: diffs of plans stay readable.
std::string Dump(const Json& document) {
  std::string text = "{\n";
  std::size_t i = 0;
  for (const auto& [key, value] : document.items()) {
    text += "  " + Json(key).dump() + ": ";
    if (value.is_array() && !value.empty()) {
      text += "[\n";
      for (std::size_t k = 0; k < value.size(); ++k) {
        text += "    " + value[k].dump() + (k + 1 < value.size() ? ",\n" : "\n");
      }
      text += "  ]";
    } else {
      text += value.dump();
    }
    text += ++i < document.size() ? ",\n" : "\n";
  }
  return Printable(text + "}\n");
}

bool RecomputesInFull(const Plan& plan) {
  return !plan.recompute.empty() && AllOf(plan.recompute, [](const RecomputeRegion& r) {
    return r.kind == RecomputeKind::kFull;
  });
}

// Units of one module, without choices that FSDP1 does not have. What groups hold falls
// to the unit around them, but for what they keep in full precision.
void SetFlatUnits(const PlanFile& file, PlanFile& out) {
  bool keeps = false;
  out.plan.units.clear();
  for (UnitPlan unit : file.plan.units) {
    keeps = keeps || unit.full_precision;
    if (unit.modules.size() > 1) {
      continue;
    }
    unit.gap = Gap::kHold;
    unit.forward_prefetch.clear();
    unit.backward_prefetch.clear();
    if (unit.reshard.kind == Reshard::Kind::kToGroup) {
      unit.reshard = Reshard();
    }
    out.plan.units.push_back(unit);
  }
  if (keeps) {
    KeepFullPrecision(out.model, out.job.precision, out.plan);
  }
}

}  // namespace

std::string PlanDataJson(const PlanFile& file, std::string_view kind, FqnDialect fqns) {
  const Plan& plan = file.plan;
  const Precision& precision = file.job.precision;
  Json json;
  json["format"] = "shardwright-" + std::string(kind);
  json["version"] = 1;
  json["model"] = {{"name", file.model.name},
                   {"type", file.model.type},
                   {"fqns", kFqnDialectNames[static_cast<std::size_t>(fqns)]},
                   {"parameters", CountParameters(file.model)}};
  json["mesh"] = {{"replicate", plan.replicate_size}, {"shard", plan.shard_size}};
  json["torch"] = NameIn(kTorchNames, plan.torch);
  json["dtypes"] = {{"master", LongNameOf(precision.master)},
                    {"param", LongNameOf(precision.param)},
                    {"reduce", LongNameOf(precision.reduce)}};
  json["offload"] = {{"parameters", plan.offload.parameters},
                     {"activations", plan.offload.activations}};
  if (plan.dialect == Dialect::kFsdp1) {
    json["fsdp1"] = {{"backward_prefetch", NameIn(kBackwardPrefetchNames, plan.backward_prefetch)},
                     {"forward_prefetch", plan.forward_prefetch},
                     {"limit_all_gathers", plan.limit_all_gathers},
                     {"use_orig_params", plan.use_orig_params}};
  }
  json["training"] = TrainingJson(file);
  json["recompute"] = RecomputeJson(file, fqns);
  json["units"] = UnitsJson(file, fqns);
  json["parameters"] = ParametersJson(file, fqns);
  return Dump(json);
}

PlanFile AsFsdp2(const PlanFile& file) {
  PlanFile out = file;
  out.plan = WithDialect(file.plan, Dialect::kFsdp2);
  out.plan.keeps_gathered = file.plan.keeps_gathered;
  out.plan.units = file.plan.units;
  for (UnitPlan& unit : out.plan.units) {
    unit.gap = Gap::kHold;
  }
  // The inputs of recomputed regions are all that offload_wrapper moves.
  out.plan.offload.activations = file.plan.offload.activations && RecomputesInFull(file.plan);
  return out;
}

PlanFile AsFsdp1(const PlanFile& file) {
  PlanFile out = file;
  out.plan = WithDialect(file.plan, Dialect::kFsdp1);
  if (file.plan.dialect == Dialect::kFsdp1) {
    out.plan.backward_prefetch = file.plan.backward_prefetch;
    out.plan.forward_prefetch = file.plan.forward_prefetch;
    out.plan.limit_all_gathers = file.plan.limit_all_gathers;
    out.plan.use_orig_params = file.plan.use_orig_params;
  }
  if (out.plan.sync == SyncMode::kReplicateLast) {
    out.plan.sync = SyncMode::kEvery;
  }
  SetFlatUnits(file, out);
  out.plan.offload.activations = file.plan.offload.activations && RecomputesInFull(file.plan);
  return out;
}

EmittedFile PythonFile(std::string_view name) {
  for (const EmbeddedFile& file : EmbeddedEmitPython()) {
    if (std::string(file.name) + ".py" == name) {
      return {std::string(name), std::string(file.text)};
    }
  }
  SW_CHECK(false, "no Python file " + std::string(name));
  return {};
}

std::string FilledTemplate(std::string_view name,
                           const std::map<std::string, std::string>& values) {
  const std::span<const EmbeddedFile> files = EmbeddedEmitTemplates();
  const auto file = FindIn(files, name, &EmbeddedFile::name);
  SW_CHECK(file != files.end(), "no template " + std::string(name));
  std::string text;
  for (std::string_view rest = file->text; !rest.empty();) {
    const std::size_t begin = std::min(rest.find('@'), rest.size() - 1);
    const std::size_t end = rest.find('@', begin + 1);
    const auto value = end == rest.npos
                           ? values.end()
                           : values.find(std::string(rest.substr(begin + 1, end - begin - 1)));
    const bool is_mark = value != values.end();
    text += rest.substr(0, is_mark ? begin : begin + 1);
    text += is_mark ? value->second : "";
    rest.remove_prefix(is_mark ? end + 1 : begin + 1);
  }
  return text;
}

}  // namespace shardwright
