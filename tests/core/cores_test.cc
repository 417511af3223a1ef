// Quotas of control groups, in files as the kernel writes them.

#include "core/cores.h"

#include <filesystem>
#include <fstream>
#include <string>
#include <thread>

#include <doctest/doctest.h>

#include "tests/executor/scratch_folder.h"

namespace shardwright {
namespace {

void Write(const std::filesystem::path& file, const std::string& text) {
  std::filesystem::create_directories(file.parent_path());
  std::ofstream(file) << text;
}

TEST_CASE("A quota is CPU time over period; the smallest of a group and those around it counts") {
  const testing::ScratchFolder folder;
  const std::filesystem::path root_path = folder.path();
  const std::string root = folder.path();
  CHECK_FALSE(QuotaOfGroups("0::/a/b\n", root).has_value());
  Write(root_path / "a/b/cpu.max", "max 100000\n");
  CHECK_FALSE(QuotaOfGroups("0::/a/b\n", root).has_value());
  Write(root_path / "a/cpu.max", "150000 100000\n");
  CHECK(QuotaOfGroups("0::/a/b\n", root) == 1.5);
  Write(root_path / "a/b/cpu.max", "400000 100000\n");
  CHECK(QuotaOfGroups("0::/a/b\n", root) == 1.5);
  Write(root_path / "a/b/cpu.max", "25000 50000\n");
  CHECK(QuotaOfGroups("0::/a/b\n", root) == 0.5);
  // A container sees its own group as the root.
  Write(root_path / "cpu.max", "20000 100000\n");
  CHECK(QuotaOfGroups("0::/\n", root) == 0.2);
}

TEST_CASE("Version 1 has two files, and controllers apart") {
  const testing::ScratchFolder folder;
  const std::filesystem::path root_path = folder.path();
  const std::string root = folder.path();
  Write(root_path / "cpu/job/cpu.cfs_quota_us", "300000\n");
  Write(root_path / "cpu/job/cpu.cfs_period_us", "100000\n");
  Write(root_path / "cpu/cpu.cfs_quota_us", "-1\n");
  Write(root_path / "cpu/cpu.cfs_period_us", "100000\n");
  CHECK(QuotaOfGroups("5:cpuset:/job\n4:cpu,cpuacct:/job\n", root) == 3);
  CHECK_FALSE(QuotaOfGroups("5:cpuset:/job\n", root).has_value());
  CHECK_FALSE(QuotaOfGroups("", root).has_value());
}

TEST_CASE("This process may use between nothing and all cores") {
  CHECK(AvailableCores() > 0);
  CHECK(AvailableCores() <= std::thread::hardware_concurrency());
}

}  // namespace
}  // namespace shardwright
