#pragma once

// Rows of a profiler's file as they come, and the step that gives each its place in training.

#include <array>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <unordered_map>
#include <vector>

#include "core/budget.h"
#include "traces/recording.h"

namespace shardwright::internal {

// Texts by number; equal texts have equal numbers.
class NameTable {
 public:
  // `file` is what they come from.
  explicit NameTable(const std::string& file);
  [[nodiscard]] std::uint32_t Find(std::string_view text);
  [[nodiscard]] const std::vector<std::string>& names() const { return names_; }
  [[nodiscard]] std::vector<std::string> Take() { return std::move(names_); }

 private:
  struct Hash : std::hash<std::string_view> {
    using is_transparent = void;
  };
  Budget bytes_;
  std::vector<std::string> names_;
  std::unordered_map<std::string, std::uint32_t, Hash, std::equal_to<>> numbers_;
};

// Times are nanoseconds in the file's own clock.
struct RawSpan {
  std::int64_t begin = 0;
  std::int64_t end = 0;
  std::uint32_t name = 0;
  std::uint32_t thread = 0;
};

struct RawLaunch {
  std::int64_t correlation = 0;
  std::int64_t begin = 0;
  std::int64_t end = 0;
};

// On a queue of the device.
struct RawWork {
  RawSpan span;  // thread: the queue
  std::int64_t correlation = 0;
  Bytes bytes;
  std::int32_t group_size = 0;
  ActivityKind kind = ActivityKind::kKernel;
  OpCode collective = OpCode::kAllGather;
};

// A collective as c10d was called, on the host.
struct RawCall {
  RawSpan span;
  Bytes bytes;
  OpCode collective = OpCode::kAllGather;
};

// A call that says what the model does.
struct RawModelCall {
  std::int64_t begin = 0;
  HostCall call;  // its step is not known yet
};

// Sizes of one operand; those beyond the fourth are left out.
struct OperandSizes {
  std::array<std::int64_t, 4> sizes{};
  std::size_t rank = 0;
  bool is_empty = false;  // one of them is 0
};

struct RawRecording {
  RawRecording(const std::string& from, std::string by);

  std::string file;
  std::string source;
  Budget rows;  // that are kept, of all kinds
  std::int64_t rank = 0;
  std::int64_t ranks = 0;
  std::int64_t events = 0;
  NameTable names;
  std::vector<RawSpan> ranges;  // annotations that mark steps, units and phases
  std::vector<RawSpan> host;    // ops of the host; they count where there is no device
  std::vector<RawLaunch> launches;
  std::vector<RawWork> work;
  std::vector<RawCall> calls;
  std::vector<RawModelCall> model_calls;
  struct Sample {
    std::int64_t time = 0;
    std::int64_t allocated = 0;
    std::int64_t reserved = 0;
  };
  std::vector<Sample> device_memory, host_memory;
};

// Whether a range says anything about steps, units or phases.
[[nodiscard]] bool IsMarker(std::string_view name);
// "ncclDevKernel_ReduceScatter_...", "_reduce_scatter_base", "gloo:all_gather"; nothing for others.
[[nodiscard]] std::optional<OpCode> CollectiveOfName(std::string_view name);
// Of a kernel of a communication library (NCCL, RCCL, MSCCL, NVSHMEM): never compute. An exchange,
// kAllToAll, where its name says no more: "ncclDevKernel_SendRecv", RCCL's "ncclDevKernel_Generic".
[[nodiscard]] std::optional<OpCode> CollectiveOfKernel(std::string_view name);

// Which call of the host is a product, attention or convolution; nothing for others, and for those
// inside of such a call. "aten::addmm", "flash_attn::_flash_attn_backward".
[[nodiscard]] std::optional<CallKind> CallOfName(std::string_view name);
// What a call of this name and kind works on.
[[nodiscard]] HostCall CallWithSizes(std::string_view name, CallKind kind,
                                     std::span<const OperandSizes> operands);

// Consumes `raw`. Throws InputError when there is no work at all.
[[nodiscard]] ProfilerRecording Resolve(RawRecording raw);

// Turns the host's ops into work, where there is no device: outermost ops of the threads that run
// the model, and the ranges of gloo. In resolve_host.cc.
[[nodiscard]] std::vector<RawWork> WorkOfHost(const RawRecording& raw);

}  // namespace shardwright::internal
