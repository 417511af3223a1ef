#pragma once

// How well what was recorded is a run of a plan: matrix products, attention calls, convolutions
// and collectives of one step, counted on both sides. docs/compare.md, "Is it a run of this plan?".

#include <cstdint>
#include <string>
#include <vector>

#include "schedule/program.h"
#include "traces/recording.h"

namespace shardwright {

// What one side has more of than the other, per step.
struct MatchDifference {
  std::string what;  // "product 2,048 x 4,096 x 14,336"
  std::int64_t count = 0;
};

// How the calls of a group are told apart.
enum class MatchedBy : std::uint8_t {
  kSizes,    // equal only with equal sizes
  kNumber,   // sizes were not recorded: only how many there are
  kKernels,  // no calls were recorded: how many kernels have such names, which is a guess
};

// One kind of calls; counts are those of one rank and step, means over all that were recorded.
struct MatchGroup {
  std::string name;  // "matrix products"
  MatchedBy by = MatchedBy::kSizes;
  double planned = 0;
  double recorded = 0;
  double matched = 0;
  double score = 0;                      // 0: nothing is alike; 1: the same calls
  std::vector<MatchDifference> missing;  // the plan has them; most work first
  std::vector<MatchDifference> extra;    // the recording has them

  [[nodiscard]] bool IsEnough() const;
};

struct RunMatch {
  std::vector<MatchGroup> groups;  // those that either side has

  [[nodiscard]] bool IsRun() const;  // all groups are enough
  // "not a run of this plan: 4 of 132 matrix products match, 18 of 18 attention calls, ...".
  [[nodiscard]] std::string Verdict() const;
};

// Of each group at least this part must be alike.
inline constexpr double kLeastMatch = 0.9;
// The same where kernels are told by their names: a product can be several kernels.
inline constexpr double kLeastKernelMatch = 0.5;

// `recordings`: one per rank. Throws InputError for one without a step.
[[nodiscard]] RunMatch MatchRecordings(const Program& program,
                                       const std::vector<ProfilerRecording>& recordings);

// `ran`: the program that our own trace says it ran.
[[nodiscard]] RunMatch MatchPrograms(const Program& program, const Program& ran);

}  // namespace shardwright
