#include "traces/measured_file.h"

#include <array>

#include "core/error.h"
#include "traces/gzip.h"

namespace shardwright {
namespace {

constexpr std::string_view kRule =
    "a trace of Shardwright or PyTorch's profiler, an SQLite export of Nsight Systems, a CUDA "
    "memory snapshot, or what nccl-tests print";

std::string Beginning(const std::string& file) {
  constexpr std::size_t kEnough = std::size_t{1} << 16;
  TextSource source(file);
  std::string text(kEnough, '\0');
  std::size_t size = 0;
  while (size < kEnough) {
    const std::size_t count = source.Read(text.data() + size, kEnough - size);
    if (count == 0) {
      break;
    }
    size += count;
  }
  text.resize(size);
  return text;
}

}  // namespace

std::string_view NameOf(MeasuredKind kind) {
  static constexpr std::array<std::string_view, kMeasuredKindCount> kNames = {
      "shardwright", "kineto", "nsight", "snapshot", "nccl-tests", "nccl-tests-json"};
  return kNames[static_cast<std::size_t>(kind)];
}

MeasuredKind DetectMeasured(const std::string& file) {
  const std::string text = Beginning(file);
  const auto has = [&](std::string_view part) { return text.find(part) != std::string::npos; };
  if (text.starts_with("SQLite format 3")) {
    return MeasuredKind::kNsight;
  }
  if (file.ends_with(".et")) {
    throw InputError(file, "a Chakra execution trace", kRule,
                     "give the profiler's trace that it was converted from");
  }
  if (text.starts_with('\x80')) {
    return MeasuredKind::kSnapshot;
  }
  if (text.starts_with("PK")) {
    throw InputError(file, "a zip file", kRule,
                     "snapshots are written by torch.cuda.memory._dump_snapshot, not torch.save");
  }
  const std::size_t first = text.find_first_not_of(" \t\r\n");
  const char begin = first == std::string::npos ? '\0' : text[first];
  if (begin == '{' || begin == '[') {
    const std::size_t events = text.find("\"traceEvents\"");
    const std::size_t ours = text.find("\"shardwright\"");
    if (ours != std::string::npos && ours < events) {
      return MeasuredKind::kTrace;
    }
    if (events != std::string::npos || has("\"schemaVersion\"") || has("\"ph\"")) {
      return MeasuredKind::kKineto;
    }
    if (has("\"results\"") || has("\"out_of_place\"") || has("\"nccl_version\"") ||
        has("\"config\"")) {
      return MeasuredKind::kNcclJson;
    }
  } else if (has("busbw") || has("algbw")) {
    return MeasuredKind::kNcclText;
  }
  if (file.ends_with(".nsys-rep") || file.ends_with(".qdrep")) {
    throw InputError(file, "a report of Nsight Systems", kRule,
                     "export it first: nsys export --type sqlite " + file);
  }
  throw InputError(file, text.empty() ? "an empty file" : "something else", kRule);
}

}  // namespace shardwright
