#include "traces/chrome_write.h"

#include <array>
#include <cstddef>
#include <string_view>
#include <utility>
#include <vector>

#include "core/json.h"
#include "core/lookup.h"
#include "core/ranges.h"
#include "schedule/plan_names.h"
#include "topologies/mesh.h"
#include "traces/gzip.h"
#include "traces/internal/chrome_layout.h"
#include "traces/internal/event_text.h"

namespace shardwright {
namespace {

using internal::EventText;
using internal::kBodyNames;
using internal::Layout;
using internal::PlacedSpan;
using internal::Quote;
using internal::StepSpans;
using internal::Track;

// Threads of a process: one per stream, by its number, and the host's.
constexpr int kHostThread = 100;

Track TrackOf(Rank rank, Stream stream) {
  return {rank.value, stream == Stream::kHost ? kHostThread : static_cast<int>(stream)};
}

// What NCCL and PyTorch's profiler call a collective.
struct CollectiveNames {
  std::string_view kernel, operation;
};
CollectiveNames NamesOf(OpCode code) {
  using enum OpCode;
  static constexpr std::array<std::pair<OpCode, CollectiveNames>, 9> kNames = {{
      {kAllGather, {"AllGather", "_allgather_base"}},
      {kReduceScatter, {"ReduceScatter", "_reduce_scatter_base"}},
      {kBroadcast, {"Broadcast", "broadcast"}},
      {kAllToAll, {"SendRecv", "all_to_all"}},
      {kPermute, {"SendRecv", "all_to_all"}},  // torch's permute_tensor is one with one split
      {kBarrier, {"AllReduce", "barrier"}},    // NCCL has no barrier; PyTorch reduces one element
      {kSend, {"SendRecv", "send"}},
      {kReceive, {"SendRecv", "recv"}},
      {kSendReceive, {"SendRecv", "send_recv"}},
  }};
  return ValueOf(kNames, code, CollectiveNames{"AllReduce", "allreduce"});
}

// Each in the order of its enumerators.
constexpr std::array<std::string_view, 9> kTorchDTypes = {
    "Float", "BFloat16", "Half", "Float8_e4m3fn", "Double", "Long", "Int", "Byte", "Bool"};

// How a slice looks to tools that know PyTorch's traces.
struct SliceStyle {
  std::string_view category;
  std::string_view runtime_call;  // on the host's track
};
SliceStyle StyleOf(OpCode code) {
  static constexpr std::array<std::pair<OpCode, SliceStyle>, 5> kStyles = {{
      {OpCode::kCopyH2d, {"gpu_memcpy", "cudaMemcpyAsync"}},
      {OpCode::kCopyD2h, {"gpu_memcpy", "cudaMemcpyAsync"}},
      {OpCode::kStreamWait, {"cuda_sync", "cudaStreamWaitEvent"}},
      {OpCode::kHostWait, {"cuda_runtime", "cudaEventSynchronize"}},
      {OpCode::kHostOptimizerStep, {"cpu_op", ""}},
  }};
  return ValueOf(kStyles, code, SliceStyle{"kernel", "cudaLaunchKernel"});
}

class Writer {
 public:
  // Flows have numbers from `first_flow` + 1 on.
  Writer(const Program& program, const Trace& trace, const ChromeOptions& options, EventText& out,
         std::size_t first_flow)
      : program_(program),
        trace_(trace),
        options_(options),
        is_hta_(options.profile == ChromeProfile::kHta),
        layout_(internal::BuildLayout(program, trace, options.profile)),
        out_(out),
        first_flow_(first_flow) {
    for (std::size_t kind = 0; kind < op_names_.size(); ++kind) {
      for (const Op& op : BodyOf(program, static_cast<BodyKind>(kind)).ops) {
        op_names_[kind].push_back(Quote(OpName(program, op)));
      }
    }
    for (const UnitInfo& unit : program.units) {
      unit_names_.push_back(Quote(unit.name));
    }
  }

  void Header();
  void Run();
  [[nodiscard]] std::size_t flow_end() const { return first_flow_ + layout_.flows.size(); }

 private:
  void Metadata();
  void Name(Track track, std::string_view what, std::string_view name, std::int64_t sort_index);
  void BeginSlice(Track track, std::string_view category, std::string_view quoted_name,
                  std::int64_t begin, std::int64_t end);
  void Annotation(const StepSpans& step);
  void WriteSpan(std::size_t index);
  void IssueSlice(const Span& span, const PlacedSpan& placed, std::int64_t correlation);
  void OpSlice(const Span& span, const PlacedSpan& placed, std::int64_t correlation);
  [[nodiscard]] std::string SliceName(const Span& span, const Op& op) const;
  void CollectiveArgs(const OpShape& shape);
  void OwnArgs(const Span& span, const PlacedSpan& placed);
  void Flows(std::size_t index);
  void Memory();
  void BeginCounter(std::string_view name, const MemorySample& sample);
  void CounterArgs(const std::array<Bytes, kCategoryCount>& bytes,
                   const std::array<bool, kCategoryCount>& used, Bytes reserved);

  [[nodiscard]] const Op& OpOf(const Span& span) const {
    return BodyOf(program_, span.body).ops[span.op.value];
  }
  [[nodiscard]] const std::string& OpNameOf(const Span& span) const {
    return op_names_[static_cast<std::size_t>(span.body)][span.op.value];
  }

  const Program& program_;
  const Trace& trace_;
  const ChromeOptions& options_;
  bool is_hta_;
  Layout layout_;
  EventText& out_;
  std::size_t first_flow_;
  std::array<std::vector<std::string>, 3> op_names_;  // quoted; by body, then op
  std::vector<std::string> unit_names_;               // quoted
  std::size_t next_flow_ = 0;                         // flows before it are written
};

void Writer::Run() {
  Metadata();
  for (const StepSpans& step : layout_.steps) {
    Annotation(step);
    for (std::size_t i = step.first; i < step.last; ++i) {
      if (layout_.placed[i].is_written) {
        WriteSpan(i);
      }
    }
  }
  if (!is_hta_) {
    Memory();
  }
  out_.Flush();
}

// Holistic Trace Analysis finds the rank by a pattern that needs the space after the colon, and
// reads no metadata behind the events.
void Writer::Header() {
  out_.Raw("{\"schemaVersion\": 1, \"shardwright\": {\"format\": \"trace\", \"version\": 1, ");
  out_.Raw(is_hta_ ? "\"profile\": \"hta\"" : "\"profile\": \"perfetto\"");
  out_.Raw(", \"source\": " + Quote(options_.source));
  if (options_.step_time && !is_hta_) {
    out_.Raw(", \"step_time_us\": ");
    out_.Time(internal::RoundTicks(*options_.step_time, layout_.unit));
  }
  if (!options_.plan.empty() && !is_hta_) {
    out_.Raw(", \"plan\": " + Quote(options_.plan));
  }
  out_.Raw("}, \"distributedInfo\": {\"backend\": \"nccl\", \"rank\": ");
  out_.Number(layout_.ranks.empty() ? 0 : layout_.ranks.front().rank.value);
  out_.Raw(", \"world_size\": ");
  out_.Number(MeshOf(program_).RankCount());
  out_.Raw("}, \"displayTimeUnit\": \"ms\", \"baseTimeNanoseconds\": 0,\n\"traceEvents\": [");
}

// Some versions of Perfetto honour the sort indices, others sort by name: both give one order.
void Writer::Metadata() {
  std::size_t width = 1;
  for (const Layout::RankTracks& tracks : layout_.ranks) {
    width = std::max(width, std::to_string(tracks.rank.value).size());
  }
  for (const Layout::RankTracks& tracks : layout_.ranks) {
    std::string rank = std::to_string(tracks.rank.value);
    rank.insert(0, width - rank.size(), '0');
    const Track process = {tracks.rank.value, 0};
    Name(process, "process", "rank " + rank + " (" + options_.source + ")", tracks.rank.value);
    for (std::size_t s = 1; s < kStreamCount; ++s) {
      if (tracks.used[s]) {
        const auto stream = static_cast<Stream>(s);
        const std::int64_t place = static_cast<std::int64_t>(s) - 1;
        Name(TrackOf(tracks.rank, stream), "thread",
             std::to_string(place) + ' ' + std::string(NameOf(stream)), place);
      }
    }
    const bool has_stages = tracks.used[static_cast<std::size_t>(Stream::kPrevious)] ||
                            tracks.used[static_cast<std::size_t>(Stream::kNext)];
    const auto host_place = static_cast<std::int64_t>(has_stages ? Stream::kNext : Stream::kD2h);
    Name(TrackOf(tracks.rank, Stream::kHost), "thread", std::to_string(host_place) + " host",
         host_place);
  }
}

void Writer::Name(Track track, std::string_view what, std::string_view name,
                  std::int64_t sort_index) {
  const std::string kind(what);
  out_.Begin('M', track);
  out_.TimeField("ts", 0);
  out_.WordField("name", kind + "_name");
  out_.Raw(",\"args\":{");
  out_.QuotedField("name", Quote(name));
  out_.Raw("}");
  out_.End();
  out_.Begin('M', track);
  out_.TimeField("ts", 0);
  out_.WordField("name", kind + "_sort_index");
  out_.Raw(",\"args\":{");
  out_.NumberField("sort_index", sort_index);
  out_.Raw("}");
  out_.End();
}

// Opens a slice and its args.
void Writer::BeginSlice(Track track, std::string_view category, std::string_view quoted_name,
                        std::int64_t begin, std::int64_t end) {
  out_.Begin('X', track);
  out_.WordField("cat", category);
  out_.QuotedField("name", quoted_name);
  out_.TimeField("ts", begin);
  out_.TimeField("dur", end - begin);
  out_.Raw(",\"args\":{");
}

// The step as PyTorch's profiler marks it: what the host spends on it. Stands before the slices
// that it encloses, because one that begins at the same time must nest inside it.
void Writer::Annotation(const StepSpans& step) {
  const Span& head = trace_.spans[step.first];
  const std::string name = step.is_init ? "init" : "ProfilerStep#" + std::to_string(head.step);
  BeginSlice(TrackOf(head.rank, Stream::kHost), "user_annotation", Quote(name), step.begin,
             step.end);
  out_.Raw("}");
  out_.End();
}

void Writer::WriteSpan(std::size_t index) {
  const Span& span = trace_.spans[index];
  const PlacedSpan& placed = layout_.placed[index];
  const auto correlation = static_cast<std::int64_t>(index) + 1;
  if (span.stream != Stream::kHost) {
    IssueSlice(span, placed, correlation);
    if (!is_hta_ && placed.wait_peers > 0) {
      BeginSlice(TrackOf(span.rank, span.stream), "wait", "\"wait for peers\"",
                 placed.begin - placed.wait_peers, placed.begin);
      out_.QuotedField("op", OpNameOf(span));
      out_.Raw("}");
      out_.End();
    }
  }
  OpSlice(span, placed, correlation);
  Flows(index);
}

void Writer::IssueSlice(const Span& span, const PlacedSpan& placed, std::int64_t correlation) {
  const OpShape& shape = program_.ShapeOf(OpOf(span));
  BeginSlice(TrackOf(span.rank, Stream::kHost), "cuda_runtime",
             Quote(StyleOf(shape.code).runtime_call), placed.issue_begin, placed.issue_end);
  out_.NumberField("correlation", correlation);
  if (shape.kernel_count > 1) {
    out_.NumberField("launches", shape.kernel_count);
  }
  out_.Raw("}");
  out_.End();
}

// Quoted. Names of collectives and copies are those by which other tools sort slices into
// communication, copies and computation.
std::string Writer::SliceName(const Span& span, const Op& op) const {
  const OpShape& shape = program_.ShapeOf(op);
  const bool has_unit = op.subject != kNoSubject && op.subject < program_.units.size();
  const std::string subject = has_unit ? " (" + program_.units[op.subject].name + ")"
                              : IsTransfer(shape.code) ? " (" + OpName(program_, op) + ")"
                                                       : "";
  if (InfoOf(shape.code).is_collective) {
    return Quote("ncclDevKernel_" + std::string(NamesOf(shape.code).kernel) + subject);
  }
  switch (shape.code) {
    case OpCode::kCopyH2d:
      return Quote("Memcpy HtoD" + subject);
    case OpCode::kCopyD2h:
      return Quote("Memcpy DtoH" + subject);
    case OpCode::kStreamWait:
      return "\"Stream Wait Event\"";
    case OpCode::kHostWait:
      return Quote(StyleOf(shape.code).runtime_call);
    default:
      return OpNameOf(span);
  }
}

void Writer::OpSlice(const Span& span, const PlacedSpan& placed, std::int64_t correlation) {
  const Op& op = OpOf(span);
  const OpShape& shape = program_.ShapeOf(op);
  BeginSlice(TrackOf(span.rank, span.stream), StyleOf(shape.code).category, SliceName(span, op),
             placed.begin, placed.end);
  if (span.stream != Stream::kHost) {
    out_.NumberField("device", span.rank.value);
    out_.NumberField("stream", TrackOf(span.rank, span.stream).thread);
    out_.NumberField("correlation", correlation);
  }
  out_.QuotedField("op", OpNameOf(span));
  const bool of_model_op = shape.code == OpCode::kCompute || shape.code == OpCode::kAccumulateGrad;
  if (op.subject != kNoSubject && !of_model_op) {
    out_.QuotedField("unit", unit_names_[op.subject]);
  }
  if (InfoOf(shape.code).is_collective) {
    CollectiveArgs(shape);
  } else if (shape.bytes.value > 0) {
    out_.NumberField("bytes", shape.bytes.value);
  }
  if (!is_hta_) {
    OwnArgs(span, placed);
  }
  out_.Raw("}");
  out_.End();
}

void Writer::CollectiveArgs(const OpShape& shape) {
  const Group& group = program_.groups[shape.group.value];
  const std::int64_t whole = shape.bytes.value / SizeOf(shape.dtype);
  const std::int64_t part = CeilDiv(whole, group.size);
  out_.WordField("Collective name", NamesOf(shape.code).operation);
  out_.NumberField("In msg nelems", shape.code == OpCode::kAllGather ? part : whole);
  out_.NumberField("Out msg nelems", shape.code == OpCode::kReduceScatter ? part : whole);
  out_.NumberField("Group size", group.size);
  out_.WordField("dtype", NameIn(kTorchDTypes, shape.dtype));
  out_.QuotedField("Process Group Name", Quote(group.name));
}

// What ReadChromeTrace needs, and how the waiting before the op splits.
void Writer::OwnArgs(const Span& span, const PlacedSpan& placed) {
  const auto time = [&](std::string_view key, SimTime value) {
    out_.TimeField(key, internal::RoundTicks(value, layout_.unit));
  };
  out_.NumberField("step", span.step);
  out_.WordField("body", NameIn(kBodyNames, span.body));
  time("issue_begin_us", span.issue_begin);
  time("issued_us", span.issued);
  time("issue_end_us", span.issue_end);
  time("ready_us", span.ready);
  time("arrival_us", span.arrival);
  if (span.cpu > SimTime(0)) {
    time("cpu_us", span.cpu);
  }
  if (span.stream == Stream::kHost) {
    time("start_us", span.start);  // the slice begins when the host gets there
    return;
  }
  const std::array<std::pair<std::string_view, std::int64_t>, 4> waits = {{
      {"wait_host_us", placed.wait_host},
      {"wait_edges_us", placed.wait_edges},
      {"wait_communicator_us", placed.wait_communicator},
      {"wait_peers_us", placed.wait_peers},
  }};
  for (const auto& [key, ticks] : waits) {
    if (ticks > 0) {
      out_.TimeField(key, ticks);
    }
  }
}

// Arrows that end at the span. Each end lies inside its slice: an arrow leaves in the last tick of
// the slice before, and enters a device op at its start, a host op when it stops waiting.
void Writer::Flows(std::size_t index) {
  for (; next_flow_ < layout_.flows.size() && layout_.flows[next_flow_].to == index; ++next_flow_) {
    const std::uint32_t from = layout_.flows[next_flow_].from;
    const Span& source = trace_.spans[from];
    const Span& target = trace_.spans[index];
    const PlacedSpan& end = layout_.placed[index];
    const std::int64_t entry =
        std::clamp(internal::RoundTicks(target.start, layout_.unit), end.begin, end.end - 1);
    for (const bool is_begin : {true, false}) {
      out_.Begin(is_begin ? 's' : 'f', is_begin ? TrackOf(source.rank, source.stream)
                                                : TrackOf(target.rank, target.stream));
      if (!is_begin) {
        out_.WordField("bp", "e");
      }
      out_.NumberField("id", static_cast<std::int64_t>(first_flow_ + next_flow_) + 1);
      out_.WordField("cat", "dependency");
      out_.WordField("name", "dependency");
      out_.TimeField("ts", is_begin ? layout_.placed[from].end - 1 : entry);
      out_.End();
    }
  }
}

// Categories that are never used have no line, and the host's memory is written where it changes.
void Writer::Memory() {
  std::array<bool, kCategoryCount> on_device{};
  std::array<bool, kCategoryCount> on_host{};
  for (const MemorySample& sample : trace_.memory) {
    for (std::size_t c = 0; c < kCategoryCount; ++c) {
      on_device[c] = on_device[c] || sample.device[c].value != 0;
      on_host[c] = on_host[c] || sample.host[c].value != 0;
    }
  }
  const MemorySample none;
  for (std::size_t i = 0; i < trace_.memory.size(); ++i) {
    const MemorySample& sample = trace_.memory[i];
    const bool is_first = i == 0 || trace_.memory[i - 1].rank != sample.rank;
    const MemorySample& before = is_first ? none : trace_.memory[i - 1];
    BeginCounter("memory", sample);
    CounterArgs(sample.device, on_device, sample.reserved);
    if (sample.host != before.host) {
      BeginCounter("host memory", sample);
      CounterArgs(sample.host, on_host, Bytes(0));
    }
  }
}

void Writer::BeginCounter(std::string_view name, const MemorySample& sample) {
  out_.Begin('C', {sample.rank.value, 0});
  out_.WordField("name", name);
  out_.TimeField("ts", internal::RoundTicks(sample.time, layout_.unit));
  out_.NumberField("step", sample.step);
}

// Perfetto draws one line per key and never stacks them, hence the total.
void Writer::CounterArgs(const std::array<Bytes, kCategoryCount>& bytes,
                         const std::array<bool, kCategoryCount>& used, Bytes reserved) {
  out_.Raw(",\"args\":{");
  const std::int64_t total = Summed<std::int64_t>(bytes, &Bytes::value);
  out_.NumberField("total", total);
  if (reserved.value > 0) {
    out_.NumberField("reserved", reserved.value);
  }
  for (std::size_t c = 0; c < kCategoryCount; ++c) {
    if (used[c]) {
      out_.NumberField(NameOf(static_cast<Category>(c)), bytes[c].value);
    }
  }
  out_.Raw("}");
  out_.End();
}

std::string TextOf(std::span<const Program> programs, std::span<const Trace> traces,
                   const ChromeOptions& options, bool compressed) {
  TextSink sink(compressed);
  EventText out(sink, options.profile == ChromeProfile::kHta);
  std::size_t flow = 0;
  for (std::size_t i = 0; i < programs.size(); ++i) {
    Writer writer(programs[i], traces[i], options, out, flow);
    if (i == 0) {
      writer.Header();
    }
    writer.Run();
    flow = writer.flow_end();
  }
  out.Raw("\n]}\n");
  out.Flush();
  return sink.Finish();
}

}  // namespace

std::string ChromeTraceText(const Program& program, const Trace& trace,
                            const ChromeOptions& options) {
  return TextOf({&program, 1}, {&trace, 1}, options, false);
}

void WriteChromeTraces(std::span<const Program> programs, std::span<const Trace> traces,
                       const ChromeOptions& options, const std::string& file) {
  WriteFileAtomically(file, TextOf(programs, traces, options, file.ends_with(".gz")));
}

void WriteChromeTrace(const Program& program, const Trace& trace, const ChromeOptions& options,
                      const std::string& file) {
  WriteChromeTraces({&program, 1}, {&trace, 1}, options, file);
}

}  // namespace shardwright
