// How dialects lay out and pad parameters, against hand computation.

#include "schedule/lower/layout.h"

#include <cstdint>
#include <random>
#include <string>
#include <vector>

#include <doctest/doctest.h>

#include "schedule/lower.h"
#include "tests/schedule/chain_model.h"

namespace shardwright {
namespace {

using namespace testing;  // NOLINT(google-build-using-namespace): the chain model and its questions

// Model with one unit of the given parameter shapes.
Model ParamsModel(const std::vector<std::vector<std::int64_t>>& shapes) {
  Model model;
  const ModuleId root = AddModule(model, {}, "", "Root");
  for (std::size_t i = 0; i < shapes.size(); ++i) {
    AddParam(model, root, "p" + std::to_string(i), shapes[i]);
  }
  return model;
}

ResolvedUnit WholeUnit(const Model& model) {
  ResolvedUnit unit{"root", {ModuleId(0)}, {}};
  for (std::size_t p = 0; p < model.params.size(); ++p) {
    unit.params.push_back(ParamId(p));
  }
  return unit;
}

TEST_CASE("FSDP2 pads each parameter to whole rows per rank") {
  // (3, 1024) over 8 ranks is stored as 8 rows; a vector of 10 becomes 16; (16, 4) stays.
  const Model model = ParamsModel({{3, 1024}, {10}, {16, 4}});
  const UnitInfo info = LayoutPerParameter(model, WholeUnit(model), 8);
  CHECK(info.elements == 3 * 1024 + 10 + 64);
  CHECK(info.padded_elements == 8 * 1024 + 16 + 64);
  CHECK(info.shard_elements == 1024 + 2 + 8);
  CHECK(info.params[1].shard_offset == 1024);
  CHECK(info.params[2].unsharded_offset == 8 * 1024 + 16);
}

// One layer of experts: per expert gate (5, 4), down (4, 5) and up (5, 4).
Model ExpertsModel(std::int64_t experts) {
  std::vector<std::vector<std::int64_t>> shapes;
  for (std::int64_t e = 0; e < experts; ++e) {
    shapes.insert(shapes.end(), {{5, 4}, {4, 5}, {5, 4}});
  }
  Model model = ParamsModel(shapes);
  OpSpec spec;
  spec.kind = OpKind::kExperts;
  spec.gated = spec.up_last = true;
  spec.experts = experts;
  model.specs = {spec};
  ModelOp op;
  op.module = ModuleId(0);
  for (std::size_t p = 0; p < model.params.size(); ++p) {
    op.params.push_back(ParamId(p));
  }
  model.ops = {op};
  return model;
}

TEST_CASE("FSDP2 pads the number of experts that are one tensor") {
  const Model model = ExpertsModel(6);
  // A matrix each: 5 rows of 4 become 8, 4 rows of 5 stay: 6 (2 * 32 + 20).
  CHECK(LayoutPerParameter(model, WholeUnit(model), 4).padded_elements == 504);
  // Stacked: (6, 10, 4) and (6, 4, 5) become (8, 10, 4) and (8, 4, 5); 2 of 8 experts per rank.
  const UnitInfo info = LayoutPerParameter(model, WholeUnit(model), 4, StackExperts(model));
  CHECK(info.elements == 6 * 60);
  CHECK(info.padded_elements == 8 * 60);
  CHECK(info.shard_elements == 2 * 60);
  REQUIRE(info.params.size() == 2);
  CHECK(info.params[0].padded_elements == 8 * 40);
  CHECK(info.params[1].param == ParamId(1));
  CHECK(info.params[1].unsharded_offset == 8 * 40);
  // 64 ranks keep one expert each: 64 / 6 times the elements.
  CHECK(LayoutPerParameter(model, WholeUnit(model), 64, StackExperts(model)).padded_elements ==
        64 * 60);
}

TEST_CASE("FSDP1 aligns to 16 bytes of the compute dtype only with use_orig_params") {
  // 5 and 7 elements over 4 ranks. bf16: 8 elements per 16 bytes, so the second starts at 8; the
  // total 15 is padded to 16. Without: 12 elements, 3 per rank.
  const Model model = ParamsModel({{5}, {7}});
  const UnitInfo with = LayoutFlat(model, WholeUnit(model), 4, true, DType::kBf16);
  CHECK(with.params[1].unsharded_offset == 8);
  CHECK(with.padded_elements == 16);
  CHECK(with.shard_elements == 4);
  const UnitInfo without = LayoutFlat(model, WholeUnit(model), 4, false, DType::kBf16);
  CHECK(without.params[1].unsharded_offset == 5);
  CHECK(without.padded_elements == 12);
  CHECK(without.shard_elements == 3);
  // fp32: 4 elements per 16 bytes: 5 -> 8, 8 + 7 = 15 -> 16.
  CHECK(LayoutFlat(model, WholeUnit(model), 4, true, DType::kFp32).padded_elements == 16);
  // The paper's bound without alignment: at most W - 1 elements of padding.
  std::mt19937 random(7);
  for (int trial = 0; trial < 200; ++trial) {
    const std::int64_t w = std::uniform_int_distribution<std::int64_t>(1, 64)(random);
    const Model m = ParamsModel({{std::uniform_int_distribution<std::int64_t>(1, 5000)(random)},
                                 {std::uniform_int_distribution<std::int64_t>(1, 70)(random), 3}});
    const UnitInfo info = LayoutFlat(m, WholeUnit(m), w, false, DType::kBf16);
    CHECK(info.padded_elements - info.elements >= 0);
    CHECK(info.padded_elements - info.elements < w);
    CHECK(info.shard_elements * w == info.padded_elements);
  }
}

TEST_CASE("Native aligns parameters and shards to 256 bytes") {
  const Model model = ParamsModel({{5}, {300}});
  const UnitInfo info = LayoutNative(model, WholeUnit(model), 3, DType::kBf16);
  CHECK(info.params[1].unsharded_offset == 128);
  // 428 elements over 3 ranks: 143 per rank, rounded up to 256.
  CHECK(info.shard_elements == 256);
  CHECK(info.padded_elements == 768);
}

}  // namespace
}  // namespace shardwright
