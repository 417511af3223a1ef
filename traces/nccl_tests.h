#pragma once

// What NVIDIA's and AMD's collective tests print (nccl-tests, rccl-tests), as text or as JSON (-J).

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "core/units.h"
#include "schedule/program.h"

namespace shardwright {

struct CollectiveTiming {
  Bytes size;  // of the full array, as the test counts it
  DType dtype = DType::kFp32;
  Seconds time;  // out of place
};

struct CollectiveTest {
  std::string file;
  OpCode op = OpCode::kAllGather;
  std::int64_t ranks = 0;              // 0: not recorded
  std::vector<CollectiveTiming> rows;  // of size > 0 and with a time
};

// `op` is "all_gather" and so on; nothing: the file says it ("Collective test starting: ...").
// Throws InputError with the line or field for damaged rows, and when nothing says which collective
// it is.
[[nodiscard]] CollectiveTest ReadCollectiveTest(const std::string& file,
                                                const std::optional<std::string>& op);

}  // namespace shardwright
