#pragma once

#include <array>
#include <cstddef>

namespace shardwright {

// The name of an enumerator, out of the names of all in their order up to `kLast`, the last one.
// One that is put in before it without a name does not compile.
template <auto kLast, class... Names>
[[nodiscard]] const char* NameAt(decltype(kLast) value, Names... names) {
  static_assert(sizeof...(names) == static_cast<std::size_t>(kLast) + 1, "a name for each");
  const std::array<const char*, sizeof...(names)> all = {names...};
  const auto place = static_cast<std::size_t>(value);
  return place < all.size() ? all[place] : "?";
}

}  // namespace shardwright
