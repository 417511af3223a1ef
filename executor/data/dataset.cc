#include "executor/data/dataset.h"

#include <array>
#include <filesystem>
#include <iterator>
#include <span>
#include <string_view>
#include <utility>
#include <vector>

#include "core/error.h"
#include "core/files.h"
#include "core/ranges.h"
#include "core/text.h"
#include "executor/data/idx.h"
#include "executor/data/mapped_file.h"
#include "executor/data/tokens.h"
#include "executor/half.h"
#include "executor/initialize.h"

namespace shardwright {
namespace {

// Mean and standard deviation of MNIST's pixels, which every MNIST example normalises with.
constexpr float kMnistMean = 0.1307F;
constexpr float kMnistDeviation = 0.3081F;

class Images : public Dataset {
 public:
  Images(const std::string& file, const std::string& label_file, const DataShape& shape)
      : images_(ReadIdx(file)), labels_(ReadIdx(label_file)) {
    const std::int64_t count = images_.shape.front();
    elements_ = count == 0 ? 0 : static_cast<std::int64_t>(images_.values.size()) / count;
    if (count < 1 || elements_ != shape.features) {
      throw InputError(
          file, std::to_string(count) + " images of " + std::to_string(elements_) + " pixels",
          "at least one image of the " + std::to_string(shape.features) +
              " values that the model takes");
    }
    if (labels_.shape.size() != 1 || labels_.shape.front() != count) {
      throw InputError(label_file, std::to_string(labels_.values.size()) + " labels",
                       "one for each of the " + std::to_string(count) + " images of " + file);
    }
    for (std::size_t i = 0; i < labels_.values.size() && shape.classes > 0; ++i) {
      if (labels_.values[i] >= shape.classes) {
        throw InputError(label_file + ": label " + std::to_string(i),
                         std::to_string(labels_.values[i]),
                         "a class below the model's " + std::to_string(shape.classes));
      }
    }
  }

  [[nodiscard]] std::int64_t size() const override { return images_.shape.front(); }

  void Write(std::int64_t sample, InputKind kind, const View& out) const override {
    SW_CHECK(sample >= 0 && sample < size(), std::to_string(sample));
    if (kind == InputKind::kLabels) {
      SW_CHECK(out.elements == 1 && out.dtype == DType::kInt64, "one label per image");
      *static_cast<std::int64_t*>(out.data) = labels_.values[static_cast<std::size_t>(sample)];
      return;
    }
    SW_CHECK(kind == InputKind::kFeatures && out.elements == elements_, "images only");
    const std::uint8_t* pixels = images_.values.data() + sample * elements_;
    for (std::int64_t i = 0; i < elements_; ++i) {
      // torchvision's ToTensor and Normalize, in their order.
      const float value = (static_cast<float>(pixels[i]) / 255.0F - kMnistMean) / kMnistDeviation;
      StoreFloat(out.dtype, out.data, i, value);
    }
  }

  [[nodiscard]] std::uint32_t Checksum() const override {
    return ContentChecksum(std::as_bytes(std::span(labels_.values)),
                           ContentChecksum(std::as_bytes(std::span(images_.values)), 0));
  }

 private:
  IdxArray images_;
  IdxArray labels_;
  std::int64_t elements_ = 0;
};

// Standard normal features and uniform ids, each a function of (seed, sample, input, element).
class RandomSamples : public Dataset {
 public:
  RandomSamples(std::int64_t size, const DataShape& shape, std::uint64_t seed)
      : size_(size), shape_(shape), seed_(seed) {}

  [[nodiscard]] std::int64_t size() const override { return size_; }

  void Write(std::int64_t sample, InputKind kind, const View& out) const override {
    const std::uint64_t key = InitKey(seed_, "input " + std::to_string(static_cast<int>(kind)) +
                                                 " sample " + std::to_string(sample));
    if (kind == InputKind::kFeatures) {
      FillParameter({InitRule::Kind::kNormal, 0.0, 1.0}, key, 0, out.elements, out.dtype, out.data);
      return;
    }
    auto* ids = static_cast<std::int64_t*>(out.data);
    const std::int64_t limit = kind == InputKind::kLabels ? shape_.classes : shape_.vocabulary;
    for (std::int64_t i = 0; i < out.elements; ++i) {
      if (kind == InputKind::kPositions) {
        ids[i] = i;
      } else if (kind == InputKind::kTokenTypes) {
        ids[i] = 0;
      } else {
        const std::uint64_t word = Philox(key, static_cast<std::uint64_t>(i), 0).word[0];
        ids[i] = static_cast<std::int64_t>(word * static_cast<std::uint64_t>(limit) >> 32);
      }
    }
  }

  [[nodiscard]] std::uint32_t Checksum() const override {
    const std::array<std::uint64_t, 2> words = {static_cast<std::uint64_t>(size_), seed_};
    return ContentChecksum(std::as_bytes(std::span(words)), 0);
  }

 private:
  std::int64_t size_;
  DataShape shape_;
  std::uint64_t seed_;
};

// Some data sets one after the other.
class Joined : public Dataset {
 public:
  explicit Joined(std::vector<std::unique_ptr<Dataset>> parts) : parts_(std::move(parts)) {
    std::int64_t end = 0;
    for (const std::unique_ptr<Dataset>& part : parts_) {
      end += part->size();
      ends_.push_back(end);
    }
  }

  [[nodiscard]] std::int64_t size() const override { return ends_.back(); }

  void Write(std::int64_t sample, InputKind kind, const View& out) const override {
    const auto part = std::upper_bound(ends_.begin(), ends_.end(), sample);
    SW_CHECK(sample >= 0 && part != ends_.end(), std::to_string(sample));
    const std::int64_t first = part == ends_.begin() ? 0 : *std::prev(part);
    parts_[static_cast<std::size_t>(part - ends_.begin())]->Write(sample - first, kind, out);
  }

  [[nodiscard]] std::uint32_t Checksum() const override {
    std::vector<std::uint32_t> of_parts;
    for (const std::unique_ptr<Dataset>& part : parts_) {
      of_parts.push_back(part->Checksum());
    }
    return ContentChecksum(std::as_bytes(std::span(of_parts)), 0);
  }

 private:
  std::vector<std::unique_ptr<Dataset>> parts_;
  std::vector<std::int64_t> ends_;  // the sample behind each part's last
};

std::string LabelFile(const std::string& file) {
  static constexpr std::string_view kImages = "images-idx3";
  const std::size_t at = file.rfind(kImages);
  if (at == std::string::npos) {
    throw InputError(file, "an image file with this name",
                     "\"images-idx3\" in the name, so that the labels are found beside it");
  }
  return std::string(file).replace(at, kImages.size(), "labels-idx1");
}

std::int64_t RandomCount(std::string_view spec) {
  constexpr std::int64_t kDefault = 65536;
  if (spec == "random") {
    return kDefault;
  }
  const std::int64_t count = IntegerIn(spec.substr(7)).value_or(0);
  if (count < 1 || count > std::int64_t{1} << 40) {
    throw InputError("data", Quoted(spec), "random:N with N from 1 to 2^40");
  }
  return count;
}

}  // namespace

DataShape DataShapeOf(const Model& model) {
  DataShape shape;
  for (const Tensor& tensor : model.tensors) {
    switch (tensor.input) {
      case InputKind::kNone:
      case InputKind::kPositions:
        break;
      case InputKind::kFeatures:
        shape.features = tensor.elements;
        break;
      case InputKind::kTokens:
        shape.tokens = tensor.elements * model.context_ranks;
        break;
      case InputKind::kTokenTypes:
        shape.is_masked = true;  // only BERT has them
        break;
      case InputKind::kDecoderTokens:
        shape.has_decoder = true;
        break;
      case InputKind::kLabels:
        shape.labels = tensor.elements * model.context_ranks;
        break;
    }
  }
  for (const ModelOp& op : model.ops) {
    const OpSpec& spec = model.SpecOf(op);
    if (spec.kind == OpKind::kEmbedding &&
        model.tensors[op.inputs.front().value].input == InputKind::kTokens) {
      shape.vocabulary = spec.vocab * model.tensor_ranks;
    }
    if (spec.kind == OpKind::kNllLoss || spec.kind == OpKind::kCrossEntropy) {
      shape.classes = spec.in * model.tensor_ranks;
    }
  }
  return shape;
}

namespace {

// Files hold one image and its label per sample, or tokens from which the labels follow.
void CheckFilesSuit(const std::string& spec, const Model& model, const DataShape& shape) {
  const auto count = [&](InputKind kind) { return CountOf(model.tensors, kind, &Tensor::input); };
  const auto features = count(InputKind::kFeatures), tokens = count(InputKind::kTokens);
  const bool are_images = features == 1 && tokens == 0 && shape.labels <= 1;
  const bool are_tokens = features == 0 && tokens == 1 && shape.tokens > 0 &&
                          (shape.has_decoder || shape.labels <= shape.tokens);
  if (count(InputKind::kLabels) > 1 || !(are_images || are_tokens)) {
    throw InputError(spec, "data for the inputs of " + model.name,
                     "a model that takes one image and its label, or tokens with at most one label "
                     "each",
                     "other models train on random data");
  }
}

}  // namespace

namespace {

constexpr std::pair<std::string_view, int> kPrefixes[] = {{"text:", 1}, {"u16:", 2}, {"u32:", 4}};

std::string_view PrefixOf(std::string_view spec) {
  for (const auto& [prefix, bytes] : kPrefixes) {
    if (spec.starts_with(prefix)) {
      return prefix;
    }
  }
  return {};
}

// The spec of each file of a folder, with the folder's prefix.
std::vector<std::string> SpecsIn(const std::filesystem::path& folder, const std::string& prefix) {
  std::vector<std::string> files;
  for (const std::filesystem::path& file : EntriesOf(folder, "a folder of files")) {
    if (IsRegularFile(file) && !file.filename().string().starts_with('.')) {
      files.push_back(file.string());
    }
  }
  if (files.empty()) {
    throw InputError(folder.string(), "a folder without a file", "a file, or a folder of files");
  }
  if (AnyOf(files, IsIdx)) {
    std::erase_if(files, [](const std::string& file) {
      return std::filesystem::path(file).filename().string().find("images-idx3") ==
             std::string::npos;
    });
    if (files.empty()) {
      throw InputError(folder.string(), "IDX files without one named *images-idx3*",
                       "images, whose labels lie beside them");
    }
  }
  for (std::string& file : files) {
    file.insert(0, prefix);
  }
  return files;
}

// The first spec of a list: up to the last comma that makes it something that exists, since names
// may have commas, else up to the first.
std::string FirstSpec(const std::string& list, std::size_t at) {
  constexpr std::size_t kLongestName = 255;  // of a file in its folder
  const std::size_t begin = at + PrefixOf(std::string_view(list).substr(at)).size();
  std::size_t last = std::min(list.find(',', at), list.size());
  for (std::size_t end = begin, name = begin; end <= list.size() && end - name <= kLongestName;
       ++end) {
    const char c = end < list.size() ? list[end] : ',';
    if (c != ',' && c != '/') {
      continue;
    }
    const std::string file = list.substr(begin, end - begin);
    if (c == ',' && !file.empty() && Exists(file)) {
      last = end;
    } else if (c == '/' && !file.empty() && !IsFolder(file)) {
      break;
    }
    name = c == '/' ? end + 1 : name;
  }
  return list.substr(at, last - at);
}

// The specs of a list, folders opened.
std::vector<std::string> SplitSpec(const std::string& list) {
  std::vector<std::string> specs;
  for (std::size_t at = 0; at <= list.size();) {
    const std::string one = FirstSpec(list, at);
    const std::string prefix(PrefixOf(one));
    const std::string file = one.substr(prefix.size());
    if (IsFolder(file)) {
      const std::vector<std::string> in_folder = SpecsIn(file, prefix);
      specs.insert(specs.end(), in_folder.begin(), in_folder.end());
    } else {
      specs.push_back(one);
    }
    at += one.size() + 1;
  }
  return specs;
}

bool IsRandom(const std::string& spec) {
  return spec == "random" || spec.starts_with("random:");
}

std::unique_ptr<Dataset> OpenOne(const std::string& spec, const Model& model,
                                 const DataShape& shape, std::uint64_t seed) {
  if (IsRandom(spec)) {
    return std::make_unique<RandomSamples>(RandomCount(spec), shape, seed);
  }
  const bool takes_images = shape.features > 0;
  std::string file = spec;
  int width = spec.ends_with(".bin") ? 2 : 1;
  for (const auto& [prefix, bytes] : kPrefixes) {
    if (spec.starts_with(prefix)) {
      file = spec.substr(prefix.size());
      width = bytes;
    }
  }
  if (IsIdx(file)) {
    if (!takes_images) {
      throw InputError(file, "images", "tokens, which " + model.name + " takes");
    }
    return std::make_unique<Images>(file, LabelFile(file), shape);
  }
  if (takes_images) {
    throw InputError(file, "no IDX file",
                     "images with labels in IDX files, which " + model.name + " takes");
  }
  return OpenTokens(file, width, shape, seed);
}

}  // namespace

std::unique_ptr<Dataset> OpenDataset(const std::string& spec, const Model& model,
                                     std::uint64_t seed) {
  const DataShape shape = DataShapeOf(model);
  std::vector<std::unique_ptr<Dataset>> parts;
  bool are_suiting = false;
  for (const std::string& one : SplitSpec(spec)) {
    if (!IsRandom(one) && !std::exchange(are_suiting, true)) {
      CheckFilesSuit(one, model, shape);
    }
    parts.push_back(OpenOne(one, model, shape, seed));
  }
  return parts.size() == 1 ? std::move(parts.front()) : std::make_unique<Joined>(std::move(parts));
}

}  // namespace shardwright
