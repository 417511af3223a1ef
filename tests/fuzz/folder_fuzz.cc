// shardwright.json of the current folder.

#include <array>
#include <cstdlib>
#include <filesystem>
#include <span>
#include <string>
#include <vector>

#include "cli/configuration.h"
#include "core/json.h"
#include "tests/fuzz/fuzz.h"

namespace shardwright {

// What the program's table would bring is the program.
std::span<const Command> AllCommands() {
  static const std::vector<FlagRow> flags = {
      {"--cluster", "NAME", ""}, {"--seq", "N", ""}, {"--output,-o", "FILE", ""}};
  static const std::array<Command, 2> commands = {
      {{"plan", "", {}, flags, {}}, {"simulate", "", {}, flags, {}}}};
  return commands;
}

std::string LongName(const FlagRow& row) {
  return row.name.substr(0, row.name.find(','));
}

Flag Arguments::Get(const std::string& name) const {
  const auto it = text.find(name);
  return {name, it == text.end() ? std::string() : it->second};
}

namespace fuzz {

void Read(std::string_view bytes) {
  static const std::string folder = [] {
    std::string name = MemoryName();
    std::filesystem::create_directories(name);
    ::setenv("XDG_CONFIG_HOME", name.c_str(), 1);
    return name;
  }();
  (void)FileWith(bytes, folder + "/shardwright.json");
  const std::filesystem::path before = std::filesystem::current_path();
  std::filesystem::current_path(folder);
  try {
    (void)ReadConfiguration();
  } catch (const InputError&) {
  }
  std::filesystem::current_path(before);
}

}  // namespace fuzz
}  // namespace shardwright
