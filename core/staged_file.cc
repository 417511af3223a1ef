#include "core/staged_file.h"

#include <array>
#include <cerrno>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <deque>
#include <map>
#include <mutex>
#include <system_error>
#include <utility>

#include <fcntl.h>
#include <sys/random.h>
#include <sys/stat.h>
#include <unistd.h>

#include "core/error.h"
#include "core/usage_error.h"

namespace shardwright {
namespace {

namespace fs = std::filesystem;

EnvironmentError CannotWrite(const std::string& file, const std::string& why) {
  return EnvironmentError(file + ": cannot write: " + why);
}

EnvironmentError CannotWrite(const std::string& file, int code) {
  return CannotWrite(file, std::strerror(code));
}

fs::path FolderOf(const fs::path& path) {
  return path.has_parent_path() ? path.parent_path() : fs::path(".");
}

bool IsTrusted(uid_t owner) {
  return owner == ::geteuid() || owner == 0;
}

bool EverybodyMayWrite(const fs::path& folder) {
  struct stat status {};
  return ::stat(folder.c_str(), &status) == 0 && (status.st_mode & S_IWOTH) != 0;
}

// What a pipe or file of this process is called; where such links lead only the system knows.
bool IsOfSystem(const fs::path& link) {
  return link.native().starts_with("/proc/");
}

void CheckOwner(const std::string& file, const fs::path& path, uid_t owner, bool is_last,
                const char* what) {
  if (!IsTrusted(owner) && (is_last || EverybodyMayWrite(FolderOf(path)))) {
    throw CannotWrite(file, path.string() + " is a " + what + " of user " + std::to_string(owner) +
                                ", expected one of yours (user " + std::to_string(::geteuid()) +
                                ')');
  }
}

// 2^64 names: nobody has made all of them.
std::string RandomName(const std::string& name) {
  std::uint64_t number = 0;
  if (::getrandom(&number, sizeof number, 0) != sizeof number) {
    throw CannotWrite(name, errno);
  }
  std::array<char, 32> text{};
  std::snprintf(text.data(), text.size(), ".tmp.%016llx", static_cast<unsigned long long>(number));
  constexpr std::size_t kLongest = 255 - 21;  // what file systems allow, less the ending
  return name.substr(0, kLongest) + text.data();
}

// By device and inode, so that neither links nor other spellings of a path lead around it.
struct Reads {
  std::mutex mutex;
  std::map<std::pair<dev_t, ino_t>, std::string> names;
  int commands = 0;
};

Reads& AllReads() {
  static Reads reads;
  return reads;
}

struct Target {
  fs::path path;
  bool is_device = false;
};

Target FindTarget(const std::string& file) {
  const fs::path path = FollowLinks(file);
  struct stat status {};
  if (::stat(path.c_str(), &status) != 0) {
    return {path, false};
  }
  if (S_ISDIR(status.st_mode)) {
    throw CannotWrite(file, EISDIR);
  }
  if (const std::string name = NameOfRead(path.string()); !name.empty()) {
    throw UsageError("\"" + file + "\" would overwrite " + name + "; name another file");
  }
  const bool is_device = !S_ISREG(status.st_mode);
  if (is_device && EverybodyMayWrite(FolderOf(path))) {
    CheckOwner(file, path, status.st_uid, true, "pipe or device");
  }
  return {path, is_device};
}

// So that the rename survives a power cut too. Some file systems refuse to sync a folder; the data
// itself is safe by then, so that is no error.
void SyncFolder(int folder) {
  const int descriptor = ::openat(folder, ".", O_RDONLY | O_DIRECTORY | O_CLOEXEC);
  if (descriptor >= 0) {
    ::fsync(descriptor);
    ::close(descriptor);
  }
}

}  // namespace

fs::path FollowLinks(const std::string& file) {
  fs::path done;
  std::deque<fs::path> left;
  for (const fs::path& part : fs::path(file)) {
    left.push_back(part);
  }
  for (int links = 0; !left.empty();) {
    const fs::path next = done / left.front();
    left.pop_front();
    struct stat status {};
    if (next.empty() || ::lstat(next.c_str(), &status) != 0 || !S_ISLNK(status.st_mode)) {
      done = next;
      continue;
    }
    std::error_code error;
    if (IsOfSystem(next)) {
      const fs::path known = fs::weakly_canonical(file, error);
      return known.empty() ? fs::path(file) : known;
    }
    CheckOwner(file, next, status.st_uid, left.empty(), "link");
    const fs::path target = fs::read_symlink(next, error);
    constexpr int kMostLinks = 40;  // as the system
    if (error || ++links > kMostLinks) {
      throw CannotWrite(file, error ? error.value() : ELOOP);
    }
    std::deque<fs::path> parts(target.begin(), target.end());
    left.insert(left.begin(), parts.begin(), parts.end());
    done = target.is_absolute() ? fs::path() : done;
  }
  return done;
}

void RememberRead(const std::string& file, const std::string& name) {
  struct stat status {};
  if (file == "-" || ::stat(file.c_str(), &status) != 0 || !S_ISREG(status.st_mode)) {
    return;
  }
  const std::lock_guard lock(AllReads().mutex);
  if (AllReads().commands > 0) {
    AllReads().names.try_emplace({status.st_dev, status.st_ino},
                                 name.empty() ? '"' + file + "\", which was read" : name);
  }
}

std::string NameOfRead(const std::string& file) {
  struct stat status {};
  const std::lock_guard lock(AllReads().mutex);
  const auto& names = AllReads().names;
  const auto found =
      ::stat(file.c_str(), &status) == 0 ? names.find({status.st_dev, status.st_ino}) : names.end();
  return found == names.end() ? "" : found->second;
}

CommandReads::CommandReads() {
  const std::lock_guard lock(AllReads().mutex);
  if (AllReads().commands++ == 0) {
    AllReads().names.clear();
  }
}

CommandReads::~CommandReads() {
  const std::lock_guard lock(AllReads().mutex);
  --AllReads().commands;
}

StagedFile::StagedFile(const std::string& file) : file_(file) {
  const Target target = FindTarget(file);
  is_device_ = target.is_device;
  if (is_device_) {
    descriptor_ = ::open(target.path.c_str(), O_WRONLY | O_CLOEXEC | O_NOCTTY);
    if (descriptor_ < 0) {
      throw CannotWrite(file, errno);
    }
    return;
  }
  // The folder is kept, so that nobody puts another one in its place.
  folder_ = ::open(FolderOf(target.path).c_str(), O_PATH | O_DIRECTORY | O_NOFOLLOW | O_CLOEXEC);
  if (folder_ < 0) {
    throw CannotWrite(file, errno);
  }
  name_ = target.path.filename().string();
  const std::string temporary = RandomName(name_);
  descriptor_ = ::openat(folder_, temporary.c_str(),
                         O_WRONLY | O_CREAT | O_EXCL | O_NOFOLLOW | O_CLOEXEC, 0666);
  if (descriptor_ < 0) {
    const int error = errno;
    Close();
    throw CannotWrite(file, error);
  }
  temporary_ = temporary;
}

StagedFile::~StagedFile() {
  Close();
}

StagedFile::StagedFile(StagedFile&& other) noexcept
    : file_(std::move(other.file_)),
      name_(std::move(other.name_)),
      temporary_(std::exchange(other.temporary_, "")),
      is_device_(other.is_device_),
      folder_(std::exchange(other.folder_, -1)),
      descriptor_(std::exchange(other.descriptor_, -1)) {}

void StagedFile::Write(std::string_view content) {
  while (!content.empty()) {
    const ssize_t count = ::write(descriptor_, content.data(), content.size());
    if (count < 0 && errno != EINTR) {
      throw CannotWrite(file_, errno);
    }
    content.remove_prefix(count < 0 ? 0 : static_cast<std::size_t>(count));
  }
}

void StagedFile::Finish() {
  if (!is_device_ && ::fsync(descriptor_) != 0) {
    throw CannotWrite(file_, errno);
  }
  if (::close(std::exchange(descriptor_, -1)) != 0) {
    throw CannotWrite(file_, errno);
  }
}

void StagedFile::Commit() {
  if (descriptor_ >= 0) {
    Finish();
  }
  if (is_device_) {
    return;
  }
  if (::renameat(folder_, temporary_.c_str(), folder_, name_.c_str()) != 0) {
    throw CannotWrite(file_, errno);
  }
  temporary_.clear();
  SyncFolder(folder_);
  Close();
}

void StagedFile::Close() noexcept {
  if (descriptor_ >= 0) {
    ::close(std::exchange(descriptor_, -1));
  }
  if (!temporary_.empty()) {
    ::unlinkat(folder_, temporary_.c_str(), 0);
    temporary_.clear();
  }
  if (folder_ >= 0) {
    ::close(std::exchange(folder_, -1));
  }
}

void CheckStageable(const std::string& file) {
  const Target target = FindTarget(file);
  const fs::path asked = target.is_device ? target.path : FolderOf(target.path);
  if (::access(asked.c_str(), W_OK) != 0) {
    throw CannotWrite(file, errno);
  }
}

}  // namespace shardwright
