#include "executor/checkpoint/import.h"

#include "executor/checkpoint/manifest.h"
#include "executor/checkpoint/run_folder.h"
#include "executor/checkpoint/save.h"
#include "executor/checkpoint/state.h"

namespace shardwright {

std::string ImportWeights(const HubWeights& weights, const Model& model,
                          const std::string& folder) {
  const RunFolder lock(folder, false);
  Job job;
  job.mode = JobMode::kForward;
  Manifest manifest;
  DescribeState(model, job, manifest);
  manifest.run = NewRunId();
  manifest.dialect = "import";
  if (weights.optimizer()) {
    manifest.optimizer = *weights.optimizer();
    manifest.step = manifest.update = weights.updates();
  }
  manifest.tensors.clear();
  RankShare share;
  for (const auto& [name, found] : weights.found()) {
    manifest.tensors.push_back(found.tensor);
    share.stretches.push_back({{name, 0, found.tensor.Elements()}, found.tensor.dtype, found.data});
  }
  CheckpointWriter writer(folder, manifest.step);
  writer.WriteRank(0, share);
  return writer.Commit(manifest);
}

}  // namespace shardwright
