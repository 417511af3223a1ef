#include "executor/checkpoint/hub_names.h"

#include <charconv>
#include <map>
#include <optional>
#include <utility>

#include "core/ranges.h"

namespace shardwright {
namespace {

// "model.layers.0.mlp.experts.7.gate_proj.weight", or with block_sparse_moe and w1, w3, w2.
struct ExpertName {
  std::string module;  // "model.layers.0.mlp"
  std::int64_t expert = 0;
  enum class Matrix : std::uint8_t { kGate, kUp, kDown } matrix = Matrix::kGate;
};

constexpr std::string_view kOldMixture = ".block_sparse_moe";
constexpr std::string_view kMixture = ".mlp";

std::optional<ExpertName> ReadExpertName(std::string_view name) {
  using enum ExpertName::Matrix;
  static constexpr std::pair<std::string_view, ExpertName::Matrix> kMatrices[] = {
      {".gate_proj.weight", kGate}, {".up_proj.weight", kUp}, {".down_proj.weight", kDown},
      {".w1.weight", kGate},        {".w3.weight", kUp},      {".w2.weight", kDown}};
  constexpr std::string_view kExperts = ".experts.";
  const std::size_t at = name.find(kExperts);
  if (at == std::string_view::npos) {
    return std::nullopt;
  }
  ExpertName read;
  const std::string_view behind = name.substr(at + kExperts.size());
  const auto [end, error] =
      std::from_chars(behind.data(), behind.data() + behind.size(), read.expert);
  if (error != std::errc()) {
    return std::nullopt;
  }
  const std::string_view matrix(end, static_cast<std::size_t>(behind.data() + behind.size() - end));
  for (const auto& [suffix, which] : kMatrices) {
    if (matrix == suffix) {
      read.matrix = which;
      read.module = name.substr(0, at);
      if (read.module.ends_with(kOldMixture)) {
        read.module.replace(read.module.size() - kOldMixture.size(), kOldMixture.size(), kMixture);
      }
      return read;
    }
  }
  return std::nullopt;
}

void Replace(std::string& name, std::string_view old, std::string_view with) {
  if (const std::size_t at = name.find(old); at != std::string::npos) {
    name.replace(at, old.size(), with);
  }
}

// A tensor that is one in both.
std::string NameInModules5(std::string name, bool is_vit) {
  Replace(name, ".block_sparse_moe.gate.", ".mlp.gate.");
  if (is_vit && name.find("encoder.layer.") != std::string::npos) {
    Replace(name, "encoder.layer.", "layers.");
    Replace(name, ".attention.attention.query.", ".attention.q_proj.");
    Replace(name, ".attention.attention.key.", ".attention.k_proj.");
    Replace(name, ".attention.attention.value.", ".attention.v_proj.");
    Replace(name, ".attention.output.dense.", ".attention.o_proj.");
    Replace(name, ".intermediate.dense.", ".mlp.fc1.");
    Replace(name, ".output.dense.", ".mlp.fc2.");
  }
  return name;
}

// The matrices of a layer's experts as they come: [experts, rows, columns], gate before up.
class Stacks {
 public:
  explicit Stacks(std::vector<HubTensor>& out) : out_(out) {}

  void Add(const ExpertName& name, const SavedTensor& tensor) {
    const bool is_down = name.matrix == ExpertName::Matrix::kDown;
    const std::string stack =
        name.module + (is_down ? ".experts.down_proj" : ".experts.gate_up_proj");
    const auto [at, is_new] = index_.emplace(stack, out_.size());
    if (is_new) {
      out_.push_back({stack, {0, tensor.shape.at(0) * (is_down ? 1 : 2), tensor.shape.at(1)}, {}});
    }
    parts_[at->second][{name.expert, name.matrix}] = tensor.name;
  }

  void Finish() {
    for (auto& [index, parts] : parts_) {
      out_[index].shape[0] = std::prev(parts.end())->first.first + 1;
      for (auto& [place, name] : parts) {
        out_[index].parts.push_back(std::move(name));
      }
    }
  }

 private:
  std::vector<HubTensor>& out_;
  std::map<std::string, std::size_t> index_;
  std::map<std::size_t, std::map<std::pair<std::int64_t, ExpertName::Matrix>, std::string>> parts_;
};

}  // namespace

std::vector<HubTensor> HubTensorsOf(std::span<const SavedTensor> tensors, HubNames names) {
  const bool is_vit = AnyOf(tensors, [](const SavedTensor& tensor) {
    return tensor.name.find(".attention.attention.query.") != std::string::npos;
  });
  std::vector<HubTensor> out;
  Stacks stacks(out);
  for (const SavedTensor& tensor : tensors) {
    const std::optional<ExpertName> expert =
        names == HubNames::kModules5 ? ReadExpertName(tensor.name) : std::nullopt;
    if (expert.has_value() && tensor.shape.size() == 2) {
      stacks.Add(*expert, tensor);
      continue;
    }
    out.push_back({names == HubNames::kHub ? tensor.name : NameInModules5(tensor.name, is_vit),
                   tensor.shape,
                   {tensor.name}});
  }
  stacks.Finish();
  return out;
}

}  // namespace shardwright
