#pragma once

#include <cstdint>
#include <memory>
#include <string>

#include "executor/data/dataset.h"

namespace shardwright {

// Tokens of `width` bytes (1, 2 or 4, little-endian) cut into samples one after the other:
//   decoder        S tokens; labels are the tokens one further on
//   encoder-decoder  S for the encoder; the next S are the labels
//   encoder        S tokens, of which 15 % are replaced by a mask; their labels are the originals,
//                  all other labels -100 (BERT's masking, without its random replacements)
[[nodiscard]] std::unique_ptr<Dataset> OpenTokens(const std::string& file, int width,
                                                  const DataShape& shape, std::uint64_t seed);

}  // namespace shardwright
