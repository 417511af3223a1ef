#pragma once

// Deferred initialisation: every element's first value is a function of (seed, parameter name,
// index of the element), so each rank fills its own shard, any sharding gives the same weights, and
// no rank ever holds the whole model.

#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "core/units.h"
#include "executor/model_op.h"
#include "executor/shard_map.h"
#include "models/model.h"

namespace shardwright {

struct InitRule {
  enum class Kind : std::uint8_t { kConstant, kUniform, kNormal };
  Kind kind = Kind::kConstant;
  double a = 0.0;  // the constant, the lower bound, or the mean
  double b = 0.0;  // the upper bound, or the standard deviation
  // Elements [zeros_begin, zeros_end) are zero: the padding row of an embedding.
  std::int64_t zeros_begin = 0, zeros_end = 0;

  bool operator==(const InitRule&) const = default;
};

// The rule of every parameter, by ParamId; aliases have the rule of their storage. Models of a
// known Hugging Face type follow that type's _init_weights with standard deviation `init_std`
// (none: what the model's config says), others the defaults of torch.nn (see docs/training.md for
// the table).
[[nodiscard]] std::vector<InitRule> InitRules(const Model& model, std::optional<double> init_std);

// Channels of the batch norm that runs in `module`; 0 when there is none.
[[nodiscard]] std::int64_t BatchNormChannels(const Model& model, ModuleId module);

// Key of a parameter's random numbers.
[[nodiscard]] std::uint64_t InitKey(std::uint64_t seed, const std::string& fqn);

// Elements [begin, begin + count) of a parameter, written as `dtype`. The values of one element in
// fp32 and in a 16-bit type differ by one rounding.
void FillParameter(const InitRule& rule, std::uint64_t key, std::int64_t begin, std::int64_t count,
                   DType dtype, void* out);

// Fills a whole shard: its pieces, and zeros in the padding. A value depends on its place only, so
// any number of threads gives the same. `part`: of the experts, where ranks share them out.
void InitializeShard(const Model& model, std::span<const InitRule> rules, std::uint64_t seed,
                     std::span<const ShardPiece> pieces, const View& shard, int threads = 1,
                     std::int64_t part = 0);

// First values of the model's non-parameter buffers (fp32, module after module): the running
// statistics of a batch norm, in PyTorch's order: running_mean zeros, running_var ones,
// num_batches_tracked 0. Other buffers: zeros.
void InitializeModelBuffers(const Model& model, std::span<float> buffers);

// Philox4x32-10 (Salmon et al., SC 2011): four random words from a 64-bit key and a 128-bit
// counter.
struct RandomWords {
  std::uint32_t word[4];
};
[[nodiscard]] RandomWords Philox(std::uint64_t key, std::uint64_t counter_low,
                                 std::uint64_t counter_high);

}  // namespace shardwright
