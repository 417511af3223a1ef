#include "cli/evaluator.h"

#include <span>

#include "executor/data/batch.h"
#include "executor/host/together.h"

namespace shardwright {
namespace {

RunPlace Counting(RunPlace place, EvaluationCounter& counter) {
  place.counter = &counter;
  return place;
}

}  // namespace

DatasetEvaluator::DatasetEvaluator(const SessionInput& input, const HostOptions& host,
                                   RunPlace place, const Dataset& data, std::int64_t global_batch)
    : data_(data),
      sampler_{data.size(), global_batch, 0, false, EpochTail::kPad},
      processes_(host.processes),
      session_({&input, 1}, host, Options(), Counting(place, counter_)) {
  session_.runtime().Initialize();
}

RunOptions DatasetEvaluator::Options() {
  RunOptions run;
  run.inputs = [this](const BatchKey& key, std::span<const View> views) {
    const BatchRange range = {key.step, key.first_sample, key.count, key.cut};
    WriteBatch(*key.model, data_, sampler_, range, views);
  };
  if (processes_ != nullptr) {
    JoinRun(*processes_, run);
  }
  return run;
}

Evaluation DatasetEvaluator::Run() {
  session_.runtime().set_next_step(0);
  session_.runtime().RunSteps(FirstStepOf(sampler_, 1));
  (void)session_.runtime().TakeReports();
  return counter_.Take(processes_);
}

}  // namespace shardwright
