// The Python module `shardwright` (docs/library.md): commands of the program, run in this process.

#include <atomic>
#include <chrono>
#include <exception>
#include <future>
#include <optional>
#include <string>
#include <vector>

#include <pybind11/pybind11.h>

#include "cli/command.h"
#include "cli/command_line.h"
#include "cli/exit_codes.h"
#include "cli/version.h"
#include "core/error.h"
#include "core/printable.h"

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

// A command line ends its words with a NUL.
std::string Word(const std::string& name, std::string text) {
  if (text.find('\0') != std::string::npos) {
    throw UsageError(name + ": got a text with a NUL character, expected one without");
  }
  return text;
}

// Keywords as words of a command line: True is a switch, None and False are not given.
void AddFlags(const py::kwargs& flags, std::vector<std::string>& words) {
  for (const auto& [key, value] : flags) {
    const bool is_switch = value.is(py::bool_(true));
    if (value.is_none() || value.is(py::bool_(false))) {
      continue;
    }
    const std::string flag = Word("a keyword", FlagOf(py::str(key)));
    words.push_back(is_switch ? flag : flag + "=" + Word(flag, py::str(value)));
  }
}

// Runs the command in a thread of its own while this one, which may be Python's main thread, asks
// for signals: Ctrl-C ends a search, and is Python's to raise.
std::string RunWords(const std::vector<std::string>& words, const std::string& input) {
  std::vector<const char*> arguments;
  for (const std::string& word : words) {
    arguments.push_back(word.c_str());
  }
  std::string output;
  std::atomic<bool> stop{false};
  const Streams streams = {.read = [&] { return input; },
                           .write = [&](const std::string& text) { output += text; },
                           .source = "the plan that was given",
                           .stop = &stop};
  std::optional<py::error_already_set> interrupt;
  std::future<void> command = std::async(std::launch::async, [&] {
    (void)RunCommandLine(static_cast<int>(arguments.size()), arguments.data(), streams);
  });
  const auto is_over = [&] {
    const py::gil_scoped_release others_may_run;
    constexpr std::chrono::milliseconds kPause{20};
    return command.wait_for(kPause) == std::future_status::ready;
  };
  while (!is_over()) {
    if (!interrupt.has_value() && PyErr_CheckSignals() != 0) {
      interrupt.emplace();  // raised when the command has ended
      stop.store(true);
    }
  }
  if (interrupt.has_value()) {
    throw py::error_already_set(*interrupt);
  }
  command.get();
  return output;
}

// Runs the command and returns what it prints, parsed.
py::object Run(std::vector<std::string> words, const std::string& input, const py::kwargs& flags) {
  AddFlags(flags, words);
  const std::string output = RunWords(words, input);
  if (!output.starts_with('{')) {  // --help, or the plan itself on standard output
    throw UsageError(words[1] + ": these keywords print text, expected those of a result");
  }
  return py::module_::import("json").attr("loads")(output);
}

bool IsMapping(const py::handle& value) {
  return py::isinstance(value, py::module_::import("collections.abc").attr("Mapping"));
}

// What json.dumps cannot write by itself.
py::dict AsDictionary(const py::object& value) {
  if (!IsMapping(value)) {
    throw py::type_error("a plan holds a value of type " +
                         std::string(py::str(py::type::of(value).attr("__name__"))) +
                         ", expected what JSON has");
  }
  return py::dict(value);
}

// A plan is a file's name, or what `plan` and `json.load` return.
py::object RunOnPlan(const char* command, const py::object& plan, const py::kwargs& flags) {
  std::vector<std::string> words = {"shardwright", command, "--json"};
  if (!IsMapping(plan)) {
    words.push_back(Word("the plan", py::str(py::module_::import("os").attr("fsdecode")(plan))));
    return Run(words, "", flags);
  }
  const py::object file =
      plan.contains("plan_file") ? py::object(plan.attr("__getitem__")("plan_file")) : plan;
  words.emplace_back("-");
  const py::object text = py::module_::import("json").attr("dumps")(
      file, py::arg("default") = py::cpp_function(AsDictionary));
  return Run(words, py::str(text), flags);
}

// "Keywords: model, cluster, ...", from the table that the command line is made from.
std::string WithKeywords(const std::string& about, const std::string& name) {
  std::string text = about + "\n\nKeywords:\n";
  const auto add = [&](std::string keyword, const char* help) {
    keyword = keyword.substr(2);
    for (char& c : keyword) {
      c = c == '-' ? '_' : c;
    }
    text += "  " + keyword + ": " + help + "\n";
  };
  for (const Command* command : AllCommands()) {
    if (command->name == name) {
      for (const FlagRow& row : command->flags) {
        add(LongName(row), row.help);
      }
      for (const SwitchRow& row : command->switches) {
        add(row.name, row.help);
      }
    }
  }
  return text;
}

// `name`, an Error that is also one of Python's, so that either can be caught.
template <class Thrown>
void DefineError(py::module_& module, const py::object& base, const char* name, PyObject* also) {
  const std::string whole = std::string("shardwright.") + name;
  const py::tuple bases = py::make_tuple(base, py::reinterpret_borrow<py::object>(also));
  // It lives as long as the process, as the translator does.
  static PyObject* const type = PyErr_NewException(whole.c_str(), bases.ptr(), nullptr);
  if (type == nullptr) {
    throw py::error_already_set();
  }
  module.add_object(name, py::reinterpret_borrow<py::object>(type));
  py::register_exception_translator([](std::exception_ptr thrown) {
    try {
      if (thrown) {
        std::rethrow_exception(thrown);
      }
    } catch (const Thrown& error) {
      PyErr_SetString(type, PrintableLine(error.what()).c_str());
    }
  });
}

void Define(py::module_& module) {
  module.doc() = "Plans, simulates and emits Fully Sharded Data Parallel training.";
  module.attr("__version__") = kVersion;
  const py::object error = py::exception<std::exception>(module, "Error");
  DefineError<UsageError>(module, error, "UsageError", PyExc_ValueError);
  DefineError<InputError>(module, error, "InputError", PyExc_ValueError);
  DefineError<EnvironmentError>(module, error, "MachineError", PyExc_OSError);
  DefineError<RunError>(module, error, "RunError", PyExc_RuntimeError);
  module.def(
      "plan",
      [](const py::kwargs& flags) {
        return Run({"shardwright", "plan", "--json"}, "", flags);
      },
      WithKeywords("What `shardwright plan --json` prints, as a dictionary; keywords are its "
                   "flags.\n\nWithout output=FILE the plan itself is under \"plan_file\".",
                   "plan")
          .c_str());
  module.def(
      "simulate",
      [](const py::object& plan, const py::kwargs& flags) {
        return RunOnPlan("simulate", plan, flags);
      },
      py::arg("plan"),
      WithKeywords("What `shardwright simulate PLAN --json` prints; PLAN is a file or a mapping.",
                   "simulate")
          .c_str());
  module.def(
      "emit",
      [](const py::object& plan, const py::kwargs& flags) {
        return RunOnPlan("emit", plan, flags);
      },
      py::arg("plan"),
      WithKeywords("What `shardwright emit PLAN --json` prints: to=TARGET, and output=FOLDER to "
                   "write files; PLAN is a file or a mapping.",
                   "emit")
          .c_str());
}

}  // namespace
}  // namespace shardwright

// NOLINTNEXTLINE: pybind11's macro
PYBIND11_MODULE(shardwright, module) {
  shardwright::Define(module);
}
