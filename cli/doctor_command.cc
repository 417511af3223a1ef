// What works on this machine.

#include <dlfcn.h>
#include <nlohmann/json.hpp>
#include <unistd.h>

#include "cli/command.h"
#include "cli/device_calibration.h"
#include "cli/table.h"
#include "cli/terminal.h"
#include "cli/version.h"
#include "core/error.h"
#include "core/json.h"
#include "executor/cuda/activity_log.h"
#include "executor/cuda/cublaslt.h"
#include "executor/cuda/cudnn.h"
#include "executor/cuda/nccl.h"
#include "executor/cuda/plugin.h"

namespace shardwright {
namespace {

using Json = nlohmann::ordered_json;
using enum Table::Align;

struct Check {
  std::string name;
  bool works = true;
  std::string found;
  std::string needed_for;
};

// A library by the loader of whoever uses it; `function` is one of the table that it fills.
template <class Table, class Function>
Check LibraryCheck(const char* name, std::string (*load)(Table*), Function Table::*function,
                   const char* needed_for) {
  Table table{};
  const std::string missing = load(&table);
  if (!missing.empty()) {
    return {name, false, missing, needed_for};
  }
  Dl_info where{};
  const bool is_found = ::dladdr(reinterpret_cast<void*>(table.*function), &where) != 0;
  return {name, true, is_found ? where.dli_fname : "", needed_for};
}

Check NcclCheck() {
  Check check =
      LibraryCheck("NCCL", LoadNccl, &NcclTable::get_version, "running plans on several GPUs");
  NcclTable table{};
  int version = 0;
  if (check.works && LoadNccl(&table).empty() &&
      table.get_version(&version) == NcclNumbers::kSuccess) {
    const std::string problem = DescribeNoLaunchOrder(version);
    check.found += (problem.empty() ? "" : "; warning: ") + problem;
  }
  return check;
}

// All that the CUDA device needs, but libraries that it can do without.
Check GpuCheck() {
  constexpr const char* kNeededFor = "running plans on a GPU";
  try {
    const GpuInfo info = OpenGpu(0)->Info();
    return {"CUDA device", true, info.name + ", " + Format(info.memory), kNeededFor};
  } catch (const EnvironmentError& error) {
    return {"CUDA device", false, error.what(), kNeededFor};
  }
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
  const std::string found = terminal.is_terminal ? "a terminal" : "no terminal";
  return {"standard output", true, found + (terminal.colours ? ", colours" : ", no colours"),
          "colours"};
}

std::vector<Check> AllChecks() {
  return {
      {"program", true, kVersionText, "everything"},
      {"processor", true, MachineName(), "running plans on the CPU"},
      MemoryCheck(),
      FolderCheck(),
      TerminalCheck(),
      GpuCheck(),
      LibraryCheck("cuBLASLt", LoadCublasLt, &CublasLtTable::create, "fast products on a GPU"),
      LibraryCheck("cuDNN", LoadCudnn, &CudnnTable::create,
                   "fast attention and convolutions on a GPU"),
      NcclCheck(),
      LibraryCheck("CUPTI", LoadCupti, &CuptiTable::enable, "exact times in traces of GPUs"),
  };
}

}  // namespace

int DoctorCommand(const Arguments& arguments) {
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
  table.Row({"", "what", "needed for", "found"});
  for (const Check& check : checks) {
    table.Row({check.works ? "ok" : "--", check.name, check.needed_for, check.found});
  }
  arguments.Print(table.Text());
  return kExitOk;
}

}  // namespace shardwright
