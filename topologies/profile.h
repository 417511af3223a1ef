#pragma once

// Profile: what software achieves on one GPU type, and what it costs besides. Every number carries
// its origin. `calibrate` and `fit` write profiles; the ones shipped come from published facts.
// What each number means says topologies/profile_fields.json, which the parts are made from:
// members and lists for reading and writing them, such as kHostProfileFields and
// kHostProfileExtras.

#include <string>
#include <string_view>
#include <vector>

#include "topologies/cluster.h"
#include "topologies/profile_fields.h"

namespace shardwright {

// "cheapest", "nccl".
[[nodiscard]] const char* CollectiveChoiceName(CollectiveChoice choice);

struct Profile {
  std::string name;          // "h100-torch-eager"
  std::string description;   // one line
  std::string architecture;  // GpuSpec::architecture or ::name it is meant for; empty: any
  std::string kernel_set;    // KernelSet it is meant for; empty: any
  ComputeProfile compute;
  HostProfile host;
  CopyProfile copy;
  std::vector<TransportProfile> transports;  // names are unique
  OverlapProfile overlap;
  MemoryProfile memory;

  bool operator==(const Profile&) const = default;
};

// `spec` is a shipped name or the path of a .json file. Throws InputError.
[[nodiscard]] Profile LoadProfile(const std::string& spec);
// The shipped profile for a GPU and a kernel set: of this GPU for it, else of its architecture,
// else the same two of its family ("torch" of PyTorch's kernels, "shardwright-cuda"), then of
// "torch-eager", which is what microbenchmarks say, else "generic".
[[nodiscard]] Profile DefaultProfile(const GpuSpec& gpu, std::string_view kernel_set);
// From now on the shipped profiles are those of `folder`, its *.json files: to ask what predictions
// would be without some of them. For a program's beginning, before any other function of this
// header, and for one thread. Throws InputError for a folder without such files.
void ShipProfilesOf(const std::string& folder);
// Names of the shipped profiles, sorted.
[[nodiscard]] std::vector<std::string> ListProfiles();

// Reads a profile; `file` names it in errors. A file may say "extends": "<shipped name>" and then
// gives only what differs.
[[nodiscard]] Profile ParseProfile(std::string_view text, const std::string& file);
// The whole profile as JSON without "extends"; ParseProfile reads it back to an equal value.
[[nodiscard]] std::string ProfileJson(const Profile& profile);

// The row named `name`, or the row "default" when there is none. Throws InputError without either.
[[nodiscard]] const TransportProfile& FindTransport(const Profile& profile, std::string_view name);

}  // namespace shardwright
