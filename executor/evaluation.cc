#include "executor/evaluation.h"

#include <string>

#include "core/error.h"
#include "executor/half.h"

namespace shardwright {

Evaluation CountCorrect(const ConstView& scores, const ConstView& labels) {
  Evaluation result;
  const auto* label = static_cast<const std::int64_t*>(labels.data);
  SW_CHECK(labels.elements > 0 && scores.elements % labels.elements == 0, "whole rows");
  const std::int64_t classes = scores.elements / labels.elements;
  for (std::int64_t row = 0; row < labels.elements; ++row) {
    if (label[row] < 0) {
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
    result.correct += best == label[row] ? 1 : 0;
  }
  return result;
}

ModelKernel EvaluationCounter::Watch(ModelKernel kernel) {
  return [this, kernel = std::move(kernel)](const ModelOpCall& call, bool is_backward) {
    kernel(call, is_backward);
    const OpKind kind = call.spec->kind;
    if (!is_backward && (kind == OpKind::kNllLoss || kind == OpKind::kCrossEntropy)) {
      Count(call);
    }
  };
}

void EvaluationCounter::Count(const ModelOpCall& call) {
  Evaluation part = CountCorrect(call.inputs[0], call.inputs[1]);
  const float loss = LoadFloat(DType::kFp32, call.outputs[0].data, 0);
  if (part.counted > 0) {  // a micro-batch of empty places has no mean
    part.loss_sum = call.reduction == LossReduction::kSum
                        ? loss
                        : static_cast<double>(loss) * static_cast<double>(part.counted);
  }
  const std::lock_guard lock(mutex_);
  const bool is_new =
      parts_.emplace(std::pair(call.dropout.step, call.dropout.first_sample), part).second;
  SW_CHECK(is_new, "two losses of sample " + std::to_string(call.dropout.first_sample));
}

Evaluation EvaluationCounter::Take() {
  Evaluation total;
  for (const auto& [place, part] : parts_) {
    total.loss_sum += part.loss_sum;
    total.correct += part.correct;
    total.counted += part.counted;
  }
  parts_.clear();
  return total;
}

}  // namespace shardwright
