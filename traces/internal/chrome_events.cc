#include "traces/internal/chrome_events.h"

#include <array>
#include <istream>
#include <streambuf>
#include <utility>

#include <nlohmann/json.hpp>

#include "traces/gzip.h"

namespace shardwright::internal {
namespace {

using Json = nlohmann::json;

constexpr std::int64_t kVersion = 1;
constexpr std::string_view kRule = "a trace that \"shardwright simulate --trace\" wrote";

// Feeds a TextSource to the JSON reader.
class SourceBuffer : public std::streambuf {
 public:
  explicit SourceBuffer(const std::string& file) : source_(file), piece_(kPieceSize) {}

 protected:
  int_type underflow() override {
    const std::size_t count = source_.Read(piece_.data(), piece_.size());
    if (count == 0) {
      return traits_type::eof();
    }
    setg(piece_.data(), piece_.data(), piece_.data() + count);
    return traits_type::to_int_type(piece_[0]);
  }

 private:
  static constexpr std::size_t kPieceSize = std::size_t{1} << 16;
  TextSource source_;
  std::vector<char> piece_;
};

// Receives the pieces of the document. Depth 1 is inside the root object, 2 inside the list of
// events or the header, 3 inside an event, 4 inside its args.
class Events : public nlohmann::json_sax<Json> {
 public:
  Events(const std::string& file, const std::function<void(const ChromeEvent&)>& handle)
      : path_(file), handle_(handle) {}

  bool null() override { return true; }
  bool boolean(bool /*value*/) override { return true; }
  bool binary(binary_t& /*value*/) override { return true; }
  bool number_integer(number_integer_t value) override {
    AddNumber({key_, static_cast<double>(value), true, value});
    return true;
  }
  bool number_unsigned(number_unsigned_t value) override {
    const bool fits = value <= static_cast<number_unsigned_t>(INT64_MAX);
    AddNumber(
        {key_, static_cast<double>(value), fits, fits ? static_cast<std::int64_t>(value) : 0});
    return true;
  }
  bool number_float(number_float_t value, const std::string& /*text*/) override {
    AddNumber({key_, value, false, 0});
    return true;
  }
  bool string(std::string& value) override;
  bool start_object(std::size_t elements) override;
  bool key(std::string& value) override {
    key_ = value;
    if (depth_ == 1) {
      section_ = value;
    }
    return true;
  }
  bool end_object() override;
  bool start_array(std::size_t elements) override;
  bool end_array() override {
    --depth_;
    return true;
  }
  bool parse_error(std::size_t position, const std::string& /*token*/,
                   const nlohmann::detail::exception& /*error*/) override {
    throw InputError(path_.str(), "broken JSON at byte " + std::to_string(position),
                     "a whole trace");
  }

  // From now on stop where the events begin.
  void StopAtEvents() { stop_at_events_ = true; }
  [[nodiscard]] const ChromeHeader& header() const { return header_; }

  // Requires that the document has ended.
  void CheckEnd() const {
    if (!saw_events_) {
      throw InputError(path_.str(), "no \"traceEvents\"", kRule);
    }
  }

 private:
  [[nodiscard]] bool InEvent() const { return depth_ == 3 && section_ == "traceEvents"; }
  [[nodiscard]] bool InArgs() const {
    return depth_ == 4 && section_ == "traceEvents" && object_ == "args";
  }
  [[nodiscard]] bool InHeader() const { return depth_ == 2 && section_ == "shardwright"; }
  void AddNumber(const EventNumber& number);
  void CheckHeader() const;

  Path path_;
  const std::function<void(const ChromeEvent&)>& handle_;
  std::size_t depth_ = 0;
  std::string section_;  // key of the root object
  std::string object_;   // key of the object inside the event
  std::string key_;
  std::string format_, profile_;
  std::optional<std::int64_t> version_;
  ChromeHeader header_;
  bool stop_at_events_ = false;
  bool saw_events_ = false;
  std::size_t next_index_ = 0;
  ChromeEvent event_;
};

void Events::AddNumber(const EventNumber& number) {
  if (InEvent()) {
    event_.numbers.push_back(number);
  } else if (InArgs()) {
    event_.args.push_back(number);
  } else if (InHeader() && number.key == "version" && number.is_integer) {
    version_ = number.integer;
  } else if (InHeader() && number.key == "step_time_us") {
    header_.step_time_us = number.value;
  }
}

bool Events::string(std::string& value) {
  if (InEvent()) {
    if (key_ == "ph") {
      event_.phase = value;
    } else if (key_ == "cat") {
      event_.category = value;
    } else if (key_ == "name") {
      event_.name = value;
    }
  } else if (InArgs()) {
    if (key_ == "op") {
      event_.op = value;
    } else if (key_ == "body") {
      event_.body = value;
    }
  } else if (InHeader()) {
    if (key_ == "format") {
      format_ = value;
    } else if (key_ == "profile") {
      profile_ = value;
    } else if (key_ == "source") {
      header_.source = value;
    } else if (key_ == "plan") {
      header_.plan = std::move(value);
    }
  }
  return true;
}

bool Events::start_object(std::size_t /*elements*/) {
  ++depth_;
  if (InEvent()) {
    event_ = ChromeEvent();
    event_.index = next_index_++;
  } else if (depth_ == 4) {
    object_ = key_;
  }
  return true;
}

bool Events::end_object() {
  if (InEvent()) {
    handle_(event_);
  }
  --depth_;
  return true;
}

bool Events::start_array(std::size_t /*elements*/) {
  if (depth_ == 0) {
    throw InputError(path_.str(), "a list of events without a header", kRule);
  }
  ++depth_;
  if (depth_ == 2 && section_ == "traceEvents") {
    CheckHeader();
    saw_events_ = true;
    return !stop_at_events_;
  }
  return true;
}

// Before the first event, so that a large foreign trace is refused at once.
void Events::CheckHeader() const {
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

}  // namespace

ChromeHeader ReadHeader(const std::string& file) {
  SourceBuffer buffer(file);
  std::istream stream(&buffer);
  const std::function<void(const ChromeEvent&)> ignore = [](const ChromeEvent&) {};
  Events events(file, ignore);
  events.StopAtEvents();
  Json::sax_parse(stream, &events);
  events.CheckEnd();
  return events.header();
}

void ForEachEvent(const std::string& file, const std::function<void(const ChromeEvent&)>& handle) {
  SourceBuffer buffer(file);
  std::istream stream(&buffer);
  Events events(file, handle);
  Json::sax_parse(stream, &events);
  events.CheckEnd();
}

}  // namespace shardwright::internal
