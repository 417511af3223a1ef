// What libFuzzer calls, of every target.

#include <cstddef>
#include <cstdint>

#include "core/error.h"
#include "tests/fuzz/fuzz.h"

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size);

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  try {
    shardwright::fuzz::Read({reinterpret_cast<const char*>(data), size});
  } catch (const shardwright::InputError&) {
  }
  return 0;
}
