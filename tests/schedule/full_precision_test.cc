// Units for what mixed precision leaves alone: which there are, and what their collectives move.

#include <algorithm>
#include <string>
#include <vector>

#include <doctest/doctest.h>

#include "core/error.h"
#include "core/json.h"
#include "models/loader.h"
#include "schedule/lower.h"
#include "schedule/plan_names.h"
#include "schedule/verify.h"
#include "schedule/wrap.h"

namespace shardwright {
namespace {

constexpr Precision kMixed{DType::kFp32, DType::kBf16, DType::kBf16};

// Two convolutions with norms of 3 and 5 channels, and a linear layer.
Model Net(const std::string& marks) {
  std::string text = R"({
    "format": "shardwright-model", "version": 1, "class": "Net", "block_class": "Block",
    "inputs": {"image": {"shape": [2, 6, 6]}, "label": {"ids": 1}},
    "modules": [
      {"name": "a", "class": "Block", "modules": [
        {"name": "conv", "class": "Conv2d", "params": [{"name": "weight", "shape": [3, 2, 3, 3]}]},
        {"name": "norm", "class": "BatchNorm2d", @
         "params": [{"name": "weight", "shape": [3]}, {"name": "bias", "shape": [3]}]}]},
      {"name": "b", "class": "Block", "modules": [
        {"name": "conv", "class": "Conv2d", "params": [{"name": "weight", "shape": [5, 3, 3, 3]}]},
        {"name": "norm", "class": "BatchNorm2d", @
         "params": [{"name": "weight", "shape": [5]}, {"name": "bias", "shape": [5]}]}]},
      {"name": "fc", "class": "Linear", "params": [{"name": "weight", "shape": [4, 20]}]}],
    "ops": [
      {"op": "conv2d", "module": "a.conv", "inputs": ["image"], "output": "x0"},
      {"op": "batch_norm", "module": "a.norm", "inputs": ["x0"], "output": "x1"},
      {"op": "conv2d", "module": "b.conv", "inputs": ["x1"], "output": "x2"},
      {"op": "batch_norm", "module": "b.norm", "inputs": ["x2"], "output": "x3"},
      {"op": "flatten", "inputs": ["x3"], "output": "x4"},
      {"op": "linear", "module": "fc", "inputs": ["x4"], "output": "x5"},
      {"op": "cross_entropy", "inputs": ["x5", "label"], "output": "loss"}]})";
  for (std::size_t at = text.find('@'); at != std::string::npos; at = text.find('@')) {
    text.replace(at, 1, marks);
  }
  return ModelFromJson(JsonValue::Parse(text, "net.json"), "net");
}
Model Net() {
  return Net(R"("full_precision": true,)");
}

Plan PlanFor(const Model& model, Dialect dialect, const Precision& precision) {
  Plan plan;
  plan.dialect = dialect;
  (dialect == Dialect::kDdp ? plan.replicate_size : plan.shard_size) = 2;
  const std::string wrap(dialect == Dialect::kDdp ? "root" : "block");
  plan.units = Wrap(model, ParseWrap(wrap, "test"), {}, dialect, "test");
  KeepFullPrecision(model, precision, plan);
  return plan;
}

Program LowerPlan(const Model& model, const Plan& plan) {
  Job job;
  job.precision = kMixed;
  Program program = Lower({model, FindKernelSet("torch-eager", "test"), job, plan});
  const auto findings = Verify(program);
  CHECK_MESSAGE(findings.empty(), (findings.empty() ? std::string() : findings.front().text));
  return program;
}

// "gather fp32 160" for the steady step's collectives of units in full precision, or of the others.
std::vector<std::string> Collectives(const Program& program, bool full_precision) {
  std::vector<std::string> lines;
  for (const Op& op : program.step.ops) {
    const OpShape& shape = program.ShapeOf(op);
    if (!InfoOf(shape.code).is_collective || op.subject == kNoSubject ||
        program.units[op.subject].full_precision != full_precision) {
      continue;
    }
    lines.push_back(std::string(InfoOf(shape.code).name) + ' ' +
                    std::string(NameIn(kTrainingDTypeNames, shape.dtype)) + ' ' +
                    std::to_string(shape.bytes.value));
  }
  return lines;
}

std::string ErrorOf(const Model& model, const Plan& plan) {
  try {
    ValidatePlan(model, {}, plan, "plan");
  } catch (const InputError& error) {
    return error.what();
  }
  return "";
}

using Strings = std::vector<std::string>;

Strings UnitLines(const Plan& plan) {
  Strings lines;
  for (const UnitPlan& unit : plan.units) {
    std::string line = unit.name + ":";
    for (const std::string& module : unit.modules) {
      line += " [" + module + "]";
    }
    lines.push_back(line + (unit.reshard.kind == Reshard::Kind::kNever ? " never" : " always") +
                    (unit.full_precision ? " full" : ""));
  }
  return lines;
}

}  // namespace

TEST_CASE("Full precision: units by dialect") {
  const Model model = Net();
  const Strings grouped = {"full_precision: [a.norm] [b.norm] never full", "a: [a] always",
                           "b: [b] always", "root: [] never"};
  CHECK(UnitLines(PlanFor(model, Dialect::kNative, kMixed)) == grouped);
  CHECK(UnitLines(PlanFor(model, Dialect::kFsdp2, kMixed)) == grouped);
  // FSDP1 hands its own strategy on.
  CHECK(UnitLines(PlanFor(model, Dialect::kFsdp1, kMixed)) ==
        Strings{"a.norm: [a.norm] always full", "b.norm: [b.norm] always full", "a: [a] always",
                "b: [b] always", "root: [] always"});
  CHECK(UnitLines(PlanFor(model, Dialect::kZero3, kMixed)) ==
        Strings{"a: [a] always", "b: [b] always", "root: [] always"});
  // Nothing to keep: one dtype for all, or no marks.
  const Strings plain = {"a: [a] always", "b: [b] always", "root: [] never"};
  CHECK(UnitLines(PlanFor(model, Dialect::kFsdp2, {})) == grouped);
  const Precision fp32{DType::kFp32, DType::kFp32, DType::kFp32};
  CHECK(UnitLines(PlanFor(model, Dialect::kFsdp2, fp32)) == plain);
  CHECK(UnitLines(PlanFor(Net(""), Dialect::kFsdp2, kMixed)) == plain);
}

TEST_CASE("Full precision: a second time changes nothing, units that become empty go") {
  const Model model = Net();
  Plan plan = PlanFor(model, Dialect::kFsdp2, kMixed);
  const std::vector<UnitPlan> once = plan.units;
  KeepFullPrecision(model, kMixed, plan);
  CHECK(plan.units == once);
  plan.units = Wrap(model, ParseWrap("module", "test"), {}, Dialect::kFsdp2, "test");
  plan.units[0].forward_prefetch = {"a.norm", "b.conv"};
  KeepFullPrecision(model, kMixed, plan);
  CHECK(UnitLines(plan) == Strings{"full_precision: [a.norm] [b.norm] never full",
                                   "a.conv: [a.conv] always", "b.conv: [b.conv] always",
                                   "fc: [fc] always", "root: [] never"});
  CHECK(plan.units[1].forward_prefetch == Strings{"b.conv"});
}

// W = 2. Rows are cut in two and padded: of the norms 2 + 2 + 3 + 3 per rank, 20 elements in fp32;
// of the convolutions 2 x 18 and 3 x 27 per rank, 72 and 162 elements in bf16, of the last
// layer 80.
TEST_CASE("Full precision: norms are gathered once and reduced once, in fp32") {
  const Model model = Net();
  const Program program = LowerPlan(model, PlanFor(model, Dialect::kFsdp2, kMixed));
  CHECK(Collectives(program, true) == Strings{"all_gather fp32 80", "reduce_scatter fp32 80"});
  Strings others = Collectives(program, false);
  std::sort(others.begin(), others.end());
  CHECK(others == Strings{"all_gather bf16 144", "all_gather bf16 144", "all_gather bf16 160",
                          "all_gather bf16 324", "all_gather bf16 324", "reduce_scatter bf16 144",
                          "reduce_scatter bf16 160", "reduce_scatter bf16 324"});
  // Native pads parameters and shards to 256 bytes: 64 elements of fp32 each, 4 x 64 in 2 shards.
  const Program native = LowerPlan(model, PlanFor(model, Dialect::kNative, kMixed));
  CHECK(Collectives(native, true) == Strings{"all_gather fp32 1024", "reduce_scatter fp32 1024"});
  // 16 bytes are 4 elements: weight and bias of 3 take 4 + 3, rounded up to 8; of 5 take 8 + 5, 14.
  const Program flat = LowerPlan(model, PlanFor(model, Dialect::kFsdp1, kMixed));
  CHECK(Collectives(flat, true) == Strings{"all_gather fp32 32", "all_gather fp32 56",
                                           "all_gather fp32 56", "reduce_scatter fp32 56",
                                           "all_gather fp32 32", "reduce_scatter fp32 32"});
}

TEST_CASE("Full precision: under autocast norms read the parameters themselves") {
  const Model model = Net();
  const auto casts = [&](const Model& m) {
    const Program program = LowerPlan(m, PlanFor(m, Dialect::kDdp, kMixed));
    Strings sizes;
    for (const Op& op : program.step.ops) {
      if (program.ShapeOf(op).code == OpCode::kCast) {
        sizes.push_back(std::to_string(program.ShapeOf(op).bytes.value));
      }
    }
    return sizes;
  };
  CHECK(casts(model) == Strings{"108", "270", "160"});
  CHECK(casts(Net("")) == Strings{"108", "12", "270", "20", "160"});
}

TEST_CASE("Full precision: what a plan may not say") {
  const Model model = Net();
  Plan plan = PlanFor(model, Dialect::kFsdp2, kMixed);
  plan.units[1].full_precision = true;
  CHECK(
      ErrorOf(model, plan) ==
      "plan: units[1].full_precision: got true for \"a.conv.weight\", expected parameters that the "
      "model marks full_precision, and no others; give its module another unit");
  plan = PlanFor(model, Dialect::kZero3, kMixed);
  plan.units.back().full_precision = true;
  CHECK(
      ErrorOf(model, plan) ==
      "plan: units[2].full_precision: got true, expected false; DeepSpeed casts the whole module");
}

}  // namespace shardwright
