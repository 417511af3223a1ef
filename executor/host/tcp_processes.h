#pragma once

// MessagePassing by TCP, for processes that torchrun, srun or this program started: every process
// has one connection to process 0, which passes messages on. Made for what is small beside the
// gradients (the id of NCCL's communicators, losses, traces); those of the host device may travel
// this way, too.

#include <chrono>
#include <memory>

#include "executor/host/launch.h"
#include "executor/host/message_passing.h"

namespace shardwright {

// Meets the others. Throws RunError, in words that name address and missing ranks, when they do not
// come in time, do not prove the run's key or were started for another job; EnvironmentError when
// rank 0 cannot listen. The connections are not encrypted: they belong into a cluster's own
// network.
[[nodiscard]] std::unique_ptr<MessagePassing> MeetByTcp(const Launch& launch,
                                                        std::chrono::milliseconds timeout);

}  // namespace shardwright
