#pragma once

// What a profiler that knows nothing of our programs recorded of one rank: PyTorch's profiler
// (Kineto) or Nsight Systems. Work is assigned to steps, units, phases and micro-batches, so that
// it joins with a program by these and by order. docs/import.md, section "Measurements", has the
// rules.

#include <cstdint>
#include <string>
#include <vector>

#include "core/units.h"
#include "models/kernel_set.h"
#include "schedule/program.h"

namespace shardwright {

enum class ActivityKind : std::uint8_t {
  kKernel,
  kCollective,
  kToDevice,
  kToHost,
  kWithinDevice,  // copies into and out of communication buffers, casts, fills
};

// A piece of work on a queue of the device (on the host, where there is no device).
struct Activity {
  SimTime issue_begin, issue_end;  // the host's call; both `start` where that is not recorded
  SimTime start, end;
  Bytes bytes;                      // copies: moved; collectives: the full array; 0: not recorded
  std::uint32_t name = 0;           // ProfilerRecording::names
  std::uint32_t queue = 0;          // a stream, or a thread
  std::uint32_t step = 0;           // ProfilerRecording::steps
  std::uint32_t unit = kNoSubject;  // ProfilerRecording::units; kNoSubject: not known
  std::int32_t group_size = 0;      // collectives; 0: not recorded
  std::uint16_t micro_batch = 0;
  ActivityKind kind = ActivityKind::kKernel;
  KernelClass kernel = KernelClass::kElementwise;  // kKernel
  OpCode collective = OpCode::kAllGather;          // kCollective
  Phase phase = Phase::kForward;                   // kForward, kBackward or kOptimizer
  bool has_issue = false;
};

// What the host asked for, whatever kernels it became.
enum class CallKind : std::uint8_t {
  kProduct,
  kAttentionForward,
  kAttentionBackward,
  kConvolution,          // forward or backward
  kAttentionWrittenOut,  // forward; its products are calls of their own
};

struct HostCall {
  CallKind kind = CallKind::kProduct;
  std::uint32_t step = 0;  // ProfilerRecording::steps
  // kProduct: `batch` products (m, k) x (k, n); attention: `batch` heads of all samples, m tokens,
  // k its head_dim. 0: shapes were not recorded.
  std::int64_t batch = 0, m = 0, n = 0, k = 0;
};

// What the host did beside work, by ranges of PyTorch's own.
enum class HostRangeKind : std::uint8_t {
  kDataLoader,      // the training loop waited for the next batch
  kOptimizer,       // Optimizer.step
  kCompiledRegion,  // one graph of torch.compile, as called; another begins behind each graph break
};
struct HostRange {
  HostRangeKind kind = HostRangeKind::kDataLoader;
  std::uint32_t step = 0;  // ProfilerRecording::steps
  SimTime begin, end;
};

struct RecordedInterval {
  std::string name;  // "ProfilerStep#3"
  SimTime begin, end;
};

// Bytes of PyTorch's allocator at one moment.
struct AllocatorSample {
  SimTime time;
  Bytes allocated, reserved;
};

struct ProfilerRecording {
  std::string file;
  std::string source;  // "kineto" or "nsight"
  std::int64_t rank = 0;
  std::int64_t ranks = 0;  // of the job; 0: not recorded
  bool on_device = false;  // false: the host did the work, and there are no launches
  bool has_units = false;  // FSDP2's ranges were recorded
  std::vector<std::string> names;
  std::vector<std::string> units;       // as the trace has them; "" is the root
  std::vector<Activity> activities;     // by start
  std::vector<RecordedInterval> steps;  // ascending
  std::vector<HostCall> calls;          // by time; none where only the device was recorded
  std::vector<HostRange> ranges;        // by time
  std::vector<AllocatorSample> memory;  // by time; of the device, else of the host
  std::int64_t events = 0;              // in the file
  std::vector<std::string> notes;       // what was assumed or is missing
};

// By a kernel's or host op's name, where nothing else tells. docs/import.md lists the patterns.
[[nodiscard]] KernelClass ClassOfKernelName(std::string_view name);

}  // namespace shardwright
