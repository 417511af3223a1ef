// The planner as a page in a browser, which scripts/web.sh builds and packages bring along.

#include <array>
#include <filesystem>
#include <string>
#include <system_error>

#include "cli/command.h"
#include "core/error.h"
#include "core/json.h"
#include "core/library.h"

namespace shardwright {
namespace {

constexpr const char* kPageAbout =
    R"(Writes the planner as one HTML file, which a browser opens from disk.

Examples:
  shardwright page -o shardwright.html
  shardwright page > shardwright.html

The page holds this program as WebAssembly: it asks no server, and works without a network. In a
source tree scripts/web.sh builds it; packages bring it along.)";

constexpr std::array<FlagRow, 1> kPageFlags = {{
    {"--output,-o", "FILE", "where the page goes (default: standard output, if no terminal)",
     FileRole::kWrite},
}};

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

int RunPage(const Arguments& arguments) {
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

}  // namespace

extern const Command kPageCommand;
const Command kPageCommand = {"page", kPageAbout, {}, kPageFlags, {}, RunPage};

}  // namespace shardwright
