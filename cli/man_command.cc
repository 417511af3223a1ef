// Manual pages, made from the table of commands.

#include <array>
#include <cctype>
#include <string>
#include <string_view>
#include <vector>

#include "cli/budget_flag.h"
#include "cli/command.h"
#include "cli/version.h"

namespace shardwright {
namespace {

constexpr const char* kManAbout = R"(Prints a manual page in the format of man.

Examples:
  shardwright man plan | man -l -
  shardwright man > shardwright.1

Without a command: the page about the program. Installed packages bring all pages along.)";

constexpr std::array<PositionalRow, 1> kManPositionals = {
    {{"COMMAND", "the command that the page is about", nullptr}}};

// Text for a line of troff: no escapes, no requests, no hyphens that become dashes.
std::string Troff(std::string_view text) {
  std::string escaped;
  bool is_line_start = true;
  for (const char c : text) {
    if (is_line_start && (c == '.' || c == '\'')) {
      escaped += "\\&";
    }
    if (c == '\\') {
      escaped += "\\e";
    } else if (c == '-') {
      escaped += "\\-";
    } else {
      escaped += c;
    }
    is_line_start = c == '\n';
  }
  return escaped;
}

std::string Header(const std::string& name, std::string_view about) {
  std::string title;
  for (const char c : name) {
    title += static_cast<char>(std::toupper(static_cast<unsigned char>(c)));
  }
  std::string line = FirstLine(about);
  line.resize(line.ends_with('.') ? line.size() - 1 : line.size());
  return ".TH " + title + " 1 \"\" \"" + kVersionText + "\" \"Shardwright\"\n.SH NAME\n" +
         Troff(name) + " \\- " + Troff(line) + "\n";
}

// What follows the first line: examples and remarks, as they are.
std::string AboutSection(std::string_view about) {
  const std::size_t end = about.find("\n\n");
  if (end == std::string_view::npos) {
    return "";
  }
  return ".SH DESCRIPTION\n.nf\n" + Troff(about.substr(end + 2)) + "\n.fi\n";
}

std::string Entry(const std::string& name, const std::string& value, const std::string& help) {
  return ".TP\n\\fB" + Troff(name) + "\\fR" +
         (value.empty() ? "" : " \\fI" + Troff(value) + "\\fR") + "\n" + Troff(help) + "\n";
}

std::string CommandPage(const Command& command) {
  const std::string name = "shardwright-" + std::string(command.name);
  std::string page = Header(name, command.about);
  page += ".SH SYNOPSIS\n\\fBshardwright " + Troff(command.name) + "\\fR [\\fIflags\\fR]";
  for (const PositionalRow& row : command.positionals) {
    const std::string word =
        std::string("\\fI") + Troff(row.name) + "\\fR" + (row.is_list ? "..." : "");
    page += row.missing == nullptr ? " [" + word + "]" : " " + word;
  }
  page += "\n" + AboutSection(command.about) + ".SH OPTIONS\n";
  for (const PositionalRow& row : command.positionals) {
    page += Entry(row.name, "", row.help);
  }
  page += Entry("--json", "", "machine-readable output");
  page += Entry(kBudgetFlag.name, kBudgetFlag.value, kBudgetFlag.help);
  for (const SwitchRow& row : command.switches) {
    page += Entry(row.name, "", row.help);
  }
  for (const FlagRow& row : command.flags) {
    page += Entry(row.name, row.value, row.help);
  }
  return page + ".SH SEE ALSO\n\\fBshardwright\\fR(1)\n";
}

std::string ProgramPage() {
  std::string page = Header("shardwright", kProgramAbout);
  page += ".SH SYNOPSIS\n\\fBshardwright\\fR \\fIcommand\\fR [\\fIflags\\fR] [\\fIarguments\\fR]\n";
  page += AboutSection(kProgramAbout) + ".SH COMMANDS\n";
  for (const Command* command : AllCommands()) {
    page += Entry(command->name, "", FirstLine(command->about));
  }
  page += ".SH SEE ALSO\n";
  for (const Command* command : AllCommands()) {
    page += "\\fBshardwright\\-" + Troff(command->name) + "\\fR(1)" +
            (command == AllCommands().back() ? "\n" : ",\n");
  }
  return page;
}

std::string PageOf(const std::string& name) {
  if (name.empty()) {
    return ProgramPage();
  }
  std::vector<std::string_view> names;
  for (const Command* command : AllCommands()) {
    names.emplace_back(command->name);
  }
  const std::size_t index = ReadChoice({"man", name}, names);
  return CommandPage(*AllCommands()[index]);
}

int RunMan(const Arguments& arguments) {
  arguments.PrintText("manual-page", PageOf(arguments.Get("COMMAND").text));
  return kExitOk;
}

}  // namespace

extern const Command kManCommand;
const Command kManCommand = {"man", kManAbout, kManPositionals, {}, {}, RunMan};

}  // namespace shardwright
