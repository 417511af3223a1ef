#include "tests/schedule/random_plan.h"

#include <algorithm>
#include <array>

#include "core/error.h"
#include "core/json.h"
#include "models/loader.h"
#include "schedule/lower.h"
#include "schedule/wrap.h"
#include "tests/schedule/chain_model.h"

namespace shardwright::testing {
namespace {

std::int64_t Between(std::mt19937& random, std::int64_t low, std::int64_t high) {
  return std::uniform_int_distribution<std::int64_t>(low, high)(random);
}
bool Chance(std::mt19937& random, int percent) {
  return Between(random, 1, 100) <= percent;
}

Model FromConfig(const std::string& text, std::int64_t seq) {
  LoadOptions options;
  options.sequence_length = seq;
  return ModelFromJson(JsonValue::Parse(text, "config.json"), "random", options);
}

Model DrawModel(std::mt19937& random) {
  const std::string layers = std::to_string(Between(random, 1, 9));
  const std::int64_t seq = 8 * Between(random, 1, 4);
  const std::string tied = Chance(random, 50) ? "true" : "false";
  switch (Between(random, 0, 4)) {
    case 0: {
      ChainSpec spec;
      spec.blocks = static_cast<int>(Between(random, 1, 12));
      spec.linears = static_cast<int>(Between(random, 1, 3));
      spec.width = 8 * Between(random, 1, 8);
      return ChainModel(spec);
    }
    case 1:
      return FromConfig(R"({"model_type": "llama", "vocab_size": 96, "hidden_size": 32,
          "intermediate_size": 56, "num_attention_heads": 4, "num_key_value_heads": 2,
          "num_hidden_layers": )" +
                            layers + R"(, "tie_word_embeddings": )" + tied + "}",
                        seq);
    case 2:
      return FromConfig(R"({"model_type": "gpt2", "vocab_size": 101, "n_positions": 64,
          "n_embd": 24, "n_head": 3, "n_layer": )" +
                            layers + "}",
                        seq);
    case 3:
      return FromConfig(R"({"model_type": "t5", "vocab_size": 64, "d_model": 24, "d_kv": 8,
          "num_heads": 3, "d_ff": 40, "num_layers": )" +
                            layers + "}",
                        seq);
    default:
      return LoadModel("mnist-convnet");
  }
}

std::vector<UnitPlan> DrawUnits(std::mt19937& random, const Model& model, Dialect dialect,
                                std::int64_t shard_size) {
  std::vector<std::string> wraps = {"root", "size:" + std::to_string(Between(random, 100, 5000))};
  if (!model.block_classes.empty()) {
    wraps.insert(wraps.end(), {"block", "block"});
    if (dialect != Dialect::kFsdp1) {
      wraps.push_back("torchtitan");
    }
  }
  if (IsZero(dialect)) {
    wraps.insert(wraps.end(), {"module", "module", "module"});
  }
  std::shuffle(wraps.begin(), wraps.end(), random);
  auto units = Wrap(model, ParseWrap(wraps.front(), "test"), {}, dialect, "test");
  Plan probe;
  probe.dialect = dialect;
  probe.units = units;
  try {
    (void)ResolveUnits(model, probe, "test");
  } catch (const InputError&) {  // the size policy splits tied parameters, as PyTorch's does
    units = Wrap(model, ParseWrap("root", "test"), {}, dialect, "test");
  }
  if (dialect == Dialect::kDdp) {
    return units;
  }
  const bool has_lists = dialect == Dialect::kFsdp2 || dialect == Dialect::kNative;
  const bool to_group = shard_size % 2 == 0 && shard_size > 2 && has_lists;
  for (UnitPlan& unit : units) {
    if (!IsZero(dialect) && Chance(random, 20)) {
      unit.reshard = {Reshard::Kind::kNever, 0};
    } else if (to_group && Chance(random, 20)) {
      unit.reshard = {Reshard::Kind::kToGroup, 2};
    }
    if (has_lists && Chance(random, 20)) {
      const auto other = static_cast<std::size_t>(Between(random, 0, std::ssize(units) - 1));
      if (units[other].name != unit.name) {
        (Chance(random, 50) ? unit.forward_prefetch : unit.backward_prefetch)
            .push_back(units[other].name);
      }
    }
  }
  return units;
}

// numel % g must be zero for reshard to a smaller group; small odd models may break that.
void DropImpossibleReshards(const Model& model, Plan& plan) {
  const auto resolved = ResolveUnits(model, plan, "test");
  for (std::size_t u = 0; u < plan.units.size(); ++u) {
    for (const ParamId p : resolved[u].params) {
      const auto& shape = model.params[p.value].shape;
      if (plan.units[u].reshard.kind == Reshard::Kind::kToGroup &&
          (shape.empty() || shape.front() % plan.shard_size != 0)) {
        plan.units[u].reshard = {};
      }
    }
  }
}

// Where FSDP1's gradients wait whole and cast, a parameter may not have two names.
void DropSharedGrads(const Model& model, Plan& plan) {
  const bool is_tied = std::any_of(model.params.begin(), model.params.end(),
                                   [](const Parameter& p) { return p.tied_to.valid(); });
  if (plan.dialect == Dialect::kFsdp1 && plan.shard_size == 1 && is_tied) {
    plan.sync = SyncMode::kEvery;
    plan.accumulation = plan.offload.parameters ? 1 : plan.accumulation;
  }
}

// Torch's selective checkpoint fails on the hooks of units inside of it, more often than not.
void DropImpossibleSelective(Plan& plan) {
  if (plan.dialect != Dialect::kFsdp2 && plan.dialect != Dialect::kFsdp1) {
    return;
  }
  for (RecomputeRegion& region : plan.recompute) {
    for (const UnitPlan& unit : plan.units) {
      if (std::any_of(unit.modules.begin(), unit.modules.end(), [&](const std::string& fqn) {
            return fqn.starts_with(region.module + ".");
          })) {
        region.kind = RecomputeKind::kFull;
      }
    }
  }
}

void DrawJob(std::mt19937& random, const Model& model, Job& job) {
  job.mode = Chance(random, 10) ? JobMode::kForward : JobMode::kTrain;
  job.sequence_length = std::max<std::int64_t>(model.sequence_length, 1);  // images have none
  const DType master = DType::kFp32;
  job.precision = std::array{
      Precision{master, DType::kBf16, DType::kFp32}, Precision{master, DType::kFp32, DType::kFp32},
      Precision{master, DType::kBf16, DType::kBf16}, Precision{master, DType::kFp16, DType::kFp16},
      Precision{DType::kBf16, DType::kBf16,
                DType::kBf16}}[static_cast<std::size_t>(Between(random, 0, 4))];
  job.optimizer.kind = std::array{
      OptimizerKind::kSgd, OptimizerKind::kMomentum, OptimizerKind::kAdam, OptimizerKind::kAdamW,
      OptimizerKind::kAdadelta}[static_cast<std::size_t>(Between(random, 0, 4))];
  job.optimizer.impl =
      std::array{OptimizerImpl::kForeach, OptimizerImpl::kFused,
                 OptimizerImpl::kForLoop}[static_cast<std::size_t>(Between(random, 0, 2))];
  job.clip_gradients = Chance(random, 60);
}

// Limits around the sizes of the small models.
void DrawZero(std::mt19937& random, Dialect dialect, ZeroOptions& zero) {
  const auto limit = [&] {
    return std::array<std::int64_t, 5>{1, 500, 4000, 30000,
                                       1000000}[static_cast<std::size_t>(Between(random, 0, 4))];
  };
  zero.reduce_bucket = limit();
  zero.contiguous_gradients = Chance(random, 70);
  zero.overlap_comm = std::array{Overlap::kDefault, Overlap::kOn,
                                 Overlap::kOff}[static_cast<std::size_t>(Between(random, 0, 2))];
  zero.gradient_reduction =
      Chance(random, 50) ? GradientReduction::kAllReduce : GradientReduction::kReduceScatter;
  if (dialect != Dialect::kZero3) {
    zero.allgather_bucket = Chance(random, 50) ? 0 : std::max<std::int64_t>(limit(), 4000);
    return;
  }
  zero.before_deepspeed_0_6 = Chance(random, 30);
  zero.prefetch_bucket = Chance(random, 20) ? 0 : limit();
  zero.max_live_parameters = Chance(random, 20) ? 0 : limit();
  zero.max_reuse_distance = Chance(random, 40) ? 0 : limit();
  zero.persistence_threshold = Chance(random, 40) ? 0 : Between(random, 1, 3000);
  zero.sub_group = limit();
}

// What the ZeRO stages have of their own, and what they do not have.
void DrawExtras(std::mt19937& random, Plan& plan) {
  if (IsZero(plan.dialect)) {
    DrawZero(random, plan.dialect, plan.zero);
    plan.sync = SyncMode::kEvery;
  }
}

void DrawOffload(std::mt19937& random, Plan& plan) {
  if (plan.dialect != Dialect::kDdp && !IsZero(plan.dialect) && Chance(random, 15)) {
    (plan.dialect == Dialect::kNative && Chance(random, 50)
         ? (Chance(random, 50) ? plan.offload.optimizer : plan.offload.moments)
         : plan.offload.parameters) = true;
  }
  if (plan.dialect == Dialect::kFsdp1 && plan.offload.parameters && plan.accumulation > 1) {
    plan.sync = SyncMode::kLast;  // the other is refused
  }
  if (plan.offload.moments) {
    plan.moments_piece = Bytes(Between(random, 1, 1 << 20));
  }
  plan.offload.activations = Chance(random, plan.offload.moments ? 50 : 15);
}

// The plan and the job of a case whose model is there.
void DrawRest(std::mt19937& random, RandomCase& c) {
  Plan& plan = c.plan;
  plan.dialect = std::array{Dialect::kFsdp2, Dialect::kFsdp1, Dialect::kDdp,   Dialect::kNative,
                            Dialect::kZero1, Dialect::kZero2, Dialect::kZero3, Dialect::kZero3}
      [static_cast<std::size_t>(Between(random, 0, 7))];
  const bool ddp = plan.dialect == Dialect::kDdp;
  plan.shard_size = ddp ? 1
                        : std::array<std::int64_t, 5>{
                              1, 2, 3, 4, 8}[static_cast<std::size_t>(Between(random, 0, 4))];
  plan.replicate_size = Between(random, 1, 3);
  plan.micro_batch = Between(random, 1, 3);
  plan.accumulation = Chance(random, 50) ? 1 : Between(random, 2, 6);
  if (plan.accumulation > 1 && Chance(random, 50)) {
    plan.sync =
        plan.replicate_size > 1 && !ddp && plan.dialect != Dialect::kFsdp1 && Chance(random, 50)
            ? SyncMode::kReplicateLast
            : SyncMode::kLast;
  }
  DrawExtras(random, plan);
  plan.units = DrawUnits(random, c.model, plan.dialect, plan.shard_size);
  DropImpossibleReshards(c.model, plan);
  if (!c.model.block_classes.empty() && Chance(random, 40)) {
    plan.recompute = RecomputeBlocks(
        c.model, Chance(random, 50) ? RecomputeKind::kFull : RecomputeKind::kSelective,
        Between(random, 1, 2), "test");
    DropImpossibleSelective(plan);
  }
  if (plan.dialect == Dialect::kFsdp1) {
    plan.backward_prefetch =
        std::array{BackwardPrefetch::kPre, BackwardPrefetch::kPost,
                   BackwardPrefetch::kNone}[static_cast<std::size_t>(Between(random, 0, 2))];
    plan.forward_prefetch = Chance(random, 30);
    plan.limit_all_gathers = Chance(random, 70);
    plan.use_orig_params = Chance(random, 50);
    plan.bounded_memory = Chance(random, 30);
  }
  if (plan.dialect == Dialect::kNative) {
    plan.in_flight = Between(random, 1, 4);
    plan.transfers = Chance(random, 50) ? Transfers::kInTurn : Transfers::kAtOnce;
  }
  DrawOffload(random, plan);
  DrawJob(random, c.model, c.job);
  if (Chance(random, 15)) {
    plan.use_orig_params = true;  // FSDP1 mixes trainable and frozen only so
    for (Parameter& p : c.model.params) {
      p.trainable =
          p.tied_to.valid() ? c.model.params[p.tied_to.value].trainable : Chance(random, 60);
    }
  }
  DropSharedGrads(c.model, plan);
  c.kernel_set = plan.dialect == Dialect::kNative ? "shardwright-cuda"
                 : Chance(random, 50)             ? "torch-compile"
                                                  : "torch-eager";
}

void Describe(RandomCase& c) {
  const Plan& plan = c.plan;
  c.description =
      std::string(NameOf(plan.dialect)) + " " + c.model.name +
      " W=" + std::to_string(plan.shard_size) + " R=" + std::to_string(plan.replicate_size) +
      " units=" + std::to_string(plan.units.size()) + " acc=" + std::to_string(plan.accumulation) +
      " recompute=" + std::to_string(plan.recompute.size()) +
      (plan.offload.parameters ? " offload=parameters" : "") +
      (plan.offload.optimizer ? " offload=optimizer" : "") +
      (plan.offload.moments ? " offload=moments" : "") +
      (plan.offload.activations ? " offload=activations" : "");
}

// Neighbouring units of one block each become units of several: all of one size, of any, or of one
// size in the first part of the model only.
void GroupUnits(std::mt19937& random, const std::vector<std::string>& blocks, Plan& plan) {
  const std::int64_t rule = Between(random, 0, 2);
  const std::int64_t size = Between(random, 2, 6);
  const std::size_t many_until = rule == 2 ? blocks.size() / 2 : blocks.size();
  std::vector<UnitPlan> units;
  std::int64_t room = 0;
  std::size_t block = 0;
  for (const UnitPlan& unit : plan.units) {
    const bool is_block =
        std::find(blocks.begin(), blocks.end(), unit.modules.front()) != blocks.end();
    if (is_block && room > 0) {
      units.back().modules.push_back(unit.modules.front());
      --room;
    } else {
      units.push_back(unit);
      room = !is_block || block >= many_until ? 0 : rule == 1 ? Between(random, 0, 4) : size - 1;
    }
    block += is_block ? 1 : 0;
  }
  plan.units = units;
}

// Each unit but the root gathers up to four of the next ones early in either pass.
void PrefetchAll(std::mt19937& random, Plan& plan) {
  const auto forward = static_cast<std::size_t>(Between(random, 0, 4));
  const auto backward = static_cast<std::size_t>(Between(random, 0, 4));
  const std::size_t count = plan.units.size() - 1;
  for (std::size_t u = 0; u < count; ++u) {
    for (std::size_t next = u + 1; next <= u + forward && next < count; ++next) {
      plan.units[u].forward_prefetch.push_back(plan.units[next].name);
    }
    for (std::size_t back = 1; back <= backward && back <= u; ++back) {
      plan.units[u].backward_prefetch.push_back(plan.units[u - back].name);
    }
  }
}

// Checkpointing of the first blocks, or of some.
void DrawRegions(std::mt19937& random, const std::vector<std::string>& blocks, Plan& plan) {
  plan.recompute.clear();
  const bool is_prefix = Chance(random, 60);
  const std::int64_t cut = Between(random, 0, std::ssize(blocks));
  for (std::int64_t b = 0; b < std::ssize(blocks); ++b) {
    if (is_prefix ? b < cut : Chance(random, 50)) {
      plan.recompute.push_back(
          {blocks[static_cast<std::size_t>(b)],
           is_prefix || Chance(random, 50) ? RecomputeKind::kFull : RecomputeKind::kSelective, 1});
    }
  }
  DropImpossibleSelective(plan);
}

}  // namespace

RandomCase DrawCase(std::mt19937& random) {
  RandomCase c;
  c.model = DrawModel(random);
  DrawRest(random, c);
  Describe(c);
  return c;
}

RandomCase DrawDeepCase(std::mt19937& random, const Model& model) {
  RandomCase c;
  c.model = model;
  DrawRest(random, c);
  Plan& plan = c.plan;
  std::vector<std::string> blocks;
  for (const ModuleId block : BlocksOf(model)) {
    blocks.push_back(model.modules[block.value].fqn);
  }
  if (plan.dialect == Dialect::kFsdp2 || plan.dialect == Dialect::kNative) {
    for (UnitPlan& unit : plan.units) {
      unit.forward_prefetch.clear();
      unit.backward_prefetch.clear();
    }
    if (Chance(random, 70)) {
      GroupUnits(random, blocks, plan);
    }
    if (Chance(random, 50)) {
      PrefetchAll(random, plan);
    }
  }
  if (Chance(random, 50)) {
    DrawRegions(random, blocks, plan);
  }
  if (plan.accumulation > 1 && Chance(random, 20)) {
    plan.accumulation = Between(random, 7, 20);
  }
  // Pieces for small models are more ops of one unit than their ids can tell apart.
  const std::int64_t least = CountParameters(model) / 1000;
  if (plan.offload.moments) {
    plan.moments_piece = std::max(plan.moments_piece, Bytes(4 * least));
  }
  if (plan.zero.allgather_bucket > 0) {
    plan.zero.allgather_bucket = std::max(plan.zero.allgather_bucket, least);
  }
  Describe(c);
  return c;
}

void DrawMatrixRule(std::mt19937& random, RandomCase& c) {
  if (c.plan.dialect == Dialect::kDdp) {
    c.job.optimizer.matrices =
        std::array{MatrixRule::kNone, MatrixRule::kMuon, MatrixRule::kMuonDistributed,
                   MatrixRule::kSoap}[static_cast<std::size_t>(Between(random, 0, 3))];
  }
}

Program LowerCase(const RandomCase& c) {
  return Lower({c.model, FindKernelSet(c.kernel_set, "test"), c.job, c.plan});
}

}  // namespace shardwright::testing
