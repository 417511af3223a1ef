// Manifests of our checkpoints. Their checksum is made right first: behind it no damage would be
// seen.

#include <array>
#include <cstdint>
#include <cstdio>

#include "executor/checkpoint/manifest.h"
#include "executor/checkpoint/output_file.h"
#include "tests/fuzz/fuzz.h"

namespace shardwright::fuzz {

void Read(std::string_view bytes) {
  constexpr std::string_view kField = ",\n \"manifest_crc32\": \"";
  constexpr std::size_t kDigits = 8;
  std::string text(bytes);
  const std::size_t at = text.rfind(kField);
  if (at != std::string::npos && text.size() >= at + kField.size() + kDigits) {
    std::array<char, kDigits + 1> digits{};
    std::snprintf(digits.data(), digits.size(), "%08x",
                  Crc32(0, text.data(), static_cast<std::int64_t>(at)));
    text.replace(at + kField.size(), kDigits, digits.data());
  }
  (void)ParseManifest(text, "fuzz");
}

}  // namespace shardwright::fuzz
