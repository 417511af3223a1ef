#include "cli/configuration.h"

#include <algorithm>
#include <cctype>
#include <cstdlib>
#include <set>
#include <string_view>
#include <utility>

#include <unistd.h>

#include "core/error.h"
#include "core/json.h"

namespace shardwright {
namespace {

std::vector<std::string> FlagsOf(const Command& command) {
  std::vector<std::string> names;
  for (const FlagRow& row : command.flags) {
    names.push_back(LongName(row));
  }
  return names;
}

// "plan", "--kernel-set" -> "SHARDWRIGHT_PLAN_KERNEL_SET".
std::string VariableOf(const Command& command, const std::string& flag) {
  std::string name = "SHARDWRIGHT_" + std::string(command.name) + "_" + flag.substr(2);
  std::transform(name.begin(), name.end(), name.begin(), [](char c) {
    return c == '-' ? '_' : static_cast<char>(std::toupper(static_cast<unsigned char>(c)));
  });
  return name;
}

const Command& CommandOf(const JsonValue& json, const std::string& name) {
  std::vector<std::string> names;
  for (const Command* command : AllCommands()) {
    if (command->name == name) {
      return *command;
    }
    names.emplace_back(command->name);
  }
  throw InputError(json.path().str(), "\"" + name + "\"", "a command of shardwright",
                   DidYouMean(name, names));
}

// {"plan": {"cluster": "dgx-h100"}}: flags without their dashes, values as on the command line.
void ReadFile(const std::string& file, std::vector<ConfiguredFlag>& found) {
  if (::access(file.c_str(), F_OK) != 0) {
    return;
  }
  const JsonValue json = JsonValue::ReadFile(file);
  for (const std::string& name : json.Keys()) {
    const Command& command = CommandOf(json, name);
    const std::vector<std::string> flags = FlagsOf(command);
    const JsonValue values = json.At(name);
    for (const std::string& key : values.Keys()) {
      const std::string flag = "--" + key;
      if (std::find(flags.begin(), flags.end(), flag) == flags.end()) {
        throw InputError(values.path().str(), "\"" + key + "\"",
                         "a flag of shardwright " + name + " without its dashes",
                         DidYouMean(flag, flags));
      }
      const JsonValue value = values.At(key);
      found.push_back({name, flag, value.IsNumber() ? value.Shown() : value.AsString(), file});
    }
  }
}

void ReadEnvironment(std::vector<ConfiguredFlag>& found) {
  for (const Command* command : AllCommands()) {
    for (const std::string& flag : FlagsOf(*command)) {
      const std::string variable = VariableOf(*command, flag);
      const char* value = std::getenv(variable.c_str());
      if (value != nullptr && *value != '\0') {
        found.push_back({command->name, flag, value, "environment variable " + variable});
      }
    }
  }
}

}  // namespace

std::vector<std::string> ConfigurationFiles() {
  std::vector<std::string> files = {"shardwright.json"};
  const char* folder = std::getenv("XDG_CONFIG_HOME");
  const char* home = std::getenv("HOME");
  if (folder != nullptr && *folder != '\0') {
    files.push_back(std::string(folder) + "/shardwright/config.json");
  } else if (home != nullptr && *home != '\0') {
    files.push_back(std::string(home) + "/.config/shardwright/config.json");
  }
  return files;
}

std::vector<ConfiguredFlag> ReadConfiguration() {
  std::vector<ConfiguredFlag> found;
  ReadEnvironment(found);
  for (const std::string& file : ConfigurationFiles()) {
    ReadFile(file, found);
  }
  std::stable_sort(found.begin(), found.end(), [](const auto& a, const auto& b) {
    return std::pair(a.command, a.flag) < std::pair(b.command, b.flag);
  });
  std::set<std::pair<std::string, std::string>> seen;
  for (ConfiguredFlag& flag : found) {
    flag.is_used = seen.insert({flag.command, flag.flag}).second;
  }
  return found;
}

void ApplyConfiguration(const Command& command, Arguments& arguments) {
  for (const ConfiguredFlag& flag : ReadConfiguration()) {
    if (flag.command == command.name && flag.is_used && !arguments.Get(flag.flag).is_given()) {
      arguments.text[flag.flag] = flag.value;
    }
  }
}

}  // namespace shardwright
