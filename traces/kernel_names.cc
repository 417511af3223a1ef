// Second best: what names of kernels and host ops say about the work. Arguments of the profiler
// come first where there are any.

#include <algorithm>
#include <array>
#include <cctype>
#include <string>
#include <string_view>

#include "traces/internal/raw_recording.h"

namespace shardwright {
namespace {

struct NamePattern {
  std::string_view part;  // lower case
  KernelClass kernel;
};

// The first row whose text is part of the name wins: "flash_fwd" before "gemm", since attention
// kernels are full of matrix products, and "dgrad" before "gemm" for convolutions.
constexpr std::array kPatterns = {
    NamePattern{"flash_bwd", KernelClass::kAttentionBackward},
    NamePattern{"flash_attention_backward", KernelClass::kAttentionBackward},
    NamePattern{"attention_backward", KernelClass::kAttentionBackward},
    NamePattern{"attention_for_cpu_backward", KernelClass::kAttentionBackward},
    NamePattern{"sdpa_backward", KernelClass::kAttentionBackward},
    NamePattern{"sdpa_sm80_flash_bprop", KernelClass::kAttentionBackward},
    NamePattern{"sdpa_sm90_flash_bprop", KernelClass::kAttentionBackward},
    NamePattern{"fmha_bwd", KernelClass::kAttentionBackward},
    NamePattern{"fmha_cutlassb", KernelClass::kAttentionBackward},
    NamePattern{"flash_fwd", KernelClass::kAttentionForward},
    NamePattern{"flash_attn", KernelClass::kAttentionForward},
    NamePattern{"fmha", KernelClass::kAttentionForward},
    NamePattern{"attention", KernelClass::kAttentionForward},
    NamePattern{"sdpa", KernelClass::kAttentionForward},
    NamePattern{"convolution", KernelClass::kConv},
    NamePattern{"conv2d", KernelClass::kConv},
    NamePattern{"conv3d", KernelClass::kConv},
    NamePattern{"implicit_gemm", KernelClass::kConv},
    NamePattern{"fprop", KernelClass::kConv},
    NamePattern{"dgrad", KernelClass::kConv},
    NamePattern{"wgrad", KernelClass::kConv},
    NamePattern{"winograd", KernelClass::kConv},
    NamePattern{"layer_norm", KernelClass::kNorm},
    NamePattern{"layernorm", KernelClass::kNorm},
    NamePattern{"gammabeta", KernelClass::kNorm},
    NamePattern{"rms_norm", KernelClass::kNorm},
    NamePattern{"rmsnorm", KernelClass::kNorm},
    NamePattern{"batch_norm", KernelClass::kNorm},
    NamePattern{"group_norm", KernelClass::kNorm},
    NamePattern{"softmax", KernelClass::kSoftmax},
    NamePattern{"cross_entropy", KernelClass::kSoftmax},
    NamePattern{"nll_loss", KernelClass::kSoftmax},
    NamePattern{"adam", KernelClass::kOptimizer},
    NamePattern{"embedding", KernelClass::kGatherScatter},
    NamePattern{"index_select", KernelClass::kGatherScatter},
    NamePattern{"indexselect", KernelClass::kGatherScatter},
    NamePattern{"index_put", KernelClass::kGatherScatter},
    NamePattern{"index_add", KernelClass::kGatherScatter},
    NamePattern{"scatter", KernelClass::kGatherScatter},
    NamePattern{"gather", KernelClass::kGatherScatter},
    NamePattern{"split_with_sizes_copy", KernelClass::kCopy},
    NamePattern{"all_gather_copy_in", KernelClass::kCopy},
    NamePattern{"chunk_cat", KernelClass::kCopy},
    NamePattern{"catarray", KernelClass::kCopy},
    NamePattern{"gemm", KernelClass::kGemm},
    NamePattern{"cutlass", KernelClass::kGemm},
    NamePattern{"xmma", KernelClass::kGemm},
    NamePattern{"nvjet", KernelClass::kGemm},
    NamePattern{"wgmma", KernelClass::kGemm},
    NamePattern{"splitkreduce", KernelClass::kGemm},
    NamePattern{"cijk_", KernelClass::kGemm},
    NamePattern{"aten::linear", KernelClass::kGemm},
    NamePattern{"aten::addmm", KernelClass::kGemm},
    NamePattern{"aten::matmul", KernelClass::kGemm},
    NamePattern{"aten::mm", KernelClass::kGemm},
    NamePattern{"aten::bmm", KernelClass::kGemm},
    NamePattern{"aten::baddbmm", KernelClass::kGemm},
    NamePattern{"aten::einsum", KernelClass::kGemm},
};

// Collectives by a part of their names, the most special first.
struct CollectivePattern {
  std::string_view part;  // lower case, without '_'
  OpCode code;
};
constexpr std::array kCollectives = {
    CollectivePattern{"reducescatter", OpCode::kReduceScatter},
    CollectivePattern{"allreduce", OpCode::kAllReduce},
    CollectivePattern{"allgather", OpCode::kAllGather},
    CollectivePattern{"alltoall", OpCode::kAllToAll},
    CollectivePattern{"broadcast", OpCode::kBroadcast},
    CollectivePattern{"barrier", OpCode::kBarrier},
};

char Lower(char c) {
  return static_cast<char>(std::tolower(static_cast<unsigned char>(c)));
}

}  // namespace

KernelClass ClassOfKernelName(std::string_view name) {
  std::string lower(name.substr(0, 512));  // mangled names can be very long
  std::transform(lower.begin(), lower.end(), lower.begin(), Lower);
  for (const NamePattern& pattern : kPatterns) {
    if (lower.find(pattern.part) != std::string::npos) {
      return pattern.kernel;
    }
  }
  return KernelClass::kElementwise;
}

namespace internal {

std::optional<OpCode> CollectiveOfName(std::string_view name) {
  std::string lower;
  for (const char c : name.substr(0, 128)) {
    if (c != '_') {
      lower += Lower(c);
    }
  }
  for (const CollectivePattern& pattern : kCollectives) {
    if (lower.find(pattern.part) != std::string::npos) {
      return pattern.code;
    }
  }
  return std::nullopt;
}

std::optional<OpCode> CollectiveOfKernel(std::string_view name) {
  for (const std::string_view library : {"nccl", "rccl", "mscclKernel", "nvshmem"}) {
    if (name.starts_with(library)) {
      return CollectiveOfName(name).value_or(OpCode::kAllToAll);
    }
  }
  return std::nullopt;
}

}  // namespace internal
}  // namespace shardwright
