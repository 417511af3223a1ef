#pragma once

// The rules of a legal plan, one file for each idea: options that a dialect has
// (check_plan_options.cc), units and recomputed regions (check_plan_units.cc), and formats of
// parameters and states (check_plan_formats.cc). ValidatePlan calls them all and has the rest.
//
// Each throws InputError for the first rule that the plan breaks, with the field's path: `where`
// names the plan, such as "p.json: plan". Example: shard_size 4 under dialect ddp is refused as
// "p.json: plan.shard_size: got 4, expected 1; dialect ddp replicates; set replicate_size".

#include <cstdint>
#include <string>
#include <string_view>

#include "models/model.h"
#include "schedule/internal/plan_fields.h"
#include "schedule/plan.h"

namespace shardwright::internal {

// Above every real run, and low enough that products of sizes stay inside 64 bits.
inline constexpr std::int64_t kMaxRanks = std::int64_t{1} << 24;
inline constexpr std::int64_t kMaxAccumulation = 65535;  // Op::micro_batch has 16 bits

void CheckRange(std::int64_t value, std::int64_t min, std::int64_t max, const std::string& where,
                std::string_view field);

void CheckDialect(const Plan& plan, const std::string& where);
// What torch does in a static graph's first backward pass it does in the first of all, synced or
// not.
void CheckStaticGraph(const Job& job, const Plan& plan, const std::string& where);
// "Limitations" of FullyShardedDataParallel's documentation (torch 2.13).
void CheckOffloadedSums(const Job& job, const Plan& plan, const std::string& where);
void CheckUnits(const Plan& plan, const std::string& where);
void CheckRecompute(const Model& model, const Job& job, const Plan& plan, const std::string& where);
// Where gradients change their dtype to wait for a reduction, FSDP2 asks every parameter for one,
// also those of a unit that was never gathered (to_accumulated_grad_if_needed of _fsdp_param.py).
void CheckUncalledUnits(const Model& model, const Job& job, const Plan& plan,
                        const std::string& where);
// What PyTorch's wrappers and torch.utils.checkpoint cannot do together, or the applier not at all.
void CheckFsdp(const Model& model, const Plan& plan, const std::string& where);
void CheckExpertUnits(const Model& model, const Plan& plan, const std::string& where);
// Which dialects have parameters, and states, of several formats in a unit. FSDP1 without
// use_orig_params flattens a unit into one parameter, which is trainable or not.
void CheckFormats(const Model& model, const Job& job, const Plan& plan, const std::string& where);
// What weights that are gathered in fp8 go with.
void CheckFp8Gathers(const KernelSetOptions& kernels, const Job& job, const Plan& plan);
// What a unit in full precision may hold, and who has such units.
void CheckFullPrecision(const Model& model, const Plan& plan, const std::string& where);
// No published code was found that shards what Muon and SOAP need whole.
void CheckMatrices(const Job& job, const Plan& plan, const std::string& where);

}  // namespace shardwright::internal
