#pragma once

// `calibrate` with traces of PyTorch's profiler and no plan.

#include <string>
#include <vector>

#include "cli/command.h"

namespace shardwright {

// Are these files traces of PyTorch's profiler, all of them?
[[nodiscard]] bool AreKineto(const std::vector<std::string>& files);

// Writes the profile that the kernels of `files` tell, and says what they cover. Returns an exit
// code.
int CalibrateByCalls(const Arguments& arguments, const std::vector<std::string>& files,
                     const std::string& date);

}  // namespace shardwright
