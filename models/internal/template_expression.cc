#include "models/internal/template_expression.h"

#include <cctype>
#include <cmath>
#include <cstdint>
#include <vector>

#include <nlohmann/json.hpp>

#include "core/error.h"
#include "core/ranges.h"

namespace shardwright {
namespace {

using Value = nlohmann::json;

class ExpressionParser {
 public:
  ExpressionParser(std::string_view text, const ExpressionContext& at) : text_(text), at_(at) {}

  Value Whole() {
    Value value = Choice();
    SkipSpace();
    Require(next_ == text_.size(), "an operator or the end");
    return value;
  }

 private:
  // The branch that is not taken is read and not evaluated.
  Value Choice() {
    if (text_.find("if", next_) == std::string_view::npos) {
      return Or();
    }
    const std::size_t begin = next_;
    const bool was_dead = is_dead_;
    is_dead_ = true;
    (void)Or();
    const std::size_t end = next_;
    is_dead_ = was_dead;
    if (!Accept("if")) {
      next_ = begin;
      return Or();
    }
    const bool is_taken = IsTrue(Or());
    Expect("else");
    is_dead_ = was_dead || is_taken;
    const Value other = Choice();
    is_dead_ = was_dead;
    if (!is_taken) {
      return other;
    }
    const std::size_t after = next_;
    next_ = begin;
    Value value = Or();
    Require(next_ == end, "an expression that reads the same twice");
    next_ = after;
    return value;
  }

  Value Or() {
    Value left = And();
    while (Accept("or")) {
      const bool was_dead = is_dead_;
      is_dead_ = is_dead_ || IsTrue(left);
      Value right = And();
      is_dead_ = was_dead;
      left = IsTrue(left) ? left : right;
    }
    return left;
  }

  Value And() {
    Value left = Not();
    while (Accept("and")) {
      const bool was_dead = is_dead_;
      is_dead_ = is_dead_ || !IsTrue(left);
      Value right = Not();
      is_dead_ = was_dead;
      left = IsTrue(left) ? right : left;
    }
    return left;
  }

  Value Not() {
    if (Accept("not")) {
      return !IsTrue(Not());
    }
    return Comparison();
  }

  Value Comparison() {
    Value left = Sum();
    if (Accept("==")) {
      return left == Sum();
    }
    if (Accept("!=")) {
      return left != Sum();
    }
    if (Accept("<=")) {
      return Number(left) <= Number(Sum());
    }
    if (Accept(">=")) {
      return Number(left) >= Number(Sum());
    }
    if (Accept("<")) {
      return Number(left) < Number(Sum());
    }
    if (Accept(">")) {
      return Number(left) > Number(Sum());
    }
    if (Accept("in")) {
      const Value list = Sum();
      if (list.is_string() && left.is_string()) {  // as Python: a part of the text
        return list.get<std::string>().find(left.get<std::string>()) != std::string::npos;
      }
      return list.is_array() && IsIn(list, left);
    }
    return left;
  }

  Value Sum() {
    Value left = Product();
    while (true) {
      if (Accept("+")) {
        left = Calculate('+', left, Product());
      } else if (Accept("-")) {
        left = Calculate('-', left, Product());
      } else {
        return left;
      }
    }
  }

  Value Product() {
    Value left = Unary();
    while (true) {
      if (Accept("*")) {
        left = Calculate('*', left, Unary());
      } else if (Accept("//")) {
        left = Calculate('d', left, Unary());
      } else if (Accept("/")) {
        left = Calculate('/', left, Unary());
      } else if (Accept("%")) {
        left = Calculate('%', left, Unary());
      } else {
        return left;
      }
    }
  }

  Value Unary() { return Accept("-") ? Calculate('-', 0, Unary()) : Item(); }

  Value Item() {
    Value value = Primary();
    while (Accept("[")) {
      const Value index = Choice();
      Expect("]");
      if (is_dead_) {
        continue;
      }
      const auto i = index.is_number_integer() ? index.get<std::int64_t>() : -1;
      if (!value.is_array() || i < 0 || i >= static_cast<std::int64_t>(value.size())) {
        Fail(value.dump(), "a list with an entry " + index.dump());
      }
      Value entry = value[static_cast<std::size_t>(i)];
      value = std::move(entry);
    }
    return value;
  }

  Value Primary() {
    SkipSpace();
    if (Accept("(")) {
      Value value = Choice();
      Expect(")");
      return value;
    }
    if (next_ < text_.size() && text_[next_] == '\'') {
      const std::size_t end = text_.find('\'', next_ + 1);
      Require(end != std::string_view::npos, "a quote at the end of a text");
      const std::string text(text_.substr(next_ + 1, end - next_ - 1));
      next_ = end + 1;
      return text;
    }
    const std::string word = Word();
    Require(!word.empty(), "an operand");
    if (std::isdigit(static_cast<unsigned char>(word[0])) != 0) {
      return Value::parse(word, nullptr, /*allow_exceptions=*/false);
    }
    if (word == "true" || word == "false") {
      return word == "true";
    }
    if (word == "null") {
      return nullptr;
    }
    if (Accept("(")) {
      return Call(word);
    }
    Value value = is_dead_ ? Value() : at_.lookup(word);
    if (value.is_binary() && word.size() != text_.size()) {
      Fail(word, "no number of a repeat, which stands in names only");
    }
    return value;
  }

  Value Call(const std::string& name) {
    std::vector<Value> arguments;
    while (!Accept(")")) {
      arguments.push_back(Choice());
      (void)Accept(",");
    }
    if (is_dead_) {
      return nullptr;
    }
    if (name == "has") {
      return !Argument(arguments, 0).is_null();
    }
    if (name == "len") {
      return Argument(arguments, 0).is_array() ? Argument(arguments, 0).size() : std::size_t{0};
    }
    if (name == "sqrt") {
      return std::sqrt(Number(Argument(arguments, 0)));
    }
    if (name == "int") {
      const double number = Number(Argument(arguments, 0));
      Require(std::abs(number) < 9e18, "a number below 9e18");
      return static_cast<std::int64_t>(number);
    }
    Require(name == "min" || name == "max", "has, int, len, max, min or sqrt");
    const bool is_first_less = Number(Argument(arguments, 0)) < Number(Argument(arguments, 1));
    return arguments[(name == "min") == is_first_less ? 0 : 1];
  }

  const Value& Argument(const std::vector<Value>& arguments, std::size_t i) const {
    Require(i < arguments.size(), "more arguments");
    return arguments[i];
  }

  Value Calculate(char op, const Value& a, const Value& b) {
    if (is_dead_) {
      return nullptr;
    }
    if (op == '+' && a.is_string() && b.is_string()) {
      return a.get<std::string>() + b.get<std::string>();
    }
    if (a.is_number_integer() && b.is_number_integer()) {
      return Whole(op, a.get<std::int64_t>(), b.get<std::int64_t>());
    }
    const double x = Number(a);
    const double y = Number(b);
    switch (op) {
      case '+':
        return x + y;
      case '-':
        return x - y;
      case '*':
        return x * y;
      case '/':
        return x / y;
      default:
        Fail(a.dump() + " and " + b.dump(), "integers");
    }
  }

  Value Whole(char op, std::int64_t a, std::int64_t b) {
    std::int64_t result = 0;
    bool overflows = false;
    switch (op) {
      case '+':
        overflows = __builtin_add_overflow(a, b, &result);
        break;
      case '-':
        overflows = __builtin_sub_overflow(a, b, &result);
        break;
      case '*':
        overflows = __builtin_mul_overflow(a, b, &result);
        break;
      default:
        if (b <= 0 || a < 0 || (op == '/' && a % b != 0)) {
          Fail(std::to_string(a) + " / " + std::to_string(b), "a division without rest");
        }
        result = op == '%' ? a % b : a / b;
    }
    if (overflows) {
      Fail(std::to_string(a) + " and " + std::to_string(b), "numbers whose result is below 2^63");
    }
    return result;
  }

  double Number(const Value& value) {
    if (is_dead_) {
      return 0.0;
    }
    if (!value.is_number()) {
      Fail(value.is_null() ? "no value" : value.dump(), "a number");
    }
    return value.get<double>();
  }

  void Require(bool holds, std::string_view expected) const {
    if (!holds) {
      Fail("position " + std::to_string(next_), std::string(expected));
    }
  }
  [[noreturn]] void Fail(const std::string& found, const std::string& expected) const {
    throw InputError(at_.where, found + " in \"" + std::string(text_) + '"', expected);
  }

  // Words are accepted whole, so that "order" is not "or" and "der".
  bool Accept(std::string_view token) {
    SkipSpace();
    if (!text_.substr(next_).starts_with(token)) {
      return false;
    }
    const std::size_t end = next_ + token.size();
    if (IsLetter(token.back()) && end < text_.size() && IsLetter(text_[end])) {
      return false;
    }
    next_ = end;
    return true;
  }
  void Expect(std::string_view token) { Require(Accept(token), token); }
  std::string Word() {
    SkipSpace();
    std::size_t end = next_;
    while (end < text_.size() && (IsLetter(text_[end]) || text_[end] == '.')) {
      ++end;
    }
    const std::string word(text_.substr(next_, end - next_));
    next_ = end;
    return word;
  }
  static bool IsLetter(char c) {
    return std::isalnum(static_cast<unsigned char>(c)) != 0 || c == '_';
  }
  void SkipSpace() {
    while (next_ < text_.size() && text_[next_] == ' ') {
      ++next_;
    }
  }

  std::string_view text_;
  const ExpressionContext& at_;
  std::size_t next_ = 0;
  bool is_dead_ = false;  // what is read now is not evaluated
};

}  // namespace

nlohmann::json EvaluateExpression(std::string_view text, const ExpressionContext& at) {
  return ExpressionParser(text, at).Whole();
}

bool IsTrue(const nlohmann::json& value) {
  switch (value.type()) {
    case nlohmann::json::value_t::null:
      return false;
    case nlohmann::json::value_t::boolean:
      return value.get<bool>();
    case nlohmann::json::value_t::string:
      return !value.get<std::string>().empty();
    case nlohmann::json::value_t::array:
    case nlohmann::json::value_t::object:
      return !value.empty();
    default:
      return value.get<double>() != 0.0;
  }
}

nlohmann::json NameOnly(const std::string& variable) {
  return nlohmann::json::binary({variable.begin(), variable.end()});
}

std::string TextOf(const nlohmann::json& value) {
  if (value.is_binary()) {
    return '{' + std::string(value.get_binary().begin(), value.get_binary().end()) + '}';
  }
  return value.is_string() ? value.get<std::string>() : value.dump();
}

nlohmann::json Interpolate(const std::string& text, const ExpressionContext& at) {
  if (text.size() > 2 && text.front() == '{' && text.find('}') == text.size() - 1) {
    return EvaluateExpression(std::string_view(text).substr(1, text.size() - 2), at);
  }
  std::string result;
  for (std::size_t next = 0; next < text.size();) {
    const std::size_t open = text.find('{', next);
    if (open == std::string::npos) {
      return result + text.substr(next);
    }
    const std::size_t close = text.find('}', open);
    if (close == std::string::npos) {
      throw InputError(at.where, '"' + text + '"', "a closing brace");
    }
    result += text.substr(next, open - next);
    const nlohmann::json value =
        EvaluateExpression(std::string_view(text).substr(open + 1, close - open - 1), at);
    result += TextOf(value);
    next = close + 1;
  }
  return result;
}

}  // namespace shardwright
