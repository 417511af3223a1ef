#pragma once

// The processes of a run: those that mpirun, torchrun or srun started, or those that `shardwright
// run --device cuda` starts itself, one per GPU of this machine.

#include <chrono>
#include <cstdint>
#include <functional>
#include <memory>

#include "cli/run_session.h"
#include "executor/host/launch.h"
#include "executor/host/message_passing.h"
#include "executor/host/together.h"
#include "topologies/cluster.h"

namespace shardwright {

// The processes of which this is one; on its own when nobody started several.
class RunProcesses {
 public:
  // `facts`: what this process was given, asked for where there are others. Throws EnvironmentError
  // when they do not meet within `timeout`, InputError when they were not given the same,
  // UsageError when the launcher started another number of processes than the plan has ranks. Warns
  // where machines do not have the ranks that the plan's have.
  RunProcesses(const Launch& launch, const Cluster& cluster, std::chrono::milliseconds timeout,
               const std::function<RankFacts()>& facts);
  ~RunProcesses();
  RunProcesses(const RunProcesses&) = delete;
  RunProcesses& operator=(const RunProcesses&) = delete;

  [[nodiscard]] MessagePassing* get() const { return processes_; }  // null: no others
  [[nodiscard]] bool is_first() const { return processes_ == nullptr || processes_->rank() == 0; }

 private:
  std::unique_ptr<MessagePassing> owned_;
  MessagePassing* processes_ = nullptr;
};

// All come to it behind the set-up; from then on they wait for each other for `timeout`.
void EndSetUp(MessagePassing* processes, std::chrono::milliseconds timeout);

// Threads that share the compute of each of this machine's ranks on the host: its cores by turns.
[[nodiscard]] std::int64_t HostThreads(const Launch& launch, std::int64_t ranks);

// A rank that hangs cannot be joined: some seconds after a failure the process ends without it.
// `processes` (may be null) are told why; what this one's ranks are in on GPUs goes to stderr.
void EndProcessOnFault(RunSession& session, MessagePassing* processes);

// Runs this program's command line again in `ranks` processes, as torchrun would on one machine,
// and waits for them. They meet on 127.0.0.1, by a key of their own in their environment. When one
// fails the others are given a few seconds to end. Returns the exit code of the first that failed,
// or 0.
[[nodiscard]] int RunLocalProcesses(std::int64_t ranks);

}  // namespace shardwright
