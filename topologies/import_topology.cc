#include "topologies/import_topology.h"

#include <array>
#include <iterator>
#include <utility>

#include "core/budget.h"
#include "core/error.h"
#include "core/ranges.h"
#include "topologies/internal/machine.h"

namespace shardwright {

std::string_view NameOf(TopologyFormat format) {
  static constexpr std::array<std::string_view, 3> kNames = {"nvidia-smi topo -m", "NCCL XML",
                                                             "hwloc XML"};
  return kNames[static_cast<std::size_t>(format)];
}

std::optional<TopologyFormat> DetectTopology(std::string_view text) {
  const std::size_t first = text.find_first_not_of(" \t\r\n");
  if (first == std::string_view::npos) {
    return std::nullopt;
  }
  if (text[first] == '<') {
    const std::string_view head = text.substr(first, 4096);
    return head.find("<topology") != std::string_view::npos ? TopologyFormat::kHwlocXml
           : head.find("<system") != std::string_view::npos
               ? std::optional(TopologyFormat::kNcclXml)
               : std::nullopt;
  }
  const bool is_json = text[first] == '{' || text[first] == '[';
  return !is_json && text.find("GPU0") != std::string_view::npos
             ? std::optional(TopologyFormat::kMatrix)
             : std::nullopt;
}

ImportedTopology ImportTopology(std::string_view text, const std::string& file,
                                const TopologyOptions& options) {
  constexpr std::int64_t kLargest = std::int64_t{16} << 20;
  Budget(file, "bytes of topology", kLargest).Take(std::ssize(text));
  const std::optional<TopologyFormat> format = DetectTopology(text);
  if (!format) {
    throw InputError(file, text.empty() ? "an empty file" : "something else",
                     "what nvidia-smi topo -m prints, or the XML of NCCL or hwloc");
  }
  internal::Machine machine =
      *format == TopologyFormat::kMatrix    ? internal::ReadTopoMatrix(text, file, options)
      : *format == TopologyFormat::kNcclXml ? internal::ReadNcclXml(text, file)
                                            : internal::ReadHwlocXml(text, file);
  const bool has_gpu = AnyOf(
      machine.parts, [](const auto& part) { return part.kind == internal::Machine::Kind::kGpu; });
  if (!has_gpu) {
    throw InputError(file, "no GPU", "a machine with GPUs");
  }
  ImportedTopology result = internal::ClusterOfMachine(std::move(machine), file, options);
  result.format = *format;
  return result;
}

}  // namespace shardwright
