#pragma once

// A folder of checkpoints belongs to one run.

#include <string>

namespace shardwright {

// Sixteen hexadecimal digits that no other run has.
[[nodiscard]] std::string NewRunId();

// Keeps other runs out of a folder for as long as this exists. The lock is the kernel's, on a file
// that is held open, so it is free again however the process ends.
class RunFolder {
 public:
  // Makes the folder where it is missing. Throws EnvironmentError when it cannot be made or written
  // into, or when another run is at work in it; InputError when it holds checkpoints and the run
  // does not go on from one of them (`resumes`).
  RunFolder(const std::string& folder, bool resumes);
  ~RunFolder();
  RunFolder(const RunFolder&) = delete;
  RunFolder& operator=(const RunFolder&) = delete;

  // Throws EnvironmentError unless the folder's name still leads to the folder that is locked.
  void CheckPlace() const;
  // What the lock in `folder` says of its run, in one line that no other run has; "none" where
  // there is no lock, "empty" where it says nothing.
  [[nodiscard]] static std::string LockIn(const std::string& folder);

 private:
  void Lock();

  const std::string folder_;
  int descriptor_ = -1;
};

}  // namespace shardwright
