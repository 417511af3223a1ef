#pragma once

#include <cstddef>
#include <span>
#include <string>

namespace shardwright {

// A file's bytes in memory, paged in as they are touched. The file must not shrink meanwhile.
class MappedFile {
 public:
  // Throws InputError when the file is missing, a folder or unreadable.
  explicit MappedFile(const std::string& file);
  ~MappedFile();
  MappedFile(const MappedFile&) = delete;
  MappedFile& operator=(const MappedFile&) = delete;

  [[nodiscard]] std::span<const std::byte> bytes() const { return bytes_; }

 private:
  std::span<const std::byte> bytes_;
};

}  // namespace shardwright
