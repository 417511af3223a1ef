#pragma once

// Values of flags as text. Every function throws UsageError("<flag>: got "<text>", expected ...").

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "schedule/plan.h"
#include "schedule/plan_names.h"
#include "schedule/wrap.h"

namespace shardwright {

// Largest values that counts on the command line may have.
inline constexpr std::int64_t kMaxRanks = std::int64_t{1} << 24;
inline constexpr std::int64_t kMaxSequence = std::int64_t{1} << 24;  // ModelLimits::kTokens

struct Flag {
  std::string name;  // "--nodes"
  std::string text;  // empty: not given
  [[nodiscard]] bool is_given() const { return !text.empty(); }
};

[[noreturn]] void RefuseFlag(const Flag& flag, const std::string& expected);

[[nodiscard]] std::int64_t ReadCount(const Flag& flag, std::int64_t min, std::int64_t max);
// A whole number of at least `min`, as 500000000 or 5e8: elements, tokens.
[[nodiscard]] std::int64_t ReadWholeNumber(const Flag& flag, std::int64_t min);
[[nodiscard]] double ReadFraction(const Flag& flag);
[[nodiscard]] double ReadPositive(const Flag& flag, double max);
[[nodiscard]] Bytes ReadBytes(const Flag& flag);
[[nodiscard]] BytesPerSecond ReadRate(const Flag& flag);
// "90 s", "20000 h": up to 1e12 s, since years are possible here, unlike in simulated times.
[[nodiscard]] Seconds ReadTime(const Flag& flag, bool may_be_zero);
// How long a rank waits for the others, above 0, rounded up.
[[nodiscard]] std::chrono::milliseconds ReadTimeout(const Flag& flag);
// The day as --date has it, by the machine's clock.
[[nodiscard]] std::string Today();
// "2026-11-21".
[[nodiscard]] std::string ReadDate(const Flag& flag);
[[nodiscard]] std::size_t ReadChoice(const Flag& flag, NameList names);
// "on" or "off".
[[nodiscard]] bool ReadSwitch(const Flag& flag);
// "a,b,c"
[[nodiscard]] std::vector<std::string> ReadList(const Flag& flag);

// "bf16-mixed", "fp16-mixed", "bf16", "fp32", or "master/param/reduce" such as "fp32/bf16/bf16".
[[nodiscard]] Precision ReadPrecision(const Flag& flag);
[[nodiscard]] Fp8Products ReadFp8Products(const Flag& flag);    // of a precision, "bf16+fp8" say
[[nodiscard]] FrozenFormat ReadFrozenFormat(const Flag& flag);  // of a precision, "bf16+nf4" say
// "adamw", or with the implementation "adamw:fused".
[[nodiscard]] OptimizerSpec ReadOptimizer(const Flag& flag);
// As PYTORCH_ALLOC_CONF: "expandable_segments:True,max_split_size_mb:512".
[[nodiscard]] AllocatorSettings ReadAllocator(const Flag& flag);
// "none", or some of "parameters,optimizer,activations".
[[nodiscard]] Offload ReadOffload(const Flag& flag);
// "always", "never", "step" (never, and not after backward but the last) or the ranks of a group.
[[nodiscard]] ReshardChoice ReadReshard(const Flag& flag);
// "64", "64,ep=8", "64,tp=8", "tp=8:async", "64,cp=4", "cp=4:ring", "ep=8", "64,pp=4:gpipe" or
// "pp=4x2:even".
struct ShardChoice {
  std::int64_t size = 0;     // 0: not said
  std::int64_t experts = 1;  // ranks that share the experts of a mixture
  std::int64_t tensor = 1;   // ranks that cut every layer
  bool tensor_async = false;
  std::int64_t context = 1;  // ranks that have tokens of the same samples
  ContextMethod method = ContextMethod::kGather;
  std::int64_t pipeline = 1;  // ranks with other layers each
  std::int64_t stages = 1;    // of each of them
  std::int64_t edge_layers = 1;
  PipelineSchedule schedule = PipelineSchedule::k1F1B;
};
[[nodiscard]] ShardChoice ReadShard(const Flag& flag);
// Sets what a step does: a word, of grpo with others behind it: "grpo,completion=1024,beta=0.04".
void ReadMode(const Flag& flag, Job& job);

// A rule or a file of units (ParseWrap); the file is read later.
[[nodiscard]] WrapSpec ReadWrap(const Flag& flag);

// "none", "full", "selective" (keeps every second linear, as torchtitan) or "selective:N".
struct RecomputeChoice {
  bool is_on = false;
  RecomputeKind kind = RecomputeKind::kFull;
  std::int64_t keep_every = 1;
  double part = 1;  // of the blocks, evenly spread
};
[[nodiscard]] RecomputeChoice ReadRecompute(const Flag& flag);

}  // namespace shardwright
