#pragma once

// Files of settings in the notations that training frameworks use, as one kind of document.

#include <string>
#include <string_view>

#include "core/json.h"

namespace shardwright {

// JSON, YAML (".yaml", ".yml"), TOML (".toml"), or a command line ("train.py --fp16 --lr 1e-4", any
// other name whose text does not begin with '{'), as a JSON document: paths in errors are key
// paths. YAML's scalars follow PyYAML: quoted ones are strings, yes/no/on/off are booleans, "5e8"
// is a string. The words before a command line's first flag are dropped; a flag without a value is
// true. Throws InputError; files above 1 MiB, more than 100,000 values (after YAML's aliases) and
// nesting deeper than 50 are refused.
[[nodiscard]] JsonValue ReadDocument(const std::string& file);
[[nodiscard]] JsonValue ParseDocument(std::string_view text, const std::string& file);

}  // namespace shardwright
