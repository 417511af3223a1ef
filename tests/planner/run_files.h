#pragma once

// Settings files of runs, written to a folder and imported.

#include <cstdint>
#include <filesystem>
#include <string>
#include <utility>
#include <vector>

#include "planner/importers/run_settings.h"
#include "schedule/plan_file.h"

namespace shardwright::testing {

// A folder for the files of one run.
class Folder {
 public:
  Folder();
  ~Folder();
  Folder(const Folder&) = delete;
  Folder& operator=(const Folder&) = delete;

  [[nodiscard]] const std::filesystem::path& path() const { return path_; }
  // Writes a file and returns its path.
  [[nodiscard]] std::string Write(const std::string& name, const std::string& text) const;

 private:
  std::filesystem::path path_;
};

using Files = std::vector<std::pair<std::string, std::string>>;  // names and texts

[[nodiscard]] RunSettings Read(const Folder& folder, const Files& files);

// GPT-2 small on `nodes` x 4 A100 with nothing chosen yet.
[[nodiscard]] PlanFile Base(std::int64_t nodes);

[[nodiscard]] PlanFile Imported(const Files& files, std::int64_t nodes = 2);

// The message without the folder; "no error" where there is none.
[[nodiscard]] std::string ErrorOf(const Files& files, std::int64_t nodes = 2);

}  // namespace shardwright::testing
