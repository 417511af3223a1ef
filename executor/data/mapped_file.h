#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <string>

namespace shardwright {

// A file's bytes in memory, paged in as they are touched. The file must not shrink meanwhile.
class MappedFile {
 public:
  // Throws InputError when the file is missing, a folder or unreadable. A pipe has no bytes.
  explicit MappedFile(const std::string& file);
  ~MappedFile();
  MappedFile(const MappedFile&) = delete;
  MappedFile& operator=(const MappedFile&) = delete;

  [[nodiscard]] std::span<const std::byte> bytes() const { return bytes_; }
  // The first of `size` bytes from `begin` on. Throws InputError unless all are in the file.
  [[nodiscard]] const std::byte* At(std::int64_t begin, std::int64_t size) const;

 private:
  std::string file_;
  std::span<const std::byte> bytes_;
};

// A CRC-32 of the bytes, continuing from `crc`: of all of them up to 64 MiB, else of pieces of 64
// KiB from everywhere that are 64 MiB together.
[[nodiscard]] std::uint32_t ContentChecksum(std::span<const std::byte> bytes, std::uint32_t crc);

}  // namespace shardwright
