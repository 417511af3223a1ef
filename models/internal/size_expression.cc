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

// A product of integers and, so often, "batch".
struct Term {
  std::int64_t factor = 0;
  int batches = 0;
};

// Reads one text from left to right. Nothing: no such expression, or too large.
class Parser {
 public:
  Parser(std::string_view text, FileSizes& sizes) : text_(text), sizes_(sizes) {}

  std::optional<Amount> Sum() {
    Amount sum;
    bool is_negative = Accept('-');
    while (true) {
      const std::optional<Term> term = Product();
      if (!term) {
        return std::nullopt;
      }
      std::int64_t& part = PartOf(term->batches, sum);
      part += is_negative ? -term->factor : term->factor;
      if (std::abs(part) > kLargest) {
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
  static std::int64_t& PartOf(int batches, Amount& sum) {
    if (batches == 0) {
      return sum.fixed;
    }
    return batches == 1 ? sum.per_sample : sum.per_pair;
  }

  std::optional<Term> Product() {
    std::optional<Term> product = Factor();
    while (product) {
      if (Accept('*')) {
        const std::optional<Term> factor = Factor();
        product = factor ? Times(*product, *factor) : std::nullopt;
      } else if (Accept('/')) {
        product = Divided(*product, Factor());
      } else {
        break;
      }
    }
    return product;
  }

  static std::optional<Term> Times(const Term& a, const Term& b) {
    Term product{0, a.batches + b.batches};
    if (product.batches > 2 || __builtin_mul_overflow(a.factor, b.factor, &product.factor) ||
        product.factor > kLargest) {
      return std::nullopt;
    }
    return product;
  }

  static std::optional<Term> Divided(const Term& a, std::optional<Term> by) {
    if (!by || by->batches != 0 || by->factor == 0 || a.factor % by->factor != 0) {
      return std::nullopt;
    }
    return Term{a.factor / by->factor, a.batches};
  }

  std::optional<Term> Factor() {
    SkipSpace();
    std::string word;
    while (at_ < text_.size() &&
           (std::isalnum(static_cast<unsigned char>(text_[at_])) != 0 || text_[at_] == '_')) {
      word += text_[at_++];
    }
    if (word == "batch") {
      return Term{1, 1};
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
    const Term number{std::stoll(word), 0};
    return number.factor <= kLargest ? std::optional(number) : std::nullopt;
  }

  static std::optional<Term> Known(std::int64_t size) {
    return size > 0 ? std::optional(Term{size, 0}) : std::nullopt;
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
    return {.fixed = value.AsInt(0, kLargest)};
  }
  const std::string text = value.AsString();
  const std::optional<Amount> amount = Parser(text, sizes).Sum();
  if (!amount || amount->Of(1) < 0) {
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
  const bool is_of_batch = amount.per_sample != 0 || amount.per_pair != 0;
  if (is_of_batch || amount.fixed < min || amount.fixed > max) {
    throw InputError(value.path().str(),
                     value.Shown() + (is_of_batch ? std::string(", which depends on the batch")
                                                  : " = " + std::to_string(amount.fixed)),
                     "a size from " + std::to_string(min) + " to " + std::to_string(max));
  }
  return amount.fixed;
}

}  // namespace shardwright
