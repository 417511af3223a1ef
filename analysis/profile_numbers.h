#pragma once

#include <string>
#include <string_view>
#include <vector>

#include "topologies/number.h"
#include "topologies/profile.h"

namespace shardwright {

// One number of a profile as a plain double (a fraction, or a time in seconds) with its origin.
struct NumberRef {
  double* value = nullptr;
  Origin* origin = nullptr;
  double* spread = nullptr;
  bool is_time = false;
};

// The number at "compute.gemm.bf16", "compute.elementwise", "host.step",
// "overlap.compute_sensitivity", "transports.nvlink.efficiency" and so on, as the keys of a profile
// file say. Throws InputError naming `where` for any other path. Points into `profile`.
[[nodiscard]] NumberRef NumberAt(Profile& profile, std::string_view path, const std::string& where);

// The paths that NumberAt accepts for this profile, sorted.
[[nodiscard]] std::vector<std::string> NumberPaths(const Profile& profile);

}  // namespace shardwright
