// What libFuzzer calls, of every target.

#include <cstddef>
#include <cstdint>
#include <thread>

#include "core/error.h"
#include "tests/fuzz/fuzz.h"

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size);
extern "C" const char* __asan_default_options();

// Shorter stacks of allocations, and less memory that is kept away from reuse (256 MiB), so that
// more inputs are tried. ASAN_OPTIONS of the environment overrides these.
extern "C" const char* __asan_default_options() {  // NOLINT(bugprone-reserved-identifier)
  return "malloc_context_size=3:quarantine_size_mb=8";
}

// Loops have the thread that calls them, which starts none: an input costs a third, and coverage is
// the same each time. In the place of the library's.
unsigned int std::thread::hardware_concurrency() noexcept {
  return 1;
}

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  try {
    shardwright::fuzz::Read({reinterpret_cast<const char*>(data), size});
  } catch (const shardwright::InputError&) {
  }
  return 0;
}
