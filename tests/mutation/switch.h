#pragma once

// Which mutant runs (SW_MUTANT), and which were reached (SW_MUTANT_TRACE names the file, a byte for
// each).

#include <cstdlib>
#include <string>
#include <type_traits>

#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

namespace sw_mutant {

inline constexpr int kMost = 8192;

inline int ReadChosen() {
  const char* text = std::getenv("SW_MUTANT");
  return text == nullptr ? 0 : std::atoi(text);
}

// Shared with the processes that a test starts.
inline unsigned char* OpenReached() {
  const char* name = std::getenv("SW_MUTANT_TRACE");
  if (name == nullptr) {
    return nullptr;
  }
  const int file = ::open((std::string(name) + ".bytes").c_str(), O_RDWR | O_CREAT, 0600);
  if (file < 0 || ::ftruncate(file, kMost) != 0) {
    std::abort();
  }
  void* bytes = ::mmap(nullptr, kMost, PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
  ::close(file);
  return static_cast<unsigned char*>(bytes);
}

inline const int kChosen = ReadChosen();
inline unsigned char* const kReached = OpenReached();

inline bool Is(int mutant) {
  if (kReached != nullptr) [[unlikely]] {
    kReached[mutant] = 1;
  }
  return mutant == kChosen;
}

// What a function returns instead: the contrary, one more, or an empty one.
template <class T>
auto Other(T&& value) {
  using Value = std::decay_t<T>;
  if constexpr (std::is_same_v<Value, bool>) {
    return !value;
  } else if constexpr (std::is_arithmetic_v<Value>) {
    return static_cast<Value>(value + 1);
  } else if constexpr (requires(Value v) { requires std::is_arithmetic_v<decltype(v.value)>; }) {
    Value result(value);
    ++result.value;
    return result;
  } else {
    static_assert(std::is_default_constructible_v<Value> && !std::is_enum_v<Value>);
    return Value{};
  }
}

}  // namespace sw_mutant
