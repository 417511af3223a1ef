#pragma once

// How far the host runs ahead of the device. The engine lets it issue without bound; this gives the
// spans the host times of a real queue, which memory's replay and pictures of the host read.

#include <cstdint>
#include <vector>

#include "core/units.h"
#include "schedule/program.h"
#include "simulator/costs/price.h"
#include "simulator/engine.h"
#include "traces/trace.h"

namespace shardwright {

// Launches that a CUDA stream holds: at the next one the host waits until the oldest has ended.
// Observed by users of CUDA, in no document of NVIDIA: about 1,000 launches of one stream take 5 us
// each, later ones as long as the kernels (forums.developer.nvidia.com/t/68937, 2018).
inline constexpr std::int64_t kLaunchQueue = 1024;

// Delays the host times of `spans` (as from RunEngineWithSpans) by two rules. A stream holds
// kLaunchQueue launches. Where the training loop reads the loss (PriceTable::loop_work above 0),
// the host begins a step when the updates of the one before are over. Times of the device never
// change: ops that would start later for these rules are not moved. `stalls` is what the spans
// contain already; `period` tells the steps before the last one.
void HoldHostBack(const Program& program, const PriceTable& prices, const HostStalls& stalls,
                  SimTime period, std::vector<Span>& spans);

}  // namespace shardwright
