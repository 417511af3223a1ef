#pragma once

// For the targets of this folder, one reader of foreign bytes each: whatever the bytes, it reads
// them or throws InputError. libFuzzer finds the bytes by coverage; scripts/fuzz.sh runs all.

#include <cstdio>
#include <string>
#include <string_view>

#include <unistd.h>

#include "core/error.h"

namespace shardwright::fuzz {

// What the target does with them.
void Read(std::string_view bytes);

// A file in memory that holds the bytes; always the same one, since making files costs more than
// most readers.
inline std::string FileWith(std::string_view bytes, const std::string& ending = "") {
  const std::string name =
      "/dev/shm/shardwright-fuzz-" + std::to_string(::getpid()) + "-file" + ending;
  std::FILE* const file = std::fopen(name.c_str(), "wb");
  SW_CHECK(file != nullptr, name);
  SW_CHECK(std::fwrite(bytes.data(), 1, bytes.size(), file) == bytes.size(), name);
  std::fclose(file);
  return name;
}

}  // namespace shardwright::fuzz
