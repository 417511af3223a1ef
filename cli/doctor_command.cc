// What works on this machine.

#include <array>
#include <cstdint>
#include <cstdlib>
#include <fstream>
#include <string>
#include <vector>

#include <dlfcn.h>
#include <nlohmann/json.hpp>
#include <unistd.h>

#include "cli/command.h"
#include "cli/configuration.h"
#include "cli/device_calibration.h"
#include "cli/table.h"
#include "cli/terminal.h"
#include "cli/version.h"
#include "core/json.h"

namespace shardwright {
namespace {

using Json = nlohmann::ordered_json;
using enum Table::Align;

constexpr const char* kAbout = R"(Says what works on this machine.

Examples:
  shardwright doctor
  shardwright doctor --json

Planning and simulating need nothing but the program. Everything that is missing is named with what
it is needed for.)";

struct Check {
  std::string name;
  bool works = true;
  std::string found;
  std::string needed_for;
};

// A library that is loaded only where it is there.
Check LibraryCheck(const char* name, const char* file, const char* needed_for) {
  void* library = ::dlopen(file, RTLD_LAZY | RTLD_LOCAL);
  if (library == nullptr) {
    return {name, false, std::string(file) + " is not found", needed_for};
  }
  ::dlclose(library);
  return {name, true, file, needed_for};
}

Check DeviceCheck() {
  const bool works = ::access("/dev/nvidia0", R_OK | W_OK) == 0;
  return {"NVIDIA device", works, works ? "/dev/nvidia0" : "/dev/nvidia0 is not found or not ours",
          "running plans on a GPU"};
}

Check MemoryCheck() {
  const auto pages = static_cast<std::int64_t>(::sysconf(_SC_PHYS_PAGES));
  const auto size = static_cast<std::int64_t>(::sysconf(_SC_PAGESIZE));
  return {"memory", true, Format(Bytes(pages * size)), "running plans on the CPU"};
}

Check FolderCheck() {
  const bool works = ::access(".", W_OK) == 0;
  return {"this folder", works, works ? "can be written" : "cannot be written",
          "files named with -o and --trace"};
}

Check TerminalCheck() {
  const Terminal terminal = StandardOutput();
  std::string found = terminal.is_terminal
                          ? "a terminal of " + std::to_string(terminal.width) + " columns"
                          : "no terminal";
  found += terminal.colours ? ", colours" : ", no colours";
  found += terminal.unicode ? ", UTF-8" : ", no UTF-8 (plots use ASCII)";
  return {"standard output", true, found, "colours and plots"};
}

Check ConfigurationCheck() {
  std::string found;
  for (const std::string& file : ConfigurationFiles()) {
    if (::access(file.c_str(), R_OK) == 0) {
      found += (found.empty() ? "" : ", ") + file;
    }
  }
  return {"configuration", true, found.empty() ? "none" : found, "defaults of flags"};
}

std::vector<Check> AllChecks() {
  return {
      {"program", true, kVersionText, "everything"},
      {"processor", true, MachineName(), "running plans on the CPU"},
      MemoryCheck(),
      FolderCheck(),
      TerminalCheck(),
      ConfigurationCheck(),
      DeviceCheck(),
      LibraryCheck("CUDA driver", "libcuda.so.1", "running plans on a GPU"),
      LibraryCheck("NCCL", "libnccl.so.2", "running plans on several GPUs"),
  };
}

int RunDoctor(const Arguments& arguments) {
  const std::vector<Check> checks = AllChecks();
  if (arguments.IsJson()) {
    Json json = {
        {"schema", "shardwright-doctor"}, {"schema_version", 1}, {"checks", Json::array()}};
    for (const Check& check : checks) {
      json["checks"].push_back({{"name", check.name},
                                {"works", check.works},
                                {"found", check.found},
                                {"needed_for", check.needed_for}});
    }
    arguments.Print(json.dump(2) + "\n");
    return kExitOk;
  }
  Table table({kLeft, kLeft, kLeft, kLeft});
  table.Row({"", "what", "found", "needed for"});
  for (const Check& check : checks) {
    table.Row({check.works ? "ok" : "--", check.name, check.found, check.needed_for});
  }
  arguments.Print(table.Text());
  return kExitOk;
}

}  // namespace

extern const Command kDoctorCommand;
const Command kDoctorCommand = {"doctor", kAbout, {}, {}, {}, RunDoctor};

}  // namespace shardwright
