#include <algorithm>
#include <cstdint>
#include <set>
#include <string>
#include <vector>

#include <doctest/doctest.h>

#include "core/error.h"
#include "models/internal/order.h"
#include "models/kernel_set.h"
#include "models/loader.h"
#include "models/model.h"

namespace shardwright {
namespace {

std::vector<std::string> Labels(const Model& model, const std::string& module) {
  const ModuleId ancestor = FindModule(model, module);
  std::vector<std::string> labels;
  for (const ModelOp& op : model.ops) {
    if (IsInside(model, op.module, ancestor)) {
      labels.push_back(OpLabel(model, op));
    }
  }
  return labels;
}

TEST_CASE("ModelGraph.EveryZooModelKeepsTheInvariants") {
  for (const ZooEntry& entry : ListModels()) {
    CAPTURE(entry.name);
    const Model model = LoadModel(entry.name);
    CHECK_NOTHROW(ValidateModel(model, entry.name));
    std::vector<bool> is_read(model.tensors.size(), false);
    std::set<ParamId> used;
    std::set<std::string> names;
    for (std::size_t i = 0; i < model.ops.size(); ++i) {
      const ModelOp& op = model.ops[i];
      CHECK(names.insert(std::to_string(op.module.value) + op.name).second);
      for (const TensorId input : op.inputs) {
        is_read[input.value] = true;
        const ModelOpId producer = model.tensors[input.value].producer;
        CHECK((!producer.valid() || producer.value < i));
      }
      for (const ParamId param : op.params) {
        const ParamId storage = model.params[param.value].tied_to;
        used.insert(storage.valid() ? storage : param);
      }
    }
    for (std::size_t i = 0; i < model.params.size(); ++i) {
      if (!model.params[i].tied_to.valid()) {
        CAPTURE(model.params[i].fqn);
        CHECK(used.contains(ParamId(i)));
      }
    }
    // Only the model's output, the last op's, is read by nobody.
    CHECK(std::count(is_read.begin(), is_read.end(), false) == 1);
    CHECK_FALSE(is_read[model.ops.back().outputs[0].value]);
    CHECK(model.tokens_per_sample > 0);
  }
}

TEST_CASE("ModelGraph.LlamaLayerRunsInTheOrderOfItsForward") {
  // LlamaDecoderLayer.forward of transformers, read line by line.
  const std::vector<std::string> expected = {"model.layers.1.input_layernorm",
                                             "model.layers.1.self_attn.q_proj",
                                             "model.layers.1.self_attn.k_proj",
                                             "model.layers.1.self_attn.v_proj",
                                             "model.layers.1.self_attn.rope",
                                             "model.layers.1.self_attn.attn",
                                             "model.layers.1.self_attn.o_proj",
                                             "model.layers.1.add_1",
                                             "model.layers.1.post_attention_layernorm",
                                             "model.layers.1.mlp.gate_proj",
                                             "model.layers.1.mlp.up_proj",
                                             "model.layers.1.mlp.gated_act",
                                             "model.layers.1.mlp.down_proj",
                                             "model.layers.1.add_2"};
  CHECK(Labels(LoadModel("llama-3-8b"), "model.layers.1") == expected);
}

TEST_CASE("ModelGraph.Gpt2BlockRunsInTheOrderOfItsForward") {
  const std::vector<std::string> expected = {"transformer.h.0.ln_1",
                                             "transformer.h.0.attn.c_attn",
                                             "transformer.h.0.attn",
                                             "transformer.h.0.attn.c_proj",
                                             "transformer.h.0.attn.resid_dropout",
                                             "transformer.h.0.add_1",
                                             "transformer.h.0.ln_2",
                                             "transformer.h.0.mlp.c_fc",
                                             "transformer.h.0.mlp.act",
                                             "transformer.h.0.mlp.c_proj",
                                             "transformer.h.0.mlp.dropout",
                                             "transformer.h.0.add_2"};
  CHECK(Labels(LoadModel("gpt2"), "transformer.h.0") == expected);
}

TEST_CASE("ModelGraph.SpecsOfALlamaLayerByHand") {
  // Llama-3-8B at 512 tokens: 32 query heads and 8 key/value heads of 128.
  const Model model = LoadModel("llama-3-8b", {.sequence_length = 512});
  const ModuleId attention = FindModule(model, "model.layers.0.self_attn");
  std::vector<OpSpec> specs;
  for (const ModelOp& op : model.ops) {
    if (IsInside(model, op.module, attention)) {
      specs.push_back(model.SpecOf(op));
    }
  }
  REQUIRE(specs.size() == 6);
  CHECK(specs[0] == OpSpec{.kind = OpKind::kLinear, .rows = 512, .in = 4096, .out = 4096});
  CHECK(specs[1] == OpSpec{.kind = OpKind::kLinear, .rows = 512, .in = 4096, .out = 1024});
  CHECK(specs[3] == OpSpec{.kind = OpKind::kRope,
                           .rows = 512,
                           .heads = 32,
                           .kv_heads = 8,
                           .head_dim = 128,
                           .rope = {.dim = 128, .theta = 500'000.0}});
  CHECK(specs[4] == OpSpec{.kind = OpKind::kAttention,
                           .rows = 512,
                           .heads = 32,
                           .kv_heads = 8,
                           .head_dim = 128,
                           .value_dim = 128,
                           .seq_q = 512,
                           .seq_k = 512,
                           .causal = true});
  // Layers share their specs: embedding, norm, q/o, k/v, rope, attention, add, gate/up, activation,
  // down, head, loss.
  CHECK(model.specs.size() == 12);
}

TEST_CASE("ModelGraph.SlidingWindowsFollowTheLayerPattern") {
  const auto windows = [](const char* name, std::int64_t tokens) {
    const Model model = LoadModel(name, {.sequence_length = tokens});
    std::vector<std::int64_t> result;
    for (const ModelOp& op : model.ops) {
      if (model.SpecOf(op).kind == OpKind::kAttention) {
        result.push_back(model.SpecOf(op).window);
      }
    }
    return result;
  };
  const std::vector<std::int64_t> gemma2 = windows("gemma-2-2b", 8192);
  CHECK(std::vector<std::int64_t>(gemma2.begin(), gemma2.begin() + 4) ==
        std::vector<std::int64_t>{4096, 0, 4096, 0});
  const std::vector<std::int64_t> gemma3 = windows("gemma-3-1b", 2048);
  CHECK(std::vector<std::int64_t>(gemma3.begin(), gemma3.begin() + 7) ==
        std::vector<std::int64_t>{512, 512, 512, 512, 512, 0, 512});
  CHECK(windows("mistral-7b", 8192).front() == 4096);
  // A window as long as the sequence is none, and a null window stays none.
  CHECK(windows("mistral-7b", 4096).front() == 0);
  CHECK(windows("mistral-7b-v0.3", 8192).front() == 0);
  CHECK(windows("llama-3-8b", 8192).front() == 0);
}

TEST_CASE("ModelGraph.PositionBiasAndPositionsAreBatchIndependent") {
  const Model t5 = LoadModel("t5-small", {.sequence_length = 128});
  std::size_t biases = 0;
  for (const ModelOp& op : t5.ops) {
    if (t5.SpecOf(op).kind == OpKind::kPositionBias) {
      const Tensor& bias = t5.tensors[op.outputs[0].value];
      CHECK(bias.elements == 8 * 128 * 128);
      CHECK_FALSE(bias.per_sample);
      ++biases;
    }
  }
  CHECK(biases == 2);  // one per stack
  const Model gpt2 = LoadModel("gpt2");
  const ModelOp& positions = gpt2.ops[1];
  CHECK(OpLabel(gpt2, positions) == "transformer.wpe");
  CHECK_FALSE(gpt2.tensors[positions.outputs[0].value].per_sample);
}

TEST_CASE("ModelGraph.ConventionFlopsByHand") {
  // Llama-2-7B at 2048 tokens, per token: 6 * (N - V*H) + 12 * L * H * S.
  const Model llama = LoadModel("llama-2-7b", {.sequence_length = 2048});
  const double llama_token = 6.0 * (6738415616.0 - 32000.0 * 4096) + 12.0 * 32 * 4096 * 2048;
  CHECK(ConventionFlopsPerSample(llama).value ==
        doctest::Approx(2048 * llama_token).epsilon(1e-12));
  // A tied embedding is a matmul too, and learned positions count, as llm-foundry does: 6 * N.
  const Model mpt = LoadModel("mpt-7b");
  const double mpt_token = 6.0 * 6658859008.0 + 12.0 * 32 * 4096 * 2048;
  CHECK(ConventionFlopsPerSample(mpt).value == doctest::Approx(2048 * mpt_token).epsilon(1e-12));
  // Mixtral: two of eight experts per token.
  const Model mixtral = LoadModel("mixtral-8x7b", {.sequence_length = 4096});
  const double idle = 32.0 * 6 * 3 * 4096 * 14336;
  const double active = 46702792704.0 - 32000.0 * 4096 - idle;
  CHECK(ConventionFlopsPerSample(mixtral).value ==
        doctest::Approx(4096 * (6.0 * active + 12.0 * 32 * 4096 * 4096)).epsilon(1e-12));
}

TEST_CASE("ModelGraph.ConvNetFlopsByHand") {
  // 6 * weights * output pixels for the convolutions, 6 * weights for the linear layers.
  const double expected = 6.0 * ((32 * 9 + 32) * 26.0 * 26.0 + (64 * 32 * 9 + 64) * 24.0 * 24.0 +
                                 9216.0 * 128 + 128 + 1280 + 10);
  CHECK(ConventionFlopsPerSample(LoadModel("mnist-convnet")).value == doctest::Approx(expected));
  // RegNetY-16GF is named after its multiply-adds of one forward pass: 15.9 GFLOPS in torchvision's
  // table (which has 15.912). A multiply-add is a third of 6 FLOPs, and three passes are one step.
  const double regnet = ConventionFlopsPerSample(LoadModel("regnet-y-16gf")).value;
  CHECK(regnet / 6.0 == doctest::Approx(15.912e9).epsilon(0.01));
}

// Matmul FLOPs of a list of kernels.
double MatmulFlops(const std::vector<Kernel>& kernels) {
  double flops = 0.0;
  for (const Kernel& kernel : kernels) {
    const bool is_matmul = kernel.kind == KernelClass::kGemm ||
                           kernel.kind == KernelClass::kGroupedGemm ||
                           kernel.kind == KernelClass::kConv;
    flops += is_matmul ? kernel.flops.value : 0.0;
  }
  return flops;
}

// Two independent ways to the same number: the kernels of every linear op, and 2 FLOPs per weight
// and row in each of forward, data gradient and weight gradient.
TEST_CASE("ModelGraph.KernelsOfEveryZooModelMultiplyWhatTheGraphSays") {
  const KernelSetOptions& kernels = FindKernelSet("torch-eager", "test");
  for (const ZooEntry& entry : ListModels()) {
    CAPTURE(entry.name);
    const Model model = LoadModel(entry.name);
    for (const OpSpec& spec : model.specs) {
      const OpKernels op = LowerOp(spec, 2, DType::kBf16, kernels);
      CHECK(op.forward.empty() == (spec.kind == OpKind::kSelect));  // a view
      double weights = 0.0;
      if (spec.kind == OpKind::kLinear) {
        weights = static_cast<double>(spec.rows * spec.in * spec.out);
      } else if (spec.kind == OpKind::kConv2d) {
        weights = static_cast<double>(spec.height_out * spec.width_out) *
                  static_cast<double>(spec.out * spec.in / spec.groups * spec.kernel * spec.kernel);
      } else if (spec.kind == OpKind::kExperts) {
        weights = static_cast<double>(spec.rows * spec.experts_per_token) *
                  static_cast<double>((spec.gated ? 3 : 2) * spec.in * spec.out);
      } else {
        continue;
      }
      CHECK(MatmulFlops(op.forward) == doctest::Approx(2 * 2 * weights));
      CHECK(MatmulFlops(op.backward_data) == doctest::Approx(2 * 2 * weights));
      CHECK(MatmulFlops(op.backward_weight) == doctest::Approx(2 * 2 * weights));
    }
  }
}

TEST_CASE("ModelGraph.InsideFollowsParents") {
  const Model model = LoadModel("gpt2");
  const ModuleId block = FindModule(model, "transformer.h.1");
  CHECK(IsInside(model, FindModule(model, "transformer.h.1.attn.c_attn"), block));
  CHECK(IsInside(model, block, block));
  CHECK(IsInside(model, block, ModuleId(0)));
  CHECK_FALSE(IsInside(model, FindModule(model, "transformer.h.11"), block));
  CHECK_FALSE(IsInside(model, ModuleId(0), block));
  CHECK_FALSE(FindModule(model, "transformer.h.12").valid());
}

TEST_CASE("ModelGraph.ValidateNamesWhatIsBroken") {
  const Model good = LoadModel("gpt2");
  const auto error = [](const Model& model) {
    try {
      ValidateModel(model, "m");
    } catch (const InputError& e) {
      return std::string(e.what());
    }
    return std::string("accepted");
  };
  CHECK(error(good) == "accepted");

  Model tied = good;
  tied.params.back().tied_to = ParamId(tied.params.size() - 1);
  CHECK(error(tied) ==
        "m: got parameter \"lm_head.weight\" tied to a later one, expected an earlier one");
  tied.params.back().tied_to = ParamId(1);
  CHECK(
      error(tied) ==
      "m: got parameter \"lm_head.weight\" tied to \"transformer.wpe.weight\", expected an untied "
      "parameter of the same shape");

  Model doubled = good;
  doubled.params[1].fqn = doubled.params[0].fqn;
  CHECK(error(doubled) ==
        "m: got two parameters named \"transformer.wte.weight\", expected unique names");

  Model two_writers = good;
  two_writers.ops[1].outputs = two_writers.ops[0].outputs;
  CHECK(error(two_writers) ==
        "m: got op \"transformer.wpe\" that writes a tensor with another producer, expected one "
        "producer per tensor");

  Model orphan = good;
  orphan.tensors[good.ops[0].outputs[0].value].producer = ModelOpId(7);
  CHECK(error(orphan) ==
        "m: got tensor 2 with a producer that does not write it, expected the op that writes it");

  Model cycle = good;
  cycle.ops[0].inputs[0] = cycle.ops[2].outputs[0];  // wte reads the sum of wte and wpe
  CHECK(error(cycle) ==
        "m: got a cycle through ops \"transformer.wte\", \"transformer.add_positions\", expected a "
        "graph without cycles");

  Model swapped = good;
  std::swap(swapped.ops[1], swapped.ops[2]);
  swapped.tensors[swapped.ops[1].outputs[0].value].producer = ModelOpId(1);
  swapped.tensors[swapped.ops[2].outputs[0].value].producer = ModelOpId(2);
  CHECK(error(swapped) ==
        "m: got op \"transformer.add_positions\" before op \"transformer.wpe\" whose output it "
        "reads, expected ops in execution order");
}

}  // namespace
}  // namespace shardwright
