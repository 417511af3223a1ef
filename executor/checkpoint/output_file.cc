#include "executor/checkpoint/output_file.h"

#include <algorithm>
#include <cerrno>
#include <cstddef>
#include <cstring>

#include <fcntl.h>
#include <unistd.h>
#include <zlib.h>

#include "core/error.h"

namespace shardwright {
namespace {

EnvironmentError CannotWrite(const std::string& file, int error) {
  return EnvironmentError(file + ": cannot write: " + std::strerror(error));
}

}  // namespace

CheckpointFile::CheckpointFile(const std::string& file) : file_(file) {
  descriptor_ = ::open(file.c_str(), O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, 0666);
  if (descriptor_ < 0) {
    throw CannotWrite(file, errno);
  }
}

CheckpointFile::CheckpointFile(const std::string& file, const StagedFile& staged)
    : file_(file), descriptor_(::fcntl(staged.descriptor(), F_DUPFD_CLOEXEC, 0)) {
  if (descriptor_ < 0) {
    throw CannotWrite(file, errno);
  }
}

CheckpointFile::~CheckpointFile() {
  if (descriptor_ >= 0) {
    ::close(descriptor_);
  }
}

void CheckpointFile::Write(const void* data, std::int64_t size) {
  const auto* bytes = static_cast<const char*>(data);
  crc_ = Crc32(crc_, data, size);
  size_ += size;
  while (size > 0) {
    const ssize_t count = ::write(descriptor_, bytes, static_cast<std::size_t>(size));
    if (count < 0 && errno == EINTR) {
      continue;
    }
    if (count < 0) {
      throw CannotWrite(file_, errno);
    }
    bytes += count;
    size -= count;
  }
}

void CheckpointFile::SyncAndClose() {
  const bool synced = ::fsync(descriptor_) == 0;
  const int error = errno;
  const bool closed = ::close(descriptor_) == 0;
  descriptor_ = -1;
  if (!synced || !closed) {
    throw CannotWrite(file_, synced ? errno : error);
  }
}

std::uint32_t Crc32(std::uint32_t crc, const void* data, std::int64_t size) {
  constexpr std::int64_t kLargest = std::int64_t{1} << 30;  // zlib counts in 32 bits
  const auto* bytes = static_cast<const Bytef*>(data);
  while (size > 0) {
    const std::int64_t count = std::min(size, kLargest);
    crc = static_cast<std::uint32_t>(::crc32(crc, bytes, static_cast<uInt>(count)));
    bytes += count;
    size -= count;
  }
  return crc;
}

void SyncFolder(const std::string& folder) {
  const int descriptor = ::open(folder.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC);
  if (descriptor >= 0) {
    ::fsync(descriptor);
    ::close(descriptor);
  }
}

}  // namespace shardwright
