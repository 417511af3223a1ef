#pragma once

// Measures what blocks and the rest of a model cost under each checkpointing pattern, in seconds
// and bytes, on a few lowered programs. The bounds and the choice of patterns start from it.
//
// Example: llama-3-8b has 32 blocks with the same ops, one BlockClass. With 5 patterns it has 5
// costs: how many seconds a block takes more than without checkpointing, and the bytes it keeps.

#include <array>
#include <cstdint>
#include <optional>
#include <vector>

#include "planner/search.h"
#include "planner/space.h"

namespace shardwright {

// Kernels by the part of the memory bandwidth that they use, in sixteenths, as the simulator's
// contention classes; nothing else about a kernel decides how much it is slowed.
inline constexpr std::size_t kLoadCount = 17;

// Work of one micro-batch.
struct Work {
  std::array<double, kLoadCount> seconds{};  // on the compute stream, alone, by load
  double issue = 0;                          // host seconds

  [[nodiscard]] double Total() const;
  void Add(const Work& other, double times = 1);
};

// One block under one pattern, forward and backward.
struct BlockCost {
  Work work;
  double kept_bytes = 0;  // activations that exist from its forward to its backward
  // With offloaded activations: those that stay on the device, and those that are copied.
  double staying_bytes = 0;
  double copied_bytes = 0;

  [[nodiscard]] double BytesOnDevice(bool offloads) const {
    return offloads ? staying_bytes : kept_bytes;
  }
};

// Blocks with the same ops and parameters that compute and keep as much as the last of them.
struct BlockClass {
  std::vector<std::size_t> blocks;  // into Space::blocks, ascending
  std::vector<BlockCost> costs;     // by pattern; work is relative to the first pattern's ("none")

  [[nodiscard]] std::size_t FromLast(std::size_t i) const { return blocks[blocks.size() - 1 - i]; }
};

struct Measured {
  Work base;     // the whole model without checkpointing (or as the job fixes it)
  Work forward;  // of it
  // Of `forward`, and of the rest: from the last op that reads parameters in forward to the first
  // that writes their gradients.
  Work turn_forward, turn_backward;
  // Bytes on top of the blocks' kept activations that exist at some moment between the last block's
  // forward and its backward: logits, their gradients, the head's weights and gradients.
  double tail_bytes = 0;
  double staying_tail_bytes = 0;  // the same with offloaded activations
  // Parameters, and their gradients, that exist while the widest op runs, under every plan.
  double widest_op_bytes = 0;
  double first_elements = 0;     // of the parameters that the first op of forward reads
  double first_trainable = 0;    // of the trainable ones among them
  double last_elements = 0;      // of those whose gradients the last op of backward writes
  bool last_has_params = false;  // that op reads parameters
  double backward_elements = 0;  // of the parameters whose ops have a backward
  // Offloaded activations of all blocks are copied but for at most `read_by_tail` bytes; else all
  // but those of one block.
  bool all_blocks_copy = false;
  double read_by_tail = 0;
  std::vector<BlockClass> classes;
  std::vector<bool> pattern_is_allowed;  // by pattern
};

// Costs at `micro_batch`. Lowers a few programs, each of which tries another pattern in each block.
// With a `rank`, the model is what that rank of a pipeline has; without one, there is no pipeline.
[[nodiscard]] Measured Measure(const Problem& input, const SearchOptions& options,
                               const Space& space, std::int64_t micro_batch,
                               std::optional<std::int64_t> rank = {});

}  // namespace shardwright
