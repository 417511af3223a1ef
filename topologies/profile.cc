#include "topologies/profile.h"

#include <filesystem>
#include <map>
#include <mutex>
#include <span>
#include <utility>

#include "core/embedded.h"
#include "core/error.h"
#include "core/files.h"
#include "core/json.h"
#include "core/ranges.h"
#include "topologies/internal/shipped_profiles.h"
#include "topologies/profile_catalog.h"
#include "topologies/profile_targets.h"

namespace shardwright {
namespace {

// What ShipProfilesOf has read.
struct ProfileFolder {
  struct Texts {
    std::string name, text, path;
  };
  std::vector<Texts> texts;
  std::vector<EmbeddedFile> files;  // of them
};

ProfileFolder& Folder() {
  static ProfileFolder folder;
  return folder;
}

// Parsed once, for programs that answer many questions. One that extends another asks for it here
// while it is parsed itself.
const Profile& Shipped(const EmbeddedFile& file) {
  static std::recursive_mutex mutex;
  static std::map<std::string_view, Profile> profiles;
  const std::lock_guard lock(mutex);
  const auto known = profiles.find(file.name);
  return known != profiles.end()
             ? known->second
             : profiles.emplace(file.name, ParseProfile(file.text, std::string(file.path)))
                   .first->second;
}

// The kernel sets whose profiles may serve, the best first. Software that runs PyTorch's kernels
// shares one profile per GPU, "torch": what sets it apart are its kernels, so that a stack with
// fewer of them is never slower.
std::vector<std::string_view> KernelSetsFor(std::string_view kernel_set) {
  constexpr std::string_view kBase = "torch-eager";       // what microbenchmarks say
  constexpr std::string_view kOurs = "shardwright-cuda";  // its variants have the same host
  constexpr std::string_view kPyTorch = "torch";
  if (kernel_set.starts_with(kOurs)) {
    return {kernel_set, kOurs, kBase};
  }
  if (kernel_set.starts_with("torch-")) {
    return {kPyTorch, kBase};
  }
  if (kernel_set.starts_with("hf-") || kernel_set == "deepspeed") {
    return {kernel_set, kPyTorch, kBase};
  }
  return {kernel_set, kBase};
}

}  // namespace

std::span<const EmbeddedFile> internal::ShippedProfiles() {
  return Folder().files.empty() ? EmbeddedProfileCatalog() : Folder().files;
}

void ShipProfilesOf(const std::string& folder) {
  std::vector<ProfileFolder::Texts> texts;
  for (const std::filesystem::path& path : EntriesOf(folder)) {
    if (path.extension() == ".json") {
      texts.push_back({path.stem().string(), ReadTextFile(path.string()), path.string()});
    }
  }
  if (texts.empty()) {
    throw InputError(folder, "no profile", "a folder of .json files");
  }
  SortAll(texts, [](const auto& a, const auto& b) { return a.name < b.name; });
  Folder() = {std::move(texts), {}};
  for (const ProfileFolder::Texts& row : Folder().texts) {
    Folder().files.push_back({row.name, row.text, row.path});
  }
  for (const EmbeddedFile& file : Folder().files) {
    (void)Shipped(file);  // what is wrong with it is said now
  }
}

std::vector<std::string> ListProfiles() {
  return NamesOf(internal::ShippedProfiles());
}

Profile LoadProfile(const std::string& spec) {
  for (const EmbeddedFile& file : internal::ShippedProfiles()) {
    if (file.name == spec) {
      return Shipped(file);
    }
  }
  if (spec.ends_with(".json") || spec.find('/') != std::string::npos) {
    return ParseProfile(ReadTextFile(spec), spec);
  }
  throw InputError("profile", '"' + spec + '"',
                   "a name from `shardwright list profiles` or a .json file",
                   DidYouMean(spec, ListProfiles()));
}

// RTX 4090: 165 TFLOP/s in bf16 and 83 in fp32, twice as much; L40S, the same chip at full rate:
// four times. From Ampere on that ratio tells the two kinds.
std::vector<std::string> ProfileTargets(const GpuSpec& gpu) {
  const std::optional<FlopsPerSecond> bf16 = PeakFlops(gpu, MathType::kBf16);
  const std::optional<FlopsPerSecond> fp32 = PeakFlops(gpu, MathType::kFp32);
  std::vector<std::string> targets = {gpu.name, gpu.architecture};
  if (bf16 && fp32 && bf16->value < 3 * fp32->value) {
    targets.insert(targets.begin() + 1, gpu.architecture + "-half");
  }
  return targets;
}

Profile DefaultProfile(const GpuSpec& gpu, std::string_view kernel_set) {
  for (const std::string_view wanted : KernelSetsFor(kernel_set)) {
    for (const std::string& target : ProfileTargets(gpu)) {
      for (const EmbeddedFile& file : internal::ShippedProfiles()) {
        const Profile& profile = Shipped(file);
        if (!profile.architecture.empty() && profile.architecture == target &&
            profile.kernel_set == wanted) {
          return profile;
        }
      }
    }
  }
  return LoadProfile("generic");
}

const TransportProfile& FindTransport(const Profile& profile, std::string_view name) {
  const auto find = [&](std::string_view wanted) {
    return FindIn(profile.transports, wanted, &TransportProfile::name);
  };
  auto found = find(name);
  if (found == profile.transports.end()) {
    found = find("default");
  }
  if (found == profile.transports.end()) {
    throw InputError("profile " + profile.name + ": transports",
                     "no row \"" + std::string(name) + '"', "it or a row \"default\"");
  }
  return *found;
}

}  // namespace shardwright
