#include "cli/sweep_axes.h"

#include "core/text.h"

namespace shardwright {
namespace {

constexpr std::size_t kMostValues = 1000;
constexpr double kLargestScale = 1000.0;

// "A..B" or "A..B:S".
void AppendRange(const Flag& flag, const std::string& text, std::size_t dots, std::int64_t max,
                 std::vector<std::int64_t>& values) {
  const std::size_t colon = text.find(':', dots);
  const std::int64_t first = ReadCount({flag.name, text.substr(0, dots)}, 1, max);
  const std::string last_text =
      text.substr(dots + 2, colon == std::string::npos ? colon : colon - dots - 2);
  const std::int64_t last = ReadCount({flag.name, last_text}, 1, max);
  const std::int64_t step =
      colon == std::string::npos ? 0 : ReadCount({flag.name, text.substr(colon + 1)}, 1, max);
  if (last < first) {
    RefuseFlag(flag, "a range from the smaller to the larger number");
  }
  for (std::int64_t v = first; v <= last; v += step == 0 ? v : step) {
    values.push_back(v);
    if (values.size() > kMostValues) {
      RefuseFlag(flag, "at most " + std::to_string(kMostValues) + " values");
    }
  }
}

}  // namespace

std::vector<std::int64_t> ReadCounts(const Flag& flag, std::int64_t max) {
  std::vector<std::int64_t> values;
  for (const std::string& part : ReadList(flag)) {
    const std::size_t dots = part.find("..");
    if (dots == std::string::npos) {
      values.push_back(ReadCount({flag.name, part}, 1, max));
    } else {
      AppendRange(flag, part, dots, max, values);
    }
  }
  if (values.size() > kMostValues) {
    RefuseFlag(flag, "at most " + std::to_string(kMostValues) + " values");
  }
  return values;
}

std::vector<std::string> ReadMeshes(const std::string& flag, std::span<const std::string> words,
                                    std::int64_t max) {
  std::vector<std::string> meshes;
  for (const std::string& word : words) {
    const std::string name = word.substr(0, word.find('=') + 1);
    std::vector<std::string> values = {word};
    if (word.find("..") != std::string::npos) {
      values.clear();
      for (const std::int64_t count : ReadCounts({flag, word.substr(name.size())}, max)) {
        values.push_back(name + std::to_string(count));
      }
    }
    const std::vector<std::string> before = std::exchange(meshes, {});
    for (const std::string& mesh : before.empty() ? std::vector<std::string>(1) : before) {
      for (const std::string& value : values) {
        meshes.push_back(mesh.empty() ? value : mesh + ',' + value);
      }
    }
    if (meshes.size() > kMostValues) {
      RefuseFlag({flag, word}, "at most " + std::to_string(kMostValues) + " values");
    }
  }
  return meshes;
}

std::vector<double> ReadFactors(const Flag& flag) {
  std::vector<double> factors;
  for (const std::string& part : ReadList(flag)) {
    const double value = NumberIn(part).value_or(0);
    if (!(value > 0.0 && value <= kLargestScale)) {
      RefuseFlag(flag, "factors above 0 and up to 1000, such as 0.5,1,2");
    }
    factors.push_back(value);
  }
  if (factors.size() > kMostValues) {
    RefuseFlag(flag, "at most " + std::to_string(kMostValues) + " values");
  }
  return factors;
}

std::pair<std::string, std::vector<double>> ReadLevelFactors(const Flag& flag) {
  const std::size_t colon = flag.text.find(':');
  if (colon == std::string::npos) {
    return {"network", ReadFactors(flag)};
  }
  return {flag.text.substr(0, colon), ReadFactors({flag.name, flag.text.substr(colon + 1)})};
}

}  // namespace shardwright
