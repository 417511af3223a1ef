// Reads cli/commands/: what each command does, its arguments, flags and switches.

#include "cli/command_tables.h"

#include <array>
#include <string>
#include <string_view>
#include <vector>

#include "cli/command.h"
#include "core/embedded.h"
#include "core/error.h"
#include "core/json.h"
#include "core/ranges.h"
#include "core/text.h"

namespace shardwright {
namespace {

// In the order of FileRole and Ranks.
constexpr std::array<std::string_view, 4> kFileRoles = {"none", "read", "write", "write_when"};
constexpr std::array<std::string_view, 3> kRanks = {"same", "given", "any"};

JsonValue TableNamed(std::string_view name) {
  const std::span<const EmbeddedFile> files = EmbeddedCommandTables();
  const auto file = FindIn(files, name, &EmbeddedFile::name);
  SW_CHECK(file != files.end(), "no table of command " + std::string(name));
  return JsonValue::Parse(file->text, std::string(file->path));
}

std::string TextAt(const JsonValue& row, const char* key) {
  const auto text = row.Find(key);
  return text ? text->AsString() : "";
}

template <class E>
E ChoiceAt(const JsonValue& row, const char* key, NameList names) {
  const auto text = row.Find(key);
  return static_cast<E>(text ? text->AsChoice(names) : 0);
}

std::vector<std::string> TextsOf(const JsonValue& list) {
  std::vector<std::string> texts;
  for (std::size_t i = 0; i < list.size(); ++i) {
    texts.push_back(list[i].AsString());
  }
  return texts;
}

void ReadRow(const JsonValue& row, PositionalRow& read) {
  row.AllowOnly({"name", "help", "missing", "list", "file"});
  read = {TextAt(row, "name"), TextAt(row, "help"), TextAt(row, "missing"),
          row.Find("list").has_value(), ChoiceAt<FileRole>(row, "file", kFileRoles)};
}

void ReadRow(const JsonValue& row, FlagRow& read) {
  row.AllowOnly({"name", "value", "help", "file", "ranks", "beside_run"});
  read = {TextAt(row, "name"),
          TextAt(row, "value"),
          TextAt(row, "help"),
          ChoiceAt<FileRole>(row, "file", kFileRoles),
          ChoiceAt<Ranks>(row, "ranks", kRanks),
          row.Find("beside_run").has_value()};
}

void ReadRow(const JsonValue& row, SwitchRow& read) {
  row.AllowOnly({"name", "help", "ranks"});
  read = {TextAt(row, "name"), TextAt(row, "help"), ChoiceAt<Ranks>(row, "ranks", kRanks)};
}

template <class Row>
void ReadRows(const JsonValue& list, std::vector<Row>& rows);

// {"all_of": "plan", "but": ["--nodes"]} stands for rows of shared.json. "but": without these;
// "only": these alone.
template <class Row>
void AddShared(const JsonValue& set, std::vector<Row>& rows) {
  set.AllowOnly({"all_of", "but", "only"});
  std::vector<Row> shared;
  ReadRows(TableNamed("shared").At(set.At("all_of").AsString()), shared);
  for (const char* key : {"but", "only"}) {
    if (const auto list = set.Find(key)) {
      const std::vector<std::string> names = TextsOf(*list);
      for (const std::string& name : names) {
        SW_CHECK(IsIn(shared, name, &Row::name), "no row " + name + " to leave out or take");
      }
      std::erase_if(shared, [&](const Row& row) {
        const bool is_named = IsIn(names, row.name);
        return is_named == (key == std::string_view("but"));
      });
    }
  }
  rows.insert(rows.end(), shared.begin(), shared.end());
}

template <class Row>
void ReadRows(const JsonValue& list, std::vector<Row>& rows) {
  for (std::size_t i = 0; i < list.size(); ++i) {
    if (list[i].Find("all_of")) {
      AddShared(list[i], rows);
    } else {
      ReadRow(list[i], rows.emplace_back());
    }
  }
}

template <class Row>
void ReadRowsAt(const JsonValue& table, const char* key, std::vector<Row>& rows) {
  if (const auto list = table.Find(key)) {
    ReadRows(*list, rows);
  }
}

}  // namespace

Command LoadCommand(std::string_view name) {
  const JsonValue table = TableNamed(name);
  table.AllowOnly({"about", "positionals", "flags", "switches"});
  Command command;
  command.name = name;
  command.about = Listed(TextsOf(table.At("about")), {}, "\n");
  ReadRowsAt(table, "positionals", command.positionals);
  ReadRowsAt(table, "flags", command.flags);
  ReadRowsAt(table, "switches", command.switches);
  return command;
}

std::span<const Command> AllCommands() {
  static const std::vector<Command> commands = [] {
    return Mapped<Command>(CommandFunctions(), [&](const CommandFunction& function) {
      return LoadCommand(function.name);
    });
  }();
  return commands;
}

std::vector<FlagRow> SharedFlags(const char* set) {
  std::vector<FlagRow> rows;
  ReadRows(TableNamed("shared").At(set), rows);
  return rows;
}

}  // namespace shardwright
