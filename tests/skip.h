#pragma once

#include <string_view>

namespace shardwright {

// Notes that a test case could not run here and why (a missing GPU, tool or file); the caller then
// returns. The test program prints the reasons and, when nothing failed, ends with kSkipExitCode,
// which ctest reports as a skipped test. A failed check in the same program still fails it.
void SkipTest(std::string_view reason);

inline constexpr int kSkipExitCode = 77;  // SKIP_RETURN_CODE in cmake/Shardwright.cmake.

}  // namespace shardwright
