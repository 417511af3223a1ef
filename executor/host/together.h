#pragma once

// What the processes of a run do together beside collectives of the plan. Every function is called
// by all of them, in one order on each channel, which has them all. Who does not come within
// MessagePassing::timeout() ends the run: RunError, in every process, in words such as "rank 0,
// losses of step 3: waited 60000 ms for rank 1".

#include <chrono>
#include <cstdint>
#include <functional>
#include <string>
#include <utility>
#include <vector>

#include "executor/host/message_passing.h"
#include "executor/runtime.h"

namespace shardwright {

// What the others are waited for, as the message says it, and how much longer than usual they may
// take for it. They must answer meanwhile: who is silent twice, a time-out apart, ends the run.
struct Wait {
  std::string what = {};
  std::chrono::milliseconds more{0};
};

// The moment that all processes count their time from. Processes whose clocks agree within a
// millisecond are taken to share one (they run on one machine); others are set right by the
// shortest of some round trips.
[[nodiscard]] std::chrono::steady_clock::time_point AgreeOnStart(MessagePassing& processes);

// What process 0 has in `data`, on all.
void ShareFromFirst(MessagePassing& processes, MessagePassing::Channel channel, const Wait& wait,
                    void* data, std::int64_t bytes);

// Every process's bytes, by rank, on process 0; nothing on the others.
[[nodiscard]] std::vector<std::vector<std::byte>> CollectBytes(MessagePassing& processes,
                                                               MessagePassing::Channel channel,
                                                               const Wait& wait,
                                                               std::vector<std::byte> mine);

// Every process's bytes, by rank, on all.
[[nodiscard]] std::vector<std::vector<std::byte>> ShareBytes(MessagePassing& processes,
                                                             MessagePassing::Channel channel,
                                                             const Wait& wait,
                                                             const std::vector<std::byte>& mine);

// Names and values, or checksums, of what a process was given.
using RankFacts = std::vector<std::pair<std::string, std::string>>;
// Throws InputError, in every process, unless all have the facts of process 0: "rank 2: --seed 7,
// rank 0 has 1; ...", by the first fact that differs. Does nothing without `processes`.
void CheckAlike(MessagePassing* processes, const RankFacts& mine);

// Every rank's report of a step, with equal numbers of losses.
[[nodiscard]] std::vector<RankReport> ShareReports(MessagePassing& processes,
                                                   MessagePassing::Channel channel,
                                                   const Wait& wait, const RankReport& mine);

// Makes a run one that has the rank of this process only, and tells the others its reports.
void JoinRun(MessagePassing& processes, RunOptions& run);

// Runs `work` in every process. When it throws InputError or EnvironmentError in some, all throw
// what the lowest rank of them threw, so that none is left alone. `processes` null: there is one.
void AllOrNone(MessagePassing* processes, MessagePassing::Channel channel, const Wait& wait,
               const std::function<void()>& work);

// MessagePassing::Finish, once all have come to it. `processes` null: there is one.
void FinishTogether(MessagePassing* processes);

}  // namespace shardwright
