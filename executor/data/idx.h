#pragma once

// The IDX format of the MNIST files: http://yann.lecun.com/exdb/mnist (format described there).

#include <cstdint>
#include <string>
#include <vector>

namespace shardwright {

// An array of unsigned bytes, row-major.
struct IdxArray {
  std::vector<std::int64_t> shape;
  std::vector<std::uint8_t> values;
};

// Reads a file of unsigned bytes, plain or gzip. Throws InputError for other element types, more
// than four dimensions, sizes that the file does not hold exactly, and more than 8 GiB.
[[nodiscard]] IdxArray ReadIdx(const std::string& file);

// Does the file (plain or gzip) begin like an IDX file of unsigned bytes? False if unreadable.
[[nodiscard]] bool IsIdx(const std::string& file);

}  // namespace shardwright
