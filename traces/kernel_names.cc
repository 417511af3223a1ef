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
  KernelClass kernel;
  std::string_view parts;  // lower case, a blank behind each
};

// The first part that stands in the name wins: "flash_fwd" before "gemm", since attention kernels
// are full of matrix products, and "dgrad" before "gemm" for convolutions.
constexpr std::array<NamePattern, 9> kPatterns = {{
    {KernelClass::kAttentionBackward,
     "flash_bwd flash_attention_backward attention_backward "
     "attention_for_cpu_backward sdpa_backward sdpa_sm80_flash_bprop "
     "sdpa_sm90_flash_bprop fmha_bwd fmha_cutlassb "},
    {KernelClass::kAttentionForward, "flash_fwd flash_attn fmha attention sdpa "},
    {KernelClass::kConv, "convolution conv2d conv3d implicit_gemm fprop dgrad wgrad winograd "},
    {KernelClass::kNorm, "layer_norm layernorm gammabeta rms_norm rmsnorm batch_norm group_norm "},
    {KernelClass::kSoftmax, "softmax cross_entropy nll_loss "},
    {KernelClass::kOptimizer, "adam "},
    {KernelClass::kGatherScatter,
     "embedding index_select indexselect index_put index_add scatter gather "},
    {KernelClass::kCopy, "split_with_sizes_copy all_gather_copy_in chunk_cat catarray "},
    {KernelClass::kGemm,
     "gemm cutlass xmma nvjet wgmma splitkreduce cijk_ aten::linear aten::addmm "
     "aten::matmul aten::mm aten::bmm aten::baddbmm aten::einsum "},
}};

// Collectives by a part of their names, the most special first.
struct CollectivePattern {
  std::string_view part;  // lower case, without '_'
  OpCode code;
};
constexpr CollectivePattern kCollectives[] = {
    {"reducescatter", OpCode::kReduceScatter}, {"allreduce", OpCode::kAllReduce},
    {"allgather", OpCode::kAllGather},         {"alltoall", OpCode::kAllToAll},
    {"broadcast", OpCode::kBroadcast},         {"barrier", OpCode::kBarrier}};

char Lower(char c) {
  return static_cast<char>(std::tolower(static_cast<unsigned char>(c)));
}

}  // namespace

KernelClass ClassOfKernelName(std::string_view name) {
  std::string lower(name.substr(0, 512));  // mangled names can be very long
  std::transform(lower.begin(), lower.end(), lower.begin(), Lower);
  for (const NamePattern& pattern : kPatterns) {
    for (std::string_view parts = pattern.parts; !parts.empty();) {
      const std::size_t end = parts.find(' ');
      if (lower.find(parts.substr(0, end)) != std::string::npos) {
        return pattern.kernel;
      }
      parts.remove_prefix(end + 1);
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
