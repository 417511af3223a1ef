#include "executor/checkpoint/safetensors.h"

#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <random>
#include <span>
#include <string>
#include <vector>

#include <doctest/doctest.h>

#include "core/error.h"
#include "core/json.h"
#include "executor/data/mapped_file.h"
#include "tests/executor/scratch_folder.h"

namespace shardwright {
namespace {

using testing::ScratchFolder;

std::string Length(std::uint64_t length) {
  std::string text;
  for (int i = 0; i < 8; ++i) {
    text += static_cast<char>(length >> (8 * i));
  }
  return text;
}

std::string File(const std::string& header, const std::string& data) {
  return Length(header.size()) + header + data;
}

// The error of reading a file with this content, without the file's name.
std::string ErrorOf(const ScratchFolder& folder, const std::string& content) {
  const std::string file = folder.Write("x.safetensors", content);
  try {
    (void)ReadSafetensorsHeader(file);
  } catch (const InputError& error) {
    const std::string text = error.what();
    return text.starts_with(file) ? text.substr(file.size()) : text;
  }
  return "no error";
}

TEST_CASE("crc-32 is the usual one") {
  // The check value of CRC-32/ISO-HDLC.
  CHECK(Crc32(0, "123456789", 9) == 0xcbf43926);
  CHECK(Crc32(Crc32(0, "1234", 4), "56789", 5) == 0xcbf43926);
}

// Of the size, as 8 bytes with the lowest first, and then the bytes; by Python's zlib.crc32.
TEST_CASE("the checksum of contents") {
  const std::string text = "123456789";
  const std::span<const std::byte> bytes = std::as_bytes(std::span(text));
  CHECK(ContentChecksum(bytes, 0) == 0x85a458e8);
  CHECK(ContentChecksum(bytes, 5) == 0x710ab464);
}

TEST_CASE("a file by hand") {
  const ScratchFolder folder;
  const std::string file =
      folder.Write("x", File(R"({"__metadata__":{"format":"pt"},)"
                             R"("b":{"dtype":"U8","shape":[3],"data_offsets":[8,11]},)"
                             R"("a":{"dtype":"BF16","shape":[2,2],"data_offsets":[0,8]},)"
                             R"("empty":{"dtype":"F32","shape":[0,7],"data_offsets":[8,8]},)"
                             R"("scalar":{"dtype":"I64","shape":[],"data_offsets":[11,19]}} )",
                             std::string(19, 'x')));
  const SafetensorsHeader header = ReadSafetensorsHeader(file);
  REQUIRE(header.entries.size() == 4);
  CHECK(header.entries[0].name == "a");
  CHECK(header.entries[0].dtype == DType::kBf16);
  CHECK(header.entries[0].shape == std::vector<std::int64_t>{2, 2});
  CHECK(header.entries[1].name == "empty");
  CHECK(header.entries[2].name == "b");
  CHECK(header.entries[2].begin == 8);
  CHECK(header.entries[3].Elements() == 1);
  CHECK(header.metadata.at("format") == "pt");
}

TEST_CASE("what is written has the reference implementation's order, and is read back") {
  const ScratchFolder folder;
  const std::string file = folder.File("y");
  std::vector<SafetensorsEntry> entries = {{.name = "b", .dtype = DType::kFp32, .shape = {2}},
                                           {.name = "c", .dtype = DType::kBf16, .shape = {1, 3}},
                                           {.name = "a", .dtype = DType::kFp32, .shape = {}},
                                           {.name = "z", .dtype = DType::kInt64, .shape = {1}}};
  {
    CheckpointFile out(file);
    entries = WriteSafetensorsHeader(out, entries, {{"format", "pt"}});
    out.Write(std::string(26, 'x').data(), 26);
    out.SyncAndClose();
    CHECK(out.size() % 8 == 26 % 8);
    CHECK(out.crc() == Crc32(0, ReadTextFile(file).data(), out.size()));
  }
  const SafetensorsHeader header = ReadSafetensorsHeader(file);
  CHECK(header.data_begin % 8 == 0);
  std::string order;
  for (std::size_t i = 0; i < header.entries.size(); ++i) {
    order += header.entries[i].name;
    CHECK(header.entries[i].name == entries[i].name);
    CHECK(header.entries[i].begin == entries[i].begin);
    CHECK(header.entries[i].shape == entries[i].shape);
  }
  CHECK(order == "zabc");
  // A file that exists is never overwritten in place.
  CHECK_THROWS_WITH_AS(CheckpointFile{file}, (file + ": cannot write: File exists").c_str(),
                       EnvironmentError);
}

TEST_CASE("hostile and damaged files get one clear line") {
  const ScratchFolder folder;
  const auto error = [&](const std::string& content) { return ErrorOf(folder, content); };
  const std::string good = R"({"a":{"dtype":"F32","shape":[2],"data_offsets":[0,8]}})";
  CHECK(error(File(good, "12345678")) == "no error");
  CHECK(error("") == ": got 0 bytes, expected a safetensors file, which has at least 8");
  CHECK(error("1234567") == ": got 7 bytes, expected a safetensors file, which has at least 8");
  CHECK(error(Length(10'000'000'000) + "{}") ==
        ": got a header of 10000000000 bytes, expected at most 100000000");
  CHECK(error(Length(~std::uint64_t{0}) + "{}") ==
        ": got a header of 18446744073709551615 bytes, expected at most 100000000");
  CHECK(error(Length(3) + "{}") == ": got a header of 3 bytes, expected at most the 2 that follow");
  CHECK(error(File(" {}", "")) ==
        ": got a header that does not begin with '{', expected a JSON object");
  CHECK(error(File(good, "1234567")) == ": got 69 bytes, expected 70, as its header says");
  CHECK(error(File(good, "123456789")) == ": got 71 bytes, expected 70, as its header says");
  CHECK(error(File(R"({"a":{"dtype":"F32","shape":[2],"data_offsets":[0,12]}})", "123456789012")) ==
        ": a.data_offsets: got [0,12], expected offsets 8 apart, as dtype and shape need");
  CHECK(error(File(R"({"a":{"dtype":"F32","shape":[2],"data_offsets":[8,0]}})", "12345678")) ==
        ": a.data_offsets: got [8,0], expected offsets 8 apart, as dtype and shape need");
  CHECK(error(File(R"({"a":{"dtype":"F4","shape":[2],"data_offsets":[0,1]}})", "1")) ==
        ": a.dtype: got \"F4\", expected one of F32, BF16, F16, F8_E4M3, F64, I64, I32, U8, BOOL");
  CHECK(error(File(R"({"a":{"dtype":"U8","shape":[4294967296,4294967296],"data_offsets":[0,0]}})",
                   "")) ==
        ": a.shape: got [4294967296,4294967296], expected a shape of at most "
        "2^50 bytes");
  // Two tensors on the same bytes, and a hole between two.
  CHECK(error(File(R"({"a":{"dtype":"U8","shape":[4],"data_offsets":[0,4]},)"
                   R"("b":{"dtype":"U8","shape":[4],"data_offsets":[2,6]}})",
                   "123456")) ==
        ": b.data_offsets[0]: got 2, expected 4, since tensors leave no holes and do not overlap");
  CHECK(error(File(R"({"a":{"dtype":"U8","shape":[4],"data_offsets":[0,4]},)"
                   R"("b":{"dtype":"U8","shape":[4],"data_offsets":[5,9]}})",
                   "123456789")) ==
        ": b.data_offsets[0]: got 5, expected 4, since tensors leave no holes and do not overlap");
}

TEST_CASE("random damage never does worse than an error") {
  const ScratchFolder folder;
  std::mt19937 random(5);
  const std::string good = File(
      R"({"__metadata__":{"format":"pt"},"a":{"dtype":"F32","shape":[2,3],"data_offsets":[0,24]},)"
      R"("b":{"dtype":"BF16","shape":[4],"data_offsets":[24,32]}})",
      std::string(32, 'x'));
  int accepted = 0;
  for (int i = 0; i < 3000; ++i) {
    std::string content = good;
    for (int flips = 0; flips < 1 + i % 3; ++flips) {
      content[random() % content.size()] = static_cast<char>(random());
    }
    if (i % 4 == 0) {
      content.resize(random() % content.size());
    }
    const std::string file = folder.Write("x", content);
    try {
      const SafetensorsHeader header = ReadSafetensorsHeader(file);
      std::int64_t end = 0;
      for (const SafetensorsEntry& entry : header.entries) {
        CHECK(entry.begin == end);
        CHECK(entry.end - entry.begin == entry.Elements() * SizeOf(entry.dtype));
        end = entry.end;
      }
      CHECK(header.data_begin + end == static_cast<std::int64_t>(content.size()));
      ++accepted;
    } catch (const InputError&) {
    }
  }
  CHECK(accepted > 0);  // damage to names and data is no error of the format
}

}  // namespace
}  // namespace shardwright
