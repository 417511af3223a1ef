#pragma once

#include <string>
#include <string_view>

namespace shardwright {

// What `--help --json` prints: the tables of all commands, or of the one of that name. docs/cli.md
// names the keys.
[[nodiscard]] std::string HelpJson(std::string_view command);

}  // namespace shardwright
