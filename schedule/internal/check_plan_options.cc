#include <string>

#include "core/error.h"
#include "core/text.h"
#include "schedule/dialect_facts.h"
#include "schedule/internal/check_plan.h"
#include "schedule/plan_names.h"

namespace shardwright::internal {
namespace {

// An option that only `owners` have must keep its default: a silent no-op would mislead.
void CheckForeign(bool is_fine, const std::string& owners, const Plan& plan,
                  const std::string& where, const std::string& field) {
  if (!is_fine) {
    throw InputError(
        FieldOf(where, field),
        "an option of " + owners + " in a plan of dialect " + std::string(NameOf(plan.dialect)),
        "its default");
  }
}

void CheckForeignOptions(const Plan& plan, const std::string& where) {
  const Plan defaults;
  const auto check = [&](Dialect owner, auto Plan::*option, const std::string& field) {
    CheckForeign(plan.dialect == owner || plan.*option == defaults.*option,
                 "dialect " + std::string(NameOf(owner)), plan, where, field);
  };
  check(Dialect::kFsdp2, &Plan::keeps_gathered, "keeps_gathered");
  check(Dialect::kFsdp1, &Plan::backward_prefetch, "backward_prefetch");
  check(Dialect::kFsdp1, &Plan::forward_prefetch, "forward_prefetch");
  check(Dialect::kFsdp1, &Plan::limit_all_gathers, "limit_all_gathers");
  check(Dialect::kFsdp1, &Plan::use_orig_params, "use_orig_params");
  check(Dialect::kFsdp1, &Plan::bounded_memory, "bounded_memory");
  check(Dialect::kNative, &Plan::in_flight, "in_flight");
  check(Dialect::kNative, &Plan::transfers, "transfers");
  check(Dialect::kNative, &Plan::moments_piece, "moments_piece");
  check(Dialect::kDdp, &Plan::first_bucket, "first_bucket");
  check(Dialect::kDdp, &Plan::bucket, "bucket");
  check(Dialect::kDdp, &Plan::find_unused_parameters, "find_unused_parameters");
  check(Dialect::kDdp, &Plan::static_graph, "static_graph");
  CheckForeign(IsTorch(plan.dialect) || plan.torch == defaults.torch,
               "dialect fsdp2, fsdp1 and ddp", plan, where, "torch");
}

void CheckZeroOptions(const Plan& plan, const std::string& where) {
  const ZeroOptions defaults;
  const ZeroOptions& zero = plan.zero;
  const bool third = plan.dialect == Dialect::kZero3;
  const auto check = [&](bool has, const char* owners, auto ZeroOptions::*option,
                         const std::string& field) {
    CheckForeign(has || zero.*option == defaults.*option, owners, plan, where, "zero." + field);
  };
  const char* const all = "dialects zero1, zero2 and zero3";
  check(IsZero(plan.dialect), all, &ZeroOptions::reduce_bucket, "reduce_bucket");
  check(IsZero(plan.dialect), all, &ZeroOptions::contiguous_gradients, "contiguous_gradients");
  check(IsZero(plan.dialect), all, &ZeroOptions::overlap_comm, "overlap_comm");
  check(IsZero(plan.dialect), all, &ZeroOptions::gradient_reduction, "gradient_reduction");
  check(IsZero(plan.dialect) && !third, "dialects zero1 and zero2", &ZeroOptions::allgather_bucket,
        "allgather_bucket");
  const auto last = [&](auto ZeroOptions::*option, const std::string& field) {
    check(third, "dialect zero3", option, field);
  };
  last(&ZeroOptions::before_deepspeed_0_6, "before_deepspeed_0_6");
  last(&ZeroOptions::prefetch_bucket, "prefetch_bucket");
  last(&ZeroOptions::max_live_parameters, "max_live_parameters");
  last(&ZeroOptions::max_reuse_distance, "max_reuse_distance");
  last(&ZeroOptions::persistence_threshold, "persistence_threshold");
  last(&ZeroOptions::sub_group, "sub_group");
  const std::int64_t most = kMaxRanks * kMaxRanks;
  CheckRange(zero.reduce_bucket, 1, most, where, "zero.reduce_bucket");
  CheckRange(zero.allgather_bucket, 0, most, where, "zero.allgather_bucket");
  CheckRange(zero.prefetch_bucket, 0, most, where, "zero.prefetch_bucket");
  CheckRange(zero.max_live_parameters, 0, most, where, "zero.max_live_parameters");
  CheckRange(zero.max_reuse_distance, 0, most, where, "zero.max_reuse_distance");
  CheckRange(zero.persistence_threshold, 0, most, where, "zero.persistence_threshold");
  CheckRange(zero.sub_group, 1, most, where, "zero.sub_group");
}

// What the ZeRO stages leave no choice about.
void CheckFixedRules(const Plan& plan, const std::string& where) {
  const std::string dialect = "dialect " + std::string(NameOf(plan.dialect));
  if (IsZero(plan.dialect) && plan.sync != SyncMode::kEvery) {
    throw InputError(FieldOf(where, "sync"), Quoted(NameIn(kSyncNames, plan.sync)), "\"every\"",
                     dialect +
                         " has no such choice: zero1 reduces on the last micro-batch, zero2 "
                         "and zero3 on each");
  }
  if ((plan.dialect == Dialect::kZero1 || plan.dialect == Dialect::kZero2) &&
      plan.offload.parameters) {
    throw InputError(FieldOf(where, "offload.parameters"), "true", "false",
                     dialect + " keeps parameters on the device");
  }
}

}  // namespace

void CheckDialect(const Plan& plan, const std::string& where) {
  CheckForeignOptions(plan, where);
  CheckZeroOptions(plan, where);
  CheckFixedRules(plan, where);
  const bool is_ddp = plan.dialect == Dialect::kDdp;
  if (is_ddp && plan.shard_size != 1) {
    throw InputError(FieldOf(where, "shard_size"), std::to_string(plan.shard_size), "1",
                     "dialect ddp replicates; set replicate_size");
  }
  if (is_ddp && plan.offload.parameters) {
    throw InputError(FieldOf(where, "offload.parameters"), "true", "false",
                     "dialect ddp keeps parameters on the device");
  }
  const bool is_native = plan.dialect == Dialect::kNative;
  CheckForeign(is_native || !plan.offload.optimizer || plan.dialect == Dialect::kZero3,
               "dialect native", plan, where, "offload.optimizer");
  CheckForeign(is_native || !plan.offload.moments, "dialect native", plan, where,
               "offload.moments");
  if (plan.offload.moments && (plan.offload.parameters || plan.offload.optimizer)) {
    throw InputError(FieldOf(where, "offload.moments"), "true", "false",
                     "the moments go wherever the optimizer goes");
  }
  if (plan.sync == SyncMode::kReplicateLast) {
    const std::string field = FieldOf(where, "sync");
    if (plan.replicate_size == 1) {
      throw InputError(field, "\"replicate_last\"", "a replicate_size above 1 with it");
    }
    if (!FactsOf(plan).has_groups) {
      throw InputError(field, "\"replicate_last\"", "\"every\" or \"last\"",
                       "dialect " + std::string(NameOf(plan.dialect)) + " cannot delay it");
    }
  }
}

void CheckStaticGraph(const Job& job, const Plan& plan, const std::string& where) {
  if (plan.static_graph && job.mode == JobMode::kTrain && plan.accumulation > 1 &&
      plan.replicate_size > 1 && plan.sync == SyncMode::kLast) {
    throw InputError(FieldOf(where, "static_graph"),
                     "true with " + std::to_string(plan.accumulation) +
                         " micro-batches that reduce on the last one",
                     "sync \"every\", or find_unused_parameters",
                     "torch fails with no_sync before its first reduction: expect_autograd_hooks_ "
                     "INTERNAL ASSERT FAILED");
  }
}

void CheckOffloadedSums(const Job& job, const Plan& plan, const std::string& where) {
  if (!FactsOf(plan).adds_on_host && plan.offload.parameters && job.mode == JobMode::kTrain &&
      plan.accumulation > 1 && plan.sync == SyncMode::kEvery) {
    throw InputError(
        FieldOf(where, "offload.parameters"),
        "true with " + std::to_string(plan.accumulation) + " micro-batches that reduce each",
        "sync \"last\", or one micro-batch",
        "FSDP1 adds nothing to gradients that are on the host: a micro-batch's take "
        "the place of those of the one before");
  }
}

}  // namespace shardwright::internal
