#include <filesystem>
#include <fstream>
#include <string>

#include <doctest/doctest.h>
#include <sys/stat.h>
#include <unistd.h>

#include "core/error.h"
#include "core/json.h"
#include "core/staged_file.h"

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

// The name of the temporary file was told by the process id: who made one before kept it open, with
// his owner and mode, and it became the result.
TEST_CASE("WriteFile: nobody can make the temporary file before") {
  const Folder folder;
  const std::string file = folder.File("a.json");
  const std::string guessed = file + ".tmp." + std::to_string(::getpid());
  std::ofstream(guessed) << "made before";
  WriteFileAtomically(file, "result");
  CHECK(ReadTextFile(file) == "result");
  CHECK(ReadTextFile(guessed) == "made before");
  CHECK(folder.EntryCount() == 2);
}

TEST_CASE("WriteFile: a name of 255 bytes has room for a temporary one") {
  const Folder folder;
  const std::string file = folder.File(std::string(255, 'a'));
  WriteFileAtomically(file, "result");
  CHECK(ReadTextFile(file) == "result");
  CHECK(folder.EntryCount() == 1);
}

std::string ErrorOf(const std::string& file) {
  try {
    WriteFileAtomically(file, "mine");
  } catch (const EnvironmentError& error) {
    return error.what();
  }
  return {};
}

// Only root can make links of other users.
TEST_CASE("WriteFile: another user's link is not followed" * doctest::skip(::geteuid() != 0)) {
  constexpr uid_t kOther = 12345;
  const Folder folder;
  const std::string shared = folder.File("shared");
  std::filesystem::create_directory(shared);
  ::chmod(shared.c_str(), 01777);
  WriteFileAtomically(folder.File("victim"), "kept");
  const std::string link = shared + "/out.json";
  std::filesystem::create_symlink(folder.File("victim"), link);
  REQUIRE(::lchown(link.c_str(), kOther, kOther) == 0);
  CHECK(ErrorOf(link) == link + ": cannot write: " + link +
                             " is a link of user 12345, expected one of yours (user 0)");
  CHECK(ReadTextFile(folder.File("victim")) == "kept");

  // Nor on the way, where everybody may have put it.
  std::filesystem::create_directory(folder.File("private"));
  const std::string way = shared + "/way";
  std::filesystem::create_directory_symlink(folder.File("private"), way);
  REQUIRE(::lchown(way.c_str(), kOther, kOther) == 0);
  CHECK(ErrorOf(way + "/out.json") ==
        way + "/out.json: cannot write: " + way +
            " is a link of user 12345, expected one of yours (user 0)");
  CHECK(std::filesystem::is_empty(folder.File("private")));
  // In a folder that is not everybody's it is a part of the machine.
  ::chmod(shared.c_str(), 0755);
  CHECK(ErrorOf(way + "/out.json").empty());
  CHECK(ReadTextFile(folder.File("private") + "/out.json") == "mine");

  const std::string pipe = shared + "/pipe";
  REQUIRE(::mkfifo(pipe.c_str(), 0666) == 0);
  REQUIRE(::chown(pipe.c_str(), kOther, kOther) == 0);
  ::chmod(shared.c_str(), 01777);
  CHECK(ErrorOf(pipe) == pipe + ": cannot write: " + pipe +
                             " is a pipe or device of user 12345, expected one of yours (user 0)");
}

TEST_CASE("WriteFile: links that lead in a circle") {
  const Folder folder;
  std::filesystem::create_symlink("b", folder.File("a"));
  std::filesystem::create_symlink("a", folder.File("b"));
  CHECK(ErrorOf(folder.File("a")) ==
        folder.File("a") + ": cannot write: Too many levels of symbolic links");
}

TEST_CASE("FollowLinks: what it makes of a name") {
  const Folder folder;
  std::filesystem::create_directory(folder.File("d"));
  std::filesystem::create_symlink("d/../d", folder.File("link"));
  CHECK(FollowLinks("plan.json") == "plan.json");
  CHECK(FollowLinks("../plan.json") == "../plan.json");
  CHECK(FollowLinks(folder.File("none/plan.json")) == folder.File("none/plan.json"));
  CHECK(FollowLinks(folder.File("link/plan.json")) == folder.File("d/../d/plan.json"));
  CHECK(FollowLinks("/dev/null") == "/dev/null");
}

}  // namespace
}  // namespace shardwright
