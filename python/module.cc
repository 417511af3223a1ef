// The Python module `shardwright` (docs/library.md): commands of the program, run in this process.

#include <functional>
#include <string>
#include <vector>

#include <pybind11/pybind11.h>

#include "cli/command_line.h"
#include "cli/exit_codes.h"
#include "core/error.h"

namespace shardwright {
namespace {

namespace py = pybind11;

// "global_batch" is --global-batch.
std::string FlagOf(const std::string& keyword) {
  std::string flag = "--" + keyword;
  for (char& c : flag) {
    c = c == '_' ? '-' : c;
  }
  return flag;
}

// Keywords as words of a command line: True is a switch, None and False are not given.
void AddFlags(const py::kwargs& flags, std::vector<std::string>& words) {
  for (const auto& [key, value] : flags) {
    const bool is_switch = value.is(py::bool_(true));
    if (value.is_none() || value.is(py::bool_(false))) {
      continue;
    }
    const std::string flag = FlagOf(py::str(key));
    words.push_back(is_switch ? flag : flag + "=" + std::string(py::str(value)));
  }
}

// Runs the command and returns what it prints, parsed.
py::object Run(std::vector<std::string> words, const std::string& input, const py::kwargs& flags) {
  AddFlags(flags, words);
  std::vector<const char*> arguments;
  for (const std::string& word : words) {
    arguments.push_back(word.c_str());
  }
  std::string output;
  {
    const py::gil_scoped_release others_may_run;
    const Streams streams = {[&] { return input; },
                             [&](const std::string& text) { output += text; }};
    (void)RunCommandLine(static_cast<int>(arguments.size()), arguments.data(), streams);
  }
  if (!output.starts_with('{')) {  // --help, or the plan itself on standard output
    throw UsageError(words[1] + ": these keywords print text, expected those of a result");
  }
  return py::module_::import("json").attr("loads")(output);
}

// A plan is a file's name, or what `plan` and `json.load` return.
py::object RunOnPlan(const char* command, const py::object& plan, const py::kwargs& flags) {
  std::vector<std::string> words = {"shardwright", command, "--json"};
  if (!py::isinstance<py::dict>(plan)) {
    words.emplace_back(py::str(plan));
    return Run(words, "", flags);
  }
  const auto whole = py::reinterpret_borrow<py::dict>(plan);
  const py::object file = whole.contains("plan_file") ? whole["plan_file"] : plan;
  words.emplace_back("-");
  return Run(words, py::str(py::module_::import("json").attr("dumps")(file)), flags);
}

void Define(py::module_& module) {
  module.doc() = "Plans, simulates and emits Fully Sharded Data Parallel training.";
  const auto error = py::exception<std::exception>(module, "Error");
  py::register_exception<UsageError>(module, "UsageError", error);
  py::register_exception<InputError>(module, "InputError", error);
  py::register_exception<EnvironmentError>(module, "EnvironmentError", error);
  py::register_exception<RunError>(module, "RunError", error);
  module.def(
      "plan",
      [](const py::kwargs& flags) {
        return Run({"shardwright", "plan", "--json"}, "", flags);
      },
      "What `shardwright plan --json` prints, as a dictionary; keywords are its flags.\n\n"
      "Without output=FILE the plan itself is under \"plan_file\".");
  module.def(
      "simulate",
      [](const py::object& plan, const py::kwargs& flags) {
        return RunOnPlan("simulate", plan, flags);
      },
      py::arg("plan"),
      "What `shardwright simulate PLAN --json` prints; PLAN is a file or a dictionary.");
  module.def(
      "emit",
      [](const py::object& plan, const py::kwargs& flags) {
        return RunOnPlan("emit", plan, flags);
      },
      py::arg("plan"),
      "What `shardwright emit PLAN --json` prints: to=TARGET, and output=FOLDER to write files.");
}

}  // namespace
}  // namespace shardwright

// NOLINTNEXTLINE: pybind11's macro
PYBIND11_MODULE(shardwright, module) {
  shardwright::Define(module);
}
