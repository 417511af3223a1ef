#pragma once

// Text that is compressed on the way: traces are large, their gzip form a tenth of it.

#include <cstddef>
#include <memory>
#include <string>
#include <string_view>

#include "core/budget.h"

namespace shardwright {

// Collects text, as gzip or as it is. Equal text gives equal bytes (the header has no time stamp).
class TextSink {
 public:
  explicit TextSink(bool compressed);
  ~TextSink();
  TextSink(TextSink&&) noexcept;
  TextSink& operator=(TextSink&&) noexcept;

  void Append(std::string_view text);
  // All that was appended. Nothing may be appended afterwards.
  [[nodiscard]] std::string Finish();

 private:
  struct Deflater;
  void Compress(bool is_last);

  std::string pending_;  // not yet compressed
  std::string done_;
  std::unique_ptr<Deflater> deflater_;  // null: not compressed
};

// Reads a file piece by piece and unpacks it if it is gzip, whatever its name.
class TextSource {
 public:
  // Throws InputError when the file is missing, a folder or not readable.
  explicit TextSource(const std::string& file);
  ~TextSource();
  TextSource(TextSource&&) noexcept;
  TextSource& operator=(TextSource&&) noexcept;

  // Fills up to `size` bytes and returns how many; 0 at the end. Throws InputError when the file
  // is damaged, ends inside compressed data or has more than 3 GiB of text (core/budget.h).
  [[nodiscard]] std::size_t Read(char* buffer, std::size_t size);

 private:
  struct Stream;
  [[nodiscard]] std::size_t ReadSome(char* buffer, std::size_t size);

  std::string file_;
  std::unique_ptr<Stream> stream_;
  Budget text_;
};

}  // namespace shardwright
