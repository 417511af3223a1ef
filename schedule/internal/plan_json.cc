#include "schedule/internal/plan_json.h"

#include <string>
#include <type_traits>
#include <utility>

#include <nlohmann/json.hpp>

#include "core/ranges.h"
#include "core/text.h"
#include "schedule/internal/plan_lists.h"
#include "schedule/plan_names.h"

namespace shardwright::internal {
namespace {

using Json = nlohmann::ordered_json;

// Plans have had a further key, of the dialect fairscale, in files of all dialects.
constexpr auto kPlanKeys = [](auto& plan, auto& visit) {
  kPlanFields(plan, visit);
  Bytes retired;
  visit("reduce_scatter_bucket", retired, {.is_written = false});
};
constexpr auto kKernelSetFields = [](auto& kernels, auto& visit) {
  visit("name", kernels.name, {.is_needed = true});
  visit("attention", kernels.attention, {.names = kAttentionNames});
  visit("moe_dispatch", kernels.moe_dispatch, {.names = kMoeDispatchNames});
  visit("fused_elementwise", kernels.fused_elementwise);
  visit("fused_rope", kernels.fused_rope);
  visit("fused_norm", kernels.fused_norm);
  visit("fp32_logits", kernels.fp32_logits);
  visit("loss_chunks", kernels.loss_chunks, {.least = 1, .most = 1 << 20});
  visit("autocast_weights", kernels.autocast_weights);
  visit("fp8", kernels.fp8, {.names = kFp8Names, .is_written = kernels.fp8 != Fp8Products::kNone});
};

struct KeyList {
  std::vector<std::string> keys;

  template <class T>
  void operator()(const char* key, const T& /*value*/, const Rule& /*rule*/ = {}) {
    keys.emplace_back(key);
  }
  template <class Part, class Fields>
  void operator()(const char* key, const Part& /*part*/, Fields /*fields*/, bool = true) {
    keys.emplace_back(key);
  }
};

template <class Part, class Fields>
void ReadPart(const JsonValue& json, Fields fields, Part& part);

// The elements of a list, each read by `read`.
template <class T, class ReadOne>
std::vector<T> ReadList(const JsonValue& json, const char* expected, ReadOne read) {
  if (!json.IsArray()) {
    throw json.Error(expected);
  }
  std::vector<T> list;
  for (std::size_t i = 0; i < json.size(); ++i) {
    list.push_back(read(json[i]));
  }
  return list;
}

double ReadNumber(const JsonValue& json, const Rule& rule) {
  const double number = json.AsDouble();
  if (rule.holds != nullptr && !rule.holds(number)) {
    throw json.Error(rule.expected);
  }
  return number;
}

Reshard ReadReshard(const JsonValue& json, const Rule& rule) {
  if (json.IsNumber()) {
    return {Reshard::Kind::kToGroup, json.AsInt(1, kMaxRanks)};
  }
  if (!json.IsString()) {
    throw json.Error("\"always\", \"never\" or a number of ranks");
  }
  return {static_cast<Reshard::Kind>(json.AsChoice(rule.names)), 0};
}

template <class T>
T ReadValue(const JsonValue& json, const Rule& rule) {
  if constexpr (std::is_enum_v<T>) {
    return static_cast<T>(json.AsChoice(rule.names));
  } else if constexpr (std::is_same_v<T, bool>) {
    return json.AsBool();
  } else if constexpr (std::is_integral_v<T>) {
    return static_cast<T>(json.AsInt(rule.least, rule.most));
  } else if constexpr (std::is_same_v<T, double>) {
    return ReadNumber(json, rule);
  } else if constexpr (std::is_same_v<T, Bytes>) {
    return json.AsBytes();
  } else if constexpr (std::is_same_v<T, std::string>) {
    return json.AsString();
  } else if constexpr (std::is_same_v<T, Reshard>) {
    return ReadReshard(json, rule);
  } else if constexpr (std::is_same_v<T, std::vector<UnitPlan>>) {
    return ReadUnits(json);
  } else if constexpr (std::is_same_v<T, std::vector<RecomputeRegion>>) {
    return ReadList<RecomputeRegion>(json, "a list of recompute regions", [](const JsonValue& one) {
      RecomputeRegion region;
      ReadPart(one, kRecomputeRegionFields, region);
      return region;
    });
  } else {
    return ReadList<std::string>(json, "a list of strings",
                                 [](const JsonValue& one) { return one.AsString(); });
  }
}

struct Reader {
  const JsonValue& json;

  template <class T>
  void operator()(const char* key, T& value, const Rule& rule = {}) {
    if (const auto found = rule.is_needed ? json.At(key) : json.Find(key)) {
      value = ReadValue<T>(*found, rule);
    }
  }
  template <class Part, class Fields>
  void operator()(const char* key, Part& part, Fields fields, bool /*is_written*/ = true) {
    if (const auto found = json.Find(key)) {
      ReadPart(*found, fields, part);
    }
  }
};

// No other keys may stand there.
template <class Part, class Fields>
void ReadPart(const JsonValue& json, Fields fields, Part& part) {
  KeyList known;
  fields(part, known);
  json.AllowOnly(known.keys);
  Reader reader{json};
  fields(part, reader);
}

template <class Part, class Fields>
Json PartJson(const Part& part, Fields fields);

struct Writer {
  Json json;

  template <class T>
  void operator()(const char* key, const T& value, const Rule& rule = {}) {
    if (!rule.is_written) {
      return;
    }
    if constexpr (std::is_enum_v<T>) {
      json[key] = NameIn(rule.names, value);
    } else if constexpr (std::is_same_v<T, Bytes>) {
      json[key] = FormatExact(value);
    } else if constexpr (std::is_same_v<T, Reshard>) {
      json[key] = value.kind == Reshard::Kind::kToGroup ? Json(value.group)
                                                        : Json(NameIn(rule.names, value.kind));
    } else if constexpr (std::is_same_v<T, std::vector<UnitPlan>>) {
      AddList(key, value, kUnitPlanFields);
    } else if constexpr (std::is_same_v<T, std::vector<RecomputeRegion>>) {
      AddList(key, value, kRecomputeRegionFields);
    } else {
      json[key] = value;
    }
  }
  template <class Part, class Fields>
  void operator()(const char* key, const Part& part, Fields fields, bool is_written = true) {
    if (is_written) {
      json[key] = PartJson(part, fields);
    }
  }
  template <class Part, class Fields>
  void AddList(const char* key, const std::vector<Part>& parts, Fields fields) {
    json[key] = Mapped<Json>(parts, [&](const Part& part) { return PartJson(part, fields); });
  }
};

template <class Part, class Fields>
Json PartJson(const Part& part, Fields fields) {
  Writer writer;
  fields(part, writer);
  return std::move(writer.json);
}

std::string DefaultUnitName(const std::vector<std::string>& modules) {
  return modules == std::vector<std::string>{""} ? "root" : Listed(modules, {}, "+");
}

}  // namespace

std::vector<UnitPlan> ReadUnits(const JsonValue& json) {
  return ReadList<UnitPlan>(json, "a list of units", [](const JsonValue& one) {
    UnitPlan unit;
    ReadPart(one, kUnitPlanFields, unit);
    unit.name = one.Find("name") ? unit.name : DefaultUnitName(unit.modules);
    return unit;
  });
}

Job ReadJob(const JsonValue& json) {
  Job job;
  ReadPart(json, kJobFields, job);
  return job;
}

Plan ReadPlan(const JsonValue& json) {
  Plan plan;
  ReadPart(json, kPlanKeys, plan);
  return plan;
}

KernelSetOptions ReadKernelSet(const JsonValue& json) {
  KernelSetOptions options;
  KeyList known;
  kKernelSetFields(options, known);
  json.AllowOnly(known.keys);
  const JsonValue name = json.At("name");
  options = FindKernelSet(name.AsString(), name.path().str());
  ReadPart(json, kKernelSetFields, options);
  return options;
}

Json JobJson(const Job& job) {
  return PartJson(job, kJobFields);
}

Json PlanJson(const Plan& plan) {
  return PartJson(plan, kPlanFields);
}

Json KernelSetJson(const KernelSetOptions& kernels) {
  return PartJson(kernels, kKernelSetFields);
}

}  // namespace shardwright::internal
