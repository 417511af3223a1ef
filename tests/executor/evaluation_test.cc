#include "executor/evaluation.h"

#include <cstdint>
#include <limits>
#include <utility>
#include <vector>

#include <doctest/doctest.h>

#include "executor/half.h"

namespace shardwright {
namespace {

TEST_CASE("correct answers are rows whose label has the largest score") {
  // Three rows of four classes: right, wrong, and a tie that the first class wins; one empty row.
  const std::vector<float> scores = {0, 5, 1, 2, 9, 0, 0, 0, 3, 3, 1, 0, 7, 7, 7, 7};
  const std::vector<std::int64_t> labels = {1, 2, 0, -100};
  const Evaluation e =
      CountCorrect({scores.data(), DType::kFp32, 16}, {labels.data(), DType::kInt64, 4});
  CHECK(e.correct == 2);
  CHECK(e.counted == 3);
  std::vector<std::uint16_t> halves;
  for (const float score : scores) {
    halves.push_back(FloatToBf16(score));
  }
  CHECK(
      CountCorrect({halves.data(), DType::kBf16, 16}, {labels.data(), DType::kInt64, 4}).correct ==
      2);
}

// A call of a loss over two rows of two classes.
struct LossCall {
  std::vector<float> scores;
  std::vector<std::int64_t> labels;
  float loss = 0.0F;
  OpSpec spec = {};
  ModelOpCall call = {};

  LossCall(std::vector<float> s, std::vector<std::int64_t> l, float value, std::int64_t first)
      : scores(std::move(s)), labels(std::move(l)), loss(value) {
    spec.kind = OpKind::kNllLoss;
    call.spec = &spec;
    call.inputs = {{scores.data(), DType::kFp32, 4}, {labels.data(), DType::kInt64, 2}};
    call.outputs = {{&loss, DType::kFp32, 1}};
    call.dropout.first_sample = first;
  }
};

TEST_CASE("losses of all ranks add up, whoever comes first, and empty batches add nothing") {
  for (const bool reversed : {false, true}) {
    EvaluationCounter counter;
    int runs = 0;
    const ModelKernel kernel = counter.Watch([&](const ModelOpCall&, bool) { ++runs; });
    LossCall a({0, 1, 1, 0}, {1, 1}, 0.5F, 0);      // mean over two: 1.0; one right
    LossCall b({0, 1, 1, 0}, {1, -100}, 0.25F, 2);  // mean over one: 0.25; one right
    LossCall empty({0, 1, 1, 0}, {-100, -100}, 0.0F, 4);
    empty.loss = std::numeric_limits<float>::quiet_NaN();  // the mean of nothing
    LossCall sum({0, 1, 1, 0}, {0, 0}, 3.0F, 6);           // one right
    sum.call.reduction = LossReduction::kSum;
    std::vector<LossCall*> calls = {&a, &b, &empty, &sum};
    if (reversed) {
      calls = {&sum, &empty, &b, &a};
    }
    for (LossCall* call : calls) {
      kernel(call->call, false);
      kernel(call->call, true);  // backward is no second loss
    }
    CHECK(runs == 8);
    const Evaluation e = counter.Take(nullptr);
    CHECK(e.loss_sum == 4.25);
    CHECK(e.correct == 3);
    CHECK(e.counted == 5);
    CHECK(e.MeanLoss() == 0.85);
    CHECK(counter.Take(nullptr).counted == 0);
  }
}

}  // namespace
}  // namespace shardwright
