#pragma once

// How well predictions agree with published runs: error statistics per source and GPU class, and
// how many runs that ended out of memory are foretold.

#include <cstddef>
#include <functional>
#include <string>
#include <vector>

#include "analysis/error_statistics.h"
#include "analysis/measured_run.h"
#include "analysis/predict_run.h"

namespace shardwright {

struct ValidateOptions {
  std::string profile = "auto";               // see MapRun
  std::vector<std::string> tiers = {"A"};     // rows of other tiers are skipped; rows without count
  bool bands = false;                         // also the band of every row; about 25 times the work
  std::function<void(std::size_t)> progress;  // called with the number of rows done; may be empty
};

// One row and what became of it.
struct ValidatedRow {
  MeasuredRun run;
  std::string skipped;  // why there is no prediction; empty: there is one
  std::vector<std::string> notes;
  std::string profile;  // name
  RunPrediction prediction;

  // predicted / measured - 1. Of memory against the mean over all rows that agree in every column
  // but the measured ones (`twins`, this row included), because no model can tell them apart.
  bool has_step_time = false;
  double measured_step_time_s = 0;
  double step_time_error = 0;
  double band = 0;  // ConfidenceOf, where asked for
  bool has_memory = false;
  double predicted_memory_gib = 0;
  double measured_memory_gib = 0;  // mean of the twins
  double memory_error = 0;
  std::size_t twins = 1;
};

struct ValidatedGroup {
  std::string source;
  std::string gpu_class;
  std::size_t rows = 0;  // predicted
  std::size_t skipped = 0;
  ErrorStatistics step_time;
  // Part of the rows whose measured time lies in predicted * (1 +- band), and the median band;
  // 0 where bands were not asked for.
  double band_coverage = 0;
  double band_median = 0;
  ErrorStatistics allocated;
  ErrorStatistics reserved;
  ErrorStatistics device;  // of all processes, as nvidia-smi shows it
};

// Rows that agree in every column except what they measured.
struct TwinGroup {
  std::vector<std::string> ids;
  // (largest - smallest) / mean of what was measured; 0 where fewer than two rows have it.
  double step_time_spread = 0;
  double memory_spread = 0;
};

struct OutOfMemoryScore {
  std::size_t rows = 0;  // predicted rows with a known outcome, copies left out
  std::size_t skipped = 0;
  std::size_t oom = 0;        // rows that ended out of memory
  std::size_t oom_found = 0;  // of those, the ones foretold
  std::size_t fits = 0;       // rows that ran
  std::size_t false_alarms = 0;
  std::size_t presumed = 0;  // rows that failed for an unpublished reason
  std::size_t presumed_found = 0;

  [[nodiscard]] double Recall() const;  // 0 without rows
  [[nodiscard]] double FalseAlarmRate() const;
};

struct ValidationReport {
  std::vector<ValidatedRow> rows;       // in the order of the table
  std::vector<ValidatedGroup> groups;   // by source and GPU class, sorted
  std::vector<ValidatedGroup> sources;  // by source, gpu_class empty, sorted
  ValidatedGroup pooled;
  std::vector<TwinGroup> twins;  // in the order of their first rows
};

// Predicts every row. Deterministic; uses all processors. Throws InputError for a bad profile.
[[nodiscard]] ValidationReport Validate(const std::vector<MeasuredRun>& runs,
                                        const ValidateOptions& options);

struct OutOfMemoryReport {
  std::vector<ValidatedRow> rows;
  OutOfMemoryScore score;
};

// The same for runs of which only the outcome is known. Rows whose id starts with "oom-ref" are
// copies of measured runs: they are predicted, but do not count. A row without tokens per sample
// takes the step time and throughput, which tell them, from the run of `measured` that is the same
// job (of several the one with the most tokens), whatever its tier.
[[nodiscard]] OutOfMemoryReport ValidateOutcomes(const std::vector<MeasuredRun>& outcomes,
                                                 const std::vector<MeasuredRun>& measured,
                                                 const ValidateOptions& options);

// Every column that a prediction may depend on, as one text: equal for twins.
[[nodiscard]] std::string ConfigurationKey(const MeasuredRun& run);

}  // namespace shardwright
