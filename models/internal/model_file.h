#pragma once

#include <string>

#include "core/json.h"
#include "models/loader.h"
#include "models/model.h"

namespace shardwright {

// Builds a model from our own model.json (docs/model_json.md). Strict: unknown keys, names that
// nothing defines and shapes that do not fit throw InputError with the field path.
[[nodiscard]] Model ReadModelFile(const JsonValue& file, const std::string& name,
                                  const LoadOptions& options);

}  // namespace shardwright
