// Folders of a hub: a file of weights, or an index and up to three parts, of a small model. What
// opens is read to the last element.

#include <set>
#include <vector>

#include "executor/checkpoint/hub_weights.h"
#include "models/checkpoint_folder.h"
#include "models/loader.h"
#include "tests/fuzz/choices.h"

namespace shardwright::fuzz {
namespace {

constexpr std::int64_t kWidth = 4;  // of F32

const Model& SmallModel() {
  static const Model model = ModelFromJson(JsonValue::Parse(R"({
    "format": "shardwright-model", "version": 1, "class": "Net",
    "inputs": {"image": {"shape": [3, 6, 6]}, "label": {"ids": 1}},
    "modules": [
      {"name": "conv", "class": "Conv2d", "params": [{"name": "weight", "shape": [5, 3, 3, 3]}]},
      {"name": "bn", "class": "BatchNorm2d", "buffers": 11,
       "params": [{"name": "weight", "shape": [5]}, {"name": "bias", "shape": [5]}]},
      {"name": "fc", "class": "Linear",
       "params": [{"name": "weight", "shape": [7, 80]}, {"name": "bias", "shape": [7]}]}],
    "ops": [
      {"op": "conv2d", "module": "conv", "inputs": ["image"], "output": "x1"},
      {"op": "batch_norm", "module": "bn", "inputs": ["x1"], "output": "x2"},
      {"op": "flatten", "inputs": ["x2"], "output": "x3"},
      {"op": "linear", "module": "fc", "inputs": ["x3"], "output": "x4"},
      {"op": "log_softmax", "inputs": ["x4"], "output": "x5"},
      {"op": "nll_loss", "inputs": ["x5", "label"], "output": "loss"}]})",
                                                            "net.json"),
                                           "net");
  return model;
}

struct Part {
  std::string header = "{";
  std::int64_t bytes = 0;
};

void AddTensor(Choices& choices, const Parameter& param, const std::string& name, Part& part) {
  std::int64_t elements = 1;
  std::string shape;
  for (const std::int64_t size : param.shape) {
    const std::int64_t here = choices.Near(size);
    elements = here > 0 && elements < INT32_MAX / here ? elements * here : 0;
    shape += (shape.empty() ? "" : ",") + std::to_string(here);
  }
  const std::int64_t begin = choices.Near(part.bytes);
  part.header += (part.header.size() == 1 ? "" : ",") +
                 SafetensorsEntryText(name, choices.Near("F32", {"BF16", "I64", "BOOL"}), shape,
                                      begin, begin + choices.Near(elements * kWidth));
  part.bytes += elements * kWidth;
}

void PutPart(Choices& choices, const std::string& file, Part& part) {
  if (choices.Byte() > 200) {
    part.header += R"(,"__metadata__":{"shardwright.optimizer":"adamw","shardwright.updates":")" +
                   choices.Near("3", {"-1", "x", "9999999999999999999"}) + "\"}";
  }
  part.header += '}';
  std::string content =
      SafetensorsBegin(part.header, choices.Near(static_cast<std::int64_t>(part.header.size())));
  constexpr std::int64_t kMost = 1 << 16;
  content.append(
      static_cast<std::size_t>(std::clamp<std::int64_t>(choices.Near(part.bytes), 0, kMost)),
      '\x3f');
  Put(file, content);
}

}  // namespace

void Read(std::string_view bytes) {
  static const std::string folder = FolderInMemory("hub");
  for (const char* name : {"model.safetensors", "model.safetensors.index.json"}) {
    (void)::unlink((folder + "/" + name).c_str());
  }
  Choices choices(bytes);
  const bool has_index = choices.Byte() % 4 != 0;
  const auto count = static_cast<std::size_t>(has_index ? 1 + choices.Below(3) : 1);
  std::vector<Part> parts(count);
  std::string index;
  for (const Parameter& param : SmallModel().params) {
    const std::size_t at = choices.Byte() % count;
    const std::string name = choices.Near(param.fqn, {"fc.bias", "model.fc.weight", "", "bn"});
    AddTensor(choices, param, name, parts[at]);
    index += (index.empty() ? "\"" : ",\"") + choices.Near(name, {"fc.bias", "x"}) + R"(":"part)" +
             choices.Near(std::to_string(at), {"9", "/../x", "0", ""}) + '"';
  }
  for (std::size_t i = 0; i < count; ++i) {
    PutPart(choices, folder + "/" + (has_index ? "part" + std::to_string(i) : "model.safetensors"),
            parts[i]);
  }
  if (has_index) {
    Put(folder + "/model.safetensors.index.json", R"({"weight_map":{)" + index + "}}");
  }
  try {
    (void)CheckpointDifferences(SmallModel(), ReadCheckpoint(folder));
  } catch (const InputError&) {
  }
  const HubWeights weights(folder, SmallModel());
  for (const auto& [name, found] : weights.found()) {
    const std::int64_t elements = found.tensor.Elements();
    std::vector<std::byte> out(static_cast<std::size_t>(elements * SizeOf(found.tensor.dtype)));
    SW_CHECK(weights.Read(name, 0, elements, found.tensor.dtype, out.data()), name);
  }
}

}  // namespace shardwright::fuzz
