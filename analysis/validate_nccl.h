#pragma once

// Predicted against published times of collectives.

#include <cstddef>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "analysis/error_statistics.h"
#include "analysis/nccl_sweep.h"
#include "simulator/costs/collectives.h"
#include "topologies/profile.h"

namespace shardwright {

// A sweep with all that prices depend on. The profiles may be changed afterwards (a fit does);
// prices follow. Movable, not copyable.
struct PreparedSweep {
  struct Entry {
    SweepRow row;
    std::string skip_reason;  // empty: the row is predicted
    // The rest is set for predicted rows.
    std::string fabric;
    OpCode op = OpCode::kAllGather;
    const Profile* profile = nullptr;
    CollectivePath path;
  };
  std::vector<Entry> entries;                                // in the file's order
  std::map<std::string, std::unique_ptr<Profile>> profiles;  // by name
};

// `profile` names the profile of all rows; empty: each GPU's default, or the one its system needs.
// Throws InputError when a row's profile lacks a number.
[[nodiscard]] PreparedSweep PrepareSweep(const std::vector<SweepRow>& rows,
                                         const std::string& profile);

// Time of a predicted row as nccl-tests would print it: no less than the host needs per call.
[[nodiscard]] Seconds PredictEntry(const PreparedSweep::Entry& entry);

// PredictEntry / measured - 1.
[[nodiscard]] double EntryError(const PreparedSweep::Entry& entry);

// Whether a row counts for the accuracy of gathers and reduce-scatters: those two collectives with
// 64 KiB to 16 GiB.
[[nodiscard]] bool IsScored(const PreparedSweep::Entry& entry);

// One line of the report: rows of one source, fabric and collective.
struct SweepGroup {
  std::string source;
  std::string fabric;
  std::string op;
  std::size_t rows = 0;
  ErrorStatistics errors;  // of rows with 64 KiB to 16 GiB; the count says how many
};

struct SkippedRows {
  std::string source;
  std::string reason;
  std::size_t rows = 0;
};

struct SweepReport {
  std::size_t rows = 0;
  std::vector<SweepGroup> groups;    // sorted by source, fabric, collective
  std::vector<SkippedRows> skipped;  // sorted by source and reason
  std::vector<SweepGroup> by_op;     // all sources together; source and fabric empty
  ErrorStatistics scored;            // all rows that IsScored
};

[[nodiscard]] SweepReport ReportSweep(const PreparedSweep& sweep);

}  // namespace shardwright
