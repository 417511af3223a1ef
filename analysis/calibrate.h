#pragma once

// Profiles from traces: the numbers that price a plan's ops, chosen so that they price them as
// measured. docs/compare.md, section "Calibrating".

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "analysis/calibration_samples.h"
#include "core/units.h"
#include "topologies/number.h"
#include "topologies/profile.h"

namespace shardwright {

// One number that the traces tell.
struct CalibratedNumber {
  std::string field;     // "compute.gemm.fp32", "transports.nvlink.efficiency"
  bool is_time = false;  // seconds; otherwise a fraction
  double before = 0;
  double after = 0;
  double spread = 0;      // median absolute relative error of the ops that depend on it
  std::int64_t rows = 0;  // op shapes that depend on it
};

// Of one trace: what the profile says of it before and after.
struct CalibratedRun {
  std::string name;
  Seconds measured;
  Seconds before, after;  // simulated step times, with the start profile and with the new one
};

// A profile that is right moves by less than this part of the step when it is calibrated again.
inline constexpr double kWorseCalibration = 0.005;

struct CalibrationResult {
  Profile profile;
  std::vector<CalibratedNumber> numbers;
  std::vector<CalibratedRun> runs;
  // Transports of which all measured collectives had about one size, so that their rate and their
  // latencies cannot be told apart: `profile` has it that what matters more by the start profile
  // changed. Under `other`, which says the same of these collectives, half of that is the other's.
  std::vector<std::string> of_one_size = {};
  std::optional<Profile> other = {};

  // Are the step times of these runs, on the whole, further off than before? Compares the means of
  // the absolute relative errors, which may grow by kWorseCalibration. False without runs.
  [[nodiscard]] bool IsWorse() const;
};

// Starts from `start`; numbers that no op of the traces depends on keep its values and origins, the
// others get `origin` and their spread. Throws InputError for a trace without a complete step, or
// one that does not fit the cluster. Requires at least one run.
[[nodiscard]] CalibrationResult Calibrate(const std::vector<CalibrationRun>& runs,
                                          const Profile& start, const Origin& origin);

// What to say of a transport of_one_size.
[[nodiscard]] std::string OneSizeNote(std::string_view transport);

// Its parts, in this order: fill numbers of `profile` from the samples and list what they found.
// What part of their work ops share, and what that costs, is told by runs with several threads a
// rank. Their samples lose their seconds where an equal op of one thread tells what it computes.
void CalibrateSharedWork(const std::vector<CalibrationRun>& runs, CalibrationSamples& samples,
                         const Origin& origin, Profile& profile,
                         std::vector<CalibratedNumber>& numbers);
// What busy cores cost, told by runs that keep more and fewer of them busy, and what it costs that
// ranks take turns on them are taken out of the samples.
void CalibrateBusyCores(const std::vector<CalibrationRun>& runs, CalibrationSamples& samples,
                        const Origin& origin, Profile& profile,
                        std::vector<CalibratedNumber>& numbers);
void CalibrateKernels(const std::vector<CalibrationRun>& runs, const CalibrationSamples& samples,
                      const Origin& origin, Profile& profile,
                      std::vector<CalibratedNumber>& numbers);
void CalibrateHost(const std::vector<CalibrationRun>& runs, const CalibrationSamples& samples,
                   const Origin& origin, Profile& profile, std::vector<CalibratedNumber>& numbers);
void CalibrateCopies(const std::vector<CalibrationRun>& runs, const CalibrationSamples& samples,
                     const Origin& origin, Profile& profile,
                     std::vector<CalibratedNumber>& numbers);
// Returns transports as CalibrationResult::other has them, for those of_one_size.
[[nodiscard]] std::vector<TransportProfile> CalibrateCollectives(
    const std::vector<CalibrationRun>& runs, const CalibrationSamples& samples,
    const Origin& origin, Profile& profile, std::vector<CalibratedNumber>& numbers);

}  // namespace shardwright
