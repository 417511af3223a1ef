#include "cli/terminal.h"

#include <cstdio>
#include <cstdlib>
#include <string_view>

#include <unistd.h>

namespace shardwright {
namespace {

std::string_view Environment(const char* name) {
  const char* value = std::getenv(name);
  return value == nullptr ? "" : value;
}

}  // namespace

Terminal StandardOutput() {
  Terminal terminal;
  terminal.is_terminal = ::isatty(STDOUT_FILENO) == 1;
  terminal.colours =
      terminal.is_terminal && Environment("NO_COLOR").empty() && Environment("TERM") != "dumb";
  return terminal;
}

Inked::Inked(Ink ink, const Terminal& terminal) : is_on_(terminal.colours) {
  std::fputs(!is_on_ ? "" : ink == Ink::kGood ? "\x1b[32m" : "\x1b[31m", stdout);
}

Inked::~Inked() {
  std::fputs(is_on_ ? "\x1b[0m" : "", stdout);
}

}  // namespace shardwright
