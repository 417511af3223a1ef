#pragma once

// What people, tools and clouds call the catalog's GPUs and nodes: catalog/gpu_names.json.

#include <cstdint>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

namespace shardwright {

struct GpuSpec;

struct GpuName {
  std::string gpu;                   // the catalog's name; empty: no card that is known
  std::vector<std::int64_t> counts;  // "2x8 H100": 2, 8; as they are written, behind the name too
  bool is_only_counts = false;       // no word but counts and makers
  std::string key;                   // the words that say something: "dgx-h10"
  std::string why;      // without a GPU: what hinders; empty where no word is of a GPU's name
  std::string assumed;  // where the words leave the memory open
};
// Reads "8x NVIDIA A100-PCIE-40GB", "H100:8", "RTX 4090 (2)". It is a card only if each word of
// `text` is understood.
[[nodiscard]] GpuName ReadGpuName(std::string_view text);

// The catalog's name of a product as nvidia-smi and PyTorch print it, "NVIDIA H100 80GB HBM3";
// empty for one that is not in the catalog.
[[nodiscard]] std::string GpuOfProduct(std::string_view product);

// The same of an NVIDIA GPU's PCI device id, "0x2330" or "2330".
[[nodiscard]] std::string GpuOfPciDevice(std::string_view device);

// The most GPUs that a server joins by NVLink or xGMI, or has at all; 0: the GPU has no such links.
[[nodiscard]] std::int64_t MostOfANode(const GpuSpec& gpu);

// What clouds call the nodes that they let, in lower case, and a name of the cluster catalog or a
// description of one node. A name that is the begin of another one follows it.
[[nodiscard]] const std::vector<std::pair<std::string, std::string>>& CloudNodes();

// "did you mean \"x\"?" for names of products, whose numbers tell them apart: of those with the
// numbers of `word` as far as both go. "l5" is not like "l4".
[[nodiscard]] std::string DidYouMeanProduct(std::string_view word,
                                            const std::vector<std::string>& names);

}  // namespace shardwright
