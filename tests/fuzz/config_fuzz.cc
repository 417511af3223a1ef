// config.json of Hugging Face, and model.json of ours, which the loader tells apart.

#include "models/loader.h"
#include "tests/fuzz/fuzz.h"

namespace shardwright::fuzz {

void Read(std::string_view bytes) {
  (void)LoadModel(FileWith(bytes, MemoryName() + ".json"));
}

}  // namespace shardwright::fuzz
