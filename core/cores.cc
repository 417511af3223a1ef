#include "core/cores.h"

#include <algorithm>
#include <cstddef>
#include <fstream>
#include <sstream>
#include <thread>

#ifdef __linux__
#include <sched.h>
#endif

namespace shardwright {
namespace {

// A file's words, as far as there are: "200000 100000" or "max 100000".
std::optional<double> FirstNumber(std::istream& words) {
  double number = 0;
  if (!(words >> number) || number <= 0) {
    return std::nullopt;
  }
  return number;
}

// Version 2 has quota and period in one file, version 1 in two; a quota of -1 or "max" is none.
std::optional<double> QuotaOf(const std::string& folder) {
  std::ifstream both(folder + "/cpu.max");
  std::ifstream quota_file(folder + "/cpu.cfs_quota_us");
  std::ifstream period_file(folder + "/cpu.cfs_period_us");
  const bool is_second = both.is_open();
  const std::optional<double> quota = FirstNumber(is_second ? both : quota_file);
  if (!quota) {
    return std::nullopt;
  }
  const std::optional<double> period = FirstNumber(is_second ? both : period_file);
  return period ? std::optional(*quota / *period) : std::nullopt;
}

std::optional<double> Smaller(std::optional<double> a, std::optional<double> b) {
  return a && b ? std::min(*a, *b) : a ? a : b;
}

bool HasCpu(std::string_view controllers) {
  return ("," + std::string(controllers) + ",").find(",cpu,") != std::string::npos;
}

double CoresAllowed() {
#ifdef __linux__
  cpu_set_t set;
  CPU_ZERO(&set);
  if (sched_getaffinity(0, sizeof set, &set) == 0) {
    return CPU_COUNT(&set);
  }
#endif
  return std::thread::hardware_concurrency();
}

}  // namespace

std::optional<double> QuotaOfGroups(std::string_view groups, const std::string& root) {
  std::optional<double> least;
  std::istringstream lines{std::string(groups)};
  for (std::string line; std::getline(lines, line);) {
    // "0::/path" or "4:cpu,cpuacct:/path"
    const std::size_t first = line.find(':');
    const std::size_t second = line.find(':', first == std::string::npos ? first : first + 1);
    if (second == std::string::npos) {
      continue;
    }
    const std::string controllers = line.substr(first + 1, second - first - 1);
    if (!controllers.empty() && !HasCpu(controllers)) {
      continue;
    }
    const std::string mount = controllers.empty() ? root : root + "/cpu";
    std::string path = line.substr(second + 1);
    while (true) {
      least = Smaller(least, QuotaOf(mount + path));
      const std::size_t slash = path.rfind('/');
      if (path.empty() || slash == std::string::npos) {
        break;
      }
      path.resize(slash);
    }
  }
  return least;
}

double AvailableCores() {
#ifdef __EMSCRIPTEN__
  return 0;
#else
  std::ifstream file("/proc/self/cgroup");
  std::ostringstream groups;
  groups << file.rdbuf();
  const std::optional<double> quota = QuotaOfGroups(groups.str(), "/sys/fs/cgroup");
  const double allowed = CoresAllowed();
  return quota ? std::min(*quota, allowed) : allowed;
#endif
}

}  // namespace shardwright
