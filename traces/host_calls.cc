// Calls of the host that say what a model does, whatever kernels they become: matrix products,
// attention and convolutions by PyTorch's names of them.

#include <array>
#include <string_view>

#include "core/ranges.h"
#include "traces/internal/raw_recording.h"

namespace shardwright::internal {
namespace {

struct CallName {
  std::string_view name;
  CallKind kind;
};

// None of them calls another one: linear, matmul and einsum come down to these products, and
// scaled_dot_product_attention to one of these functions.
constexpr CallName kCalls[] = {{"aten::mm", CallKind::kProduct},
                               {"aten::addmm", CallKind::kProduct},
                               {"aten::addmm_", CallKind::kProduct},
                               {"aten::_addmm_activation", CallKind::kProduct},
                               {"aten::bmm", CallKind::kProduct},
                               {"aten::baddbmm", CallKind::kProduct},
                               {"aten::baddbmm_", CallKind::kProduct},
                               {"aten::_scaled_mm", CallKind::kProduct},
                               {"aten::convolution", CallKind::kConvolution},
                               {"aten::convolution_backward", CallKind::kConvolution}};

constexpr std::array<std::string_view, 3> kAttention = {
    "aten::_scaled_dot_product_", "flash_attn::_flash_attn_", "flash_attn_3::_flash_attn_"};

}  // namespace

std::optional<CallKind> CallOfName(std::string_view name) {
  // As on a CPU where the bias of the scores is trained.
  constexpr std::string_view kWrittenOut = "aten::_scaled_dot_product_attention_math";
  if (name.starts_with(kWrittenOut)) {
    return CallKind::kAttentionWrittenOut;
  }
  for (const std::string_view prefix : kAttention) {
    if (name.starts_with(prefix)) {
      return name.find("backward") == name.npos ? CallKind::kAttentionForward
                                                : CallKind::kAttentionBackward;
    }
  }
  const auto* const found = FindIf(kCalls, [&](const CallName& row) { return row.name == name; });
  return found == std::end(kCalls) ? std::nullopt : std::optional(found->kind);
}

HostCall CallWithSizes(std::string_view name, CallKind kind,
                       std::span<const OperandSizes> operands) {
  HostCall call;
  call.kind = kind;
  if (kind == CallKind::kProduct) {
    // What is added to comes first: "addmm(bias, a, b)".
    const std::size_t first = name.find("add") == name.npos ? 0 : 1;
    if (operands.size() < first + 2) {
      return call;
    }
    const OperandSizes& a = operands[first];
    const OperandSizes& b = operands[first + 1];
    if (a.rank == b.rank && (a.rank == 2 || a.rank == 3)) {
      const std::size_t rows = a.rank - 2;
      call.batch = a.rank == 3 ? a.sizes[0] : 1;
      call.m = a.sizes[rows];
      call.k = a.sizes[rows + 1];
      call.n = b.sizes[rows + 1];
    }
  } else if (kind != CallKind::kConvolution && name.starts_with("aten::") && !operands.empty() &&
             operands[0].rank == 4) {
    // (samples, heads, tokens, head_dim) of q; in backward first of the result's gradient, which
    // has these sizes, too.
    const auto& sizes = operands[0].sizes;
    constexpr std::int64_t kMost = std::int64_t{1} << 30;
    call.batch = std::min(sizes[0], kMost) * std::min(sizes[1], kMost);
    call.m = sizes[2];
    call.k = sizes[3];
  }
  const bool is_whole =
      call.batch > 0 && call.m > 0 && call.k > 0 && (kind != CallKind::kProduct || call.n > 0);
  if (!is_whole) {
    call.batch = call.m = call.n = call.k = 0;
  }
  return call;
}

}  // namespace shardwright::internal
