#include "topologies/profile.h"

#include <algorithm>
#include <string>
#include <string_view>
#include <vector>

#include "core/embedded.h"
#include "core/error.h"
#include "core/json.h"
#include "topologies/profile_catalog.h"

namespace shardwright {
namespace {

// Parsed once. LoadProfile does not use it, since profiles that extend others call LoadProfile.
const std::vector<Profile>& ShippedProfiles() {
  static const std::vector<Profile> profiles = [] {
    std::vector<Profile> parsed;
    for (const EmbeddedFile& file : EmbeddedProfileCatalog()) {
      parsed.push_back(ParseProfile(file.text, std::string(file.path)));
    }
    return parsed;
  }();
  return profiles;
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

std::vector<std::string> ListProfiles() {
  std::vector<std::string> names;
  for (const EmbeddedFile& file : EmbeddedProfileCatalog()) {
    names.emplace_back(file.name);
  }
  std::sort(names.begin(), names.end());
  return names;
}

Profile LoadProfile(const std::string& spec) {
  for (const EmbeddedFile& file : EmbeddedProfileCatalog()) {
    if (file.name == spec) {
      return ParseProfile(file.text, std::string(file.path));
    }
  }
  if (spec.ends_with(".json") || spec.find('/') != std::string::npos) {
    return ParseProfile(ReadTextFile(spec), spec);
  }
  throw InputError("profile", '"' + spec + '"',
                   "a name from `shardwright list profiles` or a .json file",
                   DidYouMean(spec, ListProfiles()));
}

Profile DefaultProfile(const GpuSpec& gpu, std::string_view kernel_set) {
  for (const std::string_view wanted : KernelSetsFor(kernel_set)) {
    for (const std::string& target : {gpu.name, gpu.architecture}) {
      for (const Profile& profile : ShippedProfiles()) {
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
    return std::find_if(profile.transports.begin(), profile.transports.end(),
                        [&](const TransportProfile& t) { return t.name == wanted; });
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
