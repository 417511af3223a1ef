// Logs of PyTorch's NCCL watchdog and what ncclras prints.

#include "analysis/hang.h"
#include "tests/fuzz/fuzz.h"

namespace shardwright::fuzz {

void Read(std::string_view bytes) {
  if (IsHangLog(bytes)) {
    (void)DiagnoseHangLog(bytes, nullptr);
  }
}

}  // namespace shardwright::fuzz
