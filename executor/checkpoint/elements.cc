#include "executor/checkpoint/elements.h"

#include <cstring>

#include "core/error.h"
#include "executor/half.h"

namespace shardwright {

bool IsFloat(DType dtype) {
  return dtype == DType::kFp32 || dtype == DType::kBf16 || dtype == DType::kFp16;
}

void ConvertElements(DType from, const std::byte* in, DType to, std::byte* out,
                     std::int64_t count) {
  if (from == to) {
    std::memcpy(out, in, static_cast<std::size_t>(count * SizeOf(to)));
    return;
  }
  if (from == DType::kInt64 && to == DType::kFp32) {  // PyTorch counts batches in such
    for (std::int64_t i = 0; i < count; ++i) {
      std::int64_t number = 0;
      std::memcpy(&number, in + i * SizeOf(from), sizeof number);
      StoreFloat(to, out, i, static_cast<float>(number));
    }
    return;
  }
  SW_CHECK(IsFloat(from) && IsFloat(to), "no conversion between these dtypes");
  for (std::int64_t i = 0; i < count; ++i) {
    StoreFloat(to, out, i, LoadFloat(from, in, i));
  }
}

}  // namespace shardwright
