// The rows of every expert against a list made one row after the other.

#include <cstdint>
#include <cstring>
#include <random>
#include <vector>

#include <doctest/doctest.h>

#include "executor/cuda/ops/launch.h"
#include "tests/executor/cuda/test_gpu.h"

namespace shardwright::testing {
namespace {

struct Lists {
  std::vector<std::int64_t> offsets, list, slots;
};

Lists ListInOrder(const std::vector<float>& weights, std::int64_t experts, bool is_dense) {
  const std::int64_t rows = std::ssize(weights) / experts;
  Lists lists;
  lists.offsets = {0};
  lists.slots.assign(weights.size(), -1);
  for (std::int64_t e = 0; e < experts; ++e) {
    for (std::int64_t row = 0; row < rows; ++row) {
      const auto at = static_cast<std::size_t>(row * experts + e);
      if (is_dense || weights[at] != 0.0F) {
        lists.slots[at] = std::ssize(lists.list);
        lists.list.push_back(row);
      }
    }
    lists.offsets.push_back(std::ssize(lists.list));
  }
  return lists;
}

Lists ListOnGpu(const std::vector<float>& weights, std::int64_t experts, bool is_dense,
                std::int64_t routed) {
  const std::unique_ptr<Gpu> gpu = MakeTestGpu(1);
  const std::int64_t rows = std::ssize(weights) / experts;
  const auto allocate = [&](std::int64_t n) {
    return reinterpret_cast<std::int64_t*>(gpu->Allocate(Bytes(n * 8), false));
  };
  gpu::DispatchArgs args{.weights = {ToGpu(*gpu, weights), DType::kFp32},
                         .rows = rows,
                         .experts = experts,
                         .is_dense = is_dense,
                         .offsets = allocate(experts + 1),
                         .list = allocate(routed),
                         .slots = allocate(rows * experts)};
  const GpuStream stream = gpu->NewStream(false);
  const GpuEvent event = gpu->NewEvent(false);
  ops::DispatchRows({*gpu, stream, nullptr}, args);
  gpu->Record(event, stream);
  gpu->Synchronize(event);
  return {FromGpu(*gpu, args.offsets, experts + 1), FromGpu(*gpu, args.list, routed),
          FromGpu(*gpu, args.slots, rows * experts)};
}

TEST_CASE("Dispatch.ListsTheRowsOfEveryExpertInOrder") {
  struct Case {
    std::int64_t rows, experts, per_token;
    bool is_dense;
  };
  // Fewer rows than threads and more, an expert without rows, more experts than threads.
  for (const Case& c : {Case{1, 3, 1, false}, Case{97, 8, 2, false}, Case{1021, 5, 2, false},
                        Case{300, 300, 4, false}, Case{259, 4, 1, true}}) {
    CAPTURE(c.rows);
    std::mt19937_64 random(7);
    std::vector<float> weights(static_cast<std::size_t>(c.rows * c.experts), 0.0F);
    for (std::int64_t row = 0; row < c.rows; ++row) {
      for (std::int64_t i = 0; i < c.per_token; ++i) {  // never the last expert
        const auto e =
            static_cast<std::int64_t>(random() % static_cast<std::uint64_t>(c.experts - 1));
        weights[static_cast<std::size_t>(row * c.experts + e)] = 0.5F;
      }
    }
    const Lists expected = ListInOrder(weights, c.experts, c.is_dense);
    const Lists found = ListOnGpu(weights, c.experts, c.is_dense, std::ssize(expected.list));
    CHECK(found.offsets == expected.offsets);
    CHECK(found.list == expected.list);
    CHECK(found.slots == expected.slots);
  }
}

}  // namespace
}  // namespace shardwright::testing
