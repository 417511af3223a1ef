#include "traces/internal/kineto_events.h"

#include <charconv>
#include <optional>
#include <span>
#include <utility>

#include "core/error.h"
#include "core/portable.h"
#include "core/ranges.h"

namespace shardwright::internal {
namespace {

struct FieldName {
  std::string_view name;
  Field field;
};
constexpr FieldName kEventFields[] = {{"ph", Field::kPhase},     {"cat", Field::kCategory},
                                      {"name", Field::kName},    {"ts", Field::kTime},
                                      {"dur", Field::kDuration}, {"tid", Field::kThread}};
constexpr FieldName kArgFields[] = {{"stream", Field::kStream},
                                    {"device", Field::kDevice},
                                    {"correlation", Field::kCorrelation},
                                    {"bytes", Field::kBytes},
                                    {"Collective name", Field::kCollective},
                                    {"In msg nelems", Field::kIn},
                                    {"Out msg nelems", Field::kOut},
                                    {"Group size", Field::kGroupSize},
                                    {"dtype", Field::kDtype},
                                    {"Total Allocated", Field::kAllocated},
                                    {"Total Reserved", Field::kReserved},
                                    {"Device Type", Field::kDeviceType},
                                    {"Input Dims", Field::kInputDims},
                                    {"Input type", Field::kInputType},
                                    {"Concrete Inputs", Field::kScalars}};

Field FindField(std::span<const FieldName> fields, std::string_view name) {
  for (const FieldName& row : fields) {
    if (!name.empty() && row.name[0] == name[0] && row.name == name) {
      return row.field;
    }
  }
  return Field::kOther;
}

// Frames of Python, arrows between events and names of tracks count for nothing, and can be most of
// a trace.
bool IsWanted(const KinetoEvent& event) {
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
void AddSize(std::string_view text, std::int64_t& product, OperandSizes& operand) {
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
std::int64_t ReadElements(JsonScanner& scanner, OperandSizes& operand) {
  std::int64_t product = 1;
  operand.rank = 0;
  scanner.EnterArray();
  while (scanner.NextElement()) {
    AddSize(scanner.Text().value_or(""), product, operand);
  }
  return operand.rank == 0 ? 0 : product;
}

// Of one input: a tensor's sizes, or a list of such lists, of which the elements add up.
std::int64_t ReadInput(JsonScanner& scanner, OperandSizes& operand) {
  std::int64_t sum = 0;
  bool is_list = false;
  OperandSizes part;
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

constexpr std::size_t kMostInputs = 64;  // that are kept one by one; lists are one input

void ReadInputDims(JsonScanner& scanner, bool keeps_all, KinetoEvent& event) {
  scanner.EnterArray();
  while (scanner.NextElement()) {
    OperandSizes operand;
    std::int64_t elements = 0;
    if (scanner.Peek() == JsonScanner::Kind::kArray) {
      elements = ReadInput(scanner, operand);
      event.largest_input = std::max(event.largest_input, elements);
    } else {
      scanner.Skip();
    }
    if (keeps_all && event.elements.size() < kMostInputs) {
      event.elements.push_back(elements);
    }
    if (event.input_count < event.inputs.size()) {
      event.inputs[event.input_count++] = operand;
    }
  }
}

// The type of the first input that has one, and all of them where they are wanted.
void ReadInputType(JsonScanner& scanner, bool keeps_all, KinetoEvent& event) {
  scanner.EnterArray();
  while (scanner.NextElement()) {
    const std::string_view text = scanner.Text().value_or("");
    if (keeps_all && event.types.size() < kMostInputs) {
      event.types.emplace_back(text);
    }
    if (!text.empty() && !event.Has(Field::kInputType)) {
      event.Set(Field::kInputType, text);
    }
  }
}

void ReadScalars(JsonScanner& scanner, KinetoEvent& event) {
  constexpr std::size_t kLongest = 32;  // "True", "0.125"; lists are longer and not wanted
  scanner.EnterArray();
  while (scanner.NextElement()) {
    const std::string_view text = scanner.Text().value_or("");
    if (event.scalars.size() < kMostInputs) {
      event.scalars.emplace_back(text.substr(0, kLongest));
    }
  }
}

void ReadField(JsonScanner& scanner, Field field, KinetoEvent& event) {
  if (field == Field::kOther) {
    scanner.Skip();
  } else if (const std::optional<std::string_view> text = scanner.Text()) {
    event.Set(field, *text);
  }
}

void ReadArguments(JsonScanner& scanner, bool keeps_all, KinetoEvent& event) {
  scanner.EnterObject();
  while (const std::optional<std::string_view> key = scanner.NextKey()) {
    const Field field = FindField(kArgFields, *key);
    const bool is_list = scanner.Peek() == JsonScanner::Kind::kArray;
    if (field == Field::kInputDims && is_list) {
      ReadInputDims(scanner, keeps_all, event);
    } else if (field == Field::kInputType && is_list) {
      ReadInputType(scanner, keeps_all, event);
    } else if (field == Field::kScalars && is_list && keeps_all) {
      ReadScalars(scanner, event);
    } else {
      ReadField(scanner, field == Field::kScalars ? Field::kOther : field, event);
    }
  }
}

void ReadEvents(JsonScanner& scanner, KinetoSink& sink) {
  KinetoEvent event;
  scanner.EnterArray();
  while (scanner.NextElement()) {
    if (scanner.Peek() != JsonScanner::Kind::kObject) {
      scanner.Skip();
      continue;
    }
    event.Clear();
    scanner.EnterObject();
    while (const std::optional<std::string_view> key = scanner.NextKey()) {
      const bool has_arguments = *key == "args" && scanner.Peek() == JsonScanner::Kind::kObject &&
                                 sink.WantsArguments(event);
      if (has_arguments) {
        ReadArguments(scanner, sink.WantsInputs(), event);
      } else {
        const Field field = FindField(kEventFields, *key);
        ReadField(scanner, field, event);
        if ((field == Field::kPhase || field == Field::kCategory) && !IsWanted(event)) {
          scanner.LeaveObject();
          break;
        }
      }
    }
    sink.Add(event);
  }
}

void ReadDistributedInfo(JsonScanner& scanner, KinetoSink& sink) {
  scanner.EnterObject();
  while (const std::optional<std::string_view> key = scanner.NextKey()) {
    const bool is_rank = *key == "rank";
    const bool is_size = *key == "world_size";
    const std::string_view text =
        is_rank || is_size ? scanner.Text().value_or("") : (scanner.Skip(), std::string_view());
    std::int64_t value = 0;
    if (std::from_chars(text.data(), text.data() + text.size(), value).ec == std::errc()) {
      is_rank ? sink.SetRank(value) : sink.SetRanks(value);
    }
  }
}

// The name of the first device.
void ReadDevices(JsonScanner& scanner, KinetoSink& sink) {
  bool is_first = true;
  scanner.EnterArray();
  while (scanner.NextElement()) {
    if (scanner.Peek() != JsonScanner::Kind::kObject) {
      scanner.Skip();
      continue;
    }
    scanner.EnterObject();
    while (const std::optional<std::string_view> key = scanner.NextKey()) {
      if (*key == "name" && is_first) {
        sink.SetDevice(scanner.Text().value_or(""));
        is_first = false;
      } else {
        scanner.Skip();
      }
    }
  }
}

// Returns whether there was a list of events: in "traceEvents", or instead of the root object.
bool ReadDocument(JsonScanner& scanner, KinetoSink& sink) {
  const JsonScanner::Kind root = scanner.Peek();
  bool saw_events = root == JsonScanner::Kind::kArray;
  if (root == JsonScanner::Kind::kArray) {
    ReadEvents(scanner, sink);
  } else if (root == JsonScanner::Kind::kObject) {
    scanner.EnterObject();
    while (const std::optional<std::string_view> key = scanner.NextKey()) {
      const bool is_events = *key == "traceEvents";
      const bool is_info = *key == "distributedInfo";
      const bool is_device = *key == "deviceProperties";
      const JsonScanner::Kind kind = scanner.Peek();
      if (is_events && kind == JsonScanner::Kind::kArray) {
        ReadEvents(scanner, sink);
        saw_events = true;
      } else if (is_info && kind == JsonScanner::Kind::kObject) {
        ReadDistributedInfo(scanner, sink);
      } else if (is_device && kind == JsonScanner::Kind::kArray) {
        ReadDevices(scanner, sink);
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

std::int64_t ElementSize(std::string_view dtype) {
  static constexpr std::pair<std::string_view, int> kSizes[] = {
      {"Double", 8},        {"double", 8},     {"Long", 8}, {"long int", 8}, {"Float", 4},
      {"float", 4},         {"Int", 4},        {"int", 4},  {"BFloat16", 2}, {"c10::BFloat16", 2},
      {"Half", 2},          {"c10::Half", 2},  {"Byte", 1}, {"Char", 1},     {"Bool", 1},
      {"Float8_e4m3fn", 1}, {"Float8_e5m2", 1}};
  const auto* const found = FindIf(kSizes, [&](const auto& row) { return row.first == dtype; });
  return found == std::end(kSizes) ? 0 : found->second;
}

void KinetoNumbers::Fail(const char* field, const std::string& found, const char* expected) const {
  throw InputError(
      Path(file_).Field("traceEvents").Index(static_cast<std::size_t>(index_)).Field(field).str(),
      '"' + found.substr(0, 60) + '"', expected);
}

std::int64_t KinetoNumbers::Nanoseconds(const KinetoEvent& event, Field field,
                                        const char* name) const {
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

std::int64_t KinetoNumbers::Count(const KinetoEvent& event, Field field, const char* name) const {
  const std::string& text = event.Text(field);
  std::int64_t value = 0;
  const auto [after, error] = std::from_chars(text.data(), text.data() + text.size(), value);
  constexpr std::int64_t kMost = std::int64_t{1} << 50;
  if (error != std::errc() || after != text.data() + text.size() || value < -1 || value > kMost) {
    Fail(name, text, "a whole number");
  }
  return value;
}

RawSpan KinetoNumbers::SpanOf(const KinetoEvent& event) const {
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

void ReadKinetoEvents(const std::string& file, KinetoSink& sink) {
  JsonScanner scanner(file);
  if (!ReadDocument(scanner, sink)) {
    throw InputError(file, "no \"traceEvents\"", "a trace of PyTorch's profiler");
  }
}

}  // namespace shardwright::internal
