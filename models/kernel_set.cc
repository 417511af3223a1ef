#include "models/kernel_set.h"

#include <iterator>
#include <type_traits>
#include <utility>

#include "core/embedded.h"
#include "core/error.h"
#include "core/json.h"
#include "core/ranges.h"
#include "core/text.h"
#include "models/kernel_sets.h"
#include "models/kernels/kernels.h"

namespace shardwright {
namespace {

KernelSetOptions ReadSet(const JsonValue& row, const std::vector<KernelSetOptions>& before) {
  KernelSetOptions set;
  if (const auto like = row.Find("like")) {
    const auto found = FindIn(before, like->AsString(), &KernelSetOptions::name);
    SW_CHECK(found != before.end(), "no kernel set " + like->AsString() + " above it");
    set = *found;
  }
  set.name = row.At("name").AsString();
  std::vector<std::string> keys = {"name", "like", "attention"};
  kKernelSetOptionsFields(set, [&](const char* key, auto& option) {
    if (const auto value = row.Find(keys.emplace_back(key))) {
      if constexpr (std::is_same_v<decltype(option), bool&>) {
        option = value->AsBool();
      } else {
        option = value->AsInt();
      }
    }
  });
  if (const auto attention = row.Find("attention")) {
    set.attention = static_cast<AttentionImpl>(attention->AsChoice(kAttentionImplNames));
  }
  row.AllowOnly(keys);
  return set;
}

}  // namespace

// One row per software stack. docs/kernel_sets.md gives the reason of each value.
std::span<const KernelSetOptions> BuiltinKernelSets() {
  static const std::vector<KernelSetOptions> table = [] {
    const EmbeddedFile& file = EmbeddedKernelSets().front();
    const JsonValue rows = JsonValue::Parse(file.text, std::string(file.path)).At("kernel_sets");
    std::vector<KernelSetOptions> all;
    for (std::size_t i = 0; i < rows.size(); ++i) {
      all.push_back(ReadSet(rows[i], all));
    }
    return all;
  }();
  return table;
}

const KernelSetOptions& FindKernelSet(std::string_view name, std::string_view where) {
  std::vector<std::string> names;
  for (const KernelSetOptions& options : BuiltinKernelSets()) {
    if (options.name == name) {
      return options;
    }
    names.push_back(options.name);
  }
  throw InputError(where, Quoted(name), "one of " + Listed(names, Quoted), DidYouMean(name, names));
}

namespace {

// In the order of OpKind.
constexpr OpKernels (*kRules[])(const internal::LowerContext&) = {
    internal::LowerEmbedding,    internal::LowerLinear,
    internal::LowerLayerNorm,    internal::LowerRmsNorm,
    internal::LowerRope,         internal::LowerAttention,
    internal::LowerActivation,   internal::LowerGatedActivation,
    internal::LowerAdd,          internal::LowerMul,
    internal::LowerScale,        internal::LowerDropout,
    internal::LowerPositionBias, internal::LowerConv2d,
    internal::LowerBatchNorm,    internal::LowerMaxPool,
    internal::LowerAvgPool,      internal::LowerConcat,
    internal::LowerSelect,       internal::LowerRouter,
    internal::LowerExperts,      internal::LowerLogSoftmax,
    internal::LowerNllLoss,      internal::LowerCrossEntropy,
    internal::LowerOther,        internal::LowerDispatch,
    internal::LowerExchange,     internal::LowerCombine,
    internal::LowerMoveTokens,   internal::LowerMoveTokens,
};
static_assert(std::size(kRules) == static_cast<std::size_t>(OpKind::kScatterTokens) + 1);

}  // namespace

OpKernels LowerOp(const OpSpec& spec, std::int64_t batch, DType compute,
                  const KernelSetOptions& options) {
  SW_CHECK(batch >= 1, "batch " + std::to_string(batch));
  const internal::LowerContext context{
      .spec = spec, .batch = batch, .compute = compute, .options = options, .s = SizeOf(compute)};
  OpKernels op = kRules[static_cast<std::size_t>(spec.kind)](context);
  if (spec.kind == OpKind::kOther) {  // planned, not run
    return op;
  }
  if (options.cuda_kernels) {
    return internal::AdaptToCuda(context, std::move(op));
  }
  return options.host_kernels ? internal::AdaptToHost(context, std::move(op)) : op;
}

bool RunsOnce(const Model& model, const ModelOp& op) {
  return model.SpecOf(op).kind != OpKind::kOther && !op.inputs.empty() &&
         NoneOf(op.inputs, [&](TensorId t) { return model.tensors[t.value].per_sample; });
}

Kernel GradientSumKernel(Bytes bytes, DType compute) {
  return internal::PassKernel(KernelClass::kElementwise, compute, 2 * bytes.value, bytes.value);
}

Bytes TensorBytes(const Tensor& tensor, std::int64_t batch, DType compute) {
  std::int64_t element_bytes = SizeOf(compute);
  switch (tensor.role) {
    case TensorRole::kActivation:
      break;
    case TensorRole::kIndex:
      element_bytes = internal::kIndexBytes;
      break;
    case TensorRole::kLoss:
    case TensorRole::kFp32:
      element_bytes = internal::kFp32Bytes;
      break;
    case TensorRole::kBool:
      element_bytes = 1;
      break;
  }
  return Bytes(internal::Product({tensor.elements, tensor.per_sample ? batch : 1, element_bytes}));
}

}  // namespace shardwright
