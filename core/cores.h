#pragma once

// How many cores a process may keep busy.

#include <optional>
#include <string>
#include <string_view>

namespace shardwright {

// The cores that this process may run on (taskset), and no more than its control groups' quota of
// CPU time (containers), so not always a whole number. 0: not known, as in a browser.
[[nodiscard]] double AvailableCores();

// The smallest quota of CPU time, in cores, of the control groups of a process and of those around
// them; nothing where none has one. `groups` is the text of /proc/<pid>/cgroup, `root` where the
// control groups are mounted (version 1 with "cpu" below it, or version 2).
[[nodiscard]] std::optional<double> QuotaOfGroups(std::string_view groups, const std::string& root);

}  // namespace shardwright
