#pragma once

// What the emulated GPU's kernels moved, besides what the harness compares.

#include <array>
#include <cstdint>

namespace shardwright::testing {

// Bytes of the op that ran last, forward and backward, between its kernels and memory behind a
// cache of 32 KiB: what is used again at once, such as a norm's weights, moves once.
extern std::array<std::int64_t, 2> last_moved;

}  // namespace shardwright::testing
