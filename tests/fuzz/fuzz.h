#pragma once

// For the targets of this folder, one reader of foreign bytes each: whatever the bytes, it reads
// them or throws InputError. libFuzzer finds the bytes by coverage; scripts/fuzz.sh runs all.

#include <string>
#include <string_view>

#include <fcntl.h>
#include <unistd.h>

#include "core/error.h"

namespace shardwright::fuzz {

// What the target does with them.
void Read(std::string_view bytes);

// The name of this process's files in memory.
inline std::string MemoryName() {
  return "/dev/shm/shardwright-fuzz-" + std::to_string(::getpid());
}

// A file in memory that holds the bytes; always the same one, which stays open, since making files
// costs more than most readers. A target has one name for it.
inline const std::string& FileWith(std::string_view bytes,
                                   const std::string& name = MemoryName() + "-file") {
  static const std::string kept = name;
  static const int file = ::open(kept.c_str(), O_RDWR | O_CREAT | O_TRUNC | O_CLOEXEC, 0600);
  const bool is_written =
      ::ftruncate(file, 0) == 0 &&
      ::pwrite(file, bytes.data(), bytes.size(), 0) == static_cast<ssize_t>(bytes.size());
  SW_CHECK(file >= 0 && is_written, kept);
  return kept;
}

}  // namespace shardwright::fuzz
