#include "tests/executor/random_tiny.h"

#include <array>
#include <cstdint>
#include <string>

#include "core/error.h"
#include "schedule/lower.h"
#include "schedule/wrap.h"

namespace shardwright::testing {
namespace {

void DrawUnits(std::mt19937& random, Setup& s) {
  constexpr std::array<const char*, 3> kWraps = {"block", "root", "size:40"};
  s.plan.units = Wrap(s.model, ParseWrap(kWraps[random() % kWraps.size()], "test"), {},
                      s.plan.dialect, "test");
  Reshard reshard;
  switch (random() % 4) {
    case 0:
      reshard = {Reshard::Kind::kNever, 0};
      break;
    case 1:
      reshard = {Reshard::Kind::kToGroup, 2};
      break;
    default:
      return;
  }
  for (UnitPlan& unit : s.plan.units) {
    unit.reshard = reshard;
  }
}

// May make a plan that the dialect refuses.
Setup Draw(std::mt19937& random) {
  constexpr std::array<Dialect, 7> kDialects = {Dialect::kDdp,    Dialect::kFsdp2, Dialect::kFsdp1,
                                                Dialect::kNative, Dialect::kZero1, Dialect::kZero2,
                                                Dialect::kZero3};
  const Dialect dialect = kDialects[random() % kDialects.size()];
  Setup s = TinySetup(dialect, 1 + static_cast<std::int64_t>(random() % 4));
  s.plan.accumulation = 1 + static_cast<std::int64_t>(random() % 2);
  s.plan.sync = random() % 2 == 0 ? SyncMode::kEvery : SyncMode::kLast;
  if (dialect == Dialect::kDdp) {
    return s;
  }
  if (s.plan.shard_size == 4 && random() % 2 == 0) {
    s.plan.shard_size = s.plan.replicate_size = 2;
  }
  DrawUnits(random, s);
  if (random() % 3 == 0) {
    const auto kind = random() % 2 == 0 ? RecomputeKind::kFull : RecomputeKind::kSelective;
    s.plan.recompute = RecomputeBlocks(s.model, kind, 1, "test");
  }
  s.plan.offload.parameters = random() % 5 == 0;
  if (dialect == Dialect::kFsdp1 && s.plan.offload.parameters) {
    s.plan.sync = SyncMode::kLast;  // the other is refused
  }
  if (dialect == Dialect::kNative && !s.plan.offload.parameters && random() % 4 == 0) {
    s.plan.offload.moments = true;
    s.plan.moments_piece = Bytes(1 + static_cast<std::int64_t>(random() % 2000));
  }
  if (s.plan.zero.reduce_bucket < 500) {  // one of the ZeRO dialects
    s.plan.zero.reduce_bucket = 20 + static_cast<std::int64_t>(random() % 200);
    s.plan.zero.overlap_comm = random() % 2 == 0 ? Overlap::kOn : Overlap::kOff;
    s.plan.zero.contiguous_gradients = random() % 3 != 0;
    s.plan.zero.gradient_reduction = static_cast<GradientReduction>(random() % 3);
  }
  if (dialect == Dialect::kZero3) {
    s.plan.zero.before_deepspeed_0_6 = random() % 3 == 0;
    s.plan.offload.optimizer = !s.plan.offload.parameters && random() % 4 == 0;
  }
  if (dialect == Dialect::kNative) {
    s.plan.in_flight = 2 + static_cast<std::int64_t>(random() % 3);
    s.plan.transfers = random() % 2 == 0 ? Transfers::kInTurn : Transfers::kAtOnce;
  }
  if (dialect == Dialect::kFsdp1) {
    s.plan.forward_prefetch = random() % 2 == 0;
    s.plan.limit_all_gathers = random() % 2 == 0;
  }
  return s;
}

}  // namespace

Setup RandomTinySetup(std::mt19937& random) {
  while (true) {
    Setup setup = Draw(random);
    try {
      (void)LowerSetup(setup);
      return setup;
    } catch (const InputError&) {
      continue;  // this dialect does not have this combination
    }
  }
}

}  // namespace shardwright::testing
