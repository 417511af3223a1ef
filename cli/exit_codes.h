#pragma once

// What the program's exit status means; the README repeats this table.

#include "core/usage_error.h"

namespace shardwright {

enum ExitCode : int {
  kExitOk = 0,
  kExitNo = 1,             // the question was answered, and the answer is no (does not fit)
  kExitUsage = 2,          // the command line itself is wrong
  kExitInput = 3,          // a file or a name that was given is wrong
  kExitEnvironment = 4,    // this machine lacks or refuses something (disk full, no permission)
  kExitRun = 5,            // a plan failed while it ran
  kExitBug = 70,           // our bug; please report it
  kExitInterrupted = 130,  // Ctrl-C
};

}  // namespace shardwright
