#pragma once

// Protocol buffers as bytes, without the library: fields of a message, and a file of messages with
// their sizes before them. Whatever the bytes, reading them takes no more memory than the longest
// message that is there.

#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>
#include <string_view>

#include "traces/gzip.h"

namespace shardwright::internal {

enum class Wire : std::uint8_t { kVarint = 0, kFixed64 = 1, kBytes = 2, kFixed32 = 5 };

// Bytes of a file and where in it they begin.
struct ProtoBytes {
  std::string_view text;
  std::int64_t begin = 0;
};

// One field of a message after the other.
class ProtoFields {
 public:
  // `file` and `message` ("node 3") are for errors; both must outlive it.
  ProtoFields(const std::string& file, std::string_view message, ProtoBytes bytes)
      : file_(file), message_(message), bytes_(bytes) {}

  // Goes to the next field; false at the end. Throws InputError for damage.
  [[nodiscard]] bool Next();

  [[nodiscard]] int number() const { return number_; }
  // The field's value. Throw InputError when it is of another type.
  [[nodiscard]] std::uint64_t Number() const;
  [[nodiscard]] ProtoBytes Bytes() const;
  [[nodiscard]] std::string_view Text() const { return Bytes().text; }
  // Calls `use` with each number of a repeated field, packed or not.
  template <class Use>
  void ForEachNumber(Use use) const {
    if (wire_ == Wire::kVarint) {
      use(value_);
      return;
    }
    ProtoFields list(file_, message_, Bytes());
    while (list.at_ < list.bytes_.text.size()) {
      use(list.Varint());
    }
  }
  // Says what is wrong with the field.
  [[noreturn]] void Refuse(std::string_view found, std::string_view expected) const;

 private:
  [[nodiscard]] std::uint64_t Varint();
  void Skip(std::size_t size);

  const std::string& file_;
  std::string_view message_;
  ProtoBytes bytes_;
  std::size_t at_ = 0;
  int number_ = 0;
  Wire wire_ = Wire::kVarint;
  std::uint64_t value_ = 0;
  ProtoBytes text_;
};

// Messages of a file, plain or gzip, each behind its size.
class ProtoMessages {
 public:
  explicit ProtoMessages(const std::string& file) : file_(file), source_(file) {}

  // The next one, until the call after this; none at the end. Throws InputError for damage.
  [[nodiscard]] std::optional<ProtoBytes> Next();

 private:
  // Whether the buffer has so many bytes from at_ on; reads what is missing.
  [[nodiscard]] bool Has(std::size_t size);

  std::string file_;
  TextSource source_;
  std::string buffer_;
  std::size_t at_ = 0;
  std::int64_t begin_ = 0;  // of the buffer, in the file
};

}  // namespace shardwright::internal
