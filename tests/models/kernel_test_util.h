#pragma once

// Ops and totals that the kernel set tests share. Names as in the literature: b samples, s tokens,
// h features, a heads.

#include <cstdint>
#include <vector>

#include "core/units.h"
#include "models/kernel_set.h"
#include "models/model.h"

namespace shardwright {

inline const KernelSetOptions& Set(const char* name) {
  return FindKernelSet(name, "test");
}

inline double TotalFlops(const std::vector<Kernel>& kernels) {
  double flops = 0.0;
  for (const Kernel& kernel : kernels) {
    flops += kernel.flops.value;
  }
  return flops;
}

inline std::int64_t TotalRead(const std::vector<Kernel>& kernels) {
  std::int64_t bytes = 0;
  for (const Kernel& kernel : kernels) {
    bytes += kernel.read.value;
  }
  return bytes;
}

inline std::int64_t TotalWritten(const std::vector<Kernel>& kernels) {
  std::int64_t bytes = 0;
  for (const Kernel& kernel : kernels) {
    bytes += kernel.written.value;
  }
  return bytes;
}

struct LayerSizes {
  std::int64_t b = 1, s = 0, h = 0, a = 0;
  std::int64_t kv = 0;  // key/value heads
  std::int64_t f = 0;   // MLP features
  double p = 0.0;       // dropout probability
};

inline OpSpec LinearSpec(std::int64_t rows, std::int64_t in, std::int64_t out, bool bias) {
  return {.kind = OpKind::kLinear, .rows = rows, .in = in, .out = out, .has_bias = bias};
}

inline OpSpec RowsSpec(OpKind kind, std::int64_t rows, std::int64_t in) {
  return {.kind = kind, .rows = rows, .in = in};
}

inline OpSpec AttentionSpec(const LayerSizes& z) {
  return {.kind = OpKind::kAttention,
          .rows = z.s,
          .heads = z.a,
          .kv_heads = z.kv,
          .head_dim = z.h / z.a,
          .value_dim = z.h / z.a,
          .seq_q = z.s,
          .seq_k = z.s,
          .causal = true,
          .dropout_p = z.p};
}

}  // namespace shardwright
