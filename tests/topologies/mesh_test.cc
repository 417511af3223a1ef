#include "topologies/mesh.h"

#include <array>
#include <cstdint>
#include <map>
#include <set>
#include <vector>

#include <doctest/doctest.h>

namespace shardwright {
namespace {

Rank RankAt(std::int64_t rank) {
  return Rank(static_cast<std::size_t>(rank));
}

TEST_CASE("Mesh: the example of the header, by hand") {
  constexpr Mesh mesh = {{2, 4}};
  CHECK(mesh.RankCount() == 8);
  const Coordinates at = mesh.At(Rank(6));
  CHECK(at.replica == 1);
  CHECK(at.shard == 2);
  CHECK(at.data == 6);
  CHECK(mesh.Of({Axis::kShard}) == GroupShape{4, 1});
  CHECK(mesh.Of({Axis::kReplicate}) == GroupShape{2, 4});
  CHECK(mesh.Of({Axis::kReplicate, Axis::kShard}) == GroupShape{8, 1});
  CHECK(MembersOf(mesh.Of({Axis::kShard}), 6) == std::vector<std::int64_t>{4, 5, 6, 7});
  CHECK(MembersOf(mesh.Of({Axis::kReplicate}), 6) == std::vector<std::int64_t>{2, 6});
  CHECK(mesh.FirstSample(Rank(6), 1, 3) == 42);
  const GroupPlace place = PlaceInGroup(mesh.Of({Axis::kReplicate}), Rank(6));
  CHECK(place.base == 2);
  CHECK(place.index == 1);
  CHECK(mesh.SplitsInto(2));
  CHECK_FALSE(mesh.SplitsInto(3));
  CHECK_FALSE(mesh.SplitsInto(0));
}

// Two loops number the ranks row by row: what a mesh says must be what the loops say.
TEST_CASE("Mesh: ranks, groups and samples of small meshes equal listing") {
  for (std::int64_t replicate = 1; replicate <= 5; ++replicate) {
    for (std::int64_t shard = 1; shard <= 6; ++shard) {
      CAPTURE(replicate);
      CAPTURE(shard);
      const Mesh mesh = {{replicate, shard}};
      std::map<std::int64_t, std::vector<std::int64_t>> rows, columns;
      std::int64_t rank = 0;
      for (std::int64_t r = 0; r < replicate; ++r) {
        for (std::int64_t s = 0; s < shard; ++s, ++rank) {
          CHECK(mesh.At(RankAt(rank)).replica == r);
          CHECK(mesh.At(RankAt(rank)).shard == s);
          rows[r].push_back(rank);
          columns[s].push_back(rank);
        }
      }
      CHECK(mesh.RankCount() == rank);
      for (const auto& [r, members] : rows) {
        for (std::size_t i = 0; i < members.size(); ++i) {
          const GroupShape group = mesh.Of({Axis::kShard});
          CHECK(MembersOf(group, members[i]) == members);
          CHECK(PlaceInGroup(group, RankAt(members[i])).base == members.front());
          CHECK(PlaceInGroup(group, RankAt(members[i])).index == static_cast<std::int64_t>(i));
        }
      }
      for (const auto& [s, members] : columns) {
        for (const std::int64_t member : members) {
          CHECK(MembersOf(mesh.Of({Axis::kReplicate}), member) == members);
        }
      }
      CHECK(MembersOf(mesh.Of({Axis::kReplicate, Axis::kShard}), 0).size() ==
            static_cast<std::size_t>(rank));
    }
  }
}

TEST_CASE("Mesh: ranks that share out experts equal listing") {
  for (const std::int64_t replicate : {1, 2, 3}) {
    for (const std::int64_t same : {1, 2, 5}) {
      for (const std::int64_t experts : {1, 2, 4}) {
        const Mesh mesh = {{replicate, same * experts}, experts};
        for (std::int64_t rank = 0; rank < mesh.RankCount(); ++rank) {
          // Row by row: replica, then those with the same experts, then those that share them out.
          const std::int64_t first = rank - rank % (same * experts);
          std::vector<std::int64_t> sharing, equal;
          for (std::int64_t e = 0; e < experts; ++e) {
            sharing.push_back(rank - rank % experts + e);
          }
          for (std::int64_t s = 0; s < same; ++s) {
            equal.push_back(first + s * experts + rank % experts);
          }
          CHECK(MembersOf(mesh.Experts(), rank) == sharing);
          CHECK(MembersOf(mesh.SameExperts(), rank) == equal);
        }
      }
    }
  }
}

TEST_CASE("Mesh: ranks that cut layers are neighbours and read the same samples; equals listing") {
  for (const std::int64_t replicate : {1, 2, 3}) {
    for (const std::int64_t shard : {1, 2, 5}) {
      for (const std::int64_t tensor : {1, 2, 4}) {
        const Mesh mesh = {.size = {replicate, shard}, .tensor = tensor};
        CHECK(mesh.RankCount() == replicate * shard * tensor);
        CHECK(mesh.DataCount() == replicate * shard);
        std::int64_t rank = 0;  // row by row: replica, shard, part of a layer
        for (std::int64_t r = 0; r < replicate; ++r) {
          for (std::int64_t s = 0; s < shard; ++s) {
            for (std::int64_t t = 0; t < tensor; ++t, ++rank) {
              const Coordinates at = mesh.At(RankAt(rank));
              CHECK(at.replica == r);
              CHECK(at.shard == s);
              CHECK(at.data == r * shard + s);
              CHECK(mesh.FirstSample(RankAt(rank), 1, 3) == (replicate * shard + at.data) * 3);
              CHECK(MembersOf(mesh.Of({Axis::kTensor}), rank).front() == rank - t);
              CHECK(MembersOf(mesh.Of({Axis::kShard}), rank).front() == rank - s * tensor);
              CHECK(std::ssize(MembersOf(mesh.Of({Axis::kReplicate}), rank)) == replicate);
              CHECK(MembersOf(mesh.Of({Axis::kReplicate}), rank).front() ==
                    rank - r * shard * tensor);
            }
          }
        }
        CHECK(MeshOver(rank, {.size = {replicate, 0}, .tensor = tensor}).Along(Axis::kShard) ==
              shard);
      }
    }
  }
}

TEST_CASE("Mesh: ranks that cut tokens are neighbours in a shard group; equals listing") {
  for (const std::int64_t replicate : {1, 3}) {
    for (const std::int64_t rows : {1, 2, 5}) {
      for (const std::int64_t context : {1, 2, 4}) {
        const Mesh mesh = {.size = {replicate, rows * context}, .context = context};
        CHECK(mesh.RankCount() == replicate * rows * context);
        CHECK(mesh.CopyCount() == mesh.RankCount());
        CHECK(mesh.DataCount() == replicate * rows);
        std::int64_t rank = 0;  // replica, shard, part of the tokens
        for (std::int64_t data = 0; data < replicate * rows; ++data) {
          for (std::int64_t c = 0; c < context; ++c, ++rank) {
            const Coordinates at = mesh.At(RankAt(rank));
            CHECK(at.replica == data / rows);
            CHECK(at.shard == data % rows * context + c);
            CHECK(at.data == data);
            CHECK(mesh.FirstSample(RankAt(rank), 1, 3) == (replicate * rows + data) * 3);
            CHECK(std::ssize(MembersOf(mesh.Context(), rank)) == context);
            CHECK(MembersOf(mesh.Context(), rank).front() == rank - c);
          }
        }
      }
    }
  }
}

TEST_CASE("Mesh: the samples of a step are read once each") {
  const Mesh mesh = {{3, 2}};
  std::set<std::int64_t> read;
  for (std::int64_t rank = 0; rank < 6; ++rank) {
    for (std::int64_t micro_batch = 0; micro_batch < 4; ++micro_batch) {
      for (std::int64_t i = 0; i < 5; ++i) {
        CHECK(read.insert(mesh.FirstSample(RankAt(rank), micro_batch, 5) + i).second);
      }
    }
  }
  CHECK(*read.begin() == 0);
  CHECK(*read.rbegin() == 3 * 2 * 4 * 5 - 1);
}

TEST_CASE("Mesh: the size that is not given follows from the ranks") {
  using Sizes = std::array<std::int64_t, 2>;
  CHECK(MeshOver(8, {{0, 4}}).size == Sizes{2, 4});
  CHECK(MeshOver(8, {{2, 0}}).size == Sizes{2, 4});
  CHECK(MeshOver(8, {{0, 0}}).size == Sizes{1, 8});
  CHECK(MeshOver(8, {{4, 4}}).size == Sizes{4, 4});  // as given, whatever the ranks
  CHECK(MeshOver(8, {{0, 3}}).size == Sizes{2, 3});  // 6 ranks, not 8
  CHECK(MeshOver(8, {{0, 16}}).RankCount() == 0);
}

TEST_CASE("Mesh: groups tile ranks where whole blocks do") {
  CHECK(Tiles(GroupShape{2, 4}, 8));
  CHECK(Tiles(GroupShape{8, 1}, 8));
  CHECK(Tiles(GroupShape{1, 1}, 1));
  CHECK_FALSE(Tiles(GroupShape{3, 1}, 8));
  CHECK_FALSE(Tiles(GroupShape{4, 4}, 8));
  CHECK_FALSE(Tiles(GroupShape{0, 1}, 8));
  CHECK_FALSE(Tiles(GroupShape{2, 0}, 8));
  CHECK_FALSE(Tiles(GroupShape{1, 2}, 1));
  CHECK_FALSE(Tiles(GroupShape{2, std::int64_t{1} << 62}, 8));  // whose block has no int64
  CHECK(BlockOf(GroupShape{2, 4}) == 8);
}

}  // namespace
}  // namespace shardwright
