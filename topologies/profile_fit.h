#pragma once

// What the numbers of a shipped profile were fitted to: how far its predictions may be believed.

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

namespace shardwright {

struct ProfileFit {
  std::string gpu;                                         // GpuSpec::name of the runs
  std::vector<std::pair<std::string, std::int64_t>> runs;  // published ones, by kernel set
  // Who published them (MeasuredRun::Source), of all runs that told the numbers; may be empty in
  // profiles of others.
  std::vector<std::string> sources;
  // Mean of the absolute errors of all runs of that chip and framework, each predicted by numbers
  // that were fitted without its model.
  double left_out_error = 0;

  [[nodiscard]] bool Knows(std::string_view source) const;
  [[nodiscard]] std::int64_t RunCount() const;
  [[nodiscard]] std::int64_t RunCount(const std::string& kernel_set) const;
  bool operator==(const ProfileFit&) const = default;
};

// Of the shipped profile called `name`, or of the one that it extends; nothing where no run is
// behind its compute numbers. Requires a shipped name.
[[nodiscard]] std::optional<ProfileFit> FitOf(const std::string& name);

}  // namespace shardwright
