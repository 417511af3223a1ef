#pragma once

// Writes traces as Chrome trace event JSON, which Perfetto, chrome://tracing and Holistic Trace
// Analysis open. docs/trace_format.md describes every field.

#include <cstdint>
#include <optional>
#include <span>
#include <string>

#include "core/units.h"
#include "schedule/program.h"
#include "traces/trace.h"

namespace shardwright {

enum class ChromeProfile : std::uint8_t {
  // All there is: nanoseconds, flows, memory counters. ReadChromeTrace reads it back.
  kPerfetto,
  // What Holistic Trace Analysis 0.6 reads right: the last step alone, whole microseconds, no slice
  // shorter than one. Times are shifted where that needs room, so nothing reads it back.
  kHta,
};

struct ChromeOptions {
  ChromeProfile profile = ChromeProfile::kPerfetto;
  // Where the times come from; part of the process names.
  std::string source = "simulated";
  // For `compare`: the text of the plan file, and the simulated period of a step. May be empty.
  std::string plan = {};
  std::optional<SimTime> step_time = std::nullopt;
};

// The trace as text. Times are rounded to the nearest nanosecond, halves up, which keeps their
// order: what does not overlap in `trace` does not overlap in the text.
[[nodiscard]] std::string ChromeTraceText(const Program& program, const Trace& trace,
                                          const ChromeOptions& options);

// Writes that text to a file as a whole or not at all, compressed if its name ends in ".gz"; "-" is
// standard output. Requires a trace of `program`. Throws EnvironmentError.
void WriteChromeTrace(const Program& program, const Trace& trace, const ChromeOptions& options,
                      const std::string& file);

// The same of several programs, each with its trace, whose spans are of ranks of its own: stages of
// a pipeline. Nothing reads it back.
void WriteChromeTraces(std::span<const Program> programs, std::span<const Trace> traces,
                       const ChromeOptions& options, const std::string& file);

}  // namespace shardwright
