#include <cstdint>
#include <string>
#include <vector>

#include <doctest/doctest.h>

#include "models/loader.h"
#include "models/model.h"

namespace shardwright {
namespace {

struct Count {
  const char* name;
  std::int64_t parameters;
};

TEST_CASE("Zoo.ParameterCountsOfPublishedModels") {
  // Totals that the publishers or torch's own count give; none computed here.
  const Count counts[] = {
      {"deepseek-v3-16b", 15706484224},  // as DeepSeek-V2-Lite, of the same sizes
      {"llama-2-7b", 6738415616},
      {"llama-2-70b", 68976648192},
      {"llama-3-8b", 8030261248},
      {"llama-3-70b", 70553706496},
      {"llama-3.1-405b", 405853388800},
      {"mistral-7b", 7241732096},
      {"phi-3-mini-4k", 3821079552},
      {"phi-4", 14659507200},
      {"stablelm-base-alpha-3b", 3637321728},  // 16 (12 h^2 + 13 h) + 2 * 50688 h + 2 h, h = 4096
      {"qwen2-7b", 7615616512},
      {"qwen2.5-0.5b", 494032768},
      {"qwen3-8b", 8190735360},
      {"qwen3-0.6b", 596049920},
      {"gemma-2b", 2506172416},
      {"gemma-2-2b", 2614341888},
      {"gemma-3-1b", 999885952},
      {"mixtral-8x7b", 46702792704},
      {"qwen3-30b-a3b", 30532122624},
      {"gpt-oss-20b", 20914757184},
      {"gpt-oss-120b", 116829156672},
      {"gemma-3-12b", 11766034176},
      {"gemma-3-27b", 27009346304},
      {"mistral-nemo-12b", 12247782400},
      {"mistral-small-24b", 23572403200},
      {"olmo-2-7b", 7298617344},
      {"olmo-3-7b", 7298011136},
      {"glm-4.5-air", 106852245504},
      {"glm-4.5", 352797814784},
      {"minimax-m2", 228689748992},
      {"kimi-k2", 1026408209408},
      {"smollm3-3b", 3075098624},
      {"tinyllama-1.1b", 1100048384},
      {"glm-4-9b-0414", 9400094720},
      {"deepseek-v3", 671026404352},
      {"gpt2", 124439808},
      {"gpt2-xl", 1557611200},
      {"gpt-neox-20b", 20554567680},
      {"pythia-1.4b", 1414647808},
      {"opt-125m", 125239296},
      {"opt-1.3b", 1315758080},
      {"bert-base", 109482240},
      {"bert-large", 335141888},
      {"t5-small", 60506624},
      {"t5-base", 222903552},
      {"flan-t5-base", 247577856},
      {"vit-b-16", 86567656},
      {"vit-b-16-model", 86389248},
      {"vit-l-16", 304326632},
      // Beyond the 31 vectors above.
      {"llama-2-13b", 13015864320},
      {"codellama-34b", 33743970304},
      {"llama-3.2-3b", 3212749824},
      {"qwen3-32b", 32762123264},
      {"opt-350m", 331196416},           // embeddings of another width, norms after the sums
      {"bert-base-uncased", 109514298},  // BertForMaskedLM
      {"gpt2-medium", 354823168},
      {"gpt2-large", 774030080},
      {"mpt-7b", 6658859008},  // llm-foundry, 2048 positions
      {"mpt-30b", 29975214080},
      {"mpt-70b", 64862437376},
      {"regnet-y-16gf", 83590140},  // torchvision's model table
      {"mnist-convnet", 1199882},   // 320 + 18496 + 1179776 + 1290
  };
  for (const Count& count : counts) {
    CAPTURE(count.name);
    CHECK(CountParameters(LoadModel(count.name)) == count.parameters);
  }
}

TEST_CASE("Zoo.RouterCorrectionBiasIsABuffer") {
  // DeepSeek-V3 counts 58 * 256 more when the correction bias is a parameter.
  std::int64_t buffers = 0;
  for (const Module& module : LoadModel("deepseek-v3").modules) {
    buffers += module.buffer_elements;
  }
  CHECK(buffers == 671026419200 - 671026404352);
}

TEST_CASE("Zoo.MptSizesItsPositionsForTheSequence") {
  // The position table of llm-foundry's benchmark at 65536 tokens: 63488 rows of 4096 more.
  const Model model = LoadModel("mpt-7b", {.sequence_length = 65536});
  CHECK(CountParameters(model) == 6918905856);
  CHECK(model.sequence_length == 65536);
}

TEST_CASE("Zoo.ListIsSortedCompleteAndSourced") {
  const std::vector<ZooEntry> entries = ListModels();
  CHECK(entries.size() >= 100);
  for (std::size_t i = 0; i < entries.size(); ++i) {
    CAPTURE(entries[i].name);
    CHECK_FALSE(entries[i].source.empty());
    CHECK(entries[i].parameters > 0);
    CHECK((i == 0 || entries[i - 1].name < entries[i].name));
  }
}

// Shape of a parameter; empty when the model has none of that name.
std::vector<std::int64_t> ShapeOf(const Model& model, const std::string& fqn) {
  for (const Parameter& param : model.params) {
    if (param.fqn == fqn) {
      return param.shape;
    }
  }
  return {};
}

struct Named {
  const char* model;
  const char* fqn;
  std::vector<std::int64_t> shape;
};

TEST_CASE("Zoo.ParameterNamesAndShapesAreThoseOfStateDict") {
  const Named named[] = {
      {"llama-3-8b", "model.embed_tokens.weight", {128256, 4096}},
      {"llama-3-8b", "model.layers.31.self_attn.k_proj.weight", {1024, 4096}},
      {"llama-3-8b", "model.layers.0.self_attn.o_proj.weight", {4096, 4096}},
      {"llama-3-8b", "model.layers.0.mlp.down_proj.weight", {4096, 14336}},
      {"llama-3-8b", "model.layers.0.post_attention_layernorm.weight", {4096}},
      {"llama-3-8b", "model.norm.weight", {4096}},
      {"llama-3-8b", "lm_head.weight", {128256, 4096}},
      {"qwen2-7b", "model.layers.0.self_attn.q_proj.bias", {3584}},
      {"qwen3-0.6b", "model.layers.0.self_attn.q_proj.weight", {2048, 1024}},
      {"qwen3-0.6b", "model.layers.0.self_attn.k_norm.weight", {128}},
      {"phi-4", "model.layers.0.self_attn.qkv_proj.weight", {7680, 5120}},
      {"phi-4", "model.layers.39.mlp.gate_up_proj.weight", {35840, 5120}},
      {"gemma-2-2b", "model.layers.0.pre_feedforward_layernorm.weight", {2304}},
      {"gpt2", "transformer.wpe.weight", {1024, 768}},
      {"gpt2", "transformer.h.11.attn.c_attn.weight", {768, 2304}},
      {"gpt2", "transformer.h.0.mlp.c_fc.weight", {768, 3072}},
      {"gpt2", "transformer.ln_f.bias", {768}},
      {"gpt-neox-20b", "gpt_neox.layers.43.attention.query_key_value.bias", {18432}},
      {"gpt-neox-20b", "gpt_neox.layers.0.mlp.dense_4h_to_h.weight", {6144, 24576}},
      {"gpt-neox-20b", "embed_out.weight", {50432, 6144}},
      {"opt-125m", "model.decoder.embed_positions.weight", {2050, 768}},
      {"opt-350m", "model.decoder.project_in.weight", {1024, 512}},
      {"opt-125m", "model.decoder.layers.0.self_attn_layer_norm.bias", {768}},
      {"t5-small", "shared.weight", {32128, 512}},
      {"t5-small", "decoder.block.0.layer.0.SelfAttention.relative_attention_bias.weight", {32, 8}},
      {"t5-small", "decoder.block.5.layer.1.EncDecAttention.o.weight", {512, 512}},
      {"t5-small", "encoder.block.0.layer.1.DenseReluDense.wi.weight", {2048, 512}},
      {"flan-t5-base", "decoder.block.0.layer.2.DenseReluDense.wi_1.weight", {2048, 768}},
      {"bert-base-uncased", "bert.embeddings.token_type_embeddings.weight", {2, 768}},
      {"bert-base-uncased", "bert.encoder.layer.0.attention.output.LayerNorm.weight", {768}},
      {"bert-base-uncased", "cls.predictions.decoder.weight", {30522, 768}},
      {"bert-base", "pooler.dense.weight", {768, 768}},
      {"vit-b-16", "vit.embeddings.position_embeddings", {1, 197, 768}},
      {"vit-b-16", "vit.embeddings.patch_embeddings.projection.weight", {768, 3, 16, 16}},
      {"vit-b-16", "vit.encoder.layer.11.attention.attention.query.bias", {768}},
      {"mixtral-8x7b", "model.layers.0.block_sparse_moe.gate.weight", {8, 4096}},
      {"mixtral-8x7b", "model.layers.31.block_sparse_moe.experts.7.w2.weight", {4096, 14336}},
      {"qwen3-30b-a3b", "model.layers.0.mlp.experts.127.gate_proj.weight", {768, 2048}},
      {"deepseek-v3", "model.layers.2.mlp.gate_proj.weight", {18432, 7168}},
      {"deepseek-v3", "model.layers.3.mlp.shared_experts.up_proj.weight", {2048, 7168}},
      {"deepseek-v3", "model.layers.0.self_attn.kv_a_proj_with_mqa.weight", {576, 7168}},
      {"deepseek-v3", "model.layers.0.self_attn.q_b_proj.weight", {24576, 1536}},
      {"mpt-7b", "transformer.blocks.0.attn.Wqkv.weight", {12288, 4096}},
      {"mpt-7b", "transformer.blocks.31.ffn.up_proj.weight", {16384, 4096}},
      {"regnet-y-16gf", "trunk_output.block1.block1-0.f.b.0.weight", {224, 112, 3, 3}},
      {"regnet-y-16gf", "trunk_output.block3.block3-10.f.se.fc1.bias", {308}},
      {"mnist-convnet", "fc1.weight", {128, 9216}},
  };
  for (const Named& n : named) {
    CAPTURE(n.model);
    CAPTURE(n.fqn);
    CHECK(ShapeOf(LoadModel(n.model), n.fqn) == n.shape);
  }
  CHECK(ShapeOf(LoadModel("t5-small"),
                "encoder.block.1.layer.0.SelfAttention.relative_attention_bias.weight")
            .empty());
  CHECK(ShapeOf(LoadModel("llama-3-8b"), "model.layers.0.self_attn.q_proj.bias").empty());
}

TEST_CASE("Zoo.ParametersComeInRegistrationOrder") {
  // print(model) of transformers: attention, MLP, then the norms.
  const Model model = LoadModel("llama-3-8b");
  const std::vector<std::string> expected = {
      "model.embed_tokens.weight",
      "model.layers.0.self_attn.q_proj.weight",
      "model.layers.0.self_attn.k_proj.weight",
      "model.layers.0.self_attn.v_proj.weight",
      "model.layers.0.self_attn.o_proj.weight",
      "model.layers.0.mlp.gate_proj.weight",
      "model.layers.0.mlp.up_proj.weight",
      "model.layers.0.mlp.down_proj.weight",
      "model.layers.0.input_layernorm.weight",
      "model.layers.0.post_attention_layernorm.weight",
      "model.layers.1.self_attn.q_proj.weight",
  };
  for (std::size_t i = 0; i < expected.size(); ++i) {
    CHECK(model.params[i].fqn == expected[i]);
  }
  CHECK(model.params.back().fqn == "lm_head.weight");
}

TEST_CASE("Zoo.TiedWeightsAreAliases") {
  const Model tied = LoadModel("llama-3.2-1b");
  CHECK(tied.params.back().fqn == "lm_head.weight");
  CHECK(tied.params.back().tied_to == ParamId(0));
  const Model t5 = LoadModel("t5-small");
  std::vector<std::string> aliases;
  for (const Parameter& param : t5.params) {
    if (param.tied_to.valid()) {
      CHECK(t5.params[param.tied_to.value].fqn == "shared.weight");
      aliases.push_back(param.fqn);
    }
  }
  CHECK(aliases == std::vector<std::string>{"encoder.embed_tokens.weight",
                                            "decoder.embed_tokens.weight", "lm_head.weight"});
}

TEST_CASE("Zoo.BlockClassesAreThoseToWrap") {
  const std::pair<const char*, const char*> classes[] = {{"llama-3-8b", "LlamaDecoderLayer"},
                                                         {"gpt2", "GPT2Block"},
                                                         {"gpt-neox-20b", "GPTNeoXLayer"},
                                                         {"opt-125m", "OPTDecoderLayer"},
                                                         {"t5-small", "T5Block"},
                                                         {"bert-base", "BertLayer"},
                                                         {"vit-b-16", "ViTLayer"},
                                                         {"mixtral-8x7b", "MixtralDecoderLayer"},
                                                         {"deepseek-v3", "DeepseekV3DecoderLayer"},
                                                         {"mpt-7b", "MPTBlock"},
                                                         {"regnet-y-16gf", "ResBottleneckBlock"}};
  for (const auto& [model_name, block_class] : classes) {
    const char* const name = model_name;
    const char* const block = block_class;
    CAPTURE(name);
    const Model model = LoadModel(name);
    CHECK(model.block_classes == std::vector<std::string>{block});
    std::size_t blocks = 0;
    for (const Module& module : model.modules) {
      blocks += module.class_name == block ? 1 : 0;
    }
    CHECK(blocks > 0);
  }
}

}  // namespace
}  // namespace shardwright
