#pragma once

#include <cstdint>
#include <string>

#include "core/staged_file.h"

namespace shardwright {

// A new file that is written from front to back, with the CRC-32 of what went into it. All
// functions throw EnvironmentError ("FILE: cannot write: No space left on device").
class CheckpointFile {
 public:
  // Creates the file; it must not exist yet.
  explicit CheckpointFile(const std::string& file);
  // Writes into a file that gets its name later. It outlives this object.
  CheckpointFile(const std::string& file, const StagedFile& staged);
  ~CheckpointFile();
  CheckpointFile(const CheckpointFile&) = delete;
  CheckpointFile& operator=(const CheckpointFile&) = delete;

  void Write(const void* data, std::int64_t size);
  // Everything is on the disk when this returns. Nothing may be written afterwards.
  void SyncAndClose();

  [[nodiscard]] std::int64_t size() const { return size_; }
  [[nodiscard]] std::uint32_t crc() const { return crc_; }

 private:
  std::string file_;
  int descriptor_ = -1;
  std::int64_t size_ = 0;
  std::uint32_t crc_ = 0;
};

// CRC-32 (ISO 3309, as gzip and `crc32` compute it) of `size` bytes, continuing from `crc`.
[[nodiscard]] std::uint32_t Crc32(std::uint32_t crc, const void* data, std::int64_t size);

// Makes the entries of a folder durable. File systems that cannot do that are left alone.
void SyncFolder(const std::string& folder);

}  // namespace shardwright
