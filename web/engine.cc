// The face of the program in a browser: the words of a command line in, what it prints out. Files
// are those of Emscripten's file system in memory, where the caller puts them.

#include <atomic>
#include <cstddef>
#include <string>
#include <vector>

#include <emscripten.h>

#include "cli/command.h"
#include "cli/command_line.h"
#include "cli/guard.h"

namespace shardwright {
namespace {

std::vector<std::string> words;  // of the next command
std::string input;               // its standard input
std::string output;              // of the last one

}  // namespace
}  // namespace shardwright

extern "C" {

// A word of the next command, behind the program's name.
EMSCRIPTEN_KEEPALIVE void shardwright_add_word(const char* word) {
  shardwright::words.emplace_back(word);
}

EMSCRIPTEN_KEEPALIVE void shardwright_set_input(const char* text) {
  shardwright::input = text;
}

// Runs the words that were added, and forgets them. Returns the exit code.
EMSCRIPTEN_KEEPALIVE int shardwright_run() {
  using namespace shardwright;
  std::vector<const char*> argv = {"shardwright"};
  for (const std::string& word : words) {
    argv.push_back(word.c_str());
  }
  output.clear();
  // A search ends when the worker does; the flag only says that no signal will come.
  static const std::atomic<bool> never{false};
  const Streams streams = {.read = [] { return input; },
                           .write = [](const std::string& text) { output += text; },
                           .source = "the text that was given",
                           .stop = &never};
  const int code = GuardedRun(
      [&] { return RunCommandLine(static_cast<int>(argv.size()), argv.data(), streams); });
  words.clear();
  input.clear();
  return code;
}

// What the last command printed on standard output.
EMSCRIPTEN_KEEPALIVE const char* shardwright_output() {
  return shardwright::output.data();
}
EMSCRIPTEN_KEEPALIVE std::size_t shardwright_output_size() {
  return shardwright::output.size();
}

}  // extern "C"
