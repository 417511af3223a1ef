#pragma once

// Fixed rules that cut a model into FSDP units, as the frameworks' own wrap policies do.

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "models/model.h"
#include "schedule/plan.h"

namespace shardwright {

struct WrapSpec {
  enum class Kind : std::uint8_t {
    kBlock,       // each instance of Model::block_classes, and the root
    kTorchtitan,  // embedding, each block, [final norm, head], root
    kAccelerate,  // Accelerate's defaults for FSDP2: as torchtitan; for FSDP1: as block
    kSize,        // size_based_auto_wrap_policy
    kRoot,        // one unit
    kModule,      // each module that has parameters of its own (DeepSpeed ZeRO-3)
    kFile,        // a JSON list of units
  };
  Kind kind = Kind::kBlock;
  std::int64_t min_params = 0;  // kSize: elements
  std::string file;             // kFile

  bool operator==(const WrapSpec&) const = default;
};

// "block", "torchtitan", "accelerate", "size:1e8", "root", "module", or the path of a file (with a
// '/' or ending in ".json"). Throws InputError naming `where`, with the nearest rule.
[[nodiscard]] WrapSpec ParseWrap(std::string_view text, const std::string& where);

// What happens to gathered parameters after forward, for all units at once. Unset: blocks are
// freed; the root and a [norm, head] unit keep theirs, since their backward comes first (FSDP2's
// and torchtitan's default). kAlways and kNever say it for every unit; kToGroup for the others than
// root and [norm, head], which keep theirs. The root of FSDP1 is never freed after forward. The
// ZeRO stages have no such choice: all of their units say kAlways.
struct ReshardChoice {
  bool is_set = false;
  Reshard reshard;
  bool keeps_gathered = false;  // over the micro-batches of a step

  bool operator==(const ReshardChoice&) const = default;
};

// The instances of Model::block_classes, in order; none for a model without repeated blocks.
[[nodiscard]] std::vector<ModuleId> BlocksOf(const Model& model);

// The rule that a dialect's users start from: root for ddp, zero1 and zero2, module for zero3,
// block for the rest.
[[nodiscard]] std::string_view DefaultWrap(Dialect dialect);

// The units of a plan, the root last, in the order in which bottom-up wrapping applies them. DDP
// has the root only. Embedding, final norm and head are found by what the ops do, not by name; a
// model without one of them (a plain encoder has no head) gets no unit for it, and modules that
// share tied parameters are put into one unit. Throws InputError naming `where` for a model without
// repeated blocks where a rule needs them, and for [norm, head] under fsdp1, which cannot group;
// what kModule would have to group is left to the root there. Reads the file of kFile, whose units
// keep what they say themselves. O(modules * depth + ops).
[[nodiscard]] std::vector<UnitPlan> Wrap(const Model& model, const WrapSpec& spec,
                                         const ReshardChoice& reshard, Dialect dialect,
                                         const std::string& where);

// Appends the units of a reference that the model has in a tree of its own (models/reference.h),
// as `spec` cuts the model; none for one that learns by adapters. TRL wraps the reference of FSDP2
// as one unit (prepare_fsdp), that of FSDP1 by the policy of what learns. DeepSpeed's stages 1 and
// 2 keep it whole. O(modules).
void AddReferenceUnits(const Model& model, const WrapSpec& spec, Dialect dialect,
                       std::vector<UnitPlan>& units);

// Under mixed precision, takes the modules whose parameters the model marks full_precision (batch
// norms) out of the plan's units and gives them units of their own that stay in the master dtype:
// fsdp1, as its wrap policies do, one unit each; native and fsdp2 one unit for all, gathered once.
// Changes nothing without mixed precision, for models without such modules, and for ddp (autocast
// leaves batch norms alone anyway) and the ZeRO stages (DeepSpeed casts the whole module). Doing it
// twice is doing it once. O(modules).
void KeepFullPrecision(const Model& model, const Precision& precision, Plan& plan);

// Of a model whose experts ranks share out (CutExperts): gives the experts of each layer a unit of
// their own. It stands in front of the unit that held them and reshards like it. Also says which
// units are gathered early: the host waits in each layer for the numbers of rows, and would issue
// gathers too late. Source: torchtitan v0.2.2, models/llama4/infra/parallelize.py. Changes nothing
// for other models. Doing it twice is doing it once. O(units * experts).
void AddExpertUnits(const Model& model, std::vector<UnitPlan>& units);

// One checkpointed region per block. Throws InputError naming `where` for a model without blocks.
[[nodiscard]] std::vector<RecomputeRegion> RecomputeBlocks(const Model& model, RecomputeKind kind,
                                                           std::int64_t keep_every,
                                                           const std::string& where);

}  // namespace shardwright
