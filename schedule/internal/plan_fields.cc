#include "schedule/internal/plan_fields.h"

#include <vector>

#include "core/text.h"

namespace shardwright::internal {

std::string FieldOf(const std::string& where, std::string_view field) {
  const bool has_field = where.find(": ") != std::string::npos;
  return where + (has_field ? "." : ": ") + std::string(field);
}

std::string UnitField(const std::string& where, std::size_t u, std::string_view field) {
  return FieldOf(where, "units[" + std::to_string(u) + "]." + std::string(field));
}

InputError UnknownModule(const Model& model, std::string_view fqn, const std::string& field) {
  std::vector<std::string> names;
  names.reserve(model.modules.size());
  for (const Module& module : model.modules) {
    if (!module.fqn.empty()) {
      names.push_back(module.fqn);
    }
  }
  return InputError(field, Quoted(fqn), "the FQN of a module", DidYouMean(fqn, names));
}

}  // namespace shardwright::internal
