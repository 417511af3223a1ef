#include "executor/evaluation.h"

#include <cstring>
#include <string>
#include <tuple>
#include <type_traits>
#include <utility>

#include "core/error.h"
#include "core/ranges.h"
#include "executor/half.h"
#include "executor/host/together.h"

namespace shardwright {

Evaluation CountCorrect(const ConstView& scores, const ConstView& labels, const WordsHere& words) {
  Evaluation result;
  const auto* label = static_cast<const std::int64_t*>(labels.data);
  SW_CHECK(labels.elements > 0 && scores.elements % labels.elements == 0, "whole rows");
  const std::int64_t classes = scores.elements / labels.elements;
  for (std::int64_t row = 0; row < labels.elements; ++row) {
    const std::int64_t here = label[row] - words.index * classes;
    if (label[row] < 0 || here < 0 || here >= classes) {
      continue;
    }
    ++result.counted;
    // The first of equal scores wins, as in torch.argmax on the CPU.
    std::int64_t best = 0;
    float largest = LoadFloat(scores.dtype, scores.data, row * classes);
    for (std::int64_t c = 1; c < classes; ++c) {
      const float score = LoadFloat(scores.dtype, scores.data, row * classes + c);
      if (score > largest) {
        largest = score;
        best = c;
      }
    }
    bool wins = best == here;
    for (std::int64_t rank = 0; rank < std::ssize(words.shared) / (3 * labels.elements); ++rank) {
      const float its = words.shared[static_cast<std::size_t>(3 * (rank * labels.elements + row))];
      wins = wins && (rank < words.index ? its < largest : its <= largest);
    }
    result.correct += wins ? 1 : 0;
  }
  return result;
}

ModelKernel EvaluationCounter::Watch(ModelKernel kernel) {
  return [this, kernel = std::move(kernel)](const ModelOpCall& call, bool is_backward) {
    kernel(call, is_backward);
    const OpKind kind = call.spec->kind;
    if (!is_backward && call.part != OpPart::kBeforeExchange &&
        (kind == OpKind::kNllLoss || kind == OpKind::kCrossEntropy)) {
      WordsHere words;
      if (call.spec->tensor_ranks > 0) {
        words = {call.cut.part,
                 {reinterpret_cast<const float*>(call.exchange.data()),
                  call.exchange.size() / sizeof(float)}};
      }
      const std::int64_t parts = call.spec->tensor_ranks;
      Add(call.dropout, CountCorrect(call.inputs[0], call.inputs[1], words),
          LoadFloat(DType::kFp32, call.outputs[0].data, 0), call.reduction,
          parts > 0 ? call.cut.index * parts + call.cut.part : call.cut.index);
    }
  };
}

void EvaluationCounter::Add(const DropoutKey& key, Evaluation counted, float loss,
                            LossReduction reduction, std::int64_t cut) {
  if (counted.counted > 0) {  // a micro-batch of empty places has no mean
    counted.loss_sum = reduction == LossReduction::kSum
                           ? loss
                           : static_cast<double>(loss) * static_cast<double>(counted.counted);
  }
  const std::lock_guard lock(mutex_);
  parts_.push_back({key.step, key.first_sample, cut, counted});
}

Evaluation EvaluationCounter::Take(MessagePassing* processes) {
  if (processes != nullptr) {
    static_assert(std::is_trivially_copyable_v<Part>);
    const auto* const begin = reinterpret_cast<const std::byte*>(parts_.data());
    const auto all = ShareBytes(*processes, MessagePassing::kAll, {"results of the evaluation"},
                                {begin, begin + parts_.size() * sizeof(Part)});
    parts_.clear();
    for (std::size_t r = 0; r < all.size(); ++r) {
      const std::vector<std::byte>& its = all[r];
      if (its.size() % sizeof(Part) != 0) {
        throw RunError("results of the evaluation: rank " + std::to_string(r) + " sent " +
                       std::to_string(its.size()) + " bytes, no whole number of them");
      }
      for (std::size_t at = 0; at < its.size(); at += sizeof(Part)) {
        std::memcpy(&parts_.emplace_back(), its.data() + at, sizeof(Part));
      }
    }
  }
  const auto place = [](const Part& part) {
    return std::tuple(part.step, part.first_sample, part.cut);
  };
  SortAll(parts_, [&](const Part& a, const Part& b) { return place(a) < place(b); });
  Evaluation total;
  for (std::size_t i = 0; i < parts_.size(); ++i) {
    const Part& part = parts_[i];
    if (i > 0 && place(part) == place(parts_[i - 1])) {
      throw RunError("results of the evaluation: two losses of sample " +
                     std::to_string(part.first_sample));
    }
    total.loss_sum += part.counted.loss_sum;
    total.correct += part.counted.correct;
    total.counted += part.counted.counted;
  }
  parts_.clear();
  return total;
}

}  // namespace shardwright
