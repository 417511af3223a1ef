#include "executor/checkpoint/run_folder.h"

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstdio>
#include <cstring>
#include <filesystem>
#include <iterator>
#include <random>
#include <string_view>
#include <vector>

#include <fcntl.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <unistd.h>

#include "core/error.h"
#include "core/files.h"
#include "core/printable.h"
#include "core/staged_file.h"
#include "executor/checkpoint/manifest.h"
#include "executor/checkpoint/save.h"

namespace shardwright {
namespace {

constexpr const char* kLockName = ".lock";
constexpr off_t kLongestLock = 120;  // bytes of what ThisProcess says

void CheckUnused(const std::string& folder) {
  if (Exists(std::filesystem::path(folder) / kManifestName)) {
    throw InputError(folder, "a checkpoint", "a folder for checkpoints, such as the one it is in");
  }
}

std::string LockFile(const std::string& folder) {
  return (std::filesystem::path(folder) / kLockName).string();
}

std::string TextOf(int descriptor) {
  std::array<char, kLongestLock> text{};
  const ssize_t count = ::pread(descriptor, text.data(), text.size(), 0);
  return {text.data(), count > 0 ? static_cast<std::size_t>(count) : 0};
}

// "process 4711", as the holder has written; another machine's may not be seen yet.
std::string HolderOf(int descriptor) {
  const std::string holder = TextOf(descriptor);
  return holder.empty() ? "" : " (" + holder.substr(0, holder.find('\n')) + ")";
}

// A folder out of an archive may hold a user's own file, or a link to one, under the lock's name:
// what no run has written is left as it is.
bool IsLock(int descriptor) {
  struct stat status {};
  std::array<char, 8> begin{};
  return ::fstat(descriptor, &status) == 0 && S_ISREG(status.st_mode) && status.st_nlink == 1 &&
         (status.st_size == 0 ||
          (status.st_size <= kLongestLock &&
           ::pread(descriptor, begin.data(), begin.size(), 0) == std::ssize(begin) &&
           std::string_view(begin.data(), begin.size()) == "process "));
}

std::string ThisProcess() {
  std::array<char, 64> host{};
  (void)::gethostname(host.data(), host.size() - 1);
  return "process " + std::to_string(::getpid()) + " on " + host.data() + "\n" + NewRunId() + "\n";
}

}  // namespace

std::string NewRunId() {
  std::random_device random;
  std::array<char, 17> text{};
  std::snprintf(text.data(), text.size(), "%08x%08x", random(), random());
  return text.data();
}

RunFolder::RunFolder(const std::string& folder, bool resumes) : folder_(folder) {
  MakeCheckpointFolder(folder);
  CheckUnused(folder);
  Lock();
  for (const std::filesystem::path& checkpoint : EntriesOf(folder)) {
    RememberRead(checkpoint.string());  // the lock
    for (const std::filesystem::path& file : EntriesOf(checkpoint)) {
      RememberRead(file.string());  // no trace replaces a part of a checkpoint
    }
  }
  const std::vector<std::string> finished = FinishedCheckpoints(folder);
  if (!resumes && !finished.empty()) {
    ::close(descriptor_);
    throw InputError(folder, "checkpoints of an earlier run, the newest " + finished.back(),
                     "a folder without any",
                     "--resume goes on from there, another --checkpoint FOLDER begins anew");
  }
}

void RunFolder::Lock() {
  const std::string file = LockFile(folder_);
  descriptor_ = ::open(file.c_str(), O_RDWR | O_CREAT | O_NOFOLLOW | O_CLOEXEC, 0666);
  if (descriptor_ < 0) {
    throw EnvironmentError(file + ": cannot open: " + std::strerror(errno));
  }
  if (!IsLock(descriptor_)) {
    ::close(descriptor_);
    throw InputError(file, "a file that is no lock", "one that a run has made, or none");
  }
  const int error = ::flock(descriptor_, LOCK_EX | LOCK_NB) == 0 ? 0 : errno;
  if (error == EWOULDBLOCK) {
    const std::string holder = HolderOf(descriptor_);
    ::close(descriptor_);
    throw EnvironmentError(folder_ + ": another run" + holder +
                           " is at work in it; give another --checkpoint FOLDER, or wait for its "
                           "end");
  }
  // Also where nothing can be locked: by this text other ranks know the folder.
  const std::string text = ThisProcess();
  if (::ftruncate(descriptor_, 0) == 0) {
    (void)!::pwrite(descriptor_, text.data(), text.size(), 0);  // the disk may be full
    (void)::fsync(descriptor_);                                 // for other machines
  }
  if (error == 0) {
    return;
  }
  Say("warning: " + folder_ + ": cannot be locked (" + std::strerror(error) +
      "): see to it that no other run uses it");
}

void RunFolder::CheckPlace() const {
  struct stat held {
  }, found{};
  if (::fstat(descriptor_, &held) != 0 || ::lstat(LockFile(folder_).c_str(), &found) != 0 ||
      held.st_dev != found.st_dev || held.st_ino != found.st_ino) {
    throw EnvironmentError(folder_ +
                           ": no longer the folder that this run has locked: it was removed, "
                           "renamed or replaced; put it back");
  }
}

std::string RunFolder::LockIn(const std::string& folder) {
  const int descriptor =
      ::open(LockFile(folder).c_str(), O_RDONLY | O_NOFOLLOW | O_NONBLOCK | O_CLOEXEC);
  if (descriptor < 0) {
    return "none";
  }
  std::string text = TextOf(descriptor);
  ::close(descriptor);
  std::replace(text.begin(), text.end(), '\n', ' ');
  return text.empty() ? "empty" : text;
}

RunFolder::~RunFolder() {
  ::close(descriptor_);
}

}  // namespace shardwright
