// Calls of modules whose inputs need no gradient: no hook ends their backward. The frameworks do
// the same with such networks (the cases of that kind in torch_fsdp2_random.py and
// torch_zero_random.py).

#include <string>
#include <vector>

#include <doctest/doctest.h>

#include "core/error.h"
#include "core/json.h"
#include "models/kernel_set.h"
#include "models/loader.h"
#include "schedule/lower.h"
#include "schedule/verify.h"

namespace shardwright {
namespace {

// Linear layers of one matrix each, "a" first, that run as `ops` say; then the loss of "y", and the
// ops `behind` it.
Model LayersModel(const std::vector<std::string>& layers, const std::string& ops,
                  const std::string& behind = "") {
  std::string modules;
  for (const std::string& name : layers) {
    modules += R"({"name": ")" + name +
               R"(", "class": "Linear", "params": [{"name": "weight", "shape": [4, 4]}]},)";
  }
  modules.pop_back();
  const std::string text =
      R"({"format": "shardwright-model", "version": 1, "class": "Net",
    "inputs": {"x": {"shape": [4]}, "label": {"ids": 1}},
    "modules": [{"name": "block", "class": "Block", "modules": [)" +
      modules + R"(]}], "ops": [)" + ops +
      R"({"op": "cross_entropy", "inputs": ["y", "label"], "output": "loss"})" + behind + "]}";
  return ModelFromJson(JsonValue::Parse(text, "net.json"), "net");
}

Program LowerLayers(const Model& model, Plan plan, const std::vector<std::string>& layers,
                    const std::string& parent = "block.",
                    const std::string& kernels = "torch-eager") {
  (plan.dialect == Dialect::kDdp ? plan.replicate_size : plan.shard_size) = 2;
  for (const std::string& name : layers) {
    UnitPlan unit;
    unit.name = parent + name;
    unit.modules = {unit.name};
    unit.gap = plan.dialect == Dialect::kZero3 ? Gap::kRegather : Gap::kHold;
    plan.units.push_back(unit);
  }
  UnitPlan root;
  root.name = "root";
  root.modules = {""};
  plan.units.push_back(root);
  Job job;
  job.sequence_length = 1;
  job.precision = {DType::kFp32, DType::kFp32, DType::kFp32};
  job.clip_gradients = false;
  Program program = Lower({model, FindKernelSet(kernels, "test"), job, plan});
  CHECK(Verify(program).empty());
  return program;
}

// Gathers and reductions of a step from its first backward op on.
std::string SentInBackward(const Program& p) {
  std::string names;
  for (const Op& op : p.step.ops) {
    const OpCode code = p.ShapeOf(op).code;
    if (op.phase != Phase::kForward &&
        (code == OpCode::kAllGather || code == OpCode::kReduceScatter)) {
      names += OpName(p, op) + ' ';
    }
  }
  return names;
}

// Backward meets the second call of b first, whose input needs no gradient, and asks for what ran
// before it: b. Nothing has ended b's backward when it meets the first call, which then asks for
// nothing: a is gathered behind b's reduction.
TEST_CASE("FSDP2: a call whose unit is in backward already gathers nothing ahead") {
  const std::vector<std::string> layers = {"a", "b"};
  const Model model = LayersModel(layers, R"(
      {"op": "linear", "module": "block.a", "inputs": ["x"], "output": "x1"},
      {"op": "linear", "module": "block.b", "inputs": ["x1"], "output": "x2"},
      {"op": "linear", "module": "block.b", "inputs": ["x"], "output": "x3",
       "called_again": "block.b"},
      {"op": "add", "module": "block", "inputs": ["x2", "x3"], "output": "y"},)");
  Plan plan;
  plan.dialect = Dialect::kFsdp2;
  CHECK(SentInBackward(LowerLayers(model, plan, layers)) ==
        "mb0.block.b.bwd.all_gather mb0.block.b.bwd.reduce_scatter mb0.block.a.bwd.all_gather "
        "mb0.block.a.bwd.reduce_scatter ");
}

// The frozen b runs again while the backward of c has begun, which keeps b until that is released:
// with what is left at the end, since c's input needs no gradient. So b is not gathered for its own
// backward, as a is, which trains.
TEST_CASE("ZeRO-3: what runs again stays for a module that nothing releases") {
  const std::vector<std::string> layers = {"a", "b", "c"};
  Model model = LayersModel(layers, R"(
      {"op": "linear", "module": "block.a", "inputs": ["x"], "output": "x1"},
      {"op": "linear", "module": "block.b", "inputs": ["x1"], "output": "x2"},
      {"op": "linear", "module": "block.c", "inputs": ["x"], "output": "x3"},
      {"op": "add", "module": "block", "inputs": ["x2", "x3"], "output": "y"},)");
  model.params[1].trainable = false;
  Plan plan;
  plan.dialect = Dialect::kZero3;
  plan.zero.prefetch_bucket = 0;
  plan.zero.max_reuse_distance = 0;
  plan.zero.persistence_threshold = 0;
  plan.recompute = {{"block", RecomputeKind::kFull, 1}};
  CHECK(SentInBackward(LowerLayers(model, plan, layers)) ==
        "mb0.block.c.bwd.all_gather mb0.block.a.rec.all_gather mb0.block.b.rec.all_gather "
        "mb0.block.a.bwd.all_gather mb0.block.c.bwd.reduce_scatter ");
}

// b runs again on what it made, detached: an input that needs no gradient, so that no hook releases
// b behind that call's backward, and the first call's finds b gathered.
TEST_CASE("ZeRO-3: a call on a detached input releases nothing") {
  const std::vector<std::string> layers = {"a", "b"};
  Plan plan;
  plan.dialect = Dialect::kZero3;
  plan.zero.prefetch_bucket = 0;
  plan.zero.max_reuse_distance = 0;
  plan.zero.persistence_threshold = 0;
  const auto sent = [&](const std::string& second_call) {
    const Model model = LayersModel(layers, R"(
      {"op": "linear", "module": "block.a", "inputs": ["x"], "output": "x1"},
      {"op": "linear", "module": "block.b", "inputs": ["x1"], "output": "x2"},)" +
                                                second_call +
                                                R"(
      {"op": "add", "module": "block", "inputs": ["x2", "x3"], "output": "y"},)");
    return SentInBackward(LowerLayers(model, plan, layers));
  };
  const std::string ends = "mb0.block.a.bwd.all_gather mb0.block.b.bwd.reduce_scatter ";
  CHECK(sent(R"(
      {"op": "other", "function": "detach", "stops_gradient": true, "module": "block",
       "inputs": ["x2"], "outputs": ["detached"], "results": [{"shape": [1, 4], "view_of": 0}]},
      {"op": "linear", "module": "block.b", "inputs": ["detached"], "output": "x3"},)") ==
        "mb0.block.b.bwd.all_gather " + ends);
  CHECK(sent(R"(
      {"op": "linear", "module": "block.b", "inputs": ["x2"], "output": "x3",
       "called_again": "block.b"},)") ==
        "mb0.block.b.bwd.all_gather mb0.block.b.bwd.all_gather#1 " + ends);
}

// A checkpoint stops when it has made again what forward kept; a call under torch.no_grad() behind
// that keeps nothing, and its unit is not gathered again.
TEST_CASE("A call under no_grad at the end of what is recomputed does not run again") {
  const std::vector<std::string> layers = {"a", "b", "c"};
  Model model = LayersModel(layers, R"(
      {"op": "linear", "module": "block.a", "inputs": ["x"], "output": "x1"},
      {"op": "linear", "module": "block.c", "inputs": ["x1"], "output": "x2"},
      {"op": "linear", "module": "block.b", "inputs": ["x2"], "output": "x3"},
      {"op": "add", "module": "block", "inputs": ["x2", "x3"], "output": "y"},)");
  model.specs.push_back(model.SpecOf(model.ops[2]));
  model.specs.back().other.stops_gradient = true;
  model.ops[2].spec = static_cast<std::uint32_t>(model.specs.size() - 1);
  for (const Dialect dialect : {Dialect::kFsdp2, Dialect::kFsdp1}) {
    Plan plan;
    plan.dialect = dialect;
    plan.recompute = {{"block", RecomputeKind::kFull, 1}};
    const std::string sent = SentInBackward(LowerLayers(model, plan, layers));
    CAPTURE(sent);
    CHECK(sent.find("block.a") != std::string::npos);
    CHECK(sent.find("block.b.rec") == std::string::npos);
  }
}

// torch, with use_reentrant=True: "None of the inputs have requires_grad=True. Gradients will be
// None". torch_zero_random.py holds the refusal against torch itself. A frozen layer before the
// region is accepted: libraries let its result require a gradient.
TEST_CASE("A reentrant checkpoint on detached data trains nothing and is refused by name") {
  const auto model_with = [](const std::string& before, const std::string& input) {
    return LayersModel({"a", "b"}, R"(
      {"op": "linear", "module": "block.a", "inputs": ["x"], "output": "x1"},)" +
                                       before + R"(
      {"op": "linear", "module": "block.b", "inputs": [")" +
                                       input + R"("], "output": "x2"},
      {"op": "add", "module": "block", "inputs": ["x1", "x2"], "output": "y"},)");
  };
  const Model detached = model_with(R"(
      {"op": "other", "function": "detach", "stops_gradient": true, "module": "block",
       "inputs": ["x1"], "outputs": ["d"], "results": [{"shape": [1, 4], "view_of": 0}]},)",
                                    "d");
  const Model data = model_with("", "x");
  Model frozen = model_with("", "x1");
  frozen.params[0].trainable = false;
  for (const KernelSetOptions& kernels : BuiltinKernelSets()) {
    for (const Dialect dialect :
         {Dialect::kFsdp2, Dialect::kFsdp1, Dialect::kZero3, Dialect::kDdp, Dialect::kNative}) {
      CAPTURE(kernels.name);
      Plan plan;
      plan.dialect = dialect;
      plan.recompute = {{"block.b", RecomputeKind::kFull, 1}};
      const std::vector<std::string> units = dialect == Dialect::kDdp
                                                 ? std::vector<std::string>{}
                                                 : std::vector<std::string>{"a", "b"};
      const auto refusal = [&](const Model& model) {
        try {
          LowerLayers(model, plan, units, "block.", kernels.name);
        } catch (const InputError& error) {
          return std::string(error.what());
        }
        return std::string();
      };
      const bool is_reentrant = kernels.whole_recompute && dialect != Dialect::kNative;
      const std::string text =
          "plan: recompute[0].module: got \"block.b\", of which no input needs a gradient, "
          "expected "
          "a module whose input needs one; this kernel set's checkpoint (use_reentrant=True) would "
          "leave the module's parameters untrained without an error; torch-eager's (False) trains "
          "them";
      CHECK(refusal(data) == (is_reentrant ? text : ""));
      if (dialect != Dialect::kZero3) {  // which refuses gradients that stop with recomputation
        CHECK(refusal(detached) == (is_reentrant ? text : ""));
      }
      CHECK(refusal(frozen) == "");
    }
  }
}

// What backward begins with is the sum of the loss and another term, of which b is a part. A number
// made of the loss without a gradient is none.
TEST_CASE("A term that is added to the loss has a backward") {
  const std::vector<std::string> layers = {"a", "b"};
  const std::string ops = R"(
      {"op": "linear", "module": "block.a", "inputs": ["x"], "output": "y"},
      {"op": "linear", "module": "block.b", "inputs": ["x"], "output": "z"},)";
  const auto sent = [&](const std::string& stops) {
    const Model model = LayersModel(layers, ops,
                                    R"(,
      {"op": "other", "function": "aten.add", "inputs": ["loss", "z"], "outputs": ["sum"],
       "results": [{"shape": [1], "shared": true}],
       "forward": [{"class": "elementwise", "read": 5, "written": 1}])" +
                                        stops + "}");
    Plan plan;
    plan.dialect = Dialect::kFsdp2;
    return SentInBackward(LowerLayers(model, plan, layers));
  };
  CHECK(sent("").find("block.b.bwd.reduce_scatter") != std::string::npos);
  CHECK(sent("").find("block.a.bwd.reduce_scatter") != std::string::npos);
  CHECK(sent(R"(, "stops_gradient": true)").find("block.b.bwd.reduce_scatter") ==
        std::string::npos);
}

// The block runs twice, then under torch.no_grad(). The block's own hook hands on a tensor that
// needs no gradient, so b's last call sets a count of none, and no backward of b releases it.
TEST_CASE("ZeRO-3: a module below one that runs under no_grad releases nothing") {
  Model model = ModelFromJson(JsonValue::Parse(R"(
    {"format": "shardwright-model", "version": 1, "class": "Net",
     "inputs": {"x": {"shape": [4]}, "label": {"ids": 1}},
     "modules": [
       {"name": "a", "class": "Linear", "params": [{"name": "weight", "shape": [4, 4]}]},
       {"name": "block", "class": "Block", "modules": [
         {"name": "b", "class": "Linear", "params": [{"name": "weight", "shape": [4, 4]}]}]}],
     "ops": [
       {"op": "linear", "module": "a", "inputs": ["x"], "output": "x1"},
       {"op": "linear", "module": "block.b", "inputs": ["x1"], "output": "x2"},
       {"op": "add", "inputs": ["x1", "x2"], "output": "x3"},
       {"op": "linear", "module": "block.b", "inputs": ["x3"], "output": "x4"},
       {"op": "add", "inputs": ["x3", "x4"], "output": "x5"},
       {"op": "linear", "module": "block.b", "inputs": ["x5"], "output": "x6"},
       {"op": "add", "inputs": ["x5", "x6"], "output": "y"},
       {"op": "cross_entropy", "inputs": ["y", "label"], "output": "loss"}]})",
                                               "net.json"),
                              "net");
  Plan plan;
  plan.dialect = Dialect::kZero3;
  plan.zero.prefetch_bucket = 0;
  plan.zero.max_reuse_distance = 0;
  plan.zero.persistence_threshold = 0;
  model.specs.push_back(model.SpecOf(model.ops[5]));
  model.specs.back().other.stops_gradient = true;
  model.ops[5].spec = static_cast<std::uint32_t>(model.specs.size() - 1);
  CHECK(SentInBackward(LowerLayers(model, plan, {"a", "block.b"}, "")) ==
        "mb0.block.b.bwd.all_gather mb0.a.bwd.all_gather mb0.block.b.bwd.reduce_scatter ");
}

}  // namespace
}  // namespace shardwright
