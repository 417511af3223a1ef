#pragma once

// What the runtime needs of a device: memory, in-order streams, a way to wait, a clock. Two devices
// implement it: `host` (executor/host) and `cuda`.
//
// A stream runs its work in the order in which it was submitted. Work gets a ticket; other work, or
// the host, can wait for it. This is CUDA's model with one event per op: a ticket is what
// cudaEventRecord behind the work would give, a wait is cudaStreamWaitEvent before it.

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <span>
#include <string>

#include "core/units.h"
#include "executor/call.h"
#include "schedule/program.h"
#include "traces/trace.h"

namespace shardwright {

// Work number `sequence` of a stream, from 1 on; 0 is over since ever.
struct Ticket {
  Stream stream = Stream::kHost;
  std::uint64_t sequence = 0;

  bool operator==(const Ticket&) const = default;
};

// One op on its way to a stream. Pointers stay valid until the work is over.
struct Work {
  const std::string* name = nullptr;  // op id, for error messages
  Stream stream = Stream::kCompute;
  Call* call = nullptr;  // null: nothing but the waits
  // Memory that the work is the first to use since its allocation, if the device shall fill it with
  // NaNs before, so that a read of bytes nobody wrote shows.
  std::span<const ByteRange> poison;
  std::span<const Ticket> waits;  // copied by Submit
  StepContext* step = nullptr;
  // Emulation: the work ends no earlier than this after its start. 0: as fast as it goes.
  SimTime least_duration{0};
  Span* span = nullptr;  // where the times behind issue_begin go; null: nobody asks
  // Where the time of its end goes, by the clock of Now, to be read once the host has waited for
  // the work; null: nobody asks.
  SimTime* end = nullptr;
};

// The device of one rank. All calls come from that rank's host thread. Every function may throw
// RunError when the device fails, or when another rank has failed.
class Device {
 public:
  virtual ~Device() = default;

  // Zero-filled memory that lives as long as the device. `on_host`: host memory that the streams
  // can reach (pinned).
  [[nodiscard]] virtual std::byte* Allocate(Bytes size, bool on_host) = 0;
  // Now, between the device's memory and any memory of this process, either way. The device is
  // idle.
  virtual void Copy(void* to, const void* from, std::int64_t bytes) {
    std::memcpy(to, from, static_cast<std::size_t>(bytes));
  }
  // What the ops of the step body will be submitted as, by op; ops that run on the host have stream
  // kHost. Waits, step, span and durations are left open. Called at most once, before the first
  // step, and what the works refer to outlives the device.
  virtual void Prepare(const Body& /*step*/, std::span<const Work> /*works*/) {}
  virtual Ticket Submit(const Work& work) = 0;
  // Blocks until the work is over.
  virtual void Wait(Ticket ticket) = 0;
  // Runs a call whose memory is on the host, now, on the calling thread. Collectives are allowed.
  virtual void RunOnHost(const Work& work) = 0;
  // Blocks until all work is over; afterwards all spans are complete.
  virtual void Finish() = 0;
  // Ends the run on all ranks: whoever waits for this rank's work throws RunError with `cause`.
  virtual void Fail(const std::string& cause) = 0;
  // Ends all work, done or not: afterwards no thread of this device runs. Others may still read its
  // memory, so all devices of a run stop before the first is destroyed.
  virtual void Stop() = 0;
  // Time since the start of the run, on a clock that all ranks of a machine share.
  [[nodiscard]] virtual SimTime Now() const = 0;
};

}  // namespace shardwright
