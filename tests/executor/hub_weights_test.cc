// Files by hand of weights that others have trained.

#include "executor/checkpoint/hub_weights.h"

#include <array>
#include <cstdint>
#include <cstring>
#include <string>
#include <vector>

#include <doctest/doctest.h>

#include "core/error.h"
#include "core/json.h"
#include "models/loader.h"
#include "tests/executor/scratch_folder.h"

namespace shardwright {
namespace {

using testing::ScratchFolder;

constexpr const char* kEmbed = "embed.weight";
constexpr const char* kHead = "head.weight";

// An embedding of three rows of two, whose matrix the layer behind it has, too.
Model TiedNet() {
  const char* text = R"({
    "format": "shardwright-model", "version": 1, "class": "Net", "sequence_length": 1,
    "inputs": {"id": {"ids": 1}, "label": {"ids": 1}},
    "modules": [
      {"name": "embed", "class": "Embedding", "params": [{"name": "weight", "shape": [3, 2]}]},
      {"name": "head", "class": "Linear",
       "params": [{"name": "weight", "tied_to": "embed.weight"}]}],
    "ops": [
      {"op": "embedding", "module": "embed", "inputs": ["id"], "output": "x"},
      {"op": "linear", "module": "head", "inputs": ["x"], "output": "y"},
      {"op": "cross_entropy", "inputs": ["y", "label"], "output": "loss"}]})";
  return ModelFromJson(JsonValue::Parse(text, "net.json"), "net");
}

// A safetensors file: eight bytes of length, JSON, elements. Tensor i is [3, 2] and full of i + 1.
std::string FileOf(const std::vector<std::string>& names, const std::string& metadata) {
  std::string header = R"({"__metadata__":{)" + metadata + "}";
  std::string data;
  for (std::size_t i = 0; i < names.size(); ++i) {
    header += ",\"" + names[i] + R"(":{"dtype":"F32","shape":[3,2],"data_offsets":[)" +
              std::to_string(24 * i) + "," + std::to_string(24 * (i + 1)) + "]}";
    std::array<float, 6> elements{};
    elements.fill(static_cast<float>(i + 1));
    data.append(reinterpret_cast<const char*>(elements.data()), sizeof elements);
  }
  header += "}";
  const std::uint64_t length = header.size();
  std::string file(sizeof length, '\0');
  std::memcpy(file.data(), &length, sizeof length);
  return file + header + data;
}

std::string ErrorOf(const std::string& path, const Model& model) {
  try {
    const HubWeights weights(path, model);
  } catch (const InputError& error) {
    return error.what();
  }
  return "no error";
}

// Transformers leaves out one of two names of a parameter, and not always the second one.
TEST_CASE("a weight that two modules share is found under either name") {
  const ScratchFolder folder;
  const Model model = TiedNet();
  for (const auto& names :
       std::vector<std::vector<std::string>>{{kEmbed}, {kHead}, {kEmbed, kHead}}) {
    CAPTURE(names.front());
    const HubWeights weights(folder.Write("w.safetensors", FileOf(names, "")), model);
    std::array<float, 6> found{};
    REQUIRE(weights.Read(kEmbed, 0, 6, DType::kFp32, found.data()));
    CHECK(found == std::array<float, 6>{1, 1, 1, 1, 1, 1});
    CHECK(weights.unused().empty());
    CHECK_FALSE(weights.optimizer().has_value());
  }
}

TEST_CASE("the metadata of weights says whose states come with them") {
  const ScratchFolder folder;
  const Model model = TiedNet();
  const auto with = [&](const std::string& kind, const std::string& updates) {
    return folder.Write("w.safetensors",
                        FileOf({kEmbed}, R"("shardwright.optimizer":")" + kind +
                                             R"(","shardwright.updates":")" + updates + "\""));
  };
  {
    const HubWeights weights(with("adamw", "1234"), model);
    CHECK(weights.optimizer() == OptimizerKind::kAdamW);
    CHECK(weights.updates() == 1234);
  }
  const std::string file = folder.File("w.safetensors");
  CHECK(ErrorOf(with("adamv", "1"), model) ==
        file +
            ": metadata shardwright.optimizer: got \"adamv\", expected the name of an "
            "optimizer, such as \"adamw\"");
  for (const char* updates : {"", "-1", "12 ", "1125899906842625"}) {  // 2^50 + 1
    CHECK(ErrorOf(with("adamw", updates), model) ==
          file + ": metadata shardwright.updates: got \"" + updates +
              "\", expected the number of updates that were done");
  }
}

}  // namespace
}  // namespace shardwright
