#include "cli/rank_facts.h"

#include <nlohmann/json.hpp>

#include "cli/version.h"
#include "core/files.h"
#include "core/ranges.h"
#include "executor/checkpoint/output_file.h"
#include "executor/data/mapped_file.h"

namespace shardwright {
namespace {

std::string Checksum(std::uint32_t crc) {
  return "CRC-32 " + ChecksumText(crc);
}

std::string ValueOf(const std::string& text) {
  constexpr std::size_t kLongest = 60;
  return text.size() <= kLongest ? text : Checksum(Crc32(0, text.data(), std::ssize(text)));
}

void AddFields(const nlohmann::json& json, const std::string& name, RankFacts& facts) {
  if (!json.is_object()) {
    facts.emplace_back(name, ValueOf(json.dump()));
    return;
  }
  constexpr const char* kHash = "hash";  // of what a plan names or holds beside it: last
  for (const bool is_hash : {false, true}) {
    for (const auto& [key, value] : json.items()) {
      if ((key == kHash) == is_hash) {
        AddFields(value, name.empty() ? key : name + '.' + key, facts);
      }
    }
  }
}

// Of a file what it holds, whatever it is called.
std::string FileValue(const std::string& path) {
  return IsRegularFile(path) ? Checksum(ContentChecksum(MappedFile(path).bytes(), 0))
                             : ValueOf(path);
}

std::string ValueOf(const std::string& text, FileRole file, Ranks ranks) {
  if (text.empty()) {
    return "none";
  }
  if (ranks == Ranks::kGiven || file == FileRole::kWrite || file == FileRole::kWriteWhen) {
    return "one";
  }
  return file == FileRole::kRead ? FileValue(text) : ValueOf(text);
}

}  // namespace

RankFacts FieldsOf(std::string_view json) {
  RankFacts facts;
  AddFields(nlohmann::json::parse(json), "", facts);
  return facts;
}

RankFacts FactsOf(const Dataset& data) {
  return {{"samples", std::to_string(data.size())}, {"content", Checksum(data.Checksum())}};
}

RankFacts FactsOf(const Checkpoint& checkpoint) {
  const std::string text = ManifestJson(checkpoint.manifest());
  return {{"checkpoint", Checksum(Crc32(0, text.data(), std::ssize(text)))}};
}

RankFacts FactsOf(const Arguments& arguments, const Contents& contents) {
  RankFacts facts = {{"version", kVersion}};
  const auto add = [&](const std::string& name, const std::string& text, FileRole file,
                       Ranks ranks) {
    const bool has_content = AnyOf(contents, [&](const auto& its) { return its.first == name; });
    if (ranks != Ranks::kAny && !has_content) {
      facts.emplace_back(name, ValueOf(text, file, ranks));
    }
  };
  for (const Command& command : AllCommands()) {
    if (command.name != arguments.command) {
      continue;
    }
    for (const PositionalRow& row : command.positionals) {
      add(row.name, arguments.Get(row.name).text, row.file, Ranks::kSame);
    }
    for (const FlagRow& row : command.flags) {
      add(LongName(row), arguments.Get(LongName(row)).text, row.file, row.ranks);
    }
    for (const SwitchRow& row : command.switches) {
      add(row.name, arguments.Has(row.name) ? "on" : "off", FileRole::kNone, row.ranks);
    }
  }
  for (const auto& [flag, its] : contents) {
    for (const auto& [name, value] : its) {
      facts.emplace_back(flag + ": ", value).first += name;
    }
  }
  return facts;
}

}  // namespace shardwright
