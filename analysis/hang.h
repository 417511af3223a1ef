#pragma once

// Why a job stands still: dumps of PyTorch's Flight Recorder of all ranks, held against each other
// and, if there is one, against the program of a plan. docs/hang.md explains what is compared.

#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "core/units.h"
#include "schedule/program.h"
#include "traces/flight_recorder.h"

namespace shardwright {

enum class HangKind : std::uint8_t {
  kNoDump,      // the rank left no dump, others wait for it: it died
  kSkipped,     // it went on without a collective that the others issued
  kExtra,       // it issued one that nobody else issued
  kSwapped,     // it issued two in the other order
  kOtherOp,     // another kind of collective
  kOtherSize,   // the same with another number of elements
  kOtherDtype,  // or another dtype
  kUndecided,   // ranks differ, and nothing tells which are right
  kLate,        // it has not come to a collective in which the others wait
  kAllWait,     // all issued the same, and it does not end
};
inline constexpr std::size_t kHangKindCount = 10;
[[nodiscard]] std::string_view NameOf(HangKind kind);

enum class HangPhase : std::uint8_t { kUnknown, kForward, kBackward, kOptimizer };
[[nodiscard]] std::string_view NameOf(HangPhase phase);

// A collective, as far as it is known.
struct HangCall {
  std::string op;             // "all-gather"
  std::int64_t elements = 0;  // of the whole array; 0: not compared, ranks may differ
  std::string dtype;          // "fp32"; empty: unknown
  HangPhase phase = HangPhase::kUnknown;
  std::string site;             // "train.py:17 in forward": the innermost frame of the user
  std::int64_t sequence = 0;    // in its group
  std::int64_t created = 0;     // nanoseconds since 1970; 0: never issued
  std::int64_t group_size = 0;  // as sizes of input and output tell; 0: they do not
  bool is_over = false;
  bool is_scheduled = false;  // the rank's GPU has not started it
  // Of the plan. Several units: neighbours of equal size, of which any may be meant.
  std::vector<std::string> units;
  std::int64_t micro_batch = -1;  // -1: unknown
  std::int64_t step = -1;         // since the recording began; -1: unknown
  std::int64_t place = -1;        // index of the op in the program's step; -1: unknown
};

struct HangFinding {
  HangKind kind = HangKind::kUndecided;
  std::vector<std::int64_t> ranks;  // that did it
  std::string group;                // "default_pg (0)"
  std::size_t group_size = 0;
  HangCall expected;              // what the others issued there; of kExtra: what nobody else did
  std::int64_t skipped = 1;       // kSkipped: how many, from `expected` on
  std::optional<HangCall> found;  // what the ranks issued there
  std::optional<HangCall> last;   // what they issued before
  std::vector<std::int64_t> waiting;
  std::int64_t since = 0;  // nanoseconds since 1970
};

struct HangReport {
  std::vector<std::int64_t> ranks;    // of the job, as far as the dumps tell
  std::vector<std::int64_t> missing;  // those without a dump
  std::size_t groups = 0;             // process groups with collectives
  std::int64_t collectives = 0;       // that all ranks of their group issued alike
  std::vector<HangFinding> findings;  // what began first comes first
  std::vector<std::string> notes;
};

// `program`: what the job runs; null: ranks are held against each other alone. A wait shorter than
// `patience` when the dumps were written is none: they are not written at the same moment.
// O(collectives * collectives of a step), at most about 10^8.
[[nodiscard]] HangReport DiagnoseHang(const std::vector<FlightDump>& dumps, const Program* program,
                                      Seconds patience);

// Whether a text has lines of PyTorch's NCCL watchdog, or is what ncclras prints.
[[nodiscard]] bool IsHangLog(std::string_view text);

// The same from such a text, where no dump was written: the collective that each rank gave up in,
// or how far it came. Less is known: of one group and one collective only. O(text).
[[nodiscard]] HangReport DiagnoseHangLog(std::string_view text, const Program* program);

}  // namespace shardwright
