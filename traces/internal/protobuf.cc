#include "traces/internal/protobuf.h"

#include <algorithm>

#include "core/error.h"

namespace shardwright::internal {
namespace {

constexpr std::uint64_t kSeven = 0x7f;
constexpr int kBits = 64;
// Nodes have some hundred bytes; lists of dependencies can be long.
constexpr std::uint64_t kLongestMessage = std::uint64_t{16} << 20;
constexpr std::string_view kWhole = "a whole file of protocol buffers";

[[noreturn]] void RefuseAt(const std::string& file, std::int64_t byte, std::string_view found,
                           std::string_view expected) {
  throw InputError(file + ": byte " + std::to_string(byte), found, expected);
}

}  // namespace

void ProtoFields::Refuse(std::string_view found, std::string_view expected) const {
  RefuseAt(file_, bytes_.begin + static_cast<std::int64_t>(at_),
           std::string(message_) + ", field " + std::to_string(number_) + ": " + std::string(found),
           expected);
}

std::uint64_t ProtoFields::Varint() {
  std::uint64_t value = 0;
  for (int shift = 0; shift < kBits; shift += 7) {
    if (at_ == bytes_.text.size()) {
      Refuse("a number that is cut off", kWhole);
    }
    const std::uint64_t byte = static_cast<unsigned char>(bytes_.text[at_++]);
    if (shift == kBits - 1 && byte > 1) {
      break;
    }
    value |= (byte & kSeven) << shift;
    if (byte <= kSeven) {
      return value;
    }
  }
  Refuse("a number of more than 64 bits", kWhole);
}

void ProtoFields::Skip(std::size_t size) {
  if (size > bytes_.text.size() - at_) {
    Refuse(std::to_string(bytes_.text.size() - at_) + " bytes",
           std::to_string(size) + " bytes, as the field says");
  }
  text_ = {bytes_.text.substr(at_, size), bytes_.begin + static_cast<std::int64_t>(at_)};
  at_ += size;
}

bool ProtoFields::Next() {
  if (at_ == bytes_.text.size()) {
    return false;
  }
  const std::uint64_t tag = Varint();
  constexpr std::uint64_t kMostFields = std::uint64_t{1} << 29;
  if (tag >> 3 == 0 || tag >> 3 >= kMostFields) {
    Refuse("a field of number " + std::to_string(tag >> 3), kWhole);
  }
  number_ = static_cast<int>(tag >> 3);
  wire_ = static_cast<Wire>(tag & 7);
  switch (wire_) {
    case Wire::kVarint:
      value_ = Varint();
      return true;
    case Wire::kFixed64:
      Skip(8);
      return true;
    case Wire::kFixed32:
      Skip(4);
      return true;
    case Wire::kBytes:
      Skip(std::min<std::uint64_t>(Varint(), kLongestMessage + 1));
      return true;
  }
  Refuse("wire type " + std::to_string(tag & 7), kWhole);
}

std::uint64_t ProtoFields::Number() const {
  if (wire_ != Wire::kVarint) {
    Refuse("no whole number", "a whole number");
  }
  return value_;
}

ProtoBytes ProtoFields::Bytes() const {
  if (wire_ != Wire::kBytes) {
    Refuse("a number", "a text or message");
  }
  return text_;
}

bool ProtoMessages::Has(std::size_t size) {
  constexpr std::size_t kPiece = std::size_t{1} << 16;
  while (buffer_.size() - at_ < size) {
    buffer_.erase(0, at_);
    begin_ += static_cast<std::int64_t>(at_);
    at_ = 0;
    const std::size_t before = buffer_.size();
    buffer_.resize(before + kPiece);
    const std::size_t count = source_.Read(buffer_.data() + before, kPiece);
    buffer_.resize(before + count);
    if (count == 0) {
      return false;
    }
  }
  return true;
}

std::optional<ProtoBytes> ProtoMessages::Next() {
  std::uint64_t size = 0;
  for (int shift = 0;; shift += 7) {
    const std::int64_t byte = begin_ + static_cast<std::int64_t>(at_);
    if (!Has(1)) {
      if (shift == 0) {
        return std::nullopt;
      }
      RefuseAt(file_, byte, "a size that is cut off", kWhole);
    }
    const std::uint64_t part = static_cast<unsigned char>(buffer_[at_++]);
    size |= (part & kSeven) << shift;
    if (size > kLongestMessage || shift > 3 * 7) {
      RefuseAt(file_, byte, "a message of more than 16 MiB",
               "messages of some hundred bytes, each behind its size");
    }
    if (part <= kSeven) {
      break;
    }
  }
  if (!Has(size)) {
    RefuseAt(file_, begin_ + static_cast<std::int64_t>(buffer_.size()), "the end of the file",
             std::to_string(size) + " bytes, as the message's size says");
  }
  const ProtoBytes message = {std::string_view(buffer_).substr(at_, size),
                              begin_ + static_cast<std::int64_t>(at_)};
  at_ += size;
  return message;
}

}  // namespace shardwright::internal
