#include <algorithm>
#include <cstddef>
#include <string>
#include <vector>

#include <nlohmann/json.hpp>

#include "core/ordered_json.h"
#include "schedule/internal/plan_json.h"
#include "schedule/plan_file.h"

namespace shardwright {
namespace {

using Json = nlohmann::ordered_json;

// Does the value's text surely take more than `bytes`? Looks at no more of it than that.
bool IsLonger(const Json& value, std::size_t bytes, std::size_t* count) {
  *count += value.is_string() ? value.get_ref<const std::string&>().size() : 1;
  for (auto child = value.begin(); value.is_structured() && child != value.end(); ++child) {
    *count += value.is_object() ? child.key().size() : 0;
    if (*count > bytes || IsLonger(*child, bytes, count)) {
      return true;
    }
  }
  return *count > bytes;
}

bool FitsOnLine(const Json& value, std::size_t indent) {
  constexpr std::size_t kLine = 100;
  std::size_t count = 0;
  return !IsLonger(value, kLine, &count) && indent + value.dump().size() <= kLine;
}

Json ModelPart(const LoadedModel& loaded) {
  Json json;
  json["name"] = loaded.name;
  if (!loaded.json.empty()) {
    json["json"] = ParseOrdered(loaded.json, loaded.name);
  }
  json["hash"] = HashText(loaded.hash);
  return json;
}

// Does the catalog give this very cluster under its name, but for the cores of the machine?
bool IsFromCatalog(const Cluster& cluster) {
  const std::vector<std::string> names = ListClusterNames();
  if (!std::binary_search(names.begin(), names.end(), cluster.name)) {
    return false;
  }
  Cluster listed = LoadCluster(cluster.name, cluster.node_count, cluster.gpus_per_node);
  listed.machine_cores = cluster.machine_cores;
  listed.rank_threads = cluster.rank_threads;
  return ClusterJson(listed) == ClusterJson(cluster);
}

Json ClusterPart(const Cluster& cluster) {
  const std::string text = ClusterJson(cluster);
  Json json;
  if (IsFromCatalog(cluster)) {
    json["name"] = cluster.name;
    json["nodes"] = cluster.node_count;
    json["gpus_per_node"] = cluster.gpus_per_node;
    if (cluster.machine_cores > 0) {
      json["machine_cores"] = cluster.machine_cores;
    }
    if (cluster.rank_threads > 0) {
      json["rank_threads"] = cluster.rank_threads;
    }
  } else {
    json["json"] = Json::parse(text);
  }
  json["hash"] = HashText(Fnv1a64(text));
  return json;
}

bool Ships(const Profile& profile) {
  for (const std::string& name : ListProfiles()) {
    if (name == profile.name) {
      return LoadProfile(name) == profile;
    }
  }
  return false;
}

Json ProfilePart(const Profile& profile) {
  const std::string text = ProfileJson(profile);
  Json json;
  if (Ships(profile)) {
    json["name"] = profile.name;
  } else {
    json["json"] = Json::parse(text);
  }
  json["hash"] = HashText(Fnv1a64(text));
  return json;
}

}  // namespace

std::string PlanFileJson(const PlanFile& file) {
  return PlanFileJson(file, "");
}

std::string PlanFileJson(const PlanFile& file, std::string_view imported_from) {
  Json json;
  json["format"] = "shardwright-plan";
  json["version"] = 1;
  if (!imported_from.empty()) {
    json["imported_from"] = imported_from;
  }
  json["model"] = ModelPart(file.model);
  json["kernel_set"] = internal::KernelSetJson(file.kernels);
  json["cluster"] = ClusterPart(file.cluster);
  json["profile"] = ProfilePart(file.profile);
  json["job"] = internal::JobJson(file.job);
  json["plan"] = internal::PlanJson(file.plan);
  return PrintedJson(json, FitsOnLine) + "\n";
}

}  // namespace shardwright
