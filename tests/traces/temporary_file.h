#pragma once

#include <atomic>
#include <cstdio>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <string>
#include <string_view>

#include <unistd.h>

namespace shardwright::testing {

// A file of this process with some content; gone at the end.
class TemporaryFile {
 public:
  explicit TemporaryFile(std::string_view content, const std::string& ending = "")
      : name_((std::filesystem::temp_directory_path() /
               ("shardwright_test." + std::to_string(::getpid()) + '.' +
                std::to_string(NextNumber()) + ending))
                  .string()) {
    // Plainly: tests write thousands, and WriteFileAtomically waits for the disk.
    std::ofstream(name_, std::ios::binary).write(content.data(), std::ssize(content));
  }
  ~TemporaryFile() { std::remove(name_.c_str()); }
  TemporaryFile(const TemporaryFile&) = delete;
  TemporaryFile& operator=(const TemporaryFile&) = delete;
  [[nodiscard]] const std::string& name() const { return name_; }

 private:
  static int NextNumber() {
    static std::atomic<int> number = 0;
    return ++number;
  }
  std::string name_;
};

}  // namespace shardwright::testing
