// Completion scripts for shells, made from the table of commands: what they offer is what there is.

#include <array>
#include <string>
#include <string_view>
#include <utility>

#include "cli/budget_flag.h"
#include "cli/command.h"

namespace shardwright {
namespace {

constexpr const char* kCompletionAbout =
    R"(Prints a script by which a shell completes commands and flags.

Examples:
  source <(shardwright completion bash)
  shardwright completion zsh > "${fpath[1]}/_shardwright"
  shardwright completion fish > ~/.config/fish/completions/shardwright.fish

Installed packages bring the scripts along.)";

constexpr std::array<PositionalRow, 1> kCompletionPositionals = {
    {{"SHELL", "bash, zsh or fish", "completion needs a shell: bash, zsh or fish"}}};
constexpr std::array<std::string_view, 3> kShells = {"bash", "zsh", "fish"};

std::string Replaced(std::string text, std::string_view what, std::string_view with) {
  for (std::size_t at = text.find(what); at != std::string::npos;
       at = text.find(what, at + with.size())) {
    text.replace(at, what.size(), with);
  }
  return text;
}

// For use between single quotes.
std::string Quoted(const std::string& text) {
  return Replaced(text, "'", "'\\''");
}

// "on|off" -> "on off"; empty where a value is no choice between words.
std::string ChoiceWords(const FlagRow& row) {
  const std::string value(row.value);
  return value.find('|') == std::string::npos ? "" : Replaced(value, "|", " ");
}

// What lists the words that a flag takes, as a shell command; empty: nothing does.
std::string Lister(const std::string& flag) {
  constexpr const char* kFirstColumn = " 2>/dev/null | awk 'NR > 1 {print $1}'";
  const std::array<std::pair<std::string_view, std::string_view>, 4> lists = {
      {{"--model", "models"},
       {"--cluster", "clusters"},
       {"--kernel-set", "kernel-sets"},
       {"--profile", "profiles"}}};
  for (const auto& [name, list] : lists) {
    if (flag == name) {
      return "shardwright list " + std::string(list) + kFirstColumn;
    }
  }
  return "";
}

std::string FlagWordsOf(const Command& command) {
  std::string flags = "--help --json --budget";
  for (const SwitchRow& row : command.switches) {
    flags += " " + std::string(row.name);
  }
  for (const FlagRow& row : command.flags) {
    flags += " " + LongName(row);
  }
  return flags;
}

std::string BashScript() {
  std::string commands;
  std::string flags;
  std::string values;
  for (const Command* command : AllCommands()) {
    commands += std::string(" ") + command->name;
    flags += "    " + std::string(command->name) + ") words='" + FlagWordsOf(*command) + "' ;;\n";
    for (const FlagRow& row : command->flags) {
      const std::string name = LongName(row);
      const std::string lister = Lister(name);
      const std::string words = lister.empty() ? ChoiceWords(row) : "$(" + lister + ")";
      if (!words.empty()) {
        values.append("    '").append(command->name).append(" ").append(name);
        values.append("') words=\"").append(words).append("\" ;;\n");
      }
    }
  }
  return "# Completion of shardwright for bash.\n"
         "_shardwright() {\n"
         "  local word=${COMP_WORDS[COMP_CWORD]} before=${COMP_WORDS[COMP_CWORD-1]} "
         "command=${COMP_WORDS[1]} words=\n"
         "  COMPREPLY=()\n"
         "  if [[ $COMP_CWORD -eq 1 ]]; then\n"
         "    COMPREPLY=($(compgen -W '--help --version" +
         commands +
         "' -- \"$word\"))\n    return\n  fi\n"
         "  case \"$command $before\" in\n" +
         values +
         "  esac\n"
         "  if [[ -z $words && $word == -* ]]; then\n"
         "    case $command in\n" +
         flags +
         "    esac\n"
         "  fi\n"
         "  if [[ -n $words ]]; then\n"
         "    COMPREPLY=($(compgen -W \"$words\" -- \"$word\"))\n"
         "  else\n"
         "    COMPREPLY=($(compgen -f -- \"$word\"))\n"
         "  fi\n"
         "}\n"
         "complete -o filenames -F _shardwright shardwright\n";
}

// Help inside a specification of _arguments.
std::string ZshHelp(const std::string& text) {
  return Quoted(Replaced(Replaced(Replaced(Replaced(text, "\\", "\\\\"), "[", "\\["), "]", "\\]"),
                         ":", "\\:"));
}

std::string ZshValue(const FlagRow& row) {
  const std::string lister = Lister(LongName(row));
  if (!lister.empty()) {
    return ":value:($(" + Replaced(lister, "'", "'\\''") + "))";
  }
  const std::string choices = ChoiceWords(row);
  return choices.empty() ? ":value:_files" : ":value:(" + choices + ")";
}

std::string ZshScript() {
  std::string commands;
  std::string cases;
  for (const Command* command : AllCommands()) {
    commands +=
        "    '" + std::string(command->name) + ":" + ZshHelp(FirstLine(command->about)) + "'\n";
    cases +=
        "    " + std::string(command->name) + ")\n      _arguments '--help[examples and flags]' " +
        "'--json[machine-readable output]' '--budget[" + ZshHelp(kBudgetFlag.help) + "]:value:'";
    for (const SwitchRow& row : command->switches) {
      cases += " \\\n        '" + std::string(row.name) + "[" + ZshHelp(row.help) + "]'";
    }
    for (const FlagRow& row : command->flags) {
      cases +=
          " \\\n        '" + LongName(row) + "[" + ZshHelp(row.help) + "]" + ZshValue(row) + "'";
    }
    cases += " \\\n        '*:file:_files' ;;\n";
  }
  return "#compdef shardwright\n"
         "_shardwright() {\n"
         "  local -a commands=(\n" +
         commands +
         "  )\n"
         "  if (( CURRENT == 2 )); then\n"
         "    _describe command commands\n"
         "    return\n"
         "  fi\n"
         "  local command=$words[2]\n"
         "  shift words\n"
         "  (( CURRENT-- ))\n"
         "  case $command in\n" +
         cases +
         "  esac\n"
         "}\n"
         "if [[ $funcstack[1] == _shardwright ]]; then\n"
         "  _shardwright \"$@\"\n"
         "elif (( $+functions[compdef] )); then\n"
         "  compdef _shardwright shardwright\n"
         "fi\n";
}

std::string FishScript() {
  std::string text = "# Completion of shardwright for fish.\n";
  for (const Command* command : AllCommands()) {
    const std::string name(command->name);
    text += "complete -c shardwright -f -n __fish_use_subcommand -a " + name + " -d '" +
            Quoted(FirstLine(command->about)) + "'\n";
    const std::string with =
        "complete -c shardwright -n '__fish_seen_subcommand_from " + name + "' -l ";
    text += with + "json -d 'machine-readable output'\n";
    text += with + "budget -x -d '" + Quoted(kBudgetFlag.help) + "'\n";
    for (const SwitchRow& row : command->switches) {
      text += with + std::string(row.name).substr(2) + " -d '" + Quoted(row.help) + "'\n";
    }
    for (const FlagRow& row : command->flags) {
      const std::string flag = LongName(row);
      const std::string lister = Lister(flag);
      const std::string words = lister.empty() ? ChoiceWords(row) : "(" + lister + ")";
      text += with + flag.substr(2) + " -r" +
              (words.empty() ? "" : " -f -a '" + Quoted(words) + "'") + " -d '" + Quoted(row.help) +
              "'\n";
    }
  }
  return text;
}

int RunCompletion(const Arguments& arguments) {
  const std::array<std::string, 3> scripts = {BashScript(), ZshScript(), FishScript()};
  const Flag shell{"completion", arguments.Get("SHELL").text};
  arguments.PrintText("completion", scripts[ReadChoice(shell, kShells)]);
  return kExitOk;
}

}  // namespace

extern const Command kCompletionCommand;
const Command kCompletionCommand = {"completion", kCompletionAbout, kCompletionPositionals, {},
                                    {},           RunCompletion};

}  // namespace shardwright
