#include "models/trainable.h"

#include <algorithm>
#include <charconv>
#include <utility>

#include "core/ranges.h"
#include "core/text.h"
#include "models/cut_experts.h"
#include "models/internal/additions.h"
#include "models/internal/builder.h"
#include "models/reference.h"

namespace shardwright {
namespace {

void Freeze(Model& model, const std::vector<std::string>& globs, const Path& where) {
  for (std::size_t i = 0; i < globs.size(); ++i) {
    bool has_match = false;
    for (Parameter& param : model.params) {
      if (MatchesGlob(globs[i], param.fqn)) {
        // An alias names storage that another parameter owns: both are frozen.
        (param.tied_to.valid() ? model.params[param.tied_to.value] : param).trainable = false;
        has_match = true;
      }
    }
    if (!has_match) {
      throw InputError(where.Field("frozen").Index(i).str(), '"' + globs[i] + '"',
                       "a pattern that matches the name of a parameter");
    }
  }
  for (Parameter& param : model.params) {
    if (param.tied_to.valid()) {
      param.trainable = model.params[param.tied_to.value].trainable;
    }
  }
}

// One of lora_targets: "x"; "!x", which takes back what others match; or "x@4" for experts.
struct Target {
  std::string glob;
  bool takes_back = false;
  std::int64_t width = 0;  // the rank, of experts; 0: it is for linear modules
};

Target TargetOf(const std::string& text, const std::string& where) {
  const std::size_t at = std::min(text.find('@'), text.size());
  Target target{text.substr(0, at), text.starts_with('!')};
  target.glob.erase(0, target.takes_back ? 1 : 0);
  if (at < text.size()) {
    const char* const end = text.data() + text.size();
    const auto [rest, problem] = std::from_chars(text.data() + at + 1, end, target.width);
    if (problem != std::errc() || rest != end || target.width < 1 ||
        target.width > ModelLimits::kFeatures) {
      throw InputError(where, Quoted(text), "a pattern, or PATTERN@N with N above 0");
    }
  }
  return target;
}

bool IsTarget(const Module& module, const std::string& glob) {
  return MatchesGlob(glob, glob.find('.') == std::string::npos ? module.name : module.fqn);
}

void CheckMatched(const std::vector<bool>& has_match, const std::vector<std::string>& globs,
                  const Path& where, const char* expected) {
  for (std::size_t i = 0; i < has_match.size(); ++i) {
    if (!has_match[i]) {
      throw InputError(where.Index(i).str(), '"' + globs[i] + '"', expected);
    }
  }
}

void FindTargets(const Model& model, const TrainableSpec& spec, const Path& where,
                 Additions& additions) {
  std::vector<Target> targets;
  std::vector<bool> has_match;
  for (const std::string& text : spec.lora_targets) {
    targets.push_back(TargetOf(text, where.Field("lora_targets").str()));
    has_match.push_back(targets.back().takes_back);
  }
  for (const ModelOp& op : model.ops) {
    const OpSpec& op_spec = model.SpecOf(op);
    const bool has_experts = op_spec.kind == OpKind::kExperts;
    if (op_spec.kind != OpKind::kLinear && !has_experts) {
      continue;
    }
    const ModuleId id = has_experts ? ExpertsModule(model, op) : FirstNameOf(model, op.module);
    const Module& module = model.modules[id.value];
    const bool is_left_out = AnyOf(targets, [&](const Target& target) {
      return target.takes_back && IsTarget(module, target.glob);
    });
    Added& added = additions[id.value];
    for (std::size_t i = 0; i < targets.size() && !is_left_out; ++i) {
      if (targets[i].takes_back || (targets[i].width > 0) != has_experts ||
          !IsTarget(module, targets[i].glob)) {
        continue;
      }
      has_match[i] = true;
      added.has_adapter = !has_experts;
      added.in = op_spec.in;
      added.out = op_spec.out;
      added.experts = op_spec;
      added.expert_rank = targets[i].width;
    }
  }
  CheckMatched(has_match, spec.lora_targets, where.Field("lora_targets"),
               "a pattern that matches the name of a linear module");
}

void FindSaved(const Model& model, const TrainableSpec& spec, const Path& where,
               const std::vector<bool>& is_shared, Additions& additions) {
  std::vector<bool> has_match(spec.lora_saved.size(), false);
  for (std::size_t m = 0; m < model.modules.size(); ++m) {
    const Module& module = model.modules[m];
    for (std::size_t i = 0; i < spec.lora_saved.size(); ++i) {
      if (module.params.empty() || module.same_as.valid() ||
          !IsTarget(module, spec.lora_saved[i])) {
        continue;
      }
      has_match[i] = true;
      if (!module.children.empty() || additions[m].has_adapter || is_shared[m]) {
        throw InputError(where.Field("lora_saved").Index(i).str(),
                         '"' + spec.lora_saved[i] + "\" for module " + module.fqn,
                         "modules with one name, without adapters and without modules below them");
      }
      additions[m].is_saved = true;
    }
  }
  CheckMatched(has_match, spec.lora_saved, where.Field("lora_saved"),
               "a pattern that matches the name of a module with parameters");
}

}  // namespace

bool MatchesGlob(std::string_view glob, std::string_view text) {
  // Greedy with one point to return to: the last star and the text it had taken so far.
  std::size_t g = 0;
  std::size_t t = 0;
  std::size_t star = std::string_view::npos;
  std::size_t resume = 0;
  while (t < text.size()) {
    if (g < glob.size() && glob[g] == '*') {
      star = g++;
      resume = t;
    } else if (g < glob.size() && (glob[g] == '?' || glob[g] == text[t])) {
      ++g;
      ++t;
    } else if (star != std::string_view::npos) {
      g = star + 1;
      t = ++resume;
    } else {
      return false;
    }
  }
  while (g < glob.size() && glob[g] == '*') {
    ++g;
  }
  return g == glob.size();
}

std::vector<bool> ConvertibleWeights(const Model& model) {
  std::vector<bool> result(model.params.size(), false);
  std::vector<bool> is_scored(model.tensors.size(), false);
  for (const ModelOp& loss : model.ops) {
    if (model.SpecOf(loss).kind != OpKind::kCrossEntropy) {
      continue;
    }
    // Behind views, scales and soft caps stands the head.
    TensorId t = loss.inputs[0];
    is_scored[t.value] = true;
    while (model.tensors[t.value].producer.valid()) {
      const ModelOp& op = model.ops[model.tensors[t.value].producer.value];
      if (!op.params.empty() || op.inputs.empty()) {
        break;
      }
      t = op.inputs[0];
      is_scored[t.value] = true;
    }
  }
  for (const ModelOp& op : model.ops) {
    // A bias stays as it is.
    if (op.name != "lora_base" && model.SpecOf(op).kind == OpKind::kLinear &&
        !is_scored[op.outputs[0].value] && !op.params.empty() &&
        model.params[op.params[0].value].shape.size() == 2) {
      result[op.params[0].value] = true;
    }
  }
  return result;
}

std::vector<std::string> MatchedTargets(const Model& model, const std::vector<std::string>& globs,
                                        const std::string& where) {
  std::vector<const Module*> linear, of_experts;
  std::int64_t chosen = 1;  // experts per token
  const std::vector<bool> convertible = ConvertibleWeights(model);
  for (const ModelOp& op : model.ops) {
    if (model.SpecOf(op).kind == OpKind::kExperts) {
      of_experts.push_back(&model.modules[ExpertsModule(model, op).value]);
      chosen = model.SpecOf(op).experts_per_token;
    } else if (!op.params.empty() && convertible[op.params[0].value]) {
      linear.push_back(&model.modules[FirstNameOf(model, op.module).value]);
    }
  }
  std::vector<std::string> result;
  const auto add = [&](const std::string& glob) {
    if (!IsIn(result, glob)) {
      result.push_back(glob);
    }
  };
  for (const std::string& given : globs) {
    // "x@32/k": the rank is shared by the experts of a token.
    const bool is_shared = given.ends_with("/k");
    Target target = TargetOf(given.substr(0, given.size() - (is_shared ? 2 : 0)), where);
    target.width = is_shared ? std::max<std::int64_t>(target.width / chosen, 1) : target.width;
    const std::string glob =
        target.width > 0 ? target.glob + '@' + std::to_string(target.width) : given;
    if (target.takes_back || (target.width > 0 && AnyOf(of_experts, [&](const Module* module) {
                                return IsTarget(*module, target.glob);
                              }))) {
      add(glob);
    }
    for (const Module* module : linear) {
      if (glob == "all-linear") {
        add(module->name);
      } else if (IsTarget(*module, glob)) {
        add(glob);
        break;
      }
    }
  }
  if (result.empty()) {
    std::string names;
    for (const std::string& glob : globs) {
      names += (names.empty() ? "" : ", ") + glob;
    }
    throw InputError(where, '"' + names + '"', "names of linear modules of " + model.name);
  }
  return result;
}

std::int64_t SamplesPerExample(TrainsBy trains_by) {
  return trains_by == TrainsBy::kOwn || trains_by >= TrainsBy::kKto ? 1 : 2;
}

bool HasReference(TrainsBy trains_by, const Rollout& rollout) {
  return trains_by == TrainsBy::kDpo || trains_by == TrainsBy::kKto ||
         (trains_by == TrainsBy::kGrpo && rollout.has_reference);
}

namespace {

void ApplyAdapters(Model& model, const TrainableSpec& spec, const Path& where) {
  if (spec.lora_rank == 0) {
    const std::pair<const char*, bool> others[] = {{"lora_targets", !spec.lora_targets.empty()},
                                                   {"lora_dropout", spec.lora_dropout != 0.0},
                                                   {"lora_alpha", spec.lora_alpha != 0.0},
                                                   {"lora_magnitudes", spec.lora_magnitudes},
                                                   {"lora_saved", !spec.lora_saved.empty()}};
    for (const auto& [name, is_given] : others) {
      if (is_given) {
        throw InputError(where.Field("lora_rank").str(), std::string("0 with ") + name,
                         "a rank above 0");
      }
    }
    return;
  }
  // DoRA's product of the identity counts in^2 x rank.
  const std::int64_t most = spec.lora_magnitudes ? std::int64_t{1} << 16 : ModelLimits::kFeatures;
  if (spec.lora_rank < 0 || spec.lora_rank > most) {
    throw InputError(where.Field("lora_rank").str(), std::to_string(spec.lora_rank),
                     "0 to " + std::to_string(most));
  }
  if (AllOf(spec.lora_targets, [](const std::string& glob) { return glob.starts_with('!'); })) {
    throw InputError(where.Field("lora_targets").str(),
                     "none with lora_rank " + std::to_string(spec.lora_rank),
                     "at least one pattern, such as \"q_proj\"");
  }
  Additions additions(model.modules.size());
  const std::vector<bool> is_shared = SharedModules(model);
  FindTargets(model, spec, where, additions);
  FindSaved(model, spec, where, is_shared, additions);
  InsertAdditions(model, spec, is_shared, additions);
}

}  // namespace

void ApplyTrainable(Model& model, const TrainableSpec& spec, const Path& where) {
  if (spec.trains_by == TrainsBy::kReward) {
    AddScore(model, where);
  } else if (spec.trains_by == TrainsBy::kGrpo) {
    ScoreCompletions(model, spec.rollout.completion, where);
  }
  Freeze(model, spec.frozen, where);
  ApplyAdapters(model, spec, where);
  AddForwards(model, spec);
}

}  // namespace shardwright
