// The module shardwright._native (docs/library.md): command lines, run in this process. It uses
// Python's limited API, so that one build serves Python 3.10 and later; what users call is written
// in Python above it (shardwright/).

#define Py_LIMITED_API 0x030A0000
#define PY_SSIZE_T_CLEAN
#include <array>
#include <atomic>
#include <chrono>
#include <exception>
#include <future>
#include <new>
#include <string>
#include <vector>

#include <Python.h>

#include "cli/command_line.h"
#include "cli/exit_codes.h"
#include "cli/version.h"
#include "core/error.h"
#include "core/printable.h"
#include "core/ranges.h"
#include "core/threads.h"

namespace shardwright {
namespace {

// How a command line ended: `kind` is "" or the name of an exception of shardwright/_errors.py,
// `text` what was printed or what is wrong.
struct Outcome {
  int code = kExitOk;
  const char* kind = "";
  std::string text;
};

struct Call {
  std::vector<std::string> words;
  std::string input;   // what `-` reads
  std::string source;  // what errors call that
};

Outcome RunGuarded(const Call& call, const std::atomic<bool>& stop) {
  std::vector<const char*> arguments =
      Mapped<const char*>(call.words, [](const std::string& word) { return word.c_str(); });
  Outcome outcome;
  const Streams streams = {.read = [&] { return call.input; },
                           .write = [&](const std::string& text) { outcome.text += text; },
                           .source = call.source,
                           .stop = &stop};
  const auto failed = [](int code, const char* kind, const char* text) {
    return Outcome{code, kind, PrintableLine(text)};
  };
  StopFlag() = &stop;
  try {
    outcome.code = RunCommandLine(static_cast<int>(arguments.size()), arguments.data(), streams);
    return outcome;
  } catch (const UsageError& error) {
    return failed(kExitUsage, "UsageError", error.what());
  } catch (const InputError& error) {
    return failed(kExitInput, "InputError", error.what());
  } catch (const EnvironmentError& error) {
    return failed(kExitEnvironment, "MachineError", error.what());
  } catch (const RunError& error) {
    return failed(kExitRun, "RunError", error.what());
  } catch (const std::bad_alloc&) {
    return failed(kExitEnvironment, "MachineError", "this machine has too little memory for that");
  } catch (const Interrupted&) {
    return {kExitInterrupted, "", ""};
  } catch (const std::exception& error) {
    return failed(kExitBug, "InternalError", error.what());
  }
}

// False, with Python's error set, where `object` is no bytes.
bool ReadBytes(PyObject* object, std::string& target) {
  char* data = nullptr;
  Py_ssize_t size = 0;
  if (PyBytes_AsStringAndSize(object, &data, &size) != 0) {
    return false;
  }
  target.assign(data, static_cast<std::size_t>(size));
  return true;
}

bool ReadWords(PyObject* list, std::vector<std::string>& words) {
  const Py_ssize_t count = PyList_Size(list);
  words.resize(count < 0 ? 0 : static_cast<std::size_t>(count));
  for (Py_ssize_t i = 0; i < count; ++i) {
    if (!ReadBytes(PyList_GetItem(list, i), words[static_cast<std::size_t>(i)])) {
      return false;
    }
  }
  return count >= 0;
}

// Runs the command in a thread of its own while this one, which may be Python's main thread, asks
// for signals: Ctrl-C ends a search, and is Python's to raise.
PyObject* Run(PyObject* /*module*/, PyObject* arguments) {
  PyObject* words = nullptr;
  PyObject* input = nullptr;
  PyObject* source = nullptr;
  Call call;
  if (PyArg_ParseTuple(arguments, "OOO:run", &words, &input, &source) == 0 ||
      !ReadWords(words, call.words) || !ReadBytes(input, call.input) ||
      !ReadBytes(source, call.source)) {
    return nullptr;
  }
  std::atomic<bool> stop{false};
  std::promise<Outcome> promise;
  std::future<Outcome> command = promise.get_future();
  std::jthread thread;
  try {
    thread = StartThread<std::jthread>([&] { promise.set_value(RunGuarded(call, stop)); });
  } catch (const EnvironmentError& error) {
    promise.set_value({kExitEnvironment, "MachineError", error.what()});
  }
  bool is_interrupted = false;
  for (bool is_over = false; !is_over;) {
    constexpr std::chrono::milliseconds kPause{20};
    PyThreadState* const state = PyEval_SaveThread();
    // After an interrupt nothing but the end is waited for: Python's error is set.
    if (is_interrupted) {
      command.wait();
    }
    is_over = command.wait_for(kPause) == std::future_status::ready;
    PyEval_RestoreThread(state);
    if (!is_over && !is_interrupted && PyErr_CheckSignals() != 0) {
      is_interrupted = true;
      stop.store(true);
    }
  }
  const Outcome outcome = command.get();
  if (is_interrupted) {
    return nullptr;
  }
  return Py_BuildValue("isy#", outcome.code, outcome.kind, outcome.text.data(),
                       static_cast<Py_ssize_t>(outcome.text.size()));
}

std::array<PyMethodDef, 2> methods = {{
    {"run", Run, METH_VARARGS, "run(words, input, source) -> (exit code, kind of error, bytes)"},
    {nullptr, nullptr, 0, nullptr},
}};

PyModuleDef definition = {PyModuleDef_HEAD_INIT,
                          "shardwright._native",
                          "Command lines of shardwright, run in this process.",
                          -1,
                          methods.data(),
                          nullptr,
                          nullptr,
                          nullptr,
                          nullptr};

}  // namespace
}  // namespace shardwright

// NOLINTNEXTLINE: the name that Python looks for
PyMODINIT_FUNC PyInit__native() {
  PyObject* const module = PyModule_Create(&shardwright::definition);
  if (module != nullptr &&
      PyModule_AddStringConstant(module, "__version__", shardwright::kVersion) != 0) {
    Py_DecRef(module);
    return nullptr;
  }
  return module;
}
