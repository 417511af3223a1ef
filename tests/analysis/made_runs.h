#pragma once

// Runs of small decoders on eight GPUs of one type, as llm-foundry makes them.

#include <cstdint>
#include <string>

#include "analysis/measured_run.h"
#include "core/json.h"
#include "models/loader.h"
#include "schedule/wrap.h"

namespace shardwright::testing {

struct MadeRun {
  std::int64_t layers = 12;
  std::int64_t hidden = 768;
  std::int64_t micro_batch = 4;
  std::int64_t sequence = 2048;
  std::string gpu = "a100-40";
};

inline MeasuredRun MakeRun(const MadeRun& made) {
  MeasuredRun run;
  run.model = "MPT of width " + std::to_string(made.hidden);
  run.id = run.model + ", " + std::to_string(made.micro_batch) + " x " +
           std::to_string(made.sequence) + " on " + made.gpu;
  run.source = "made";
  PlanFile& file = run.plan;
  file.job.sequence_length = made.sequence;
  file.job.precision = {DType::kFp32, DType::kBf16, DType::kFp32};
  file.cluster = LoadCluster(made.gpu + " x8");
  file.kernels = FindKernelSet("composer-2023", "test");
  file.profile = DefaultProfile(file.cluster.gpu, file.kernels.name);
  const std::string hidden = std::to_string(made.hidden);
  const std::string config = R"({"model_type": "mpt", "vocab_size": 50368, "d_model": )" + hidden +
                             R"(, "n_layers": )" + std::to_string(made.layers) +
                             R"(, "n_heads": )" + std::to_string(made.hidden / 64) +
                             R"(, "expansion_ratio": 4, "max_seq_len": )" +
                             std::to_string(made.sequence) + R"(, "no_bias": false,
      "attn_config": {"attn_type": "multihead_attention", "alibi": false}})";
  file.model = {ModelFromJson(JsonValue::Parse(config, run.model), run.model,
                              {.sequence_length = made.sequence})};
  file.plan.dialect = Dialect::kFsdp1;
  file.plan.shard_size = 8;
  file.plan.micro_batch = made.micro_batch;
  file.job.global_batch = 8 * made.micro_batch;
  file.plan.units = Wrap(file.model, ParseWrap("block", "test"), {}, Dialect::kFsdp1, "test");
  return run;
}

}  // namespace shardwright::testing
