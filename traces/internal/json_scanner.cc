#include "traces/internal/json_scanner.h"

#include <array>
#include <bit>
#include <charconv>
#include <cstring>

#include "core/error.h"
#include "core/ranges.h"

namespace shardwright::internal {
namespace {

constexpr std::size_t kPieceSize = std::size_t{1} << 16;
constexpr std::size_t kWord = sizeof(std::uint64_t);  // bytes that FindSpecial looks at
constexpr std::size_t kDeepest = 64;                  // nesting
constexpr const char* kExpected = "a trace of training steps";

constexpr bool IsSpecial(char c) {
  return c == '"' || c == '\\' || static_cast<unsigned char>(c) < ' ';
}

// The first quote, backslash or control character. There is one, and kWord bytes behind it may be
// read.
const char* FindSpecial(const char* text) {
  if constexpr (std::endian::native == std::endian::little) {
    // "Determine if a word has a byte less than n" and "... equal to n" of Sean Anderson's Bit
    // Twiddling Hacks: the lowest byte that is marked is right.
    constexpr std::uint64_t kOnes = 0x0101010101010101;
    constexpr std::uint64_t kHigh = kOnes << 7;
    while (true) {
      std::uint64_t word = 0;
      std::memcpy(&word, text, kWord);
      const std::uint64_t quote = word ^ kOnes * '"';
      const std::uint64_t backslash = word ^ kOnes * '\\';
      const std::uint64_t found = (((quote - kOnes) & ~quote) | ((backslash - kOnes) & ~backslash) |
                                   ((word - kOnes * ' ') & ~word)) &
                                  kHigh;
      if (found != 0) {
        return text + std::countr_zero(found) / 8;
      }
      text += kWord;
    }
  }
  while (!IsSpecial(*text)) {
    ++text;
  }
  return text;
}

// Characters of numbers, of true, false, null, NaN and Infinity.
constexpr std::array<bool, 256> kRunCharacters = [] {
  std::array<bool, 256> table{};
  for (const char c : std::string_view("+-.0123456789Eaefilnrstuy"
                                       "IN")) {
    table[static_cast<unsigned char>(c)] = true;
  }
  return table;
}();

// What a byte outside of strings means for whoever looks for the end of an object or array.
enum class Meaning : std::uint8_t { kNone, kQuote, kOpen, kClose, kWrong };
constexpr std::array<Meaning, 256> kMeanings = [] {
  std::array<Meaning, 256> table{};
  table.fill(Meaning::kWrong);
  for (std::size_t c = 0; c < table.size(); ++c) {
    if (kRunCharacters[c]) {
      table[c] = Meaning::kNone;
    }
  }
  for (const char c : std::string_view(" \n\t\r,:")) {
    table[static_cast<unsigned char>(c)] = Meaning::kNone;
  }
  table['"'] = Meaning::kQuote;
  table['{'] = table['['] = Meaning::kOpen;
  table['}'] = table[']'] = Meaning::kClose;
  return table;
}();

bool IsNumber(std::string_view run) {
  return run[0] == '-' ? run.size() > 1 && run[1] != 'I' : run[0] >= '0' && run[0] <= '9';
}

void AppendUtf8(std::uint32_t code, std::string& text) {
  const auto put = [&text](std::uint32_t byte) { text += static_cast<char>(byte); };
  if (code < 0x80) {
    put(code);
  } else if (code < 0x800) {
    put(0xC0 | code >> 6);
    put(0x80 | (code & 0x3F));
  } else if (code < 0x10000) {
    put(0xE0 | code >> 12);
    put(0x80 | (code >> 6 & 0x3F));
    put(0x80 | (code & 0x3F));
  } else {
    put(0xF0 | code >> 18);
    put(0x80 | (code >> 12 & 0x3F));
    put(0x80 | (code >> 6 & 0x3F));
    put(0x80 | (code & 0x3F));
  }
}

// The code unit of the \uXXXX at `at`; nothing when there is none.
std::optional<std::uint32_t> CodeUnit(std::string_view text, std::size_t at) {
  constexpr std::size_t kDigits = 4;
  if (at + 2 + kDigits > text.size() || text[at] != '\\' || text[at + 1] != 'u') {
    return std::nullopt;
  }
  const char* const begin = text.data() + at + 2;
  std::uint32_t unit = 0;
  const auto [after, error] = std::from_chars(begin, begin + kDigits, unit, 16);
  return error == std::errc() && after == begin + kDigits ? std::optional(unit) : std::nullopt;
}

}  // namespace

JsonScanner::JsonScanner(const std::string& file, std::size_t longest_token)
    : file_(file),
      longest_token_(longest_token),
      source_(file),
      buffer_(kPieceSize + kWord),
      next_(buffer_.data()),
      end_(next_) {
  Refill(end_);
}

void JsonScanner::Fail(const std::string& what) const {
  throw InputError(file_,
                   "broken JSON at byte " +
                       std::to_string(offset_ + static_cast<std::size_t>(next_ - buffer_.data())) +
                       ": " + what,
                   "a whole trace");
}

// `next_` stands at what does not belong there.
void JsonScanner::FailToken() const {
  if (next_ == end_) {
    Fail("the end of the file");
  }
  const auto byte = static_cast<unsigned char>(*next_);
  Fail(byte > ' ' && byte < 0x7F ? std::string("an unexpected ") + *next_
                                 : "an unexpected byte " + std::to_string(byte));
}

// Reads on. Requires that all was looked at; keeps the text from `keep` on, which moves to the
// front, and sets `next_` behind it. False at the end of the file.
bool JsonScanner::Refill(const char* keep) {
  const auto kept = static_cast<std::size_t>(end_ - keep);
  if (kept > longest_token_) {
    throw InputError(file_,
                     "a name or number of more than " + std::to_string(longest_token_ >> 20) +
                         " MiB near byte " +
                         std::to_string(offset_ + static_cast<std::size_t>(keep - buffer_.data())),
                     kExpected);
  }
  offset_ += static_cast<std::size_t>(keep - buffer_.data());
  std::memmove(buffer_.data(), keep, kept);
  if (buffer_.size() < 2 * kept + kWord) {
    buffer_.resize(2 * buffer_.size());
  }
  const std::size_t count = source_.Read(buffer_.data() + kept, buffer_.size() - kWord - kept);
  next_ = buffer_.data() + kept;
  end_ = next_ + count;
  buffer_[kept + count] = '\0';
  return count > 0;
}

// The character after white space; a null character at the end of the file.
char JsonScanner::SkipSpace() {
  // Mostly there is none, or one space.
  const char* const after = next_ + (*next_ == ' ' ? 1 : 0);
  if (static_cast<unsigned char>(*after) > ' ') {
    next_ = after;
    return *after;
  }
  return SkipMoreSpace();
}

char JsonScanner::SkipMoreSpace() {
  while (true) {
    while (*next_ == ' ' || *next_ == '\n' || *next_ == '\t' || *next_ == '\r') {
      ++next_;
    }
    if (next_ != end_ || !Refill(end_)) {
      return *next_;
    }
  }
}

JsonScanner::Kind JsonScanner::Peek() {
  switch (SkipSpace()) {
    case '{':
      return Kind::kObject;
    case '[':
      return Kind::kArray;
    case '"':
      return Kind::kString;
    case 't':
    case 'f':
    case 'n':
    case 'N':
    case 'I':
      return Kind::kWord;
    default:
      if (*next_ != '-' && (*next_ < '0' || *next_ > '9')) {
        FailToken();
      }
      return Kind::kNumber;
  }
}

void JsonScanner::Enter() {
  ++next_;
  is_first_ = true;
  if (++depth_ > kDeepest) {
    throw InputError(file_,
                     "nesting deeper than " + std::to_string(kDeepest) + " at byte " +
                         std::to_string(offset_ + static_cast<std::size_t>(next_ - buffer_.data())),
                     kExpected);
  }
}

void JsonScanner::EnterObject() {
  SW_CHECK(*next_ == '{', "no object is there");
  Enter();
}

void JsonScanner::EnterArray() {
  SW_CHECK(*next_ == '[', "no array is there");
  Enter();
}

// Whether the object or array ends here; takes the comma before another member.
bool JsonScanner::Leave(char end) {
  const char c = SkipSpace();
  if (c == end) {
    ++next_;
    --depth_;
    is_first_ = false;
    return true;
  }
  if (!is_first_) {
    if (c != ',') {
      FailToken();
    }
    ++next_;
  }
  is_first_ = false;
  return false;
}

std::optional<std::string_view> JsonScanner::NextKey() {
  if (Leave('}')) {
    return std::nullopt;
  }
  if (SkipSpace() != '"') {
    FailToken();
  }
  std::string_view key = ScanString(false);
  // The colon nearly always follows at once; only white space that ends the piece moves the key.
  if (*next_ != ':') {
    if (key.data() != unescaped_.data()) {
      unescaped_.assign(key);
      key = unescaped_;
    }
    if (SkipSpace() != ':') {
      FailToken();
    }
  }
  ++next_;
  return key;
}

bool JsonScanner::NextElement() {
  return !Leave(']');
}

// The text between the quotes, as it stands or without its escapes.
std::string_view JsonScanner::ScanString(bool keep_escapes) {
  const char* begin = ++next_;
  bool has_escapes = false;
  while (true) {
    const char* const found = FindSpecial(next_);
    const bool is_cut = found == end_ || (*found == '\\' && found + 1 == end_);
    if (is_cut) {
      const auto done = static_cast<std::size_t>(found - begin);
      if (!Refill(begin)) {
        Fail("a string without an end");
      }
      begin = buffer_.data();
      next_ = begin + done;
    } else if (*found == '\\') {
      has_escapes = true;
      next_ = found + 2;
    } else if (*found == '"') {
      next_ = found + 1;
      const std::string_view text(begin, static_cast<std::size_t>(found - begin));
      return has_escapes && !keep_escapes ? Unescape(text) : text;
    } else {
      next_ = found;
      FailToken();
    }
  }
}

// A number or word.
std::string_view JsonScanner::ScanRun() {
  const char* begin = next_;
  while (true) {
    while (kRunCharacters[static_cast<unsigned char>(*next_)]) {
      ++next_;
    }
    if (next_ != end_) {
      break;
    }
    const bool has_more = Refill(begin);
    begin = buffer_.data();
    if (!has_more) {
      break;
    }
  }
  const std::string_view run(begin, static_cast<std::size_t>(next_ - begin));
  static constexpr std::array<std::string_view, 6> kWords = {"true", "false",    "null",
                                                             "NaN",  "Infinity", "-Infinity"};
  if (run.empty() || (!IsNumber(run) && !IsIn(kWords, run))) {
    next_ = begin;
    FailToken();
  }
  return run;
}

// Appends the escaped character at `at`; returns where it ends.
std::size_t JsonScanner::AppendCharacter(std::string_view text, std::size_t at) {
  constexpr std::string_view kLetters = "\"\\/bfnrt";
  constexpr std::string_view kMeanings = "\"\\/\b\f\n\r\t";
  const std::size_t letter = kLetters.find(text[at + 1]);
  if (letter != std::string_view::npos) {
    unescaped_ += kMeanings[letter];
    return at + 2;
  }
  constexpr std::size_t kUnitSize = 6;  // \uXXXX
  const std::optional<std::uint32_t> unit = CodeUnit(text, at);
  if (!unit) {
    Fail("an unknown escape before here");
  }
  if (*unit < 0xD800 || *unit > 0xDFFF) {
    AppendUtf8(*unit, unescaped_);
    return at + kUnitSize;
  }
  // Two surrogates make a character; one alone is none.
  const std::optional<std::uint32_t> low = CodeUnit(text, at + kUnitSize);
  if (*unit > 0xDBFF || !low || *low < 0xDC00 || *low > 0xDFFF) {
    AppendUtf8(0xFFFD, unescaped_);
    return at + kUnitSize;
  }
  AppendUtf8(0x10000 + ((*unit - 0xD800) << 10) + (*low - 0xDC00), unescaped_);
  return at + 2 * kUnitSize;
}

std::string_view JsonScanner::Unescape(std::string_view text) {
  unescaped_.clear();
  std::size_t at = 0;
  while (at < text.size()) {
    const std::size_t escape = std::min(text.find('\\', at), text.size());
    unescaped_.append(text.substr(at, escape - at));
    at = escape == text.size() ? escape : AppendCharacter(text, escape);
  }
  return unescaped_;
}

std::optional<std::string_view> JsonScanner::Text() {
  switch (Peek()) {
    case Kind::kString:
      return ScanString(false);
    case Kind::kNumber: {
      const std::string_view run = ScanRun();
      return IsNumber(run) ? std::optional(run) : std::nullopt;
    }
    default:
      Skip();
      return std::nullopt;
  }
}

void JsonScanner::Skip() {
  switch (Peek()) {
    case Kind::kObject:
    case Kind::kArray: {
      const std::size_t outside = depth_;
      const char end = *next_ == '{' ? '}' : ']';
      Enter();
      SkipUntil(outside, end);
      break;
    }
    case Kind::kString:
      (void)ScanString(true);
      break;
    case Kind::kNumber:
    case Kind::kWord:
      (void)ScanRun();
      break;
  }
}

void JsonScanner::LeaveObject() {
  SkipUntil(depth_ - 1, '}');
}

// Leaves the innermost object or array, which ends with `end`, and those around it until `outside`
// of them are open. Only strings, brackets and bytes that JSON does not have are looked at.
void JsonScanner::SkipUntil(std::size_t outside, char end) {
  std::array<char, kDeepest + 1> ends{};
  ends[depth_] = end;
  do {
    while (kMeanings[static_cast<unsigned char>(*next_)] == Meaning::kNone) {
      ++next_;
    }
    switch (kMeanings[static_cast<unsigned char>(*next_)]) {
      case Meaning::kQuote:
        (void)ScanString(true);
        break;
      case Meaning::kOpen: {
        const char closing = *next_ == '{' ? '}' : ']';
        Enter();
        ends[depth_] = closing;
        break;
      }
      case Meaning::kClose:
        if (*next_ != ends[depth_]) {
          FailToken();
        }
        ++next_;
        --depth_;
        break;
      case Meaning::kNone:
      case Meaning::kWrong:
        if (next_ != end_ || !Refill(end_)) {
          FailToken();
        }
        break;
    }
  } while (depth_ > outside);
  is_first_ = false;
}

void JsonScanner::End() {
  if (SkipSpace() != '\0' || next_ != end_) {
    FailToken();
  }
}

}  // namespace shardwright::internal
