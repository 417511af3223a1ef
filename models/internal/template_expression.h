#pragma once

// The expressions in model templates (docs/model_json.md): "hidden_size / num_attention_heads",
// "multi_query and not new_decoder_architecture", "act if act != 'gelu_10' else 'gelu'".

#include <functional>
#include <string>
#include <string_view>

#include <nlohmann/json_fwd.hpp>

namespace shardwright {

// What a name stands for: a number, text, boolean, list or null. Throws for an unknown name.
using NameLookup = std::function<nlohmann::json(const std::string&)>;

// `where` names the source in errors.
struct ExpressionContext {
  const NameLookup& lookup;
  std::string where;
};

// Python's operators and their order: if/else, or, and, not, ==, !=, <, <=, >, >=, in, +, -, *, /,
// //, %; functions has, int, len, max, min, sqrt; texts in single quotes; a[i]. "/" of two integers
// must leave no rest. Throws InputError at `where` for such a rest, an overflow, operands that do
// not go together, and for a text that is no expression.
[[nodiscard]] nlohmann::json EvaluateExpression(std::string_view text, const ExpressionContext& at);

// Null, false, 0, "" and [] are false.
[[nodiscard]] bool IsTrue(const nlohmann::json& value);

// The variable of a loop that is not written out: a part of names, where it stands as "{i}".
[[nodiscard]] nlohmann::json NameOnly(const std::string& variable);

// Texts as they are, numbers in digits.
[[nodiscard]] std::string TextOf(const nlohmann::json& value);

// `text` with every "{expression}" replaced. A text that is one expression and nothing else becomes
// its value, of whatever type.
[[nodiscard]] nlohmann::json Interpolate(const std::string& text, const ExpressionContext& at);

}  // namespace shardwright
