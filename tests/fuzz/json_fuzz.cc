// Every JSON document; checkpoints' indices and manifests are of this syntax.

#include "core/json.h"
#include "tests/fuzz/fuzz.h"

namespace shardwright::fuzz {

void Read(std::string_view bytes) {
  (void)JsonValue::Parse(bytes, "fuzz");
}

}  // namespace shardwright::fuzz
