// `nvidia-smi topo -m` as people paste it: tabs or spaces, columns glued together, colours of the
// terminal, with and without the columns behind the matrix.

#include <cctype>
#include <charconv>
#include <iterator>
#include <numeric>
#include <sstream>
#include <string>
#include <string_view>
#include <vector>

#include "core/error.h"
#include "core/ranges.h"
#include "core/text.h"
#include "topologies/internal/machine.h"

namespace shardwright::internal {
namespace {

constexpr std::size_t kMostDevices = 512;

// How near two devices are on PCIe, nearest first.
enum class Near : std::uint8_t { kSelf, kPix, kPxb, kPhb, kNode, kSys, kNvlink };

struct Cell {
  Near near = Near::kSys;
  std::int64_t links = 0;
};

struct Matrix {
  std::vector<std::string> names;
  std::vector<std::vector<Cell>> cells;
  std::vector<std::int64_t> numa;  // by device; -1: not shown
};

// Without escape sequences ("\x1b[4m"), carriage returns and other control characters.
std::string Cleaned(std::string_view text) {
  std::string clean;
  for (std::size_t i = 0; i < text.size(); ++i) {
    const char c = text[i];
    if (c == '\x1b') {
      while (i + 1 < text.size() && std::isalpha(static_cast<unsigned char>(text[i])) == 0) {
        ++i;
      }
    } else if (c == '\n' || static_cast<unsigned char>(c) >= 0x20) {
      clean += c;
    } else {
      clean += ' ';
    }
  }
  return clean;
}

std::vector<std::string> WordsOf(const std::string& line) {
  std::istringstream words(line);
  return {std::istream_iterator<std::string>(words), {}};
}

bool IsGpu(std::string_view name) {
  return name.starts_with("GPU") && name.size() > 3 &&
         std::isdigit(static_cast<unsigned char>(name[3])) != 0;
}

// "CPU", "NUMA" and "GPU" begin the columns behind the matrix.
bool IsDevice(std::string_view word) {
  return IsGpu(word) || word.starts_with("NIC") || word.starts_with("mlx") ||
         word.starts_with("MLNX") || word.starts_with("bnxt") || word.starts_with("efa") ||
         word.starts_with("rdmap") || word.starts_with("irdma") || word.starts_with("ib") ||
         word.starts_with("roce") || word.starts_with("rocep");
}

bool ReadCell(std::string_view word, Cell& cell) {
  static constexpr std::pair<std::string_view, Near> kCodes[] = {
      {"X", Near::kSelf},    {"PIX", Near::kPix}, {"PXB", Near::kPxb}, {"PHB", Near::kPhb},
      {"NODE", Near::kNode}, {"SYS", Near::kSys}, {"SOC", Near::kSys}, {"QPI", Near::kSys}};
  for (const auto& [code, near] : kCodes) {
    if (word == code) {
      cell = {near, 0};
      return true;
    }
  }
  if (!word.starts_with("NV")) {
    return false;
  }
  const auto [end, error] = std::from_chars(word.data() + 2, word.data() + word.size(), cell.links);
  cell.near = Near::kNvlink;
  return error == std::errc() && end == word.data() + word.size() && cell.links > 0 &&
         cell.links <= 1024;
}

// The NUMA node behind the list of CPUs: "0-55,112-167 0 N/A". Glued columns tell nothing.
std::int64_t NumaOf(const std::vector<std::string>& words, std::size_t behind) {
  const std::int64_t numa =
      behind + 1 < words.size() ? IntegerIn(words[behind + 1]).value_or(-1) : -1;
  return numa >= 0 && numa < 1024 ? numa : -1;
}

Matrix ReadMatrix(std::string_view text, const std::string& file) {
  const std::string clean = Cleaned(text);
  Matrix matrix;
  std::int64_t number = 0;
  std::size_t at = 0;
  while (at <= clean.size()) {
    const std::size_t end = std::min(clean.find('\n', at), clean.size());
    const std::vector<std::string> words = WordsOf(clean.substr(at, end - at));
    at = end + 1;
    ++number;
    const std::string where = file + ": line " + std::to_string(number);
    if (matrix.names.empty()) {
      // The header: nothing but devices, then the other columns.
      if (words.size() >= 1 && IsGpu(words[0]) &&
          (words.size() == 1 || IsDevice(words[1]) || words[1] == "CPU")) {
        for (const std::string& word : words) {
          if (!IsDevice(word)) {
            break;
          }
          matrix.names.push_back(word);
        }
        if (matrix.names.size() > kMostDevices) {
          throw InputError(where, std::to_string(matrix.names.size()) + " devices",
                           "at most " + std::to_string(kMostDevices));
        }
      }
      continue;
    }
    const std::size_t row = matrix.cells.size();
    if (row == matrix.names.size() || words.empty()) {
      continue;  // the legend, or a blank line
    }
    if (words[0] != matrix.names[row]) {
      throw InputError(where, '"' + words[0].substr(0, 40) + '"',
                       "the row of " + matrix.names[row]);
    }
    std::vector<Cell> cells(matrix.names.size());
    for (std::size_t i = 0; i < cells.size(); ++i) {
      if (i + 1 >= words.size() || !ReadCell(words[i + 1], cells[i])) {
        throw InputError(where,
                         i + 1 < words.size() ? '"' + words[i + 1].substr(0, 40) + '"'
                                              : std::string("the end of the row"),
                         "X, NV#, PIX, PXB, PHB, NODE or SYS for " + matrix.names[i]);
      }
    }
    matrix.cells.push_back(std::move(cells));
    matrix.numa.push_back(NumaOf(words, matrix.names.size() + 1));
  }
  if (matrix.names.empty()) {
    throw InputError(file, "no header with GPU0", "what nvidia-smi topo -m prints");
  }
  if (matrix.cells.size() != matrix.names.size()) {
    throw InputError(file, std::to_string(matrix.cells.size()) + " rows",
                     "one for each of the " + std::to_string(matrix.names.size()) + " devices");
  }
  return matrix;
}

// Sets of devices that are at most this far from each other.
class Groups {
 public:
  explicit Groups(std::size_t count) : parent_(count) {
    std::iota(parent_.begin(), parent_.end(), std::size_t{0});
  }
  std::size_t Find(std::size_t i) {
    while (parent_[i] != i) {
      i = parent_[i] = parent_[parent_[i]];
    }
    return i;
  }
  void Join(std::size_t a, std::size_t b) {
    parent_[std::max(Find(a), Find(b))] = std::min(Find(a), Find(b));
  }

 private:
  std::vector<std::size_t> parent_;
};

Groups GroupsUpTo(const Matrix& matrix, Near most) {
  Groups groups(matrix.names.size());
  for (std::size_t i = 0; i < matrix.names.size(); ++i) {
    for (std::size_t j = 0; j < i; ++j) {
      if (matrix.cells[i][j].near <= most) {
        groups.Join(i, j);
      }
    }
  }
  return groups;
}

// Sockets: what is not further than NODE, or on one NUMA node. NVLink hides how far GPUs are on
// PCIe.
Groups SocketsOf(const Matrix& matrix, std::vector<std::string>& notes) {
  Groups sockets = GroupsUpTo(matrix, Near::kNode);
  bool any_numa = false;
  for (std::size_t i = 0; i < matrix.names.size(); ++i) {
    for (std::size_t j = 0; j < i; ++j) {
      if (matrix.numa[i] >= 0 && matrix.numa[i] == matrix.numa[j]) {
        sockets.Join(i, j);
      }
    }
    any_numa = any_numa || matrix.numa[i] >= 0;
  }
  // A GPU that only NVLink joins to the others.
  for (std::size_t i = 0; i < matrix.names.size(); ++i) {
    const auto is_lost = [&](std::size_t j) {
      return i == j || matrix.cells[i][j].near == Near::kNvlink;
    };
    std::vector<std::size_t> all(matrix.names.size());
    std::iota(all.begin(), all.end(), std::size_t{0});
    if (!any_numa && i > 0 && AllOf(all, is_lost)) {
      sockets.Join(i, 0);
      if (i == 1) {
        notes.emplace_back("sockets: not seen, all GPUs are taken to be on one");
      }
    }
  }
  return sockets;
}

// NV# to a switch counts all links of the GPU; between two GPUs only those that join them.
void AddNvlinks(const Matrix& matrix, const std::vector<std::int32_t>& parts,
                const TopologyOptions& options, Machine& machine) {
  std::vector<std::size_t> gpus;
  for (std::size_t i = 0; i < matrix.names.size(); ++i) {
    if (IsGpu(matrix.names[i])) {
      gpus.push_back(i);
    }
  }
  machine.knows_nvlink = true;
  const std::int64_t own = NvlinksOf(FindGpu(options.gpu, "--gpu")).links;
  std::int64_t most = 0;
  for (const std::size_t i : gpus) {
    const std::int64_t sum = Summed<std::int64_t>(
        gpus, [&](const std::size_t j) { return i == j ? 0 : matrix.cells[i][j].links; });
    most = std::max(most, sum);
  }
  const bool has_switch = gpus.size() > 2 && most > own;
  for (const std::size_t i : gpus) {
    std::int64_t links = 0;
    for (const std::size_t j : gpus) {
      const std::int64_t count = i == j ? 0 : matrix.cells[i][j].links;
      links = std::max(links, count);
      if (!has_switch && count > 0) {
        machine.nvlinks.push_back({parts[i], parts[j], count});
      }
    }
    if (has_switch && links > 0) {
      machine.nvlinks.push_back({parts[i], Machine::kSwitchPeer, links});
    }
  }
}

}  // namespace

Machine ReadTopoMatrix(std::string_view text, const std::string& file,
                       const TopologyOptions& options) {
  const Matrix matrix = ReadMatrix(text, file);
  if (options.gpu.empty()) {
    throw InputError(file, "nothing that says which GPU it is", "--gpu NAME",
                     "shardwright list gpus shows the names");
  }
  Machine machine;
  Groups sockets = SocketsOf(matrix, machine.notes);
  Groups roots = GroupsUpTo(matrix, Near::kPxb);
  Groups switches = GroupsUpTo(matrix, Near::kPix);
  const std::size_t count = matrix.names.size();
  std::vector<std::int32_t> cpus(count, -1), upper(count, -1), lower(count, -1), parts(count, -1);
  const auto find = [&](Groups& groups, std::vector<std::int32_t>& known, std::size_t device,
                        Machine::Kind kind, std::int32_t parent) {
    std::int32_t& part = known[groups.Find(device)];
    part = part < 0 ? machine.Add(kind, parent) : part;
    return part;
  };
  for (std::size_t i = 0; i < count; ++i) {
    const std::int32_t cpu = find(sockets, cpus, i, Machine::Kind::kCpu, -1);
    const std::int32_t root = find(roots, upper, i, Machine::Kind::kSwitch, cpu);
    const std::int32_t near = find(switches, lower, i, Machine::Kind::kSwitch, root);
    parts[i] =
        machine.Add(IsGpu(matrix.names[i]) ? Machine::Kind::kGpu : Machine::Kind::kNic, near);
  }
  AddNvlinks(matrix, parts, options, machine);
  return machine;
}

}  // namespace shardwright::internal
