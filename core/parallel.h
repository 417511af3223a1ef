#pragma once

// A loop whose iterations several threads share.

#include <cstddef>
#include <functional>

namespace shardwright {

// `wanted`; 0: as many as the machine runs at a time. At least 1.
[[nodiscard]] std::size_t ThreadCount(int wanted = 0);

// Calls task(i, worker) for i in [0, count), in rising order of their starts, on the calling thread
// and up to `threads` - 1 others; `worker` < `threads` is the same for the calls of one thread.
// Returns when all are done. When tasks throw, no further ones start, and the exception of the
// lowest i is rethrown: the same one for any number of threads.
void ParallelFor(std::size_t count, std::size_t threads,
                 const std::function<void(std::size_t i, std::size_t worker)>& task);

}  // namespace shardwright
