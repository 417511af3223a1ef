#include "executor/data/mapped_file.h"

#include <cerrno>
#include <cstring>

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include "core/error.h"
#include "core/staged_file.h"
#include "executor/checkpoint/output_file.h"

namespace shardwright {

MappedFile::MappedFile(const std::string& file) {
  RememberRead(file);
  const int descriptor = ::open(file.c_str(), O_RDONLY | O_CLOEXEC);
  if (descriptor < 0) {
    throw InputError(file, std::strerror(errno), "a readable file");
  }
  struct stat status {};
  if (::fstat(descriptor, &status) != 0 || !S_ISREG(status.st_mode)) {
    ::close(descriptor);
    throw InputError(file, "no regular file", "a readable file");
  }
  const auto size = static_cast<std::size_t>(status.st_size);
  void* address =
      size == 0 ? nullptr : ::mmap(nullptr, size, PROT_READ, MAP_PRIVATE, descriptor, 0);
  const int error = errno;
  ::close(descriptor);
  if (address == MAP_FAILED) {
    throw InputError(file, std::strerror(error), "a file that can be mapped into memory");
  }
  bytes_ = {static_cast<const std::byte*>(address), size};
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
