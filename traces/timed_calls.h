#pragma once

// What calls of PyTorch's operators cost, of any program: their shapes and how long the kernels
// that they launched ran. From traces of PyTorch's profiler with record_shapes=True.

#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include "core/units.h"
#include "models/model.h"

namespace shardwright {

enum class TimedCallKind : std::uint8_t {
  kProduct,
  kAttentionForward,
  kAttentionBackward,
  kLayerNormForward,
  kLayerNormBackward,
  kRmsNormForward,
  kRmsNormBackward,
  kElementwise,
  kCopy,
};

struct TimedCall {
  TimedCallKind kind = TimedCallKind::kProduct;
  DType dtype = DType::kFp32;
  bool is_cudnn = false;  // attention by cuDNN; else FlashAttention-2, or PyTorch's on a CPU
  bool causal = false;    // attention
  // Products: `batch` of (m, k) x (k, n). Attention: `batch` samples, m queries and n keys of k
  // features, in `heads` and `kv_heads`. Norms: m rows of n features.
  std::int64_t batch = 1, m = 0, n = 0, k = 0;
  std::int64_t heads = 0, kv_heads = 0;
  Bytes read, written;  // kElementwise, kCopy
  Seconds time;         // of its kernels together; on a CPU of the call

  bool operator==(const TimedCall&) const = default;
};

struct TimedCalls {
  std::string file;
  std::string device;       // as PyTorch names it, "NVIDIA H100 80GB HBM3"; empty: not recorded
  bool on_device = false;   // false: no kernels of a device, the host's own calls are the work
  bool has_shapes = false;  // false: record_shapes was off
  std::vector<TimedCall> calls;  // by time
  Seconds total;                 // of all kernels but collectives; on a CPU of all operators
  // Of that, what no call tells: by the name of the kernel or operator, the longest first.
  std::vector<std::pair<std::string, Seconds>> untold;
};

// Throws InputError for damaged files and traces without any work.
[[nodiscard]] TimedCalls ReadTimedCalls(const std::string& file);

}  // namespace shardwright
