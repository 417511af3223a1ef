#include "traces/internal/pickle.h"

#include <algorithm>
#include <cmath>
#include <optional>
#include <unordered_map>
#include <utility>

#include "core/budget.h"
#include "core/error.h"
#include "core/files.h"
#include "core/portable.h"
#include "traces/gzip.h"

namespace shardwright::internal {
namespace {

constexpr std::size_t kLongestText = std::size_t{64} << 20;
// Bytes of memory, all kinds together: two million events of the allocator, each with its stack.
constexpr std::int64_t kMostMemory = std::int64_t{512} << 20;
// What the tables take besides what is in them: a string, a vector, a node of a hash table.
constexpr std::int64_t kTableEntry = 32;

// Opcodes of Lib/pickle.py that would import, call or build something.
constexpr std::string_view kCode = "ciobRPQ\x81\x82\x83\x84\x92\x93\x97\x98";

}  // namespace

class PickleReader {
 public:
  PickleReader(const std::string& file, std::string_view rule)
      : file_(file),
        rule_(rule),
        source_(file),
        memory_(file, "bytes of values", kMostMemory),
        piece_(1 << 16) {}

  Pickle Run() {
    while (Step(Byte())) {
    }
    result_.file_size_ = offset_;
    return std::move(result_);
  }

 private:
  using Ref = Pickle::Ref;
  using Kind = Pickle::Kind;
  static constexpr Ref kMark = 0xfffffffeU;
  static constexpr std::int64_t kRefSize = sizeof(Ref);

  [[noreturn]] void Fail(const std::string& found) const {
    throw InputError(file_ + ": byte " + std::to_string(offset_), found, rule_);
  }

  unsigned char Byte() {
    if (next_ == size_) {
      size_ = source_.Read(piece_.data(), piece_.size());
      next_ = 0;
      if (size_ == 0) {
        Fail("the end of the file");
      }
    }
    ++offset_;
    return static_cast<unsigned char>(piece_[next_++]);
  }

  std::uint64_t Unsigned(int bytes) {
    std::uint64_t value = 0;
    for (int i = 0; i < bytes; ++i) {
      value |= static_cast<std::uint64_t>(Byte()) << (8 * i);
    }
    return value;
  }

  // A length stands before texts that may not be there: they are read piece by piece.
  std::string Text(std::uint64_t size) {
    if (size > kLongestText) {
      Fail("a text of " + std::to_string(size) + " bytes");
    }
    memory_.Take(kTableEntry + static_cast<std::int64_t>(size));
    std::string text;
    for (std::uint64_t i = 0; i < size; ++i) {
      text += static_cast<char>(Byte());
    }
    return text;
  }

  Ref Add(Kind kind, std::int64_t number) {
    memory_.Take(sizeof(Pickle::Value));
    result_.values_.push_back({kind, number});
    return static_cast<Ref>(result_.values_.size() - 1);
  }
  void Push(Ref ref) {
    memory_.Take(kRefSize);
    stack_.push_back(ref);
  }
  void PushText(std::uint64_t size) {
    result_.texts_.push_back(Text(size));
    Push(Add(Kind::kText, std::ssize(result_.texts_) - 1));
  }
  void PushList(Kind kind, std::vector<Ref> items) {
    memory_.Take(kTableEntry + std::ssize(items) * kRefSize);
    result_.lists_.push_back(std::move(items));
    Push(Add(kind, std::ssize(result_.lists_) - 1));
  }

  Ref Pop() {
    if (stack_.empty() || stack_.back() == kMark) {
      Fail("a value missing");
    }
    const Ref ref = stack_.back();
    stack_.pop_back();
    return ref;
  }
  Ref Top() {
    const Ref ref = Pop();
    Push(ref);
    return ref;
  }
  std::vector<Ref> PopToMark() {
    const auto mark = std::find(stack_.rbegin(), stack_.rend(), kMark);
    if (mark == stack_.rend()) {
      Fail("a mark missing");
    }
    std::vector<Ref> items(mark.base(), stack_.end());
    stack_.erase(std::next(mark).base(), stack_.end());
    return items;
  }
  // The table entry of the list or dictionary on top.
  std::vector<Ref>& Container(Kind kind) {
    const Ref ref = Top();
    if (result_.values_[ref].kind != kind) {
      Fail("items for something that holds none");
    }
    return result_.lists_[static_cast<std::size_t>(result_.values_[ref].number)];
  }

  void Long(std::uint64_t bytes) {
    if (bytes > 8) {
      Fail("a number of " + std::to_string(bytes) + " bytes");
    }
    const auto count = static_cast<int>(bytes);
    std::uint64_t value = Unsigned(count);
    if (count > 0 && count < 8 && (value >> (8 * count - 1)) != 0) {
      value |= ~std::uint64_t{0} << (8 * count);
    }
    Push(Add(Kind::kInt, static_cast<std::int64_t>(value)));
  }

  void Float() {
    std::uint64_t bits = 0;
    for (int i = 0; i < 8; ++i) {
      bits = bits << 8 | Byte();
    }
    const auto value = BitCast<double>(bits);
    constexpr double kMost = 9e18;
    const bool fits = std::isfinite(value) && std::abs(value) < kMost;
    Push(Add(Kind::kFloat, fits ? static_cast<std::int64_t>(value) : 0));
  }

  void Remember(std::uint64_t number) {
    memory_.Take(kTableEntry);
    memo_[number] = Top();
  }
  void Recall(std::uint64_t number) {
    const auto found = memo_.find(number);
    if (found == memo_.end()) {
      Fail("a reference to what was not there");
    }
    Push(found->second);
  }

  void Tuple(int size) {
    std::vector<Ref> items(static_cast<std::size_t>(size));
    for (std::size_t i = items.size(); i-- > 0;) {
      items[i] = Pop();
    }
    PushList(Kind::kList, std::move(items));
  }

  void Append(Kind kind, std::vector<Ref> items) {
    std::vector<Ref>& to = Container(kind);
    if (kind == Kind::kDict && items.size() % 2 != 0) {
      Fail("a key without a value");
    }
    memory_.Take(2 * std::ssize(items) * kRefSize);  // a vector has up to twice what it holds
    to.insert(to.end(), items.begin(), items.end());
  }

  // Numbers, texts and constants; nothing: the opcode is none of these.
  bool StepScalar(unsigned char op) {
    switch (op) {
      case 'N':
        Push(Add(Kind::kNone, 0));
        return true;
      case 0x88:
      case 0x89:
        Push(Add(Kind::kBool, op == 0x88 ? 1 : 0));
        return true;
      case 'J':
        Push(Add(Kind::kInt, static_cast<std::int32_t>(Unsigned(4))));
        return true;
      case 'K':
        Push(Add(Kind::kInt, static_cast<std::int64_t>(Unsigned(1))));
        return true;
      case 'M':
        Push(Add(Kind::kInt, static_cast<std::int64_t>(Unsigned(2))));
        return true;
      case 0x8a:
        Long(Unsigned(1));
        return true;
      case 0x8b:
        Long(Unsigned(4));
        return true;
      case 'G':
        Float();
        return true;
      case 0x8c:
      case 'C':
        PushText(Unsigned(1));
        return true;
      case 'X':
      case 'B':
        PushText(Unsigned(4));
        return true;
      case 0x8d:
      case 0x8e:
        PushText(Unsigned(8));
        return true;
      default:
        return false;
    }
  }

  bool StepContainer(unsigned char op) {
    switch (op) {
      case ']':
      case ')':
        PushList(Kind::kList, {});
        return true;
      case '}':
        PushList(Kind::kDict, {});
        return true;
      case '(':
        Push(kMark);
        return true;
      case 'l':
      case 't':
        PushList(Kind::kList, PopToMark());
        return true;
      case 0x85:
      case 0x86:
      case 0x87:
        Tuple(op - 0x84);
        return true;
      case 'a': {
        const Ref item = Pop();
        Append(Kind::kList, {item});
        return true;
      }
      case 's': {
        const Ref value = Pop();
        const Ref key = Pop();
        Append(Kind::kDict, {key, value});
        return true;
      }
      case 'e':
        Append(Kind::kList, PopToMark());
        return true;
      case 'u':
        Append(Kind::kDict, PopToMark());
        return true;
      default:
        return false;
    }
  }

  // False at the end.
  bool Step(unsigned char op) {
    if (StepScalar(op) || StepContainer(op)) {
      return true;
    }
    switch (op) {
      case 0x80:
        if (const std::uint64_t protocol = Unsigned(1); protocol < 2 || protocol > 5) {
          Fail("protocol " + std::to_string(protocol));
        }
        return true;
      case 0x95:
        (void)Unsigned(8);  // frames only help readers to buffer
        return true;
      case 0x94:
        Remember(memo_.size());
        return true;
      case 'q':
        Remember(Unsigned(1));
        return true;
      case 'r':
        Remember(Unsigned(4));
        return true;
      case 'h':
        Recall(Unsigned(1));
        return true;
      case 'j':
        Recall(Unsigned(4));
        return true;
      case '0':
        (void)Pop();
        return true;
      case '.':
        result_.root_ = Pop();
        return false;
      default:
        break;
    }
    if (kCode.find(static_cast<char>(op)) != std::string_view::npos) {
      throw InputError(file_ + ": byte " + std::to_string(offset_),
                       "a pickle that runs code (opcode " + std::to_string(op) + ")", rule_,
                       "nothing of it was run");
    }
    Fail("opcode " + std::to_string(op));
  }

  std::string file_;
  std::string_view rule_;
  TextSource source_;
  Budget memory_;
  std::vector<char> piece_;
  std::size_t next_ = 0, size_ = 0;
  std::int64_t offset_ = 0;
  std::vector<Ref> stack_;
  std::unordered_map<std::uint64_t, Ref> memo_;
  Pickle result_;
};

Pickle Pickle::Read(const std::string& file, std::string_view rule) {
  Pickle result = PickleReader(file, rule).Run();
  result.file_ = file;
  result.rule_ = rule;
  return result;
}

void Pickle::Fail(std::string_view where, std::string_view found) const {
  throw InputError(Path(file_).Field(where).str(), found, rule_);
}

Pickle::Ref Pickle::Required(Ref dict, std::string_view key, Kind kind) const {
  const Ref value = Find(dict, key);
  if (value == kNothing) {
    Fail(key, "nothing");
  }
  if (KindOf(value) != kind) {
    Fail(key, "a value of another type");
  }
  return value;
}

Pickle::Ref Pickle::AddJson(const JsonValue& value) {
  Value result;
  if (value.IsObject() || value.IsArray()) {
    std::vector<Ref> items;
    if (value.IsObject()) {
      result.kind = Kind::kDict;
      for (const std::string& key : value.Keys()) {
        const std::optional<JsonValue> found = value.Find(key);  // nothing: null
        if (found.has_value()) {
          texts_.push_back(key);
          values_.push_back({Kind::kText, std::ssize(texts_) - 1});
          items.push_back(static_cast<Ref>(values_.size() - 1));
          items.push_back(AddJson(*found));
        }
      }
    } else {
      result.kind = Kind::kList;
      for (std::size_t i = 0; i < value.size(); ++i) {
        items.push_back(AddJson(value[i]));
      }
    }
    lists_.push_back(std::move(items));
    result.number = std::ssize(lists_) - 1;
  } else if (value.IsString()) {
    texts_.push_back(value.AsString());
    result = {Kind::kText, std::ssize(texts_) - 1};
  } else if (value.IsBool()) {
    result = {Kind::kBool, value.AsBool() ? 1 : 0};
  } else if (value.IsNumber()) {
    const double number = value.AsDouble();
    constexpr double kMost = 9e18;
    const bool is_whole = std::abs(number) < kMost && number == std::floor(number);
    result = {is_whole ? Kind::kInt : Kind::kFloat,
              is_whole ? static_cast<std::int64_t>(number) : 0};
  }
  values_.push_back(result);
  return static_cast<Ref>(values_.size() - 1);
}

Pickle Pickle::OfJson(const JsonValue& document, const std::string& file, std::string_view rule) {
  Pickle result;
  result.root_ = result.AddJson(document);
  result.file_ = file;
  result.rule_ = rule;
  result.file_size_ = InputFile(file).size();
  return result;
}

Pickle::Ref Pickle::Find(Ref dict, std::string_view key) const {
  // Those of snapshots have a dozen keys; a damaged one must not be searched for every event.
  constexpr std::size_t kMostItems = 128;
  const std::vector<Ref>& items = ItemsOf(dict);
  const std::size_t end = items.size() > kMostItems ? items.size() - kMostItems : 0;
  for (std::size_t i = items.size(); i >= end + 2; i -= 2) {
    if (KindOf(items[i - 2]) == Kind::kText && TextOf(items[i - 2]) == key) {
      return items[i - 1];
    }
  }
  return kNothing;
}

}  // namespace shardwright::internal
