// Updates and norms of gradients.
//
// Example of an update: a shard with 20 ranges, such as parameters with and without weight decay. A
// launch takes 16 ranges, so two launches are made, of 16 and 4 ranges.
//
// Example of a norm: ranges of 300,000 and 100,000 gradients. A partial sum covers 2^17 = 131,072
// elements, so there are 3 + 1 partial sums, and NormKernel adds 4 numbers.

#include "executor/cuda/kernels/update.h"

#include <cstdint>

#include "executor/cuda/kernels/sums.h"
#include "executor/cuda/ops/launch.h"

namespace shardwright {
namespace {

// Stretches of a norm: one partial sum each.
constexpr std::int64_t kSquaresPerBlock = std::int64_t{1} << 17;

}  // namespace

void SubmitShardUpdate(const OptimizerCall& call, const OptimizerOptions& options,
                       const OpContext& context) {
  gpu::UpdateArgs args;
  args.kind = call.spec.kind;
  args.dtype = call.dtype;
  args.rounds_each = call.spec.impl != OptimizerImpl::kFused && call.dtype != DType::kFp32;
  args.params = call.params;
  args.grads = call.grads;
  args.states[0] = call.states[0];
  args.states[1] = call.states[1];
  std::int64_t blocks = 0;
  const auto launch = [&] {
    LaunchKernel<gpu::UpdateKernel>(context.gpu, context.stream, blocks, 0, args);
    args.range_count = 0;
    blocks = 0;
  };
  for (const OptimizerRange& range : call.ranges) {
    if (range.count == 0) {
      continue;
    }
    args.ranges[args.range_count] = {range.param_offset, range.grad_offset, range.state_offset,
                                     range.count,
                                     MakeUpdateScalars(call, options, range.weight_decay)};
    args.first_block[args.range_count++] = blocks;
    blocks += CeilDiv(range.count, gpu::UpdateKernel::kPerBlock);
    if (args.range_count == gpu::kMostRanges) {
      launch();
    }
  }
  launch();
}

std::int64_t NormPartials(std::span<const ElementRange> gradients) {
  std::int64_t count = 0;
  for (const ElementRange& range : gradients) {
    count += CeilDiv(range.count, kSquaresPerBlock);
  }
  return count;
}

void SubmitGradientNorm(std::span<const ElementRange> gradients, double divisor, double* partial,
                        float* norm, const OpContext& context) {
  std::int64_t first = 0;
  for (const ElementRange& range : gradients) {
    const std::int64_t blocks = CeilDiv(range.count, kSquaresPerBlock);
    ops::LaunchBlocks<gpu::SquaresKernel, double>(context, blocks,
                                                  {.x = {range.data, range.dtype},
                                                   .n = range.count,
                                                   .per_block = kSquaresPerBlock,
                                                   .partial = partial + first});
    first += blocks;
  }
  ops::LaunchBlocks<gpu::NormKernel, double>(
      context, 1, {.partial = partial, .count = first, .divisor = divisor, .norm = norm});
}

}  // namespace shardwright
