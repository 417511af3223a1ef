#pragma once

// Nodes of a Chakra execution trace as they stand in the file.

#include <cstddef>
#include <cstdint>
#include <map>
#include <optional>
#include <string>
#include <vector>

#include "traces/internal/chakra_words.h"
#include "traces/internal/raw_recording.h"

namespace shardwright::internal {

struct ChakraNode {
  std::uint64_t id = 0;
  std::int64_t start = 0, duration = 0;  // microseconds
  std::int64_t comm_size = 0;            // bytes; collectives
  std::size_t deps_begin = 0;            // ChakraFile::deps: `ctrl_deps` callers or ops before it,
  std::uint32_t ctrl_deps = 0;           // then `data_deps` others
  std::uint32_t data_deps = 0;
  std::uint32_t name = 0;  // ChakraFile::names, as the next ones; kNoSubject: not there
  std::uint32_t stream = kNoSubject;
  std::uint32_t group = kNoSubject;
  std::int32_t thread = 0;
  std::optional<std::uint64_t> comm_type;
  ChakraType type = ChakraType::kInvalid;
  bool on_host = false;
};

struct ChakraFile {
  explicit ChakraFile(const std::string& file) : names(file) {}

  std::vector<ChakraNode> nodes;  // as in the file
  std::vector<std::uint64_t> deps;
  NameTable names;
  std::map<std::string, std::int64_t> group_sizes;  // as "process_group:init" has them, by pg_name
};

// Throws InputError for damage, other schemas, what `simulate --chakra` wrote and more than the
// limits of docs/security.md.
[[nodiscard]] ChakraFile ReadChakraNodes(const std::string& file);

}  // namespace shardwright::internal
