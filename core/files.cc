#include "core/files.h"

#include <cerrno>
#include <cstring>
#include <mutex>
#include <set>
#include <system_error>

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include "core/error.h"
#include "core/ranges.h"
#include "core/staged_file.h"

namespace shardwright {
namespace {

namespace fs = std::filesystem;

// Readers are called through many layers; a parameter in each signature would say the same.
// Names are added before threads begin to read; Python may add some meanwhile.
std::mutex mutex;
std::set<std::string> names_of_user;

bool IsOfUser(const std::string& file) {
  const std::lock_guard lock(mutex);
  return names_of_user.count(file) != 0;
}

}  // namespace

InputFile::InputFile(const std::string& file, std::string_view expected)
    : file_(file), expected_(expected) {
  const bool is_named = IsOfUser(file);
  struct stat status {};
  const auto check = [&](int failed) {
    const char* const found = failed != 0
                                  ? (errno == ENOENT ? "no such file" : std::strerror(errno))
                              : S_ISDIR(status.st_mode)             ? "a folder"
                              : S_ISREG(status.st_mode) || is_named ? nullptr
                                                                    : "a pipe, socket or device";
    if (found != nullptr) {
      ::close(descriptor_);
      throw InputError(file, found, expected);
    }
  };
  // First by its name, since opening alone makes some devices act; then what was opened.
  check(::stat(file.c_str(), &status));
  const int waits = is_named ? 0 : O_NONBLOCK;
  descriptor_ = ::open(file.c_str(), O_RDONLY | O_CLOEXEC | O_NOCTTY | waits);
  check(descriptor_ < 0 ? -1 : ::fstat(descriptor_, &status));
  size_ = S_ISREG(status.st_mode) ? status.st_size : 0;
  RememberRead(file);
}

InputFile::~InputFile() {
  ::close(descriptor_);
}

std::size_t InputFile::Read(void* bytes, std::size_t size) {
  std::size_t done = 0;
  for (ssize_t count = 1; count != 0 && done < size;) {
    count = ::read(descriptor_, static_cast<char*>(bytes) + done, size - done);
    if (count < 0 && errno != EINTR) {
      throw InputError(file_, std::strerror(errno), expected_);
    }
    done += static_cast<std::size_t>(std::max<ssize_t>(count, 0));
  }
  return done;
}

void NameByUser(const std::string& file) {
  const std::lock_guard lock(mutex);
  names_of_user.insert(file);
}

bool Exists(const fs::path& path) {
  std::error_code ignored;
  return fs::exists(path, ignored);
}

bool IsFolder(const fs::path& path) {
  std::error_code ignored;
  return fs::is_directory(path, ignored);
}

bool IsRegularFile(const fs::path& path) {
  std::error_code ignored;
  return fs::is_regular_file(path, ignored);
}

std::vector<fs::path> EntriesOf(const fs::path& folder, std::string_view expected) {
  std::error_code error;
  std::vector<fs::path> entries;
  for (fs::directory_iterator it(folder, error), end; !error && it != end; it.increment(error)) {
    entries.push_back(it->path());
  }
  if (error && !expected.empty()) {
    throw InputError(folder.string(), "a folder that cannot be read (" + error.message() + ")",
                     expected);
  }
  SortAll(entries);
  return entries;
}

}  // namespace shardwright
