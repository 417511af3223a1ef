#include "cli/run_loop.h"

#include <algorithm>
#include <array>
#include <cstdio>

#include "core/json.h"

namespace shardwright {
namespace {

// The next step at which the loop has something to do between two steps.
std::int64_t NextStop(const LoopOptions& options, const Sampler& sampler, std::int64_t step,
                      std::int64_t total) {
  std::int64_t stop = total;
  if (options.every > 0) {
    stop = std::min(stop, (step / options.every + 1) * options.every);
  }
  if (options.epochs > 0) {
    std::int64_t epoch = 1;
    while (FirstStepOf(sampler, epoch) <= step) {
      ++epoch;
    }
    stop = std::min(stop, FirstStepOf(sampler, epoch));
  }
  return stop;
}

// Mean loss per sample of an epoch's steps.
double EpochLoss(const LoopOptions& options, const Sampler& sampler, double sum, std::int64_t steps,
                 std::int64_t micro_batches) {
  return options.sum_loss
             ? sum * static_cast<double>(micro_batches) / static_cast<double>(sampler.dataset_size)
             : sum / static_cast<double>(steps);
}

class Loop {
 public:
  Loop(const LoopOptions& options, const LoopParts& parts) : options_(options), parts_(parts) {}

  LoopReport Run(std::int64_t micro_batches) {
    const std::int64_t total = TotalSteps(options_, parts_.sampler);
    Runtime& runtime = parts_.runtime;
    while (runtime.next_step() < total) {
      const std::int64_t stop = NextStop(options_, parts_.sampler, runtime.next_step(), total);
      runtime.RunSteps(stop - runtime.next_step());
      for (const StepReport& step : runtime.TakeReports()) {
        loss_sum_ += step.loss;
        ++loss_steps_;
        report_.steps.push_back(step);
      }
      if (options_.epochs > 0 &&
          EpochOf(parts_.sampler, stop - 1) != EpochOf(parts_.sampler, stop)) {
        EndEpoch(EpochOf(parts_.sampler, stop - 1), micro_batches);
      }
      const bool is_due = stop == total || (options_.every > 0 && stop % options_.every == 0);
      if (parts_.checkpoints != nullptr && is_due) {
        parts_.checkpoints->Save(runtime);
      }
    }
    if (parts_.checkpoints != nullptr) {
      parts_.checkpoints->Finish();
    }
    return std::move(report_);
  }

 private:
  void EndEpoch(std::int64_t epoch, std::int64_t micro_batches) {
    EpochReport end{
        .epoch = epoch,
        .train_loss = EpochLoss(options_, parts_.sampler, loss_sum_, loss_steps_, micro_batches)};
    loss_sum_ = 0.0;
    loss_steps_ = 0;
    std::array<char, 80> line{};
    std::snprintf(line.data(), line.size(), "Train Epoch: %lld \tLoss: %.6f\n",
                  static_cast<long long>(epoch) + 1, end.train_loss);
    std::string text = line.data();
    if (parts_.evaluator != nullptr) {
      CopyParameters(parts_.runtime, parts_.model, parts_.evaluator->runtime());
      end.has_test = true;
      end.test = parts_.evaluator->Run();
      text += TestLine(end.test) + "\n\n";
    }
    if (options_.prints_epochs) {
      WriteFileAtomically("-", text);
    }
    report_.epochs.push_back(end);
  }

  const LoopOptions& options_;
  const LoopParts& parts_;
  LoopReport report_;
  double loss_sum_ = 0.0;  // of the epoch at hand
  std::int64_t loss_steps_ = 0;
};

}  // namespace

std::int64_t TotalSteps(const LoopOptions& options, const Sampler& sampler) {
  return options.epochs > 0 ? FirstStepOf(sampler, options.epochs) : options.steps;
}

LoopReport RunLoop(const LoopOptions& options, const LoopParts& parts) {
  return Loop(options, parts).Run(parts.micro_batches);
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
