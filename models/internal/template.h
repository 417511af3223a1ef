#pragma once

// Model templates: a model.json with expressions, conditions, loops and pieces, which becomes a
// plain one for a config.json (docs/model_json.md, "Templates").

#include <functional>
#include <string>

#include <nlohmann/json_fwd.hpp>

#include "models/internal/template_expression.h"

namespace shardwright {

// `source`: the template. `words`: what the row of the model type says in place of the template's
// "words", read where they are used. Other names come from `at`. Throws InputError at `at.where`.
struct TemplateParts {
  const nlohmann::json& source;
  const nlohmann::json& words;
  std::function<const nlohmann::json*(const std::string&)> piece;  // null: none has the name
  std::function<std::string(const std::string&)> place;            // of a key, for errors
};
[[nodiscard]] nlohmann::json ExpandTemplate(const TemplateParts& parts,
                                            const ExpressionContext& at);

}  // namespace shardwright
