#include "tests/planner/run_files.h"

#include <fstream>

#include <unistd.h>

#include "core/error.h"
#include "schedule/wrap.h"

namespace shardwright::testing {
namespace {

// Another one for each folder of each process.
std::filesystem::path FolderPath() {
  static int count = 0;
  return std::filesystem::temp_directory_path() /
         ("shardwright_import_run_test." + std::to_string(::getpid()) + "." +
          std::to_string(++count));
}

}  // namespace

Folder::Folder() : path_(FolderPath()) {
  std::filesystem::remove_all(path_);
  std::filesystem::create_directory(path_);
}

Folder::~Folder() {
  std::filesystem::remove_all(path_);
}

std::string Folder::Write(const std::string& name, const std::string& text) const {
  std::ofstream(path_ / name, std::ios::binary) << text;
  return (path_ / name).string();
}

RunSettings Read(const Folder& folder, const Files& files) {
  std::vector<std::string> paths;
  for (const auto& [name, text] : files) {
    paths.push_back(folder.Write(name, text));
  }
  return ReadRun(paths);
}

PlanFile Base(std::int64_t nodes) {
  PlanFile file;
  file.job.sequence_length = 128;
  file.cluster = LoadCluster("dgx-a100", nodes, 4);
  file.kernels = FindKernelSet("torch-eager", "test");
  file.profile = DefaultProfile(file.cluster.gpu, file.kernels.name);
  file.model = LoadModelForJob("gpt2", file.job, Path("test"));
  file.plan.shard_size = file.cluster.RankCount();
  file.plan.replicate_size = 1;
  file.plan.micro_batch = file.plan.accumulation = 1;
  file.plan.units = Wrap(file.model, ParseWrap("block", "test"), {}, Dialect::kFsdp2, "test");
  return file;
}

PlanFile Imported(const Files& files, std::int64_t nodes) {
  const Folder folder;
  PlanFile file = Base(nodes);
  ApplyRun(Read(folder, files), file);
  CheckPlan(file, file.plan, "test");
  return file;
}

std::string ErrorOf(const Files& files, std::int64_t nodes) {
  const Folder folder;
  try {
    PlanFile file = Base(nodes);
    ApplyRun(Read(folder, files), file);
  } catch (const InputError& error) {
    std::string text = error.what();
    const std::string prefix = (folder.path() / "").string();
    for (std::size_t at = text.find(prefix); at != std::string::npos; at = text.find(prefix)) {
      text.erase(at, prefix.size());
    }
    return text;
  }
  return "no error";
}

}  // namespace shardwright::testing
