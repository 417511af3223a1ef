#include "cli/configuration.h"

#include <algorithm>
#include <cctype>
#include <cstdlib>
#include <set>
#include <string_view>
#include <utility>

#include <sys/stat.h>
#include <unistd.h>

#include "core/error.h"
#include "core/files.h"
#include "core/json.h"
#include "core/printable.h"

namespace shardwright {
namespace {

constexpr const char* kFolderFile = "shardwright.json";

const std::string kPrefix = "SHARDWRIGHT_";

// The flags that choose how something is computed or printed, and do nothing else: none that names
// what is written, deleted, started or connected to, in any command. What is not here is refused.
constexpr std::string_view kChoices =
    " --accumulation --allgather-bucket --allocator --backward-prefetch --bandwidth "
    "--before-deepspeed-0-6"
    " --bounded-memory --bucket --checkpoint-interval --checkpoint-time --clip --cluster"
    " --contention --contiguous-gradients --data --delays --dialect --epochs --fail-above"
    " --find-unused-parameters --first-bucket --forward-prefetch --fqns --frozen --global-batch"
    " --gpus --gradient-reduction --graphs --in-flight --jitter --kernel-set --limit-all-gathers"
    " --lora-alpha --lora-rank --lora-targets --max-live-parameters --max-reuse-distance --mem"
    " --memory-limit --memory-margin --micro-batch --mode --model --mtbf --nodes --objective"
    " --offload --optimizer --overlap-comm --persistence-threshold --precision --prefetch-bucket"
    " --profile --rank-jitter --recompute --reduce --reduce-bucket --reduce-scatter-bucket"
    " --replicate --reshard --restart-time --samples --seed --seq --shard --slow-link"
    " --slow-rank --static-graph --steps --sub-group --sync --test-data --threads --tier --timeout "
    "--to"
    " --token-budget --tokens --trace-profile --training --transfers --use-orig-params"
    " --weight-decay --wrap ";

std::vector<std::string> FlagNamesOf(const Command& command) {
  std::vector<std::string> names;
  for (const FlagRow& row : command.flags) {
    names.push_back(LongName(row));
  }
  return names;
}

// "plan", "--kernel-set" -> "SHARDWRIGHT_PLAN_KERNEL_SET".
std::string VariableOf(const Command& command, const std::string& flag) {
  std::string name = kPrefix + command.name + "_" + flag.substr(2);
  std::transform(name.begin(), name.end(), name.begin(), [](char c) {
    return c == '-' ? '_' : static_cast<char>(std::toupper(static_cast<unsigned char>(c)));
  });
  return name;
}

const Command& CommandOf(const JsonValue& json, const std::string& name) {
  std::vector<std::string> names;
  for (const Command& command : AllCommands()) {
    if (command.name == name) {
      return command;
    }
    names.push_back(command.name);
  }
  throw InputError(json.path().str(), "\"" + name + "\"", "a command of shardwright",
                   DidYouMean(name, names));
}

// Whoever may write the file decides what the program does. A link counts as what it leads to, and
// as itself: the one who made it chose the file.
void CheckOwner(const std::string& file, const struct stat& status) {
  const uid_t owner = status.st_uid;
  if (owner != ::geteuid() && owner != 0) {
    throw InputError(file, "a file of user " + std::to_string(owner),
                     "one of yours (user " + std::to_string(::geteuid()) + ")",
                     "remove it, or copy it if you trust it");
  }
  if (!S_ISLNK(status.st_mode) && (status.st_mode & S_IWOTH) != 0) {
    throw InputError(file, "a file that every user may write", "one that only you may write",
                     "chmod o-w " + file + " if you trust what it says");
  }
}

// Its text, or false where there is no such file. What was checked is what is read.
bool ReadOwnFile(const std::string& file, std::string& text) {
  struct stat status {};
  if (::lstat(file.c_str(), &status) != 0) {
    return false;
  }
  CheckOwner(file, status);
  if (S_ISLNK(status.st_mode) && !Exists(file)) {
    return false;  // a link that leads nowhere
  }
  InputFile in(file);
  (void)::fstat(in.descriptor(), &status);
  CheckOwner(file, status);
  constexpr std::size_t kMost = 1 << 20;
  text.resize(kMost + 1);
  text.resize(in.Read(text.data(), text.size()));
  if (text.size() > kMost) {
    throw InputError(file, "more than 1 MiB", "a few flags");
  }
  return true;
}

// {"plan": {"cluster": "dgx-h100"}}: flags without their dashes, values as on the command line.
void ReadFile(const std::string& file, std::vector<ConfiguredFlag>& found) {
  std::string text;
  if (!ReadOwnFile(file, text)) {
    return;
  }
  const JsonValue json = JsonValue::Parse(text, file);
  for (const std::string& name : json.Keys()) {
    const Command& command = CommandOf(json, name);
    const std::vector<std::string> flags = FlagNamesOf(command);
    const JsonValue values = json.At(name);
    for (const std::string& key : values.Keys()) {
      const std::string flag = "--" + key;
      if (std::find(flags.begin(), flags.end(), flag) == flags.end()) {
        throw InputError(values.path().str(), "\"" + key + "\"",
                         "a flag of shardwright " + name + " without its dashes",
                         DidYouMean(flag, flags));
      }
      if (file == kFolderFile && !IsChoice(flag)) {
        throw InputError(values.path().Field(key).str(), flag,
                         "a flag that only chooses how something is computed or printed",
                         "give it on the command line, or in " + ConfigurationFiles().back());
      }
      const JsonValue value = values.At(key);
      found.push_back({name, flag, value.IsNumber() ? value.Shown() : value.AsString(), file});
    }
  }
}

void ReadEnvironment(std::vector<ConfiguredFlag>& found) {
  bool has_any = false;
  for (char** variable = environ; *variable != nullptr; ++variable) {
    has_any = has_any || std::string_view(*variable).starts_with(kPrefix);
  }
  if (!has_any) {
    return;
  }
  for (const Command& command : AllCommands()) {
    for (const std::string& flag : FlagNamesOf(command)) {
      const std::string variable = VariableOf(command, flag);
      const char* value = std::getenv(variable.c_str());
      if (value != nullptr && *value != '\0') {
        found.push_back({command.name, flag, value, "environment variable " + variable});
      }
    }
  }
}

}  // namespace

bool IsChoice(const std::string& flag) {
  return kChoices.find(' ' + flag + ' ') != std::string_view::npos;
}

std::vector<std::string> ConfigurationFiles() {
  std::vector<std::string> files = {kFolderFile};
  const char* folder = std::getenv("XDG_CONFIG_HOME");
  const char* home = std::getenv("HOME");
  if (folder != nullptr && *folder == '/') {  // the standard ignores others
    files.push_back(std::string(folder) + "/shardwright/config.json");
  } else if (home != nullptr && *home == '/') {
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
  if (command.flags.empty()) {
    return;
  }
  std::string taken;
  for (const ConfiguredFlag& flag : ReadConfiguration()) {
    if (flag.command == command.name && flag.is_used && !arguments.Get(flag.flag).is_given()) {
      arguments.text[flag.flag] = flag.value;
      taken += flag.origin == kFolderFile ? " " + flag.flag + "=" + flag.value : "";
    }
  }
  if (!taken.empty()) {
    Say("from " + std::string(kFolderFile) + ":" + taken);
  }
}

}  // namespace shardwright
