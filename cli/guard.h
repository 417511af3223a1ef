#pragma once

#include <functional>
#include <string>

namespace shardwright {

// Runs `body` and returns its exit code. An exception becomes one line on standard error and the
// exit code that cli/exit_codes.h gives its kind; nothing leaves this function.
int GuardedRun(const std::function<int()>& body);

// Says an error on standard error. Processes that RunLocalProcesses started share one standard
// error: there, what another one has said is not said again. kSaidVariable: the file of such texts,
// an open descriptor.
void SayOnce(const std::string& line);
inline constexpr const char* kSaidVariable = "SHARDWRIGHT_SAID";

}  // namespace shardwright
