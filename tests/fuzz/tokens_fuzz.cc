// Token files; the first byte of the input says their width and what reads them.

#include <algorithm>
#include <array>
#include <cstdint>

#include "executor/data/tokens.h"
#include "tests/fuzz/fuzz.h"

namespace shardwright::fuzz {

void Read(std::string_view bytes) {
  if (bytes.empty()) {
    return;
  }
  const auto choice = static_cast<unsigned char>(bytes[0]);
  constexpr std::array kWidths = {1, 2, 4};
  DataShape shape;
  shape.tokens = 1 + (choice >> 4);
  shape.labels = shape.tokens;
  shape.vocabulary = 50'000;
  shape.has_decoder = (choice & 4U) != 0;
  shape.is_masked = (choice & 8U) != 0;
  const auto data = OpenTokens(FileWith(bytes.substr(1)), kWidths[(choice & 3U) % 3], shape, 1);
  std::array<std::int64_t, 17> ids{};
  for (std::int64_t sample = 0; sample < std::min<std::int64_t>(data->size(), 100); ++sample) {
    for (const InputKind kind : {InputKind::kTokens, InputKind::kLabels}) {
      data->Write(sample, kind,
                  {.data = ids.data(), .elements = shape.tokens, .dtype = DType::kInt64});
    }
  }
}

}  // namespace shardwright::fuzz
