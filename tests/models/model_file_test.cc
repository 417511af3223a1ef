#include "models/internal/model_file.h"

#include <cstdint>
#include <fstream>
#include <iterator>
#include <map>
#include <regex>
#include <sstream>
#include <string>
#include <utility>
#include <vector>

#include <doctest/doctest.h>
#include <nlohmann/json.hpp>

#include "core/error.h"
#include "core/json.h"
#include "models/internal/order.h"
#include "models/internal/substitute.h"
#include "models/kernel_set.h"
#include "models/loader.h"
#include "models/model.h"
#include "models/totals.h"

namespace shardwright {
namespace {

std::string ErrorOf(const std::string& spec) {
  try {
    (void)LoadModel(spec);
  } catch (const InputError& e) {
    return e.what();
  }
  return "loaded";
}

// A file with one op "other" behind a linear layer, to which `more` adds top-level keys.
std::string OtherFile(const std::string& other, const std::string& more = "") {
  return R"({"format": "shardwright-model", "version": 1, "sequence_length": 8, )" + more +
         R"("inputs": {"x": {"shape": ["sequence_length", 4]}},
    "modules": [{"name": "a", "class": "Linear", "params": [{"name": "weight", "shape": [6, 4]}]}],
    "ops": [{"op": "linear", "module": "a", "inputs": ["x"], "output": "y"},
            {"op": "other", "function": "aten.outer", "inputs": ["y"], "outputs": ["z"], )" +
         other + "}]}";
}

Model Read(const std::string& text, std::int64_t length = 0) {
  return ModelFromJson(JsonValue::Parse(text, "m.json"), "m", {.sequence_length = length});
}

std::string ErrorIn(const std::string& text, std::int64_t length = 0) {
  try {
    (void)Read(text, length);
  } catch (const InputError& e) {
    return e.what();
  }
  return "loaded";
}

constexpr const char* kOuter = R"("results": [{"shape": ["sequence_length", "sequence_length"]}],
  "forward": [{"class": "gemm", "batch": "batch", "m": "sequence_length", "n": "sequence_length", "k": 6,
               "flops": "12 * batch * sequence_length * sequence_length", "read": "batch * 12 * sequence_length",
               "written": "batch * sequence_length * sequence_length"}],
  "backward_data": [{"class": "elementwise", "read_bytes": "sequence_length * sequence_length / 2 + 3"}],
  "saves_inputs": [0], "saved": [{"bytes": "7 * batch"}, {"elements": 10}],
  "backward_workspace": {"elements": "batch * sequence_length", "bytes": 9})";

TEST_CASE("ModelFile.ListsAreNoBlocks") {
  const std::string classes = R"("block_class": ["ModuleList", "Linear", "ModuleDict"], )";
  CHECK(Read(OtherFile(kOuter, classes)).block_classes == std::vector<std::string>{"Linear"});
}

TEST_CASE("ModelFile.ATensorThatNoLaunchWrites") {
  CHECK(ErrorIn(OtherFile(R"("results": [{"shape": ["sequence_length"]}])")) ==
        "m.json: ops[1].results: got a tensor of its own and no launch in \"forward\", expected a "
        "launch that writes it, or \"view_of\" an input");
}

TEST_CASE("ModelFile.OtherOpsSayWhatTheyCost") {
  for (const std::int64_t length : {8, 20}) {
    const Model model = Read(OtherFile(kOuter), length);
    const ModelOp& op = model.ops.back();
    CHECK(model.tensors[op.outputs[0].value].elements == length * length);
    const KernelSetOptions& set = FindKernelSet("torch-eager", "test");
    const OpKernels three = LowerOp(model.SpecOf(op), 3, DType::kBf16, set);
    REQUIRE(three.forward.size() == 1);
    CHECK(three.forward[0].flops.value == 12.0 * 3.0 * static_cast<double>(length * length));
    CHECK(three.forward[0].batch == 3);
    CHECK(three.forward[0].m == length);
    CHECK(three.forward[0].k == 6);
    CHECK(three.forward[0].read == Bytes(2 * 3 * 12 * length));
    CHECK(three.backward_data.at(0).read == Bytes(length * length / 2 + 3));
    CHECK(three.saves_input == 1U);
    CHECK(three.extra_saved == Bytes(3 * 7 + 2 * 10));
    CHECK(three.backward_workspace == Bytes(2 * 3 * length + 9));
    // The linear layer multiplies 2 * 8 * 4 * 6 per sample each way; x needs no gradient.
    const ModelTotals totals = TotalsOf(model, 3, DType::kBf16, set);
    const double linear = 3.0 * 2.0 * static_cast<double>(length) * 24.0;
    CHECK(totals.forward.value == linear + three.forward[0].flops.value);
    CHECK(totals.backward.value == linear);
    CHECK(totals.saved == Bytes(3 * length * 4 * 2 + 3 * length * 6 * 2 + 3 * 7 + 2 * 10));
  }
}

TEST_CASE("ModelFile.OtherOpsMayHaveASizePerPairOfSamples") {
  const Model model = Read(OtherFile(R"("results": [{"shape": [1], "shared": true}],
    "forward": [{"class": "gemm", "m": "batch", "n": "batch", "k": 48, "flops": "2 * batch * 48 * batch",
                 "read": "96 * batch", "written": "batch * batch + 3 * batch + 1"}],
    "saved": [{"bytes": "batch * batch * sequence_length / 2"}])"));
  const KernelSetOptions& set = FindKernelSet("torch-eager", "test");
  for (const std::int64_t batch : {1, 5}) {
    const OpKernels op = LowerOp(model.SpecOf(model.ops.back()), batch, DType::kBf16, set);
    CHECK(op.forward.at(0).m == batch);
    CHECK(op.forward.at(0).flops.value == static_cast<double>(96 * batch * batch));
    CHECK(op.forward.at(0).written == Bytes(2 * (batch * batch + 3 * batch + 1)));
    CHECK(op.extra_saved == Bytes(4 * batch * batch));
  }
}

TEST_CASE("ModelFile.ADefaultOfNothingMayBeWritten") {
  const auto file = [](const std::string& offset) {
    return R"({"format": "shardwright-model", "version": 1, "sequence_length": 8,
      "inputs": {"x": {"shape": ["sequence_length", 4]}},
      "modules": [{"name": "a", "class": "Norm", "params": [{"name": "weight", "shape": [4]}]}],
      "ops": [{"op": "rms_norm", "module": "a", "inputs": ["x"], "output": "y", "weight_offset": )" +
           offset + "}]}";
  };
  const Model none = Read(file("0"));
  CHECK(none.SpecOf(none.ops[0]).weight_offset == 0.0);
  const Model gemma = Read(file("1"));
  CHECK(gemma.SpecOf(gemma.ops[0]).weight_offset == 1.0);
  CHECK(ErrorIn(file("-1")) ==
        "m.json: ops[0].weight_offset: got -1, expected a positive number below 1e18");
}

TEST_CASE("ModelFile.WhatNoOpReadsIsTrainableUnlessItIsFrozen") {
  const auto file = [](const std::string& flags) {
    return R"({"format": "shardwright-model", "version": 1, "sequence_length": 8,
      "inputs": {"x": {"shape": ["sequence_length", 4]}},
      "modules": [
        {"name": "a", "class": "Linear", "params": [{"name": "weight", "shape": [6, 4]}]},
        {"name": "b", "class": "Linear", "params": [{"name": "weight", "shape": [5, 7])" +
           flags + R"(}]}],
      "ops": [{"op": "linear", "module": "a", "inputs": ["x"], "output": "y"}]})";
  };
  CHECK(CountParameters(Read(file(R"(, "unused": true)")), true) == 6 * 4 + 5 * 7);
  CHECK(CountParameters(Read(file(R"(, "unused": true, "frozen": true)")), true) == 6 * 4);
  CHECK(ErrorIn(file("")) ==
        "m.json: ops: got no op that reads parameter \"b.weight\", expected at least one");
}

TEST_CASE("ModelFile.SizesThatAreNoSizes") {
  const auto with = [](const std::string& size) {
    return OtherFile(R"("results": [{"shape": [)" + size + "]}]");
  };
  const std::string place = "m.json: ops[1].results[0].shape[0]: got ";
  for (const auto& [text, found] : std::vector<std::pair<std::string, std::string>>{
           {R"("sequence_length / 3")", R"("sequence_length / 3" (with sequence_length 8))"},
           {R"("2 ** 3")", R"("2 ** 3" (with sequence_length 8))"},
           {R"("image_size")", R"("image_size" (with sequence_length 8))"},
           {R"("batch * batch")", R"("batch * batch", which depends on the batch)"},
           {R"("batch * 2 * batch * batch")",
            R"("batch * 2 * batch * batch" (with sequence_length 8))"},
           {R"("3 - sequence_length")", R"("3 - sequence_length" (with sequence_length 8))"},
           {R"("batch")", R"("batch", which depends on the batch)"},
           {R"("sequence_length - 8")", R"("sequence_length - 8" = 0)"},
           {"0", "0"}}) {
    const std::string expression = text;  // clang 14 captures no structured binding
    INFO(expression);
    CHECK(ErrorIn(with(expression)).starts_with(place + found + ", expected "));
  }
  CHECK(ErrorIn(with("72057594037927936, 2")).find("2^56") != std::string::npos);
}

TEST_CASE("ModelFile.AnotherLengthMustChangeSomething") {
  const std::string error =
      "m.json: sequence_length: got 16 asked for, expected its own length 8: ";
  CHECK(ErrorIn(OtherFile(kOuter), 16) == "loaded");
  CHECK(ErrorIn(OtherFile(kOuter, R"("fixed_length": "a loop over 8 tokens", )"), 16) ==
        error + "a loop over 8 tokens; export the model at the other length");
  const std::string fixed = R"({"format": "shardwright-model", "version": 1, "sequence_length": 8,
    "inputs": {"x": {"shape": [8, 4]}},
    "modules": [{"name": "a", "class": "Linear", "params": [{"name": "weight", "shape": [6, 4]}]}],
    "ops": [{"op": "linear", "module": "a", "inputs": ["x"], "output": "y"}]})";
  CHECK(ErrorIn(fixed, 8) == "loaded");
  CHECK(ErrorIn(fixed, 16) ==
        error +
            "no size of the file depends on sequence_length; export the model at the other length");
}

TEST_CASE("ModelFile.BlocksMayBeOfSeveralClasses") {
  using Names = std::vector<std::string>;
  const std::string result = R"("results": [{"shape": [1]}], "forward": [{"class": "copy"}])";
  const auto classes = [&](const std::string& value) {
    return Read(OtherFile(result, R"("block_class": )" + value + ", ")).block_classes;
  };
  CHECK(classes(R"(["A", "B"])") == Names{"A", "B"});
  CHECK(classes(R"("A")") == Names{"A"});
  CHECK(classes(R"("")").empty());
  CHECK(ErrorIn(OtherFile(result, R"("block_class": ["A", 3], )")) ==
        "m.json: block_class[1]: got 3, expected a string");
}

TEST_CASE("ModelFile.AttentionOfAnOtherOpIsPricedAsAttention") {
  const Model model = Read(OtherFile(R"("results": [{"shape": ["sequence_length", 6]}],
    "forward": [{"class": "attention", "batch": "3 * batch", "m": "sequence_length",
                 "n": "sequence_length", "k": 2, "flops": "8 * batch", "read": 5, "written": 6}],
    "backward_data": [{"class": "attention_backward", "batch": "3 * batch", "m": 8, "n": 8, "k": 2}])"));
  const OpSpec& spec = model.SpecOf(model.ops.back());
  for (const auto& [set, attention] : std::vector<std::pair<std::string, AttentionImpl>>{
           {"torch-eager", AttentionImpl::kFlash}, {"jax-xla", AttentionImpl::kCudnn}}) {
    const OpKernels op = LowerOp(spec, 2, DType::kBf16, FindKernelSet(set, "test"));
    CHECK(op.forward.at(0).kind == KernelClass::kAttentionForward);
    CHECK(op.forward.at(0).attention == attention);
    CHECK(op.forward.at(0).batch == 6);
    CHECK(op.forward.at(0).k == 2);
    CHECK(op.backward_data.at(0).kind == KernelClass::kAttentionBackward);
  }
}

TEST_CASE("ModelFile.RepeatsTiesAndFrozenParameters") {
  const Model model = LoadModel("data/models/tiny-encoder.json");
  CHECK(model.type == "custom");
  CHECK(model.block_classes == std::vector<std::string>{"Block"});
  // tokens + places + 3 * (norm + qkv + bias + out); the head is tied.
  const std::int64_t blocks = 3 * (12 + 36 * 12 + 36 + 12 * 12);
  CHECK(CountParameters(model) == 50 * 12 + 16 * 12 + blocks);
  CHECK(CountParameters(model, /*trainable_only=*/true) == 50 * 12 + blocks);
  CHECK(model.params.back().fqn == "head.weight");
  CHECK(model.params.back().tied_to == ParamId(0));
  const std::vector<std::string> expected = {"tokens",
                                             "places",
                                             "add",
                                             "blocks.0.norm",
                                             "blocks.0.qkv",
                                             "blocks.0.attention",
                                             "blocks.0.out",
                                             "blocks.0.add",
                                             "blocks.1.norm",
                                             "blocks.1.qkv",
                                             "blocks.1.attention",
                                             "blocks.1.out",
                                             "blocks.1.add",
                                             "blocks.2.norm",
                                             "blocks.2.qkv",
                                             "blocks.2.attention",
                                             "blocks.2.out",
                                             "blocks.2.add",
                                             "head",
                                             "loss"};
  std::vector<std::string> labels;
  for (const ModelOp& op : model.ops) {
    labels.push_back(OpLabel(model, op));
  }
  CHECK(labels == expected);
  CHECK(model.sequence_length == 8);
  CHECK(LoadModel("data/models/tiny-encoder.json", {.sequence_length = 16}).sequence_length == 16);
}

TEST_CASE("ModelFile.MnistConvNetShapesByHand") {
  // 28 -> 26 -> 24 -> 12 pixels; 64 * 12 * 12 = 9216 features.
  const Model model = LoadModel("mnist-convnet");
  std::vector<std::int64_t> elements;
  for (const ModelOp& op : model.ops) {
    elements.push_back(model.tensors[op.outputs[0].value].elements);
  }
  CHECK(elements == std::vector<std::int64_t>{32 * 26 * 26, 32 * 26 * 26, 64 * 24 * 24,
                                              64 * 24 * 24, 9216, 9216, 128, 128, 128, 10, 10, 1});
  CHECK(model.specs[model.ops[2].spec] == OpSpec{.kind = OpKind::kConv2d,
                                                 .in = 32,
                                                 .out = 64,
                                                 .has_bias = true,
                                                 .height = 26,
                                                 .width = 26,
                                                 .height_out = 24,
                                                 .width_out = 24,
                                                 .kernel = 3,
                                                 .stride = 1});
}

TEST_CASE("ModelFile.RegNetHasBatchNormAndSqueezeExcitation") {
  const Model model = LoadModel("regnet-y-16gf");
  std::size_t norms = 0;
  std::size_t scales = 0;
  for (const ModelOp& op : model.ops) {
    norms += model.SpecOf(op).kind == OpKind::kBatchNorm ? 1 : 0;
    scales += model.SpecOf(op).kind == OpKind::kMul ? 1 : 0;
  }
  // 18 blocks with three norms each, a fourth in the first block of a stage, one in the stem.
  CHECK(norms == 18 * 3 + 4 + 1);
  CHECK(scales == 18);
  // 224 pixels halve in the stem and in each stage: 7 * 7 * 3024 before the last pool.
  const OpSpec& pool = model.SpecOf(model.ops[model.ops.size() - 3]);
  CHECK(pool.kind == OpKind::kAvgPool);
  CHECK(pool.in == 3024);
  CHECK(pool.height == 7);
  for (const Parameter& param : model.params) {
    const bool is_norm = model.modules[param.module.value].class_name == "BatchNorm2d";
    CHECK(param.full_precision == is_norm);
  }
}

TEST_CASE("ModelFile.GateAndUpInOneTensor") {
  const JsonValue json = JsonValue::Parse(R"({"format": "shardwright-model", "version": 1,
    "inputs": {"x": {"shape": [4, 6]}, "labels": {"ids": 4}},
    "modules": [{"name": "a", "class": "Linear", "params": [{"name": "weight", "shape": [10, 6]}]}],
    "ops": [
      {"op": "linear", "module": "a", "params": ["a.weight"], "inputs": ["x"], "output": "gate_up"},
      {"op": "gated_activation", "module": "a", "function": "silu", "inputs": ["gate_up"],
       "output": "y"},
      {"op": "cross_entropy", "module": "a", "inputs": ["y", "labels"], "output": "loss"}]})",
                                          "m.json");
  const Model model = ModelFromJson(json, "m.json", {});
  const OpSpec& gated = model.specs[model.ops[1].spec];
  CHECK(gated.packed_gate);
  CHECK(gated.in == 5);  // half of 10
  CHECK(gated.rows == 4);
  CHECK(model.tensors[model.ops[1].outputs[0].value].elements == 4 * 5);
}

// All that a model has, but for the specs of its ops, one line a thing.
std::string Described(const Model& model) {
  std::ostringstream out;
  for (const Module& m : model.modules) {
    out << m.fqn << ' ' << m.name << ' ' << m.class_name << ' ' << m.parent.value << ' '
        << m.buffer_elements << ' ' << m.children.size() << '\n';
  }
  for (const Parameter& p : model.params) {
    out << p.fqn << ' ' << p.module.value << ' ' << p.Elements() << ' ' << p.trainable << '\n';
  }
  for (const Tensor& t : model.tensors) {
    out << t.elements << ' ' << t.producer.value << ' ' << t.per_sample << '\n';
  }
  for (const ModelOp& op : model.ops) {
    out << op.name << ' ' << op.module.value << ' ' << op.spec;
    for (const TensorId id : op.inputs) {
      out << " <" << id.value;
    }
    for (const TensorId id : op.outputs) {
      out << " >" << id.value;
    }
    for (const ParamId id : op.params) {
      out << " p" << id.value;
    }
    out << '\n';
  }
  return out.str();
}

// What a template writes for layers of two kinds: by number, and each written out. Between them
// the tensor "x" of "before" stays as it is and "x" of "ops" changes.
nlohmann::json TakingTurns(const std::vector<std::pair<std::string, int>>& turns,
                           bool is_written_out) {
  const std::map<std::string, nlohmann::json> modules = {
      {"dense",
       nlohmann::json::parse(R"({"name": "{i}", "class": "Dense", "buffers": 3, "modules": [
        {"name": "a", "class": "Linear", "params": [{"name": "weight", "shape": [4, 4]}]}]})")},
      {"wide", nlohmann::json::parse(R"({"name": "{i}", "class": "Wide", "modules": [
        {"name": "c", "class": "Linear", "params": [{"name": "weight", "shape": [8, 4], "frozen": true}]},
        {"name": "b", "class": "Linear", "params": [{"name": "weight", "shape": [4, 8]}]}]})")}};
  const std::map<std::string, nlohmann::json> ops = {
      {"dense", nlohmann::json::parse(R"([
        {"op": "linear", "module": "layers.{i}.a", "inputs": ["x"], "output": "y"},
        {"op": "activation", "module": "layers", "inputs": ["y"], "output": "y", "function": "relu"},
        {"op": "add", "module": "layers.{i}", "inputs": ["y", "x"], "output": "x"},
        {"op": "add", "module": "layers.{i}", "inputs": ["x", "before"], "output": "x"}])")},
      {"wide", nlohmann::json::parse(R"([
        {"op": "linear", "module": "layers.{i}", "params": ["layers.{i}.c.weight"], "inputs": ["x"], "output": "y"},
        {"op": "linear", "module": "layers.{i}", "params": ["layers.{i}.b.weight"], "inputs": ["y"], "output": "x"}])")},
      // Reads whatever "x" is: rows of 4 before the last layer, rows of 6 behind it.
      {"any", nlohmann::json::parse(R"([
        {"op": "activation", "module": "layers", "inputs": ["x"], "output": "x", "function": "gelu"}])")}};
  nlohmann::json layers = nlohmann::json::array();
  nlohmann::json list = nlohmann::json::parse(
      R"([{"op": "linear", "module": "in", "inputs": ["data"], "output": "x"},
          {"op": "activation", "module": "in", "inputs": ["x"], "output": "before", "function": "relu"}])");
  std::map<std::string, int> numbers;
  int from = 0;
  for (const auto& [kind, count] : turns) {
    const auto [number, is_new] = numbers.try_emplace(kind, static_cast<int>(numbers.size()));
    const nlohmann::json repeat = {
        {"repeat", count}, {"from", from}, {"index", "i"}, {"body", number->second}};
    for (int i = from; is_written_out && i < from + count; ++i) {
      if (kind != "any") {
        layers.push_back(nlohmann::json::parse(
            std::regex_replace(modules.at(kind).dump(), std::regex("\\{i\\}"), std::to_string(i))));
      }
      for (const nlohmann::json& op : ops.at(kind)) {
        list.push_back(nlohmann::json::parse(
            std::regex_replace(op.dump(), std::regex("\\{i\\}"), std::to_string(i))));
      }
    }
    if (!is_written_out) {
      nlohmann::json entry = repeat;
      entry.update(is_new ? nlohmann::json{{"ops", ops.at(kind)}} : nlohmann::json::object());
      list.push_back(entry);
      if (kind != "any") {
        entry = repeat;
        entry.update(is_new ? modules.at(kind) : nlohmann::json::object());
        entry["body"] = 10 + number->second;
        layers.push_back(entry);
      }
    }
    from += count;
    if (kind == "any" && is_new) {
      list.push_back({{"op", "linear"}, {"module", "out"}, {"inputs", {"x"}}, {"output", "x"}});
    }
  }
  const auto linear = [](const char* name, int rows) -> nlohmann::json {
    return {{"name", name},
            {"class", "Linear"},
            {"params", {{{"name", "weight"}, {"shape", {rows, 4}}}}}};
  };
  return {{"format", "shardwright-model"},
          {"version", 1},
          {"inputs", {{"data", {{"shape", {5, 4}}}}}},
          {"modules",
           {linear("in", 4),
            {{"name", "layers"}, {"class", "ModuleList"}, {"modules", layers}},
            linear("out", 6)}},
          {"ops", list}};
}

TEST_CASE("ModelFile.CopiesOfALayerAreWhatTheyWouldBeWrittenOut") {
  const TemplateSource source{.config = "config.json", .angles = {}};
  const auto read = [&](const nlohmann::json& json) {
    return ReadModelFile(JsonValue::Parse(json.dump(), "m.json"), "m", {}, &source);
  };
  const std::vector<std::pair<std::string, int>> turns = {{"dense", 3}, {"wide", 1}, {"dense", 2},
                                                          {"wide", 2},  {"any", 3},  {"any", 2}};
  const Model repeated = read(TakingTurns(turns, /*is_written_out=*/false));
  const Model written = read(TakingTurns(turns, /*is_written_out=*/true));
  CHECK(written.ops.size() == 2 + 5 * 4 + 3 * 2 + 5 + 1);
  CHECK(written.params.size() == 1 + 5 + 3 * 2 + 1);
  CHECK(Described(repeated) == Described(written));
  CHECK(repeated.specs == written.specs);
}

TEST_CASE("ModelFile.LoopVariables") {
  const LoopValues loops = {{"i", 3}, {"j", 7}};
  CHECK(Substitute("a{i}.{j}", loops) == "a3.7");
  CHECK(Substitute("{i+1}{i-1}", loops) == "42");
  CHECK(Substitute("plain", loops) == "plain");
  for (const char* bad : {"{k}", "{i", "{i+}", "{i+x}", "{}", "{i+1 }"}) {
    CAPTURE(bad);
    CHECK(!Substitute(bad, loops));
  }
}

struct Bad {
  const char* file;
  const char* error;
};
const Bad kBad[] = {
    {"file_cycle",
     "ops: got a cycle through ops \"linear -> y\", \"linear -> z\", expected a graph without "
     "cycles"},
    {"file_order",
     "ops: got op \"linear -> z\" before op \"linear -> y\" whose output it reads, expected ops "
     "in execution order"},
    {"file_missing_tensor",
     "ops[0].inputs[0]: got \"xx\", expected an input of the model or the output of an op; did "
     "you mean \"x\"?"},
    {"file_double_tensor",
     "ops[1]: got a tensor \"y\" that exists already, expected a new name; each tensor has one "
     "producer"},
    {"file_tied_unknown",
     "modules[1].params[0].tied_to: got \"a.weigth\", expected the name of an earlier parameter; "
     "did you mean \"a.weight\"?"},
    {"file_tied_shape",
     "modules[1].params[0]: got a tied parameter with a shape or a frozen flag, expected "
     "neither; "
     "both are those of \"a.weight\""},
    {"file_unknown_key",
     "got unknown key \"extra\", expected one of \"format\", \"version\", \"_source\", "
     "\"class\", \"block_class\", \"sequence_length\", \"image_size\", "
     "\"fixed_length\", \"tokens_per_sample\", \"inputs\", \"params\", \"buffers\", \"modules\", "
     "\"ops\""},
    {"file_unknown_op_key",
     "ops[0]: got unknown key \"transpose\", expected one of \"op\", \"module\", \"name\", "
     "\"inputs\", \"output\", \"outputs\", \"params\", \"called_again\", \"returns_input\", "
     "\"transposed\"; did you "
     "mean "
     "\"transposed\"?"},
    {"file_unknown_op",
     "ops[0].op: got \"conv2\", expected an op of docs/model_json.md; did you mean \"conv2d\"?"},
    {"file_called_again",
     "got op \"a\" that begins a further call of \"a\", expected an op of the same module right "
     "before it"},
    {"file_called_elsewhere",
     "got op \"b\" that begins a further call of \"a\", expected its module or one around it, "
     "but for the root"},
    {"file_returns_elsewhere",
     "got op \"b\" that ends a call of \"a\", expected its module or one around it, but for the "
     "root"},
    {"file_same_as",
     "got module \"b\" that is unlike \"a\", expected class, children and parameters (tied) of "
     "the module that it is the same as"},
    {"file_unknown_module", "ops[0].module: got \"c\", expected the name of a module"},
    {"file_unknown_param", "ops[0].params[0]: got \"a.wait\", expected the name of a parameter"},
    {"file_newer_version",
     "version: got 2, expected version 1, the only one that this program knows"},
    {"file_other_format",
     "format: got \"shardwright-plan\", expected \"shardwright-model\"; did you mean "
     "\"shardwright-model\"?"},
    {"file_shape", "ops[0].inputs[0]: got a tensor of shape [1, 8], expected [1, 9]"},
    {"file_unused", "ops: got no op that reads parameter \"b.weight\", expected at least one"},
    {"file_no_param", "ops[0]: got 0 parameters, expected 1 to 2 for op \"linear\""},
    {"file_negative_shape",
     "modules[0].params[0].shape[1]: got -8, expected an integer from 1 to 268435456"},
    {"file_loop_variable",
     "modules[0].name: got \"a{j}\", expected loop variables in braces, such as {i} or {i+1}, of "
     "a repeat around it"},
    {"file_double_module", "modules[1].name: got \"a\" a second time, expected unique names"},
    {"file_dotted_module", "modules[0].name: got \"a.b\", expected a name without dots"},
    {"file_huge_repeat",
     "modules[0].modules[0]: got more than 200000 modules, ops and iterations when repeats are "
     "written out, expected fewer"},
    {"file_image_linear",
     "ops[0].inputs[0]: got a tensor of shape [8, 4, 4], expected (rows, features); put a "
     "flatten "
     "or tokens op before"},
    {"file_small_image",
     "ops[0].inputs[0]: got a tensor of shape [3, 4, 4], expected at least the kernel size 5"},
    {"file_groups",
     "ops[0].inputs[0]: got a tensor of shape [3, 4, 4], expected channels that groups (2) "
     "divides"},
    {"file_attention_inputs",
     "ops[0].inputs: got 2 tensors, expected one packed tensor, or queries, keys, values and "
     "perhaps a position bias"},
    {"file_odd_gate",
     "ops[0].inputs[0]: got a tensor of shape [4, 7], expected an even number of features: gate, "
     "then up"},
    {"file_no_sequence",
     "inputs.x.shape[0]: got \"sequence_length\" (with no sequence_length), expected an integer, "
     "or "
     "a sum of products of integers, \"batch\", \"sequence_length\" and \"image_size\"; divisions "
     "without rest, and a result from 0 to 2^56"},
};

TEST_CASE("ModelFile.BadFilesGetOneClearLine") {
  for (const Bad& b : kBad) {
    CAPTURE(b.file);
    const std::string file = "data/bad_models/" + std::string(b.file) + ".json";
    CHECK(ErrorOf(file) == file + ": " + b.error);
  }
}

// Every leaf of a file replaced by values of every kind, or dropped with its object: the reader
// either builds a valid model or throws InputError.
TEST_CASE("ModelFile.MutatedFilesLoadOrFailCleanly") {
  const nlohmann::json values = {
      nullptr, -1,    0, 1, 3, 1e30, 0.5, true, "x", "{i}", "", {{}}, nlohmann::json::object(),
      "e",     "x{i}"};
  std::size_t loaded = 0;
  std::size_t refused = 0;
  const auto load = [&](const nlohmann::json& file) {
    const std::string text = file.dump();
    CAPTURE(text);
    try {
      const Model model = ModelFromJson(JsonValue::Parse(text, "model.json"), "mutant");
      ValidateModel(model, "mutant");
      ++loaded;
    } catch (const InputError& e) {
      CHECK(std::string(e.what()).find(": got ") != std::string::npos);
      ++refused;
    }
  };
  for (const char* name : {"data/models/tiny-encoder.json", "../models/zoo/mnist-convnet.json"}) {
    const nlohmann::json base = nlohmann::json::parse(std::ifstream(name));
    const nlohmann::json leaves = base.flatten();
    for (const auto& [pointer, leaf] : leaves.items()) {
      for (const nlohmann::json& value : values) {
        nlohmann::json file = base;
        file[nlohmann::json::json_pointer(pointer)] = value;
        load(file);
      }
      nlohmann::json file = base;
      const nlohmann::json::json_pointer at(pointer);
      if (nlohmann::json& parent = file[at.parent_pointer()]; parent.is_object()) {
        const std::string key = at.back();
        parent.erase(key);
        load(file);
      }
    }
  }
  // Both happen: neither a reader that refuses all nor one that checks nothing passes.
  CHECK(loaded > 100);
  CHECK(refused > 1000);
}

TEST_CASE("ModelFile.TheExampleOfTheDocumentLoads") {
  std::ifstream file("../docs/model_json.md");
  const std::string text{std::istreambuf_iterator<char>(file), {}};
  const std::size_t at = text.find("\"shardwright-model\", ");
  REQUIRE(at != std::string::npos);
  const std::size_t begin = text.rfind("```json", at) + 7;
  const std::size_t end = text.find("```", begin);
  const Model model =
      ModelFromJson(JsonValue::Parse(text.substr(begin, end - begin), "example"), "example");
  CHECK(CountParameters(model) == 1000 * 64 + 12 * 64 * 64);
}

// A Llama layer written by hand in model.json equals the table's, op by op.
TEST_CASE("ModelFile.ALlamaWrittenOutEqualsTheTable") {
  const Model table = LoadModel("data/models/tiny-llama");
  const Model file = LoadModel("data/models/tiny-llama-written-out.json");
  CHECK(CountParameters(file) == CountParameters(table));
  REQUIRE(file.ops.size() == table.ops.size());
  for (std::size_t i = 0; i < file.ops.size(); ++i) {
    CAPTURE(OpLabel(table, table.ops[i]));
    CHECK(file.SpecOf(file.ops[i]) == table.SpecOf(table.ops[i]));
    CHECK(file.modules[file.ops[i].module.value].fqn ==
          table.modules[table.ops[i].module.value].fqn);
  }
  REQUIRE(file.params.size() == table.params.size());
  for (std::size_t i = 0; i < file.params.size(); ++i) {
    CHECK(file.params[i].fqn == table.params[i].fqn);
    CHECK(file.params[i].shape == table.params[i].shape);
  }
}

}  // namespace
}  // namespace shardwright
