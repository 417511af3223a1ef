#include "traces/internal/chrome_events.h"

#include <charconv>
#include <system_error>
#include <utility>

#include "core/portable.h"
#include "traces/internal/json_scanner.h"

namespace shardwright::internal {
namespace {

constexpr std::int64_t kVersion = 1;
constexpr std::string_view kRule = "a trace that \"shardwright simulate --trace\" wrote";
// The header holds the plan, with all that it embeds.
constexpr std::size_t kLongestToken = std::size_t{64} << 20;
// Of one event; ours have one per category of memory.
constexpr std::size_t kMostNumbers = 100;

using Kind = JsonScanner::Kind;

EventNumber NumberOf(std::string_view key, std::string_view text) {
  EventNumber number{.key = std::string(key)};
  const char* const end = text.data() + text.size();
  const auto whole = std::from_chars(text.data(), end, number.integer);
  number.is_integer = whole.ec == std::errc() && whole.ptr == end;
  if (number.is_integer) {
    number.value = static_cast<double>(number.integer);
  } else if (FromChars(text.data(), end, number.value).ec != std::errc()) {
    number.value = HUGE_VAL;
  }
  return number;
}

// Follows the document up to its events and through them.
class Reader {
 public:
  explicit Reader(const std::string& file) : path_(file), scanner_(file, kLongestToken) {}

  // Null: stops where the events begin.
  ChromeHeader Run(const std::function<void(const ChromeEvent&)>* handle) {
    if (scanner_.Peek() == Kind::kArray) {
      throw InputError(path_.str(), "a list of events without a header", kRule);
    }
    bool saw_events = false;
    if (scanner_.Peek() == Kind::kObject) {
      scanner_.EnterObject();
      while (const std::optional<std::string_view> found = scanner_.NextKey()) {
        const std::string key(*found);
        const Kind kind = scanner_.Peek();
        if (key == "shardwright" && kind == Kind::kObject) {
          ReadHeaderObject();
        } else if (key == "traceEvents" && kind == Kind::kArray) {
          CheckHeader();
          if (handle == nullptr) {
            return std::move(header_);
          }
          ReadEvents(*handle);
          saw_events = true;
        } else {
          scanner_.Skip();
        }
      }
    } else {
      scanner_.Skip();
    }
    scanner_.End();
    if (!saw_events) {
      throw InputError(path_.str(), "no \"traceEvents\"", kRule);
    }
    return std::move(header_);
  }

 private:
  void ReadHeaderObject() {
    scanner_.EnterObject();
    while (const std::optional<std::string_view> found = scanner_.NextKey()) {
      const std::string key(*found);
      const Kind kind = scanner_.Peek();
      const std::optional<std::string_view> text = scanner_.Text();
      if (kind == Kind::kString && text) {
        std::string* const target = key == "format"    ? &format_
                                    : key == "profile" ? &profile_
                                    : key == "source"  ? &header_.source
                                    : key == "plan"    ? &header_.plan
                                                       : nullptr;
        if (target != nullptr) {
          target->assign(*text);
        }
      } else if (kind == Kind::kNumber && text) {
        const EventNumber number = NumberOf(key, *text);
        if (key == "version" && number.is_integer) {
          version_ = number.integer;
        } else if (key == "step_time_us") {
          header_.step_time_us = number.value;
        }
      }
    }
  }

  // Before the first event, so that a large foreign trace is refused at once.
  void CheckHeader() const {
    const Path header = path_.Field("shardwright");
    if (format_ != "trace" || !version_) {
      throw InputError(path_.str(), "no \"shardwright\" header before the events", kRule);
    }
    if (*version_ != kVersion) {
      throw InputError(header.Field("version").str(), std::to_string(*version_),
                       std::to_string(kVersion));
    }
    if (profile_ != "perfetto") {
      throw InputError(header.Field("profile").str(), '"' + profile_ + '"', "\"perfetto\"",
                       "times of other profiles are not exact");
    }
  }

  void ReadEvents(const std::function<void(const ChromeEvent&)>& handle) {
    ChromeEvent event;
    scanner_.EnterArray();
    for (std::size_t index = 0; scanner_.NextElement(); ++index) {
      if (scanner_.Peek() != Kind::kObject) {
        scanner_.Skip();
        continue;
      }
      event = ChromeEvent();
      event.index = index;
      ReadObject(event, /*is_args=*/false);
      handle(event);
    }
  }

  void ReadObject(ChromeEvent& event, bool is_args) {
    scanner_.EnterObject();
    while (const std::optional<std::string_view> found = scanner_.NextKey()) {
      const std::string key(*found);
      const Kind kind = scanner_.Peek();
      if (!is_args && key == "args" && kind == Kind::kObject) {
        ReadObject(event, true);
        continue;
      }
      const std::optional<std::string_view> text = scanner_.Text();
      if (kind == Kind::kString && text) {
        std::string* const target = TextOf(event, is_args, key);
        if (target != nullptr) {
          target->assign(*text);
        }
      } else if (kind == Kind::kNumber && text) {
        std::vector<EventNumber>& numbers = is_args ? event.args : event.numbers;
        if (numbers.size() == kMostNumbers) {
          throw InputError(path_.Field("traceEvents").Index(event.index).str(),
                           "more than " + std::to_string(kMostNumbers) + " numbers", kRule);
        }
        numbers.push_back(NumberOf(key, *text));
      }
    }
  }

  static std::string* TextOf(ChromeEvent& event, bool is_args, std::string_view key) {
    if (is_args) {
      return key == "op" ? &event.op : key == "body" ? &event.body : nullptr;
    }
    return key == "ph"     ? &event.phase
           : key == "cat"  ? &event.category
           : key == "name" ? &event.name
                           : nullptr;
  }

  Path path_;
  JsonScanner scanner_;
  std::string format_, profile_;
  std::optional<std::int64_t> version_;
  ChromeHeader header_;
};

}  // namespace

ChromeHeader ReadHeader(const std::string& file) {
  return Reader(file).Run(nullptr);
}

void ForEachEvent(const std::string& file, const std::function<void(const ChromeEvent&)>& handle) {
  (void)Reader(file).Run(&handle);
}

}  // namespace shardwright::internal
