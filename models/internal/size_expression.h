#pragma once

// Sizes of a model.json: integers, or texts such as "2 * sequence_length + 1".

#include <cstdint>

#include "core/json.h"
#include "models/model.h"

namespace shardwright {

// The sizes of the file that expressions may name; 0: the file has none of that name.
struct FileSizes {
  std::int64_t sequence_length = 0, image_size = 0;
  bool reads_sequence_length = false;  // some expression named it
  bool reads_image_size = false;
};

// Sums of products of integers, "sequence_length", "image_size" and "batch"; "/" divides what
// stands before it in its product and must leave no rest. Throws InputError at `value` for other
// texts, results outside 0 to 2^56, and more than two factors "batch" in a product.
[[nodiscard]] Amount EvaluateAmount(const JsonValue& value, FileSizes& sizes);
// The same without "batch", between `min` and `max`.
[[nodiscard]] std::int64_t EvaluateSize(const JsonValue& value, FileSizes& sizes, std::int64_t min,
                                        std::int64_t max);

}  // namespace shardwright
