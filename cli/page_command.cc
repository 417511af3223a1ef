// The planner as a page in a browser, which scripts/web.sh builds and packages bring along.

#include <array>
#include <filesystem>
#include <system_error>

#include "cli/command.h"
#include "core/error.h"
#include "core/json.h"
#include "core/library.h"

namespace shardwright {
namespace {

// Beside the program as it is installed, or in the folder that it was built in.
std::string FindPage() {
  const std::filesystem::path folder = std::filesystem::path(ProgramFolder()).parent_path();
  const std::array<std::filesystem::path, 2> places = {
      folder.parent_path() / "share/shardwright/shardwright.html", folder / "web/shardwright.html"};
  for (const std::filesystem::path& place : places) {
    std::error_code ignored;
    if (std::filesystem::is_regular_file(place, ignored)) {
      return place.string();
    }
  }
  throw EnvironmentError("no " + places[0].string() + " and no " + places[1].string() +
                         "; scripts/web.sh in the source tree builds the page");
}

}  // namespace

int PageCommand(const Arguments& arguments) {
  const std::string output = arguments.Get("--output").text;
  const std::string page = ReadTextFile(FindPage());
  if (arguments.IsJson() && (output.empty() || output == "-")) {
    arguments.PrintText("page", page);
    return kExitOk;
  }
  arguments.Deliver(output, "page", page, [](const std::string& written) {
    return written.empty() ? "The planner as a page in a browser.\n" : "Wrote " + written + "\n";
  });
  return kExitOk;
}

}  // namespace shardwright
