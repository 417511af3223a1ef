// Generation from a closed form: each token of an engine reads the weights once for all samples,
// and the keys and values of each. Example: llama-3-8b in bf16 on H100, 8 samples of 1,024 tokens
// behind a prompt of 1,024. Weights that are read are 15.0 GB, a token's keys and values 128 KiB,
// of 1,536 tokens on average: 1.6 GB of 8 samples. (15.0 + 1.6) GB / 3.35 TB/s x 1,024 tokens = 5.1
// s.
//
// Engines take 1.1 to 1.5 times that. Llama-3.1-8B on H100, CUDA graphs: 5.1 ms a token, of 4.5
// (cloudai.pt, tag cuda-graphs). vLLM 0.23 on A100-40: 77 % of the bandwidth at one sample, and 6.6
// times as many tokens at eight (johnmusgrave.com, throughput-latency sweep). Llama-2-7B on
// A100-80: 1,419 of 2,039 GB/s (pytorch/ao, README of torchao/quantization). With many samples it
// is a guess.

#include "analysis/rollout.h"

#include <algorithm>
#include <cmath>
#include <string>

#include <nlohmann/json.hpp>

#include "core/error.h"
#include "core/json.h"
#include "core/ordered_json.h"
#include "models/reference.h"
#include "simulator/costs/collectives.h"
#include "topologies/mesh.h"

namespace shardwright {
namespace {

constexpr double kLeastOverRead = 1.1, kMostOverRead = 1.5;

// Of the model that generates. Engines compute in 16 bits.
struct Decoder {
  double weights = 0;  // bytes of all
  double read = 0;     // bytes that a token of `samples` reads
  double flops = 0;    // of a token and sample
  double cache = 0;    // bytes of a token's keys and values
};

Decoder DecoderOf(const Model& model, std::int64_t samples) {
  constexpr double kBytes = 2;
  Decoder decoder;
  for (const Parameter& param : model.params) {
    decoder.weights += IsOfReference(model, param.module) || param.tied_to.valid()
                           ? 0
                           : kBytes * static_cast<double>(param.Elements());
  }
  for (const ModelOp& op : model.ops) {
    const OpSpec& spec = model.SpecOf(op);
    if (spec.other.stops_gradient || IsOfReference(model, op.module)) {
      continue;
    }
    if (spec.kind == OpKind::kAttention) {
      decoder.cache +=
          kBytes * static_cast<double>(spec.kv_heads * (spec.head_dim + spec.value_dim));
    }
    const double part =
        spec.kind == OpKind::kExperts
            ? static_cast<double>(spec.experts_per_token) / static_cast<double>(spec.experts)
            : 1.0;
    for (const ParamId id : op.params) {
      const auto elements = static_cast<double>(model.params[id.value].Elements());
      if (spec.kind != OpKind::kEmbedding) {
        decoder.read += kBytes * elements * std::min(1.0, part * static_cast<double>(samples));
        decoder.flops += 2 * elements * part;
      }
    }
  }
  return decoder;
}

// One parameter after the other, as TRL's sync_weights: gathered where they are sharded, and then
// copied to the engine here or sent to the one elsewhere.
Seconds WeightsTime(const PlanFile& file) {
  const Rollout& rollout = file.job.rollout;
  const Dialect dialect = file.plan.dialect;
  if (rollout.by_trainer) {
    return Seconds(0);
  }
  const bool is_sharded =
      dialect != Dialect::kDdp && dialect != Dialect::kZero1 && dialect != Dialect::kZero2;
  const CollectivePath shards =
      FindCollectivePath(file.cluster, file.profile, MeshOf(file.plan).Of({Axis::kShard}));
  const CollectivePath all =
      FindCollectivePath(file.cluster, file.profile, {file.cluster.RankCount(), 1});
  const double memory = file.cluster.gpu.memory_bandwidth.value.value;
  double time = 0;
  for (const Parameter& param : file.model.params) {
    if (IsOfReference(file.model, param.module) || param.tied_to.valid()) {
      continue;
    }
    const bool is_master = param.trainable || file.job.frozen_format == FrozenFormat::kMaster;
    const Precision& precision = file.job.precision;
    const Bytes bytes(SizeOf(is_master ? precision.master : precision.param) * param.Elements());
    if (is_sharded) {
      time += CollectiveTime(OpCode::kAllGather, bytes, shards).value;
    }
    time += rollout.engine > 0 ? 2 * static_cast<double>(bytes.value) / memory
                               : CollectiveTime(OpCode::kBroadcast, bytes, all).value;
  }
  return Seconds(time);
}

// Fills in what the engine on each GPU takes to generate `p.samples`.
void Generate(const PlanFile& file, RolloutPhases& p) {
  const Rollout& rollout = file.job.rollout;
  const auto length = static_cast<double>(file.job.sequence_length);
  const auto completion =
      rollout.completion > 0 ? static_cast<double>(rollout.completion) : std::floor(length / 2);
  const Decoder decoder = DecoderOf(file.model, p.samples);
  p.engine = EngineMemory(file);
  const double room = static_cast<double>(p.engine.value) - decoder.weights;
  p.concurrent = static_cast<std::int64_t>(room / std::max(1.0, decoder.cache * length));
  if (room < 0 || p.concurrent < 1) {
    throw InputError("job.rollout.engine", Format(p.engine) + " of the GPU's memory",
                     "more: the weights take " + Format(Bytes(std::llround(decoder.weights))) +
                         ", keys and values of a sample " +
                         Format(Bytes(std::llround(decoder.cache * length))));
  }
  p.cache = Bytes(std::llround(room));
  const double bandwidth = file.cluster.gpu.memory_bandwidth.value.value;
  const double peak = RatesOf(file, file.plan, Seconds(1)).peak.value;
  const double computed = peak > 0 ? decoder.flops / peak : 0;  // per token and sample
  const auto waves = static_cast<double>((p.samples + p.concurrent - 1) / p.concurrent);
  const double at_once = static_cast<double>(p.samples) / waves;
  const double prompt = length - completion;
  const double read =
      (decoder.read + at_once * decoder.cache * (prompt + completion / 2)) / bandwidth;
  const double prompts =
      std::max(1.0, static_cast<double>(p.samples) / static_cast<double>(rollout.generations));
  const double least =
      waves * completion * std::max(read, computed * at_once) + prompts * prompt * computed;
  p.least = Seconds(kLeastOverRead * least);
  p.most = Seconds(kMostOverRead * least);
  p.generation = Seconds((p.least.value + p.most.value) / 2);
}

}  // namespace

PlanFile WithoutForwards(const PlanFile& file) {
  nlohmann::ordered_json json = ParseOrdered(PlanFileJson(file), "plan");
  json["job"]["rollout"]["has_old"] = false;
  json["job"]["rollout"]["has_reference"] = false;
  auto& units = json["plan"]["units"];
  std::erase_if(units.get_ref<nlohmann::ordered_json::array_t&>(), [](const auto& unit) {
    return unit["modules"][0].template get<std::string>().starts_with(kReferenceRoot);
  });
  return ParsePlanFile(json.dump(), "plan without forwards");
}

double RolloutPhases::Band(double band) const {
  const double generated = (least.value + most.value) / 2 * generations_per_step;
  const double off = (most.value - least.value) / 2 * generations_per_step;
  return (band * (step.value - generated) + off) / step.value;
}

std::optional<RolloutPhases> PhasesOf(const PlanFile& file, Seconds step_time) {
  const Rollout& rollout = file.job.rollout;
  if (file.job.trains_by != TrainsBy::kGrpo) {
    return {};
  }
  RolloutPhases p;
  const std::int64_t batches = rollout.batches > 0 ? rollout.batches : file.plan.accumulation;
  p.samples = file.plan.micro_batch * batches;
  p.generations_per_step =
      static_cast<double>(file.plan.accumulation) / static_cast<double>(batches * rollout.updates);
  p.learning = step_time;
  if (rollout.has_old || rollout.has_reference) {
    const PlanFile plain = WithoutForwards(file);
    p.learning = std::min(step_time, Evaluate(plain, plain.plan, {.reserved = false}).step_time);
    // Of the program: in front of each micro-batch of a step.
    p.log_probabilities =
        Seconds((step_time.value - p.learning.value) * static_cast<double>(batches) /
                static_cast<double>(file.plan.accumulation));
  }
  p.weights = WeightsTime(file);
  if (rollout.engine > 0) {
    Generate(file, p);
  }
  if (rollout.seconds > 0) {
    p.generation = p.least = p.most = Seconds(rollout.seconds);
  }
  const Seconds generated = p.generation.value_or(Seconds(0));
  p.step = p.learning + (p.weights + generated + p.log_probabilities) * p.generations_per_step;
  return p;
}

}  // namespace shardwright
