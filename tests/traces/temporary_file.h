#pragma once

#include <atomic>
#include <cstdio>
#include <filesystem>
#include <string>
#include <string_view>

#include <unistd.h>

#include "core/json.h"

namespace shardwright::testing {

// A file of this process with some content; gone at the end.
class TemporaryFile {
 public:
  explicit TemporaryFile(std::string_view content, const std::string& ending = "")
      : name_((std::filesystem::temp_directory_path() /
               ("shardwright_test." + std::to_string(::getpid()) + '.' +
                std::to_string(NextNumber()) + ending))
                  .string()) {
    WriteFileAtomically(name_, content);
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
