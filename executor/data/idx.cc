#include "executor/data/idx.h"

#include <algorithm>
#include <array>

#include "core/budget.h"
#include "core/error.h"
#include "traces/gzip.h"

namespace shardwright {
namespace {

// They are kept in memory. MNIST has 47 million, EMNIST 547 million.
constexpr std::int64_t kMostElements = std::int64_t{768} << 20;
constexpr std::size_t kMaxDimensions = 4;
constexpr char kUnsignedByte = 0x08;

// Fills the whole buffer, or returns how much there was.
std::size_t ReadFully(TextSource& source, char* buffer, std::size_t size) {
  std::size_t done = 0;
  while (done < size) {
    const std::size_t count = source.Read(buffer + done, size - done);
    if (count == 0) {
      break;
    }
    done += count;
  }
  return done;
}

std::int64_t BigEndian(const char* bytes) {
  std::int64_t value = 0;
  for (int i = 0; i < 4; ++i) {
    value = value * 256 + static_cast<unsigned char>(bytes[i]);
  }
  return value;
}

}  // namespace

bool IsIdx(const std::string& file) {
  try {
    TextSource source(file);
    std::array<char, 4> magic{};
    return ReadFully(source, magic.data(), magic.size()) == magic.size() && magic[0] == 0 &&
           magic[1] == 0 && magic[2] == kUnsignedByte && magic[3] >= 1 &&
           static_cast<std::size_t>(magic[3]) <= kMaxDimensions;
  } catch (const InputError&) {
    return false;
  }
}

IdxArray ReadIdx(const std::string& file) {
  TextSource source(file);
  std::array<char, 4 + 4 * kMaxDimensions> header{};
  if (ReadFully(source, header.data(), 4) < 4 || header[0] != 0 || header[1] != 0) {
    throw InputError(file, "no IDX header", "a file that begins with two zero bytes");
  }
  if (header[2] != kUnsignedByte) {
    throw InputError(file, "element type " + std::to_string(static_cast<int>(header[2])),
                     "8, unsigned bytes");
  }
  const auto dimensions = static_cast<std::size_t>(static_cast<unsigned char>(header[3]));
  if (dimensions < 1 || dimensions > kMaxDimensions) {
    throw InputError(file, std::to_string(dimensions) + " dimensions", "1 to 4");
  }
  if (ReadFully(source, header.data() + 4, 4 * dimensions) < 4 * dimensions) {
    throw InputError(file, "the end of the file inside the header", "a size per dimension");
  }
  IdxArray array;
  std::int64_t elements = 1;
  for (std::size_t d = 0; d < dimensions; ++d) {
    const std::int64_t size = BigEndian(header.data() + 4 + 4 * d);
    array.shape.push_back(size);
    elements = size > 0 && elements > INT64_MAX / size ? INT64_MAX : elements * size;
  }
  Budget(file, "elements", kMostElements).Take(elements);
  // Filled as it comes: room for all is made when the first chunk is there, so that a header alone
  // takes none.
  std::int64_t chunk = std::int64_t{1} << 16;
  while (static_cast<std::int64_t>(array.values.size()) < elements) {
    const std::size_t done = array.values.size();
    if (done > 0) {
      array.values.reserve(static_cast<std::size_t>(elements));
      chunk = std::int64_t{1} << 20;
    }
    const auto wanted =
        static_cast<std::size_t>(std::min(chunk, elements - static_cast<std::int64_t>(done)));
    array.values.resize(done + wanted);
    const std::size_t count =
        ReadFully(source, reinterpret_cast<char*>(array.values.data() + done), wanted);
    if (count < wanted) {
      throw InputError(file, std::to_string(done + count) + " elements",
                       std::to_string(elements) + ", as its header says");
    }
  }
  char extra = 0;
  if (source.Read(&extra, 1) != 0) {
    throw InputError(file, "more than " + std::to_string(elements) + " elements",
                     std::to_string(elements) + ", as its header says");
  }
  return array;
}

}  // namespace shardwright
