#include "topologies/gpu_names.h"

#include <algorithm>
#include <array>
#include <vector>

#include "core/text.h"

namespace shardwright {
namespace {

struct Product {
  std::string_view words;   // the first begins the product's name, the others are in it
  std::string_view device;  // PCI id; empty: not known
  std::string_view gpu;
};

// The first row that fits counts. Names as nvidia-smi prints them and ids as pci-ids lists them,
// both from general knowledge, not looked up: a flag that names the GPU wins.
constexpr Product kProducts[] = {
    {"v100 16gb", "1db1", "v100-16"},
    {"v100 32gb", "1db5", "v100-32"},
    {"t4", "1eb8", "t4"},
    {"titan rtx", "1e02", "titan-rtx"},
    {"a100 80gb pcie", "20b5", "a100-pcie-80"},
    {"a100 40gb", "20b0", "a100-40"},
    {"a100 80gb", "20b2", "a100-80"},
    {"a800 80gb", "", "a800-80"},
    {"a10", "2236", "a10"},
    {"a10g", "2237", "a10g"},
    {"a30", "20b7", "a30"},
    {"a40", "2235", "a40"},
    {"rtx 3090", "2204", "rtx-3090"},
    {"rtx a6000", "2230", "rtx-a6000"},
    {"l4", "27b8", "l4"},
    {"l40s", "26b9", "l40s"},
    {"l40", "26b5", "l40"},
    {"rtx 4090", "2684", "rtx-4090"},
    {"rtx 6000 ada", "26b1", "rtx-6000-ada"},
    {"rtx pro 6000", "", "rtx-pro-6000"},
    {"rtx 5090", "2b85", "rtx-5090"},
    {"h100 pcie", "2331", "h100-pcie-80"},
    {"h100 nvl", "2321", "h100-nvl-94"},
    {"h100 80gb", "2330", "h100-80"},
    {"h100 sxm", "", "h100-80"},
    {"h100 sxm5", "", "h100-80"},
    {"h800", "", "h800-80"},
    {"h20", "2329", "h20-96"},
    {"gh200 480gb", "2342", "gh200-96"},
    {"gh200 144g", "2348", "gh200-141"},
    {"h200 nvl", "233b", "h200-nvl-141"},
    {"h200", "2335", "h200-141"},
    {"gb300", "", "gb300-288"},
    {"gb200", "2941", "gb200-186"},
    {"b200", "2901", "b200-180"},
    {"b300", "", "b300-288"},
};

// Lower-case words of "NVIDIA A100-SXM4-80GB".
std::vector<std::string> WordsOf(std::string_view text) {
  std::vector<std::string> words(1);
  for (const char c : LowerCase(text)) {
    if (c == ' ' || c == '-') {
      words.emplace_back();
    } else {
      words.back() += c;
    }
  }
  return words;
}

// Makers and their lines, which may stand in front of a product.
bool IsBrand(const std::string& word) {
  constexpr std::array<std::string_view, 4> kBrands = {"nvidia", "tesla", "geforce", "quadro"};
  return std::find(kBrands.begin(), kBrands.end(), word) != kBrands.end();
}

// What makes another product of a name: slower cards, other cards, parts of a card.
bool IsVariant(const std::string& word) {
  constexpr std::array<std::string_view, 7> kVariants = {"laptop", "ti",  "super", "d",
                                                         "nvl",    "mig", "max"};
  return std::find(kVariants.begin(), kVariants.end(), word) != kVariants.end();
}

}  // namespace

std::string GpuOfProduct(std::string_view product) {
  std::vector<std::string> words = WordsOf(product);
  words.erase(words.begin(), std::find_if_not(words.begin(), words.end(), IsBrand));
  if (words.empty()) {
    return "";
  }
  for (const Product& row : kProducts) {
    const std::vector<std::string> wanted = WordsOf(row.words);
    const auto has = [](const std::vector<std::string>& all, const std::string& word) {
      return std::find(all.begin(), all.end(), word) != all.end();
    };
    const bool has_all = std::all_of(wanted.begin(), wanted.end(),
                                     [&](const std::string& word) { return has(words, word); });
    const bool is_another = std::any_of(words.begin(), words.end(), [&](const std::string& word) {
      return IsVariant(word) && !has(wanted, word);
    });
    if (wanted.front() == words.front() && has_all && !is_another) {
      return std::string(row.gpu);
    }
  }
  return "";
}

std::string GpuOfPciDevice(std::string_view device) {
  device.remove_prefix(device.starts_with("0x") ? 2 : 0);
  const auto* const found =
      std::find_if(std::begin(kProducts), std::end(kProducts),
                   [&](const Product& row) { return !row.device.empty() && row.device == device; });
  return found == std::end(kProducts) ? "" : std::string(found->gpu);
}

}  // namespace shardwright
