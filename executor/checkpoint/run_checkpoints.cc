#include "executor/checkpoint/run_checkpoints.h"

#include <algorithm>
#include <cstring>
#include <memory>
#include <set>
#include <span>
#include <utility>
#include <vector>

#include "core/error.h"
#include "executor/checkpoint/state.h"

namespace shardwright {
namespace {

RankState StateOf(const Runtime& runtime, Rank rank) {
  const Binding& binding = runtime.BindingOf(rank);
  return {binding.units, binding.model_buffers,
          [&runtime, rank](void* to, const void* from, std::int64_t bytes) {
            runtime.CopyMemory(rank, to, from, bytes);
          }};
}

// What every rank writes. Replicas hold the same stretches: the first rank that has one saves it.
std::vector<std::vector<StretchData>> Shares(const Model& model, OptimizerKind optimizer,
                                             const Runtime& runtime) {
  std::set<std::pair<std::string, std::int64_t>> taken;
  std::vector<std::vector<StretchData>> shares;
  for (const Rank r : runtime.LocalRanks()) {
    shares.emplace_back();
    for (StretchData& stretch : StretchesOf(model, optimizer, StateOf(runtime, r), r == Rank(0u))) {
      if (taken.emplace(stretch.stretch.tensor, stretch.stretch.begin).second) {
        shares.back().push_back(std::move(stretch));
      }
    }
  }
  return shares;
}

void CopyUnits(std::span<const BoundUnit> from, std::span<const BoundUnit> to) {
  SW_CHECK(from.size() == to.size(), "two runtimes of one plan");
  for (std::size_t u = 0; u < from.size(); ++u) {
    const BoundUnit& unit = from[u];
    if (unit.parameters == nullptr) {
      continue;
    }
    // A forward-only program has what the training program keeps beside its masters.
    const bool is_copy = to[u].pieces != unit.pieces || to[u].dtype != unit.dtype;
    SW_CHECK(!is_copy || (unit.copy.has_value() && unit.copy->pieces == to[u].pieces &&
                          unit.copy->dtype == to[u].dtype),
             "units of one plan");
    std::memcpy(to[u].parameters, is_copy ? unit.copy->data : unit.parameters,
                static_cast<std::size_t>(to[u].elements * SizeOf(to[u].dtype)));
  }
}

}  // namespace

RunCheckpoints::RunCheckpoints(std::string folder, std::int64_t keep, const Model& model,
                               const Job& job, const Program& program, const Sampler& sampler)
    : folder_(std::move(folder)),
      keep_(keep),
      model_(model),
      job_(job),
      program_(program),
      sampler_(sampler) {
  RemoveUnfinishedCheckpoints(folder_);
}

void RunCheckpoints::Save(const Runtime& runtime) {
  background_.Wait();  // one snapshot in memory at a time
  auto snapshots = std::make_shared<std::vector<Snapshot>>();
  std::size_t next = 0;
  for (std::vector<StretchData>& share : Shares(model_, job_.optimizer.kind, runtime)) {
    snapshots->emplace_back(std::move(share), StateOf(runtime, runtime.LocalRanks()[next++]).copy);
  }
  Manifest manifest;
  DescribeState(model_, job_, manifest);
  manifest.dialect = program_.dialect;
  manifest.shard_size = program_.shard_size;
  manifest.replicate_size = program_.replicate_size;
  manifest.step = runtime.next_step();
  manifest.update = runtime.next_step() - runtime.skipped_steps();
  manifest.loss_scaler = runtime.loss_scaler();
  manifest.sampler = sampler_;
  background_.Start([this, snapshots, manifest = std::move(manifest)] {
    CheckpointWriter writer(folder_, manifest.step);
    for (std::size_t r = 0; r < snapshots->size(); ++r) {
      if (!(*snapshots)[r].stretches().empty()) {
        writer.WriteRank(static_cast<std::int64_t>(r), (*snapshots)[r].stretches());
      }
    }
    writer.Commit(manifest);
    RemoveOldCheckpoints(folder_, keep_);
  });
}

void Resume(const Checkpoint& checkpoint, const Model& model, const Job& job, Runtime& runtime,
            bool with_states) {
  for (const Rank r : runtime.LocalRanks()) {
    LoadState(checkpoint, model, job.optimizer.kind, StateOf(runtime, r), with_states);
  }
  const Manifest& manifest = checkpoint.manifest();
  runtime.set_next_step(manifest.step);
  if (with_states) {
    runtime.set_loss_scaler(manifest.loss_scaler, manifest.step - manifest.update);
  }
}

void CopyParameters(const Runtime& from, const Model& model, const Runtime& to) {
  SW_CHECK(from.rank_count() == to.rank_count(), "two runtimes of one plan");
  std::int64_t buffer_elements = 0;
  for (const Module& module : model.modules) {
    buffer_elements += module.buffer_elements;
  }
  for (const Rank r : from.LocalRanks()) {
    const RankState source = StateOf(from, r);
    const RankState target = StateOf(to, r);
    CopyUnits(source.units, target.units);
    if (source.model_buffers != nullptr && target.model_buffers != nullptr) {
      std::copy(source.model_buffers, source.model_buffers + buffer_elements, target.model_buffers);
    }
  }
}

}  // namespace shardwright
