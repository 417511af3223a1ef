#include "analysis/report/unit_picture.h"

#include <map>
#include <optional>
#include <string_view>

#include "core/ranges.h"
#include "schedule/dialect_facts.h"
#include "schedule/plan_names.h"

namespace shardwright {
namespace {

bool IsModelOp(const OpShape& shape) {
  return shape.code == OpCode::kCompute || shape.code == OpCode::kAccumulateGrad;
}

bool HoldsParameters(Category category) {
  return category == Category::kUnshardedParameter || category == Category::kAllGather ||
         category == Category::kParameterShard;
}

// The unit whose parameters each buffer holds, or kNoSubject, as told by the ops that work on
// units.
std::vector<std::uint32_t> UnitsOfBuffers(const Program& program) {
  std::vector<std::uint32_t> units(program.buffers.size(), kNoSubject);
  for (const Body* body : {&program.init, &program.step}) {
    for (std::size_t i = 0; i < body->size(); ++i) {
      const Op& op = body->ops[i];
      if (IsModelOp(program.ShapeOf(op)) || op.subject == kNoSubject) {
        continue;
      }
      for (const Access& access : body->AccessesOf(OpId(i))) {
        if (HoldsParameters(program.buffers[access.buffer.value].category)) {
          units[access.buffer.value] = op.subject;
        }
      }
    }
  }
  return units;
}

class Drawer {
 public:
  explicit Drawer(const Program& program)
      : program_(program), unit_of_buffer_(UnitsOfBuffers(program)) {}

  void Draw(UnitPicture& picture) const {
    std::vector<bool> is_drawn(program_.units.size(), false);
    std::vector<std::uint32_t> ahead;  // gathered, not computed with yet
    for (std::size_t i = 0; i < program_.step.size(); ++i) {
      const Op& op = program_.step.ops[i];
      const OpShape& shape = program_.ShapeOf(op);
      if (op.micro_batch != 0 || op.phase == Phase::kOptimizer) {
        continue;
      }
      if (shape.code == OpCode::kAllGather && op.subject != kNoSubject) {
        ahead.push_back(op.subject);
      }
      const std::optional<std::uint32_t> unit = ComputedUnit(OpId(i));
      if (!unit) {
        continue;
      }
      if (op.phase == Phase::kForward &&
          (picture.runs.empty() || picture.runs.back().unit != *unit)) {
        picture.runs.push_back({*unit});
        is_drawn[*unit] = true;
      }
      ahead.erase(std::remove(ahead.begin(), ahead.end(), *unit), ahead.end());
      for (const std::uint32_t gathered : ahead) {
        Add(picture.arrows, {*unit, gathered, op.phase});
      }
      ahead.clear();
    }
    for (std::uint32_t u = 0; u < is_drawn.size(); ++u) {
      if (!is_drawn[u]) {
        picture.runs.push_back({u});
      }
    }
  }

 private:
  // The unit whose parameters a model op reads.
  [[nodiscard]] std::optional<std::uint32_t> ComputedUnit(OpId op) const {
    if (!IsModelOp(program_.ShapeOf(program_.step.ops[op.value]))) {
      return std::nullopt;
    }
    for (const Access& access : program_.step.AccessesOf(op)) {
      const std::uint32_t unit = unit_of_buffer_[access.buffer.value];
      if (access.role == Role::kParameter && unit != kNoSubject) {
        return unit;
      }
    }
    return std::nullopt;
  }

  static void Add(std::vector<PrefetchArrow>& arrows, const PrefetchArrow& arrow) {
    if (!IsIn(arrows, arrow)) {
      arrows.push_back(arrow);
    }
  }

  const Program& program_;
  std::vector<std::uint32_t> unit_of_buffer_;
};

std::string ReshardText(const Reshard& reshard) {
  return reshard.kind == Reshard::Kind::kToGroup ? "to " + std::to_string(reshard.group) + " ranks"
                                                 : std::string(NameIn(kReshardNames, reshard.kind));
}

// How the plan recomputes something in the unit's modules.
std::string RecomputeText(const Plan& plan, const UnitPlan& unit) {
  for (const RecomputeRegion& region : plan.recompute) {
    for (const std::string& module : unit.modules) {
      if (region.module == module || (!module.empty() && region.module.starts_with(module + "."))) {
        return region.kind == RecomputeKind::kFull ? "full" : "selective";
      }
    }
  }
  return "";
}

}  // namespace

UnitPicture DrawUnits(const PlanFile& file, const Program& program) {
  std::map<std::string_view, const UnitPlan*> plans;
  for (const UnitPlan& unit : file.plan.units) {
    plans[unit.name] = &unit;
  }
  const bool has_reshard = FactsOf(file.plan).frees_units;
  UnitPicture picture;
  for (const UnitInfo& unit : program.units) {
    UnitRow row;
    row.name = unit.name;
    row.parameters = unit.elements;
    row.gathered = Bytes(unit.padded_elements *
                         SizeOf(UnitPrecision(file.job.precision, unit.full_precision).param));
    const auto plan = plans.find(unit.name);
    if (plan != plans.end()) {
      row.reshard = has_reshard ? ReshardText(plan->second->reshard) : "";
      row.recompute = RecomputeText(file.plan, *plan->second);
    }
    picture.units.push_back(std::move(row));
  }
  Drawer(program).Draw(picture);
  return picture;
}

}  // namespace shardwright
