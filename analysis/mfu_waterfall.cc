#include "analysis/mfu_waterfall.h"

#include <algorithm>
#include <numeric>
#include <span>

#include "core/error.h"
#include "planner/evaluate.h"
#include "simulator/costs/kernels.h"
#include "simulator/costs/pricer.h"

namespace shardwright {
namespace {

bool IsProduct(KernelClass kind) {
  return kind == KernelClass::kGemm || kind == KernelClass::kGroupedGemm ||
         kind == KernelClass::kConv;
}

// What an op takes alone, by reason: a time per loss, and its FLOPs at the peak.
struct OpParts {
  SimTime counted;  // FLOPs of products and attention at the peak
  std::array<SimTime, kMfuLossCount> lost{};
};

class WaterfallBuilder {
 public:
  WaterfallBuilder(const PlanFile& file, const Program& program)
      : program_(program),
        prices_(PriceProgram(program, file.cluster, file.profile)),
        rates_(FindKernelRates(file.cluster.gpu, file.profile.compute, file.cluster.RankCount())),
        peak_(RatesOf(file, file.plan, Seconds(1)).peak) {}

  std::vector<SimTime> Sum(const SimulationResult& result);

 private:
  SimTime& Lost(MfuLoss loss) { return lost_[static_cast<std::size_t>(loss)]; }
  [[nodiscard]] OpParts PartsOfModelOp(const OpShape& shape, SimTime price) const;
  void AddModelOp(const OpShape& shape, SimTime price);
  void AddOp(const Op& op, const Span& span);

  const Program& program_;
  PriceTable prices_;
  KernelRates rates_;
  FlopsPerSecond peak_;
  std::array<SimTime, kMfuLossCount> lost_{};
  SimTime counted_;  // FLOPs that ran in forward and backward, at the peak
};

OpParts WaterfallBuilder::PartsOfModelOp(const OpShape& shape, SimTime price) const {
  OpParts parts;
  SimTime left = price;
  for (const Kernel& kernel : program_.KernelsOf(shape)) {
    const SimTime time = std::min(ToSimTime(KernelTime(kernel, rates_)), left);
    left -= time;
    MfuLoss loss = MfuLoss::kElementwise;
    SimTime at_peak;
    if (IsProduct(kernel.kind) || IsAttention(kernel.kind)) {
      loss = IsProduct(kernel.kind) ? MfuLoss::kProducts : MfuLoss::kAttention;
      at_peak = ToSimTime(kernel.flops / peak_);
    }
    parts.counted += at_peak;
    parts.lost[static_cast<std::size_t>(loss)] += time - at_peak;
  }
  parts.lost[static_cast<std::size_t>(MfuLoss::kLaunches)] += left;
  return parts;
}

void WaterfallBuilder::AddModelOp(const OpShape& shape, SimTime price) {
  const OpParts parts = PartsOfModelOp(shape, price);
  counted_ += parts.counted;
  for (std::size_t i = 0; i < kMfuLossCount; ++i) {
    lost_[i] += parts.lost[i];
  }
}

// An op of the compute stream.
void WaterfallBuilder::AddOp(const Op& op, const Span& span) {
  const OpShape& shape = program_.ShapeOf(op);
  const Price& price = prices_.prices[op.shape.value];
  const SimTime took = span.end - span.start;
  if (InfoOf(shape.code).is_collective) {  // a communicator that shares the compute stream
    Lost(MfuLoss::kExposedTraffic) += took;
    return;
  }
  // Longer than alone: its last launch came late, or something ran beside it.
  const SimTime alone = std::min(price.duration, took);
  const bool is_late = span.end <= span.issue_end + price.tail;
  Lost(is_late ? MfuLoss::kHost : MfuLoss::kNeighbours) += took - alone;
  if (op.phase == Phase::kOptimizer || shape.code == OpCode::kOptimizerStep) {
    Lost(MfuLoss::kOptimizer) += alone;
  } else if (shape.code != OpCode::kCompute) {
    Lost(MfuLoss::kCopies) += alone;
  } else if (op.phase == Phase::kRecompute) {
    Lost(MfuLoss::kRecomputation) += alone;
  } else {
    AddModelOp(shape, alone);
  }
}

std::vector<SimTime> WaterfallBuilder::Sum(const SimulationResult& result) {
  const Body& body = program_.step;
  const std::span<const Span> spans = std::span(result.trace.spans).last(body.size());
  for (std::size_t i = 0; i < body.size(); ++i) {
    if (spans[i].stream == Stream::kCompute) {
      AddOp(body.ops[i], spans[i]);
    }
  }
  std::vector<SimTime> sums(lost_.begin(), lost_.end());
  sums.push_back(counted_);
  return sums;
}

// Of a stretch in which the compute stream had nothing to run.
MfuLoss LossOf(const TimeShare& share) {
  switch (share.use) {
    case TimeUse::kHostIssue:
      return share.code == OpCode::kHostOptimizerStep ? MfuLoss::kOptimizer : MfuLoss::kHost;
    case TimeUse::kPeer:
      return MfuLoss::kPeers;
    case TimeUse::kOther:
      break;
    case TimeUse::kRun:
      if (InfoOf(share.code).is_collective) {
        return MfuLoss::kExposedTraffic;
      }
      if (share.code == OpCode::kCopyH2d || share.code == OpCode::kCopyD2h) {
        return MfuLoss::kHostTraffic;
      }
      return share.phase == Phase::kOptimizer ? MfuLoss::kOptimizer : MfuLoss::kCopies;
  }
  return MfuLoss::kOther;
}

}  // namespace

std::string_view NameOf(MfuLoss loss) {
  static constexpr std::array<std::string_view, kMfuLossCount> kNames = {
      "FLOPs that the convention counts otherwise",
      "products below peak",
      "attention below peak",
      "element-wise work, norms and losses",
      "between kernels",
      "recomputation",
      "optimizer, clipping and training loop",
      "copies and sums around collectives",
      "kernels slowed by what runs beside them",
      "waiting for collectives",
      "copies between host and device",
      "host issues too late",
      "other ranks are late",
      "other"};
  return kNames[static_cast<std::size_t>(loss)];
}

std::vector<SimTime> SumsForMfu(const PlanFile& file, const Program& program,
                                const SimulationResult& result) {
  return WaterfallBuilder(file, program).Sum(result);
}

MfuWaterfall ExplainMfu(const PlanFile& file, const std::vector<SimTime>& sums,
                        const Attribution& attribution) {
  MfuWaterfall waterfall;
  SW_CHECK(sums.size() == kMfuLossCount + 1, "not the sums of a step");
  const auto lost = [&](MfuLoss loss) -> SimTime& {
    return waterfall.lost[static_cast<std::size_t>(loss)];
  };
  std::copy_n(sums.begin(), kMfuLossCount, waterfall.lost.begin());
  waterfall.step_time = attribution.step_time;
  const Seconds step = ToSeconds(attribution.step_time);
  waterfall.at_peak = ToSimTime(RatesOf(file, file.plan, step).mfu * step);
  for (const TimeShare& share : attribution.idle) {
    lost(LossOf(share)) += share.time;
  }
  lost(MfuLoss::kCounting) = sums.back() - waterfall.at_peak;
  const SimTime known =
      std::accumulate(waterfall.lost.begin(), waterfall.lost.end(), waterfall.at_peak);
  lost(MfuLoss::kOther) += waterfall.step_time - known;
  return waterfall;
}

}  // namespace shardwright
