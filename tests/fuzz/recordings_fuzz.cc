// Folders of traces: up to four files whose names say little of what they hold. A first byte per
// file says its name and how much of the input is in it.

#include <array>

#include "cli/recordings.h"
#include "tests/fuzz/choices.h"

namespace shardwright::fuzz {

void Read(std::string_view bytes) {
  static const std::string folder = FolderInMemory("traces");
  constexpr std::array<const char*, 8> kNames = {"0.json", "1.json.gz", "2.json",  "3.sqlite",
                                                 "4.json", "5.sqlite",  ".6.json", "7.json"};
  for (const char* name : kNames) {
    (void)::unlink((folder + "/" + name).c_str());
  }
  Choices choices(bytes);
  constexpr int kMostFiles = 4;
  for (int i = 0; i < kMostFiles && choices.left() > 0; ++i) {
    const std::uint8_t byte = choices.Byte();
    constexpr std::uint8_t kAll = 128;
    constexpr std::size_t kPiece = 64;
    const std::size_t most = byte >= kAll ? choices.left() : kPiece * (1 + byte / 8U);
    Put(folder + "/" + kNames[byte % kNames.size()], choices.Take(most));
  }
  for (const std::string& file : TraceFilesOf({folder})) {
    try {
      (void)ReadRecording(file);
    } catch (const InputError&) {
    }
  }
  (void)ReadRecordings(TraceFilesOf({folder}));
}

}  // namespace shardwright::fuzz
