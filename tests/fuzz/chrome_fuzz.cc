// Traces of our own: of one program, and the header of any.

#include "tests/fuzz/fuzz.h"
#include "tests/traces/tiny_program.h"
#include "traces/chrome_read.h"

namespace shardwright::fuzz {

void Read(std::string_view bytes) {
  static const Program program = testing::TinyProgram("layer", "layer.linear");
  const std::string file = FileWith(bytes);
  (void)ReadTraceHeader(file);
  (void)ReadChromeTrace(file, program);
}

}  // namespace shardwright::fuzz
