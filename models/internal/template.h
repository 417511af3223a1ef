#pragma once

// Model templates: a model.json with expressions, conditions, loops and pieces, which becomes a
// plain one for a config.json (docs/model_json.md, "Templates").

#include <nlohmann/json_fwd.hpp>

#include "models/internal/template_expression.h"

namespace shardwright {

// `source`: the template. `words`: what the row of the model type says in place of the template's
// "words", read where they are used. Other names come from `at`. Throws InputError at `at.where`.
struct TemplateParts {
  const nlohmann::json& source;
  const nlohmann::json& pieces;
  const nlohmann::json& words;
};
[[nodiscard]] nlohmann::json ExpandTemplate(const TemplateParts& parts,
                                            const ExpressionContext& at);

}  // namespace shardwright
