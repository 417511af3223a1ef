#pragma once

// Fitting the numbers of profiles to published training runs. Runs on one chip (A100 of 40 and of
// 80 GB are one) by one framework are fitted together: stacks, which are a GPU type with a kernel
// set, share all numbers but a few.

#include <cstddef>
#include <cstdint>
#include <functional>
#include <map>
#include <set>
#include <string>
#include <vector>

#include "analysis/error_statistics.h"
#include "analysis/measured_run.h"
#include "topologies/profile.h"

namespace shardwright {

// What cross-validation leaves out, one after the other.
enum class FoldKind : std::uint8_t {
  kNone,
  kModel,   // in a group with one model: one number of GPUs; with one such number: one choice of
            // dtypes
  kSize,    // a model of one source, where that source has others in the group
  kSource,  // where the group has others
};

struct FitOptions {
  // Paths of the numbers to fit (NumberAt), at most eight; empty: DefaultFitNumbers().
  std::vector<std::string> numbers;
  // The numbers that each stack has for itself, at most two. Empty: the first of the defaults and
  // "compute.elementwise".
  std::vector<std::string> own;
  // One stack per GPU type, whatever the kernel sets: these then differ by their kernels alone, so
  // that a stack with fewer of them is never slower.
  bool one_per_gpu = false;
  FoldKind leave_out = FoldKind::kModel;
  // One line per fit, in the order in which they end, from any thread but one at a time; may be
  // empty.
  std::function<void(const std::string&)> progress;
};

[[nodiscard]] std::vector<std::string> DefaultFitNumbers();

// A number found for one stack.
struct FittedNumber {
  std::string path;
  double value = 0;  // a fraction, or seconds
  double lower = 0;  // bounds
  double upper = 0;
  double start = 0;  // what the profile said before
  bool is_own = false;
  bool is_time = false;
};

struct FittedStack {
  std::string gpu;         // GpuSpec::name
  std::string kernel_set;  // with FitOptions::one_per_gpu the framework: "torch"
  std::string base;        // the profile whose numbers it started from
  std::size_t rows = 0;
  std::map<std::string, std::size_t> rows_of;  // by kernel set
  std::set<std::string> sources;               // of all rows of its group
  std::vector<FittedNumber> numbers;
  ErrorStatistics errors;  // of its own rows, fitted
  // Relative half-width that all fitted numbers get: with it nine tenths of the errors of models
  // that were left out lie within the band that the numbers' spreads make.
  double spread = 0;
  double left_out_error = 0;  // mean of the absolute errors of its group's rows while left out
};

struct LeftOutModel {
  std::string gpus;  // GPU types of its group, such as "a100-40, a100-80"
  std::string family;
  std::string model;
  ErrorStatistics errors;
};

// A row predicted by numbers that were fitted without its model, or what else is left out.
struct LeftOutRow {
  std::string id;
  std::string source;
  double error = 0;  // predicted / measured - 1
};

struct RunFit {
  std::vector<FittedStack> stacks;
  std::vector<LeftOutModel> left_out;
  std::vector<LeftOutRow> left_out_rows;
  ErrorStatistics cross_validation;  // over all left_out_rows
  std::size_t skipped = 0;           // rows that cannot be used
  std::size_t evaluations = 0;       // simulations of all rows of a group
};

// Fits every group of rows (chip and framework) of at least four. Every row is lowered once;
// afterwards its program is priced and simulated anew for each set of numbers. The search is
// Gauss-Newton (errors are nearly linear in the logarithms of the numbers, and the robust sum of
// these straight lines is minimised by Minimise), then Minimise on the simulator itself. A fit
// without some rows starts from the base profiles like the one with all: nothing of the rows left
// out gets into it. Deterministic. Throws InputError when no group has enough rows, or for an
// unknown number.
[[nodiscard]] RunFit FitRuns(const std::vector<MeasuredRun>& runs, const FitOptions& options);

// A profile file for one fitted stack: what it extends and the numbers found. `source` says where
// the rows come from, `date` when they were read (YYYY-MM-DD).
[[nodiscard]] std::string FittedProfileJson(const FittedStack& stack, const std::string& source,
                                            const std::string& date);

}  // namespace shardwright
