#include "cli/prediction.h"

#include <algorithm>
#include <optional>

#include "core/json.h"
#include "models/model.h"
#include "schedule/place.h"
#include "topologies/cluster.h"

namespace shardwright {
namespace {

// FLOPs of one sample as published MFU figures count them.
Flops FlopsPerSample(const PlanFile& file) {
  if (file.job.mode == JobMode::kTrain) {
    return ConventionFlopsPerSample(file.model.model);
  }
  // Forward is a third of training, when everything is trained.
  Model all_trained = file.model.model;
  for (Parameter& param : all_trained.params) {
    param.trainable = true;
  }
  return Flops(ConventionFlopsPerSample(all_trained).value / 3.0);
}

void SetRates(const PlanFile& file, Prediction& p) {
  const std::optional<FlopsPerSecond> peak =
      PeakFlops(file.cluster.gpu, MathTypeOf(file.job.precision.param));
  p.has_dtype = peak.has_value();
  p.peak =
      peak.value_or(PeakFlops(file.cluster.gpu, MathType::kFp32).value_or(FlopsPerSecond(0.0)));
  const double samples =
      static_cast<double>(file.plan.micro_batch) * static_cast<double>(file.plan.accumulation);
  const double seconds = p.step_time.value;
  if (seconds > 0.0) {
    p.tokens_per_second_per_gpu =
        samples * static_cast<double>(file.model.model.tokens_per_sample) / seconds;
    if (p.peak.value > 0.0) {
      p.mfu = samples * FlopsPerSample(file).value / (seconds * p.peak.value);
    }
  }
}

void FindMisfits(const PlanFile& file, const ReservedMemory& reserved, Prediction& p) {
  const Bytes allocated = p.device_peak.total + p.outside;
  const std::string limit = Format(p.usable) + " usable on " + file.cluster.gpu.name;
  if (allocated > p.usable) {
    p.misfits.push_back("does not fit: peak allocated " + Format(p.device_peak.total) +
                        " + outside the allocator " + Format(p.outside) + " = " +
                        Format(allocated) + ", of " + limit);
  } else if (reserved.out_of_memory) {
    p.misfits.push_back("does not fit: fragmentation leaves no room, with peak allocated " +
                        Format(p.device_peak.total) + " + outside the allocator " +
                        Format(p.outside) + ", of " + limit);
  }
  if (p.host_limit > Bytes(0) && p.host_peak > p.host_limit) {
    p.misfits.push_back("does not fit: offloading needs " + Format(p.host_peak) +
                        " of page-locked host memory per node, of " + Format(p.host_limit));
  }
}

}  // namespace

Prediction Predict(const PlanFile& file, const Program& program, const SimulationResult& result) {
  Prediction p;
  p.step_time = ToSeconds(result.step_time);
  p.first_step_time = ToSeconds(result.first_step_time);
  p.exposed_comm = ToSeconds(result.exposed_comm);
  SetRates(file, p);
  const AllocatedMemory& allocated = result.memory.allocated;
  p.device_peak = allocated.DevicePeak();
  p.peak_is_first = p.device_peak == allocated.device_first;
  p.outside = result.memory.outside;
  p.placed = Place(program).device_size;
  p.attribution = Explain(program, result.trace.spans, result.step_time);
  const ReservedMemory& reserved = *result.memory.reserved;
  p.reserved = std::max(reserved.peak_first, reserved.peak_steady);
  p.retries_per_step = reserved.retries_steady;
  p.usable = UsableMemory(file);
  p.host_peak = allocated.HostPeak().total * file.cluster.gpus_per_node;
  p.host_limit = file.cluster.node.pinned_limit;
  FindMisfits(file, reserved, p);
  return p;
}

Bytes UsableMemory(const PlanFile& file) {
  const auto usable = static_cast<double>(file.cluster.gpu.usable_memory.value.value);
  return Bytes(static_cast<std::int64_t>(usable * (1.0 - file.job.memory_margin)));
}

}  // namespace shardwright
