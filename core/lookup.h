#pragma once

// Tables of pairs in place of long switches: {{kSend, "send"}, {kReceive, "recv"}}.

#include <utility>

#include "core/ranges.h"

namespace shardwright {

// What the row of `key` says; `other` if the table has no such row.
template <class Table, class Key, class Value>
[[nodiscard]] Value ValueOf(const Table& table, const Key& key, Value other) {
  const auto row = FindIn(table, key, [](const auto& entry) { return entry.first; });
  return row == std::end(table) ? other : row->second;
}

}  // namespace shardwright
