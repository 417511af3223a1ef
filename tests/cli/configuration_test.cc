#include "cli/configuration.h"

#include <set>
#include <string>

#include <doctest/doctest.h>

#include "cli/command.h"

namespace shardwright::testing {

TEST_CASE("Configuration: the current folder's file sets no flag that names an output") {
  std::set<std::string> outputs;
  for (const Command& command : AllCommands()) {
    for (const FlagRow& row : command.flags) {
      if (row.file == FileRole::kWrite || row.file == FileRole::kWriteWhen) {
        outputs.insert(LongName(row));
        CHECK_MESSAGE(!IsChoice(LongName(row)), command.name << " " << row.name);
      }
    }
  }
  CHECK(outputs == std::set<std::string>{"--as-emitted", "--csv", "--output", "--patch",
                                         "--save", "--trace"});
  // What deletes, runs or connects.
  for (const char* flag : {"--keep", "--checkpoint", "--every", "--script", "--device",
                           "--loopback", "--ranks", "--unknown"}) {
    CHECK_MESSAGE(!IsChoice(flag), flag);
  }
}

}  // namespace shardwright::testing
