#pragma once

// A file that gets its name when it is finished, so that nobody ever sees a part of it.

#include <filesystem>
#include <string>
#include <string_view>

namespace shardwright {

// Where `file` leads, with its links followed: those of other users (root's are everybody's) only
// on the way to it, in folders that not everybody may write. Whoever may make a link in a shared
// folder could choose what is overwritten. The file need not exist. Throws EnvironmentError.
[[nodiscard]] std::filesystem::path FollowLinks(const std::string& file);

// Remembers a file that the running command reads, so that no output replaces it: StagedFile and
// CheckStageable throw UsageError. `name`: how errors call it, such as `MODEL "net.json"`.
void RememberRead(const std::string& file, const std::string& name = {});
// How errors call the file that `file` leads to; empty: nobody has read it.
[[nodiscard]] std::string NameOfRead(const std::string& file);

// Lives as long as a command runs. Files are remembered while one does.
class CommandReads {
 public:
  CommandReads();
  ~CommandReads();
  CommandReads(const CommandReads&) = delete;
  CommandReads& operator=(const CommandReads&) = delete;
};

// A new file beside its place, with a name that nobody can know before, until Commit() gives it the
// name; removed when that does not happen. Pipes and devices (/dev/null, /dev/stdout) are written
// in place, as a rename would replace the device. All functions throw EnvironmentError
// ("FILE: cannot write: No space left on device"), and UsageError where the file has been read.
class StagedFile {
 public:
  explicit StagedFile(const std::string& file);
  ~StagedFile();
  StagedFile(StagedFile&& other) noexcept;
  StagedFile& operator=(StagedFile&&) = delete;
  StagedFile(const StagedFile&) = delete;
  StagedFile& operator=(const StagedFile&) = delete;

  [[nodiscard]] bool is_device() const { return is_device_; }
  [[nodiscard]] int descriptor() const { return descriptor_; }  // to write to
  void Write(std::string_view content);
  // Everything is on the disk when this returns. Nothing may be written afterwards.
  void Finish();
  // Finishes, and gives it the name.
  void Commit();

 private:
  void Close() noexcept;

  std::string file_;       // as the user named it
  std::string name_;       // in the folder
  std::string temporary_;  // likewise; empty: none is there
  bool is_device_ = false;
  int folder_ = -1;
  int descriptor_ = -1;
};

// Throws what StagedFile would throw for a folder that is missing or may not be written. Writes
// nothing; a disk may still fill.
void CheckStageable(const std::string& file);

}  // namespace shardwright
