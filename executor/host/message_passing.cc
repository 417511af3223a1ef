#include "executor/host/message_passing.h"

#include "core/error.h"
#include "core/library.h"

namespace shardwright {
namespace {

constexpr const char* kModule = "shardwright_mpi.so";

}  // namespace

MessagePassing& JoinProcesses(std::chrono::milliseconds timeout) {
  const std::string folder = ProgramFolder();
  std::string problem;
  // In the build tree the module lies beside the program, installed in lib/shardwright.
  for (const std::string& where : {folder, folder + "../lib/shardwright/"}) {
    // Open MPI's own plugins need its symbols: RTLD_GLOBAL.
    void* module = OpenLibrary(where + kModule, &problem, RTLD_GLOBAL);
    if (module != nullptr) {
      MessagePassing* (*join)(std::chrono::milliseconds) = nullptr;
      if (!FindFunction(module, "ShardwrightJoinProcesses", &join)) {
        throw EnvironmentError(where + kModule + ": this is no module of shardwright");
      }
      return *join(timeout);
    }
  }
  throw EnvironmentError("started by mpirun, but MPI cannot be used: " + problem +
                         "; install libopenmpi-dev and build again");
}

}  // namespace shardwright
