#pragma once

// The rows of a fit by chip and framework, with the numbers that are looked for.

#include <cstddef>
#include <map>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "analysis/fit_runs.h"
#include "analysis/measured_run.h"
#include "schedule/program.h"
#include "topologies/cluster.h"
#include "topologies/profile.h"

namespace shardwright {

// One number of one stack, or of all stacks of a group. The search works on logarithms.
struct Variable {
  std::string path;
  std::size_t stack = 0;
  bool is_shared = true;
  double lower = 0, upper = 0, start = 0;  // logarithms
  bool is_time = false;
  std::vector<std::size_t> follows = {};  // variables whose mean deviation this one shares
  // A shared number that stands, in each stack, as far from what the base profile says as the
  // stack's own number at this path does, besides its own deviation; empty: it is one value.
  std::string moves_with = {};
};

struct GroupRow {
  const MeasuredRun* run = nullptr;
  std::size_t stack = 0;
  Program program;
};

struct StackBase {
  std::string gpu;
  std::string kernel_set;
  Profile profile;
};

struct FitGroup {
  std::string gpus;    // the GPU types of its rows, such as "a100-40, a100-80"
  std::string family;  // first word of the kernel set
  std::vector<StackBase> stacks;
  std::vector<GroupRow> rows;
  std::vector<Variable> variables;
};

using FitGroups = std::map<std::pair<std::string, std::string>, FitGroup>;  // by chip and family

// Measured rows whose plan can be lowered; `runs` must outlive them. Counts the others.
[[nodiscard]] FitGroups MakeGroups(const std::vector<MeasuredRun>& runs, const FitOptions& options,
                                   std::size_t& skipped);

// Gives a group the numbers to fit, each for itself or for all stacks. Throws InputError for a
// number that the base profiles lack.
void AddVariables(const FitOptions& options, FitGroup& group);

// The logarithm of what variable `k` is in a stack at `point`.
[[nodiscard]] double LogValueAt(const FitGroup& group, std::size_t stack,
                                std::span<const double> point, std::size_t k);

// A stack's profile with the numbers at `point`, which is logarithms by variable.
[[nodiscard]] Profile ProfileAt(const FitGroup& group, std::size_t stack,
                                std::span<const double> point);

}  // namespace shardwright
