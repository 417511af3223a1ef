#include "cli/terminal.h"

#include <cstdio>
#include <cstdlib>
#include <string_view>

#include <sys/ioctl.h>
#include <unistd.h>

namespace shardwright {
namespace {

std::string_view Environment(const char* name) {
  const char* value = std::getenv(name);
  return value == nullptr ? "" : value;
}

bool IsUtf8() {
  // The first that is set decides, as setlocale does.
  for (const char* name : {"LC_ALL", "LC_CTYPE", "LANG"}) {
    const std::string_view value = Environment(name);
    if (!value.empty()) {
      return value.find("UTF-8") != std::string_view::npos ||
             value.find("utf8") != std::string_view::npos;
    }
  }
  return false;
}

}  // namespace

Terminal StandardOutput() {
  Terminal terminal;
  terminal.is_terminal = ::isatty(STDOUT_FILENO) == 1;
  terminal.colours =
      terminal.is_terminal && Environment("NO_COLOR").empty() && Environment("TERM") != "dumb";
  terminal.unicode = IsUtf8();
  winsize size{};
  if (::ioctl(STDOUT_FILENO, TIOCGWINSZ, &size) == 0 && size.ws_col > 0) {
    terminal.width = size.ws_col;
  }
  return terminal;
}

Inked::Inked(Ink ink, const Terminal& terminal) : is_on_(terminal.colours) {
  std::fputs(!is_on_ ? "" : ink == Ink::kGood ? "\x1b[32m" : "\x1b[31m", stdout);
}

Inked::~Inked() {
  std::fputs(is_on_ ? "\x1b[0m" : "", stdout);
}

}  // namespace shardwright
