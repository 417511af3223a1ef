#include "traces/timed_calls.h"

#include <array>
#include <map>
#include <optional>
#include <span>
#include <string_view>
#include <tuple>
#include <unordered_map>

#include "core/error.h"
#include "core/ranges.h"
#include "traces/internal/kineto_events.h"
#include "traces/internal/raw_recording.h"

namespace shardwright {
namespace {

using internal::ElementSize;
using internal::Field;
using internal::KinetoEvent;
using internal::OperandSizes;

// Where PyTorch's attention functions have their arguments (torch.ops.aten, 2.13).
struct AttentionName {
  std::string_view name;
  bool is_backward, is_cudnn;
  std::size_t causal;  // the argument "is_causal"
};
constexpr std::array<AttentionName, 6> kAttention = {{
    {"aten::_scaled_dot_product_flash_attention", false, false, 4},
    {"aten::_scaled_dot_product_flash_attention_backward", true, false, 11},
    {"aten::_scaled_dot_product_cudnn_attention", false, true, 6},
    {"aten::_scaled_dot_product_cudnn_attention_backward", true, true, 14},
    {"aten::_scaled_dot_product_flash_attention_for_cpu", false, false, 4},
    {"aten::_scaled_dot_product_flash_attention_for_cpu_backward", true, false, 7},
}};

struct NormName {
  std::string_view name;
  TimedCallKind kind;
};
constexpr std::array<NormName, 4> kNorms = {{
    {"aten::native_layer_norm", TimedCallKind::kLayerNormForward},
    {"aten::native_layer_norm_backward", TimedCallKind::kLayerNormBackward},
    {"aten::_fused_rms_norm", TimedCallKind::kRmsNormForward},
    {"aten::_fused_rms_norm_backward", TimedCallKind::kRmsNormBackward},
}};

// One pass over operands of one shape, or smaller ones that are repeated. What is written is as
// large as the largest operand; with a '_' at the end it is the first operand itself.
constexpr std::array<std::string_view, 24> kElementwise = {
    "aten::add",   "aten::add_",          "aten::sub",           "aten::mul",
    "aten::mul_",  "aten::div",           "aten::div_",          "aten::neg",
    "aten::exp",   "aten::rsqrt",         "aten::pow",           "aten::sigmoid",
    "aten::tanh",  "aten::silu",          "aten::silu_backward", "aten::gelu",
    "aten::relu",  "aten::gelu_backward", "aten::tanh_backward", "aten::sigmoid_backward",
    "aten::silu_", "aten::relu_",         "aten::sub_",          "aten::threshold_backward",
};

std::optional<DType> DTypeOf(std::string_view type) {
  if (type == "c10::BFloat16" || type == "BFloat16") {
    return DType::kBf16;
  }
  if (type == "c10::Half" || type == "Half") {
    return DType::kFp16;
  }
  return type == "float" || type == "Float" ? std::optional(DType::kFp32) : std::nullopt;
}

std::string_view TypeOf(const KinetoEvent& event, std::size_t input) {
  return input < event.types.size() ? std::string_view(event.types[input]) : std::string_view();
}

std::optional<TimedCall> ProductOf(const KinetoEvent& event, std::span<const OperandSizes> inputs) {
  const std::string& name = event.Text(Field::kName);
  const HostCall sizes = internal::CallWithSizes(name, CallKind::kProduct, inputs);
  const std::optional<DType> dtype = DTypeOf(TypeOf(event, name.find("add") == name.npos ? 0 : 1));
  if (sizes.m == 0 || !dtype) {
    return std::nullopt;
  }
  TimedCall call;
  call.dtype = *dtype;
  call.batch = sizes.batch;
  call.m = sizes.m;
  call.n = sizes.n;
  call.k = sizes.k;
  return call;
}

std::optional<TimedCall> AttentionOf(const KinetoEvent& event, const AttentionName& row,
                                     std::span<const OperandSizes> inputs) {
  const std::size_t first = row.is_backward ? 1 : 0;
  const std::optional<DType> dtype = DTypeOf(TypeOf(event, first));
  if (inputs.size() < first + 2 || !dtype || event.scalars.size() <= row.causal) {
    return std::nullopt;
  }
  const OperandSizes& q = inputs[first];
  const OperandSizes& k = inputs[first + 1];
  const std::string& causal = event.scalars[row.causal];
  if (q.rank != 4 || k.rank != 4 || (causal != "True" && causal != "False")) {
    return std::nullopt;
  }
  TimedCall call;
  call.kind =
      row.is_backward ? TimedCallKind::kAttentionBackward : TimedCallKind::kAttentionForward;
  call.dtype = *dtype;
  call.is_cudnn = row.is_cudnn;
  call.causal = causal == "True";
  call.batch = q.sizes[0];
  call.heads = q.sizes[1];
  call.m = q.sizes[2];
  call.k = q.sizes[3];
  call.kv_heads = k.sizes[1];
  call.n = k.sizes[2];
  return call;
}

std::optional<TimedCall> NormOf(const KinetoEvent& event, TimedCallKind kind,
                                std::span<const OperandSizes> inputs) {
  const std::optional<DType> dtype = DTypeOf(TypeOf(event, 0));
  if (inputs.empty() || !dtype || inputs[0].rank == 0 || inputs[0].rank > inputs[0].sizes.size()) {
    return std::nullopt;
  }
  TimedCall call;
  call.kind = kind;
  call.dtype = *dtype;
  call.n = inputs[0].sizes[inputs[0].rank - 1];  // those over the last dimension
  call.m = call.n > 0 ? event.elements[0] / call.n : 0;
  return call;
}

std::optional<TimedCall> PassOf(const KinetoEvent& event) {
  const std::string& name = event.Text(Field::kName);
  const std::optional<DType> dtype = DTypeOf(TypeOf(event, 0));
  if (event.elements.empty() || !dtype) {
    return std::nullopt;
  }
  TimedCall call;
  call.dtype = *dtype;
  const Bytes first(event.elements[0] * ElementSize(TypeOf(event, 0)));
  if (name == "aten::copy_") {
    if (event.elements.size() < 2 || event.elements[1] != event.elements[0]) {
      return std::nullopt;
    }
    call.kind = TimedCallKind::kCopy;
    call.written = first;
    call.read = Bytes(event.elements[1] * ElementSize(TypeOf(event, 1)));
    return call;
  }
  call.kind = TimedCallKind::kElementwise;
  for (std::size_t i = 0; i < event.elements.size(); ++i) {
    const std::int64_t size = event.elements[i] > 0 ? ElementSize(TypeOf(event, i)) : 0;
    call.read += Bytes(event.elements[i] * size);
  }
  call.written =
      name.ends_with('_') ? first : Bytes(event.largest_input * ElementSize(TypeOf(event, 0)));
  return call;
}

bool IsPass(std::string_view name) {
  return name == "aten::copy_" || IsIn(kElementwise, name);
}

std::optional<TimedCall> CallOf(const KinetoEvent& event) {
  const std::string& name = event.Text(Field::kName);
  const auto inputs = std::span(event.inputs).first(event.input_count);
  if (internal::CallOfName(name) == CallKind::kProduct) {
    return ProductOf(event, inputs);
  }
  for (const AttentionName& row : kAttention) {
    if (row.name == name) {
      return AttentionOf(event, row, inputs);
    }
  }
  for (const NormName& row : kNorms) {
    if (row.name == name) {
      return NormOf(event, row.kind, inputs);
    }
  }
  return IsPass(name) ? PassOf(event) : std::nullopt;
}

bool MayBeCall(std::string_view name) {
  return IsPass(name) || internal::CallOfName(name) || IsIn(kNorms, name, &NormName::name);
}

class CallCollector : public internal::KinetoSink {
 public:
  explicit CallCollector(const std::string& file)
      : rows_(file, "calls and kernels", 1 << 24), numbers_(file), names_(file), threads_(file) {
    result_.file = file;
  }

  [[nodiscard]] bool WantsInputs() const override { return true; }
  [[nodiscard]] bool WantsArguments(const KinetoEvent& event) const override {
    const std::string& category = event.Text(Field::kCategory);
    return category == "cpu_op" ? MayBeCall(event.Text(Field::kName))
                                : category != "python_function" && category != "user_annotation";
  }
  void SetDevice(std::string_view name) override { result_.device = name; }
  void Add(const KinetoEvent& event) override;
  [[nodiscard]] TimedCalls Take();

 private:
  struct Op {
    internal::RawSpan span;
    std::size_t call = kNone;  // of result_.calls
  };
  struct Launch {
    std::int64_t begin = 0;
    std::uint32_t thread = 0;
  };
  struct Work {
    std::int64_t correlation = 0;
    std::int64_t time = 0;  // ns
    std::uint32_t name = 0;
  };
  static constexpr std::size_t kNone = static_cast<std::size_t>(-1);

  void AddOp(const KinetoEvent& event);
  void AddKernel(const KinetoEvent& event);
  // The innermost call that was running on that thread then.
  [[nodiscard]] std::size_t CallAt(const Launch& launch) const;
  void TimeKernels();
  void TimeOps();
  void Untold(std::uint32_t name, std::int64_t time);

  TimedCalls result_;
  Budget rows_;
  internal::KinetoNumbers numbers_;
  internal::NameTable names_, threads_;
  std::vector<Op> ops_;
  std::unordered_map<std::int64_t, Launch> launches_;  // by correlation
  std::vector<Work> work_;
  std::map<std::string, Seconds> untold_;
};

void CallCollector::AddOp(const KinetoEvent& event) {
  Op op;
  op.span = numbers_.SpanOf(event);
  op.span.thread = threads_.Find(event.Text(Field::kThread));
  op.span.name = names_.Find(event.Text(Field::kName));
  if (MayBeCall(event.Text(Field::kName))) {
    result_.has_shapes = result_.has_shapes || event.input_count > 0;
    if (const std::optional<TimedCall> call = CallOf(event)) {
      op.call = result_.calls.size();
      result_.calls.push_back(*call);
    }
  }
  rows_.Take();
  ops_.push_back(op);
}

void CallCollector::AddKernel(const KinetoEvent& event) {
  const std::string& name = event.Text(Field::kName);
  const bool is_collective =
      event.Has(Field::kCollective) || internal::CollectiveOfKernel(name).has_value();
  if (is_collective || !event.Has(Field::kCorrelation)) {
    return;
  }
  const internal::RawSpan span = numbers_.SpanOf(event);
  rows_.Take();
  work_.push_back({numbers_.Count(event, Field::kCorrelation, "args.correlation"),
                   span.end - span.begin, names_.Find(name.substr(0, 120))});
}

void CallCollector::Add(const KinetoEvent& event) {
  if (event.Text(Field::kPhase) == "X" && event.Has(Field::kTime) && event.Has(Field::kDuration)) {
    const std::string& category = event.Text(Field::kCategory);
    if (category == "cpu_op") {
      AddOp(event);
    } else if (category == "kernel") {
      AddKernel(event);
    } else if ((category == "cuda_runtime" || category == "cuda_driver") &&
               event.Has(Field::kCorrelation)) {
      rows_.Take();
      launches_[numbers_.Count(event, Field::kCorrelation, "args.correlation")] = {
          numbers_.SpanOf(event).begin, threads_.Find(event.Text(Field::kThread))};
    }
  }
  numbers_.Next();
}

std::size_t CallCollector::CallAt(const Launch& launch) const {
  // ops_ is sorted by thread and begin; calls nest, so those around a moment are few steps back.
  auto at = std::upper_bound(ops_.begin(), ops_.end(), launch, [](const Launch& l, const Op& op) {
    return std::pair(l.thread, l.begin) < std::pair(op.span.thread, op.span.begin);
  });
  constexpr int kDeepest = 64;
  for (int i = 0; i < kDeepest && at != ops_.begin(); ++i) {
    --at;
    if (at->span.thread != launch.thread) {
      break;
    }
    if (at->span.end > launch.begin && at->call != kNone) {
      return at->call;
    }
  }
  return kNone;
}

void CallCollector::Untold(std::uint32_t name, std::int64_t time) {
  untold_[names_.names()[name]] += Seconds(1e-9 * static_cast<double>(time));
}

void CallCollector::TimeKernels() {
  for (const Work& work : work_) {
    const Seconds time(1e-9 * static_cast<double>(work.time));
    result_.total += time;
    const auto launch = launches_.find(work.correlation);
    const std::size_t call = launch == launches_.end() ? kNone : CallAt(launch->second);
    if (call == kNone) {
      Untold(work.name, work.time);
    } else {
      result_.calls[call].time += time;
    }
  }
}

// Outermost operators are the work; a call's time is its own, that of calls inside of it included.
void CallCollector::TimeOps() {
  std::int64_t covered = INT64_MIN, told = INT64_MIN;  // until then, on this thread
  std::uint32_t thread = 0;
  std::uint32_t outermost = 0;  // its name
  for (const Op& op : ops_) {
    const std::int64_t time = op.span.end - op.span.begin;
    if (op.span.thread != thread) {
      thread = op.span.thread;
      covered = told = INT64_MIN;
    }
    if (op.span.begin >= covered) {
      result_.total += Seconds(1e-9 * static_cast<double>(time));
      covered = op.span.end;
      outermost = op.span.name;
      Untold(outermost, time);
    }
    if (op.call != kNone && op.span.begin >= told) {
      result_.calls[op.call].time = Seconds(1e-9 * static_cast<double>(time));
      told = op.span.end;
      Untold(outermost, -time);
    }
  }
}

TimedCalls CallCollector::Take() {
  SortAll(ops_, [](const Op& a, const Op& b) {
    return std::tuple(a.span.thread, a.span.begin, -a.span.end) <
           std::tuple(b.span.thread, b.span.begin, -b.span.end);
  });
  result_.on_device = !work_.empty();
  if (ops_.empty() && work_.empty()) {
    throw InputError(result_.file, "no operators and no kernels", "a trace of PyTorch's profiler");
  }
  result_.on_device ? TimeKernels() : TimeOps();
  std::erase_if(result_.calls, [](const TimedCall& call) { return !(call.time > Seconds(0)); });
  for (const auto& [name, time] : untold_) {
    if (time > Seconds(1e-9)) {
      result_.untold.emplace_back(name, time);
    }
  }
  StableSort(result_.untold, [](const auto& a, const auto& b) { return a.second > b.second; });
  return std::move(result_);
}

}  // namespace

TimedCalls ReadTimedCalls(const std::string& file) {
  CallCollector collector(file);
  internal::ReadKinetoEvents(file, collector);
  return collector.Take();
}

}  // namespace shardwright
