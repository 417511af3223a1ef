#include "cli/first_weights.h"

#include <algorithm>
#include <filesystem>

#include "core/files.h"
#include "core/printable.h"
#include "core/text.h"
#include "models/checkpoint_folder.h"

namespace shardwright {

void WarnOfUnused(const std::string& path, const HubWeights& weights) {
  constexpr std::size_t kShown = 3;
  const std::vector<std::string>& unused = weights.unused();
  std::string names = Listed(std::span(unused).first(std::min(kShown, unused.size())));
  if (unused.size() > kShown) {
    names += " and " + std::to_string(unused.size() - kShown) + " more";
  }
  if (!unused.empty()) {
    Say("warning: " + path + ": the model has no parameter for " + names);
  }
}

void NoteWeightsBeside(const std::string& path) {
  std::filesystem::path folder(path);
  if (!IsFolder(folder)) {
    if (!Exists(folder)) {
      return;
    }
    folder = folder.has_parent_path() ? folder.parent_path() : std::filesystem::path(".");
  }
  if (HoldsCheckpoint(folder.string())) {
    Say("note: " + folder.string() + " holds weights; run starts from them with --init " +
        folder.string());
  }
}

}  // namespace shardwright
