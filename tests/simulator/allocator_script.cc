#include "tests/simulator/allocator_script.h"

#include <charconv>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <map>
#include <optional>
#include <sstream>
#include <stdexcept>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "core/units.h"
#include "simulator/caching_allocator.h"

namespace shardwright {
namespace {

[[noreturn]] void Unreadable(std::string_view text) {
  throw std::runtime_error("allocator script: cannot read \"" + std::string(text) + "\"");
}

double ParseNumber(std::string_view text) {
  double value = 0;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), value);
  if (error != std::errc() || end != text.data() + text.size()) {
    Unreadable(text);
  }
  return value;
}

std::int64_t ParseInteger(std::string_view text) {
  const double value = ParseNumber(text);
  if (value != std::floor(value)) {
    Unreadable(text);
  }
  return static_cast<std::int64_t>(value);
}

std::int64_t ParseTerm(std::string_view text) {
  const std::pair<std::string_view, Bytes> units[] = {{"KiB", kKiB}, {"MiB", kMiB}, {"GiB", kGiB}};
  for (const auto& [suffix, unit] : units) {
    if (text.ends_with(suffix)) {
      const double value = ParseNumber(text.substr(0, text.size() - suffix.size())) *
                           static_cast<double>(unit.value);
      if (value != std::floor(value)) {
        Unreadable(text);
      }
      return static_cast<std::int64_t>(value);
    }
  }
  return ParseInteger(text);
}

// "20MiB-1.5MiB+512": terms with signs.
std::int64_t ParseSize(std::string_view text) {
  std::int64_t sum = 0;
  std::int64_t sign = 1;
  std::size_t begin = 0;
  for (std::size_t i = 0; i <= text.size(); ++i) {
    if (i == text.size() || text[i] == '+' || text[i] == '-') {
      sum += sign * ParseTerm(text.substr(begin, i - begin));
      sign = i < text.size() && text[i] == '-' ? -1 : 1;
      begin = i + 1;
    }
  }
  return sum;
}

using Words = std::vector<std::string>;

Words SplitWords(const std::string& line) {
  std::istringstream stream(line.substr(0, line.find('#')));
  Words words;
  for (std::string word; stream >> word;) {
    words.push_back(word);
  }
  return words;
}

// "key=value" -> both; "key" -> an empty value.
std::pair<std::string, std::string> SplitPair(const std::string& word) {
  const std::size_t equals = word.find('=');
  return equals == std::string::npos ? std::pair(word, std::string())
                                     : std::pair(word.substr(0, equals), word.substr(equals + 1));
}

class Runner {
 public:
  explicit Runner(std::string_view name) : name_(name) {}

  std::vector<std::string> Run(std::string_view text) {
    std::istringstream stream{std::string(text)};
    std::optional<Words> expected_segments;
    for (std::string line; std::getline(stream, line);) {
      ++line_;
      const Words words = SplitWords(line);
      if (words.empty()) {
        continue;
      }
      if (words[0] == "segments") {
        expected_segments.emplace();
      } else if (words[0] == "end") {
        CompareSegments(expected_segments.value());
        expected_segments.reset();
      } else if (expected_segments) {
        expected_segments->push_back(NormalizeSegment(words));
      } else {
        RunCommand(words);
      }
    }
    if (expected_segments) {
      Unreadable("segments without end");
    }
    return failures_;
  }

 private:
  void RunCommand(const Words& words) {
    if (words[0] == "options") {
      allocator_.emplace(ParseOptions(words));
    } else if (!allocator_) {
      Unreadable(words[0] + " before options");
    } else if (words[0] == "alloc") {
      RunAlloc(words);
    } else if (words[0] == "free") {
      RunFree(words);
    } else if (words[0] == "counters") {
      CompareCounters(words);
    } else {
      Unreadable(words[0]);
    }
  }

  static AllocatorOptions ParseOptions(const Words& words) {
    AllocatorOptions options;
    for (std::size_t i = 1; i < words.size(); ++i) {
      const auto [key, value] = SplitPair(words[i]);
      if (key == "capacity") {
        options.capacity = Bytes(ParseSize(value));
      } else if (key == "max_split_size") {
        options.max_split_size = Bytes(ParseSize(value));
      } else if (key == "gc_threshold") {
        options.gc_threshold = ParseNumber(value);
      } else if (key == "expandable_segments") {
        options.expandable_segments = true;
      } else {
        Unreadable(words[i]);
      }
    }
    return options;
  }

  void RunAlloc(const Words& words) {
    if (words.size() < 3) {
      Unreadable("alloc");
    }
    const std::int64_t size = ParseSize(words[2]);
    std::int64_t stream = 0;
    std::int64_t mallocs = 0;
    std::int64_t frees = 0;
    bool is_oom = false;
    std::optional<std::int64_t> retry;
    std::optional<std::int64_t> sync;
    for (std::size_t i = 3; i < words.size(); ++i) {
      const auto [key, value] = SplitPair(words[i]);
      if (key == "stream") {
        stream = ParseInteger(value);
      } else if (key == "at") {
        now_ = SimTime(ParseInteger(value));
      } else if (key == "mallocs") {
        mallocs = ParseInteger(value);
      } else if (key == "frees") {
        frees = ParseInteger(value);
      } else if (key == "retry") {
        retry = ParseSize(value);
      } else if (key == "sync") {
        sync = ParseInteger(value);
      } else if (key == "oom") {
        is_oom = true;
      } else {
        Unreadable(words[i]);
      }
    }
    const AllocResult result = allocator_->Alloc(Bytes(size), static_cast<int>(stream), now_);
    Compare("oom", is_oom, result.out_of_memory);
    Compare("mallocs", mallocs, result.cuda_malloc_count);
    Compare("frees", frees, result.segments_freed);
    Compare("retried", retry.has_value(), result.retried);
    Compare("freed by retry", retry.value_or(0), result.freed_by_retry.value);
    Compare("sync", sync.value_or(now_.value), result.sync_until.value);
    Compare("has a block", !is_oom && size > 0, result.block.valid());
    if (!is_oom) {
      if (!live_.emplace(words[1], result.block).second) {
        Unreadable(words[1] + " is already allocated");
      }
    }
  }

  void RunFree(const Words& words) {
    if (words.size() < 2 || !live_.contains(words[1])) {
      Unreadable("free of an unknown block");
    }
    std::vector<PendingUse> uses;
    for (std::size_t i = 2; i < words.size(); ++i) {
      const auto [key, value] = SplitPair(words[i]);
      const std::size_t at = value.find('@');
      if (key != "use" || at == std::string::npos) {
        Unreadable(words[i]);
      }
      uses.push_back({static_cast<int>(ParseInteger(value.substr(0, at))),
                      SimTime(ParseInteger(value.substr(at + 1)))});
    }
    allocator_->Free(live_.at(words[1]), uses);
    live_.erase(words[1]);
  }

  // The expected line with its sizes in bytes.
  static std::string NormalizeSegment(const Words& words) {
    if (words.size() < 3 || (words[0] != "small" && words[0] != "large")) {
      Unreadable("segment line");
    }
    std::string line = words[0] + " " + words[1];
    for (std::size_t i = 2; i < words.size(); ++i) {
      const auto [key, value] = SplitPair(words[i]);
      line += " " + key + "=" + std::to_string(ParseSize(value));
    }
    return line;
  }

  [[nodiscard]] std::string BlockName(const AllocatorBlockView& block) const {
    switch (block.state) {
      case BlockState::kFree:
        return "free";
      case BlockState::kWaiting:
        return "waiting";
      case BlockState::kUnmapped:
        return "unmapped";
      case BlockState::kAllocated:
        break;
    }
    for (const auto& [name, handle] : live_) {
      if (handle == block.block) {
        return name;
      }
    }
    return "?";
  }

  void CompareSegments(const Words& expected) {
    Words got;
    for (const AllocatorSegmentView& segment : allocator_->Segments()) {
      std::string line = segment.is_small ? "small s" : "large s";
      line += std::to_string(segment.stream) + ":";
      std::int64_t offset = 0;
      for (const AllocatorBlockView& block : segment.blocks) {
        line += " " + BlockName(block) + "=" + std::to_string(block.size.value);
        Compare("offset", offset, block.offset.value);
        offset += block.size.value;
      }
      got.push_back(line);
    }
    if (got != expected) {
      std::string text = "expected segments";
      for (const std::string& line : expected) {
        text += "\n    " + line;
      }
      text += "\n  got";
      for (const std::string& line : got) {
        text += "\n    " + line;
      }
      Fail(text);
    }
  }

  void CompareCounters(const Words& words) {
    const AllocatorCounters& c = allocator_->counters();
    const std::map<std::string, std::int64_t> values = {
        {"allocated", c.allocated.value},     {"active", c.active.value},
        {"reserved", c.reserved.value},       {"peak_allocated", c.peak_allocated.value},
        {"peak_active", c.peak_active.value}, {"peak_reserved", c.peak_reserved.value},
        {"retries", c.retry_count},           {"ooms", c.out_of_memory_count},
        {"mallocs", c.cuda_malloc_count},     {"frees", c.cuda_free_count},
    };
    for (std::size_t i = 1; i < words.size(); ++i) {
      const auto [key, value] = SplitPair(words[i]);
      if (!values.contains(key)) {
        Unreadable(words[i]);
      }
      Compare(key, ParseSize(value), values.at(key));
    }
  }

  void Compare(const std::string& what, std::int64_t expected, std::int64_t got) {
    if (expected != got) {
      Fail("expected " + what + " " + std::to_string(expected) + ", got " + std::to_string(got));
    }
  }

  void Fail(const std::string& text) {
    failures_.push_back(name_ + ":" + std::to_string(line_) + ": " + text);
  }

  std::string name_;
  int line_ = 0;
  std::optional<CachingAllocator> allocator_;
  std::map<std::string, BlockHandle> live_;
  SimTime now_;
  std::vector<std::string> failures_;
};

}  // namespace

std::vector<std::string> RunAllocatorScript(std::string_view name, std::string_view text) {
  return Runner(name).Run(text);
}

}  // namespace shardwright
