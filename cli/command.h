#pragma once

// One subcommand = one table (help, flags: cli/commands/NAME.json) and one function.
// cli/command_line.cc parses the words into Arguments by these tables; the function reads them. A
// new subcommand is a table (listed in cli/embed.cmake), a .cc file, a declaration below and a line
// in cli/all_commands.cc.

#include <atomic>
#include <cstdint>
#include <functional>
#include <map>
#include <set>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include <nlohmann/json_fwd.hpp>

#include "cli/exit_codes.h"
#include "cli/flag_values.h"

namespace shardwright {

// What a value names, if that is a file. CheckFiles (cli/named_files.h) looks at all of them before
// a command runs.
enum class FileRole : std::uint8_t {
  kNone,
  kRead,       // also where it may be a name instead
  kWrite,      // one file
  kWriteWhen,  // a folder, or a file that not every process writes: the command looks itself
};

// What the ranks of one run must be given alike (cli/rank_facts.h).
enum class Ranks : std::uint8_t {
  kSame,   // the same value; of a file that is read, the same content
  kGiven,  // one gives it, all give it: a place, which each machine may name in its own way
  kAny     // a rank's own matter
};

// "--nodes N": a flag with a value. A kWrite is never compared, only whether it is given.
struct FlagRow {
  std::string name;  // "--nodes", or with a short form "--output,-o"
  std::string value;
  std::string help;
  FileRole file = FileRole::kNone;
  Ranks ranks = Ranks::kSame;
};

// The name without the short form.
[[nodiscard]] std::string LongName(const FlagRow& row);

// "--exact": a flag without a value.
struct SwitchRow {
  std::string name;
  std::string help;
  Ranks ranks = Ranks::kSame;
};

// An argument that is no flag.
struct PositionalRow {
  std::string name;
  std::string help;
  std::string missing;   // the usage error without it; empty: it may be left out
  bool is_list = false;  // takes all that follow
  FileRole file = FileRole::kNone;
};

// The title of a command, of what its --help says.
[[nodiscard]] std::string FirstLine(std::string_view about);

// Standard input and output; a caller in the same process may have others in their place.
struct Streams {
  std::function<std::string()> read;  // all of it
  std::function<void(const std::string& text)> write;
  std::string source = "standard input";  // what errors call the input
  // Set by the caller when a search shall end with what it has; null: Ctrl-C does that.
  const std::atomic<bool>* stop = nullptr;
};
[[nodiscard]] Streams StandardStreams();

// What the user gave. Texts are converted by the commands, so that all errors read alike.
class Arguments {
 public:
  std::map<std::string, std::string> text;  // by flag name without its short form, or positional
  std::map<std::string, std::vector<std::string>> lists;  // positionals with is_list
  std::set<std::string> switches;                         // those given
  std::string command;
  Streams streams = StandardStreams();

  // To standard output, or what stands for it.
  void Print(const std::string& result) const { streams.write(result); }
  // A text for another program; with --json {"schema": "shardwright-<kind>", ..., "text": ...}.
  void PrintText(const std::string& kind, const std::string& result) const;
  // A file that goes to standard output, as no other place was named; standard error has the
  // report.
  void PrintFile(const std::string& content, const std::string& report) const;
  [[nodiscard]] Flag Get(const std::string& name) const;
  [[nodiscard]] bool Has(const std::string& switch_name) const;
  [[nodiscard]] bool IsJson() const { return Has("--json"); }
  // Throws UsageError when the flag was not given.
  void Require(const std::string& name) const;

  // Assign the value of a flag that was given; otherwise `target` keeps what it has.
  template <class T, class Read>
  void Set(const std::string& name, T& target, Read read) const {
    const Flag flag = Get(name);
    if (flag.is_given()) {
      target = read(flag);
    }
  }
  // What --output says of the one file that a command makes. A file: it is written, and report(its
  // name) printed. Not given, and standard output is a terminal: report("") alone, with a line
  // that says how to get `what`. Else `content` goes to standard output, without a report.
  void Deliver(const std::string& output, const char* what, const std::string& content,
               const std::function<std::string(const std::string& file)>& report) const;
  void SetText(const std::string& name, std::string& target) const;
  // An integer from 1 to max.
  void SetCount(const std::string& name, std::int64_t max, std::int64_t& target) const;
  template <class E>
  void SetChoice(const std::string& name, NameList names, E& target) const {
    Set(name, target,
        [names](const Flag& flag) { return static_cast<E>(ReadChoice(flag, names)); });
  }
};

struct Command {
  std::string name;
  std::string about;  // what it does in one line, a blank line, then examples
  std::vector<PositionalRow> positionals;
  std::vector<FlagRow> flags;
  std::vector<SwitchRow> switches;  // --json comes with every command
};

// The table of a command that CommandFunctions() names.
[[nodiscard]] Command LoadCommand(std::string_view name);
[[nodiscard]] std::span<const Command> AllCommands();
// Flags that several commands have: "plan", those that describe one plan.
[[nodiscard]] std::vector<FlagRow> SharedFlags(const char* set);

// Prepares all of its output before it writes any, so that a failure leaves none; results go to
// Arguments::Print, warnings to standard error. Returns an exit code; errors are thrown.
struct CommandFunction {
  std::string_view name;
  int (*run)(const Arguments& arguments);
};
// In the order of --help.
[[nodiscard]] std::span<const CommandFunction> CommandFunctions();

int EstimateCommand(const Arguments& arguments);
int PlanCommand(const Arguments& arguments);
int SimulateCommand(const Arguments& arguments);
int EmitCommand(const Arguments& arguments);
int ImportRunCommand(const Arguments& arguments);
int RunCommand(const Arguments& arguments);
int CompareCommand(const Arguments& arguments);
int ReportCommand(const Arguments& arguments);
int AdviseCommand(const Arguments& arguments);
int HangCommand(const Arguments& arguments);
int JudgeCommand(const Arguments& arguments);
int CheckCommand(const Arguments& arguments);
int DoctorCommand(const Arguments& arguments);
int ListCommand(const Arguments& arguments);
int InspectCommand(const Arguments& arguments);
int InspectTraceCommand(const Arguments& arguments);
int TopoCommand(const Arguments& arguments);
int SweepCommand(const Arguments& arguments);
int GoodputCommand(const Arguments& arguments);
int BaselinesCommand(const Arguments& arguments);
int DiffCommand(const Arguments& arguments);
int ExportCommand(const Arguments& arguments);
int EvalCommand(const Arguments& arguments);
int CheckpointCommand(const Arguments& arguments);
int PageCommand(const Arguments& arguments);
int CalibrateCommand(const Arguments& arguments);
int ValidateCommand(const Arguments& arguments);
int PriceCommand(const Arguments& arguments);

// "warning: <text>" on standard error.
void Warn(const std::string& text);

// How a report in JSON begins: with the name and the version of its keys.
[[nodiscard]] nlohmann::ordered_json ReportHead(const std::string& schema);

}  // namespace shardwright
