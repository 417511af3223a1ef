#pragma once

#include <cstdint>
#include <functional>
#include <string>

#include "core/json.h"
#include "models/loader.h"
#include "models/model.h"

namespace shardwright {

// What a template has written the file for: a configuration, and its angles for ropes over so many
// features.
struct TemplateSource {
  std::string config;
  std::function<RopeAngles(std::int64_t)> angles;
};

// Builds a model from our own model.json (docs/model_json.md). Strict: unknown keys, names that
// nothing defines and shapes that do not fit throw InputError with the field path. With a
// `source` ops may write a tensor again, and limits on sizes name the configuration.
[[nodiscard]] Model ReadModelFile(const JsonValue& file, const std::string& name,
                                  const LoadOptions& options,
                                  const TemplateSource* source = nullptr);

}  // namespace shardwright
