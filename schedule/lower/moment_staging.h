#pragma once

// Optimizer states that live on the host and visit the device, piece by piece, while their unit is
// updated there: one copy stream brings the next piece while another takes the last one back.

#include <cstdint>
#include <deque>

#include "schedule/lower/emitter.h"

namespace shardwright {

// Per piece: Fetch, the update, Return. `leaving_` holds the pieces whose copy back was queued,
// oldest first. The carry slot hands the last copy of a step to the next step: its first Fetch
// waits for it, so that two steps never have pieces in flight at the same time.
class MomentStaging {
 public:
  // At most `in_flight` pieces are on the device. `slot` is a carry slot of its own.
  MomentStaging(Emitter& emitter, std::int64_t in_flight, std::uint32_t slot)
      : e_(emitter), in_flight_(static_cast<std::size_t>(in_flight)), slot_(slot) {}

  struct Piece {
    BufferId host, device;
    OpId arrived;
  };
  // The next piece may get bytes of activations that came back on the same stream: it follows what
  // compute has read of them by now.
  void FollowCompute();
  // Brings `host` to the device as soon as a piece before it has left.
  [[nodiscard]] Piece Fetch(UnitId unit, BufferId host);
  // Takes it back once `updated` is over.
  void Return(UnitId unit, const Piece& piece, OpId updated);
  // After the last update of the step; the next step's first piece waits for the last one to leave.
  void EndStep();

 private:
  struct Leaving {
    BufferId buffer;
    OpId copied;
  };

  Emitter& e_;
  const std::size_t in_flight_;
  const std::uint32_t slot_;
  std::deque<Leaving> leaving_;
  bool is_first_ = true;  // of the step
};

}  // namespace shardwright
