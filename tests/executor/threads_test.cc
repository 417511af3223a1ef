// Threads that share a rank's compute: networks large enough for kernels to cut their work come out
// the same. Twice with as many threads to the bit; with more of them but for the rounding of matrix
// products, which OpenBLAS makes of other numbers of rows in another order.

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <random>
#include <string>
#include <vector>

#include <doctest/doctest.h>

#include "core/json.h"
#include "executor/half.h"
#include "models/loader.h"
#include "schedule/wrap.h"
#include "tests/executor/harness.h"

namespace shardwright::testing {
namespace {

constexpr std::int64_t kBatch = 4;

// Ids and labels below `ids`, and numbers where views are of floats.
auto RandomInputs(std::int64_t ids) {
  return [ids](const BatchKey& key, std::span<const View> views) {
    for (const View& view : views) {
      const std::int64_t elements = view.elements / key.count;
      for (std::int64_t i = 0; i < view.elements; ++i) {
        const std::int64_t sample = key.first_sample + i / elements;
        std::mt19937_64 random(
            static_cast<std::uint64_t>((key.step * 1000 + sample) * 100'003 + i % elements));
        if (view.dtype == DType::kInt64) {
          static_cast<std::int64_t*>(view.data)[i] =
              static_cast<std::int64_t>(random() % static_cast<std::uint64_t>(ids));
        } else {
          StoreFloat(view.dtype, view.data, i,
                     static_cast<float>(random() % 2000) / 1000.0F - 1.0F);
        }
      }
    }
  };
}

Setup Job(const std::string& json, std::int64_t ids, std::int64_t ranks, DType param) {
  Setup s = DescentSetup(ModelFromJson(JsonValue::Parse(json, "net.json"), "net"), 0.125);
  s.run.inputs = RandomInputs(ids);
  s.job.global_batch = kBatch * ranks;
  s.job.precision = {param, DType::kFp32, param};
  s.job.optimizer.kind = OptimizerKind::kAdamW;
  s.training.optimizer.epsilon = 1.0;  // a small one makes whole updates of rounding errors
  s.job.clip_gradients = true;
  s.plan.dialect = Dialect::kFsdp2;
  s.plan.shard_size = ranks;
  s.plan.micro_batch = kBatch;
  s.plan.units = Wrap(s.model, ParseWrap("root", "test"), ReshardChoice(), s.plan.dialect, "test");
  s.steps = 2;
  return s;
}

const char* const kGpt2 = R"({"model_type": "gpt2", "n_embd": 192, "n_layer": 2, "n_head": 3,
  "n_positions": 160, "vocab_size": 777, "resid_pdrop": 0.1, "embd_pdrop": 0.1,
  "attn_pdrop": 0.1})";
const char* const kLlama = R"({"model_type": "llama", "hidden_size": 192, "num_hidden_layers": 2,
  "num_attention_heads": 6, "num_key_value_heads": 3, "intermediate_size": 500,
  "max_position_embeddings": 160, "vocab_size": 777})";
const char* const kMixtral = R"({"model_type": "mixtral", "hidden_size": 192,
  "num_hidden_layers": 1, "num_attention_heads": 6, "num_key_value_heads": 3,
  "intermediate_size": 320, "num_local_experts": 4, "num_experts_per_tok": 2,
  "max_position_embeddings": 160, "vocab_size": 777})";
const char* const kConvNet = R"({
  "format": "shardwright-model", "version": 1, "class": "Net",
  "inputs": {"image": {"shape": [3, 48, 48]}, "label": {"ids": 1}},
  "modules": [
    {"name": "conv1", "class": "Conv2d",
     "params": [{"name": "weight", "shape": [24, 3, 3, 3]}, {"name": "bias", "shape": [24]}]},
    {"name": "norm1", "class": "BatchNorm2d", "buffers": 49,
     "params": [{"name": "weight", "shape": [24]}, {"name": "bias", "shape": [24]}]},
    {"name": "conv2", "class": "Conv2d", "params": [{"name": "weight", "shape": [40, 24, 3, 3]}]},
    {"name": "fc", "class": "Linear",
     "params": [{"name": "weight", "shape": [10, 19360]}, {"name": "bias", "shape": [10]}]}],
  "ops": [
    {"op": "conv2d", "module": "conv1", "inputs": ["image"], "output": "x0"},
    {"op": "batch_norm", "module": "norm1", "inputs": ["x0"], "output": "x1"},
    {"op": "activation", "function": "relu", "inputs": ["x1"], "output": "x2"},
    {"op": "conv2d", "module": "conv2", "inputs": ["x2"], "output": "x3"},
    {"op": "max_pool", "kernel": 2, "inputs": ["x3"], "output": "x4"},
    {"op": "flatten", "inputs": ["x4"], "output": "x5"},
    {"op": "linear", "module": "fc", "inputs": ["x5"], "output": "x6"},
    {"op": "log_softmax", "inputs": ["x6"], "output": "x7"},
    {"op": "nll_loss", "inputs": ["x7", "label"], "output": "loss"}]})";

// The largest difference of any two elements over the largest magnitude of the vector's.
template <typename T>
double Difference(const std::vector<T>& a, const std::vector<T>& b) {
  REQUIRE(a.size() == b.size());
  double most = 0, largest = 1e-30;
  for (std::size_t i = 0; i < a.size(); ++i) {
    const double difference = std::abs(static_cast<double>(a[i]) - static_cast<double>(b[i]));
    most = difference <= most ? most : difference;  // NaN stays
    largest = std::max(largest, std::abs(static_cast<double>(b[i])));
  }
  return most / largest;
}

void CheckThreads(const std::string& json, std::int64_t ids, std::int64_t ranks, DType param,
                  Fp8Products fp8 = Fp8Products::kNone) {
  Setup setup = Job(json, ids, ranks, param);
  setup.fp8 = fp8;
  const double rounding = param == DType::kFp32 ? 1e-5 : 1e-2;
  const Outcome one = Train(setup);
  CHECK(one.findings.empty());
  for (const std::int64_t threads : {2, 3, 5}) {
    CAPTURE(threads);
    setup.host.threads = threads;
    const Outcome several = Train(setup);
    CHECK(several.findings.empty());
    CHECK(Difference(several.losses, one.losses) < rounding);
    for (std::size_t p = 0; p < one.weights.size(); ++p) {
      CAPTURE(p);
      CHECK(Difference(several.weights[p], one.weights[p]) < rounding);
    }
    for (std::size_t r = 0; r < one.buffers.size(); ++r) {
      CHECK(Difference(several.buffers[r], one.buffers[r]) < rounding);
    }
    if (threads == 3) {
      const Outcome again = Train(setup);
      CHECK(again.losses == several.losses);
      CHECK(again.weights == several.weights);
      CHECK(again.buffers == several.buffers);
    }
  }
}

}  // namespace

TEST_CASE("Threads: a transformer with dropout, layer norms and a tied head") {
  CheckThreads(kGpt2, 160, 1, DType::kFp32);  // positions are ids, too
  CheckThreads(kGpt2, 160, 2, DType::kFp32);
}

TEST_CASE("Threads: RMS norms, rotary positions, gated activations, experts, 16 bits") {
  CheckThreads(kLlama, 777, 1, DType::kFp32);
  CheckThreads(kLlama, 777, 1, DType::kBf16);
  CheckThreads(kMixtral, 777, 1, DType::kFp32);
}

// Largest magnitudes are found by parts.
TEST_CASE("Threads: products in fp8") {
  CheckThreads(kGpt2, 160, 1, DType::kBf16, Fp8Products::kPerTensor);
  CheckThreads(kGpt2, 160, 1, DType::kBf16, Fp8Products::kPerRow);
}

TEST_CASE("Threads: convolutions, batch norm and pools") {
  CheckThreads(kConvNet, 10, 1, DType::kFp32);
}

}  // namespace shardwright::testing
