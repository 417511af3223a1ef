#pragma once

// Single collectives priced as nccl-tests would print them, and numbers of profiles found from
// measured ones. bench/lab asks these questions; it knows the published tables.

#include <cstdint>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "core/units.h"
#include "simulator/costs/collectives.h"
#include "topologies/cluster.h"
#include "topologies/profile.h"

namespace shardwright {

using ProfilesByName = std::map<std::string, std::unique_ptr<Profile>>;

// The profile called `name`, loaded once; empty: the default of `gpu` that no stack changes.
[[nodiscard]] Profile& ProfileFor(const std::string& name, const GpuSpec& gpu,
                                  ProfilesByName& profiles);

// Ranks of a cluster with the profile that prices them. The path points into the profile.
struct PricedPlace {
  std::string error;  // why there is no such place; empty: the rest is set
  Cluster cluster;
  std::string fabric;  // "hopper nvlink", "blackwell-rtx pcie", or the network between nodes
  const Profile* profile = nullptr;
  CollectivePath path;
};
// The first `ranks` GPUs of a cluster. Throws InputError where the profile lacks a number.
[[nodiscard]] PricedPlace PricedPlaceOf(const std::string& cluster, std::int64_t nodes,
                                        std::int64_t gpus_per_node, std::int64_t ranks,
                                        const std::string& profile, ProfilesByName& profiles);

struct PricedCollective {
  const PricedPlace* place = nullptr;
  OpCode op = OpCode::kAllGather;
  Bytes bytes;
  Seconds tool;      // what the tool that measured counts besides
  Seconds measured;  // 0: not measured
};
// No less than the host needs per call.
[[nodiscard]] Seconds PriceOf(const PricedCollective& collective);

// One number of profiles that may be changed.
struct NetworkNumber {
  std::string architecture;  // of the profiles that have it; empty: of all
  std::string profile;       // of one profile only; empty: of all
  std::string transport;     // "between nodes": of all networks; empty: a number of `host`
  std::string protocol;      // row of `protocols`; empty: a number of the transport itself
  std::string field;         // "efficiency", "base_latency", ...
  double lower = 0;          // bounds of a fit, in seconds for times
  double upper = 0;
  double expected = 0;        // where the rows do not tell; 0: nothing is expected
  double expected_width = 0;  // how far from it is no surprise
  double value = 0;
};

// Gives a number its value in every profile that has it. Throws InputError for an unknown field.
void SetNumber(const NetworkNumber& number, const ProfilesByName& profiles);
void SetNumber(const NetworkNumber& number, const Origin& origin, Profile& profile);

// Finds the values of `numbers` with which the rows are predicted best, and leaves the profiles
// there. Rows below 64 KiB count a quarter. Returns how often prices were asked. Deterministic.
// Throws InputError for a number that no profile has.
std::int64_t FitNumbers(const std::vector<const PricedCollective*>& rows,
                        const ProfilesByName& profiles, std::vector<NetworkNumber>& numbers);

}  // namespace shardwright
