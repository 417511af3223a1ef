#include "analysis/internal/comparison_parts.h"

#include <array>
#include <string>
#include <utility>

#include "core/ranges.h"

namespace shardwright::internal {
namespace {

void AddPart(std::vector<StepPart>& parts, std::string name, double simulated, double measured) {
  if (simulated != 0 || measured != 0) {
    parts.push_back({std::move(name), Seconds(simulated), Seconds(measured)});
  }
}

SimTime Scaled(SimTime time, double factor) {
  return SimTime(std::llround(static_cast<double>(time.value) * factor));
}

}  // namespace

std::vector<StepPart> PartsOf(const StepBreakdown& simulated, const StepBreakdown& measured) {
  std::vector<StepPart> parts;
  for (std::size_t i = 0; i < kOpClassCount; ++i) {
    AddPart(parts, "run " + std::string(NameOf(static_cast<OpClass>(i))), simulated.run[i],
            measured.run[i]);
  }
  for (std::size_t i = 0; i < kStreamCount; ++i) {
    AddPart(parts, "wait for " + std::string(NameOf(static_cast<Stream>(i))), simulated.wait[i],
            measured.wait[i]);
  }
  AddPart(parts, "host issue", simulated.host_issue, measured.host_issue);
  AddPart(parts, "wait for communicator", simulated.communicator, measured.communicator);
  AddPart(parts, "wait for peers", simulated.peers, measured.peers);
  AddPart(parts, "other", simulated.other, measured.other);
  SortByDifference(parts);
  return parts;
}

void FindPeak(const Trace& trace, Bytes& peak, std::array<Bytes, kCategoryCount>& at_peak) {
  for (const MemorySample& sample : trace.memory) {
    const Bytes total = Summed<Bytes>(sample.device);
    if (total > peak) {
      peak = total;
      at_peak = sample.device;
    }
  }
}

// Profile numbers that price a class (topologies/profile.h).
const char* FieldsOf(OpClass op_class) {
  static constexpr const char* kGemms = "compute.gemm, compute.gemm_operands, compute.gemm_ramp";
  static constexpr const char* kWrites = "compute.elementwise, compute.kernel_floor";
  static constexpr const char* kSums = "compute.reduction, compute.kernel_floor";
  static constexpr const char* kLinks = "transports[].efficiency, transports[].protocols[]";
  // In the order of OpClass.
  static constexpr std::array<const char*, kOpClassCount> kFields = {
      kGemms,
      "compute.attention_forward, compute.attention_backward",
      kGemms,
      kWrites,
      kSums,
      kSums,
      kWrites,
      kLinks,
      kLinks,
      kLinks,
      kLinks,
      "compute.copies, compute.kernel_floor",
      "copy.to_device, copy.to_host, copy.latency",
      "compute.optimizer",
      "none: the host's memory bandwidth is the cluster's",
      "host.wake"};
  return kFields[static_cast<std::size_t>(op_class)];
}

void SortCalibrations(Comparison& comparison) {
  const double target = comparison.measured_step.value;
  StableSort(comparison.calibrations, [target](const Calibration& a, const Calibration& b) {
    return std::abs(a.step_time.value - target) < std::abs(b.step_time.value - target);
  });
}

Seconds Recalibration::StepTime(std::span<const double> factors, double issue_factor) {
  PriceTable prices = input_.prices;
  for (std::size_t i = 0; i < prices.prices.size(); ++i) {
    Price& price = prices.prices[i];
    const double factor = factor_of_(input_.program.shapes[i], factors);
    price.duration = Scaled(price.duration, factor);
    price.tail = Scaled(price.tail, factor);
    price.issue = Scaled(price.issue, issue_factor);
    price.first_launch = Scaled(price.first_launch, issue_factor);
  }
  return ToSeconds(RunEngine(input_.program, prices, input_.engine, workspace_).steady.time);
}

}  // namespace shardwright::internal
