#pragma once

// Events of a file of PyTorch's profiler, one at a time, for who keeps of them what it needs.

#include <array>
#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "traces/internal/json_scanner.h"
#include "traces/internal/raw_recording.h"

namespace shardwright::internal {

// Fields of an event that count. Numbers stay text until they are needed.
enum class Field : std::uint8_t {
  kOther,
  kPhase,
  kCategory,
  kName,
  kTime,
  kDuration,
  kThread,
  kStream,
  kDevice,
  kCorrelation,
  kBytes,
  kCollective,
  kIn,
  kOut,
  kGroupSize,
  kDtype,
  kAllocated,
  kReserved,
  kDeviceType,
  kInputDims,
  kInputType,
  kScalars,
  kCount,
};

// One event of the list.
struct KinetoEvent {
  std::array<std::string, static_cast<std::size_t>(Field::kCount)> texts;
  std::array<bool, static_cast<std::size_t>(Field::kCount)> is_set{};
  std::int64_t largest_input = 0;        // elements of the largest of "Input Dims"
  std::array<OperandSizes, 4> inputs{};  // the first of "Input Dims"
  std::size_t input_count = 0;
  // One entry per input, where the sink wants them: elements, the type, and a scalar's text.
  std::vector<std::int64_t> elements;
  std::vector<std::string> types, scalars;

  [[nodiscard]] bool Has(Field field) const { return is_set[static_cast<std::size_t>(field)]; }
  [[nodiscard]] const std::string& Text(Field field) const {
    static const std::string kNothing;
    return Has(field) ? texts[static_cast<std::size_t>(field)] : kNothing;
  }
  void Set(Field field, std::string_view text) {
    texts[static_cast<std::size_t>(field)].assign(text);
    is_set[static_cast<std::size_t>(field)] = true;
  }
  void Clear() {
    is_set.fill(false);
    largest_input = 0;
    input_count = 0;
    elements.clear();
    types.clear();
    scalars.clear();
  }
};

// What is made of events. Ranks and the device may come before or after them.
class KinetoSink {
 public:
  virtual ~KinetoSink() = default;
  // Whether anybody reads the arguments of an event. Those of host ops, the most and the longest,
  // say shapes and strides.
  [[nodiscard]] virtual bool WantsArguments(const KinetoEvent& event) const = 0;
  // Whether KinetoEvent::elements and its like are wanted, too.
  [[nodiscard]] virtual bool WantsInputs() const { return false; }
  virtual void Add(const KinetoEvent& event) = 0;
  virtual void SetRank(std::int64_t /*rank*/) {}
  virtual void SetRanks(std::int64_t /*ranks*/) {}
  virtual void SetDevice(std::string_view /*name*/) {}  // the first one's
};

// Reads `file`, plain or gzip, into `sink`. Throws InputError for damaged files, and for those
// without a list of events.
void ReadKinetoEvents(const std::string& file, KinetoSink& sink);

// Bytes of one element by PyTorch's name of the dtype; 0: unknown.
[[nodiscard]] std::int64_t ElementSize(std::string_view dtype);

// Times and counts of the event with this number, in the list of `file`. Throw InputError for what
// is none; `name` is the field.
class KinetoNumbers {
 public:
  explicit KinetoNumbers(const std::string& file) : file_(file) {}
  // Microseconds with a fraction as whole nanoseconds, exactly: doubles do not hold those of clocks
  // that count from 1970.
  [[nodiscard]] std::int64_t Nanoseconds(const KinetoEvent& event, Field field,
                                         const char* name) const;
  [[nodiscard]] std::int64_t Count(const KinetoEvent& event, Field field, const char* name) const;
  // Begin and end.
  [[nodiscard]] RawSpan SpanOf(const KinetoEvent& event) const;
  void Next() { ++index_; }
  [[nodiscard]] std::int64_t index() const { return index_; }

 private:
  [[noreturn]] void Fail(const char* field, const std::string& found, const char* expected) const;

  std::string file_;
  std::int64_t index_ = 0;
};

}  // namespace shardwright::internal
