#pragma once

// Where in training the host is at one moment, told by the ranges that frameworks record.

#include <cstdint>
#include <string>
#include <string_view>
#include <unordered_map>
#include <vector>

#include "traces/internal/raw_recording.h"
#include "traces/recording.h"

namespace shardwright::internal {

struct TrainingPlace {
  std::uint32_t step = 0;
  std::uint32_t unit = kNoSubject;
  std::uint16_t micro_batch = 0;
  Phase phase = Phase::kForward;
};

// Follows the ranges of all threads in the order of time: the thread of the model and that of
// autograd take turns, so that one state is enough.
class PlaceFinder {
 public:
  // Refers to `raw`, which must outlive it. The steps are those of ProfilerStep ranges; without
  // any, each ends with its optimizer; without that, all is one step.
  explicit PlaceFinder(const RawRecording& raw);

  // The place at `time`. Times of successive calls ascend.
  [[nodiscard]] TrainingPlace At(std::int64_t time);

  [[nodiscard]] const std::vector<RawSpan>& steps() const { return steps_; }
  [[nodiscard]] const std::vector<std::string>& units() const { return units_; }
  [[nodiscard]] bool has_units() const { return has_units_; }
  [[nodiscard]] const std::string& note() const { return note_; }

 private:
  enum class Mark : std::uint8_t {
    kRootPreForward,
    kPreForward,
    kPostForward,
    kPreBackward,
    kPostBackward,  // one of the ranges after a unit's backward
    kRootPostBackward,
    kInside,    // work for the unit, whatever else goes on: gathers, prefetched or not, and copies
    kAutograd,  // backward of one op
    kOptimizer,
    kNone,
  };
  struct Edge {
    std::int64_t time = 0;
    std::uint32_t order = 0;  // of equal times: as the ranges come, ends before begins
    std::uint32_t unit = kNoSubject;
    Mark mark = Mark::kNone;
    bool is_begin = false;
  };

  [[nodiscard]] static Mark MarkOf(std::string_view name, std::string_view& unit);
  [[nodiscard]] std::uint32_t UnitNumber(std::string_view name);
  void FindSteps();
  void AddEdges();
  void Apply(const Edge& edge);
  void BeginStep(std::uint32_t step);
  void BeginForward();
  void EndBackward();
  void PushUnit(std::uint32_t unit);
  void PopUnit(std::uint32_t unit);
  void ClearUnits();

  const RawRecording& raw_;
  std::vector<RawSpan> steps_;
  std::vector<Edge> edges_;
  std::vector<std::string> units_;
  std::unordered_map<std::string, std::uint32_t> unit_numbers_;
  std::uint32_t root_ = kNoSubject;
  bool has_units_ = false;
  std::string note_;

  std::size_t next_ = 0;  // edge
  std::uint32_t step_ = 0;
  bool in_step_ = false;
  // Units whose forward or backward goes on. One that ends below others stays until these have
  // ended, too, with no mark; the last one always has its mark.
  std::vector<std::uint32_t> stack_;
  std::vector<bool> is_on_stack_;
  std::vector<std::uint32_t> inside_;  // units of open kInside ranges
  std::uint32_t micro_batch_ = 0;
  bool in_backward_ = false;  // with units
  bool after_backward_ = false;
  std::uint32_t autograd_ = 0;  // open ranges
  std::uint32_t optimizer_ = 0;
};

}  // namespace shardwright::internal
