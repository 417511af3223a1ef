// CutContext by closed form: what a rank computes, what it gathers, and what is refused.

#include "models/cut_context.h"

#include <cstdint>
#include <string>
#include <vector>

#include <doctest/doctest.h>

#include "core/error.h"
#include "models/cut_experts.h"
#include "models/kernels/kernels.h"
#include "models/loader.h"

namespace shardwright {
namespace {

Model Loaded(const std::string& name, std::int64_t sequence = 4096) {
  LoadOptions options;
  options.sequence_length = sequence;
  return LoadModel(name, options);
}

// FLOPs of a forward and a backward pass of one sample, and of its attention alone.
struct Work {
  double all = 0, attention = 0;
};
Work WorkOf(const Model& model) {
  Work work;
  for (const ModelOp& op : model.ops) {
    const OpKernels k =
        LowerOp(model.SpecOf(op), 1, DType::kBf16, FindKernelSet("torch-eager", "test"));
    const auto add = [&](const std::vector<Kernel>& kernels, std::int64_t times) {
      for (const Kernel& kernel : kernels) {
        work.all += static_cast<double>(times) * kernel.flops.value;
        work.attention +=
            IsAttention(kernel.kind) ? static_cast<double>(times) * kernel.flops.value : 0;
      }
    };
    for (const auto* kernels : {&k.forward, &k.backward_data, &k.backward_weight}) {
      add(*kernels, 1);
    }
    if (k.ring.steps > 0) {
      add(k.ring.first, 1);
      add(k.ring.back_first, 1);
      add(k.ring.later, k.ring.steps - 1);
      add(k.ring.back_later, k.ring.steps - 1);
    }
  }
  return work;
}

TEST_CASE("CutContext: the ranks together do the work of one") {
  for (const char* name : {"llama-3-8b", "qwen3-8b", "mistral-7b", "gemma-2-9b", "mixtral-8x7b"}) {
    const Model whole = Loaded(name);
    for (const std::int64_t ranks : {2, 4, 8, 16}) {
      CAPTURE(name);
      CAPTURE(ranks);
      Model model = whole;
      CutContext(model, ranks, ContextMethod::kGather, "test");
      ValidateModel(model, "test");
      const auto times = static_cast<double>(ranks);
      CHECK(times * WorkOf(model).all == doctest::Approx(WorkOf(whole).all).epsilon(1e-12));
      CHECK(times * WorkOf(model).attention ==
            doctest::Approx(WorkOf(whole).attention).epsilon(1e-12));
      CHECK(ConventionFlopsPerSample(model).value ==
            doctest::Approx(ConventionFlopsPerSample(whole).value).epsilon(1e-12));
      CHECK(CountParameters(model) == CountParameters(whole));
      CHECK(model.params.size() == whole.params.size());
      Model again = model;
      CutContext(again, ranks, ContextMethod::kGather, "test");
      CHECK(again.ops.size() == model.ops.size());
    }
  }
}

TEST_CASE("CutContext: the steps of a ring together do the work of one") {
  for (const ContextMethod method : {ContextMethod::kRing, ContextMethod::kRingGather}) {
    for (const std::int64_t ranks : {2, 4, 8}) {
      const Model whole = Loaded("llama-3-8b");
      Model model = whole;
      CutContext(model, ranks, method, "test");
      ValidateModel(model, "test");
      CHECK(static_cast<double>(ranks) * WorkOf(model).attention ==
            doctest::Approx(WorkOf(whole).attention).epsilon(1e-12));
      CHECK(ConventionFlopsPerSample(model).value ==
            doctest::Approx(ConventionFlopsPerSample(whole).value).epsilon(1e-12));
      CHECK(model.ops.size() == whole.ops.size());
    }
  }
}

TEST_CASE("CutContext: all tokens of some heads are the work of one") {
  for (const char* name : {"llama-3-8b", "mistral-7b", "gemma-2-9b"}) {
    for (const std::int64_t ranks : {2, 4, 8}) {
      CAPTURE(name);
      CAPTURE(ranks);
      const Model whole = Loaded(name, 8192);
      Model model = whole;
      CutContext(model, ranks, ContextMethod::kUlysses, "test");
      ValidateModel(model, "test");
      CHECK(static_cast<double>(ranks) * WorkOf(model).all ==
            doctest::Approx(WorkOf(whole).all).epsilon(1e-12));
      CHECK(ConventionFlopsPerSample(model).value ==
            doctest::Approx(ConventionFlopsPerSample(whole).value).epsilon(1e-12));
      std::int64_t swaps = 0, layers = 0;
      for (const ModelOp& op : model.ops) {
        const OpKind kind = model.SpecOf(op).kind;
        layers += kind == OpKind::kAttention ? 1 : 0;
        if (kind == OpKind::kAttention) {
          CHECK(model.tensors[op.inputs[1].value].elements ==
                8192 * model.SpecOf(op).kv_heads * model.SpecOf(op).head_dim);
          CHECK(model.tensors[op.outputs[0].value].elements ==
                8192 * model.SpecOf(op).heads * model.SpecOf(op).value_dim);
        }
        swaps += kind == OpKind::kExchange ? 1 : 0;
        for (const TensorId t : kind == OpKind::kExchange ? op.inputs : std::vector<TensorId>()) {
          CHECK(model.tensors[t.value].elements ==
                model.tensors[op.outputs.front().value].elements);
        }
      }
      CHECK(swaps == 4 * layers);
    }
  }
}

TEST_CASE("CutContext: pairs of a causal mask by listing") {
  // Tiles of 128: rank i has chunks i and 2 c - 1 - i, and sees in each the keys up to its own.
  for (const std::int64_t ranks : {2, 4}) {
    for (const std::int64_t chunk : {128, 384}) {
      OpSpec spec;
      spec.kind = OpKind::kAttention;
      spec.causal = true;
      spec.seq_q = 2 * chunk;
      spec.seq_k = 2 * chunk * ranks;
      spec.context_ranks = ranks;
      for (std::int64_t rank = 0; rank < ranks; ++rank) {
        std::int64_t pairs = 0;
        for (const std::int64_t piece : {rank, 2 * ranks - 1 - rank}) {
          for (std::int64_t tile = 0; tile < chunk / 128; ++tile) {
            pairs += 128 * (piece * chunk + (tile + 1) * 128);
          }
        }
        CHECK(internal::FlashPairs(spec) == static_cast<double>(pairs));
      }
    }
  }
}

TEST_CASE("CutContext: a layer of llama-3-8b on 4 ranks") {
  Model model = Loaded("llama-3-8b");
  CutContext(model, 4, ContextMethod::kGather, "test");
  std::size_t at = 0;
  while (model.SpecOf(model.ops[at]).kind != OpKind::kAttention) {
    ++at;
  }
  const auto elements = [&](TensorId t) { return model.tensors[t.value].elements; };
  const ModelOp& attention = model.ops[at];
  const ModelOp& keys = model.ops[at - 2];
  const ModelOp& values = model.ops[at - 1];
  CHECK(attention.inputs[1] == keys.outputs.front());
  CHECK(attention.inputs[2] == values.outputs.front());
  CHECK(elements(attention.inputs[0]) == 1024 * 4096);
  CHECK(elements(attention.outputs[0]) == 1024 * 4096);
  for (const ModelOp* gather : {&keys, &values}) {
    CHECK(model.SpecOf(*gather).kind == OpKind::kGatherTokens);
    CHECK(elements(gather->inputs.front()) == 1024 * 1024);  // 8 heads of 128
    CHECK(elements(gather->outputs.front()) == 4096 * 1024);
  }
  CHECK(model.tokens_per_sample == 4096);
}

TEST_CASE("CutContext: experts that ranks share out have rows of a part of the tokens") {
  Model model = Loaded("mixtral-8x7b");
  CutExperts(model, 4, "test");
  const Model whole = model;
  CutContext(model, 2, ContextMethod::kGather, "test");
  ValidateModel(model, "test");
  for (std::size_t i = 0, j = 0; i < whole.ops.size(); ++i, ++j) {
    while (model.ops[j].name != whole.ops[i].name) {
      ++j;  // a gather
    }
    CHECK(2 * model.SpecOf(model.ops[j]).rows == whole.SpecOf(whole.ops[i]).rows);
  }
}

std::string Refusal(const std::string& name, std::int64_t ranks, std::int64_t sequence = 4096,
                    ContextMethod method = ContextMethod::kGather) {
  try {
    Model model = Loaded(name, sequence);
    CutContext(model, ranks, method, "--shard: cp");
  } catch (const InputError& error) {
    return error.what();
  }
  return "none";
}

TEST_CASE("CutContext: what cannot be cut is said") {
  CHECK(
      Refusal("llama-3-8b", 4, 100) ==
      "--shard: cp: got 4, expected a divisor of half of the 100 tokens, of which each rank has a "
      "piece of the head and of the tail");
  CHECK(Refusal("llama-3-8b", 2, 100) == "none");
  CHECK(Refusal("opt-1.3b", 2, 2048) == "none");  // a table of positions is looked up
  CHECK(Refusal("phi-4", 2).find("attention of other inputs than q, k and v") != std::string::npos);
  CHECK(Refusal("mistral-7b", 2, 8192, ContextMethod::kRing)
            .find("attention by a ring that is not plainly causal") != std::string::npos);
  CHECK(Refusal("llama-3-8b", 16, 8192, ContextMethod::kUlysses)
            .find("32 heads, 8 of keys, that make no equal parts") != std::string::npos);
  CHECK(Refusal("vit-b-16", 2).find("the model reads no sequences") != std::string::npos);
  CHECK(Refusal("t5-small", 2, 512).find("no rule cuts the tokens of op") != std::string::npos);
}

}  // namespace
}  // namespace shardwright
