#include "traces/kineto.h"

#include <algorithm>
#include <array>
#include <charconv>
#include <cstdint>
#include <optional>
#include <span>
#include <string_view>
#include <utility>

#include "core/error.h"
#include "core/portable.h"
#include "traces/internal/json_scanner.h"
#include "traces/internal/raw_recording.h"

namespace shardwright {
namespace {

using internal::JsonScanner;
using internal::RawRecording;
using internal::RawSpan;
using internal::RawWork;

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
  kCount,
};

struct FieldName {
  std::string_view name;
  Field field;
};
constexpr std::array kEventFields = {
    FieldName{"ph", Field::kPhase},     FieldName{"cat", Field::kCategory},
    FieldName{"name", Field::kName},    FieldName{"ts", Field::kTime},
    FieldName{"dur", Field::kDuration}, FieldName{"tid", Field::kThread},
};
constexpr std::array kArgFields = {
    FieldName{"stream", Field::kStream},
    FieldName{"device", Field::kDevice},
    FieldName{"correlation", Field::kCorrelation},
    FieldName{"bytes", Field::kBytes},
    FieldName{"Collective name", Field::kCollective},
    FieldName{"In msg nelems", Field::kIn},
    FieldName{"Out msg nelems", Field::kOut},
    FieldName{"Group size", Field::kGroupSize},
    FieldName{"dtype", Field::kDtype},
    FieldName{"Total Allocated", Field::kAllocated},
    FieldName{"Total Reserved", Field::kReserved},
    FieldName{"Device Type", Field::kDeviceType},
    FieldName{"Input Dims", Field::kInputDims},
    FieldName{"Input type", Field::kInputType},
};

template <std::size_t N>
Field FindField(const std::array<FieldName, N>& fields, std::string_view name) {
  for (const FieldName& row : fields) {
    if (!name.empty() && row.name[0] == name[0] && row.name == name) {
      return row.field;
    }
  }
  return Field::kOther;
}

// Bytes of one element by PyTorch's name of the dtype; 0: unknown.
std::int64_t ElementSize(std::string_view dtype) {
  static constexpr std::array kSizes = {
      std::pair{std::string_view("Double"), 8},
      std::pair{std::string_view("double"), 8},
      std::pair{std::string_view("Long"), 8},
      std::pair{std::string_view("long int"), 8},
      std::pair{std::string_view("Float"), 4},
      std::pair{std::string_view("float"), 4},
      std::pair{std::string_view("Int"), 4},
      std::pair{std::string_view("int"), 4},
      std::pair{std::string_view("BFloat16"), 2},
      std::pair{std::string_view("c10::BFloat16"), 2},
      std::pair{std::string_view("Half"), 2},
      std::pair{std::string_view("c10::Half"), 2},
      std::pair{std::string_view("Byte"), 1},
      std::pair{std::string_view("Char"), 1},
      std::pair{std::string_view("Bool"), 1},
      std::pair{std::string_view("Float8_e4m3fn"), 1},
      std::pair{std::string_view("Float8_e5m2"), 1},
  };
  const auto* const found = std::find_if(kSizes.begin(), kSizes.end(),
                                         [&](const auto& row) { return row.first == dtype; });
  return found == kSizes.end() ? 0 : found->second;
}

// One event of the list.
struct Event {
  std::array<std::string, static_cast<std::size_t>(Field::kCount)> texts;
  std::array<bool, static_cast<std::size_t>(Field::kCount)> is_set{};
  std::int64_t largest_input = 0;                  // elements of the largest of "Input Dims"
  std::array<internal::OperandSizes, 4> inputs{};  // the first of "Input Dims"
  std::size_t input_count = 0;

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
  }
};

// Turns events into rows.
class Collector {
 public:
  explicit Collector(const std::string& file) : raw_(file, "kineto"), threads_(file) {}

  void Add(const Event& event);
  void SetRank(std::int64_t rank) { raw_.rank = rank; }
  void SetRanks(std::int64_t ranks) { raw_.ranks = ranks; }
  [[nodiscard]] std::size_t next_index() const { return static_cast<std::size_t>(raw_.events); }
  [[nodiscard]] const std::string& file() const { return raw_.file; }
  [[nodiscard]] RawRecording Take() { return std::move(raw_); }

 private:
  [[noreturn]] void Fail(const char* field, const std::string& found, const char* expected) const {
    throw InputError(Path(raw_.file)
                         .Field("traceEvents")
                         .Index(static_cast<std::size_t>(raw_.events))
                         .Field(field)
                         .str(),
                     '"' + found.substr(0, 60) + '"', expected);
  }
  // Microseconds with a fraction as whole nanoseconds, exactly: doubles do not hold those of
  // clocks that count from 1970.
  [[nodiscard]] std::int64_t Nanoseconds(const Event& event, Field field, const char* name) const;
  [[nodiscard]] std::int64_t Count(const Event& event, Field field, const char* name) const;
  [[nodiscard]] std::uint32_t QueueOf(const Event& event);
  [[nodiscard]] RawSpan SpanOf(const Event& event) const;
  void AddWork(const Event& event, ActivityKind kind);
  void AddHost(const Event& event);
  void AddMemory(const Event& event);
  [[nodiscard]] Bytes CollectiveBytes(const Event& event, OpCode code) const;

  RawRecording raw_;
  internal::NameTable threads_;
};

std::int64_t Collector::Nanoseconds(const Event& event, Field field, const char* name) const {
  const std::string& text = event.Text(field);
  const char* const end = text.data() + text.size();
  std::int64_t whole = 0;
  const auto [after, error] = std::from_chars(text.data(), end, whole);
  constexpr std::int64_t kMost = INT64_MAX / 1000 - 1;
  if (error != std::errc() || whole > kMost || whole < -kMost) {
    Fail(name, text, "a time in microseconds");
  }
  if (after == end) {
    return whole * 1000;
  }
  const char* const digits = after + 1;
  if (*after == '.' && std::all_of(digits, end, [](char c) { return c >= '0' && c <= '9'; })) {
    std::int64_t fraction = 0;  // of 10,000: the fourth digit rounds
    for (int i = 0; i < 4; ++i) {
      fraction = fraction * 10 + (digits + i < end ? digits[i] - '0' : 0);
    }
    fraction = (fraction + 5) / 10;
    return whole * 1000 + (text[0] == '-' ? -fraction : fraction);
  }
  double value = 0;
  const auto [all, wrong] = FromChars(text.data(), end, value);  // with an exponent
  if (wrong != std::errc() || all != end || !(value < 9e15 && value > -9e15)) {
    Fail(name, text, "a time in microseconds");
  }
  return static_cast<std::int64_t>(value * 1000);
}

std::int64_t Collector::Count(const Event& event, Field field, const char* name) const {
  const std::string& text = event.Text(field);
  std::int64_t value = 0;
  const auto [after, error] = std::from_chars(text.data(), text.data() + text.size(), value);
  constexpr std::int64_t kMost = std::int64_t{1} << 50;
  if (error != std::errc() || after != text.data() + text.size() || value < -1 || value > kMost) {
    Fail(name, text, "a whole number");
  }
  return value;
}

std::uint32_t Collector::QueueOf(const Event& event) {
  return threads_.Find("device " + event.Text(Field::kDevice) + " stream " +
                       event.Text(Field::kStream));
}

RawSpan Collector::SpanOf(const Event& event) const {
  RawSpan span;
  span.begin = Nanoseconds(event, Field::kTime, "ts");
  const std::int64_t duration = Nanoseconds(event, Field::kDuration, "dur");
  constexpr std::int64_t kMost = INT64_MAX / 4;
  if (duration < 0 || duration > kMost || span.begin > kMost || span.begin < -kMost) {
    Fail("dur", event.Text(Field::kDuration), "a time in microseconds, not negative");
  }
  span.end = span.begin + duration;
  return span;
}

Bytes Collector::CollectiveBytes(const Event& event, OpCode code) const {
  const std::int64_t size = ElementSize(event.Text(Field::kDtype));
  std::int64_t elements = 0;
  if (event.Has(Field::kOut) && code == OpCode::kAllGather) {
    elements = Count(event, Field::kOut, "args.Out msg nelems");
  } else if (event.Has(Field::kIn)) {
    elements = Count(event, Field::kIn, "args.In msg nelems");
  }
  constexpr std::int64_t kMostBytes = std::int64_t{1} << 53;
  return Bytes(std::clamp<std::int64_t>(elements, 0, kMostBytes / 8) * size);
}

void Collector::AddWork(const Event& event, ActivityKind kind) {
  raw_.rows.Take();
  RawWork row;
  row.span = SpanOf(event);
  const std::string& name = event.Text(Field::kName);
  row.span.name = raw_.names.Find(name);
  row.span.thread = QueueOf(event);
  row.correlation =
      event.Has(Field::kCorrelation) ? Count(event, Field::kCorrelation, "args.correlation") : -1;
  row.kind = kind;
  if (kind == ActivityKind::kKernel) {
    std::optional<OpCode> code;
    if (event.Has(Field::kCollective)) {
      code = internal::CollectiveOfName(event.Text(Field::kCollective));
    }
    if (!code && name.starts_with("nccl")) {
      code = internal::CollectiveOfName(name);
    }
    if (code) {
      row.kind = ActivityKind::kCollective;
      row.collective = *code;
      row.bytes = CollectiveBytes(event, *code);
      if (event.Has(Field::kGroupSize)) {
        row.group_size = static_cast<std::int32_t>(std::clamp<std::int64_t>(
            Count(event, Field::kGroupSize, "args.Group size"), 0, INT32_MAX));
      }
    }
  } else if (name.starts_with("Memcpy HtoD")) {
    row.kind = ActivityKind::kToDevice;
  } else if (name.starts_with("Memcpy DtoH")) {
    row.kind = ActivityKind::kToHost;
  }
  if (row.kind != ActivityKind::kCollective && event.Has(Field::kBytes)) {
    row.bytes = Bytes(std::max<std::int64_t>(Count(event, Field::kBytes, "args.bytes"), 0));
  }
  raw_.work.push_back(row);
}

void Collector::AddHost(const Event& event) {
  raw_.rows.Take();
  const std::string& name = event.Text(Field::kName);
  RawSpan span = SpanOf(event);
  span.thread = threads_.Find(event.Text(Field::kThread));
  if (internal::IsMarker(name)) {
    // The function's name behind the colon is of no use, and there are many.
    const std::string_view text = name;
    const std::size_t colon = text.find(": ");
    span.name = raw_.names.Find(text.starts_with("autograd") ? text.substr(0, colon) : text);
    raw_.ranges.push_back(span);
    return;
  }
  span.name = raw_.names.Find(name);
  if (name.starts_with("c10d::")) {
    if (const auto code = internal::CollectiveOfName(name)) {
      // Of a list of tensors the type is not recorded. Gradients are summed up in fp32, as a rule.
      const std::string& type = event.Text(Field::kInputType);
      const std::int64_t size = ElementSize(type == "TensorList" ? "float" : type);
      raw_.calls.push_back({span, Bytes(event.largest_input * size), *code});
    }
  }
  const auto inputs = std::span(event.inputs).first(event.input_count);
  // What has nothing to work on, such as an expert without tokens, does nothing.
  const bool is_empty = std::any_of(inputs.begin(), inputs.end(),
                                    [](const auto& operand) { return operand.is_empty; });
  if (const auto kind = internal::CallOfName(name); kind && !is_empty) {
    raw_.rows.Take();
    raw_.model_calls.push_back({span.begin, internal::CallWithSizes(name, *kind, inputs)});
  }
  raw_.host.push_back(span);
}

void Collector::AddMemory(const Event& event) {
  if (!event.Has(Field::kAllocated)) {
    return;
  }
  raw_.rows.Take();
  RawRecording::Sample sample;
  sample.time = Nanoseconds(event, Field::kTime, "ts");
  sample.allocated = Count(event, Field::kAllocated, "args.Total Allocated");
  if (event.Has(Field::kReserved)) {
    sample.reserved = Count(event, Field::kReserved, "args.Total Reserved");
  }
  constexpr std::string_view kHost = "0";  // c10::DeviceType::CPU
  const bool on_host = event.Text(Field::kDeviceType) == kHost;
  (on_host ? raw_.host_memory : raw_.device_memory).push_back(sample);
}

void Collector::Add(const Event& event) {
  const std::string& category = event.Text(Field::kCategory);
  const std::string& phase = event.Text(Field::kPhase);
  if (phase == "X" && event.Has(Field::kTime) && event.Has(Field::kDuration)) {
    if (category == "kernel" || category == "gpu_memcpy" || category == "gpu_memset") {
      AddWork(event, category == "kernel" ? ActivityKind::kKernel : ActivityKind::kWithinDevice);
    } else if (category == "cuda_runtime" || category == "cuda_driver") {
      if (event.Has(Field::kCorrelation)) {
        raw_.rows.Take();
        const RawSpan span = SpanOf(event);
        raw_.launches.push_back(
            {Count(event, Field::kCorrelation, "args.correlation"), span.begin, span.end});
      }
    } else if (category == "cpu_op" || category == "user_annotation") {
      AddHost(event);
    }
  } else if (phase == "i" && event.Text(Field::kName) == "[memory]") {
    AddMemory(event);
  }
  ++raw_.events;
}

// Whether anybody reads the arguments of an event. Those of host ops, the most and the longest, say
// shapes and strides.
bool WantsArguments(const Event& event) {
  if (!event.Has(Field::kCategory) || !event.Has(Field::kName)) {
    return true;  // these come later
  }
  const std::string& category = event.Text(Field::kCategory);
  const std::string& name = event.Text(Field::kName);
  return category == "cpu_op" ? name.starts_with("c10d::") || internal::CallOfName(name)
                              : category != "python_function" && category != "user_annotation";
}

// Frames of Python, arrows between events and names of tracks count for nothing, and can be most of
// a trace.
bool IsWanted(const Event& event) {
  if (event.Has(Field::kPhase) && event.Text(Field::kPhase) != "X" &&
      event.Text(Field::kPhase) != "i") {
    return false;
  }
  const std::string& category = event.Text(Field::kCategory);
  return category != "python_function" && category != "gpu_user_annotation" &&
         category != "overhead";
}

constexpr std::int64_t kMostElements = std::int64_t{1} << 50;

// One more size of an operand. The product becomes 0 when it is too large, and for what is no size.
void AddSize(std::string_view text, std::int64_t& product, internal::OperandSizes& operand) {
  std::int64_t value = 0;
  const bool is_good =
      std::from_chars(text.data(), text.data() + text.size(), value).ec == std::errc();
  operand.is_empty = operand.is_empty || (is_good && value == 0);
  const bool fits = is_good && value >= 0 && (value == 0 || product <= kMostElements / value);
  product = fits ? product * value : 0;
  if (operand.rank < operand.sizes.size()) {
    operand.sizes[operand.rank] = is_good && value > 0 && value <= kMostElements ? value : 0;
  }
  ++operand.rank;
}

// Product of the numbers of a list; 0 for an empty one.
std::int64_t ReadElements(JsonScanner& scanner, internal::OperandSizes& operand) {
  std::int64_t product = 1;
  operand.rank = 0;
  scanner.EnterArray();
  while (scanner.NextElement()) {
    AddSize(scanner.Text().value_or(""), product, operand);
  }
  return operand.rank == 0 ? 0 : product;
}

// Of one input: a tensor's sizes, or a list of such lists, of which the elements add up.
std::int64_t ReadInput(JsonScanner& scanner, internal::OperandSizes& operand) {
  std::int64_t sum = 0;
  bool is_list = false;
  internal::OperandSizes part;
  std::int64_t product = 1;
  operand.rank = 0;
  scanner.EnterArray();
  while (scanner.NextElement()) {
    if (scanner.Peek() == JsonScanner::Kind::kArray) {
      is_list = true;
      sum = std::min(sum + ReadElements(scanner, part), kMostElements);
    } else {
      AddSize(scanner.Text().value_or(""), product, operand);
    }
  }
  return is_list ? sum : operand.rank == 0 ? 0 : product;
}

void ReadInputDims(JsonScanner& scanner, Event& event) {
  scanner.EnterArray();
  while (scanner.NextElement()) {
    internal::OperandSizes operand;
    if (scanner.Peek() == JsonScanner::Kind::kArray) {
      event.largest_input = std::max(event.largest_input, ReadInput(scanner, operand));
    } else {
      scanner.Skip();
    }
    if (event.input_count < event.inputs.size()) {
      event.inputs[event.input_count++] = operand;
    }
  }
}

// The type of the first input that has one.
void ReadInputType(JsonScanner& scanner, Event& event) {
  scanner.EnterArray();
  while (scanner.NextElement()) {
    const std::string_view text = scanner.Text().value_or("");
    if (!text.empty() && !event.Has(Field::kInputType)) {
      event.Set(Field::kInputType, text);
    }
  }
}

void ReadField(JsonScanner& scanner, Field field, Event& event) {
  if (field == Field::kOther) {
    scanner.Skip();
  } else if (const std::optional<std::string_view> text = scanner.Text()) {
    event.Set(field, *text);
  }
}

void ReadArguments(JsonScanner& scanner, Event& event) {
  scanner.EnterObject();
  while (const std::optional<std::string_view> key = scanner.NextKey()) {
    const Field field = FindField(kArgFields, *key);
    const bool is_list = scanner.Peek() == JsonScanner::Kind::kArray;
    if (field == Field::kInputDims && is_list) {
      ReadInputDims(scanner, event);
    } else if (field == Field::kInputType && is_list) {
      ReadInputType(scanner, event);
    } else {
      ReadField(scanner, field, event);
    }
  }
}

void ReadEvents(JsonScanner& scanner, Collector& collector) {
  Event event;
  scanner.EnterArray();
  while (scanner.NextElement()) {
    if (scanner.Peek() != JsonScanner::Kind::kObject) {
      scanner.Skip();
      continue;
    }
    event.Clear();
    scanner.EnterObject();
    while (const std::optional<std::string_view> key = scanner.NextKey()) {
      const bool has_arguments =
          *key == "args" && scanner.Peek() == JsonScanner::Kind::kObject && WantsArguments(event);
      if (has_arguments) {
        ReadArguments(scanner, event);
      } else {
        const Field field = FindField(kEventFields, *key);
        ReadField(scanner, field, event);
        if ((field == Field::kPhase || field == Field::kCategory) && !IsWanted(event)) {
          scanner.LeaveObject();
          break;
        }
      }
    }
    collector.Add(event);
  }
}

void ReadDistributedInfo(JsonScanner& scanner, Collector& collector) {
  scanner.EnterObject();
  while (const std::optional<std::string_view> key = scanner.NextKey()) {
    const bool is_rank = *key == "rank";
    const bool is_size = *key == "world_size";
    const std::string_view text =
        is_rank || is_size ? scanner.Text().value_or("") : (scanner.Skip(), std::string_view());
    std::int64_t value = 0;
    if (std::from_chars(text.data(), text.data() + text.size(), value).ec == std::errc()) {
      is_rank ? collector.SetRank(value) : collector.SetRanks(value);
    }
  }
}

// Returns whether there was a list of events: in "traceEvents", or instead of the root object.
bool ReadDocument(JsonScanner& scanner, Collector& collector) {
  const JsonScanner::Kind root = scanner.Peek();
  bool saw_events = root == JsonScanner::Kind::kArray;
  if (root == JsonScanner::Kind::kArray) {
    ReadEvents(scanner, collector);
  } else if (root == JsonScanner::Kind::kObject) {
    scanner.EnterObject();
    while (const std::optional<std::string_view> key = scanner.NextKey()) {
      const bool is_events = *key == "traceEvents";
      const bool is_info = *key == "distributedInfo";
      const JsonScanner::Kind kind = scanner.Peek();
      if (is_events && kind == JsonScanner::Kind::kArray) {
        ReadEvents(scanner, collector);
        saw_events = true;
      } else if (is_info && kind == JsonScanner::Kind::kObject) {
        ReadDistributedInfo(scanner, collector);
      } else {
        scanner.Skip();
      }
    }
  } else {
    scanner.Skip();
  }
  scanner.End();
  return saw_events;
}

}  // namespace

ProfilerRecording ReadKineto(const std::string& file) {
  JsonScanner scanner(file);
  Collector collector(file);
  if (!ReadDocument(scanner, collector)) {
    throw InputError(file, "no \"traceEvents\"", "a trace of PyTorch's profiler");
  }
  return internal::Resolve(collector.Take());
}

}  // namespace shardwright
