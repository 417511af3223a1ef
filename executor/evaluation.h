#pragma once

// Loss and accuracy over whole data sets, counted where the loss is computed.

#include <cstdint>
#include <mutex>
#include <span>
#include <vector>

#include "executor/host/execute.h"
#include "executor/host/message_passing.h"

namespace shardwright {

struct Evaluation {
  double loss_sum = 0.0;     // over the labels that count
  std::int64_t correct = 0;  // labels whose score is the largest of their row
  std::int64_t counted = 0;  // labels that are not below zero

  [[nodiscard]] double MeanLoss() const {
    return counted == 0 ? 0.0 : loss_sum / static_cast<double>(counted);
  }
};

// Watches the loss ops of all ranks. Sums in the order of the samples, so that neither timing nor
// the number of threads shows.
class EvaluationCounter {
 public:
  // A kernel that runs `kernel` and then, behind a loss's forward, counts. Refers to this object.
  [[nodiscard]] ModelKernel Watch(ModelKernel kernel);
  // What a device counted itself, of the micro-batch that `key` tells: `counted` without a loss,
  // and the loss as the op computed it. `cut`: which rank of those that have parts of it.
  void Add(const DropoutKey& key, Evaluation counted, float loss, LossReduction reduction,
           std::int64_t cut = 0);
  // What was counted since the last call. No rank may be running. `processes`: the ranks are in
  // these, which all call this at once.
  [[nodiscard]] Evaluation Take(MessagePassing* processes);

 private:
  // Of one micro-batch.
  struct Part {
    std::uint64_t step = 0;
    std::int64_t first_sample = 0;
    std::int64_t cut = 0;
    Evaluation counted;
  };
  std::mutex mutex_;
  std::vector<Part> parts_;  // guarded by mutex_
};

// Where each of several ranks has a part of the words: which one, and what they shared of each row
// (CrossEntropyForward), rank after rank.
struct WordsHere {
  std::int64_t index = 0;
  std::span<const float> shared = {};
};

// Scores (rows, classes) against labels: correct and counted; the loss is left 0. Of a part of the
// words: of labels that are here.
[[nodiscard]] Evaluation CountCorrect(const ConstView& scores, const ConstView& labels,
                                      const WordsHere& words = {});

}  // namespace shardwright
