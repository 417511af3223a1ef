#include "cli/help_json.h"

#include <algorithm>

#include <nlohmann/json.hpp>

#include "cli/budget_flag.h"
#include "cli/command.h"
#include "cli/version.h"

namespace shardwright {
namespace {

using Json = nlohmann::ordered_json;

const char* NameOf(FileRole role) {
  return role == FileRole::kNone ? "none" : role == FileRole::kRead ? "read" : "write";
}

// What ranks of one run must have in common.
const char* NameOf(Ranks ranks) {
  return ranks == Ranks::kSame ? "same" : ranks == Ranks::kGiven ? "given" : "any";
}

Json FlagJson(const FlagRow& row) {
  const std::string name = LongName(row);
  Json json = {{"name", name}};
  if (row.name != name) {
    json["also"] = row.name.substr(name.size() + 1);
  }
  json["value"] = row.value;
  json["help"] = row.help;
  json["file"] = NameOf(row.file);
  json["ranks"] = NameOf(row.ranks);
  return json;
}

Json CommandJson(const Command& command) {
  Json positionals = Json::array(), flags = Json::array(), switches = Json::array();
  for (const PositionalRow& row : command.positionals) {
    positionals.push_back({{"name", row.name},
                           {"help", row.help},
                           {"required", !row.missing.empty()},
                           {"list", row.is_list},
                           {"file", NameOf(row.file)}});
  }
  for (const FlagRow& row : command.flags) {
    flags.push_back(FlagJson(row));
  }
  flags.push_back(FlagJson(kBudgetFlag));
  const auto add_switch = [&](const SwitchRow& row) {
    switches.push_back({{"name", row.name}, {"help", row.help}, {"ranks", NameOf(row.ranks)}});
  };
  std::for_each(command.switches.begin(), command.switches.end(), add_switch);
  add_switch(kJsonSwitch);
  return {{"name", command.name},
          {"about", command.about},
          {"positionals", positionals},
          {"flags", flags},
          {"switches", switches}};
}

}  // namespace

std::string HelpJson(std::string_view command) {
  Json commands = Json::array();
  for (const Command& row : AllCommands()) {
    if (command.empty() || command == row.name) {
      commands.push_back(CommandJson(row));
    }
  }
  const Json json = {{"schema", "shardwright-help"},
                     {"schema_version", 1},
                     {"version", kVersion},
                     {"commands", commands}};
  return json.dump(2) + "\n";
}

}  // namespace shardwright
