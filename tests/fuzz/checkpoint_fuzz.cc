// Folders of checkpoints: up to three tensors in up to three files, checksums right, stretches,
// offsets, sizes and names right or off. What opens is checked and read to the last element.

#include <cstdio>
#include <vector>

#include "executor/checkpoint/checkpoint.h"
#include "executor/checkpoint/output_file.h"
#include "executor/checkpoint/save.h"
#include "tests/fuzz/choices.h"

namespace shardwright::fuzz {
namespace {

constexpr std::int64_t kWidth = 4;  // of F32
constexpr int kFiles = 3;

struct WantedTensor {
  std::string name;
  std::int64_t elements;
};

// A file with the next part of each tensor, and its entry of the manifest.
std::string MakeFile(Choices& choices, const std::string& folder, int number, bool is_last,
                     const std::vector<WantedTensor>& tensors, std::vector<std::int64_t>& done) {
  std::string header = "{", stretches;
  std::int64_t bytes = 0;
  for (std::size_t t = 0; t < tensors.size(); ++t) {
    const std::int64_t rest = tensors[t].elements - done[t];
    const std::int64_t part = is_last ? rest : std::min(rest, choices.Below(20));
    const std::string name = choices.Near(tensors[t].name, {"t0", "t1", "", "t9"});
    const std::int64_t count = choices.Near(part);
    stretches += std::string(stretches.empty() ? "" : ",") + R"({"tensor":")" + name +
                 R"(","begin":)" + std::to_string(choices.Near(done[t])) + R"(,"count":)" +
                 std::to_string(choices.Near(count)) + '}';
    const std::int64_t begin = choices.Near(bytes);
    header += std::string(header.size() == 1 ? "" : ",") +
              SafetensorsEntryText(name, choices.Near("F32", {"BF16", "I64", "U8"}),
                                   std::to_string(count), begin, begin + count * kWidth);
    bytes += count * kWidth;
    done[t] += part;
  }
  header += '}';
  constexpr std::int64_t kMost = 1 << 16;
  const std::int64_t size = std::clamp<std::int64_t>(choices.Near(bytes), 0, kMost);
  std::string content =
      SafetensorsBegin(header, choices.Near(static_cast<std::int64_t>(header.size())));
  content.append(static_cast<std::size_t>(size), '\x3f');
  const std::string file = "rank-0000" + std::to_string(number) + ".safetensors";
  Put(folder + "/" + file, content);
  const std::uint32_t crc = Crc32(0, content.data(), std::ssize(content));
  return R"({"name":")" +
         choices.Near(file, {"rank-00000.safetensors", "manifest.json", ".", "x"}) +
         R"(","size_bytes":)" + std::to_string(choices.Near(std::ssize(content))) +
         R"(,"crc32":")" + ChecksumText(crc) + R"(","stretches":[)" + stretches + "]}";
}

std::string MakeManifest(Choices& choices, const std::string& folder) {
  std::vector<WantedTensor> tensors;
  std::string list;
  for (std::int64_t t = 0; t <= choices.Below(3); ++t) {
    tensors.push_back({"t" + std::to_string(t), choices.Below(60)});
    list += std::string(list.empty() ? "" : ",") + R"({"name":")" + tensors.back().name +
            R"(","kind":")" + choices.Near("parameter", {"buffer", "state"}) + R"(","dtype":")" +
            choices.Near("F32", {"BF16", "F64"}) + R"(","shape":[)" +
            std::to_string(choices.Near(tensors.back().elements)) + "]}";
  }
  std::vector<std::int64_t> done(tensors.size());
  std::string files;
  const auto count = static_cast<int>(1 + choices.Below(kFiles));
  for (int number = 0; number < count; ++number) {
    files += (number == 0 ? "" : ",") +
             MakeFile(choices, folder, number, number + 1 == count, tensors, done);
  }
  return R"({"format":"shardwright-checkpoint","version":1,"model":"m","dialect":"ddp",)"
         R"("shard_size":1,"replicate_size":1,"optimizer":"adamw","step":1,"update":1,)"
         R"("loss_scaler":{"scale":1,"good_steps":0},"sampler":{"dataset_size":1,)"
         R"("global_batch":1,"seed":1,"shuffle":true,"tail":"drop"},"tensors":[)" +
         list + R"(],"aliases":[],"files":[)" + files + "]";
}

}  // namespace

void Read(std::string_view bytes) {
  static const std::string folder = FolderInMemory("step-00000001");
  Choices choices(bytes);
  std::string text = MakeManifest(choices, folder);
  const std::uint32_t crc = Crc32(0, text.data(), std::ssize(text));
  text += ",\n \"manifest_crc32\": \"" + ChecksumText(crc) + "\"\n}\n";
  Put(folder + "/manifest.json", text);
  const Checkpoint checkpoint(FindLatestCheckpoint(folder));
  try {
    checkpoint.Verify();
  } catch (const InputError&) {
  }
  for (const SavedTensor& tensor : checkpoint.manifest().tensors) {
    std::vector<std::byte> out(static_cast<std::size_t>(tensor.Elements() * SizeOf(tensor.dtype)));
    checkpoint.Read(tensor.name, 0, tensor.Elements(), tensor.dtype, out.data());
    for (std::int64_t begin = 0; begin < tensor.Elements(); ++begin) {
      checkpoint.Read(tensor.name, begin, 1, tensor.dtype, out.data());
    }
  }
}

}  // namespace shardwright::fuzz
