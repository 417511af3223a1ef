#include "models/internal/size_expression.h"

#include <cctype>
#include <optional>
#include <string>
#include <string_view>

namespace shardwright {
namespace {

constexpr std::int64_t kLargest = std::int64_t{1} << 56;
constexpr std::string_view kRule =
    "an integer, or a sum of products of integers, \"batch\", \"sequence_length\" and "
    "\"image_size\"";

// Reads one text from left to right. Nothing: no such expression, or too large.
class Parser {
 public:
  Parser(std::string_view text, FileSizes& sizes) : text_(text), sizes_(sizes) {}

  std::optional<Amount> Sum() {
    Amount sum;
    bool is_negative = Accept('-');
    while (true) {
      const std::optional<Amount> product = Product();
      if (!product) {
        return std::nullopt;
      }
      const std::int64_t sign = is_negative ? -1 : 1;
      sum.fixed += sign * product->fixed;
      sum.per_sample += sign * product->per_sample;
      if (std::abs(sum.fixed) > kLargest || std::abs(sum.per_sample) > kLargest) {
        return std::nullopt;
      }
      if (Accept('+')) {
        is_negative = false;
      } else if (Accept('-')) {
        is_negative = true;
      } else {
        return AtEnd() ? std::optional(sum) : std::nullopt;
      }
    }
  }

 private:
  std::optional<Amount> Product() {
    std::optional<Amount> product = Factor();
    while (product) {
      if (Accept('*')) {
        const std::optional<Amount> factor = Factor();
        product = factor ? Times(*product, *factor) : std::nullopt;
      } else if (Accept('/')) {
        product = Divided(*product, Factor());
      } else {
        break;
      }
    }
    return product;
  }

  // One of the two is a number without "batch".
  static std::optional<Amount> Times(Amount a, Amount b) {
    if (b.per_sample != 0) {
      std::swap(a, b);
    }
    Amount product;
    if (b.per_sample != 0 || __builtin_mul_overflow(a.fixed, b.fixed, &product.fixed) ||
        __builtin_mul_overflow(a.per_sample, b.fixed, &product.per_sample) ||
        product.fixed > kLargest || product.per_sample > kLargest) {
      return std::nullopt;
    }
    return product;
  }

  static std::optional<Amount> Divided(Amount a, std::optional<Amount> by) {
    if (!by || by->per_sample != 0 || by->fixed == 0 || a.fixed % by->fixed != 0 ||
        a.per_sample % by->fixed != 0) {
      return std::nullopt;
    }
    return Amount{a.fixed / by->fixed, a.per_sample / by->fixed};
  }

  std::optional<Amount> Factor() {
    SkipSpace();
    std::string word;
    while (at_ < text_.size() &&
           (std::isalnum(static_cast<unsigned char>(text_[at_])) != 0 || text_[at_] == '_')) {
      word += text_[at_++];
    }
    if (word == "batch") {
      return Amount{0, 1};
    }
    if (word == "sequence_length") {
      sizes_.reads_sequence_length = true;
      return Known(sizes_.sequence_length);
    }
    if (word == "image_size") {
      sizes_.reads_image_size = true;
      return Known(sizes_.image_size);
    }
    constexpr std::size_t kMostDigits = 17;
    if (word.empty() || word.size() > kMostDigits ||
        word.find_first_not_of("0123456789") != std::string::npos) {
      return std::nullopt;
    }
    const Amount number{std::stoll(word), 0};
    return number.fixed <= kLargest ? std::optional(number) : std::nullopt;
  }

  static std::optional<Amount> Known(std::int64_t size) {
    return size > 0 ? std::optional(Amount{size, 0}) : std::nullopt;
  }

  bool Accept(char c) {
    SkipSpace();
    const bool is_next = at_ < text_.size() && text_[at_] == c;
    at_ += is_next ? 1 : 0;
    return is_next;
  }
  bool AtEnd() {
    SkipSpace();
    return at_ == text_.size();
  }
  void SkipSpace() {
    while (at_ < text_.size() && text_[at_] == ' ') {
      ++at_;
    }
  }

  std::string_view text_;
  FileSizes& sizes_;
  std::size_t at_ = 0;
};

}  // namespace

Amount EvaluateAmount(const JsonValue& value, FileSizes& sizes) {
  if (!value.IsString()) {
    return {value.AsInt(0, kLargest), 0};
  }
  const std::string text = value.AsString();
  const std::optional<Amount> amount = Parser(text, sizes).Sum();
  if (!amount || amount->fixed + amount->per_sample < 0) {
    std::string found = " (with";
    found += sizes.sequence_length > 0 ? " sequence_length " + std::to_string(sizes.sequence_length)
                                       : " no sequence_length";
    found += sizes.image_size > 0 ? ", image_size " + std::to_string(sizes.image_size) : "";
    throw InputError(value.path().str(), value.Shown() + found + ")",
                     std::string(kRule) + "; divisions without rest, and a result from 0 to 2^56");
  }
  return *amount;
}

std::int64_t EvaluateSize(const JsonValue& value, FileSizes& sizes, std::int64_t min,
                          std::int64_t max) {
  if (!value.IsString()) {
    return value.AsInt(min, max);
  }
  const Amount amount = EvaluateAmount(value, sizes);
  if (amount.per_sample != 0 || amount.fixed < min || amount.fixed > max) {
    throw InputError(
        value.path().str(),
        value.Shown() + (amount.per_sample != 0 ? std::string(", which depends on the batch")
                                                : " = " + std::to_string(amount.fixed)),
        "a size from " + std::to_string(min) + " to " + std::to_string(max));
  }
  return amount.fixed;
}

}  // namespace shardwright
