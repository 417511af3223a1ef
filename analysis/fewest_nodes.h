#pragma once

// How many nodes a run needs to end in time.

#include <cstddef>
#include <cstdint>
#include <functional>
#include <optional>
#include <span>

#include "core/units.h"

namespace shardwright {

// Index of the first of `counts`, numbers of nodes in ascending order, whose run takes no longer
// than `deadline`; nothing where none does. `time_of` gives the time of a run, or nothing where the
// job does not fit. With more nodes a run is taken never to be slower, and a job that fits to fit
// still. Asked O(log n) times, three times where speed-up is linear; the count before the result is
// among those.
[[nodiscard]] std::optional<std::size_t> FirstInTime(
    std::span<const std::int64_t> counts, Seconds deadline,
    const std::function<std::optional<Seconds>(std::int64_t)>& time_of);

}  // namespace shardwright
