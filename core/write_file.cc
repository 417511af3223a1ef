// Whole-file output. Declared in core/json.h and core/writable.h.

#include <cerrno>
#include <csignal>
#include <cstdio>
#include <cstring>
#include <filesystem>
#include <string>
#include <string_view>
#include <system_error>
#include <utility>
#include <vector>

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include "core/error.h"
#include "core/json.h"
#include "core/writable.h"

namespace shardwright {
namespace {

EnvironmentError CannotWrite(const std::string& file, int code) {
  return EnvironmentError(file + ": cannot write: " + std::strerror(code));
}

// 0 or errno.
int WriteAll(int descriptor, std::string_view content) {
  while (!content.empty()) {
    const ssize_t count = ::write(descriptor, content.data(), content.size());
    if (count < 0) {
      if (errno == EINTR) {
        continue;
      }
      return errno;
    }
    content.remove_prefix(static_cast<std::size_t>(count));
  }
  return 0;
}

// Pipes and devices (/dev/null, /dev/stdout) are written in place: a rename would replace the
// device.
void WriteInPlace(const std::string& file, std::string_view content) {
  const int descriptor = ::open(file.c_str(), O_WRONLY | O_CLOEXEC);
  if (descriptor < 0) {
    throw CannotWrite(file, errno);
  }
  const int write_error = WriteAll(descriptor, content);
  const int close_error = ::close(descriptor) == 0 ? 0 : errno;
  if (write_error != 0 || close_error != 0) {
    throw CannotWrite(file, write_error != 0 ? write_error : close_error);
  }
}

// What a name stands for: where a link leads, and whether that is a pipe or device.
struct Target {
  std::filesystem::path path;
  bool is_device = false;
};

Target FindTarget(const std::string& file) {
  std::error_code ignored;
  std::filesystem::path path = file;
  if (std::filesystem::is_symlink(path, ignored)) {
    const std::filesystem::path resolved = std::filesystem::weakly_canonical(path, ignored);
    path = resolved.empty() ? path : resolved;
  }
  const std::filesystem::file_status status = std::filesystem::status(path, ignored);
  if (std::filesystem::is_directory(status)) {
    throw CannotWrite(file, EISDIR);
  }
  const bool is_device =
      std::filesystem::exists(status) && !std::filesystem::is_regular_file(status);
  return {std::move(path), is_device};
}

std::filesystem::path FolderOf(const Target& target) {
  return target.path.has_parent_path() ? target.path.parent_path() : std::filesystem::path(".");
}

// So that the rename survives a power cut too. Some file systems refuse to sync a folder; the data
// itself is safe by then, so that is no error.
void SyncFolder(const std::filesystem::path& folder) {
  const int descriptor = ::open(folder.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC);
  if (descriptor >= 0) {
    ::fsync(descriptor);
    ::close(descriptor);
  }
}

// Holds back interrupts of this thread, so that none leaves a temporary file behind; a pending one
// is delivered when the object dies.
class InterruptsHeld {
 public:
  InterruptsHeld() {
    sigset_t held;
    ::sigemptyset(&held);
    for (const int signal : {SIGINT, SIGTERM, SIGHUP}) {
      ::sigaddset(&held, signal);
    }
    ::pthread_sigmask(SIG_BLOCK, &held, &before_);
  }
  ~InterruptsHeld() { ::pthread_sigmask(SIG_SETMASK, &before_, nullptr); }
  InterruptsHeld(const InterruptsHeld&) = delete;
  InterruptsHeld& operator=(const InterruptsHeld&) = delete;

 private:
  sigset_t before_;
};

// A file beside its place, until Commit() gives it the name; removed when that does not happen.
class StagedFile {
 public:
  StagedFile(const std::string& file, std::string_view content)
      : file_(file), content_(content), target_(FindTarget(file)) {
    if (target_.is_device) {
      return;
    }
    temporary_ = target_.path.string() + ".tmp." + std::to_string(::getpid());
    const int descriptor =
        ::open(temporary_.c_str(), O_WRONLY | O_CREAT | O_TRUNC | O_NOFOLLOW | O_CLOEXEC, 0666);
    if (descriptor < 0) {
      throw CannotWrite(file, errno);
    }
    int error = WriteAll(descriptor, content);
    if (error == 0 && ::fsync(descriptor) != 0) {
      error = errno;
    }
    if (::close(descriptor) != 0 && error == 0) {
      error = errno;
    }
    if (error != 0) {
      ::unlink(temporary_.c_str());
      throw CannotWrite(file, error);
    }
  }
  ~StagedFile() {
    if (!temporary_.empty()) {
      ::unlink(temporary_.c_str());
    }
  }
  StagedFile(StagedFile&& other) noexcept
      : file_(std::move(other.file_)),
        content_(other.content_),
        target_(std::move(other.target_)),
        temporary_(std::exchange(other.temporary_, "")) {}
  StagedFile& operator=(StagedFile&&) = delete;
  [[nodiscard]] bool is_device() const { return target_.is_device; }

  void Commit() {
    if (target_.is_device) {
      WriteInPlace(file_, content_);
      return;
    }
    if (::rename(temporary_.c_str(), target_.path.c_str()) != 0) {
      throw CannotWrite(file_, errno);
    }
    temporary_.clear();
    SyncFolder(FolderOf(target_));
  }

 private:
  std::string file_;
  std::string_view content_;
  Target target_;
  std::string temporary_;  // empty: none is there
};

// Makes folders that are missing, and removes them again unless Keep() is called.
class MadeFolders {
 public:
  MadeFolders() = default;
  ~MadeFolders() {
    for (auto folder = made_.rbegin(); folder != made_.rend(); ++folder) {
      ::rmdir(folder->c_str());
    }
  }
  MadeFolders(const MadeFolders&) = delete;
  MadeFolders& operator=(const MadeFolders&) = delete;

  void Make(const std::filesystem::path& folder) {
    std::error_code error;
    if (folder.empty() || std::filesystem::is_directory(folder, error)) {
      return;
    }
    Make(folder.parent_path());
    if (::mkdir(folder.c_str(), 0777) == 0) {
      made_.push_back(folder);
    } else if (errno != EEXIST || !std::filesystem::is_directory(folder, error)) {
      throw EnvironmentError("cannot make folder " + folder.string() + ": " + std::strerror(errno));
    }
  }
  void Keep() { made_.clear(); }

 private:
  std::vector<std::filesystem::path> made_;
};

}  // namespace

void WriteFileAtomically(const std::string& file, std::string_view content) {
  if (file == "-") {
    if (std::fwrite(content.data(), 1, content.size(), stdout) != content.size() ||
        std::fflush(stdout) != 0) {
      throw CannotWrite("standard output", errno);
    }
    return;
  }
  const InterruptsHeld interrupts_held;
  StagedFile(file, content).Commit();
}

void WriteFilesAtomically(std::span<const OutputFile> files) {
  const InterruptsHeld interrupts_held;
  MadeFolders folders;
  std::vector<StagedFile> staged;
  staged.reserve(files.size());
  for (const OutputFile& file : files) {
    folders.Make(std::filesystem::path(file.path).parent_path());
    staged.emplace_back(file.path, file.content);
  }
  for (const bool devices : {true, false}) {  // those that may still refuse come first
    for (StagedFile& file : staged) {
      if (file.is_device() == devices) {
        file.Commit();
      }
    }
  }
  folders.Keep();
}

void CheckWritable(const std::string& file) {
  if (file == "-") {
    return;
  }
  const Target target = FindTarget(file);
  if (::access(target.is_device ? file.c_str() : FolderOf(target).c_str(), W_OK) != 0) {
    throw CannotWrite(file, errno);
  }
}

}  // namespace shardwright
