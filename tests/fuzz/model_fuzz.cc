// model.json; the corpus makes the difference to config_fuzz.cc.

#include "models/loader.h"
#include "tests/fuzz/fuzz.h"

namespace shardwright::fuzz {

void Read(std::string_view bytes) {
  (void)LoadModel(FileWith(bytes, MemoryName() + ".json"));
}

}  // namespace shardwright::fuzz
