#include <string>
#include <vector>

#include <nlohmann/json.hpp>

#include "cli/command.h"
#include "cli/configuration.h"
#include "cli/table.h"

namespace shardwright {
namespace {

using Json = nlohmann::ordered_json;
using enum Table::Align;

}  // namespace

int ConfigCommand(const Arguments& arguments) {
  const std::vector<ConfiguredFlag> flags = ReadConfiguration();
  if (arguments.IsJson()) {
    Json json = ReportHead("shardwright-config");
    json["files"] = ConfigurationFiles();
    json["flags"] = Json::array();
    for (const ConfiguredFlag& flag : flags) {
      json["flags"].push_back({{"command", flag.command},
                               {"flag", flag.flag},
                               {"value", flag.value},
                               {"origin", flag.origin},
                               {"used", flag.is_used}});
    }
    arguments.Print(json.dump(2) + "\n");
    return kExitOk;
  }
  Table table({kLeft, kLeft, kLeft, kLeft});
  for (const ConfiguredFlag& flag : flags) {
    table.Row({flag.command, flag.flag + " " + flag.value, flag.origin,
               flag.is_used ? "" : "not used, since the line before it is stronger"});
  }
  std::string text = flags.empty() ? "Nothing is configured. Looked at:\n" : table.Text();
  for (const std::string& file : ConfigurationFiles()) {
    text += flags.empty() ? "  " + file + "\n" : "";
  }
  arguments.Print(text);
  return kExitOk;
}

}  // namespace shardwright
