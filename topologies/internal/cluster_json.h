#pragma once

#include <string>
#include <vector>

#include "core/json.h"
#include "topologies/cluster.h"

namespace shardwright::internal {

// Checks "format" and "version" of a file of ours; only version 1 exists.
void CheckFormat(const JsonValue& root, const std::string& format);

// A GPU row of the catalog or of a cluster file.
[[nodiscard]] GpuSpec ReadGpu(const JsonValue& value);
[[nodiscard]] std::vector<GpuSpec> ParseGpuList(std::string_view text, const std::string& file);

// `text` after the first word of an inline description: "h100-80 x8, nvlink 450 GB/s, ...".
[[nodiscard]] Cluster ParseInlineCluster(const std::string& text);

// Node count, used GPUs and fabric against each other. `where` names the cluster in errors.
void CheckCluster(const Cluster& cluster, const std::string& where);

}  // namespace shardwright::internal
