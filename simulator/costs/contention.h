#pragma once

// How fast ops run beside each other: they share links and memory bandwidth, collectives take
// multiprocessors from kernels, and where ops run on cores, all of them share these. The speed of a
// running op depends only on the set of ops that run on the same rank at that moment
// (docs/cost_model.md, section "Contention").

#include <array>
#include <cstdint>
#include <vector>

#include "schedule/program.h"
#include "topologies/cluster.h"
#include "topologies/profile.h"

namespace shardwright {

enum class LoadKind : std::uint8_t {
  kNone,  // neither slows nor is slowed
  kKernel,
  kCollective,
  kCopyToDevice,
  kCopyToHost,
};

// Use of one link resource by a collective.
struct LinkUse {
  std::uint16_t resource = 0;  // index; < ContentionModel::resource_count
  double per_rate = 0;         // share of the resource per byte/s of the collective's bus rate

  bool operator==(const LinkUse&) const = default;
};
inline constexpr std::size_t kMaxLinkUses = 6;

// Ops that load the device and the network alike.
struct ContentionClass {
  LoadKind kind = LoadKind::kNone;
  double sm_share = 0;   // multiprocessors it takes from kernels, 0..1; 0 for kernels
  double hbm_share = 0;  // part of the device's memory bandwidth it uses when alone, 0..1
  double bus_rate = 0;   // kCollective: bytes/s of bus traffic when alone
  std::array<LinkUse, kMaxLinkUses> links{};
  std::uint8_t link_count = 0;
  // Cores that it keeps busy at full speed, the host's issuing included; 0 where devices compute.
  double cores = 0;

  bool operator==(const ContentionClass&) const = default;
};

struct ContentionModel {
  // Class 0 is that of ops without load.
  std::vector<ContentionClass> classes = std::vector<ContentionClass>(1);
  std::uint16_t resource_count = 0;
  double compute_sensitivity = 1;  // OverlapProfile::compute_sensitivity
  double collective_rate = 1;      // OverlapProfile::collective_rate
  double copies_both_ways = 1;     // CopyProfile::both_ways
  // The cores of a machine and the ranks on it, which all do the same; 0: not shared.
  double cores = 0;
  double ranks_on_cores = 1;
  double busy_cores = 0;  // OverlapProfile::busy_cores
  double core_turns = 0;  // OverlapProfile::core_turns

  bool operator==(const ContentionModel&) const = default;
};
inline constexpr std::size_t kMaxLinkResources = 32;

// Contention class of the op that runs on each stream; 0 where none runs.
using RunningClasses = std::array<std::uint8_t, kStreamCount>;
// Speed of each running op as a share of its speed alone, in (0, 1]; 1 where none runs.
using Speeds = std::array<double, kStreamCount>;

// O(streams^2 * links). Allocates nothing.
[[nodiscard]] Speeds SolveSpeeds(const ContentionModel& model, const RunningClasses& running);

struct SharedTime {
  Seconds time;
  double cores = 1;  // busy in the mean
};

// Time of work that takes `alone` on one core, shared by the threads of a rank: Amdahl's law with
// OverlapProfile::shared_work, and its loop_start. One thread does work that is not worth sharing,
// and everything where devices compute.
[[nodiscard]] SharedTime ShareAmongThreads(Seconds alone, const Cluster& cluster,
                                           const Profile& profile);

}  // namespace shardwright
