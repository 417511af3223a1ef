#pragma once

// What a process of a run was given, in names and values that rank 0 compares before the first step
// (CheckAlike of executor/host/together.h). It comes from the command's tables, so that no flag can
// be forgotten.

#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "cli/command.h"
#include "executor/checkpoint/checkpoint.h"
#include "executor/data/dataset.h"
#include "executor/host/together.h"

namespace shardwright {

// What a flag's or a positional's file holds, by their names; compared last, in this order.
using Contents = std::vector<std::pair<std::string, RankFacts>>;

// {"job.global_batch", "16"} for each field of a document; lists and long texts as checksums.
[[nodiscard]] RankFacts FieldsOf(std::string_view json);
[[nodiscard]] RankFacts FactsOf(const Dataset& data);
// Of all of its files, by the checksums in the manifest.
[[nodiscard]] RankFacts FactsOf(const Checkpoint& checkpoint);

// The program's version, and all of the command's tables that is not Ranks::kAny. Files that
// `contents` does not have are compared by their bytes, or where they are none by their names.
[[nodiscard]] RankFacts FactsOf(const Arguments& arguments, const Contents& contents);

}  // namespace shardwright
