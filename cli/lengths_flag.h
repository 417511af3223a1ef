#pragma once

// --lengths: how long the samples are, and what steps of such samples take.

#include <string>

#include "analysis/lengths.h"
#include "cli/command.h"
#include "schedule/plan_file.h"

namespace shardwright {

// "lognormal:MEAN,P99", or a file as ParseLengths reads it. Throws UsageError and InputError.
[[nodiscard]] Lengths ReadLengths(const Flag& flag);

// With --lengths and no --seq, samples are as long as the longest.
[[nodiscard]] Arguments WithLongest(Arguments arguments);

// With --lengths, adds to a report the steps of such samples: behind a text, in JSON as "lengths".
[[nodiscard]] std::string WithLengths(const Arguments& arguments, const PlanFile& file,
                                      std::string report);

}  // namespace shardwright
