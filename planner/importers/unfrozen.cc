// Parameters that learn by name, all others being frozen.
//
// Example: of a model with 32 layers "model.layers.3*" and "lm_head" leave frozen the
// embedding, the last norm, and layers 0 to 29 as "model.layers.0.*" and so on.

#include <algorithm>
#include <cstdlib>

#include "core/ranges.h"
#include "core/text.h"
#include "models/reference.h"
#include "planner/importers/read_trainer.h"
#include "schedule/wrap.h"

namespace shardwright {
namespace {

// The shortest beginnings that no parameter has which learns.
std::vector<std::string> FrozenGlobs(const Model& model) {
  std::vector<std::string> globs;
  for (const Parameter& param : model.params) {
    std::string glob;
    const auto learns = [&](const Parameter& other) {
      return other.trainable && other.fqn.starts_with(glob);
    };
    std::size_t dot = 0;
    do {
      dot = param.fqn.find('.', dot) + 1;  // 0 behind the last one
      glob = param.fqn.substr(0, dot > 0 ? dot : param.fqn.size());
    } while (dot > 0 && AnyOf(model.params, learns));
    glob += dot > 0 ? "*" : "";
    if (!param.trainable && !IsOfReference(model, param.module) && !IsIn(globs, glob)) {
      globs.push_back(glob);
    }
  }
  return globs;
}

// A part of a name is enough (_setup_freeze_tuning of LLaMA-Factory 0.9.5, model/adapter.py).
// Example: of 32 layers, count 2 and modules "mlp" are "*.30.mlp*" and "*.31.mlp*".
Patterns PatternsOf(const LearningLayers& layers, const Model& model) {
  const std::int64_t all = std::ssize(BlocksOf(model));
  const std::int64_t count = std::min(std::abs(layers.count), all);
  const std::int64_t first = layers.count > 0 ? all - count : 0;
  Patterns patterns;
  for (const std::string& module : layers.modules) {
    auto& [text, globs] = patterns.emplace_back(module, std::vector<std::string>());
    for (std::int64_t i = first; i < first + count; ++i) {
      globs.push_back("*." + std::to_string(i) + '.' + (module == "all" ? "" : module) + '*');
    }
  }
  for (const std::string& part : layers.outside) {
    patterns.emplace_back(part, std::vector<std::string>{'*' + part + '*'});
  }
  return patterns;
}

}  // namespace

void ApplyUnfrozen(const ScriptFacts& script, const std::string& where, PlanFile& file) {
  std::vector<Parameter>& params = file.model.params;
  const Patterns learns = script.layers ? PatternsOf(*script.layers, file.model) : script.learns;
  if (learns.empty()) {
    return;
  }
  for (Parameter& param : params) {
    param.trainable = false;
  }
  for (const auto& [text, globs] : learns) {
    bool is_known = false;
    for (Parameter& param : params) {
      const auto names = [&](const std::string& glob) { return MatchesGlob(glob, param.fqn); };
      is_known |= AnyOf(globs, [&](const std::string& glob) { return names("*" + glob); });
      param.trainable |= AnyOf(globs, names) && !param.tied_to.valid();  // storages have one name
    }
    const bool is_last = &text == &learns.back().first;
    if (!is_known || (is_last && NoneOf(params, &Parameter::trainable))) {
      throw InputError(where + ": what learns", Quoted(text),
                       "a pattern of names of parameters of " + file.model.name);
    }
  }
  for (Parameter& param : params) {
    param.trainable = (param.tied_to.valid() ? params[param.tied_to.value] : param).trainable;
  }
  file.job.frozen = FrozenGlobs(file.model);
}

}  // namespace shardwright
