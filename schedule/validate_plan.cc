#include <cstdint>
#include <numeric>
#include <string>

#include "core/error.h"
#include "core/json.h"
#include "core/ranges.h"
#include "core/text.h"
#include "models/cut_context.h"
#include "schedule/internal/check_plan.h"
#include "schedule/plan.h"
#include "schedule/plan_names.h"
#include "topologies/mesh.h"

namespace shardwright {

void internal::CheckRange(std::int64_t value, std::int64_t min, std::int64_t max,
                          const std::string& where, std::string_view field) {
  if (value < min || value > max) {
    throw InputError(FieldOf(where, field), std::to_string(value),
                     "an integer in [" + std::to_string(min) + ", " + std::to_string(max) + "]");
  }
}

namespace {

using internal::CheckRange;
using internal::FieldOf;
using internal::kMaxAccumulation;
using internal::kMaxRanks;

constexpr std::int64_t kMaxSamples = std::int64_t{1} << 24;
constexpr std::int64_t kMaxSequence = std::int64_t{1} << 30;
// Activations of one micro-batch above one exabyte are a mistake, not a job.
constexpr double kMaxActivationBytes = 1e18;

// A field of the job has no path below the plan that `where` names.
void CheckJobRange(std::int64_t value, std::int64_t min, std::int64_t max, const std::string& where,
                   const std::string& field) {
  if (value < min || value > max) {
    throw InputError(where, "a job with " + field + ' ' + std::to_string(value),
                     "an integer in [" + std::to_string(min) + ", " + std::to_string(max) + "]");
  }
}

void CheckFraction(double value, const std::string& where, const std::string& field) {
  if (!(value >= 0.0 && value < 1.0)) {
    throw InputError(where, "a job with " + field + ' ' + std::to_string(value),
                     "a fraction in [0, 1)");
  }
}

void CheckJob(const Job& job, const std::string& where) {
  CheckJobRange(job.sequence_length, 1, kMaxSequence, where, "sequence_length");
  CheckJobRange(job.global_batch, 0, kMaxSamples * kMaxAccumulation, where, "global_batch");
  CheckJobRange(job.lora_rank, 0, kMaxSequence, where, "lora_rank");
  CheckFraction(job.lora_dropout, where, "lora_dropout");
  CheckFraction(job.memory_margin, where, "memory_margin");
  CheckFraction(job.memory_margin + job.rollout.engine, where, "memory_margin + rollout.engine");
}

void CheckAllocator(const AllocatorSettings& allocator, const std::string& where) {
  constexpr Bytes kLeast = 20 * kMiB;  // PyTorch: larger than kLargeBuffer
  const Bytes split = allocator.max_split_size;
  if (split != Bytes(0) &&
      (split <= kLeast || split.value % kMiB.value != 0 || split > 1024 * kGiB)) {
    throw InputError(where, "a job with allocator.max_split_size " + FormatExact(split),
                     "0 B (no limit), or whole MiB above 20 MiB and at most 1 TiB");
  }
  CheckFraction(allocator.garbage_collection_threshold, where,
                "allocator.garbage_collection_threshold");
}

void CheckRollout(const Job& job, const Plan& plan, const std::string& where) {
  const Rollout& rollout = job.rollout;
  const bool is_grpo = job.trains_by == TrainsBy::kGrpo;
  if (is_grpo ? (rollout.engine > 0 ? rollout.by_trainer : rollout.sleeps) : rollout != Rollout()) {
    throw InputError(where, "a job whose rollout contradicts itself",
                     "trains_by grpo, sleeps with an engine, by_trainer without one");
  }
  const std::int64_t ranks = MeshOf(plan).DataCount(), group = rollout.generations;
  const std::int64_t generated =
      plan.micro_batch * (rollout.batches > 0 ? rollout.batches : plan.accumulation);
  if (is_grpo && generated % (group / std::gcd(group, ranks)) != 0) {
    throw InputError(
        where,
        std::to_string(generated) + " completions of each of " + std::to_string(ranks) + " ranks",
        "in all a multiple of rollout.generations " + std::to_string(group));
  }
}

void CheckSizes(const Model& model, const Job& job, const Plan& plan, const std::string& where) {
  CheckRange(plan.shard_size, 1, kMaxRanks, where, "shard_size");
  CheckRange(plan.replicate_size, 1, kMaxRanks, where, "replicate_size");
  CheckRange(plan.micro_batch, 1, kMaxSamples, where, "micro_batch");
  CheckRange(plan.accumulation, 1, kMaxAccumulation, where, "accumulation");
  CheckRange(plan.in_flight, 1, kMaxAccumulation, where, "in_flight");
  CheckRange(plan.moments_piece.value, 1, kMaxRanks * kMaxRanks, where, "moments_piece");
  CheckRange(plan.first_bucket.value, 1, kMaxRanks * kMaxRanks, where, "first_bucket");
  CheckRange(plan.bucket.value, 1, kMaxRanks * kMaxRanks, where, "bucket");
  if (job.trains_by != TrainsBy::kOwn &&
      (job.mode == JobMode::kForward || model.sequence_length == 0)) {
    throw InputError(where,
                     "a job with trains_by " + std::string(NameIn(kTrainsByNames, job.trains_by)) +
                         (job.mode == JobMode::kForward ? " and mode forward"
                                                        : " and a model without sequences"),
                     "mode train, and answers of tokens");
  }
  if (plan.micro_batch % SamplesPerExample(job.trains_by) != 0) {
    throw InputError(FieldOf(where, "micro_batch"), std::to_string(plan.micro_batch),
                     "an even number, since job.trains_by " +
                         std::string(NameIn(kTrainsByNames, job.trains_by)) +
                         " compares pairs, each of 2 samples");
  }
  CheckRollout(job, plan, where);
  if (MeshOf(plan).RankCount() > kMaxRanks) {
    throw InputError(FieldOf(where, "replicate_size"), std::to_string(plan.replicate_size),
                     "at most " + std::to_string(kMaxRanks) + " ranks in all");
  }
  const std::int64_t ranks = MeshOf(plan).DataCount();
  // Up to 2^64: compared as a double, which is exact for every batch that CheckJob lets through.
  const double batch = static_cast<double>(ranks) * static_cast<double>(plan.accumulation) *
                       static_cast<double>(plan.micro_batch);
  if (job.global_batch > 0 && batch != static_cast<double>(job.global_batch)) {
    throw InputError(where,
                     std::to_string(ranks) +
                         (ranks < MeshOf(plan).RankCount() ? " data-parallel" : "") +
                         " ranks x micro_batch " + std::to_string(plan.micro_batch) +
                         " x accumulation " + std::to_string(plan.accumulation),
                     "the job's global_batch " + std::to_string(job.global_batch));
  }
  double bytes = Summed<double>(model.tensors, [&](const Tensor& tensor) {
    return 8.0 * static_cast<double>(tensor.elements);
  });
  for (const ModelOp& op : model.ops) {
    const OpSpec& spec = model.SpecOf(op);
    bytes += 4.0 * static_cast<double>(spec.heads) * static_cast<double>(spec.seq_q) *
             static_cast<double>(spec.seq_k);
  }
  if (bytes * static_cast<double>(plan.micro_batch) > kMaxActivationBytes) {
    throw InputError(FieldOf(where, "micro_batch"), std::to_string(plan.micro_batch),
                     "a micro-batch whose activations stay below 1e18 bytes");
  }
}

// Expert parallel as torchtitan has it, around FSDP2: what ranks share out is a unit of its own.
void CheckExperts(const Model& model, const Plan& plan, const std::string& where) {
  const std::string field = FieldOf(where, "expert_size");
  CheckRange(plan.expert_size, 1, kMaxRanks, where, "expert_size");
  const auto refuse = [&](const std::string& expected, const std::string& hint = "") {
    throw InputError(field, std::to_string(plan.expert_size), expected, hint);
  };
  std::int64_t parts = 1;
  for (const Parameter& param : model.params) {
    parts = std::max(parts, param.parts);
  }
  if (plan.expert_size > 1 && (plan.dialect != Dialect::kFsdp2 || plan.offload.parameters)) {
    refuse("1", "experts are shared out under dialect fsdp2 alone, without offloaded parameters");
  }
  if (parts != plan.expert_size) {
    refuse(std::to_string(parts), "the model has one of so many parts of its experts");
  }
  if (plan.expert_size == 1) {
    return;
  }
  if (!MeshOf(plan).SplitsInto(plan.expert_size)) {
    refuse("a divisor of shard_size " + std::to_string(plan.shard_size));
  }
}

// Tensor parallel as torchtitan has it, around FSDP2.
void CheckTensor(const Model& model, const Job& job, const Plan& plan, const std::string& where) {
  CheckRange(plan.tensor_size, 1, kMaxRanks, where, "tensor_size");
  const auto refuse = [&](const std::string& expected, const std::string& hint = "") {
    throw InputError(FieldOf(where, "tensor_size"), std::to_string(plan.tensor_size), expected,
                     hint);
  };
  if (model.tensor_ranks != plan.tensor_size) {
    refuse(std::to_string(model.tensor_ranks), "the model is one of so many parts of its layers");
  }
  if (plan.tensor_size == 1) {
    if (plan.tensor_async) {
      throw InputError(FieldOf(where, "tensor_async"), "true", "false where no rank cuts layers");
    }
    return;
  }
  if (plan.dialect != Dialect::kFsdp2 || plan.torch != TorchRelease::k2_13) {
    refuse("1", "layers are cut under dialect fsdp2 and torch 2.13 alone");
  }
  if (plan.offload != Offload()) {
    refuse("1", "layers are cut without offload alone");
  }
  if (plan.expert_size > 1) {
    refuse("1", "ranks share out experts (expert_size) already");
  }
  if (plan.tensor_async && job.lora_rank > 0) {
    refuse("1", "no sum of a product and its adapter is known to run beside its transfer");
  }
  const Precision& p = job.precision;
  if (p.param == DType::kFp16 || p.reduce == DType::kFp16 ||
      job.frozen_format > FrozenFormat::kParam) {
    refuse("1", "layers are cut in fp32 and bf16 alone, without quantized weights");
  }
}

// Context parallel as torchtitan has it: FSDP2 takes its ranks for data-parallel ones.
void CheckContext(const Model& model, const Plan& plan, const std::string& where) {
  CheckRange(plan.context_size, 1, kMaxRanks, where, "context_size");
  const auto refuse = [&](const std::string& expected, const std::string& hint = "") {
    throw InputError(FieldOf(where, "context_size"), std::to_string(plan.context_size), expected,
                     hint);
  };
  if (model.context_ranks != plan.context_size || model.context_method != plan.context_method) {
    refuse(std::to_string(model.context_ranks), "the model has one of so many parts of its tokens");
  }
  if (plan.context_size == 1) {
    return;
  }
  if (plan.dialect != Dialect::kFsdp2 || plan.torch != TorchRelease::k2_13) {
    refuse("1", "tokens are cut under dialect fsdp2 and torch 2.13 alone");
  }
  if (!MeshOf(plan).SplitsInto(plan.context_size)) {
    refuse("a divisor of shard_size " + std::to_string(plan.shard_size));
  }
  if (IsRing(plan.context_method) && plan.replicate_size > 1) {
    refuse("1", "a ring is known without replicas alone, whose reductions share its stream");
  }
}

// What the stages of a pipeline are lowered for so far.
void CheckPipeline(const Model& model, const Job& job, const Plan& plan, const std::string& where) {
  CheckRange(plan.pipeline_size, 1, kMaxRanks, where, "pipeline_size");
  CheckRange(plan.pipeline_stages, 1, kMaxRanks, where, "pipeline_stages");
  if (plan.pipeline_stages > 1 &&
      (plan.pipeline_size == 1 || plan.pipeline_schedule <= PipelineSchedule::k1F1B)) {
    throw InputError(FieldOf(where, "pipeline_stages"), std::to_string(plan.pipeline_stages),
                     "1 without a pipeline, and under gpipe and 1f1b");
  }
  if (plan.pipeline_size > 1 && IsVShaped(plan.pipeline_schedule) && plan.pipeline_stages != 2) {
    throw InputError(FieldOf(where, "pipeline_stages"), std::to_string(plan.pipeline_stages),
                     "2 under zbv and dualpipev");
  }
  if (plan.pipeline_edge_layers != 1 && plan.pipeline_size == 1) {
    throw InputError(FieldOf(where, "pipeline_edge_layers"),
                     std::to_string(plan.pipeline_edge_layers), "1 without a pipeline");
  }
  if (plan.pipeline_size == 1) {
    return;
  }
  const auto refuse = [&](bool is_refused, const std::string& expected) {
    if (is_refused) {
      throw InputError(FieldOf(where, "pipeline_size"), std::to_string(plan.pipeline_size),
                       "1: stages are lowered " + expected + " alone so far");
    }
  };
  const auto is_any = [](const auto& list, const auto& test) { return AnyOf(list, test); };
  const Precision& p = job.precision;
  const bool is_ddp = plan.dialect == Dialect::kDdp;
  const bool is_split = SplitsBackward(plan.pipeline_schedule);
  refuse((plan.dialect != Dialect::kFsdp2 && !is_ddp) || plan.torch != TorchRelease::k2_13,
         "under dialects fsdp2 and ddp of torch 2.13");
  refuse(plan.offload != Offload(), "without offload");
  refuse(plan.keeps_gathered, "without keeps_gathered, which they do anyway,");
  refuse(
      job.mode != JobMode::kTrain || job.trains_by != TrainsBy::kOwn ||
          job.frozen_format > FrozenFormat::kParam ||
          (is_any(model.params, [](const Parameter& param) { return !param.trainable; }) &&
           (plan.pipeline_stages > 1 || is_split || !IsIn(model.modules, "lora_A", &Module::name))),
      "for training of all parameters, or in one stage per rank of adapters, on answers of "
      "their own");
  refuse(p.param == DType::kFp16 || p.reduce == DType::kFp16 || (is_ddp && p.param != p.master),
         "in bf16 and fp32, and under ddp in one dtype");
  refuse(FindsUnused(plan), "without find_unused_parameters and static_graph");
  refuse(plan.sync != SyncMode::kLast, "with sync last");
  refuse(is_any(plan.units,
                [&](const UnitPlan& unit) {
                  return !is_ddp && unit.reshard.kind != Reshard::Kind::kNever;
                }),
         "with reshard never");
  // torch would run a block again for each of its weights.
  refuse(is_split && !plan.recompute.empty(), "with whole backward passes where they recompute,");
  refuse(
      is_split && is_any(model.specs, [](const OpSpec& s) { return s.kind == OpKind::kBatchNorm; }),
      "with whole backward passes beside batch norms");
  // Its reducer fails where no forward pass follows a backward pass ("rebuilt parameter indices").
  refuse(is_ddp && (plan.pipeline_schedule != PipelineSchedule::k1F1B ||
                    plan.accumulation <= plan.pipeline_size),
         "under ddp by 1f1b of more micro-batches than ranks");
  if (const std::string why = WhyNot(PipelineOf(plan)); !why.empty()) {
    throw InputError(FieldOf(where, "accumulation"), std::to_string(plan.accumulation), why);
  }
}

}  // namespace

void ValidatePlan(const Model& model, const Job& job, const Plan& plan, const std::string& where) {
  CheckJob(job, where);
  CheckAllocator(job.allocator, where);
  internal::CheckFormats(model, job, plan, where);
  CheckSizes(model, job, plan, where);
  CheckExperts(model, plan, where);
  CheckTensor(model, job, plan, where);
  CheckContext(model, plan, where);
  CheckPipeline(model, job, plan, where);
  internal::CheckDialect(plan, where);
  internal::CheckUnits(plan, where);
  internal::CheckRecompute(model, job, plan, where);
  internal::CheckFsdp(model, plan, where);
  internal::CheckUncalledUnits(model, job, plan, where);
  internal::CheckFullPrecision(model, plan, where);
  internal::CheckMatrices(job, plan, where);
  internal::CheckStaticGraph(job, plan, where);
  internal::CheckOffloadedSums(job, plan, where);
  internal::CheckExpertUnits(model, plan, where);
}

}  // namespace shardwright
