#pragma once

// Files that hold measurements, by what is in them and whatever their names.

#include <cstdint>
#include <string>
#include <string_view>

namespace shardwright {

enum class MeasuredKind : std::uint8_t {
  kTrace,     // of `shardwright run` or `simulate`
  kKineto,    // PyTorch's profiler, plain or gzip
  kNsight,    // Nsight Systems, exported to SQLite
  kSnapshot,  // torch.cuda.memory._dump_snapshot
  kNcclText,  // what nccl-tests print
  kNcclJson,  // nccl-tests -J
};
inline constexpr std::size_t kMeasuredKindCount = 6;
[[nodiscard]] std::string_view NameOf(MeasuredKind kind);

// Reads the beginning of the file only. Throws InputError when it is none of these, and says what
// to do about files that hold the same in another form (.nsys-rep, zipped pickles).
[[nodiscard]] MeasuredKind DetectMeasured(const std::string& file);

}  // namespace shardwright
