#include "cli/module_tree.h"

#include <algorithm>
#include <cstddef>
#include <string_view>
#include <unordered_map>
#include <utility>

#include "cli/planned_units.h"
#include "cli/table.h"
#include "core/printable.h"
#include "core/text.h"
#include "schedule/dialect_facts.h"

namespace shardwright {
namespace {

using Lines = std::vector<std::string>;

// "weight [4096, 4096]", with what is special about the parameter.
std::string ParameterText(const Model& model, ParamId id) {
  const Parameter& param = model.params[id.value];
  std::string text = param.fqn.substr(param.fqn.rfind('.') + 1) + " " + ShapeText(param.shape);
  if (param.tied_to.valid()) {
    text += " tied to " + model.params[param.tied_to.value].fqn;
  }
  if (!param.trainable) {
    text += " frozen";
  }
  return text;
}

// The parameters of a module without children. Those of many experts repeat: "256 x (weight [2048,
// 7168], weight [2048, 7168], weight [7168, 2048])".
std::string ParametersText(const Model& model, const Module& module) {
  Lines texts;
  for (const ParamId id : module.params) {
    texts.push_back(ParameterText(model, id));
  }
  std::size_t period = 1;
  while (period < texts.size() && (texts.size() % period != 0 ||
                                   !std::equal(texts.begin() + static_cast<std::ptrdiff_t>(period),
                                               texts.end(), texts.begin()))) {
    ++period;
  }
  const std::size_t times = period < texts.size() ? texts.size() / period : 1;
  const std::string text = Listed(std::span(texts).first(texts.size() / times));
  return times > 1 ? std::to_string(times) + " x (" + text + ")" : text;
}

// A module whose lines wait to be folded with equal neighbours.
struct Run {
  std::string first;
  std::string last;
  std::size_t count = 0;
  Lines lines;
};

// Only numbered modules (of a ModuleList or Sequential) are folded, as PyTorch does.
bool IsNumber(const std::string& name) {
  return !name.empty() && name.find_first_not_of("0123456789") == std::string::npos;
}

void AppendRun(const Run& run, Lines& out) {
  std::string label = "  (" + run.first;
  label += run.count > 1 ? "-" + run.last + "): " + std::to_string(run.count) + " x " : "): ";
  out.push_back(label + run.lines[0]);
  for (std::size_t i = 1; i < run.lines.size(); ++i) {
    out.push_back("  " + run.lines[i]);
  }
}

Lines LinesOf(const Model& model, const ModuleNotes& notes, ModuleId id) {
  const Module& module = model.modules[id.value];
  const std::string& comment = notes.comments[id.value];
  const std::string end = comment.empty() ? "" : "  # " + comment;
  Lines lines(1, notes.class_names[id.value] + "(");
  if (module.children.empty()) {
    lines[0] += ParametersText(model, module) + ")" + end;
    return lines;
  }
  lines[0] += end;
  for (const ParamId param : module.params) {
    lines.push_back("  " + ParameterText(model, param));
  }
  Run run;
  for (const ModuleId child : module.children) {
    const std::string& name = model.modules[child.value].name;
    Lines child_lines = LinesOf(model, notes, child);
    if (run.count > 0 && IsNumber(run.first) && IsNumber(name) && child_lines == run.lines) {
      run.last = name;
      ++run.count;
      continue;
    }
    if (run.count > 0) {
      AppendRun(run, lines);
    }
    run = {name, name, 1, std::move(child_lines)};
  }
  AppendRun(run, lines);
  lines.emplace_back(")");
  return lines;
}

std::string ReshardText(const Reshard& reshard) {
  return reshard.kind == Reshard::Kind::kAlways ? "freed after forward"
         : reshard.kind == Reshard::Kind::kNever
             ? "kept after forward"
             : "kept in groups of " + std::to_string(reshard.group) + " after forward";
}

// DeepSpeed hooks into modules as they are.
std::string WrappedClass(Dialect dialect, const std::string& name) {
  return (dialect == Dialect::kFsdp2   ? "FSDP"
          : dialect == Dialect::kFsdp1 ? "FullyShardedDataParallel: "
          : dialect == Dialect::kDdp   ? "DistributedDataParallel: "
                                       : "") +
         name;
}

void AddComment(std::string& comment, const std::string& text) {
  comment += (comment.empty() ? "" : "; ") + text;
}

}  // namespace

ModuleNotes PlainNotes(const Model& model) {
  ModuleNotes notes;
  for (const Module& module : model.modules) {
    notes.class_names.push_back(module.class_name);
  }
  notes.comments.resize(model.modules.size());
  return notes;
}

ModuleNotes PlanNotes(const Model& model, const Plan& plan, const Program& program) {
  ModuleNotes notes = PlainNotes(model);
  std::unordered_map<std::string_view, std::size_t> modules;  // by name
  for (std::size_t m = 0; m < model.modules.size(); ++m) {
    modules.emplace(model.modules[m].fqn, m);
  }
  const std::vector<UnitInfo> infos = PlannedUnits(plan, program);
  for (std::size_t u = 0; u < plan.units.size(); ++u) {
    const UnitPlan& unit = plan.units[u];
    std::string text = unit.modules.size() > 1 ? "unit " + unit.name : std::string("unit");
    text += ": " + WithCommas(infos[u].elements) + " parameters";
    if (FactsOf(plan).frees_units) {
      text += ", " + ReshardText(unit.reshard);
    }
    for (const std::string& fqn : unit.modules) {
      const std::size_t m = modules.at(fqn);
      notes.class_names[m] = WrappedClass(plan.dialect, notes.class_names[m]);
      AddComment(notes.comments[m], text);
    }
  }
  for (const RecomputeRegion& region : plan.recompute) {
    std::string& comment = notes.comments[modules.at(region.module)];
    AddComment(comment, region.kind == RecomputeKind::kFull
                            ? std::string("recomputed")
                            : "recomputed but for attention and one linear in " +
                                  std::to_string(region.keep_every));
  }
  return notes;
}

std::string ModuleTree(const Model& model, const ModuleNotes& notes) {
  std::string text;
  for (const std::string& line : LinesOf(model, notes, ModuleId(0))) {
    text += PrintableLine(line) + '\n';
  }
  return text;
}

}  // namespace shardwright
