#pragma once

// Builds the lines of a Chrome trace. No JSON library: the order of keys and the spaces matter to
// readers, and there can be millions of events. Strings arrive quoted, from Quote().

#include <cstdint>
#include <string>
#include <string_view>

#include "core/units.h"
#include "traces/gzip.h"

namespace shardwright::internal {

// A JSON string, quotes included. What is not UTF-8 becomes the replacement character.
[[nodiscard]] std::string Quote(std::string_view text);

// Which track an event belongs to.
struct Track {
  std::uint32_t process = 0;
  int thread = 0;
};

class EventText {
 public:
  // With `whole_microseconds` a tick is a microsecond, otherwise a nanosecond.
  EventText(TextSink& sink, bool whole_microseconds)
      : sink_(sink), whole_microseconds_(whole_microseconds) {}

  void Raw(std::string_view text) { text_ += text; }
  void Number(std::int64_t value);
  // In microseconds: whole ones, or with exactly three decimals.
  void Time(std::int64_t ticks);

  // Opens an event on a line of its own: {"ph":"X","pid":0,"tid":1
  void Begin(char phase, Track track);
  void End() { text_ += '}'; }
  // Members of the object that is open, with a comma before all but the first. Keys are plain
  // words.
  void NumberField(std::string_view key, std::int64_t value);
  void TimeField(std::string_view key, std::int64_t ticks);
  void QuotedField(std::string_view key, std::string_view quoted);
  void WordField(std::string_view key, std::string_view word);  // needs no escapes

  // Hands everything to the sink.
  void Flush();

 private:
  void Key(std::string_view key);

  TextSink& sink_;
  bool whole_microseconds_;
  bool is_first_event_ = true;
  std::string text_;
};

}  // namespace shardwright::internal
