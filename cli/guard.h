#pragma once

#include <functional>

namespace shardwright {

// Runs `body` and returns its exit code. An exception becomes one line on standard error and the
// exit code that cli/exit_codes.h gives its kind; nothing leaves this function.
int GuardedRun(const std::function<int()>& body);

}  // namespace shardwright
