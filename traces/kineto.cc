#include "traces/kineto.h"

#include <algorithm>
#include <array>
#include <charconv>
#include <cstdint>
#include <map>
#include <optional>
#include <string_view>
#include <utility>

#include <rapidjson/error/en.h>
#include <rapidjson/reader.h>

#include "core/error.h"
#include "traces/gzip.h"
#include "traces/internal/raw_recording.h"

namespace shardwright {
namespace {

using internal::RawRecording;
using internal::RawSpan;
using internal::RawWork;

constexpr std::size_t kDeepest = 64;                         // nesting
constexpr std::size_t kLongestToken = std::size_t{8} << 20;  // plans and stacks are shorter

// RapidJSON's stream concept (rapidjson/stream.h) over a TextSource.
class JsonStream {
 public:
  using Ch = char;
  explicit JsonStream(const std::string& file) : file_(file), source_(file), piece_(kPieceSize) {
    Fill();
  }
  [[nodiscard]] Ch Peek() const { return *next_; }
  Ch Take() {
    const char c = *next_++;
    if (next_ == end_) {
      Fill();
    }
    return c;
  }
  [[nodiscard]] std::size_t Tell() const {
    return before_ + static_cast<std::size_t>(next_ - piece_.data());
  }
  // A token began here.
  void Mark() { mark_ = Tell(); }

  // Never called: the text is not changed in place.
  Ch* PutBegin() { return nullptr; }
  void Put(Ch /*c*/) {}
  void Flush() {}
  std::size_t PutEnd(Ch* /*begin*/) { return 0; }

 private:
  static constexpr std::size_t kPieceSize = std::size_t{1} << 18;

  // At the end of the text stands a null character, as the concept wants it.
  void Fill() {
    if (is_done_) {
      return;
    }
    if (Tell() - mark_ > kLongestToken && end_ != nullptr) {
      throw InputError(file_,
                       "a name or number of more than 8 MiB near byte " + std::to_string(Tell()),
                       "a trace of PyTorch's profiler");
    }
    before_ = end_ == nullptr ? 0 : Tell();
    const std::size_t count = source_.Read(piece_.data(), piece_.size() - 1);
    is_done_ = count == 0;
    piece_[count] = '\0';
    next_ = piece_.data();
    end_ = piece_.data() + std::max<std::size_t>(count, 1);
  }

  std::string file_;
  TextSource source_;
  std::vector<char> piece_;
  const char* next_ = piece_.data();
  const char* end_ = nullptr;
  std::size_t before_ = 0;
  std::size_t mark_ = 0;
  bool is_done_ = false;
};

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
    if (row.name == name) {
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
  std::int64_t largest_input = 0;  // elements of the largest of "Input Dims"

  [[nodiscard]] bool Has(Field field) const { return is_set[static_cast<std::size_t>(field)]; }
  [[nodiscard]] const std::string& Text(Field field) const {
    static const std::string kNothing;
    return Has(field) ? texts[static_cast<std::size_t>(field)] : kNothing;
  }
  void Set(Field field, const char* text, std::size_t size) {
    texts[static_cast<std::size_t>(field)].assign(text, size);
    is_set[static_cast<std::size_t>(field)] = true;
  }
  void Clear() {
    is_set.fill(false);
    largest_input = 0;
  }
};

// Turns events into rows.
class Collector {
 public:
  explicit Collector(const std::string& file) {
    raw_.file = file;
    raw_.source = "kineto";
  }

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
  [[nodiscard]] std::uint32_t ThreadOf(const Event& event);
  [[nodiscard]] std::uint32_t QueueOf(const Event& event);
  [[nodiscard]] RawSpan SpanOf(const Event& event) const;
  void AddWork(const Event& event, ActivityKind kind);
  void AddHost(const Event& event);
  void AddMemory(const Event& event);
  [[nodiscard]] Bytes CollectiveBytes(const Event& event, OpCode code) const;

  RawRecording raw_;
  std::map<std::string, std::uint32_t, std::less<>> threads_;
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
  double value = 0;
  const auto [last, bad] = std::from_chars(after, end, value);
  if (*after == '.' && bad == std::errc() && last == end && value < 1) {
    const auto fraction = static_cast<std::int64_t>(value * 1000 + 0.5);
    return whole * 1000 + (text[0] == '-' ? -fraction : fraction);
  }
  const auto [all, wrong] = std::from_chars(text.data(), end, value);  // with an exponent
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

std::uint32_t Collector::ThreadOf(const Event& event) {
  const std::string& text = event.Text(Field::kThread);
  const auto found = threads_.find(text);
  return found != threads_.end()
             ? found->second
             : threads_.emplace(text, static_cast<std::uint32_t>(threads_.size())).first->second;
}

std::uint32_t Collector::QueueOf(const Event& event) {
  const std::string key =
      "device " + event.Text(Field::kDevice) + " stream " + event.Text(Field::kStream);
  return threads_.emplace(key, static_cast<std::uint32_t>(threads_.size())).first->second;
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
  const std::string& name = event.Text(Field::kName);
  RawSpan span = SpanOf(event);
  span.thread = ThreadOf(event);
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
      const std::int64_t size = ElementSize(event.Text(Field::kInputType));
      raw_.calls.push_back({span, Bytes(event.largest_input * size), *code});
    }
  }
  raw_.host.push_back(span);
}

void Collector::AddMemory(const Event& event) {
  if (!event.Has(Field::kAllocated)) {
    return;
  }
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

// Receives the pieces of the document. Events are objects in "traceEvents" or in the root list.
class Handler : public rapidjson::BaseReaderHandler<rapidjson::UTF8<>, Handler> {
 public:
  Handler(JsonStream& stream, Collector& collector) : stream_(stream), collector_(collector) {}

  bool Default() {
    stream_.Mark();
    return true;
  }
  bool RawNumber(const char* text, rapidjson::SizeType size, bool /*copy*/) {
    stream_.Mark();
    if (InEvent() || InArgs()) {
      if (field_ != Field::kOther) {
        event_.Set(field_, text, size);
      }
    } else if (depth_ > event_depth_ + 1 && field_ == Field::kInputDims) {
      AddDimension({text, size});
    } else if (depth_ == 2 && section_ == "distributedInfo") {
      AddInfo({text, size});
    }
    return true;
  }
  bool String(const char* text, rapidjson::SizeType size, bool /*copy*/) {
    stream_.Mark();
    if (InEvent() || InArgs()) {
      if (field_ != Field::kOther) {
        event_.Set(field_, text, size);
      }
    } else if (depth_ == event_depth_ + 2 && field_ == Field::kInputType &&
               !event_.Has(Field::kInputType) && size > 0) {
      event_.Set(field_, text, size);  // of the first input
    }
    return true;
  }
  bool StartObject() {
    Enter();
    if (depth_ == event_depth_ && in_events_) {
      event_.Clear();
    }
    return depth_ <= kDeepest;
  }
  bool Key(const char* text, rapidjson::SizeType size, bool /*copy*/) {
    stream_.Mark();
    const std::string_view key(text, size);
    if (InEvent()) {
      is_args_ = key == "args";
      field_ = FindField(kEventFields, key);
    } else if (InArgs()) {
      field_ = FindField(kArgFields, key);
    } else if (depth_ == 1) {
      section_ = key;
    } else {
      key_ = key;
      field_ = depth_ > event_depth_ ? Field::kOther : field_;
    }
    return true;
  }
  bool EndObject(rapidjson::SizeType /*members*/) {
    stream_.Mark();
    if (InEvent()) {
      collector_.Add(event_);
    }
    --depth_;
    return true;
  }
  bool StartArray() {
    Enter();
    if (depth_ == 1) {
      event_depth_ = 2;
      in_events_ = saw_events_ = true;
    } else if (depth_ == 2 && section_ == "traceEvents" && event_depth_ == 3) {
      in_events_ = saw_events_ = true;
    }
    dimensions_ = 1;
    is_empty_ = true;
    return depth_ <= kDeepest;
  }
  bool EndArray(rapidjson::SizeType /*elements*/) {
    stream_.Mark();
    if (depth_ == event_depth_ + 3 && field_ == Field::kInputDims && !is_empty_) {
      event_.largest_input = std::max(event_.largest_input, dimensions_);
    }
    is_empty_ = true;
    --depth_;
    in_events_ = in_events_ && depth_ >= event_depth_ - 1;
    return true;
  }

  [[nodiscard]] bool saw_events() const { return saw_events_; }
  [[nodiscard]] std::size_t depth() const { return depth_; }

 private:
  void Enter() {
    stream_.Mark();
    ++depth_;
  }
  [[nodiscard]] bool InEvent() const { return in_events_ && depth_ == event_depth_; }
  [[nodiscard]] bool InArgs() const { return in_events_ && is_args_ && depth_ == event_depth_ + 1; }
  void AddDimension(std::string_view text) {
    std::int64_t value = 0;
    const bool is_good =
        std::from_chars(text.data(), text.data() + text.size(), value).ec == std::errc();
    constexpr std::int64_t kMost = std::int64_t{1} << 50;
    const bool fits = is_good && value >= 0 && (value == 0 || dimensions_ <= kMost / value);
    dimensions_ = fits ? dimensions_ * value : 0;
    is_empty_ = false;
  }
  void AddInfo(std::string_view text) {
    std::int64_t value = 0;
    if (std::from_chars(text.data(), text.data() + text.size(), value).ec != std::errc()) {
      return;
    }
    if (key_ == "rank") {
      collector_.SetRank(value);
    } else if (key_ == "world_size") {
      collector_.SetRanks(value);
    }
  }

  JsonStream& stream_;
  Collector& collector_;
  Event event_;
  std::string section_;  // key of the root object
  std::string key_;
  std::size_t depth_ = 0;
  std::size_t event_depth_ = 3;
  std::int64_t dimensions_ = 1;
  Field field_ = Field::kOther;
  bool is_args_ = false;
  bool is_empty_ = true;
  bool in_events_ = false;
  bool saw_events_ = false;
};

}  // namespace

ProfilerRecording ReadKineto(const std::string& file) {
  JsonStream stream(file);
  Collector collector(file);
  Handler handler(stream, collector);
  rapidjson::Reader reader;
  constexpr unsigned kFlags =
      rapidjson::kParseIterativeFlag | rapidjson::kParseNumbersAsStringsFlag;
  const rapidjson::ParseResult result = reader.Parse<kFlags>(stream, handler);
  if (result.IsError()) {
    const std::string where = " at byte " + std::to_string(result.Offset());
    if (result.Code() == rapidjson::kParseErrorTermination) {
      throw InputError(file, "nesting deeper than " + std::to_string(kDeepest) + where,
                       "a trace of PyTorch's profiler");
    }
    throw InputError(file, "broken JSON" + where + ": " + GetParseError_En(result.Code()),
                     "a whole trace");
  }
  if (!handler.saw_events()) {
    throw InputError(file, "no \"traceEvents\"", "a trace of PyTorch's profiler");
  }
  return internal::Resolve(collector.Take());
}

}  // namespace shardwright
