#pragma once

// The door to foreign files: every reader opens its file here (tests/style/files.py), and no
// function here ends the program for a name that the system refuses.

#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <string>
#include <string_view>
#include <vector>

namespace shardwright {

// A file that is open for reading. A pipe or a device is opened only if the user has named it
// (NameByUser): one that a folder or a file names could be waited on for ever.
class InputFile {
 public:
  // Throws InputError that expects `expected`, such as "a trace file".
  explicit InputFile(const std::string& file, std::string_view expected = "a readable file");
  ~InputFile();
  InputFile(const InputFile&) = delete;
  InputFile& operator=(const InputFile&) = delete;

  [[nodiscard]] int descriptor() const { return descriptor_; }
  // Bytes of a regular file when it was opened; 0 for a pipe or a device.
  [[nodiscard]] std::int64_t size() const { return size_; }
  // Fills up to `size` bytes and returns how many: fewer only at the end. Throws InputError.
  [[nodiscard]] std::size_t Read(void* bytes, std::size_t size);

 private:
  std::string file_;
  std::string expected_;
  int descriptor_ = -1;
  std::int64_t size_ = 0;
};

// `file` stands on the command line: it may be a pipe, such as /dev/stdin or <(zcat plan.gz).
void NameByUser(const std::string& file);

// What a path leads to, links followed; false where it cannot be asked.
[[nodiscard]] bool Exists(const std::filesystem::path& path);
[[nodiscard]] bool IsFolder(const std::filesystem::path& path);
[[nodiscard]] bool IsRegularFile(const std::filesystem::path& path);

// What is in a folder, sorted. Where it cannot be read: nothing, or with `expected` an InputError.
[[nodiscard]] std::vector<std::filesystem::path> EntriesOf(const std::filesystem::path& folder,
                                                           std::string_view expected = {});

}  // namespace shardwright
