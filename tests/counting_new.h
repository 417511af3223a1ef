#pragma once

// Replaces operator new of the whole program by one that counts: for the one source file of a test
// or a bench that shows that a loop allocates nothing.

#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <new>

namespace {

std::int64_t host_allocation_count = 0;

}  // namespace

// Not inlined, so that the compiler does not see malloc on one side and operator delete on the
// other.
[[gnu::noinline]] void* operator new(std::size_t size) {
  ++host_allocation_count;
  if (void* p = std::malloc(size)) {
    return p;
  }
  throw std::bad_alloc();
}
[[gnu::noinline]] void operator delete(void* p) noexcept {
  std::free(p);
}
[[gnu::noinline]] void operator delete(void* p, std::size_t) noexcept {
  std::free(p);
}
