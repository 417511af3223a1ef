#include "traces/nccl_tests.h"

#include <cmath>
#include <iterator>
#include <sstream>
#include <utility>

#include "core/budget.h"
#include "core/error.h"
#include "core/json.h"
#include "core/ranges.h"
#include "core/text.h"
#include "traces/internal/raw_recording.h"
#include "traces/measured_file.h"

namespace shardwright {
namespace {

constexpr double kMicrosecond = 1e-6;
constexpr std::int64_t kLargestFile = std::int64_t{64} << 20;
constexpr std::int64_t kMostLines = 1'000'000;

DType DTypeOf(std::string_view name, const std::string& where) {
  static constexpr std::pair<std::string_view, DType> kNames[] = {
      {"float", DType::kFp32},  {"bfloat16", DType::kBf16}, {"half", DType::kFp16},
      {"double", DType::kFp64}, {"int8", DType::kUint8},    {"uint8", DType::kUint8},
      {"char", DType::kUint8},  {"int32", DType::kInt32},   {"uint32", DType::kInt32},
      {"int64", DType::kInt64}, {"uint64", DType::kInt64},  {"fp8_e4m3", DType::kFp8},
      {"f8e4m3", DType::kFp8},  {"fp8_e5m2", DType::kFp8},  {"f8e5m2", DType::kFp8}};
  const auto* const found = FindIf(kNames, [&](const auto& row) { return row.first == name; });
  if (found == std::end(kNames)) {
    throw InputError(where, '"' + std::string(name.substr(0, 40)) + '"',
                     "a type of nccl-tests such as float or bfloat16");
  }
  return found->second;
}

double NumberOf(std::string_view text, const std::string& where) {
  const double value = NumberIn(text).value_or(-1);
  if (!std::isfinite(value) || value < 0) {
    throw InputError(where, Quoted(text.substr(0, 40)), "a number, 0 or more");
  }
  return value;
}

void AddRow(double size, DType dtype, double microseconds, const std::string& where,
            CollectiveTest& test) {
  constexpr double kMostBytes = 1e15;
  constexpr double kMostMicroseconds = 1e12;
  if (size > kMostBytes || size != std::floor(size) || microseconds > kMostMicroseconds) {
    throw InputError(where, "a size or time that no test has", "bytes and microseconds");
  }
  if (size > 0 && microseconds > 0) {
    test.rows.push_back(
        {Bytes(static_cast<std::int64_t>(size)), dtype, Seconds(microseconds * kMicrosecond)});
  }
}

std::vector<std::string> WordsOf(const std::string& line) {
  std::istringstream stream(line);
  std::vector<std::string> words;
  std::string word;
  constexpr std::size_t kMost = 64;  // the widest row has 13
  while (words.size() < kMost && stream >> word) {
    words.push_back(word);
  }
  return words;
}

// Where the columns stand; those of the present version until a header says otherwise.
struct Columns {
  std::size_t type = 2;
  std::size_t time = 5;
};

void ReadComment(const std::string& line, Columns& columns, std::optional<OpCode>& op,
                 CollectiveTest& test) {
  std::vector<std::string> words = WordsOf(line);
  if (!words.empty() && words[0] == "#") {
    words.erase(words.begin());
  }
  const auto time = FindIn(words, "time");
  if (!words.empty() && words[0] == "size" && time != words.end()) {
    columns.time = static_cast<std::size_t>(time - words.begin());
    columns.type = static_cast<std::size_t>(std::find(words.begin(), time, "type") - words.begin());
  } else if (words.size() > 2 && words[0] == "Rank") {
    ++test.ranks;
  } else if (line.find("Collective test starting") != std::string::npos) {
    op = internal::CollectiveOfName(line.substr(line.find(':') + 1));
  }
}

std::optional<OpCode> ReadText(const std::string& text, CollectiveTest& test) {
  std::istringstream stream(text);
  std::string line;
  Columns columns;
  std::optional<OpCode> op;
  Budget lines(test.file, "lines", kMostLines);
  for (std::int64_t number = 1; std::getline(stream, line); ++number) {
    lines.Take();
    const std::size_t first = line.find_first_not_of(" \t\r");
    if (first == std::string::npos) {
      continue;
    }
    const std::string where = test.file + ": line " + std::to_string(number);
    if (line[first] == '#') {
      ReadComment(line, columns, op, test);
    } else if (line[first] >= '0' && line[first] <= '9') {
      const std::vector<std::string> words = WordsOf(line);
      if (words.size() <= std::max(columns.time + 2, columns.type)) {
        throw InputError(where, std::to_string(words.size()) + " columns",
                         "a row of nccl-tests: size count type redop root time algbw busbw ...");
      }
      AddRow(NumberOf(words[0], where), DTypeOf(words[columns.type], where),
             NumberOf(words[columns.time], where), where, test);
    }
    // Anything else is chatter of launchers and NCCL's own log.
  }
  return op;
}

std::optional<OpCode> ReadJson(CollectiveTest& test) {
  const JsonValue root = JsonValue::ReadFile(test.file);
  std::optional<OpCode> op;
  if (const auto config = root.Find("config"); config && config->IsObject()) {
    for (const std::string& key : config->Keys()) {
      const auto value = config->Find(key);
      if (!op && value && value->IsString() &&
          value->AsString().find("_perf") != std::string::npos) {
        op = internal::CollectiveOfName(value->AsString());
      }
    }
  }
  if (const auto devices = root.Find("devices"); devices && devices->IsArray()) {
    test.ranks = static_cast<std::int64_t>(devices->size());
  }
  const JsonValue results = root.At("results");
  for (std::size_t i = 0; i < results.size(); ++i) {
    const JsonValue row = results[i];
    const std::string where = row.path().str();
    AddRow(row.At("size").AsDouble(), DTypeOf(row.At("type").AsString(), where),
           row.At("out_of_place").At("time").AsDouble(), where, test);
  }
  return op;
}

}  // namespace

CollectiveTest ReadCollectiveTest(const std::string& file, const std::optional<std::string>& op) {
  CollectiveTest test;
  test.file = file;
  std::optional<OpCode> found = DetectMeasured(file) == MeasuredKind::kNcclJson
                                    ? ReadJson(test)
                                    : ReadText(ReadTextFile(file, kLargestFile), test);
  if (op) {
    found = internal::CollectiveOfName(*op);
    if (!found) {
      throw InputError("--op", '"' + *op + '"', "all_gather, reduce_scatter, all_reduce, ...");
    }
  }
  if (!found) {
    throw InputError(file, "no line that names the collective", "one, or --op all_gather",
                     "older nccl-tests do not print it");
  }
  if (test.rows.empty()) {
    throw InputError(file, "no rows with sizes and times", "the table that nccl-tests print");
  }
  test.op = *found;
  return test;
}

}  // namespace shardwright
