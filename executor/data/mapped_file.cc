#include "executor/data/mapped_file.h"

#include <cerrno>
#include <cstring>

#include <sys/mman.h>

#include "core/error.h"
#include "core/files.h"
#include "executor/checkpoint/output_file.h"

namespace shardwright {

MappedFile::MappedFile(const std::string& file) : file_(file) {
  const InputFile in(file);
  const auto size = static_cast<std::size_t>(in.size());
  void* address =
      size == 0 ? nullptr : ::mmap(nullptr, size, PROT_READ, MAP_PRIVATE, in.descriptor(), 0);
  if (address == MAP_FAILED) {
    throw InputError(file, std::strerror(errno), "a file that can be mapped into memory");
  }
  bytes_ = {static_cast<const std::byte*>(address), size};
}

const std::byte* MappedFile::At(std::int64_t begin, std::int64_t size) const {
  if (begin < 0 || size < 0 || size > std::ssize(bytes_) - begin) {
    throw InputError(file_, std::to_string(bytes_.size()) + " bytes",
                     std::to_string(size) + " from byte " + std::to_string(begin) + " on");
  }
  return bytes_.data() + begin;
}

MappedFile::~MappedFile() {
  if (!bytes_.empty()) {
    ::munmap(const_cast<std::byte*>(bytes_.data()), bytes_.size());
  }
}

std::uint32_t ContentChecksum(std::span<const std::byte> bytes, std::uint32_t crc) {
  constexpr std::size_t kPiece = std::size_t{64} << 10;
  constexpr std::size_t kPieces = 1024;
  const auto size = static_cast<std::uint64_t>(bytes.size());
  crc = Crc32(crc, &size, sizeof size);
  if (bytes.size() <= kPieces * kPiece) {
    return Crc32(crc, bytes.data(), std::ssize(bytes));
  }
  for (std::size_t i = 0; i < kPieces; ++i) {  // the first begins, the last ends it
    const std::size_t begin = (bytes.size() - kPiece) / (kPieces - 1) * i;
    crc = Crc32(crc, bytes.data() + begin, std::int64_t{kPiece});
  }
  return crc;
}

}  // namespace shardwright
