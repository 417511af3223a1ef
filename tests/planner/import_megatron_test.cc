// Megatron-LM's arguments. What is expected is counted by hand, or is a model of the zoo whose
// sizes the arguments repeat; defaults are those of megatron/training/arguments.py, commit of
// 2026-08-22.

#include <string>

#include <doctest/doctest.h>

#include "models/loader.h"
#include "models/totals.h"
#include "planner/importers/run_settings.h"
#include "tests/planner/run_files.h"

namespace shardwright {
namespace {

using testing::ErrorOf;
using testing::Folder;
using testing::Read;

// Llama 3 8B, as NVIDIA's example has it.
const std::string kLlama =
    "GPUS=8\ntorchrun --nproc_per_node $GPUS --nnodes ${NODES:-2} pretrain_gpt.py --num-layers 32 "
    "--hidden-size 4096 --ffn-hidden-size 14336 --num-attention-heads 32 --group-query-attention "
    "--num-query-groups 8 --swiglu --normalization RMSNorm --position-embedding-type rope "
    "--disable-bias-linear --untie-embeddings-and-output-weights --attention-dropout 0.0 "
    "--hidden-dropout 0 --seq-length 8192 --max-position-embeddings 8192 --micro-batch-size 1 "
    "--bf16 --tokenizer-type NullTokenizer --vocab-size 128256 ";

ScriptFacts FactsOfText(const std::string& text, const std::string& name = "run.sh") {
  return Read(Folder(), {{name, "#!/bin/bash\n" + text}}).script;
}

std::int64_t ParametersOf(const ScriptFacts& facts) {
  return CountParameters(ModelFromJson(JsonValue::Parse(facts.config, "c"), facts.model));
}

std::string FlagOf(const ScriptFacts& facts, const std::string& flag) {
  const auto found = facts.plan_flags.find(flag);
  return found == facts.plan_flags.end() ? "not said" : found->second;
}

TEST_CASE("arguments of a model of the zoo make its parameters") {
  const ScriptFacts facts = FactsOfText(kLlama + "--tensor-model-parallel-size 2");
  CHECK(ParametersOf(facts) == CountParameters(LoadModel("llama-3-8b")));
  CHECK(facts.model == "megatron-32x4096");
  CHECK(facts.sequence_length == 8192);
  CHECK(facts.gpus_per_node == 8);
  CHECK(facts.nodes == 2);
  // 61 layers, three of them dense, 256 experts and a shared one, latent attention.
  const ScriptFacts deep = FactsOfText(
      "torchrun pretrain_gpt.py --num-layers 61 --hidden-size 7168 --ffn-hidden-size 18432 "
      "--num-attention-heads 128 --multi-latent-attention --q-lora-rank 1536 --kv-lora-rank 512 "
      "--qk-head-dim 128 --qk-pos-emb-head-dim 64 --v-head-dim 128 --swiglu --normalization "
      "RMSNorm "
      "--position-embedding-type rope --disable-bias-linear --num-experts 256 --moe-router-topk 8 "
      "--moe-ffn-hidden-size 2048 --moe-shared-expert-intermediate-size 2048 "
      "--moe-layer-freq ([0]*3+[1]*58) --moe-router-score-function sigmoid "
      "--untie-embeddings-and-output-weights --attention-dropout 0 --hidden-dropout 0 "
      "--seq-length 4096 --max-position-embeddings 4096 --micro-batch-size 1 --bf16 "
      "--tokenizer-type NullTokenizer --vocab-size 129280 --use-distributed-optimizer "
      "--expert-model-parallel-size 8 --pipeline-model-parallel-size 1");
  CHECK(ParametersOf(deep) == CountParameters(LoadModel("deepseek-v3")));
  CHECK(FlagOf(deep, "--shard") == "ep=8");
}

TEST_CASE("arguments of GPT-3 have its biases, positions and padded vocabulary") {
  const ScriptFacts facts = FactsOfText(
      "GPUS=8\nDISTRIBUTED=(--nproc_per_node $GPUS)\nMODEL=(\n  --num-layers 96\n  --hidden-size "
      "12288\n"
      "  --num-attention-heads 96\n  --seq-length 2048 --max-position-embeddings 2048\n)\n"
      "torchrun ${DISTRIBUTED[@]} pretrain_gpt.py ${MODEL[@]} --micro-batch-size 1 \\\n"
      "  --global-batch-size 1536 --fp16 --tensor-model-parallel-size=8 "
      "--pipeline-model-parallel-size 16 --vocab-file v --merge-file m\n");
  // Per layer 12 h^2 + 13 h; 51,200 words (50,257 to a multiple of 8 x 128), tied, and places.
  const std::int64_t h = 12288;
  CHECK(ParametersOf(facts) == 96 * (12 * h * h + 13 * h) + (51200 + 2048) * h + 2 * h);
  CHECK(FlagOf(facts, "--shard") == "1,tp=8,pp=16:even");  // no distributed optimizer
  CHECK(FlagOf(facts, "--global-batch") == "1536");
  CHECK(FlagOf(facts, "--precision") == "fp32/fp16/fp16");
  CHECK(FlagOf(facts, "--clip") == "on");  // 1.0
}

TEST_CASE("arguments of the mesh, sharding and recomputation are flags of plan") {
  const auto flag = [](const std::string& more, const std::string& name) {
    return FlagOf(FactsOfText(kLlama + more), name);
  };
  const std::string sharded = "--use-distributed-optimizer ";
  CHECK(flag(sharded, "--shard") == "not said");
  CHECK(flag(sharded, "--reshard") == "step");
  CHECK(flag(sharded + "--pipeline-model-parallel-size 2", "--reshard") == "never");
  CHECK(flag(sharded, "--sync") == "last");
  CHECK(flag("", "--shard") == "1");
  CHECK(flag("--context-parallel-size 2", "--shard") == "2,cp=2:ring");
  CHECK(flag("--use-megatron-fsdp", "--reshard") == "always");
  CHECK(flag("--use-megatron-fsdp", "--sync") == "not said");
  CHECK(flag("--use-megatron-fsdp --data-parallel-sharding-strategy optim_grads", "--sync") ==
        "every");
  CHECK(flag("--use-torch-fsdp2", "--reshard") == "always");
  // 32 layers on 4 ranks in parts of 4: two parts each.
  CHECK(flag(sharded + "--pipeline-model-parallel-size 4 --num-layers-per-virtual-pipeline-stage 4",
             "--shard") == "pp=4x2:even");
  CHECK(flag(sharded +
                 "--tensor-model-parallel-size 4 --context-parallel-size 2 --cp-comm-type a2a "
                 "--tp-comm-overlap",
             "--shard") == "tp=4:async,cp=2:ulysses");
  CHECK(flag("", "--recompute") == "none");
  CHECK(flag("--recompute-activations", "--recompute") == "none");  // scores are never kept
  CHECK(flag("--recompute-granularity full --recompute-method uniform", "--recompute") == "full");
  // 4 of the 8 layers of each of 4 stages
  CHECK(flag("--pipeline-model-parallel-size 4 --recompute-granularity full "
             "--recompute-method block --recompute-num-layers 4",
             "--recompute") == "full:0.500000");
  // One layer of each of 4 x 2 parts
  CHECK(flag("--pipeline-model-parallel-size 4 --num-virtual-stages-per-pipeline-rank 2 "
             "--recompute-granularity full --recompute-method block --recompute-num-layers 1",
             "--recompute") == "full:0.250000");
  CHECK(flag("", "--precision") == "fp32/bf16/fp32");
  CHECK(flag("--grad-reduce-in-bf16", "--precision") == "fp32/bf16/bf16");
  CHECK(flag("--weight-decay 0.0", "--weight-decay") == "off");
  CHECK(flag("--optimizer sgd", "--optimizer") == "sgd:fused");
}

TEST_CASE("a script's lists, variables and traces are read as the shell has them") {
  const auto shard = [](const std::string& before, const std::string& after) {
    return FlagOf(FactsOfText(before + kLlama + after), "--micro-batch") + " " +
           FlagOf(FactsOfText(before + kLlama + after), "--shard");
  };
  CHECK(shard("TP=2\nMORE=(\n  --use-distributed-optimizer\n)\n",
              "--tensor-model-parallel-size $TP ${MORE[@]}") == "1 tp=2");
  CHECK(shard("MORE=\" \\\n --use-distributed-optimizer --tensor-model-parallel-size 4\"\n",
              "$MORE") == "1 tp=4");
  CHECK(shard("MORE=()\nMORE+=(\"--tensor-model-parallel-size 4\" --use-distributed-optimizer)\n",
              "${MORE[@]}") == "1 tp=4");
  CHECK(shard("", "--tensor-model-parallel-size ${TP:-8} --use-distributed-optimizer\n+ set +x") ==
        "1 tp=8");
  std::string doubles = "V0=12345678\n";
  for (int i = 1; i < 60; ++i) {
    const std::string last = "$V" + std::to_string(i - 1);
    doubles += "V" + std::to_string(i) + "=" + last + last + "\n";
  }
  CHECK(ErrorOf({{"run.sh", doubles + kLlama}}).starts_with("run.sh: got more than"));
  CHECK(ErrorOf({{"run.sh", "TP=2\nTP=4\n" + kLlama + "--tensor-model-parallel-size $TP"}})
            .starts_with("run.sh: tensor_model_parallel_size: got \"$TP\""));
}

TEST_CASE("a table of arguments is read like the command line") {
  const ScriptFacts facts =
      Read(Folder(), {{"model_config.yaml",
                       "ENV_VARS:\n  CUDA_DEVICE_MAX_CONNECTIONS: 1\nMODEL_ARGS:\n"
                       "  --num-layers: 12\n  --hidden-size: 512\n  --num-attention-heads: 8\n"
                       "  --seq-length: 1024\n  --max-position-embeddings: 1024\n"
                       "  --micro-batch-size: 4\n  --bf16: true\n  --vocab-file: v\n"}})
          .script;
  const std::int64_t h = 512;
  CHECK(ParametersOf(facts) == 12 * (12 * h * h + 13 * h) + (50304 + 1024) * h + 2 * h);
  CHECK(FlagOf(facts, "--micro-batch") == "4");
  CHECK(facts.assumed.front().key == "script");
}

TEST_CASE("arguments that cannot be predicted are refused by name") {
  const auto error = [](const std::string& more) { return ErrorOf({{"run.sh", kLlama + more}}); };
  CHECK(error("--fp8-format hybrid") ==
        "run.sh: fp8_format: got \"hybrid\", expected no such key, since products in fp8 of "
        "Transformer Engine cannot be predicted");
  CHECK(error("--optimizer muon").ends_with("adam or sgd, since others cannot be predicted"));
  CHECK(error("--recompute-activations --transformer-impl local")
            .ends_with("full or none beside attention that keeps its scores"));
  CHECK(error("--mtp-num-layers 1")
            .ends_with("since further heads of tokens (MTP) cannot be predicted"));
  CHECK(error("--moe-layer-freq ([1]*2+[0]*2) --num-experts 8 --num-layers-x 2")
            .find("dense layers before all others") != std::string::npos);
  CHECK(error("--moe-layer-freq ([0]+[1]*30) --num-experts 8").find("32 in all") !=
        std::string::npos);
  CHECK(error("--moe-layer-freq ([0]+[1]*31) --num-experts 8 --use-distributed-optimizer") ==
        "no error");
  CHECK(error("--num-experts 8 --tensor-model-parallel-size 2")
            .ends_with(
                "expected expert_tensor_parallel_size 1, since cut experts cannot be predicted"));
  CHECK(ErrorOf({{"run.sh", "if [ $A = 1 ]; then\n  B=\"--bf16\"\nfi\n" + kLlama}}) ==
        "run.sh: --bf16: got a flag under a condition of the shell, expected the command line as "
        "it runs, which bash -x prints");
  CHECK(
      ErrorOf({{"run.sh", "python pretrain_bert.py " + kLlama.substr(kLlama.find("--num-layers"))}})
          .ends_with("expected pretrain_gpt.py, since other scripts have other models"));
  const std::string words = kLlama.substr(0, kLlama.find("--tokenizer-type"));
  CHECK(ErrorOf({{"run.sh", words + "--tokenizer-type Llama3Tokenizer"}})
            .find("Llama3Tokenizer and no vocab_size") != std::string::npos);
  CHECK(ErrorOf({{"run.sh", words + "--tokenizer-type HuggingFaceTokenizer --tokenizer-model "
                                    "meta-llama/Meta-Llama-3-8B"}}) == "no error");
}

}  // namespace
}  // namespace shardwright
