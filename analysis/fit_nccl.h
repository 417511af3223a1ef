#pragma once

// Fitting the network numbers of profiles to published collectives.

#include <cstdint>
#include <string>
#include <vector>

#include "analysis/error_statistics.h"
#include "analysis/nccl_sweep.h"
#include "topologies/profile.h"

namespace shardwright {

// One number of a profile that the fit may change.
struct NetworkNumber {
  std::string fabric;        // whose rows it explains; empty: shared by all
  std::string architecture;  // of the profiles that have it, empty: of all
  std::string profile;       // of one profile only; empty: of all
  std::string transport;     // row of `transports`; empty: a number of `host`
  std::string protocol;      // row of `protocols`; empty: a number of the transport itself
  std::string field;         // "efficiency", "base_latency", ...
  bool is_time = false;      // else a factor
  double lower = 0;          // bounds of the fit, in seconds for times
  double upper = 0;
  double expected = 0;        // where the rows do not tell; 0: nothing is expected
  double expected_width = 0;  // how far from it is no surprise
  double value = 0;           // found
};

// "roce: LL128 hop_latency".
[[nodiscard]] std::string NumberName(const NetworkNumber& number);

// One fabric, fitted on the others and predicted from its link rates.
struct LeftOutFabric {
  std::string fabric;
  std::string from;  // the fabrics whose numbers it was given
  ErrorStatistics above_64_mib;
  ErrorStatistics all;  // from 64 KiB to 16 GiB
};

struct NetworkFit {
  std::vector<NetworkNumber> numbers;
  ErrorStatistics errors;  // of the rows that were fitted
  std::int64_t evaluations = 0;
  std::vector<LeftOutFabric> left_out;
};

// Fits all numbers to the rows that IsScored; with `leave_out`, every fabric in turn is left out as
// well. Fabrics without rows keep the shipped numbers. Deterministic. Throws InputError when no row
// can be used. Seconds for some hundred rows.
[[nodiscard]] NetworkFit FitNetwork(const std::vector<SweepRow>& rows, bool leave_out);

// Fits what all-reduces and all-to-alls add to the numbers of gathers, which stay as shipped, to
// all sizes: inside nodes, then per network, then all-to-alls; rows below 64 KiB count a quarter.
// Deterministic. Throws InputError when no row can be used.
[[nodiscard]] NetworkFit FitAllReduce(const std::vector<SweepRow>& rows);

// Writes the found numbers into a profile, as far as they are meant for it, with `origin`.
void ApplyFit(const NetworkFit& fit, const Origin& origin, Profile& profile);

}  // namespace shardwright
