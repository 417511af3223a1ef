#pragma once

// Words that the checks of a plan share: field paths and quoting.

#include <cstddef>
#include <string>
#include <string_view>

#include "core/error.h"
#include "models/model.h"

namespace shardwright::internal {

// "p.json: plan" + "units" -> "p.json: plan.units"; "p.json" + "units" -> "p.json: units".
[[nodiscard]] std::string FieldOf(const std::string& where, std::string_view field);

// FieldOf(where, "units[<u>].<field>").
[[nodiscard]] std::string UnitField(const std::string& where, std::size_t u,
                                    std::string_view field);

// "got "model.layer.0", expected the FQN of a module; did you mean "model.layers.0"?"
[[nodiscard]] InputError UnknownModule(const Model& model, std::string_view fqn,
                                       const std::string& field);

}  // namespace shardwright::internal
