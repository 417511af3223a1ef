// Brings optimizer states from the host to the device piece by piece, and back.
//
// Example: two units of two pieces of 1 MiB each, in_flight 2. `A0` is piece 0 of unit A.
//
//   h2d      A0 in | A1 in | wait A0 out | B0 in | wait A1 out | B1 in
//   compute          A0      A1                    B0            B1
//   d2h                A0 out   A1 out               B0 out        B1 out
//
// At most 2 MiB of states are on the device at any time, however large the model is. A piece's
// device buffer is freed only when its copy back has ended: freed earlier, the next piece's copy
// could overwrite states that have not left yet. With in_flight 1 nothing overlaps.

#include "schedule/lower/moment_staging.h"

namespace shardwright {

void MomentStaging::FollowCompute() {
  e_.AddWait(Stream::kH2d, {e_.LastCompute()}, Phase::kBackward, kNoSubject);
}

MomentStaging::Piece MomentStaging::Fetch(UnitId unit, BufferId host) {
  if (is_first_) {
    e_.AddSlotWait(Stream::kH2d, slot_, Phase::kOptimizer, unit.value);
    is_first_ = false;
  }
  while (leaving_.size() >= in_flight_) {
    e_.AddWait(Stream::kH2d, {leaving_.front().copied}, Phase::kOptimizer, unit.value);
    e_.body->Free(leaving_.front().buffer);
    leaving_.pop_front();
  }
  const Bytes size = e_.program.buffers[host.value].size;
  Piece piece{host, e_.Alloc(size, Category::kOptimizerState, Stream::kH2d), OpId()};
  piece.arrived = e_.AddTransfer(OpCode::kCopyH2d, Stream::kH2d, {Phase::kOptimizer, unit.value},
                                 size, host, piece.device);
  return piece;
}

void MomentStaging::Return(UnitId unit, const Piece& piece, OpId updated) {
  const OpId copied =
      e_.AddTransfer(OpCode::kCopyD2h, Stream::kD2h, {Phase::kOptimizer, unit.value},
                     e_.program.buffers[piece.host.value].size, piece.device, piece.host);
  e_.After(updated);
  leaving_.push_back({piece.device, copied});
}

void MomentStaging::EndStep() {
  for (const Leaving& last : leaving_) {
    e_.body->Free(last.buffer, StreamBit(Stream::kD2h));
    e_.body->SetCarry(slot_, last.copied);
  }
  leaving_.clear();
  is_first_ = true;
}

}  // namespace shardwright
