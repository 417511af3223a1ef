#include "schedule/wrap.h"

#include <algorithm>
#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include <doctest/doctest.h>

#include "core/error.h"
#include "models/loader.h"
#include "tests/schedule/tiny_model.h"

namespace shardwright {
namespace {

using testing::AddModule;
using testing::AddParam;
using testing::TinyModel;

// Appends an op that reads `input` (none: a new model input of the given role) and the parameters
// of module `fqn`; returns its output.
TensorId AddOp(Model& model, OpKind kind, const std::string& fqn, TensorId input) {
  ModelOp op;
  op.spec = static_cast<std::uint32_t>(model.specs.size());
  OpSpec spec;
  spec.kind = kind;
  model.specs.push_back(spec);
  op.module = FindModule(model, fqn);
  op.params = model.modules[op.module.value].params;
  if (!input.valid()) {
    input = TensorId(model.tensors.size());
    model.tensors.push_back({TensorRole::kIndex, 1, true, {}});
  }
  op.inputs = {input};
  op.outputs = {TensorId(model.tensors.size())};
  model.tensors.push_back({TensorRole::kActivation, 1, true, ModelOpId(model.ops.size())});
  model.ops.push_back(op);
  return op.outputs[0];
}

// TinyModel with the ops of a decoder: embed, two blocks of one linear each, norm, head, a soft
// cap, loss.
Model Decoder(bool tied) {
  Model model = TinyModel(tied);
  TensorId x = AddOp(model, OpKind::kEmbedding, "embed", {});
  x = AddOp(model, OpKind::kLinear, "layers.0.lin", x);
  x = AddOp(model, OpKind::kLinear, "layers.1.lin", x);
  x = AddOp(model, OpKind::kRmsNorm, "norm", x);
  x = AddOp(model, OpKind::kLinear, "head", x);
  x = AddOp(model, OpKind::kScale, "", x);
  AddOp(model, OpKind::kCrossEntropy, "", x);
  return model;
}

// "name: modules, reshard" per unit.
std::vector<std::string> Lines(const std::vector<UnitPlan>& units) {
  std::vector<std::string> lines;
  for (const UnitPlan& unit : units) {
    std::string line = unit.name + ":";
    for (const std::string& fqn : unit.modules) {
      line += " [" + fqn + "]";
    }
    switch (unit.reshard.kind) {
      case Reshard::Kind::kAlways:
        line += " always";
        break;
      case Reshard::Kind::kNever:
        line += " never";
        break;
      case Reshard::Kind::kToGroup:
        line += " " + std::to_string(unit.reshard.group);
        break;
    }
    lines.push_back(line);
  }
  return lines;
}

using Strings = std::vector<std::string>;

Strings WrapLines(const Model& model, const std::string& rule, Dialect dialect = Dialect::kFsdp2,
                  const ReshardChoice& reshard = {}) {
  return Lines(Wrap(model, ParseWrap(rule, "--wrap"), reshard, dialect, "--wrap"));
}

std::string WrapError(const Model& model, const std::string& rule, Dialect dialect) {
  try {
    (void)WrapLines(model, rule, dialect);
  } catch (const InputError& error) {
    return error.what();
  }
  return "";
}

TEST_CASE("Wrap: block") {
  const Strings expected = {"layers.0: [layers.0] always", "layers.1: [layers.1] always",
                            "root: [] never"};
  for (const Dialect dialect : {Dialect::kFsdp2, Dialect::kNative}) {
    CHECK(WrapLines(Decoder(false), "block", dialect) == expected);
  }
  CHECK(WrapLines(Decoder(false), "block", Dialect::kDdp) == Strings{"root: [] never"});
  CHECK(WrapLines(Decoder(false), "root") == Strings{"root: [] never"});
  CHECK(WrapError(TinyModel(), "blocks", Dialect::kFsdp2) ==
        "--wrap: got \"blocks\", expected block, torchtitan, accelerate, size:N, root, module or a "
        ".json file; did you mean \"block\"?");
  Model model = TinyModel();
  model.block_classes.clear();
  CHECK(WrapError(model, "block", Dialect::kFsdp2) ==
        "--wrap: got model \"tiny\" without repeated blocks, expected a model with a block class; "
        "wrap by size (size:1e8), as one unit (root), or with a file of units");
}

// Units as torchtitan's and Accelerate's sources group them.
TEST_CASE("Wrap: torchtitan and accelerate") {
  const Strings untied = {"embed: [embed] always", "layers.0: [layers.0] always",
                          "layers.1: [layers.1] always", "norm+head: [norm] [head] never",
                          "root: [] never"};
  CHECK(WrapLines(Decoder(false), "torchtitan") == untied);
  CHECK(WrapLines(Decoder(false), "accelerate", Dialect::kNative) == untied);
  const Strings tied = {"layers.0: [layers.0] always", "layers.1: [layers.1] always",
                        "embed+norm+head: [embed] [norm] [head] never", "root: [] never"};
  CHECK(WrapLines(Decoder(true), "torchtitan") == tied);
  CHECK(WrapLines(Decoder(true), "accelerate") == tied);
  CHECK(WrapLines(Decoder(true), "accelerate", Dialect::kFsdp1).size() == 3);
  // FSDP1 flattens one module: the norm, and ends that share a table, are the root's.
  const Strings singly = {"embed: [embed] always", "layers.0: [layers.0] always",
                          "layers.1: [layers.1] always", "head: [head] always", "root: [] always"};
  CHECK(WrapLines(Decoder(false), "torchtitan", Dialect::kFsdp1) == singly);
  CHECK(WrapLines(Decoder(true), "torchtitan", Dialect::kFsdp1) ==
        WrapLines(Decoder(true), "block", Dialect::kFsdp1));
  // Without ops there is no embedding and no head to find.
  CHECK(WrapLines(TinyModel(), "torchtitan") == WrapLines(TinyModel(), "block"));
}

TEST_CASE("Wrap: module, and the defaults of the ZeRO stages") {
  // Each module with parameters of its own: embed; per block the block itself (scale) and its
  // linear; norm; head. The ZeRO stages free by their own rules, so every unit says always.
  const Strings modules = {"embed: [embed] always",
                           "layers.0: [layers.0] always",
                           "layers.0.lin: [layers.0.lin] always",
                           "layers.1: [layers.1] always",
                           "layers.1.lin: [layers.1.lin] always",
                           "norm: [norm] always",
                           "head: [head] always",
                           "root: [] always"};
  CHECK(WrapLines(Decoder(false), "module", Dialect::kZero3) == modules);
  CHECK(DefaultWrap(Dialect::kZero3) == "module");
  // A shared table is one unit that is gathered where it is used; FSDP1 leaves it to the root.
  const auto tied = Wrap(Decoder(true), ParseWrap("module", "test"), {}, Dialect::kZero3, "test");
  CHECK(tied.front().modules == Strings{"embed", "head"});
  CHECK(tied.front().gap == Gap::kRegather);
  CHECK(WrapLines(Decoder(true), "module", Dialect::kFsdp1).front() ==
        "layers.0: [layers.0] always");
  for (const Dialect dialect : {Dialect::kZero1, Dialect::kZero2}) {
    CHECK(WrapLines(Decoder(true), std::string(DefaultWrap(dialect)), dialect) ==
          Strings{"root: [] always"});
  }
}

TEST_CASE("Wrap: module, where a head has its weight and its bias from elsewhere") {
  // BERT's: the weight is the embedding's, the bias stands in the module around the head.
  const Model bert = LoadModel("bert-base-uncased");
  const std::string unit = "bert.embeddings.word_embeddings+cls.predictions";
  for (const Dialect dialect : {Dialect::kFsdp2, Dialect::kNative, Dialect::kZero3}) {
    Plan plan;
    plan.dialect = dialect;
    plan.units = Wrap(bert, ParseWrap("module", "test"), {}, dialect, "test");
    const auto is_head = [](const UnitPlan& other) {
      return other.name.find("decoder") != std::string::npos || other.name == "cls.predictions";
    };
    CHECK(std::none_of(plan.units.begin(), plan.units.end(), is_head));
    CHECK(plan.units.front().name == unit);
    CHECK(ResolveUnits(bert, plan, "test").size() == plan.units.size());
  }
}

TEST_CASE("Wrap: reshard choices") {
  const Model model = Decoder(false);
  const ReshardChoice always = {true, {Reshard::Kind::kAlways, 0}};
  const ReshardChoice never = {true, {Reshard::Kind::kNever, 0}};
  const ReshardChoice group = {true, {Reshard::Kind::kToGroup, 2}};
  CHECK(WrapLines(model, "torchtitan", Dialect::kFsdp2, always) ==
        Strings{"embed: [embed] always", "layers.0: [layers.0] always",
                "layers.1: [layers.1] always", "norm+head: [norm] [head] always",
                "root: [] always"});
  // One sharding strategy for all of the model.
  CHECK(WrapLines(model, "block", Dialect::kFsdp1).back() == "root: [] always");
  CHECK(WrapLines(model, "block", Dialect::kFsdp1, always).back() == "root: [] always");
  CHECK(WrapLines(model, "block", Dialect::kFsdp1, never).back() == "root: [] never");
  CHECK(WrapLines(model, "block", Dialect::kFsdp2, never) ==
        Strings{"layers.0: [layers.0] never", "layers.1: [layers.1] never", "root: [] never"});
  CHECK(WrapLines(model, "torchtitan", Dialect::kFsdp2, group) ==
        Strings{"embed: [embed] 2", "layers.0: [layers.0] 2", "layers.1: [layers.1] 2",
                "norm+head: [norm] [head] never", "root: [] never"});
}

// Elements by hand: embed 32, each block 4 + 16 + 4 = 24, layers 48, norm 4, head 32, total 116.
TEST_CASE("Wrap: size follows size_based_auto_wrap_policy") {
  const Model model = TinyModel();
  // >= and not >: exactly 24 is wrapped; ModuleList "layers" never is.
  CHECK(WrapLines(model, "size:24") ==
        Strings{"embed: [embed] always", "layers.0: [layers.0] always",
                "layers.1: [layers.1] always", "head: [head] always", "root: [] never"});
  CHECK(WrapLines(model, "size:25") ==
        Strings{"embed: [embed] always", "head: [head] always", "root: [] never"});
  // Inside a block lin (20) is wrapped; what remains (4) is too small for the block itself.
  CHECK(WrapLines(model, "size:20") ==
        Strings{"embed: [embed] always", "layers.0.lin: [layers.0.lin] always",
                "layers.1.lin: [layers.1.lin] always", "head: [head] always", "root: [] never"});
  // 4 parameters are enough for the remainder, and an inner unit stands before its outer one.
  CHECK(WrapLines(model, "size:4") ==
        Strings{"embed: [embed] always", "layers.0.lin: [layers.0.lin] always",
                "layers.0: [layers.0] always", "layers.1.lin: [layers.1.lin] always",
                "layers.1: [layers.1] always", "norm: [norm] always", "head: [head] always",
                "root: [] never"});
  // The root is never its own wrapped child, however large.
  CHECK(WrapLines(model, "size:1e8") == Strings{"root: [] never"});
}

TEST_CASE("Wrap: size does not look inside MultiheadAttention, counts tied storages once") {
  Model model;
  const ModuleId root = AddModule(model, {}, "");
  const ModuleId attention = AddModule(model, root, "attn", "MultiheadAttention");
  AddParam(model, AddModule(model, attention, "out_proj", "Linear"), "weight", {10, 10});
  const ModuleId pair = AddModule(model, root, "pair");
  const ParamId first = AddParam(model, AddModule(model, pair, "a"), "weight", {6, 10});
  AddParam(model, AddModule(model, pair, "b"), "weight", {6, 10}, first);
  // attn: 100 elements, a leaf class, so not wrapped. pair: 60 distinct elements; each child
  // reaches 60 alone, as PyTorch's recursion sees it.
  CHECK(WrapLines(model, "size:61") == Strings{"root: [] never"});
  CHECK(WrapLines(model, "size:60") ==
        Strings{"pair.a: [pair.a] always", "pair.b: [pair.b] always", "root: [] never"});
}

TEST_CASE("ParseWrap: sizes") {
  CHECK(ParseWrap("size:1e8", "w").min_params == 100000000);
  CHECK(ParseWrap("size:1234567", "w").min_params == 1234567);
  for (const char* bad :
       {"size:", "size:0", "size:-1", "size:1.5", "size:1e30", "size:10x", "size:nan"}) {
    CHECK_THROWS_WITH_AS(
        (void)ParseWrap(bad, "w"),
        ("w: got \"" + std::string(bad) + "\", expected size:N with N parameters, such as size:1e8")
            .c_str(),
        InputError);
  }
}

TEST_CASE("Wrap: a file of units") {
  const Strings lines = WrapLines(TinyModel(), "data/units.json");
  CHECK(lines == Strings{"first: [layers.0] 2", "embed+norm: [embed] [norm] never",
                         "layers.1: [layers.1] always", "root: [] never"});
  const ReshardChoice never = {true, {Reshard::Kind::kNever, 0}};
  CHECK_THROWS_WITH_AS(
      (void)WrapLines(TinyModel(), "data/units.json", Dialect::kFsdp2, never),
      "--wrap: got --reshard with a file of units, expected one of the two; the file says "
      "\"reshard\" for each unit",
      InputError);
}

TEST_CASE("RecomputeBlocks: one region per block") {
  const auto regions = RecomputeBlocks(TinyModel(), RecomputeKind::kSelective, 2, "--recompute");
  REQUIRE(regions.size() == 2);
  CHECK(regions[0] == RecomputeRegion{"layers.0", RecomputeKind::kSelective, 2});
  CHECK(regions[1] == RecomputeRegion{"layers.1", RecomputeKind::kSelective, 2});
}

}  // namespace
}  // namespace shardwright
