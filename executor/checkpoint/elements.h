#pragma once

// Elements of saved tensors in other dtypes.

#include <cstddef>
#include <cstdint>

#include "core/units.h"

namespace shardwright {

// fp32, bf16 or fp16.
[[nodiscard]] bool IsFloat(DType dtype);

// `count` elements in another dtype. Requires two of IsFloat, equal dtypes, or an int64 count that
// becomes fp32.
void ConvertElements(DType from, const std::byte* in, DType to, std::byte* out, std::int64_t count);

}  // namespace shardwright
