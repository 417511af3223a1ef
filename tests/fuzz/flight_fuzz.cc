// Dumps of PyTorch's Flight Recorder, as pickle or JSON.

#include "tests/fuzz/fuzz.h"
#include "traces/flight_recorder.h"

namespace shardwright::fuzz {

void Read(std::string_view bytes) {
  (void)ReadFlightDump(FileWith(bytes));
}

}  // namespace shardwright::fuzz
