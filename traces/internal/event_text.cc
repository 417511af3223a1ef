#include "traces/internal/event_text.h"

#include <array>
#include <charconv>
#include <cstddef>

#include <nlohmann/json.hpp>

namespace shardwright::internal {
namespace {

constexpr std::size_t kFlushSize = std::size_t{1} << 18;

}  // namespace

std::string Quote(std::string_view text) {
  return nlohmann::json(text).dump(-1, ' ', false, nlohmann::json::error_handler_t::replace);
}

void EventText::Number(std::int64_t value) {
  std::array<char, 24> digits{};
  const std::to_chars_result done =
      std::to_chars(digits.data(), digits.data() + digits.size(), value);
  text_.append(digits.data(), done.ptr);
}

void EventText::Time(std::int64_t ticks) {
  if (whole_microseconds_) {
    Number(ticks);
    return;
  }
  if (ticks < 0) {
    text_ += '-';
    ticks = -ticks;
  }
  Number(ticks / 1000);
  const std::int64_t rest = ticks % 1000;
  text_ += '.';
  text_ += static_cast<char>('0' + rest / 100);
  text_ += static_cast<char>('0' + rest / 10 % 10);
  text_ += static_cast<char>('0' + rest % 10);
}

void EventText::Begin(char phase, Track track) {
  if (text_.size() >= kFlushSize) {
    Flush();
  }
  text_ += is_first_event_ ? "\n" : ",\n";
  is_first_event_ = false;
  text_ += "{\"ph\":\"";
  text_ += phase;
  text_ += '"';
  NumberField("pid", track.process);
  NumberField("tid", track.thread);
}

void EventText::Key(std::string_view key) {
  // The first member of an object has no comma.
  text_ += text_.back() == '{' ? "\"" : ",\"";
  text_ += key;
  text_ += "\":";
}

void EventText::NumberField(std::string_view key, std::int64_t value) {
  Key(key);
  Number(value);
}

void EventText::TimeField(std::string_view key, std::int64_t ticks) {
  Key(key);
  Time(ticks);
}

void EventText::QuotedField(std::string_view key, std::string_view quoted) {
  Key(key);
  text_ += quoted;
}

void EventText::WordField(std::string_view key, std::string_view word) {
  Key(key);
  text_ += '"';
  text_ += word;
  text_ += '"';
}

void EventText::Flush() {
  sink_.Append(text_);
  text_.clear();
}

}  // namespace shardwright::internal
