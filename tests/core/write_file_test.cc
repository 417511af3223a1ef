#include <filesystem>
#include <fstream>
#include <string>

#include <doctest/doctest.h>
#include <unistd.h>

#include "core/error.h"
#include "core/json.h"

namespace shardwright {
namespace {

class Folder {
 public:
  Folder()
      : path_(std::filesystem::temp_directory_path() /
              ("shardwright_write_file_test." + std::to_string(::getpid()))) {
    std::filesystem::create_directories(path_);
  }
  Folder(const Folder&) = delete;
  Folder& operator=(const Folder&) = delete;
  ~Folder() { std::filesystem::remove_all(path_); }

  [[nodiscard]] std::string File(const std::string& name) const { return (path_ / name).string(); }
  [[nodiscard]] std::size_t EntryCount() const {
    std::size_t count = 0;
    for (const auto& entry : std::filesystem::directory_iterator(path_)) {
      (void)entry;
      ++count;
    }
    return count;
  }

 private:
  std::filesystem::path path_;
};

TEST_CASE("WriteFile: creates, replaces and leaves nothing else behind") {
  const Folder folder;
  const std::string file = folder.File("a.json");
  WriteFileAtomically(file, "first");
  CHECK(ReadTextFile(file) == "first");
  const std::string big(3 << 20, 'x');
  WriteFileAtomically(file, big);
  CHECK(ReadTextFile(file) == big);
  CHECK(folder.EntryCount() == 1);
}

TEST_CASE("WriteFile: a link keeps pointing to the file that changed") {
  const Folder folder;
  WriteFileAtomically(folder.File("real"), "old");
  std::filesystem::create_symlink(folder.File("real"), folder.File("link"));
  WriteFileAtomically(folder.File("link"), "new");
  CHECK(std::filesystem::is_symlink(folder.File("link")));
  CHECK(ReadTextFile(folder.File("real")) == "new");
}

TEST_CASE("WriteFile: devices are written in place") {
  WriteFileAtomically("/dev/null", "gone");
  CHECK(std::filesystem::is_character_file("/dev/null"));
}

TEST_CASE("WriteFile: failure is an environment error and leaves the folder as it was") {
  const Folder folder;
  const std::string missing = folder.File("no/such/folder.json");
  std::string text;
  try {
    WriteFileAtomically(missing, "x");
  } catch (const EnvironmentError& e) {
    text = e.what();
  }
  CHECK(text == missing + ": cannot write: No such file or directory");
  text.clear();
  std::filesystem::create_directory(folder.File("d"));
  try {
    WriteFileAtomically(folder.File("d"), "x");
  } catch (const EnvironmentError& e) {
    text = e.what();
  }
  CHECK(text == folder.File("d") + ": cannot write: Is a directory");
  CHECK(folder.EntryCount() == 1);
}

}  // namespace
}  // namespace shardwright
