// Tokens and heads on their way between ranks: what an exchange sends lies rank after rank, each
// part with the rows of all samples.
//
// Example: 2 samples of tokens 0 to 3, 2 ranks that cut layers. A scatter packs them as
// 0 1 | 0' 1' for rank 0, then 2 3 | 2' 3' for rank 1.

#include <cstddef>
#include <cstring>

#include "executor/host/kernels/kernels.h"
#include "executor/host/kernels/rows.h"

namespace shardwright {
namespace {

// The op's own tensor to the parts, or back.
void MoveRows(const ModelOpCall& call, bool is_backward) {
  const OpSpec& spec = *call.spec;
  const bool packs = call.part == OpPart::kBeforeExchange;
  const bool swaps = spec.kind == OpKind::kExchange;
  const std::int64_t ranks = swaps ? spec.context_ranks : spec.tensor_ranks;
  const std::int64_t tokens = swaps ? spec.rows : spec.rows / ranks;  // of a rank and a sample
  const View& own = call.outputs[0];
  const std::int64_t bytes = (swaps ? spec.in / ranks : spec.in) * SizeOf(call.compute);
  // Parts of the heads, for which the tokens of all ranks go, or come back.
  const bool is_of_heads = swaps && packs == (spec.transposed == is_backward);
  auto* const whole = static_cast<std::byte*>(packs ? const_cast<void*>(call.inputs[0].data)
                                                    : own.data);  // packing only reads
  ForEachPart(
      call.team, ranks * call.batch * tokens, LeastRows(spec.in),
      [&](std::int64_t first, std::int64_t last, std::size_t) {
        for (std::int64_t i = first; i < last; ++i) {
          const std::int64_t token = i % tokens, sample = i / tokens % call.batch;
          const std::int64_t rank = i / tokens / call.batch;
          const std::int64_t row =
              is_of_heads ? (sample * tokens + token) * ranks + rank
                          : sample * tokens * ranks +
                                (spec.context_ranks > 0 ? call.cut.PositionOf(rank, token, tokens)
                                                        : rank * tokens + token);
          std::byte* const part = call.exchange.data() + i * bytes;
          std::byte* const here = whole + row * bytes;
          std::memcpy(packs ? part : here, packs ? here : part, static_cast<std::size_t>(bytes));
        }
      });
}

}  // namespace

void MoveTokensForward(const ModelOpCall& call) {
  MoveRows(call, /*is_backward=*/false);
}

void MoveTokensBackward(const ModelOpCall& call) {
  MoveRows(call, /*is_backward=*/true);
}

}  // namespace shardwright
