// Models of other people's code: finds a Python with torch and runs tools/export_model.py with it.

#include <array>
#include <cerrno>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <memory>
#include <optional>
#include <system_error>

#include <fcntl.h>
#include <nlohmann/json.hpp>
#include <spawn.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

#include "cli/command.h"
#include "cli/table.h"
#include "core/error.h"
#include "core/json.h"
#include "core/text.h"
#include "core/writable.h"
#include "models/loader.h"

namespace shardwright {
namespace {

namespace fs = std::filesystem;
using Json = nlohmann::ordered_json;
using enum Table::Align;

// Runs Python without what is in the current folder, and waits for it. What it prints goes to
// `out`, and nowhere with -1; nothing is read. Nothing: it could not be started.
std::optional<int> RunPython(const std::string& python, std::vector<std::string> words, int out) {
  words.insert(words.begin(), {python, "-I"});
  std::vector<char*> pointers;
  pointers.reserve(words.size() + 1);
  for (std::string& word : words) {
    pointers.push_back(word.data());
  }
  pointers.push_back(nullptr);
  posix_spawn_file_actions_t actions{};
  ::posix_spawn_file_actions_init(&actions);
  ::posix_spawn_file_actions_addopen(&actions, STDIN_FILENO, "/dev/null", O_RDONLY, 0);
  if (out >= 0) {
    ::posix_spawn_file_actions_adddup2(&actions, out, STDOUT_FILENO);
  } else {
    ::posix_spawn_file_actions_addopen(&actions, STDOUT_FILENO, "/dev/null", O_WRONLY, 0);
    ::posix_spawn_file_actions_addopen(&actions, STDERR_FILENO, "/dev/null", O_WRONLY, 0);
  }
  pid_t child = 0;
  const int problem =
      ::posix_spawnp(&child, pointers[0], &actions, nullptr, pointers.data(), environ);
  ::posix_spawn_file_actions_destroy(&actions);
  if (problem != 0) {
    return std::nullopt;
  }
  int status = 0;
  while (::waitpid(child, &status, 0) < 0 && errno == EINTR) {
  }
  return WIFEXITED(status) ? std::optional(WEXITSTATUS(status)) : std::nullopt;
}

std::string FindPython(const Arguments& arguments, const std::string& tool) {
  std::vector<std::string> candidates;
  const Flag given = arguments.Get("--python");
  if (given.is_given()) {
    candidates = {given.text};
  } else {
    const char* environment = std::getenv("VIRTUAL_ENV");
    if (environment != nullptr && *environment != '\0') {
      candidates.push_back(std::string(environment) + "/bin/python");
    }
    candidates.insert(candidates.end(), {"python3", "python"});
  }
  std::string tried;
  for (const std::string& python : candidates) {
    const std::optional<int> code = RunPython(python, {tool, "--find-torch"}, -1);
    if (code == 0) {
      return python;
    }
    tried += (tried.empty() ? "" : ", ") + python + (code ? " (no torch)" : " (does not start)");
  }
  throw EnvironmentError("no Python with torch: " + tried +
                         "; install it with pip install torch, or name one with --python");
}

// Beside the program as it is installed, or in the source tree that it was built in.
std::string FindTool() {
  std::error_code ignored;
  const fs::path folder = fs::read_symlink("/proc/self/exe", ignored).parent_path();
  const std::array<fs::path, 2> places = {
      folder.parent_path() / "share/shardwright/tools/export_model.py",
      folder.parent_path() / "tools/export_model.py"};
  for (const fs::path& place : places) {
    if (fs::is_regular_file(place, ignored)) {
      return place.string();
    }
  }
  throw EnvironmentError("no " + places[0].string() +
                         ", which is installed with the program; a program alone cannot export");
}

std::vector<std::string> ToolWords(const Arguments& arguments, const std::string& tool) {
  const std::string source = arguments.text.at("SOURCE");
  std::error_code ignored;
  const bool exists = fs::exists(source, ignored);
  const bool is_builder = source.find(':') != std::string::npos && !exists;
  if (!exists && source.ends_with(".json")) {
    throw InputError("export", '"' + source + "\", which is not there",
                     "a config.json, a folder with one, a name of the hub, or "
                     "package.module:function");
  }
  std::vector<std::string> words = {tool};
  if (!is_builder) {
    words.emplace_back("--config");
  }
  words.push_back(source);
  for (const char* name : {"--seq", "--image", "--input", "--dtype", "--task"}) {
    if (const Flag flag = arguments.Get(name); flag.is_given()) {
      words.insert(words.end(), {name, flag.text});
    }
  }
  if (arguments.Has("--trust-remote-code")) {
    words.emplace_back("--trust-remote-code");
  }
  words.insert(words.end(), {"-o", "-"});
  return words;
}

constexpr std::int64_t kMaxPixels = std::int64_t{1} << 14;
constexpr std::array<std::string_view, 3> kDTypes = {"bf16", "fp16", "fp32"};
constexpr std::array<std::string_view, 6> kTasks = {
    "causal-lm", "masked-lm", "seq2seq-lm", "image-classification", "sequence-classification",
    "base"};

void CheckExportFlags(const Arguments& arguments) {
  std::int64_t number = 0;
  arguments.SetCount("--seq", kMaxSequence, number);
  arguments.SetCount("--image", kMaxPixels, number);
  std::size_t choice = 0;
  const auto read = [](NameList names) {
    return [names](const Flag& flag) { return ReadChoice(flag, names); };
  };
  arguments.Set("--dtype", choice, read(kDTypes));
  arguments.Set("--task", choice, read(kTasks));
  if (!arguments.Get("--seq").is_given() && !arguments.Get("--image").is_given() &&
      !arguments.Get("--input").is_given()) {
    throw UsageError("export needs --seq, --image or --input");
  }
}

void ReportExport(const Arguments& arguments, const Model& model, const std::string& file) {
  std::set<std::string> others;
  for (const ModelOp& op : model.ops) {
    if (model.SpecOf(op).kind == OpKind::kOther) {
      others.insert(model.SpecOf(op).other.function);
    }
  }
  if (arguments.IsJson()) {
    const Json json = {{"schema", "shardwright-export"},
                       {"schema_version", 1},
                       {"file", file},
                       {"parameter_count", CountParameters(model)},
                       {"ops", model.ops.size()},
                       {"planned_only", others}};
    arguments.Print(json.dump(2) + "\n");
    return;
  }
  Table table({kLeft, kLeft});
  table.Row({"parameters", WithCommas(CountParameters(model))});
  table.Row({"ops", WithCommas(static_cast<std::int64_t>(model.ops.size()))});
  table.Row({"planned, not run", others.empty() ? "none" : Listed(others)});
  arguments.Print(file + "\n" + table.Text(2));
}

}  // namespace

int ExportCommand(const Arguments& arguments) {
  CheckExportFlags(arguments);
  const Flag output = arguments.Get("--output");
  const std::string file = output.is_given() ? output.text : "model.json";
  const std::string tool = FindTool();
  const std::vector<std::string> words = ToolWords(arguments, tool);
  // The tool prints into memory: a file would need a name, which somebody may have taken.
  const int draft = ::memfd_create("model", MFD_CLOEXEC);
  const std::unique_ptr<FILE, int (*)(FILE*)> closed(::fdopen(draft, "r"), std::fclose);
  if (closed == nullptr) {
    throw EnvironmentError(std::string("no memory for the model: ") + std::strerror(errno));
  }
  const std::optional<int> code = RunPython(FindPython(arguments, tool), words, draft);
  if (code != kExitOk) {
    return code.value_or(kExitEnvironment);
  }
  const std::string text = ReadTextFile("/proc/self/fd/" + std::to_string(draft));
  const Model model = ModelFromJson(JsonValue::Parse(text, file), file);
  if (file == "-") {
    arguments.Print(text);
    return kExitOk;
  }
  if (output.is_given()) {
    WriteFileAtomically(file, text);
  } else {
    WriteFilesAtomically(std::array{OutputFile{file, text, /*is_in_folder=*/true}});
  }
  ReportExport(arguments, model, file);
  return kExitOk;
}

}  // namespace shardwright
