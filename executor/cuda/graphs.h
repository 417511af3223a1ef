#pragma once

// Which ops of a step the CUDA device may launch as one graph.

#include <cstdint>
#include <span>
#include <vector>

#include "executor/device.h"
#include "schedule/program.h"

namespace shardwright {

// Stretches of at least two ops of the compute stream, in its order. Only the first op of a stretch
// waits for other streams, only the last is waited for by them, by the host or by the next step,
// and nothing that the host runs lies between. So all may be launched when the first is issued, and
// nobody waits longer than without. No op of a stretch uses a number that changes by step: dropout,
// losses, updates, and with a loss scale norms and clipping stay outside.
// `works`: by op of `body`; stream, call and poison are read. O(ops + edges).
[[nodiscard]] std::vector<std::vector<std::uint32_t>> FindStretches(const Body& body,
                                                                    std::span<const Work> works,
                                                                    bool scales_loss);

}  // namespace shardwright
