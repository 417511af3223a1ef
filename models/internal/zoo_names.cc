#include "models/internal/zoo_names.h"

#include <algorithm>
#include <array>
#include <utility>

#include "core/text.h"

namespace shardwright::internal {
namespace {

// Parts of a name that say how weights were trained or stored, not how large they are.
constexpr std::array<std::string_view, 12> kTrainedAs = {"instruct", "chat",     "base", "it",
                                                         "hf",       "pt",       "meta", "coder",
                                                         "math",     "thinking", "2507", "deduped"};

// Models of another name with the same sizes.
constexpr std::array<std::pair<std::string_view, std::string_view>, 23> kSameSizes = {{
    {"deepseek-r1", "deepseek-v3"},
    {"deepseek-r1-0528", "deepseek-v3"},
    {"deepseek-r1-distill-llama-70b", "llama-3.1-70b"},
    {"deepseek-r1-distill-llama-8b", "llama-3.1-8b"},
    {"deepseek-r1-distill-qwen-14b", "qwen2.5-14b"},
    {"deepseek-r1-distill-qwen-32b", "qwen2.5-32b"},
    {"deepseek-r1-distill-qwen-7b", "qwen2.5-7b"},
    {"deepseek-v3-0324", "deepseek-v3"},
    {"deepseek-v3.1", "deepseek-v3"},
    {"hermes-3-llama-3.1-8b", "llama-3.1-8b"},
    {"llama-3.1-nemotron-70b", "llama-3.1-70b"},
    {"llama-3.3-70b", "llama-3.1-70b"},
    {"mistral-7b-v0.1", "mistral-7b"},
    {"mistral-nemo-2407", "mistral-nemo-12b"},
    {"mistral-small-24b-2501", "mistral-small-24b"},
    {"mixtral-8x22b-v0.1", "mixtral-8x22b"},
    {"mixtral-8x7b-v0.1", "mixtral-8x7b"},
    {"olmo-2-1124-7b", "olmo-2-7b"},
    {"qwq-32b", "qwen2.5-32b"},
    {"smollm3", "smollm3-3b"},
    {"tinyllama-1.1b-v1.0", "tinyllama-1.1b"},
    {"vicuna-13b-v1.5", "llama-2-13b"},
    {"vicuna-7b-v1.5", "llama-2-7b"},
}};

// Without the parts of kTrainedAs.
std::string SizePart(const std::string& name) {
  std::string kept;
  for (std::size_t begin = 0; begin <= name.size();) {
    const std::size_t end = std::min(name.find('-', begin), name.size());
    const std::string part = name.substr(begin, end - begin);
    if (std::find(kTrainedAs.begin(), kTrainedAs.end(), part) == kTrainedAs.end()) {
      kept += (kept.empty() ? "" : "-") + part;
    }
    begin = end + 1;
  }
  return kept;
}

// "llama3-8b" for "llama-3-8b", and "qwen-3-8b" for "qwen3-8b". Empty: the name begins otherwise.
std::string OtherDash(const std::string& name) {
  const std::size_t letters = name.find_first_not_of("abcdefghijklmnopqrstuvwxyz");
  if (letters == 0 || letters >= name.size()) {
    return "";
  }
  const std::string family = name.substr(0, letters);
  return name[letters] == '-' ? family + name.substr(letters + 1)
                              : family + "-" + name.substr(letters);
}

}  // namespace

std::string ZooNameOf(std::string_view spelled, std::span<const std::string> names) {
  const auto known = [&](const std::string& name) {
    return std::find(names.begin(), names.end(), name) != names.end();
  };
  const std::string name = LowerCase(spelled.substr(spelled.rfind('/') + 1));
  if (known(name)) {
    return name;
  }
  const std::string part = SizePart(name);
  for (const std::string& other : {part, OtherDash(part)}) {
    if (known(other)) {
      return other;
    }
  }
  const auto* const found = std::find_if(kSameSizes.begin(), kSameSizes.end(),
                                         [&](const auto& row) { return row.first == part; });
  return found == kSameSizes.end() ? "" : std::string(found->second);
}

}  // namespace shardwright::internal
