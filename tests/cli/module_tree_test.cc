#include "cli/module_tree.h"

#include <string>
#include <tuple>

#include <doctest/doctest.h>

#include "tests/schedule/tiny_model.h"

namespace shardwright {
namespace {

using testing::TinyModel;

TEST_CASE("ModuleTree: as print(model), equal numbered neighbours folded") {
  const Model model = TinyModel(true);
  CHECK(ModuleTree(model, PlainNotes(model)) ==
        "Tiny(\n"
        "  (embed): Embedding(weight [8, 4])\n"
        "  (layers): ModuleList(\n"
        "    (0-1): 2 x Block(\n"
        "      scale [4]\n"
        "      (lin): Linear(weight [4, 4], bias [4])\n"
        "    )\n"
        "  )\n"
        "  (norm): RMSNorm(weight [4])\n"
        "  (head): Linear(weight [8, 4] tied to embed.weight)\n"
        ")\n");
}

TEST_CASE("ModuleTree: the weights of equal experts are written once") {
  Model model;
  model.modules.resize(1);
  model.modules[0].class_name = "Experts";
  for (int expert = 0; expert < 3; ++expert) {
    for (const auto& [name, rows, columns] : {std::tuple("up", 8, 4), std::tuple("down", 4, 8)}) {
      model.modules[0].params.emplace_back(model.params.size());
      Parameter param;
      param.fqn = std::to_string(expert) + "." + name;
      param.shape = {rows, columns};
      model.params.push_back(param);
    }
  }
  CHECK(ModuleTree(model, PlainNotes(model)) == "Experts(3 x (up [8, 4], down [4, 8]))\n");
  model.params.back().trainable = false;
  CHECK(ModuleTree(model, PlainNotes(model)) ==
        "Experts(up [8, 4], down [4, 8], up [8, 4], down [4, 8], up [8, 4], down [4, 8] frozen)\n");
}

TEST_CASE("ModuleTree: units and recomputation of a plan; blocks that differ are not folded") {
  Model model = TinyModel();
  model.params[1].trainable = false;  // layers.0.scale
  Plan plan;
  plan.units.resize(2);
  plan.units[0].name = "layers.0.lin+norm";
  plan.units[0].modules = {"layers.0.lin", "norm"};
  plan.units[1].name = "root";
  plan.units[1].modules = {""};
  plan.units[1].reshard.kind = Reshard::Kind::kNever;
  plan.recompute = {{"layers.1", RecomputeKind::kFull, 1}};
  Program program;
  program.units.resize(2);
  program.units[0].elements = 24;
  program.units[1].elements = 1092;
  const std::string group = "  # unit layers.0.lin+norm: 24 parameters, freed after forward\n";
  CHECK(ModuleTree(model, PlanNotes(model, plan, program)) ==
        "FSDPTiny(  # unit: 1,092 parameters, kept after forward\n"
        "  (embed): Embedding(weight [8, 4])\n"
        "  (layers): ModuleList(\n"
        "    (0): Block(\n"
        "      scale [4] frozen\n"
        "      (lin): FSDPLinear(weight [4, 4], bias [4])" +
            group +
            "    )\n"
            "    (1): Block(  # recomputed\n"
            "      scale [4]\n"
            "      (lin): Linear(weight [4, 4], bias [4])\n"
            "    )\n"
            "  )\n"
            "  (norm): FSDPRMSNorm(weight [4])" +
            group +
            "  (head): Linear(weight [8, 4])\n"
            ")\n");
}

}  // namespace
}  // namespace shardwright
