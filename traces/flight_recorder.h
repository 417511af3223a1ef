#pragma once

// Dumps of PyTorch's Flight Recorder, one per rank: the collectives that the rank issued last,
// those of each process group numbered. As pickles (nothing in them is ever run) or as JSON.

#include <cstdint>
#include <string>
#include <vector>

namespace shardwright {

// A line of a stack of Python.
struct FlightFrame {
  std::string function;
  std::string file;
  std::int64_t line = 0;

  bool operator==(const FlightFrame&) const = default;
};

struct FlightGroup {
  std::string name;                 // "0"
  std::string description;          // "default_pg", "mesh_shard"
  std::vector<std::int64_t> ranks;  // ascending; empty: the dump does not say

  bool operator==(const FlightGroup&) const = default;
};

// A collective, or a message between two ranks.
struct FlightCall {
  std::size_t group = 0;         // in FlightDump::groups
  std::int64_t sequence = 0;     // of the collectives of the group, or of its messages
  bool is_message = false;       // send or receive
  std::string name;              // "all_gather", "_reduce_scatter_base": without the back end
  std::string dtype;             // "Float"; of the first tensor
  std::int64_t elements_in = 0;  // of all inputs
  std::int64_t elements_out = 0;
  std::vector<std::size_t> frames;  // in FlightDump::frames, innermost first
  // Nanoseconds since 1970; 0: the dump does not say, or it did not happen.
  std::int64_t created = 0;
  std::int64_t started = 0;
  std::int64_t completed = 0;
  bool is_scheduled = false;  // issued, and the GPU has not started it
  bool retired = false;       // nobody waits for it any more: it is over, or was given up
};

struct FlightDump {
  std::string file;
  std::int64_t rank = 0;
  std::string version;       // of the format
  std::int64_t written = 0;  // nanoseconds since 1970: the file's time
  std::vector<FlightGroup> groups;
  std::vector<FlightFrame> frames;
  std::vector<FlightCall> calls;  // in the order in which they were issued
};

// The rank that ends the name of a dump, before endings such as ".json": "nccl_trace_rank_3" is 3;
// -1 without one.
[[nodiscard]] std::int64_t RankOfDump(const std::string& file);

// Names are printable. Throws InputError for a name without a rank, code, damaged files and what is
// no dump of versions 2.x. O(file); memory a few times the file.
[[nodiscard]] FlightDump ReadFlightDump(const std::string& file);

// Files of which some are folders: those inside that have a rank in their names. Throws InputError
// for a folder without any, and for one rank twice.
[[nodiscard]] std::vector<FlightDump> ReadFlightDumps(const std::vector<std::string>& names);

}  // namespace shardwright
