#pragma once

// Names of modules and parameters in other dialects. Our models are named as transformers 4 names
// them; transformers 5 fuses experts and renames a few modules, torchtitan has names of its own,
// and checkpoint files of some models leave prefixes out.

#include <array>
#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "core/units.h"
#include "models/model.h"

namespace shardwright {

enum class FqnDialect : std::uint8_t { kHfV4, kHfV5, kTorchtitan, kCheckpoint };
inline constexpr std::array<std::string_view, 4> kFqnDialectNames = {"hf-v4", "hf-v5", "torchtitan",
                                                                     "checkpoint"};

// One parameter of the model under its other name. Experts that a dialect keeps in one tensor are
// one parameter of it.
struct NamedParameter {
  std::string fqn;
  std::vector<std::int64_t> shape;
  bool trainable = true;
  std::string tied_to;           // the earlier name of the same storage; empty: none
  std::vector<ParamId> sources;  // ours, all of one unit
};

// The names in `dialect` of a model's parameters, in the order of the model. Throws InputError for
// a model whose type has no names in it.
[[nodiscard]] std::vector<NamedParameter> NamedParameters(const Model& model, FqnDialect dialect);

// The name of a module; "" stays "". Throws InputError where the dialect has no such module.
[[nodiscard]] std::string ModuleName(const Model& model, const std::string& fqn,
                                     FqnDialect dialect);

}  // namespace shardwright
