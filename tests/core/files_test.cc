#include "core/files.h"

#include <algorithm>
#include <array>
#include <chrono>
#include <cstring>
#include <filesystem>
#include <string>
#include <thread>

#include <doctest/doctest.h>
#include <fcntl.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/un.h>
#include <unistd.h>

#include "core/error.h"
#include "tests/executor/scratch_folder.h"

namespace shardwright {
namespace {

std::string ErrorOf(const std::string& file) {
  try {
    const InputFile in(file, "a plan");
    return "no error";
  } catch (const InputError& error) {
    return error.what();
  }
}

TEST_CASE("InputFile: a regular file is read whole, piece by piece") {
  const testing::ScratchFolder folder;
  InputFile in(folder.Write("a", "0123456789"));
  CHECK(in.size() == 10);
  std::array<char, 8> bytes{};
  CHECK(in.Read(bytes.data(), bytes.size()) == 8);
  CHECK(in.Read(bytes.data(), bytes.size()) == 2);
  CHECK(std::string(bytes.data(), 2) == "89");
  CHECK(in.Read(bytes.data(), bytes.size()) == 0);
}

TEST_CASE("InputFile: what is no regular file is refused without waiting") {
  const testing::ScratchFolder folder;
  const std::string pipe = folder.File("pipe");
  REQUIRE(::mkfifo(pipe.c_str(), 0600) == 0);
  std::filesystem::create_symlink(pipe, folder.File("link"));
  const std::string name = folder.File("socket");
  const int listener = ::socket(AF_UNIX, SOCK_STREAM, 0);
  sockaddr_un address{};
  address.sun_family = AF_UNIX;
  std::copy(name.begin(), name.end(), address.sun_path);
  REQUIRE(::bind(listener, reinterpret_cast<const sockaddr*>(&address), sizeof address) == 0);
  for (const std::string& file : {pipe, folder.File("link"), name, std::string("/dev/zero"),
                                  std::string("/dev/tty"), std::string("/dev/ptmx")}) {
    CHECK(ErrorOf(file) == file + ": got a pipe, socket or device, expected a plan");
  }
  ::close(listener);
  CHECK(ErrorOf(folder.path()) == folder.path() + ": got a folder, expected a plan");
}

TEST_CASE("InputFile: a pipe that the user has named is read to its end") {
  const testing::ScratchFolder folder;
  const std::string pipe = folder.File("pipe");
  REQUIRE(::mkfifo(pipe.c_str(), 0600) == 0);
  NameByUser(pipe);
  std::thread writer([&] {
    const int out = ::open(pipe.c_str(), O_WRONLY);
    for (const char* piece : {"first ", "second"}) {
      CHECK(::write(out, piece, std::strlen(piece)) > 0);
      std::this_thread::sleep_for(std::chrono::milliseconds(20));
    }
    ::close(out);
  });
  InputFile in(pipe);
  CHECK(in.size() == 0);
  std::array<char, 100> bytes{};
  CHECK(in.Read(bytes.data(), bytes.size()) == 12);
  writer.join();
  CHECK(std::string(bytes.data()) == "first second");
}

TEST_CASE("files: names that the system refuses are errors or no, never exceptions of others") {
  const testing::ScratchFolder folder;
  std::filesystem::create_symlink(folder.File("b"), folder.File("a"));
  std::filesystem::create_symlink(folder.File("a"), folder.File("b"));
  const std::string below = folder.Write("file", "") + "/below";
  for (const auto& [file, found] :
       {std::pair{folder.File("a"), "Too many levels of symbolic links"},
        std::pair{folder.File(std::string(300, 'n')), "File name too long"},
        std::pair{std::string(5000, 'n'), "File name too long"},
        std::pair{below, "Not a directory"}, std::pair{std::string(), "no such file"},
        std::pair{folder.File("none"), "no such file"}}) {
    CHECK(ErrorOf(file) == file + ": got " + found + ", expected a plan");
    CHECK_FALSE(Exists(file));
    CHECK_FALSE(IsFolder(file));
    CHECK_FALSE(IsRegularFile(file));
    CHECK(EntriesOf(file).empty());
    CHECK_THROWS_AS((void)EntriesOf(file, "a folder"), InputError);
  }
  CHECK(
      EntriesOf(folder.path(), "a folder") ==
      std::vector<std::filesystem::path>{folder.File("a"), folder.File("b"), folder.File("file")});
}

}  // namespace
}  // namespace shardwright
