#pragma once

// Takes a Chrome trace apart into events, one at a time.

#include <cstddef>
#include <cstdint>
#include <functional>
#include <optional>
#include <string>
#include <vector>

#include "core/error.h"

namespace shardwright::internal {

// A number of an event: a time in microseconds, or a count.
struct EventNumber {
  std::string key;
  double value = 0;
  bool is_integer = false;
  std::int64_t integer = 0;  // of an integer
};

// An event of the list. Members that we have no use for (lists, objects other than args, booleans)
// are left out.
struct ChromeEvent {
  std::size_t index = 0;  // in traceEvents
  std::string phase, category, name;
  std::string op, body;  // args
  std::vector<EventNumber> numbers;
  std::vector<EventNumber> args;
};

// What stands before the events; see docs/trace_format.md.
struct ChromeHeader {
  std::string source;
  std::string plan;  // text of the plan file; empty: not there
  std::optional<double> step_time_us;
};

// The header alone, without reading the events. Throws as ForEachEvent does.
[[nodiscard]] ChromeHeader ReadHeader(const std::string& file);

// Calls `handle` for each event, in the order of the file. Throws InputError when the file is
// damaged or is not a trace of ours that can be read back.
void ForEachEvent(const std::string& file, const std::function<void(const ChromeEvent&)>& handle);

}  // namespace shardwright::internal
