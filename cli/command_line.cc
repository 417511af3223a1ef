// The only file that includes CLI11: it takes seconds to compile.

#include "cli/command_line.h"

#include <array>
#include <map>
#include <set>
#include <sstream>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include <CLI/CLI.hpp>

#include "cli/budget_flag.h"
#include "cli/help_json.h"
#include "cli/named_files.h"
#include "cli/synonyms.h"
#include "cli/table.h"
#include "cli/version.h"
#include "core/budget.h"
#include "core/error.h"
#include "core/files.h"
#include "core/json.h"
#include "core/ranges.h"
#include "core/staged_file.h"
#include "core/text.h"

namespace shardwright {
namespace {

// What CLI11 fills in for one subcommand.
struct Parsed {
  Command command;
  CLI::App* app = nullptr;
  int (*run)(const Arguments& arguments) = nullptr;
  Arguments arguments;
  std::map<std::string, bool> switches;
};

void AddSwitch(Parsed& parsed, const std::string& name, const std::string& help) {
  parsed.app->add_flag(name, parsed.switches[name], help);
}

// The titles of --help, each above its first command.
constexpr std::array<std::pair<std::string_view, const char*>, 4> kTitles = {
    {{"estimate", "Commands"},
     {"advise", "What is wrong with a run"},
     {"list", "More commands"},
     {"calibrate", "Workshop: profiles from measurements"}}};

void FillIn(const Command& command, Parsed& parsed) {
  parsed.app->description(FirstLine(command.about));
  parsed.app->allow_extras();
  Arguments& arguments = parsed.arguments;
  arguments.command = command.name;
  AddSwitch(parsed, kJsonSwitch.name, kJsonSwitch.help);
  parsed.app->add_option(kBudgetFlag.name, arguments.text[kBudgetFlag.name], kBudgetFlag.help)
      ->type_name(kBudgetFlag.value)
      ->type_size(1);
  for (const PositionalRow& row : command.positionals) {
    if (row.is_list) {
      parsed.app->add_option(row.name, arguments.lists[row.name], row.help);
    } else {
      parsed.app->add_option(row.name, arguments.text[row.name], row.help);
    }
  }
  for (const SwitchRow& row : command.switches) {
    AddSwitch(parsed, row.name, row.help);
  }
  for (const FlagRow& row : command.flags) {
    std::string& text = arguments.text[LongName(row)];
    parsed.app->add_option(row.name, text, row.help)->type_name(row.value)->type_size(1);
  }
}

// Adds every command. Flags are read only for commands that a word names; if none does, for all,
// since --help lists what each is about.
std::vector<Parsed> AddCommands(CLI::App& app, const std::set<std::string_view>& words) {
  const std::span<const CommandFunction> functions = CommandFunctions();
  const auto is_meant = [&](const CommandFunction& function) {
    return words.contains(function.name);
  };
  const bool has_name = AnyOf(functions, is_meant);
  std::vector<Parsed> commands(functions.size());
  std::string title;
  for (std::size_t i = 0; i < commands.size(); ++i) {
    Parsed& parsed = commands[i];
    for (const auto& [first, of_group] : kTitles) {
      title = first == functions[i].name ? of_group : title;
    }
    parsed.run = functions[i].run;
    parsed.app = app.add_subcommand(std::string(functions[i].name))->group(title);
    if (!has_name || is_meant(functions[i])) {
      parsed.command = LoadCommand(functions[i].name);
      FillIn(parsed.command, parsed);
    }
  }
  return commands;
}

bool IsJson(const CLI::App& app, const Parsed* chosen) {
  const std::vector<std::string> extras = app.remaining();
  return chosen != nullptr ? chosen->app->count("--json") > 0 : IsIn(extras, "--json");
}

// What it does and examples first, then the flags.
std::string HelpOf(CLI::App& app, const Parsed* chosen) {
  if (IsJson(app, chosen)) {
    return HelpJson(chosen == nullptr ? "" : chosen->command.name);
  }
  if (chosen == nullptr) {
    app.description("");
    return std::string(kProgramAbout) + "\n\n" + app.help();
  }
  chosen->app->description("");
  constexpr std::size_t kWidth = 100;
  constexpr std::size_t kTexts = 30;  // CLI11's column of descriptions
  return chosen->command.about + "\n\n" + Wrapped(chosen->app->help("shardwright"), kWidth, kTexts);
}

std::vector<std::string> FlagNames(const CLI::App& app) {
  std::vector<std::string> names;
  for (const CLI::Option* option : app.get_options()) {
    for (const std::string& name : option->get_lnames()) {
      names.push_back("--" + name);
    }
  }
  return names;
}

std::string WithHint(const std::string& text, const std::string& hint) {
  return hint.empty() ? text : text + "; " + hint;
}

// What people say in other programs, and what it is here: synonyms.json. Of the value `word` of
// `flag`, or of a flag itself: "" and its name. `key`: "say" for the words of an answer, "means"
// for the words that stand in its place.
std::string SynonymOf(const std::string& flag, const std::string& word, const char* key = "say") {
  const EmbeddedFile& file = EmbeddedSynonyms()[0];
  static const JsonValue root = JsonValue::Parse(file.text, std::string(file.path));
  const JsonValue rows = root.At(flag.empty() ? "flags" : "values");
  for (std::size_t i = 0; i < rows.size(); ++i) {
    const bool is_of_flag = flag.empty() || rows[i].At("flag").AsString() == flag;
    const auto text = rows[i].Find(key);
    if (text && is_of_flag &&
        Contains(' ' + rows[i].At("words").AsString() + ' ', ' ' + word + ' ')) {
      return text->AsString();
    }
  }
  return "";
}

// The words with those in place of which others stand: --qlora is --lora-rank 16 and more. What the
// user says of one of the others counts more; but a value such as "+nf4_double" is added to it.
std::vector<std::string> WithMeanings(const std::vector<std::string>& words) {
  std::vector<std::string> result;
  std::map<std::string, std::string> added;
  for (std::size_t i = 0; i < words.size(); ++i) {
    const std::string value = i > 0 ? SynonymOf(words[i - 1], words[i], "means") : "";
    const std::string means = words[i].starts_with("--") ? SynonymOf("", words[i], "means") : value;
    if (means.empty()) {
      result.push_back(words[i]);
      continue;
    }
    std::istringstream text(means);
    for (std::string flag, of; text >> flag;) {
      if (!flag.starts_with("--")) {
        result.push_back(flag);
        continue;
      }
      text >> of;
      if (!IsIn(words, flag)) {
        result.insert(result.end(), {flag, of});
      } else if (of.starts_with('+')) {
        added[flag] = of;
      }
    }
  }
  for (std::size_t i = 1; i < result.size(); ++i) {
    const bool has_own = Contains(result[i], "nf4") || Contains(result[i], "int8");
    result[i] += has_own ? "" : added[result[i - 1]];
  }
  return result;
}

[[noreturn]] void ThrowNoCommand(const CLI::App& app) {
  constexpr const char* kExpected = "expected one of those that shardwright --help lists";
  std::vector<std::string> names = Mapped<std::string>(CommandFunctions(), &CommandFunction::name);
  const std::vector<std::string> extras = app.remaining(true);
  if (extras[0].starts_with("-")) {
    throw UsageError(
        WithHint("unknown flag \"" + extras[0] + "\"", DidYouMean(extras[0], FlagNames(app))));
  }
  throw UsageError(WithHint("unknown command \"" + extras[0] + "\", " + kExpected,
                            DidYouMean(extras[0], names)));
}

// "which takes MODEL CLUSTER; ...": the usual reason for one word too many is a space in a value.
std::string WhatItTakes(const Command& command) {
  std::string names;
  for (const PositionalRow& row : command.positionals) {
    names += (names.empty() ? "" : " ") + row.name;
  }
  return names.empty() ? ", which takes flags only"
                       : ", which takes " + names + "; a value with spaces needs quotes";
}

// Words that no flag and no argument took, and arguments that are missing.
void CheckWords(const CLI::App& app, const Parsed& parsed) {
  const std::string name = parsed.command.name;
  const std::vector<std::string> extras = app.remaining(true);
  for (const std::string& extra : extras) {
    if (extra.starts_with("-") && extra != "-") {
      const std::string flag = extra.substr(0, extra.find('='));
      std::string text = "unknown flag \"";
      text.append(flag).append("\" of shardwright ").append(name);
      std::string dashed = flag;  // "--batch_size"
      std::replace(dashed.begin(), dashed.end(), '_', '-');
      const std::string instead = SynonymOf("", dashed);
      throw UsageError(
          WithHint(text, instead.empty() ? DidYouMean(flag, FlagNames(*parsed.app)) : instead));
    }
  }
  if (!extras.empty()) {
    const std::vector<std::string> flags = FlagNames(*parsed.app);
    const bool names_model = parsed.command.positionals.empty() && IsIn(flags, "--model");
    throw UsageError("unexpected argument \"" + extras[0] + "\" of shardwright " + name +
                     WhatItTakes(parsed.command) +
                     (names_model ? "; did you mean --model " + extras[0] +
                                        (extras.size() > 1 ? " --cluster " + extras[1] : "") + "?"
                                  : ""));
  }
  const auto check = [&](const std::string& flag) {
    const Flag given = parsed.arguments.Get(flag);
    if (parsed.app->count(flag) > 0 && !given.is_given()) {
      throw UsageError(flag + ": got no value, expected one");
    }
    if (const std::string instead = given.is_given() ? SynonymOf(flag, given.text) : "";
        !instead.empty()) {
      throw UsageError(flag + ": got \"" + given.text + "\"; " + instead);
    }
  };
  check(kBudgetFlag.name);
  for (const FlagRow& row : parsed.command.flags) {
    check(LongName(row));
  }
  for (const PositionalRow& row : parsed.command.positionals) {
    const bool is_given = row.is_list ? !parsed.arguments.lists.at(row.name).empty()
                                      : parsed.arguments.Get(row.name).is_given();
    if (!is_given && !row.missing.empty()) {
      throw UsageError(row.missing);
    }
  }
}

Parsed* ChosenOf(std::vector<Parsed>& commands) {
  for (Parsed& parsed : commands) {
    if (parsed.app->parsed()) {
      return &parsed;
    }
  }
  return nullptr;
}

// "--model=": CLI11 would take the next word for the value.
void CheckValues(int argc, const char* const* argv) {
  for (int i = 1; i < argc && std::string_view(argv[i]) != "--"; ++i) {
    const std::string_view word(argv[i]);
    if (word.starts_with("--") && word.find('=') == word.size() - 1) {
      throw UsageError(std::string(word.substr(0, word.size() - 1)) +
                       ": got no value, expected one");
    }
  }
}

}  // namespace

int RunCommandLine(int argc, const char* const* argv, const Streams& streams) {
  CLI::App app(kProgramAbout, "shardwright");
  app.allow_extras();
  app.require_subcommand(0, 1);
  app.set_version_flag("--version", kVersionText);
  CheckValues(argc, argv);
  // "help estimate" is "estimate --help", and nothing at all is "--help".
  const std::vector<std::string> meant = WithMeanings({argv, argv + argc});
  std::vector<const char*> words =
      Mapped<const char*>(meant, [](const std::string& word) { return word.c_str(); });
  if (argc == 1 || std::string_view(argv[1]) == "help") {
    words.erase(words.begin() + 1, words.begin() + std::min(argc, 2));
    words.push_back("--help");
  }
  std::vector<Parsed> commands = AddCommands(app, {words.begin() + 1, words.end()});
  try {
    app.parse(static_cast<int>(words.size()), words.data());
  } catch (const CLI::CallForHelp&) {
    streams.write(HelpOf(app, ChosenOf(commands)));
    return kExitOk;
  } catch (const CLI::CallForVersion&) {
    streams.write(std::string(kVersionText) + "\n");
    return kExitOk;
  } catch (const CLI::ArgumentMismatch& error) {
    // The only two ways in which the words of a flag can be too many or too few; the text begins
    // with its name.
    const std::string text = error.what();
    const bool is_missing = text.ends_with("missing");
    throw UsageError(text.substr(0, text.find(": ")) + ": got " +
                     (is_missing ? "no value" : "several values") + ", expected one");
  } catch (const CLI::ParseError& error) {
    throw UsageError(error.what());
  }
  Parsed* chosen = ChosenOf(commands);
  if (chosen == nullptr) {
    ThrowNoCommand(app);
  }
  CheckWords(app, *chosen);
  for (const auto& [name, is_on] : chosen->switches) {
    if (is_on) {
      chosen->arguments.switches.insert(name);
    }
  }
  chosen->arguments.streams = streams;
  if (const Flag budget = chosen->arguments.Get(kBudgetFlag.name); budget.is_given()) {
    SetBudgetFactor(ReadCount(budget, 1, kLargestBudgetFactor));
  }
  for (const auto& [name, text] : chosen->arguments.text) {
    NameByUser(text);
  }
  for (const auto& [name, texts] : chosen->arguments.lists) {
    std::for_each(texts.begin(), texts.end(), NameByUser);
  }
  const CommandReads reads;
  CheckFiles(chosen->command, chosen->arguments);
  return chosen->run(chosen->arguments);
}

}  // namespace shardwright
