#include "executor/checkpoint/adapters.h"

#include <charconv>

#include "core/error.h"
#include "core/text.h"
#include "executor/checkpoint/elements.h"

namespace shardwright {
namespace {

constexpr std::string_view kA = ".lora_A.weight";
constexpr std::string_view kB = ".lora_B.weight";

// Transformers' Conv1D, which only GPT-2 has, keeps weights [in, out].
bool IsConv1D(const std::string& module) {
  const std::string name = module.substr(module.rfind('.') + 1);
  return name == "c_attn" || name == "c_proj" || name == "c_fc";
}

double ScaleOf(const Checkpoint& checkpoint) {
  for (const auto& [name, value] : checkpoint.manifest().settings) {
    double scale = 0.0;
    if (name == kAdapterScaleSetting &&
        std::from_chars(value.data(), value.data() + value.size(), scale).ec == std::errc()) {
      return scale;
    }
  }
  throw InputError(checkpoint.folder(), std::string("no setting ") + kAdapterScaleSetting,
                   "what adapters are scaled by, which newer checkpoints say");
}

}  // namespace

bool IsAdapter(const std::string& tensor) {
  return tensor.ends_with(kA) || tensor.ends_with(kB);
}

MergedWeights::MergedWeights(const Checkpoint& checkpoint) : checkpoint_(checkpoint) {
  for (const SavedTensor& tensor : checkpoint.manifest().tensors) {
    if (tensor.kind == TensorKind::kParameter && tensor.name.ends_with(kA)) {
      const std::string module = tensor.name.substr(0, tensor.name.size() - kA.size());
      adapters_[module + ".weight"] = ReadAdapter(module);
    }
  }
  if (!adapters_.empty()) {
    scale_ = ScaleOf(checkpoint);
  }
}

MergedWeights::Adapter MergedWeights::ReadAdapter(const std::string& module) const {
  const SavedTensor& a = checkpoint_.Find(module + std::string(kA));
  const SavedTensor& b = checkpoint_.Find(module + std::string(kB));
  const SavedTensor& weight = checkpoint_.Find(module + ".weight");
  const bool fits = a.shape.size() == 2 && b.shape.size() == 2 && weight.shape.size() == 2 &&
                    a.shape[0] == b.shape[1] && weight.Elements() == a.shape[1] * b.shape[0];
  if (!fits) {
    throw InputError(checkpoint_.folder() + ": tensor \"" + a.name + '"',
                     "shape " + ShapeText(a.shape), "one that fits those of lora_B and weight");
  }
  Adapter adapter{a.shape[0], a.shape[1], b.shape[0]};
  adapter.a.resize(static_cast<std::size_t>(a.Elements()));
  adapter.b.resize(static_cast<std::size_t>(b.Elements()));
  checkpoint_.Read(a.name, 0, a.Elements(), DType::kFp32, adapter.a.data());
  checkpoint_.Read(b.name, 0, b.Elements(), DType::kFp32, adapter.b.data());
  adapter.is_transposed = IsConv1D(module);
  return adapter;
}

void MergedWeights::Read(const SavedTensor& tensor, std::int64_t begin, std::int64_t count,
                         DType dtype, void* out) const {
  const auto found = adapters_.find(tensor.name);
  if (found == adapters_.end()) {
    checkpoint_.Read(tensor.name, begin, count, dtype, out);
    return;
  }
  const Adapter& adapter = found->second;
  std::vector<float> values(static_cast<std::size_t>(count));
  checkpoint_.Read(tensor.name, begin, count, DType::kFp32, values.data());
  const std::int64_t columns = tensor.shape[1];
  for (std::int64_t i = 0; i < count; ++i) {
    const std::int64_t row = (begin + i) / columns, column = (begin + i) % columns;
    const std::int64_t to = adapter.is_transposed ? column : row;
    const std::int64_t from = adapter.is_transposed ? row : column;
    double sum = 0.0;
    for (std::int64_t k = 0; k < adapter.rank; ++k) {
      sum += static_cast<double>(adapter.b[static_cast<std::size_t>(to * adapter.rank + k)]) *
             static_cast<double>(adapter.a[static_cast<std::size_t>(k * adapter.in + from)]);
    }
    values[static_cast<std::size_t>(i)] += static_cast<float>(scale_ * sum);
  }
  ConvertElements(DType::kFp32, reinterpret_cast<const std::byte*>(values.data()), dtype,
                  static_cast<std::byte*>(out), count);
}

}  // namespace shardwright
