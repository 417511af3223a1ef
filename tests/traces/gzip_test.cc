// Compression and its opposite: what goes in comes out, and damage is found.

#include "traces/gzip.h"

#include <cstddef>
#include <cstdio>
#include <filesystem>
#include <random>
#include <string>

#include <doctest/doctest.h>
#include <unistd.h>

#include "core/error.h"
#include "core/json.h"

namespace shardwright {
namespace {

std::string Packed(const std::string& text, std::size_t piece) {
  TextSink sink(true);
  for (std::size_t at = 0; at < text.size(); at += piece) {
    sink.Append(std::string_view(text).substr(at, piece));
  }
  return sink.Finish();
}

// A file of its own for each test process.
class TemporaryFile {
 public:
  explicit TemporaryFile(const std::string& content)
      : name_((std::filesystem::temp_directory_path() /
               ("shardwright_gzip_test." + std::to_string(::getpid())))
                  .string()) {
    WriteFileAtomically(name_, content);
  }
  ~TemporaryFile() { std::remove(name_.c_str()); }
  TemporaryFile(const TemporaryFile&) = delete;
  TemporaryFile& operator=(const TemporaryFile&) = delete;
  [[nodiscard]] const std::string& name() const { return name_; }

 private:
  std::string name_;
};

std::string ReadAll(const std::string& file, std::size_t piece) {
  TextSource source(file);
  std::string text;
  std::string buffer(piece, '\0');
  while (const std::size_t count = source.Read(buffer.data(), buffer.size())) {
    text.append(buffer, 0, count);
  }
  return text;
}

std::string ErrorOf(const std::string& file) {
  try {
    (void)ReadAll(file, 1000);
  } catch (const InputError& error) {
    return error.what();
  }
  return "no error";
}

// 3 MB that compress to about a third, so that both sides work in many pieces.
std::string LongText() {
  std::mt19937 random(7);
  std::string text;
  while (text.size() < 3'000'000) {
    text += std::to_string(random() % 1000) + ",\n";
  }
  return text;
}

TEST_CASE("What is packed comes back, whatever the pieces") {
  const std::string text = LongText();
  for (const std::size_t piece : {std::size_t{1} << 10, std::size_t{1} << 22}) {
    const std::string packed = Packed(text, piece);
    CHECK(packed.size() < text.size() / 2);
    const TemporaryFile file(packed);
    CHECK(ReadAll(file.name(), 1000) == text);
    CHECK(ReadAll(file.name(), std::size_t{1} << 20) == text);
  }
  CHECK(Packed(text, 1000) == Packed(text, 1000));
  const TemporaryFile empty(Packed("", 1));
  CHECK(ReadAll(empty.name(), 10).empty());
}

TEST_CASE("Plain files and joined gzip files are read, too") {
  const TemporaryFile plain("no gzip");
  CHECK(ReadAll(plain.name(), 3) == "no gzip");
  const TemporaryFile joined(Packed("one ", 9) + Packed("two", 9));
  CHECK(ReadAll(joined.name(), 2) == "one two");
}

TEST_CASE("Truncated and damaged files are errors that name the file") {
  const std::string packed = Packed(LongText(), 1 << 20);
  for (const std::size_t size : {packed.size() - 1, packed.size() / 2, std::size_t{30}}) {
    const TemporaryFile file(packed.substr(0, size));
    CHECK(ErrorOf(file.name()) ==
          file.name() + ": got compressed data that ends too early, expected a whole gzip file");
  }
  std::string damaged = packed;
  damaged.back() = static_cast<char>(damaged.back() ^ 1);  // the length in the trailer
  const TemporaryFile file(damaged);
  CHECK(ErrorOf(file.name()) ==
        file.name() + ": got damaged compressed data, expected a whole gzip file");
  CHECK(ErrorOf("no/such/file") == "no/such/file: got no such file, expected a trace file");
  CHECK(ErrorOf(".") == ".: got a folder, expected a trace file");
}

}  // namespace
}  // namespace shardwright
