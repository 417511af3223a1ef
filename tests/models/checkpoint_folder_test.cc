#include "models/checkpoint_folder.h"

#include <cstdint>
#include <random>
#include <string>
#include <vector>

#include <doctest/doctest.h>

#include "core/error.h"
#include "models/loader.h"
#include "tests/executor/scratch_folder.h"

namespace shardwright {
namespace {

using testing::ScratchFolder;

// Two linear layers, the second with the first one's weight.
constexpr const char* kConfig =
    R"({"format":"shardwright-model","version":1,"class":"Net","inputs":{"x":{"shape":[4]}},)"
    R"("modules":[{"name":"a","class":"Linear","params":[{"name":"weight","shape":[4,4]},)"
    R"({"name":"bias","shape":[4]}]},)"
    R"({"name":"b","class":"Linear","params":[{"name":"weight","tied_to":"a.weight"}]}],)"
    R"("ops":[{"op":"linear","module":"a","inputs":["x"],"output":"y"},)"
    R"({"op":"linear","module":"b","inputs":["y"],"output":"z"}]})";

std::string Shard(const std::string& header, std::size_t data) {
  std::string text;
  for (std::size_t i = 0; i < 8; ++i) {
    text += static_cast<char>(header.size() >> (8 * i));
  }
  return text + header + std::string(data, 'x');
}

std::string Tensor(const std::string& name, const std::string& shape, int begin, int end) {
  return '"' + name + R"(":{"dtype":"F32","shape":)" + shape + R"(,"data_offsets":[)" +
         std::to_string(begin) + "," + std::to_string(end) + "]}";
}

const std::string kGood =
    "{" + Tensor("a.weight", "[4,4]", 0, 64) + "," + Tensor("a.bias", "[4]", 64, 80) + "}";

Model Net() {
  return ModelFromJson(JsonValue::Parse(kConfig, "model.json"), "net");
}

std::string ErrorOf(const ScratchFolder& folder) {
  try {
    (void)ReadCheckpoint(folder.path());
  } catch (const InputError& error) {
    const std::string text = error.what();
    return text.substr(text.rfind('/') + 1);
  }
  return "no error";
}

using Lines = std::vector<std::string>;

TEST_CASE("a checkpoint of one file is compared by name and shape") {
  const ScratchFolder folder;
  CHECK_FALSE(HoldsCheckpoint(folder.path()));
  folder.Write("model.safetensors", Shard(kGood, 80));
  REQUIRE(HoldsCheckpoint(folder.path()));
  const HubCheckpoint checkpoint = ReadCheckpoint(folder.path());
  CHECK(Describe(checkpoint) == "2 tensors in 1 file: F32 2");
  CHECK(CheckpointDifferences(Net(), checkpoint).empty());
  // A header alone says as much.
  folder.Write("model.safetensors", Shard(kGood, 0));
  CHECK(CheckpointDifferences(Net(), ReadCheckpoint(folder.path())).empty());
  folder.Write("model.safetensors", Shard("{" + Tensor("a.weight", "[2,8]", 0, 64) + "," +
                                              Tensor("c.weight", "[1]", 64, 68) + "," +
                                              Tensor("h.0.attn.bias", "[1]", 68, 72) + "}",
                                          72));
  CHECK(CheckpointDifferences(Net(), ReadCheckpoint(folder.path())) ==
        Lines{"a.bias: not in the checkpoint",
              "a.weight: [2, 8] in the checkpoint, [4, 4] in the model",
              "c.weight: only in the checkpoint"});
}

TEST_CASE("prefixes of base models and old names of norms are understood") {
  const ScratchFolder folder;
  folder.Write("model.safetensors", Shard("{" + Tensor("transformer.a.weight", "[4,4]", 0, 64) +
                                              "," + Tensor("model.a.bias", "[4]", 64, 80) + "}",
                                          80));
  CHECK(CheckpointDifferences(Net(), ReadCheckpoint(folder.path())).empty());
  Model model = Net();
  model.params[0].fqn = "transformer.LayerNorm.weight";
  folder.Write("model.safetensors", Shard("{" + Tensor("LayerNorm.gamma", "[4,4]", 0, 64) + "," +
                                              Tensor("a.bias", "[4]", 64, 80) + "}",
                                          80));
  CHECK(CheckpointDifferences(model, ReadCheckpoint(folder.path())).empty());
}

TEST_CASE("shards: the index decides, absent ones are named") {
  const ScratchFolder folder;
  folder.Write("model.safetensors.index.json",
               R"({"metadata":{"total_size":80},"weight_map":{"a.weight":"1.safetensors",)"
               R"("a.bias":"2.safetensors"}})");
  folder.Write("1.safetensors", Shard("{" + Tensor("a.weight", "[4,4]", 0, 64) + "}", 64));
  const HubCheckpoint partial = ReadCheckpoint(folder.path());
  CHECK(partial.absent_files == Lines{"2.safetensors"});
  CHECK(CheckpointDifferences(Net(), partial) ==
        Lines{"2.safetensors: not in the folder, so only the names of its tensors were compared"});
  folder.Write("2.safetensors", Shard("{" + Tensor("a.bias", "[4]", 0, 16) + "}", 16));
  CHECK(CheckpointDifferences(Net(), ReadCheckpoint(folder.path())).empty());
  folder.Write("2.safetensors", Shard("{" + Tensor("bias", "[4]", 0, 16) + "}", 16));
  CHECK(ErrorOf(folder) ==
        "model.safetensors.index.json: weight_map.a.bias: got \"2.safetensors\", expected a file "
        "that "
        "holds this tensor");
  folder.Write("model.safetensors.index.json", R"({"weight_map":{"a.weight":"../../etc/passwd"}})");
  CHECK(ErrorOf(folder).find("the name of a file in the same folder") != std::string::npos);
}

TEST_CASE("damaged headers get one clear line") {
  const ScratchFolder folder;
  const auto error = [&](const std::string& content) {
    folder.Write("model.safetensors", content);
    return ErrorOf(folder);
  };
  CHECK(error(Shard(kGood, 80)) == "no error");
  CHECK(error("1234567") ==
        "model.safetensors: got 7 bytes, expected a safetensors file, which has at least 8");
  CHECK(error(std::string("\x00\xe4\x0b\x54\x02\x00\x00\x00{}", 10)) ==
        "model.safetensors: got a header of 10000000000 bytes, expected at most 100000000");
  const auto size = std::to_string(8 + kGood.size());
  CHECK(error(Shard(kGood, 79)) == "model.safetensors: got " + std::to_string(87 + kGood.size()) +
                                       " bytes, expected " + std::to_string(88 + kGood.size()) +
                                       ", as its header says, or " + size + " for a header alone");
  CHECK(error(Shard(R"({"a":{"dtype":"F33","shape":[1],"data_offsets":[0,4]}})", 4)) ==
        "model.safetensors: a.dtype: got \"F33\", expected a dtype of safetensors, such as BF16 or "
        "F32");
  CHECK(error(Shard(R"({"a":{"dtype":"F4","shape":[6],"data_offsets":[0,3]}})", 3)) == "no error");
  CHECK(
      error(Shard(R"({"a":{"dtype":"F32","shape":[2],"data_offsets":[0,4]}})", 4)) ==
      "model.safetensors: a.data_offsets: got [0,4], expected offsets 8 apart, as dtype and shape "
      "need");
}

TEST_CASE("random damage of headers and indexes never does worse than an error") {
  const ScratchFolder folder;
  std::mt19937 random(11);
  const std::string index =
      R"({"metadata":{"total_size":80},"weight_map":{"a.weight":"1.safetensors"}})";
  const std::string shard = Shard("{" + Tensor("a.weight", "[4,4]", 0, 64) + "}", 64);
  int read = 0;
  for (int i = 0; i < 600; ++i) {
    std::string texts[2] = {index, shard};
    std::string& text = texts[i % 2];
    for (int flips = 0; flips < 1 + i % 3; ++flips) {
      text[random() % text.size()] = static_cast<char>(random());
    }
    if (i % 7 == 0) {
      text.resize(random() % text.size());
    }
    folder.Write("model.safetensors.index.json", texts[0]);
    folder.Write("1.safetensors", texts[1]);
    try {
      (void)CheckpointDifferences(Net(), ReadCheckpoint(folder.path()));
      ++read;
    } catch (const InputError&) {
    }
  }
  CHECK(read > 50);  // damage inside the weights goes unnoticed
  CHECK(read < 550);
}

TEST_CASE("LoadModel takes the folder, warns of differences, and needs config.json") {
  const ScratchFolder folder;
  folder.Write("model.safetensors", Shard(kGood, 80));
  CHECK_THROWS_WITH_AS(
      (void)LoadModel(folder.path()),
      (folder.path() + ": got a folder without config.json, expected the configuration "
                       "beside the weights, whose files do not name the model's class")
          .c_str(),
      InputError);
  folder.Write("config.json", kConfig);
  CHECK(LoadModel(folder.path()).warnings.empty());
  CHECK(ModelFile(folder.path() + "/model.safetensors") == folder.path() + "/config.json");
  folder.Write("model.safetensors", Shard("{" + Tensor("a.weight", "[4,4]", 0, 64) + "}", 64));
  const Model model = LoadModel(folder.path() + "/model.safetensors");
  CHECK(model.warnings == Lines{folder.path() + ": a.bias: not in the checkpoint"});
}

}  // namespace
}  // namespace shardwright
