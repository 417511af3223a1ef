#pragma once

// Folders that are almost right, for the targets that read several files together: the bytes say
// what is written, and where it is off.

#include <algorithm>
#include <cstdint>
#include <initializer_list>
#include <iterator>
#include <string>
#include <string_view>

#include <sys/stat.h>

#include "core/error.h"
#include "tests/fuzz/fuzz.h"

namespace shardwright::fuzz {

// Decisions out of bytes; 0 when they are used up.
class Choices {
 public:
  explicit Choices(std::string_view bytes) : bytes_(bytes) {}

  std::uint8_t Byte() {
    const std::uint8_t byte = bytes_.empty() ? 0 : static_cast<std::uint8_t>(bytes_[0]);
    bytes_.remove_prefix(bytes_.empty() ? 0 : 1);
    return byte;
  }
  // From 0 up to, but not including, `count`.
  std::int64_t Below(std::int64_t count) { return Byte() % count; }
  // Mostly `right`, which is at most 2^60; else near it, or far.
  std::int64_t Near(std::int64_t right) {
    constexpr std::uint8_t kOften = 200, kNear = 240;
    const std::uint8_t byte = Byte();
    if (byte < kOften) {
      return right;
    }
    constexpr std::int64_t kShift = 4;
    constexpr std::int64_t kMost = std::int64_t{1} << 20;  // shifted, still far from overflow
    return byte < kNear ? right + byte % (2 * kShift + 1) - kShift
                        : std::min(right, kMost) << Below(40);
  }
  // Likewise of texts.
  std::string Near(const std::string& right, std::initializer_list<const char*> others) {
    constexpr std::uint8_t kOften = 220;
    const std::uint8_t byte = Byte();
    return byte < kOften ? right : std::data(others)[byte % others.size()];
  }
  // Of the bytes that are left, up to `most`.
  std::string_view Take(std::size_t most) {
    const std::string_view taken = bytes_.substr(0, most);
    bytes_.remove_prefix(taken.size());
    return taken;
  }
  [[nodiscard]] std::size_t left() const { return bytes_.size(); }

 private:
  std::string_view bytes_;
};

// A file of a folder; made anew for every input.
inline void Put(const std::string& file, std::string_view content) {
  const int descriptor = ::open(file.c_str(), O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0600);
  const bool is_written =
      ::write(descriptor, content.data(), content.size()) == static_cast<ssize_t>(content.size());
  ::close(descriptor);
  SW_CHECK(is_written, file);
}

// This process's folder in memory, with a name behind it.
inline std::string FolderInMemory(const std::string& name) {
  const std::string folder = MemoryName() + "-folder";
  (void)::mkdir(folder.c_str(), 0700);
  (void)::mkdir((folder + "/" + name).c_str(), 0700);
  return folder + "/" + name;
}

// Eight bytes, least first, and the header: how a safetensors file begins.
inline std::string SafetensorsBegin(std::string header, std::int64_t length) {
  std::string text;
  for (int i = 0; i < 8; ++i) {
    text += static_cast<char>(static_cast<std::uint64_t>(length) >> (8 * i) & 0xffU);
  }
  return text + header;
}

// One tensor of a header.
inline std::string SafetensorsEntryText(const std::string& name, const std::string& dtype,
                                        const std::string& shape, std::int64_t begin,
                                        std::int64_t end) {
  return '"' + name + R"(":{"dtype":")" + dtype + R"(","shape":[)" + shape +
         R"(],"data_offsets":[)" + std::to_string(begin) + ',' + std::to_string(end) + "]}";
}

}  // namespace shardwright::fuzz
