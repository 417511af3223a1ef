#pragma once

// The mesh of a job's ranks: how many ranks lie along each axis, which ranks share a group, and
// which samples a rank reads. No other file divides a rank or multiplies the sizes of a mesh
// (tests/style/meshes.py).
//
// Example: 2 replicas of 4 shards are 8 ranks, numbered row by row.
//
//              shard 0  1  2  3
//   replica 0        0  1  2  3
//   replica 1        4  5  6  7
//
//   const Mesh mesh = {{2, 4}};
//   mesh.RankCount()                               8
//   mesh.At(Rank(6))                               replica 1, shard 2, data index 6
//   mesh.Of({Axis::kShard})                        {4, 1}: rank 6 is in {4, 5, 6, 7}
//   mesh.Of({Axis::kReplicate})                    {2, 4}: rank 6 is in {2, 6}
//   mesh.Of({Axis::kReplicate, Axis::kShard})      {8, 1}: all ranks
//   mesh.FirstSample(Rank(6), 1, 3)                42 = (1 * 8 + 6) * 3
//   MeshOver(8, {{0, 4}})                          {2, 4}
//   PlaceInGroup(mesh.Of({Axis::kReplicate}), Rank(6))  base 2, index 1
//
// Expert parallel: in {{2, 4}, 2} neighbours share the experts of every mixture: ranks 0 and 1, 2
// and 3. Experts() is {2, 1}; SameExperts() is {2, 2}: ranks 0 and 2 have the same experts, and cut
// them among them.
//
// Tensor parallel: in {.size = {2, 4}, .tensor = 2} there are 16 ranks, and 2k and 2k + 1 cut every
// layer in two. They read the same samples: DataCount() is 8. Of({Axis::kTensor}) is {2, 1} and
// Of({Axis::kShard}) is {4, 2}.
//
// Context parallel: in {.size = {2, 4}, .context = 2} neighbours of a shard group read the same
// samples, each its part of the tokens: DataCount() is 4. Context() is {2, 1}.
//
// Pipeline parallel: in {.size = {2, 4}, .pipeline = 3} there are 24 ranks; 0 to 7 have the first
// layers. Pipeline() is {3, 8}.

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <initializer_list>
#include <vector>

#include "core/units.h"
#include "topologies/routing.h"

namespace shardwright {

enum class Axis : std::uint8_t { kReplicate, kShard, kTensor };  // outermost first
inline constexpr std::size_t kAxisCount = 3;

// Where a rank lies on each axis. Ranks with one data index read the same samples.
struct Coordinates {
  std::int64_t replica = 0;
  std::int64_t shard = 0;
  std::int64_t data = 0;
};

struct Mesh {
  std::array<std::int64_t, 2> size = {1, 1};  // data-parallel, by Axis
  std::int64_t expert = 1;                    // divides the shard axis
  std::int64_t tensor = 1;
  std::int64_t context = 1;   // divides the shard axis
  std::int64_t pipeline = 1;  // copies of the rest, outermost: each has other layers

  [[nodiscard]] constexpr std::int64_t Along(Axis axis) const {
    return axis == Axis::kTensor ? tensor : size[static_cast<std::size_t>(axis)];
  }
  [[nodiscard]] constexpr std::int64_t RankCount() const { return pipeline * StageRanks(); }
  // Those with the same layers.
  [[nodiscard]] constexpr std::int64_t StageRanks() const {
    return StrideOf(Axis::kReplicate) * Along(Axis::kReplicate);
  }
  // Ranks that read samples of their own.
  [[nodiscard]] constexpr std::int64_t DataCount() const { return CopyCount() / context; }
  // Those of one copy of the parameters.
  [[nodiscard]] constexpr std::int64_t DataShards() const { return Along(Axis::kShard) / context; }
  // Ranks that reduce the gradients of one parameter.
  [[nodiscard]] constexpr std::int64_t CopyCount() const {
    return Along(Axis::kReplicate) * Along(Axis::kShard);
  }
  // Ranks between neighbours on an axis: the product of the sizes of the axes inside it.
  [[nodiscard]] constexpr std::int64_t StrideOf(Axis axis) const {
    std::int64_t stride = 1;
    for (std::size_t inner = static_cast<std::size_t>(axis) + 1; inner < kAxisCount; ++inner) {
      stride *= Along(static_cast<Axis>(inner));
    }
    return stride;
  }

  // The groups of ranks that differ on these axes, which must be neighbours, and on no other.
  [[nodiscard]] constexpr GroupShape Of(std::initializer_list<Axis> axes) const {
    GroupShape group = {1, RankCount()};
    for (const Axis axis : axes) {
      group.size *= Along(axis);
      group.stride = std::min(group.stride, StrideOf(axis));
    }
    return group;
  }
  // The groups that share the experts between them, and those inside a shard group that have the
  // same ones.
  [[nodiscard]] constexpr GroupShape Experts() const { return {expert, 1}; }
  [[nodiscard]] constexpr GroupShape SameExperts() const {
    return {Along(Axis::kShard) / expert, expert};
  }
  // The groups that have the tokens of the same samples.
  [[nodiscard]] constexpr GroupShape Context() const { return {context, StrideOf(Axis::kShard)}; }
  // The groups that have all layers together.
  [[nodiscard]] constexpr GroupShape Pipeline() const { return {pipeline, StageRanks()}; }
  // Does a shard group split into groups of `part` neighbours? 4 shards do into groups of 2.
  [[nodiscard]] constexpr bool SplitsInto(std::int64_t part) const {
    return part >= 1 && Along(Axis::kShard) % part == 0;
  }

  [[nodiscard]] constexpr Coordinates At(Rank rank) const {
    const auto on = [&](Axis axis) { return rank.value / StrideOf(axis) % Along(axis); };
    return {on(Axis::kReplicate), on(Axis::kShard), rank.value / (context * tensor) % DataCount()};
  }
  // The first sample, within the batch of a step, that a rank reads for a micro-batch.
  [[nodiscard]] constexpr std::int64_t FirstSample(Rank rank, std::int64_t micro_batch,
                                                   std::int64_t samples_per_rank) const {
    return (micro_batch * DataCount() + At(rank).data) * samples_per_rank;
  }
};

// The mesh of a plan, a program or anything else with the first two of these sizes.
[[nodiscard]] constexpr Mesh MeshOf(const auto& sizes) {
  Mesh mesh = {{sizes.replicate_size, sizes.shard_size}};
  if constexpr (requires { sizes.expert_size; }) {
    mesh.expert = sizes.expert_size;
  }
  if constexpr (requires { sizes.tensor_size; }) {
    mesh.tensor = sizes.tensor_size;
  }
  if constexpr (requires { sizes.context_size; }) {
    mesh.context = sizes.context_size;
  }
  if constexpr (requires { sizes.pipeline_size; }) {
    mesh.pipeline = sizes.pipeline_size;
  }
  return mesh;
}

// Fills a size that is 0 from the number of ranks, rounded down: RankCount() differs from `ranks`
// where the other size does not divide them. Without any size all ranks are one shard group.
[[nodiscard]] constexpr Mesh MeshOver(std::int64_t ranks, Mesh mesh) {
  auto& [replicate, shard] = mesh.size;
  if (shard == 0) {
    shard = ranks / mesh.tensor / mesh.pipeline / std::max<std::int64_t>(replicate, 1);
  }
  if (replicate == 0) {
    replicate = ranks / mesh.tensor / mesh.pipeline / std::max<std::int64_t>(shard, 1);
  }
  return mesh;
}

// The functions below take a GroupShape or a program's Group: both have a size and a stride.

// A rank's group, named by its lowest rank, and the rank's place there: base + index * stride.
struct GroupPlace {
  std::int64_t base = 0;
  std::int64_t index = 0;
};
[[nodiscard]] constexpr GroupPlace PlaceInGroup(const auto& group, Rank rank) {
  const std::int64_t index = rank.value / group.stride % group.size;
  return {rank.value - index * group.stride, index};
}

// The ranks of the group that `rank` is in, in ascending order.
[[nodiscard]] std::vector<std::int64_t> MembersOf(const auto& group, std::int64_t rank) {
  std::vector<std::int64_t> ranks(static_cast<std::size_t>(group.size));
  std::int64_t next = rank - rank / group.stride % group.size * group.stride;
  for (std::int64_t& member : ranks) {
    member = next;
    next += group.stride;
  }
  return ranks;
}

// Consecutive ranks that `stride` groups fill: 8 for {2, 4}.
[[nodiscard]] constexpr std::int64_t BlockOf(const auto& group) {
  return group.size * group.stride;
}

// Do groups of this shape fill the ranks? 8 ranks hold groups {2, 4}, but none {3, 1} or {4, 4}.
[[nodiscard]] constexpr bool Tiles(const auto& group, std::int64_t ranks) {
  return group.size >= 1 && group.stride >= 1 && group.size <= ranks &&
         group.stride <= ranks / group.size && ranks % BlockOf(group) == 0;
}

}  // namespace shardwright
