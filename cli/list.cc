#include <algorithm>
#include <array>
#include <cstddef>

#include <nlohmann/json.hpp>

#include "cli/command.h"
#include "cli/stacks.h"
#include "cli/table.h"
#include "core/json.h"
#include "models/kernel_set.h"
#include "models/loader.h"
#include "schedule/plan_names.h"
#include "topologies/cluster.h"
#include "topologies/profile.h"

namespace shardwright {
namespace {

using Json = nlohmann::ordered_json;
using enum Table::Align;

constexpr std::array<std::string_view, 6> kListNames = {"models",      "clusters", "gpus",
                                                        "kernel-sets", "profiles", "stacks"};

// A list as rows for people and as JSON for programs.
struct Listing {
  Table table;
  Json json = Json::array();
};

Listing ListModelsOf() {
  Listing listing{Table({kLeft, kLeft, kRight, kLeft})};
  listing.table.Row({"model", "type", "parameters", "source"});
  for (const ZooEntry& entry : ListModels()) {
    listing.table.Row({entry.name, entry.type, WithCommas(entry.parameters), entry.source});
    listing.json.push_back({{"name", entry.name},
                            {"type", entry.type},
                            {"parameters", entry.parameters},
                            {"source", entry.source}});
  }
  return listing;
}

// A rate, or "none" for a machine without such links.
std::string RateText(BytesPerSecond rate) {
  return rate.value > 0 ? Format(rate) : "none";
}

Listing ListClustersOf() {
  Listing listing{Table({kLeft, kLeft, kRight, kRight, kRight, kLeft})};
  listing.table.Row({"cluster", "gpu", "gpus/node", "scale-up/gpu", "network/node", "description"});
  for (const ClusterSummary& entry : ListClusters()) {
    listing.table.Row(
        {entry.name, entry.gpu, std::to_string(entry.gpus_per_node), RateText(entry.scale_up),
         RateText(entry.network_rate),
         entry.description + (entry.cores > 0 ? "; " + CoresText(entry.cores) : std::string())});
    listing.json.push_back({{"name", entry.name},
                            {"gpu", entry.gpu},
                            {"gpus_per_node", entry.gpus_per_node},
                            {"scale_up_bytes_per_s", entry.scale_up.value},
                            {"network_bytes_per_s", entry.network_rate.value},
                            {"description", entry.description}});
    if (entry.cores > 0) {
      listing.json.back()["cores"] = entry.cores;
    }
  }
  return listing;
}

Listing ListGpusOf() {
  Listing listing{Table({kLeft, kLeft, kLeft, kRight, kRight, kRight})};
  listing.table.Row({"gpu", "full name", "architecture", "memory", "bandwidth", "bf16 dense"});
  for (const GpuSpec& gpu : GpuCatalog()) {
    const std::optional<FlopsPerSecond> bf16 = PeakFlops(gpu, MathType::kBf16);
    listing.table.Row({gpu.name, gpu.full_name, gpu.architecture, Format(gpu.memory.value),
                       Format(gpu.memory_bandwidth.value), bf16 ? Format(*bf16) : "none"});
    Json peaks;
    for (std::size_t i = 0; i < kMathTypeCount; ++i) {
      const auto type = static_cast<MathType>(i);
      const std::optional<FlopsPerSecond> peak = PeakFlops(gpu, type);
      peaks[MathTypeName(type)] = peak ? Json(peak->value) : Json(nullptr);
    }
    listing.json.push_back({{"name", gpu.name},
                            {"full_name", gpu.full_name},
                            {"vendor", gpu.vendor},
                            {"architecture", gpu.architecture},
                            {"memory_bytes", gpu.memory.value.value},
                            {"usable_memory_bytes", gpu.usable_memory.value.value},
                            {"memory_bandwidth_bytes_per_s", gpu.memory_bandwidth.value.value},
                            {"dense_peak_flops_per_s", peaks}});
  }
  return listing;
}

Listing ListKernelSetsOf() {
  Listing listing{Table({kLeft, kLeft, kLeft, kLeft})};
  listing.table.Row({"kernel set", "attention", "moe dispatch", "element-wise"});
  for (const KernelSetOptions& set : BuiltinKernelSets()) {
    const std::string attention(NameIn(kAttentionNames, set.attention));
    const std::string dispatch(NameIn(kMoeDispatchNames, set.moe_dispatch));
    listing.table.Row({set.name, attention, dispatch, set.fused_elementwise ? "fused" : "eager"});
    listing.json.push_back({{"name", set.name},
                            {"attention", attention},
                            {"moe_dispatch", dispatch},
                            {"fused_elementwise", set.fused_elementwise},
                            {"fused_rope", set.fused_rope},
                            {"fused_norm", set.fused_norm},
                            {"fp32_logits", set.fp32_logits},
                            {"loss_chunks", set.loss_chunks},
                            {"autocast_weights", set.autocast_weights}});
  }
  return listing;
}

// A profile's numbers that were fitted, those of what it extends included, by what they belong to:
// a library of attention, or else the section of the file.
std::map<std::string, int> FittedNumbersOf(const Profile& profile) {
  std::map<std::string, int> counts;
  const auto count = [&](const auto& self, const std::string& owner, const Json& value) -> void {
    if (value.contains("kind")) {
      counts[owner] += value["kind"] == "fitted" ? 1 : 0;
      return;
    }
    for (const auto& [key, part] : value.items()) {
      const std::size_t library = key.find("attention_");
      if (part.is_object()) {
        self(self, library == std::string::npos ? owner : key.substr(0, library) + "attention",
             part);
      }
    }
  };
  const Json whole = Json::parse(ProfileJson(profile));
  for (const auto& [section, value] : whole.items()) {
    if (value.is_object()) {
      count(count, section, value);
    }
  }
  std::erase_if(counts, [](const auto& entry) { return entry.second == 0; });
  return counts;
}

Listing ListProfilesOf() {
  Listing listing{Table({kLeft, kLeft, kLeft, kRight, kRight, kLeft})};
  listing.table.Row(
      {"profile", "architecture", "kernel set", "fitted", "of the network", "description"});
  for (const std::string& name : ListProfiles()) {
    const Profile profile = LoadProfile(name);
    std::map<std::string, int> fitted = FittedNumbersOf(profile);
    const int of_network = fitted["transports"];
    int all = 0;
    for (const auto& [owner, count] : fitted) {
      all += count;
    }
    listing.table.Row({profile.name, profile.architecture.empty() ? "any" : profile.architecture,
                       profile.kernel_set.empty() ? "any" : profile.kernel_set,
                       std::to_string(all - of_network), std::to_string(of_network),
                       profile.description});
    listing.json.push_back({{"name", profile.name},
                            {"architecture", profile.architecture},
                            {"kernel_set", profile.kernel_set},
                            {"fitted_numbers", fitted},
                            {"description", profile.description}});
  }
  return listing;
}

// Of one stack the rows in the order of time; --kernel-set NAME@DATE picks one.
Listing ListStacksOf() {
  Listing listing{Table({kLeft, kLeft, kLeft, kLeft, kLeft})};
  listing.table.Row({"stack", "before", "kernel set", "attention", "shards as"});
  for (const StackRow& row : Stacks()) {
    const std::string attention(row.attention ? NameIn(kAttentionNames, *row.attention) : "");
    const std::string version = row.before_version.empty() ? "" : " (" + row.before_version + ")";
    const std::string before = row.before.empty() ? "now" : row.before + version;
    listing.table.Row({row.name, before, row.kernel_set, attention, row.dialect});
    listing.json.push_back({{"name", row.name},
                            {"before", row.before},
                            {"before_version", row.before_version},
                            {"kernel_set", row.kernel_set},
                            {"attention", attention},
                            {"dialect", row.dialect}});
  }
  return listing;
}

// In the order of kListNames.
constexpr Listing (*kLists[])() = {ListModelsOf,     ListClustersOf, ListGpusOf,
                                   ListKernelSetsOf, ListProfilesOf, ListStacksOf};

}  // namespace

int ListCommand(const Arguments& arguments) {
  const Flag what = {"list", arguments.Get("WHAT").text};
  const std::size_t kind = ReadChoice(what, kListNames);
  const Listing listing = kLists[kind]();
  if (!arguments.IsJson()) {
    arguments.Print(listing.table.Text());
    return kExitOk;
  }
  Json json = ReportHead("shardwright-list");
  std::string key(kListNames[kind]);
  std::replace(key.begin(), key.end(), '-', '_');
  json[key] = listing.json;
  arguments.Print(json.dump(2) + "\n");
  return kExitOk;
}

}  // namespace shardwright
