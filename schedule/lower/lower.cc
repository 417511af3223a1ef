// Lower: from a model, a job and a plan to the program of one rank. The stages, in order:
//
//   1. ValidatePlan, CheckKernels: refuse what no stage below can say.
//   2. ResolveUnits: the plan's module names become units with their parameters.
//   3. AnalyzeModel: kernels per op, gradients, lifetimes of tensors, recomputed regions.
//   4. FindUnitSpans: the ops at which each unit begins and ends, forward and backward.
//   5. The dialect's rules and the Walker write the bodies `init`, `warmup` and `step`.
//
// Example: a Llama with 2 layers and a root, on 4 ranks, one micro-batch, fsdp2, bf16 beside fp32.
// Its `init` has 3 ops, one initialize for each of the 3 units. `warmup` is empty, since the first
// step is like the others. `step` has 111 ops on 4 streams: compute, copy_in, gather and reduce.
// `shardwright inspect plan.json --program` prints all of them.
//
// The program holds one rank's ops only. All ranks run the same ones, as uneven shards are padded.

#include "schedule/lower.h"

#include <memory>
#include <optional>
#include <set>
#include <utility>

#include "core/budget.h"
#include "core/error.h"
#include "core/json.h"
#include "core/ranges.h"
#include "core/text.h"
#include "models/cut_context.h"
#include "models/cut_stage.h"
#include "models/totals.h"
#include "schedule/dialect_facts.h"
#include "schedule/internal/check_plan.h"
#include "schedule/lower/flat_rules.h"
#include "schedule/lower/unit_parts.h"
#include "schedule/lower/unit_rules.h"
#include "schedule/lower/zero_rules.h"

namespace shardwright {
namespace {

constexpr const char* kWhere = "plan";

// Returns a name for each op of the model: its module's name, and the op's own name behind it
// unless that repeats the module's last part. Op "up_proj" of module "layers.3.mlp.up_proj" stays
// "layers.3.mlp.up_proj"; op "rope" of module "layers.3.self_attn" becomes
// "layers.3.self_attn.rope".
std::vector<std::string> OpNames(const Model& model) {
  constexpr std::int64_t kMostBytes = std::int64_t{256} << 20;
  Budget bytes("model", "bytes of names of ops", kMostBytes);
  std::vector<std::string> names;
  names.reserve(model.ops.size());
  for (const ModelOp& op : model.ops) {
    const Module& m = model.modules[op.module.value];
    std::string name = m.fqn;
    if (op.name != m.name && !op.name.empty()) {
      if (!name.empty()) {
        name += '.';
      }
      name += op.name;
    }
    bytes.Take(std::ssize(name));
    names.push_back(std::move(name));
  }
  return names;
}

std::unique_ptr<StepRules> MakeRules(Emitter& e, const UnitSpans& spans,
                                     const std::vector<ResolvedUnit>& units) {
  switch (e.in.plan.dialect) {
    case Dialect::kNative:
      return MakeNative(e, spans, units);
    case Dialect::kFsdp2:
      return MakeFsdp2(e, spans, units);
    case Dialect::kFsdp1:
      return MakeFsdp1(e, spans, units);
    case Dialect::kDdp:
      return MakeDdp(e, spans, units);
    case Dialect::kZero1:
    case Dialect::kZero2:
      return MakeZero12(e, spans, units);
    case Dialect::kZero3:
      return MakeZero3(e, spans, units);
  }
  SW_CHECK(false, "unknown dialect");
  return nullptr;
}

// Writes a pass of a micro-batch. Where no pipeline puts others between, its backward belongs to
// its forward. The first stage has no gradient of its input to send: its backward comes whole, with
// the weights' (backward_weight_one_chunk of torch's pipelining/stage.py).
void EmitPass(Emitter& e, Walker& walker, StepRules& rules, const StageAction& pass) {
  using Kind = StageAction::Kind;
  const bool is_forward = pass.kind == Kind::kForward, is_first = pass.stage == 0;
  const std::int64_t count = e.in.plan.accumulation;
  if (is_forward || e.in.stage) {
    if (e.in.stage) {
      rules.AwaitAll();
    }
    e.body->MarkMicroBatch();
    e.micro_batch = static_cast<std::uint16_t>(pass.micro_batch);
    rules.BeginMicroBatch(pass.micro_batch == 0, pass.micro_batch + 1 == count);
  }
  if (is_forward) {
    walker.Forward();
    rules.EndForward();
  } else if (pass.kind == Kind::kInputGrads && is_first) {
    walker.AwaitGradient();
  } else if (pass.kind == Kind::kWeightGrads && !is_first) {
    walker.WeightGrads();
    rules.EndWeights();
  } else {
    walker.Backward(pass.kind == Kind::kInputGrads);
    rules.EndBackward();
  }
  if (pass.kind == Kind::kBackward || e.in.job.mode == JobMode::kForward) {
    walker.Metrics();
  }
}

// Writes one step: its list of actions, then the update. The marks of micro-batches tell
// FindRepeats where equal parts begin; the op ids behind the last mark have micro-batch 0, as the
// update belongs to none. The number of ops is checked behind each forward and backward pass, so a
// plan with too many fails early.
void EmitStep(Emitter& e, Walker& walker, StepRules& rules, Body& body, bool first_step) {
  e.Begin(body);
  rules.BeginStep(first_step);
  const std::vector<StageAction> actions =
      e.in.stage ? AddTransfers(e.in.stage->pipeline, e.in.stage->rank)
                 : ActionsInTurn(e.in.plan.accumulation);
  using Kind = StageAction::Kind;
  const auto is_pass = [&](const StageAction& action) {
    return action.kind == Kind::kForward ||
           (action.kind <= Kind::kWeightGrads && e.in.job.mode == JobMode::kTrain);
  };
  const std::int64_t passes = CountIf(actions, is_pass);
  std::int64_t done = 0;
  for (std::size_t i = 0; i < actions.size(); ++i) {
    const Kind kind = actions[i].kind;
    if (e.in.stage) {
      e.stage = static_cast<std::size_t>(actions[i].stage / e.in.stage->pipeline.ranks);
    }
    if (is_pass(actions[i])) {
      EmitPass(e, walker, rules, actions[i]);
      ++done;
      if (e.in.stage || kind == Kind::kBackward || passes == e.in.plan.accumulation) {
        CheckOpCount(body.size(), static_cast<double>(done) / static_cast<double>(passes),
                     e.in.plan.accumulation);
      }
    } else if (kind == Kind::kWaitForSends) {
      walker.WaitForSends();
    } else if (kind == Kind::kReduceGrads) {
      rules.ReduceAll();
    } else if (kind == Kind::kGather) {
      rules.GatherAll();
    } else if (kind == Kind::kDrop) {
      rules.DropAll();
    } else if (kind != Kind::kBackward) {
      const bool joins = actions[i].joins_next;
      walker.Transfer(actions[i], joins ? &actions[i + 1] : nullptr);
      i += joins ? 1 : 0;
    }
  }
  e.body->MarkMicroBatch();
  e.body->MarkLayer();
  e.micro_batch = 0;
  rules.EndStep();
  walker.DropResults();
  e.End();
}

// Returns the program under the assumption that the units in `gathered` are gathered when a step
// begins, and the units that are still gathered when a step ends. Lower calls it until both agree.
std::pair<Program, std::vector<bool>> LowerWith(const LowerInput& in,
                                                const std::vector<ResolvedUnit>& units,
                                                const std::vector<bool>& gathered) {
  Program program;
  program.dialect = NameOf(in.plan.dialect);
  if (FactsOf(in.plan).has_arena) {
    program.memory = MemoryRegime::kArena;
  }
  program.shard_size = in.plan.shard_size;
  program.replicate_size = in.plan.replicate_size;
  program.expert_size = in.plan.expert_size;
  program.tensor_size = in.plan.tensor_size;
  program.context_size = in.plan.context_size;
  for (std::uint32_t i = 0; i < in.model.ops.size(); ++i) {
    const std::vector<ParamId>& params = in.model.ops[i].params;
    if (params.empty()) {
      continue;
    }
    const Parameter& param = in.model.params[params.front().value];
    if (param.parts > 1) {
      program.expert_ops.push_back(i);
    }
    if (param.has_partial_gradient) {
      program.partial_ops.push_back(i);
    }
  }
  program.micro_batch = in.plan.micro_batch;
  program.micro_batch_count = in.plan.accumulation;
  program.model_op_names = OpNames(in.model);

  Emitter emitter(in, AnalyzeModel(in, kWhere), program);
  const UnitSpans spans = FindUnitSpans(in, emitter.a, units);
  const std::unique_ptr<StepRules> rules = MakeRules(emitter, spans, units);
  rules->CarryGathered(gathered);
  Walker walker(emitter, spans, *rules);
  emitter.Begin(program.init);
  walker.Init();
  rules->Init(units);
  emitter.End();
  if (rules->FirstStepDiffers()) {
    EmitStep(emitter, walker, *rules, program.warmup, true);
  }
  EmitStep(emitter, walker, *rules, program.step, false);
  // No op is of a unit that only stands for calls.
  program.units.resize(static_cast<std::size_t>(
      CountIf(units, [](const ResolvedUnit& unit) { return unit.planned != kOnlyCalls; })));
  return {std::move(program), rules->StillGathered()};
}

}  // namespace

// Extrapolates from the share of the passes lowered so far. Example: 4 of 128 passes made 200,000
// ops, so the step will have 6,400,000. The limit is 5,000,000, so the plan is refused, with the
// advice to raise the budget. The second check compares the memory of that many ops with the free
// memory of this machine, 1,300 bytes for each op.
void CheckOpCount(std::size_t ops, double share, std::int64_t micro_batches) {
  // The same on every machine, so that answers are. Edges have 31 bits for an op.
  constexpr std::int64_t kMostOps = 5'000'000;
  const std::int64_t most = std::min(kMostOps * BudgetFactor(), std::int64_t{1} << 30);
  const std::int64_t count = static_cast<std::int64_t>(static_cast<double>(ops) / share);
  if (count > most) {
    throw InputError(std::string(kWhere) + ": accumulation", std::to_string(micro_batches),
                     "a step of at most " + std::to_string(most) + " ops",
                     "--budget " + std::to_string(2 * BudgetFactor()) + " allows twice as many");
  }
  // Of the step, its program and its simulation.
  constexpr Bytes kPerOp{1300};
  static const Bytes free{AvailableMemory()};
  if (kPerOp * count > free) {
    throw EnvironmentError("a step of " + std::to_string(count) + " ops takes about " +
                           Format(kPerOp * count) + " of memory, and " + Format(free) +
                           " are free");
  }
}

// Returns the model with parameters frozen that no loss depends on, or null if there are none or
// the dialect does not look for them. Example: a model with two heads whose loss reads the first
// only. The second head's weight is trainable, but no gradient reaches it; FSDP2 neither reduces
// nor updates it. Two names of one storage count together: a gradient through either is enough.
std::optional<Model> WithoutMissingGradients(const LowerInput& in) {
  const bool looks = in.plan.dialect == Dialect::kFsdp2 || FindsUnused(in.plan);
  if (!looks || in.job.mode != JobMode::kTrain) {
    return std::nullopt;
  }
  const std::vector<bool> reaches = OpsBehindResult(in.model);
  std::vector<bool> has_grad(in.model.params.size(), false);  // per storage
  const auto storage = [&](std::size_t p) {
    const ParamId tied_to = in.model.params[p].tied_to;
    return tied_to.valid() ? tied_to.value : static_cast<std::uint32_t>(p);
  };
  for (std::size_t i = 0; i < in.model.ops.size(); ++i) {
    for (const ParamId p : in.model.ops[i].params) {
      has_grad[storage(p.value)] = has_grad[storage(p.value)] || reaches[i];
    }
  }
  std::optional<Model> changed;
  for (std::size_t p = 0; p < in.model.params.size(); ++p) {
    if (in.model.params[p].trainable && !has_grad[storage(p)]) {
      if (!changed) {
        changed = in.model;
      }
      changed->params[p].trainable = false;
    }
  }
  return changed;
}

// A loss whose vocabulary is cut over ranks is known for torch-eager, torch-compile and
// shardwright-host only. Kernel sets that fuse or chunk the loss, keep its logits, or scale fp8 by
// tensor are refused under tensor parallel.
static void CheckKernels(const LowerInput& in) {
  const KernelSetOptions& k = in.kernels;
  const bool is_fused = (k.fused_loss && !k.fused_elementwise) || k.fused_reductions;
  const bool is_other = (is_fused && !k.host_kernels) || k.loss_chunks > 1 || k.loss_metrics > 0 ||
                        k.keeps_logits || k.shifted_logits || k.softmax_keeps_input ||
                        k.autocast_weights || !k.fp32_logits;
  const bool has_ring = k.host_kernels || (IsFused(k.attention) && !k.cuda_kernels);
  if (IsRing(in.plan.context_method) && !has_ring) {
    throw InputError("kernel set",
                     k.cuda_kernels ? Quoted(k.name) : "attention with scores in memory",
                     k.cuda_kernels ? "the host's or one of PyTorch's" : "a fused one",
                     "plan.context_method is a ring, which merges what blocks of keys give");
  }
  internal::CheckFp8Gathers(k, in.job, in.plan);
  if (in.plan.tensor_size > 1 && (is_other || k.fp8 == Fp8Products::kPerTensor)) {
    throw InputError("kernel set", is_other ? Quoted(k.name) : "fp8 with a scale per tensor",
                     "torch-eager or torch-compile, in bf16 or fp8 with a scale per row",
                     "plan.tensor_size is " + std::to_string(in.plan.tensor_size) +
                         ": the loss of each rank is of a part of the vocabulary");
  }
  if (in.stage && SplitsBackward(in.stage->pipeline.schedule) &&
      (k.fused_elementwise || (k.fused_loss && !k.host_kernels) || k.keeps_logits ||
       k.loss_chunks > 1)) {
    const bool is_ours = k.host_kernels || k.cuda_kernels;
    throw InputError(
        "kernel set", k.loss_chunks > 1 ? "a loss in chunks" : Quoted(k.name),
        is_ours ? "shardwright-host, the loss whole" : "torch-eager",
        "plan.pipeline_schedule takes gradients of weights by themselves, which " +
            std::string(is_ours ? "nothing else here runs" : "torch refuses for compiled modules"));
  }
  if (in.plan.tensor_async && (!k.fused_elementwise || k.host_kernels)) {
    throw InputError("kernel set", Quoted(k.name), "a compiled one or megatron-core",
                     "plan.tensor_async is true, and nothing else runs transfers beside products");
  }
}

// What the plan says of the modules that a stage has.
static Plan PlanOfStage(const Model& model, Plan plan) {
  plan.pipeline_size = plan.pipeline_stages = plan.pipeline_edge_layers = 1;
  if (NoneOf(model.params, [](const Parameter& param) { return param.parts > 1; })) {
    plan.expert_size = 1;  // such as one with the head alone
  }
  const auto is_elsewhere = [&](const std::string& fqn) {
    const ModuleId module = FindModule(model, fqn);
    return NoneOf(model.ops, [&](const ModelOp& op) { return IsInside(model, op.module, module); });
  };
  for (UnitPlan& unit : plan.units) {
    std::erase_if(unit.modules, is_elsewhere);
  }
  std::erase_if(plan.units, [](const UnitPlan& unit) { return unit.modules.empty(); });
  const auto is_gone = [&](const std::string& name) {
    return !IsIn(plan.units, name, &UnitPlan::name);
  };
  for (UnitPlan& unit : plan.units) {
    std::erase_if(unit.forward_prefetch, is_gone);
    std::erase_if(unit.backward_prefetch, is_gone);
  }
  std::erase_if(plan.recompute,
                [&](const RecomputeRegion& region) { return is_elsewhere(region.module); });
  return plan;
}

// In torch each stage has a root of its own. Under zbv and dualpipev rank 0 has both ends of the
// model. Then the root's parameters of the last stage, the last norm and the head, become a unit.
static void PartRoot(const Model& model, Plan& plan) {
  const std::vector<ParamId> params = ResolveUnits(model, plan, kWhere).back().params;
  UnitPlan second = plan.units.back();
  second.name += kSecondRoot;
  second.modules.clear();
  bool is_in_first = false;
  for (std::uint32_t i = 0; i < model.ops.size(); ++i) {
    for (const ParamId param : model.ops[i].params) {
      const std::string& name = model.params[param.value].fqn;
      std::string module = name.substr(0, std::min(name.size(), name.rfind('.')));
      if (!IsIn(params, param)) {
        continue;
      }
      if (i < model.stages[1].begin) {
        is_in_first = true;
      } else if (module != name && !IsIn(second.modules, module)) {
        second.modules.push_back(std::move(module));
      }
    }
  }
  if (is_in_first && !second.modules.empty()) {
    plan.units.insert(plan.units.end() - 1, second);
  }
}

// Stages are modules of their own, so no unit is of two of them. A rank has several with
// `pipeline_stages`. No optimizer takes a stage of which all is frozen.
static void CheckStages(const Model& model, const Plan& plan) {
  std::vector<std::size_t> stage_of(model.params.size(), 0);  // from 1
  for (std::size_t s = 0; s < model.stages.size(); ++s) {
    bool learns = false;
    for (std::uint32_t i = model.stages[s].begin; i < model.stages[s].end; ++i) {
      for (const ParamId param : model.ops[i].params) {
        stage_of[param.value] = s + 1;
        learns = learns || model.params[param.value].trainable;
      }
    }
    if (!learns) {
      throw InputError(std::string(kWhere) + ": pipeline_size", "a stage of which nothing learns",
                       "something that learns in each");
    }
  }
  for (const ResolvedUnit& unit : ResolveUnits(model, plan, kWhere)) {
    std::set<std::size_t> stages;
    for (const ParamId param : unit.params) {
      stages.insert(stage_of[param.value]);
    }
    stages.erase(0);
    if (stages.size() > 1) {
      throw InputError(std::string(kWhere) + ": units", Quoted(unit.name),
                       "units inside of one stage each, where a rank has several");
    }
  }
}

std::vector<Program> LowerStages(const LowerInput& input) {
  const std::int64_t ranks = input.plan.pipeline_size;
  std::vector<Program> programs;
  if (ranks > 1) {
    ValidatePlan(input.model, input.job, input.plan, kWhere);
  }
  for (std::int64_t rank = 0; rank < ranks; ++rank) {
    Model model = input.model;
    CutStage(model, ranks * input.plan.pipeline_stages, rank, ranks,
             std::string(kWhere) + ": pipeline_size", input.plan.pipeline_edge_layers,
             IsVShaped(input.plan.pipeline_schedule));
    programs.push_back(LowerStage({model, input.kernels, input.job, input.plan}, rank));
  }
  return programs;
}

Program LowerStage(const LowerInput& input, std::int64_t rank) {
  if (input.plan.pipeline_size == 1) {
    return Lower(input);
  }
  Plan plan = PlanOfStage(input.model, input.plan);
  if (IsVShaped(plan.pipeline_schedule) && input.model.stages.size() > 1) {
    PartRoot(input.model, plan);
  }
  CheckStages(input.model, plan);
  LowerInput here(input.model, input.kernels, input.job, plan);
  here.stage = {PipelineOf(input.plan), rank};
  Program program = Lower(here);
  program.pipeline_size = input.plan.pipeline_size;
  program.pipeline_rank = rank;
  return program;
}

Program Lower(const LowerInput& input) {
  if (input.plan.pipeline_size > 1) {
    throw InputError("plan: pipeline_size", std::to_string(input.plan.pipeline_size),
                     "1: pipelines are known to plan, simulate, inspect, emit and run so far");
  }
  ValidatePlan(input.model, input.job, input.plan, kWhere);
  CheckKernels(input);
  const std::optional<Model> changed = WithoutMissingGradients(input);
  LowerInput in{changed ? *changed : input.model, input.kernels, input.job, input.plan};
  in.stage = input.stage;
  for (std::size_t p = 0; changed && p < changed->params.size(); ++p) {
    in.without_gradient.push_back(input.model.params[p].trainable && !changed->params[p].trainable);
  }
  std::vector<ResolvedUnit> units = ResolveUnits(in.model, in.plan, kWhere);
  if (in.plan.dialect == Dialect::kZero3) {
    units = SplitByParameters(in.model, std::move(units));
    const std::vector<ResolvedUnit> calls = CallsOfOthers(in.model, units);
    units.insert(units.end(), calls.begin(), calls.end());
  }
  auto [program, gathered] = LowerWith(in, units, {});
  // A step that finds more there may leave more there.
  // Units are only added, so the loop ends after at most as many rounds as there are units.
  for (std::vector<bool> known; known != gathered;) {
    known = gathered;
    auto [again, still] = LowerWith(in, units, known);
    for (std::size_t u = 0; u < still.size(); ++u) {
      gathered[u] = gathered[u] || still[u];
    }
    program = std::move(again);
  }
  return program;
}

}  // namespace shardwright
