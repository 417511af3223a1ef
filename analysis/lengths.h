#pragma once

// Steps of samples that are not equally long: padded to the longest of their micro-batch, or packed
// into rows of the job's sequence length in which tokens see their own document alone.
//
// A step whose micro-batches are all alike is simulated as a whole, at a few sizes x: T(x). Padded,
// x is the length of the samples. Packed, x is how wide a sliding window leaves as many products of
// attention as the documents' masks do, both in the kernels' tiles; other ops work on whole rows.
// Between simulated sizes T is a straight line. An interval is halved until T in its middle is
// within 0.5 % of that line, or 5 times. Lengths that fill no whole tiles of kernels may be 1 %
// off.
//
// A step of unlike micro-batches takes the mean of T over them. Ranks that exchange anything in
// every micro-batch wait in each for the slowest rank; others wait for the slowest sum. That is
// exact for one micro-batch. With several, it leaves out what a long one hides of a short one.

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "core/units.h"
#include "schedule/plan_file.h"

namespace shardwright {

// So many samples have this many tokens.
struct LengthCount {
  std::int64_t length = 0;
  std::int64_t count = 0;

  bool operator==(const LengthCount&) const = default;
};

// By length, each length once.
using Lengths = std::vector<LengthCount>;

// A line per sample with its tokens, or per length "tokens count", apart by a blank or a comma.
// Empty lines say nothing. Throws InputError that names the line of `name`.
[[nodiscard]] Lengths ParseLengths(std::string_view text, const std::string& name);

// 10,000 quantiles of the lognormal distribution with this mean and 99th percentile, at least 1
// token each. None has a percentile below its mean, or above 14.9 times it: then empty.
[[nodiscard]] Lengths LognormalLengths(double mean, double p99);

struct StepsOfLengths {
  Seconds mean, p50, p99;
  double tokens_per_second_per_gpu = 0.0;  // of the data, without padding
  double padding = 0.0;                    // part of the computed tokens that is padding
  std::int64_t batches = 0;                // that were drawn
  std::int64_t simulated = 0;              // sizes
};

struct StepsByLength {
  StepsOfLengths padded;
  // Rows filled best fit, longest document first. None where a loss compares samples.
  std::optional<StepsOfLengths> packed;
};

// Draws batches of `lengths`, longer ones cut to the job's sequence length. Equal seeds give equal
// results. Throws InputError for a model that reads no sequences, or two of them, and for lengths
// that the model does not have. Costs 1 to 129 simulations without allocator each, mostly 9.
[[nodiscard]] StepsByLength SampleStepsByLength(const PlanFile& file, const Lengths& lengths,
                                                std::uint64_t seed);

}  // namespace shardwright
