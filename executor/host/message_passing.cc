#include "executor/host/message_passing.h"

#include <string>

#include <dlfcn.h>
#include <unistd.h>

#include "core/error.h"

namespace shardwright {
namespace {

constexpr const char* kModule = "shardwright_mpi.so";

// The folder of this program, with a slash at its end.
std::string ProgramFolder() {
  std::string path(4096, '\0');
  const ssize_t length = ::readlink("/proc/self/exe", path.data(), path.size());
  path.resize(length > 0 ? static_cast<std::size_t>(length) : 0);
  return path.substr(0, path.rfind('/') + 1);
}

}  // namespace

MessagePassing& JoinProcesses(std::chrono::milliseconds timeout) {
  const std::string folder = ProgramFolder();
  std::string problem;
  // In the build tree the module lies beside the program, installed in lib/shardwright.
  for (const std::string& where : {folder, folder + "../lib/shardwright/"}) {
    // Open MPI's own plugins need its symbols: RTLD_GLOBAL.
    void* module = ::dlopen((where + kModule).c_str(), RTLD_NOW | RTLD_GLOBAL);
    if (module != nullptr) {
      using Join = MessagePassing* (*)(std::chrono::milliseconds);
      const auto join = reinterpret_cast<Join>(::dlsym(module, "ShardwrightJoinProcesses"));
      if (join == nullptr) {
        throw EnvironmentError(where + kModule + ": this is no module of shardwright");
      }
      return *join(timeout);
    }
    problem = problem.empty() ? ::dlerror() : problem;
  }
  throw EnvironmentError("started by mpirun, but MPI cannot be used: " + problem +
                         "; install libopenmpi-dev and build again");
}

}  // namespace shardwright
