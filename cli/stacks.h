#pragma once

// Software stacks by name and date or version: the rows of bench/lab/stacks.json that have a name.
// Published tables and the command line read the same rows.

#include <optional>
#include <string>
#include <vector>

#include "models/kernel_set.h"

namespace shardwright {

// One row: the software of `name` before a date ("2025-04") or a version; both empty: until now.
struct StackRow {
  std::string name;  // "torchtitan", "torchtitan+compile"
  std::string before;
  std::string before_version;
  std::string kernel_set;
  std::optional<AttentionImpl> attention;  // none: the kernel set's
  std::string dialect;                     // how such runs shard
};

// In the order of the file. Of one name the first row that is late enough counts.
[[nodiscard]] const std::vector<StackRow>& Stacks();

// The row of "torchtitan+compile@2024-12", "transformers@5.24", or "torchtune", its latest; nothing
// for a kernel set's name, and for a word that begins with no stack's. Throws InputError at `where`
// for a date or a version that it cannot read.
[[nodiscard]] std::optional<StackRow> FindStack(const std::string& word, const std::string& where);

}  // namespace shardwright
