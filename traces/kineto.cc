#include "traces/kineto.h"

#include <cstdint>
#include <optional>
#include <span>
#include <string_view>
#include <utility>

#include "core/ranges.h"
#include "traces/internal/kineto_events.h"
#include "traces/internal/raw_recording.h"

namespace shardwright {
namespace {

using internal::ElementSize;
using internal::Field;
using internal::KinetoEvent;
using internal::KinetoNumbers;
using internal::KinetoSink;
using internal::RawRecording;
using internal::RawSpan;
using internal::RawWork;

// Turns events into rows.
class Collector : public KinetoSink {
 public:
  explicit Collector(const std::string& file)
      : raw_(file, "kineto"), numbers_(file), threads_(file) {}

  [[nodiscard]] bool WantsArguments(const KinetoEvent& event) const override;
  void Add(const KinetoEvent& event) override;
  void SetRank(std::int64_t rank) override { raw_.rank = rank; }
  void SetRanks(std::int64_t ranks) override { raw_.ranks = ranks; }
  [[nodiscard]] RawRecording Take() { return std::move(raw_); }

 private:
  [[nodiscard]] std::int64_t Count(const KinetoEvent& event, Field field, const char* name) const {
    return numbers_.Count(event, field, name);
  }
  [[nodiscard]] std::uint32_t QueueOf(const KinetoEvent& event);
  [[nodiscard]] RawSpan SpanOf(const KinetoEvent& event) const { return numbers_.SpanOf(event); }
  void AddWork(const KinetoEvent& event, ActivityKind kind);
  void AddHost(const KinetoEvent& event);
  void AddMemory(const KinetoEvent& event);
  [[nodiscard]] Bytes CollectiveBytes(const KinetoEvent& event, OpCode code) const;

  RawRecording raw_;
  KinetoNumbers numbers_;
  internal::NameTable threads_;
};

std::uint32_t Collector::QueueOf(const KinetoEvent& event) {
  return threads_.Find("device " + event.Text(Field::kDevice) + " stream " +
                       event.Text(Field::kStream));
}

Bytes Collector::CollectiveBytes(const KinetoEvent& event, OpCode code) const {
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

void Collector::AddWork(const KinetoEvent& event, ActivityKind kind) {
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
    if (!code) {
      code = internal::CollectiveOfKernel(name);
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

void Collector::AddHost(const KinetoEvent& event) {
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
  const bool is_empty = AnyOf(inputs, [](const auto& operand) { return operand.is_empty; });
  if (const auto kind = internal::CallOfName(name); kind && !is_empty) {
    raw_.rows.Take();
    raw_.model_calls.push_back({span.begin, internal::CallWithSizes(name, *kind, inputs)});
  }
  raw_.host.push_back(span);
}

void Collector::AddMemory(const KinetoEvent& event) {
  if (!event.Has(Field::kAllocated)) {
    return;
  }
  raw_.rows.Take();
  RawRecording::Sample sample;
  sample.time = numbers_.Nanoseconds(event, Field::kTime, "ts");
  sample.allocated = Count(event, Field::kAllocated, "args.Total Allocated");
  if (event.Has(Field::kReserved)) {
    sample.reserved = Count(event, Field::kReserved, "args.Total Reserved");
  }
  constexpr std::string_view kHost = "0";  // c10::DeviceType::CPU
  const bool on_host = event.Text(Field::kDeviceType) == kHost;
  (on_host ? raw_.host_memory : raw_.device_memory).push_back(sample);
}

void Collector::Add(const KinetoEvent& event) {
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
  numbers_.Next();
}

bool Collector::WantsArguments(const KinetoEvent& event) const {
  if (!event.Has(Field::kCategory) || !event.Has(Field::kName)) {
    return true;  // these come later
  }
  const std::string& category = event.Text(Field::kCategory);
  const std::string& name = event.Text(Field::kName);
  return category == "cpu_op" ? name.starts_with("c10d::") || internal::CallOfName(name)
                              : category != "python_function" && category != "user_annotation";
}

}  // namespace

ProfilerRecording ReadKineto(const std::string& file) {
  Collector collector(file);
  internal::ReadKinetoEvents(file, collector);
  return internal::Resolve(collector.Take());
}

}  // namespace shardwright
