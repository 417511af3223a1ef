#include "cli/run_loop.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <cstdio>
#include <map>

#include "core/json.h"

namespace shardwright {
namespace {

// The next step at which the loop has something to do between two steps.
std::int64_t NextStop(const LoopOptions& options, const Sampler& sampler, std::int64_t step,
                      std::int64_t total) {
  std::int64_t stop = total;
  for (const std::int64_t every : {options.every, options.eval_every}) {
    if (every > 0) {
      stop = std::min(stop, (step / every + 1) * every);
    }
  }
  if (options.epochs > 0) {
    stop = std::min(stop, EndOfEpoch(sampler, EpochOf(sampler, step)));
  }
  return stop;
}

// Losses of an epoch's samples.
struct EpochSum {
  double loss = 0.0;
  std::int64_t samples = 0;
};

class Loop {
 public:
  Loop(const LoopOptions& options, const LoopParts& parts) : options_(options), parts_(parts) {}

  LoopReport Run() {
    const std::int64_t total = TotalSteps(options_, parts_.sampler);
    Runtime& runtime = parts_.runtime;
    while (runtime.next_step() < total && report_.end == LoopEnd::kDone) {
      const std::int64_t first = runtime.next_step();
      const std::int64_t stop = NextStop(options_, parts_.sampler, first, total);
      const bool is_asked = runtime.RunSteps(stop - first) && runtime.next_step() < total;
      TakeSteps();
      if (report_.end == LoopEnd::kDone) {
        BetweenSteps(first, total, is_asked);
      }
    }
    if (parts_.evaluator != nullptr && options_.epochs == 0 && report_.end == LoopEnd::kDone &&
        (report_.tests.empty() || report_.tests.back().step < runtime.next_step())) {
      Test();
    }
    if (parts_.checkpoints != nullptr) {
      parts_.checkpoints->Finish();
    }
    return std::move(report_);
  }

 private:
  void End(LoopEnd end, std::int64_t step) {
    report_.end = end;
    report_.end_step = step;
  }

  void TakeSteps() {
    for (const StepReport& step : parts_.runtime.TakeReports()) {
      if (options_.epochs > 0) {
        AddToEpochs(step);
      }
      if (options_.stops_at_nan && !std::isfinite(step.loss) && report_.end == LoopEnd::kDone) {
        End(LoopEnd::kNan, step.step);
      }
      report_.steps.push_back(step);
    }
  }

  // After steps `first` up to runtime.next_step(), which are the last ones if somebody asked.
  void BetweenSteps(std::int64_t first, std::int64_t total, bool is_asked) {
    const std::int64_t done = parts_.runtime.next_step();
    if (is_asked) {
      End(LoopEnd::kAsked, done);
    }
    for (std::int64_t epoch = EpochOf(parts_.sampler, first);
         epoch < options_.epochs && EndOfEpoch(parts_.sampler, epoch) <= done; ++epoch) {
      EndEpoch(epoch);
    }
    const auto is_due = [&](std::int64_t every) { return every > 0 && done % every == 0; };
    if (parts_.evaluator != nullptr && is_due(options_.eval_every) && !is_asked) {
      Test();
    }
    if (parts_.checkpoints == nullptr || !(done == total || is_asked || is_due(options_.every))) {
      return;
    }
    if (options_.stops_at_nan && !parts_.checkpoints->IsFinite(parts_.runtime)) {
      End(LoopEnd::kNanState, done);
      return;
    }
    parts_.checkpoints->Save(parts_.runtime);
  }

  // A step's loss is shared out among the epochs that its samples are of.
  void AddToEpochs(const StepReport& step) {
    const std::int64_t first = EpochOf(parts_.sampler, step.step);
    std::int64_t of_step = 0;
    std::int64_t epoch = first;
    for (; SamplesIn(parts_.sampler, step.step, epoch) > 0; ++epoch) {
      of_step += SamplesIn(parts_.sampler, step.step, epoch);
    }
    const double per_sample =
        options_.sum_loss
            ? step.loss * static_cast<double>(parts_.micro_batches) / static_cast<double>(of_step)
            : step.loss;
    for (epoch = first; SamplesIn(parts_.sampler, step.step, epoch) > 0; ++epoch) {
      const std::int64_t samples = SamplesIn(parts_.sampler, step.step, epoch);
      sums_[epoch].loss += per_sample * static_cast<double>(samples);
      sums_[epoch].samples += samples;
    }
  }

  [[nodiscard]] Evaluation Evaluate() {
    CopyParameters(parts_.runtime, parts_.evaluator->runtime());
    return parts_.evaluator->Run();
  }

  void Test() {
    const TestReport test{parts_.runtime.next_step(), Evaluate()};
    Print("Step " + std::to_string(test.step) + "\n" + TestLine(test.test) + "\n\n");
    report_.tests.push_back(test);
  }

  void EndEpoch(std::int64_t epoch) {
    const EpochSum sum = sums_[epoch];
    sums_.erase(epoch);
    EpochReport end{.epoch = epoch, .train_loss = sum.loss / static_cast<double>(sum.samples)};
    std::array<char, 80> line{};
    std::snprintf(line.data(), line.size(), "Train Epoch: %lld \tLoss: %.6f\n",
                  static_cast<long long>(epoch) + 1, end.train_loss);
    std::string text = line.data();
    if (parts_.evaluator != nullptr) {
      end.has_test = true;
      end.test = Evaluate();
      text += TestLine(end.test) + "\n\n";
    }
    Print(text);
    report_.epochs.push_back(end);
  }

  void Print(const std::string& text) const {
    if (options_.prints_tests) {
      WriteFileAtomically("-", text);
    }
  }

  const LoopOptions& options_;
  const LoopParts& parts_;
  LoopReport report_;
  std::map<std::int64_t, EpochSum> sums_;  // of epochs that have not ended
};

}  // namespace

std::int64_t TotalSteps(const LoopOptions& options, const Sampler& sampler) {
  return options.epochs > 0 ? EndOfEpoch(sampler, options.epochs - 1) : options.steps;
}

LoopReport RunLoop(const LoopOptions& options, const LoopParts& parts) {
  return Loop(options, parts).Run();
}

std::string TestLine(const Evaluation& test) {
  std::array<char, 160> line{};
  const double percent = test.counted == 0 ? 0.0
                                           : 100.0 * static_cast<double>(test.correct) /
                                                 static_cast<double>(test.counted);
  std::snprintf(line.data(), line.size(),
                "Test set: Average loss: %.4f, Accuracy: %lld/%lld (%.2f%%)", test.MeanLoss(),
                static_cast<long long>(test.correct), static_cast<long long>(test.counted),
                percent);
  return line.data();
}

}  // namespace shardwright
