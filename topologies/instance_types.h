#pragma once

// What clouds call the nodes that they let.

#include <span>
#include <string_view>

namespace shardwright {

struct InstanceType {
  std::string_view name;  // in lower case, as the cloud's console prints it otherwise
  std::string_view node;  // a name of the cluster catalog, or a description of one node
};
// From the clouds' pages and general knowledge. A name that is the begin of another one follows it.
[[nodiscard]] std::span<const InstanceType> InstanceTypes();

}  // namespace shardwright
