#include "cli/named_files.h"

#include <filesystem>
#include <initializer_list>
#include <sstream>
#include <system_error>

#include "core/files.h"
#include "core/ranges.h"
#include "core/staged_file.h"
#include "core/writable.h"

namespace shardwright {
namespace {

namespace fs = std::filesystem;

bool IsSameFile(const std::string& a, const std::string& b) {
  std::error_code error;
  if (IsRegularFile(a) && IsRegularFile(b)) {
    return fs::equivalent(a, b, error);  // hard links and symbolic ones, too
  }
  // Two outputs that do not exist yet; "-" is standard output.
  const auto resolved = [&](const std::string& path) {
    return fs::weakly_canonical(fs::absolute(path, error), error);
  };
  return a == b || (!Exists(a) && resolved(a) == resolved(b));
}

std::string Shown(const NamedFile& file) {
  return file.name + " " + (file.path == "-" ? "- (standard output)" : "\"" + file.path + "\"");
}

void Remember(const NamedFile& input) {
  std::vector<std::string> words = {input.path};
  std::istringstream list(input.path);  // data of several files
  for (std::string word; std::getline(list, word, ',');) {
    words.push_back(word);
  }
  for (const std::string& word : words) {
    for (const std::string& path : {word, word.substr(word.find(':') + 1), word + "/config.json"}) {
      RememberRead(path, Shown({input.name, word}));
    }
  }
}

// The values with one of `roles`.
std::vector<NamedFile> FilesOf(const Command& command, const Arguments& arguments,
                               std::initializer_list<FileRole> roles) {
  std::vector<NamedFile> files;
  const auto add = [&](FileRole role, const std::string& name, const std::string& path) {
    if (!path.empty() && IsIn(roles, role)) {
      files.push_back({name, path});
    }
  };
  for (const PositionalRow& row : command.positionals) {
    if (row.is_list) {
      for (const std::string& path : arguments.lists.at(row.name)) {
        add(row.file, row.name, path);
      }
    } else {
      add(row.file, row.name, arguments.Get(row.name).text);
    }
  }
  for (const FlagRow& row : command.flags) {
    const std::string name = LongName(row);
    add(row.file, name, arguments.Get(name).text);
  }
  return files;
}

}  // namespace

void RefuseOverwriting(std::span<const NamedFile> outputs) {
  for (std::size_t i = 0; i < outputs.size(); ++i) {
    if (const std::string name = NameOfRead(outputs[i].path); !name.empty()) {
      throw UsageError(Shown(outputs[i]) + " would overwrite " + name);
    }
    for (std::size_t k = 0; k < i; ++k) {
      if (IsSameFile(outputs[k].path, outputs[i].path)) {
        throw UsageError(Shown(outputs[i]) + " would overwrite " + Shown(outputs[k]));
      }
    }
  }
}

void CheckFiles(const Command& command, const Arguments& arguments) {
  for (const NamedFile& input : FilesOf(command, arguments, {FileRole::kRead})) {
    Remember(input);
  }
  RefuseOverwriting(FilesOf(command, arguments, {FileRole::kWrite, FileRole::kWriteWhen}));
  for (const NamedFile& output : FilesOf(command, arguments, {FileRole::kWrite})) {
    CheckWritable(output.path);
  }
}

}  // namespace shardwright
