#pragma once

// Collectives between ranks in processes of their own: MPI carries the bytes, sums are made here,
// so that they have the bits of ranks that are threads.

#include <chrono>
#include <cstdint>
#include <memory>
#include <set>
#include <span>
#include <string>
#include <vector>

#include "executor/host/communicator.h"
#include "executor/host/message_passing.h"

namespace shardwright {

// This process's end of one group. Its buffers lie outside the rank's arena.
class ProcessCommunicator : public Communicator {
 public:
  // `channel` holds the group's members; otherwise as ThreadCommunicator.
  ProcessCommunicator(MessagePassing& processes, MessagePassing::Channel channel,
                      const GroupRanks& ranks, std::chrono::milliseconds timeout,
                      const RunClock& clock, FaultBoard& faults)
      : processes_(processes),
        channel_(channel),
        ranks_(ranks),
        timeout_(timeout),
        clock_(clock),
        faults_(faults) {}

  Times Run(std::int64_t member, const CollectiveCall& call, const std::string& name,
            SimTime arrival, SimTime least_duration) override;

 private:
  // What every member tells every other one when it arrives.
  struct Header {
    std::int64_t arrival = 0;  // ps
    std::int64_t elements = 0;
    std::int32_t code = 0;
    std::int32_t dtype = 0;
  };
  using Pending = std::unique_ptr<MessagePassing::Pending>;

  // Waits for all members; returns when the last one arrived.
  SimTime Meet(std::int64_t member, const CollectiveCall& call, const std::string& name,
               SimTime arrival);
  // Waits until all are over; `ranks[i]` are those that pending[i] may wait for.
  void Await(std::vector<Pending>& pending, const std::vector<std::vector<std::int64_t>>& ranks,
             std::int64_t member, const std::string& name);
  // Ends the run: these ranks, or one of them, did not come.
  void GiveUp(std::int64_t member, const std::string& name, const std::set<std::int64_t>& missing,
              bool is_one_of);
  void AwaitAll(Pending pending, std::int64_t member, const std::string& name);
  // What is on its way at a time, in bytes of one part: a 128th of all parts, or 32 KiB of them if
  // that is more. So little lies outside the arena, here and below. A multiple of `width`.
  [[nodiscard]] static std::int64_t PieceBytes(std::span<const MessagePart> parts,
                                               std::int64_t width);
  // `bytes` of every part from its byte `begin` on, or what is left of it.
  [[nodiscard]] static std::vector<MessagePart> PieceOf(std::span<const MessagePart> parts,
                                                        std::int64_t begin, std::int64_t bytes);
  void Gather(std::byte* data, std::span<const MessagePart> parts, std::int64_t width,
              std::int64_t member, const std::string& name);
  // Between each two members piece by piece, so that little is on its way at a time, too.
  void AllToAll(std::int64_t member, const CollectiveCall& call, const std::string& name);
  // All-reduce and reduce-scatter: everybody's elements of this member's part come into scratch_.
  void Reduce(std::int64_t member, const CollectiveCall& call, const std::string& name);
  [[nodiscard]] std::int64_t RankOf(std::int64_t member) const {
    return ranks_.first + member * ranks_.stride;
  }

  MessagePassing& processes_;
  const MessagePassing::Channel channel_;
  const GroupRanks ranks_;
  const std::chrono::milliseconds timeout_;
  const RunClock& clock_;
  FaultBoard& faults_;
  // Outlive an exception, since MPI may still fill them.
  std::vector<std::byte> scratch_;
  Header mine_;
  std::vector<Header> headers_;
};

// Between threads without `processes`; otherwise all of the group's processes make it at once.
[[nodiscard]] std::unique_ptr<Communicator> NewCommunicator(MessagePassing* processes,
                                                            const GroupRanks& ranks,
                                                            std::chrono::milliseconds timeout,
                                                            const RunClock& clock,
                                                            FaultBoard& faults);

}  // namespace shardwright
