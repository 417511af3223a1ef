#pragma once

// Writing a checkpoint: every rank its own file, then the manifest, then one rename.

#include <cstdint>
#include <exception>
#include <functional>
#include <mutex>
#include <optional>
#include <string>
#include <thread>
#include <vector>

#include "core/units.h"
#include "executor/checkpoint/manifest.h"

namespace shardwright {

// A stretch with its elements, in the tensor's dtype.
struct StretchData {
  SavedStretch stretch;
  DType dtype = DType::kFp32;
  const void* data = nullptr;
  std::optional<DType> saved_as = {};  // another dtype to save it in, converted on the way

  [[nodiscard]] DType SavedDType() const { return saved_as.value_or(dtype); }
};

// Between the memory that a rank trains in and any other, either way.
using MemoryCopy = std::function<void(void* to, const void* from, std::int64_t bytes)>;

// What one rank writes. Elements lie where it trains, and are read from there by `copy`, or in a
// snapshot, so that training may go on while they are written.
struct RankShare {
  std::vector<StretchData> stretches;
  MemoryCopy copy = {};  // empty: this thread can read the elements as they are
  std::vector<std::byte> snapshot = {};
};
// Is every element of its parameters and running statistics a finite number?
[[nodiscard]] bool IsFinite(const RankShare& share);
// Copies a share's elements into a snapshot of its own.
void TakeSnapshot(RankShare& share);

// One checkpoint under construction, in a temporary folder beside its final place.
class CheckpointWriter {
 public:
  // Creates the temporary folder of step `step` in `folder`.
  CheckpointWriter(const std::string& folder, std::int64_t step);
  // Removes the temporary folder unless Commit made it a checkpoint.
  ~CheckpointWriter();
  CheckpointWriter(const CheckpointWriter&) = delete;
  CheckpointWriter& operator=(const CheckpointWriter&) = delete;

  // Tells others which folder it is (UnfinishedFolder). Above 0, and nobody can know it before.
  [[nodiscard]] std::int64_t number() const { return number_; }

  // Writes and syncs the file of one rank. Several ranks may write at once.
  void WriteRank(std::int64_t rank, const RankShare& share);
  // A file that another process has written with WriteRankFile.
  void Add(SavedFile file);
  // Writes the manifest (whose files are those written) and moves the folder to its place, which
  // this returns. A checkpoint of the same step that is there already is replaced.
  std::string Commit(Manifest manifest);

 private:
  std::int64_t number_;
  std::string final_;
  std::string temporary_;
  std::mutex mutex_;  // guards files_
  std::vector<SavedFile> files_;
  bool committed_ = false;
};

// The temporary folder of step `step` that the writer of this number makes in `folder`.
[[nodiscard]] std::string UnfinishedFolder(const std::string& folder, std::int64_t step,
                                           std::int64_t number);

// The folder of the finished checkpoint of step `step` in `folder`.
[[nodiscard]] std::string CheckpointFolder(const std::string& folder, std::int64_t step);

// Writes and syncs the file of one rank into a temporary folder; neighbouring stretches of one
// tensor (states in pieces) become one. Takes memory for kPieceBytes, however large the share is.
inline constexpr std::int64_t kPieceBytes = std::int64_t{16} << 20;
[[nodiscard]] SavedFile WriteRankFile(const std::string& unfinished, std::int64_t rank,
                                      const RankShare& share);

// Runs one piece of work at a time in the background. Not to be shared between threads.
class BackgroundWriter {
 public:
  BackgroundWriter() = default;
  // Waits; an error that nobody asked for is dropped, so call Wait first.
  ~BackgroundWriter();
  BackgroundWriter(const BackgroundWriter&) = delete;
  BackgroundWriter& operator=(const BackgroundWriter&) = delete;

  // Waits for the work before, then starts `work`. Throws what the work before threw.
  void Start(std::function<void()> work);
  // Waits for the work under way and throws what it threw.
  void Wait();

 private:
  std::thread thread_;
  std::exception_ptr error_;  // written by the thread, read after joining it
};

// Makes the folder of checkpoints where it is missing. Throws EnvironmentError when it cannot be
// made or written into.
void MakeCheckpointFolder(const std::string& folder);
// Throws EnvironmentError when files cannot be made in it.
void CheckCheckpointFolder(const std::string& folder);

// Removes what interrupted writers left in a folder of checkpoints. No writer may be at work there.
void RemoveUnfinishedCheckpoints(const std::string& folder);

// The step that a folder's name says it is of: "step-<digits>".
[[nodiscard]] std::optional<std::int64_t> StepIn(const std::string& checkpoint);

// Finished checkpoints of a folder, oldest first: "step-<digits>" with a manifest. Folders that
// somebody copied or renamed ("step-00000010-backup") are not among them. None if it is no folder.
[[nodiscard]] std::vector<std::string> FinishedCheckpoints(const std::string& folder);

// Removes a run's checkpoints but the `keep` newest up to step `last`, which is one of them. Those
// of other runs, of later steps, and those whose manifest cannot be read stay. Requires keep >= 1.
void RemoveOldCheckpoints(const std::string& folder, std::int64_t keep, const std::string& run,
                          std::int64_t last);

}  // namespace shardwright
