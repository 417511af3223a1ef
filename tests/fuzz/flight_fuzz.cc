// Dumps of PyTorch's Flight Recorder, as pickle or JSON.

#include "tests/fuzz/fuzz.h"
#include "traces/flight_recorder.h"

namespace shardwright::fuzz {

void Read(std::string_view bytes) {
  // A dump's name ends with its rank, or nothing of it is read.
  (void)ReadFlightDump(FileWith(bytes, MemoryName() + "-rank_0"));
}

}  // namespace shardwright::fuzz
