// Which exchanges batch norms with the statistics of all ranks put into a program.

#include <cstdint>
#include <string>
#include <vector>

#include <doctest/doctest.h>

#include "core/json.h"
#include "models/loader.h"
#include "schedule/lower.h"
#include "schedule/wrap.h"
#include "tests/executor/harness.h"

namespace shardwright::testing {
namespace {

// The first norm's input wants no gradient beyond the convolution's weight, the second one's does.
Model Net(bool is_synchronized) {
  const std::string norm =
      is_synchronized ? R"("op": "batch_norm", "synchronized": true)" : R"("op": "batch_norm")";
  const std::string text = R"({
    "format": "shardwright-model", "version": 1, "class": "Net",
    "inputs": {"image": {"shape": [3, 6, 6]}, "label": {"ids": 1}},
    "modules": [
      {"name": "norm0", "class": "SyncBatchNorm", "buffers": 7,
       "params": [{"name": "weight", "shape": [3]}, {"name": "bias", "shape": [3]}]},
      {"name": "conv1", "class": "Conv2d", "params": [{"name": "weight", "shape": [5, 3, 3, 3]}]},
      {"name": "norm1", "class": "SyncBatchNorm", "buffers": 11,
       "params": [{"name": "weight", "shape": [5]}, {"name": "bias", "shape": [5]}]},
      {"name": "conv2", "class": "Conv2d", "params": [{"name": "weight", "shape": [4, 5, 3, 3]}]},
      {"name": "norm2", "class": "SyncBatchNorm", "buffers": 9,
       "params": [{"name": "weight", "shape": [4]}, {"name": "bias", "shape": [4]}]},
      {"name": "fc", "class": "Linear",
       "params": [{"name": "weight", "shape": [7, 16]}, {"name": "bias", "shape": [7]}]}],
    "ops": [
      {)" + norm + R"(, "module": "norm0", "inputs": ["image"], "output": "x0"},
      {"op": "conv2d", "module": "conv1", "inputs": ["x0"], "output": "x1"},
      {)" + norm + R"(, "module": "norm1", "inputs": ["x1"], "output": "x2"},
      {"op": "activation", "function": "relu", "module": "norm1", "inputs": ["x2"], "output": "x3"},
      {"op": "conv2d", "module": "conv2", "inputs": ["x3"], "output": "x4"},
      {)" + norm + R"(, "module": "norm2", "inputs": ["x4"], "output": "x5"},
      {"op": "flatten", "inputs": ["x5"], "output": "x6"},
      {"op": "linear", "module": "fc", "inputs": ["x6"], "output": "x7"},
      {"op": "log_softmax", "inputs": ["x7"], "output": "x8"},
      {"op": "nll_loss", "inputs": ["x8", "label"], "output": "loss"}]})";
  return ModelFromJson(JsonValue::Parse(text, "net.json"), "net");
}

Setup NetSetup(Dialect dialect, std::int64_t ranks, bool is_synchronized = true) {
  Setup s;
  s.model = Net(is_synchronized);
  s.job.precision = {DType::kFp32, DType::kFp32, DType::kFp32};
  s.job.clip_gradients = false;
  s.plan.dialect = dialect;
  s.plan.micro_batch = 12 / ranks;
  (dialect == Dialect::kDdp ? s.plan.replicate_size : s.plan.shard_size) = ranks;
  const std::string wrap = dialect == Dialect::kDdp ? "root" : "size:40";
  s.plan.units = Wrap(s.model, ParseWrap(wrap, "test"), {}, dialect, "test");
  return s;
}

}  // namespace

// One gather of 2 C + 1 numbers per rank and norm in forward; in backward one sum of 2 C numbers
// where the input wants a gradient, which the first norm's does not. Where a dialect has a
// communicator of all ranks it serves, as PyTorch's default group does; native has one more.
TEST_CASE("BatchNorm: the exchanges of a program") {
  const auto exchanges = [](const Setup& setup) {
    const Program program = LowerSetup(setup);
    std::vector<std::string> found;
    for (std::size_t i = 0; i < program.step.size(); ++i) {
      const OpShape& shape = program.ShapeOf(program.step.ops[i]);
      if (InfoOf(shape.code).is_collective && shape.stream == Stream::kCompute) {
        found.push_back(std::string(InfoOf(shape.code).name) + " " +
                        std::to_string(shape.bytes.value) + " " +
                        program.groups[shape.group.value].name);
      }
    }
    return found;
  };
  using Names = std::vector<std::string>;
  CHECK(exchanges(NetSetup(Dialect::kFsdp2, 3)) ==
        Names{"all_gather 84 shard", "all_gather 132 shard", "all_gather 108 shard",
              "all_reduce 32 shard", "all_reduce 40 shard"});
  CHECK(exchanges(NetSetup(Dialect::kNative, 2)) ==
        Names{"all_gather 56 statistics", "all_gather 88 statistics", "all_gather 72 statistics",
              "all_reduce 32 statistics", "all_reduce 40 statistics"});
  Setup hybrid = NetSetup(Dialect::kFsdp1, 4);
  hybrid.plan.shard_size = hybrid.plan.replicate_size = 2;
  CHECK(exchanges(hybrid).at(0) == "all_gather 112 world");
  CHECK(exchanges(NetSetup(Dialect::kDdp, 1)).empty());
  CHECK(exchanges(NetSetup(Dialect::kFsdp2, 3, false)).empty());
  Setup forward = NetSetup(Dialect::kFsdp2, 3);
  forward.job.mode = JobMode::kForward;
  CHECK(exchanges(forward).empty());
}

}  // namespace shardwright::testing
