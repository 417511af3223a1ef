#pragma once

// A plan that only runs forward, over a whole data set (FSDP inference), on the device that the
// user chose.

#include <cstdint>

#include "cli/run_session.h"
#include "executor/data/dataset.h"
#include "executor/data/sampler.h"
#include "executor/evaluation.h"

namespace shardwright {

class DatasetEvaluator {
 public:
  // `input` holds a forward-only job and its program. Parameters have first values until Resume or
  // CopyParameters gives the runtime others. Keeps references. Throws as RunSession does. Ranks in
  // processes (`host.processes`): all construct it at once, and Run gives all the same.
  DatasetEvaluator(const SessionInput& input, const HostOptions& host, RunPlace place,
                   const Dataset& data, std::int64_t global_batch);

  [[nodiscard]] Runtime& runtime() { return session_.runtime(); }
  [[nodiscard]] RunSession& session() { return session_; }
  // Every sample once, in the data's order; the last batch is filled with empty samples, which
  // count for nothing.
  [[nodiscard]] Evaluation Run();

 private:
  [[nodiscard]] RunOptions Options();

  const Dataset& data_;
  const Sampler sampler_;
  MessagePassing* const processes_;
  EvaluationCounter counter_;
  RunSession session_;  // last: its ranks use the counter
};

}  // namespace shardwright
