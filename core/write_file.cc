// Whole-file output. Declared in core/json.h and core/writable.h.

#include <cerrno>
#include <csignal>
#include <cstdio>
#include <cstring>
#include <filesystem>
#include <string>
#include <string_view>
#include <vector>

#include <sys/stat.h>
#include <unistd.h>

#include "core/error.h"
#include "core/files.h"
#include "core/json.h"
#include "core/printable.h"
#include "core/staged_file.h"
#include "core/writable.h"

namespace shardwright {
namespace {

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
    if (folder.empty() || IsFolder(folder)) {
      return;
    }
    Make(folder.parent_path());
    if (::mkdir(folder.c_str(), 0777) == 0) {
      made_.push_back(folder);
    } else if (errno != EEXIST || !IsFolder(folder)) {
      throw EnvironmentError("cannot make folder " + folder.string() + ": " + std::strerror(errno));
    }
  }
  void Keep() { made_.clear(); }

 private:
  std::vector<std::filesystem::path> made_;
};

void RefuseLink(const std::string& file) {
  struct stat status {};
  if (::lstat(file.c_str(), &status) == 0 && !S_ISREG(status.st_mode)) {
    throw EnvironmentError(file +
                           ": cannot write: it is a link, folder or device, expected a file "
                           "or nothing; remove it, or name another folder");
  }
}

}  // namespace

void WriteFileAtomically(const std::string& file, std::string_view content) {
  if (file == "-") {
    const std::string text = Printable(content);
    if (std::fwrite(text.data(), 1, text.size(), stdout) != text.size() ||
        std::fflush(stdout) != 0) {
      throw EnvironmentError("standard output: cannot write: " + std::string(std::strerror(errno)));
    }
    return;
  }
  const InterruptsHeld interrupts_held;
  StagedFile staged(file);
  staged.Write(content);
  staged.Commit();
}

void WriteFilesAtomically(std::span<const OutputFile> files) {
  const InterruptsHeld interrupts_held;
  MadeFolders folders;
  std::vector<StagedFile> staged;
  staged.reserve(files.size());
  for (const OutputFile& file : files) {
    if (file.is_in_folder) {
      RefuseLink(file.path);
    }
    folders.Make(FollowLinks(file.path).parent_path());
    StagedFile& last = staged.emplace_back(file.path);
    if (!last.is_device()) {
      last.Write(file.content);
      last.Finish();
    }
  }
  // Devices cannot be taken back: they are written when nothing else can fail but the renaming.
  for (std::size_t i = 0; i < files.size(); ++i) {
    if (staged[i].is_device()) {
      staged[i].Write(files[i].content);
      staged[i].Commit();
    }
  }
  for (StagedFile& file : staged) {
    if (!file.is_device()) {
      file.Commit();
    }
  }
  folders.Keep();
}

void CheckWritable(const std::string& file) {
  if (file != "-") {
    CheckStageable(file);
  }
}

}  // namespace shardwright
