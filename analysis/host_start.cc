#include "analysis/host_start.h"

#include <algorithm>
#include <cstdint>

#include "models/model.h"
#include "models/reference.h"
#include "schedule/lower/optimizer.h"
#include "topologies/routing.h"

namespace shardwright {
namespace {

struct Sizes {
  Bytes weights{0};
  Bytes all{0};  // and the optimizer's states
  Bytes largest{0};
};

Sizes SizesOf(const PlanFile& file) {
  const Job& job = file.job;
  Sizes sizes;
  for (const Parameter& param : file.model.params) {
    if (param.tied_to.valid()) {
      continue;
    }
    const DType dtype = param.trainable ? job.precision.master : job.precision.param;
    const Bytes bytes(param.Elements() * SizeOf(dtype));
    const StateSize state = SizeOfState(job.optimizer.states, param.Elements(), false, dtype);
    const int states = param.trainable ? StateCount(job.optimizer.kind) : 0;
    const std::int64_t parts = param.parts * param.tensor_parts;
    sizes.weights += bytes * parts;
    if (!IsOfReference(file.model, param.module)) {  // nobody saves it
      sizes.all += (bytes + (state.codes + state.scales) * states) * parts;
    }
    sizes.largest = std::max(sizes.largest, bytes * param.tensor_parts);
  }
  return sizes;
}

}  // namespace

std::vector<HostMove> HostMoves(const PlanFile& file) {
  const Sizes sizes = SizesOf(file);
  const std::int64_t ranks = file.cluster.gpus_per_node;
  const std::int64_t shards = file.plan.shard_size * file.plan.tensor_size;
  const auto on_node = [&](Bytes whole) {  // of a state that is sharded
    return Bytes(whole.value / shards * std::min(ranks, shards));
  };
  const HostCopyRates copies = FindHostCopyRates(file.cluster);
  const BytesPerSecond network =
      file.cluster.node_count > 1 ? NodeNetworkRate(file.cluster) : copies.to_device_alone;
  const auto slower = [](Bytes stored, Bytes copied, BytesPerSecond rate) {
    const bool has_rate = rate.value > 0;
    return std::max(stored / kUsualStorage, has_rate ? copied / rate : Seconds(0));
  };
  const Bytes weights = sizes.weights;
  const Bytes passing = sizes.largest * std::min<std::int64_t>(ranks, shards) / shards;
  return {
      {"load: every rank the whole model", weights * ranks,
       slower(weights, weights, copies.to_device_together)},
      {"load: rank 0, then broadcast", weights + sizes.largest,
       weights / kUsualStorage +
           slower(Bytes(0), weights, std::min(copies.to_device_alone, network))},
      {"load: shards (DCP)", passing,
       slower(on_node(weights), on_node(weights) / ranks, copies.to_device_together)},
      {"save: whole state dict on rank 0", sizes.all,
       sizes.all / kUsualStorage + slower(Bytes(0), sizes.all, copies.to_host_alone)},
      {"save: shards (DCP)", passing,
       slower(on_node(sizes.all), on_node(sizes.all) / ranks, copies.to_host_together)},
      {"save: shards, async_save (training stands still)", on_node(sizes.all),
       slower(Bytes(0), on_node(sizes.all) / ranks, copies.to_host_together)},
  };
}

}  // namespace shardwright
