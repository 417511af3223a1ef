// What single ops of a model become in a program, by kernel set.

#include <algorithm>
#include <cstdint>
#include <string>
#include <vector>

#include <doctest/doctest.h>

#include "core/json.h"
#include "models/kernel_set.h"
#include "models/loader.h"
#include "schedule/lower.h"
#include "schedule/verify.h"

namespace shardwright {
namespace {

Program LowerNative(const Model& model, const std::string& kernels) {
  Plan plan;
  plan.dialect = Dialect::kNative;
  UnitPlan root;
  root.name = "root";
  root.modules = {""};
  plan.units.push_back(root);
  Job job;
  job.sequence_length = std::max<std::int64_t>(model.sequence_length, 1);
  job.precision = {DType::kFp32, DType::kFp32, DType::kFp32};
  Program program = Lower({model, FindKernelSet(kernels, "test"), job, plan});
  CHECK(Verify(program).empty());
  return program;
}

// A linear layer, GELU and another linear layer; a fourth op reads `read` beside them.
Model GeluModel(const std::string& read) {
  const std::string text = R"({
    "format": "shardwright-model", "version": 1, "class": "Net",
    "inputs": {"x": {"shape": [4]}, "label": {"ids": 1}},
    "modules": [
      {"name": "up", "class": "Linear", "params": [{"name": "weight", "shape": [4, 4]}]},
      {"name": "act", "class": "GELU"},
      {"name": "down", "class": "Linear", "params": [{"name": "weight", "shape": [4, 4]}]},
      {"name": "side", "class": "Linear", "params": [{"name": "weight", "shape": [4, 4]}]}],
    "ops": [
      {"op": "linear", "module": "up", "inputs": ["x"], "output": "before"},
      {"op": "activation", "function": "gelu_tanh", "module": "act", "inputs": ["before"],
       "output": "after"},
      {"op": "linear", "module": "down", "inputs": ["after"], "output": "y"},
      {"op": "linear", "module": "side", "inputs": [")" +
                           read + R"("], "output": "z"},
      {"op": "add", "inputs": ["y", "z"], "output": "sum"},
      {"op": "cross_entropy", "inputs": ["sum", "label"], "output": "loss"}]})";
  return ModelFromJson(JsonValue::Parse(text, "net.json"), "net");
}

TEST_CASE("GELU runs inside the products beside it where nobody else reads what lies between") {
  const auto has_kernel = [](const std::string& read) {
    const Program p = LowerNative(GeluModel(read), "shardwright-cuda-gelu");
    return std::any_of(p.step.ops.begin(), p.step.ops.end(),
                       [&](const Op& op) { return OpName(p, op) == "mb0.act.activation.fwd"; });
  };
  CHECK_FALSE(has_kernel("x"));
  CHECK(has_kernel("before"));
  CHECK(has_kernel("after"));
}

constexpr std::int64_t kTokens = 5, kFeatures = 8, kHidden = 6, kExperts = 4, kChosen = 2;

Model ExpertsModel() {
  std::string params;
  for (std::int64_t e = 0; e < kExperts; ++e) {
    const std::string name = R"({"name": ")" + std::to_string(e);
    const std::string wide = R"(", "shape": [6, 8]},)", narrow = R"(", "shape": [8, 6]},)";
    params += name + ".gate" + wide + name + ".up" + wide + name + ".down" + narrow;
  }
  params.pop_back();
  const std::string text = R"({
    "format": "shardwright-model", "version": 1, "class": "Net", "sequence_length": 5,
    "inputs": {"ids": {"ids": 5}, "labels": {"ids": 5}},
    "modules": [
      {"name": "embed", "class": "Embedding", "params": [{"name": "weight", "shape": [9, 8]}]},
      {"name": "router", "class": "Router", "params": [{"name": "weight", "shape": [4, 8]}]},
      {"name": "experts", "class": "Experts", "params": [)" +
                           params + R"(]},
      {"name": "head", "class": "Linear", "params": [{"name": "weight", "shape": [9, 8]}]}],
    "ops": [
      {"op": "embedding", "module": "embed", "inputs": ["ids"], "output": "x"},
      {"op": "router", "module": "router", "inputs": ["x"], "output": "chosen",
       "experts_per_token": 2},
      {"op": "experts", "module": "experts", "inputs": ["x", "chosen"], "output": "y",
       "experts_per_token": 2, "gated": true, "function": "silu"},
      {"op": "linear", "module": "head", "inputs": ["y"], "output": "logits"},
      {"op": "cross_entropy", "inputs": ["logits", "labels"], "output": "loss"}]})";
  return ModelFromJson(JsonValue::Parse(text, "net.json"), "net");
}

// Bytes that the op called `name` uses as what is kept for backward.
std::int64_t SavedBytes(const Program& p, const std::string& name) {
  std::int64_t bytes = 0;
  for (std::uint32_t i = 0; i < p.step.size(); ++i) {
    if (OpName(p, p.step.ops[i]) == name) {
      for (const Access& access : p.step.AccessesOf(OpId(i))) {
        bytes += access.role == Role::kSaved ? p.buffers[access.buffer.value].size.value : 0;
      }
    }
  }
  return bytes;
}

// MixtralExperts of Transformers with grouped products, in fp32. Forward keeps, for each row that
// is given to an expert: its copy and its result, gate, up, silu(gate) and their product, its
// weight, three indices; and the experts' offsets. Backward frees step by step what the products
// and the weighted sum read, of indices one; the rest is freed behind it.
TEST_CASE("what experts keep for backward, and what of it goes early") {
  const Program p = LowerNative(ExpertsModel(), "hf-eager");
  const std::int64_t rows = kTokens * kChosen, offsets = kExperts * 4;
  CHECK(SavedBytes(p, "mb0.experts.fwd") ==
        rows * (4 * (2 * kFeatures + 4 * kHidden + 1) + 3 * 8) + offsets);
  CHECK(SavedBytes(p, "mb0.experts.bwd") == rows * (4 * kFeatures + 2 * 8) + offsets);
}

}  // namespace
}  // namespace shardwright
