#pragma once

// Writes one Body op by op, in host issue order, the way a framework's CPU thread would.

#include <cstdint>
#include <initializer_list>
#include <span>
#include <unordered_map>
#include <vector>

#include "schedule/program.h"

namespace shardwright {

// Appends to `program` (shapes and buffers) and to one of its bodies. Not thread-safe.
// Points given to Alloc and Free stand before the next op that is added, or at the end.
class BodyBuilder {
 public:
  // Keeps references to both.
  BodyBuilder(Program& program, Body& body) : program_(program), body_(body) {}

  [[nodiscard]] BufferId NewBuffer(const Buffer& buffer);
  void Alloc(BufferId buffer, PointKind kind = PointKind::kAlloc);
  BufferId NewAllocated(const Buffer& buffer) {
    const BufferId id = NewBuffer(buffer);
    Alloc(id);
    return id;
  }
  void Free(BufferId buffer, std::uint8_t recorded_streams = 0);

  struct OpArgs {
    ShapeId shape;
    Phase phase = Phase::kForward;
    std::uint32_t subject = kNoSubject;
    std::uint16_t micro_batch = 0;
    std::uint16_t occurrence = 0;
  };
  // Begins an op; edges and accesses added afterwards belong to it.
  OpId Add(const OpArgs& args);
  // Edge to the op last added. A none id is ignored; so is an edge to an op of the same stream,
  // which the queue orders already (kHostWait keeps all of its edges).
  void After(OpId op);
  void AfterSlot(std::uint32_t slot);
  // The access covers the whole buffer, or its first `bytes` bytes (an extent, not an amount: an
  // access of [a, b) has extent b).
  void Use(BufferId buffer, AccessMode mode, Role role, std::uint16_t index = 0);
  void UseFirst(BufferId buffer, Bytes bytes, AccessMode mode, Role role, std::uint16_t index = 0);

  void SetCarry(std::uint32_t slot, OpId op);
  // Marks that a period may begin before the next op; see FindRepeats.
  void MarkLayer() { layer_marks_.push_back(Position()); }
  void MarkMicroBatch() { micro_batch_marks_.push_back(Position()); }
  // Closes the body: end points, repeats, segments. Call once.
  void Finish();

  [[nodiscard]] OpId last() const;

 private:
  [[nodiscard]] std::uint32_t Position() const { return static_cast<std::uint32_t>(body_.size()); }

  Program& program_;
  Body& body_;
  std::uint32_t next_point_begin_ = 0;  // first point that belongs to the next op
  std::vector<std::uint32_t> layer_marks_;
  std::vector<std::uint32_t> micro_batch_marks_;
};

// Returns the shape's id, adding it (with its kernels) if the program has no equal one yet.
// O(1) expected.
class ShapeInterner {
 public:
  explicit ShapeInterner(Program& program) : program_(program) {}
  ShapeId Intern(OpShape shape, std::span<const Kernel> kernels = {});

 private:
  Program& program_;
  std::unordered_multimap<std::uint64_t, std::uint32_t> index_;
};

// Returns the range of Program::pieces that holds `sizes`, adding them if the program has no equal
// list yet; the empty range for fewer than two sizes. O(sizes) expected.
class PieceInterner {
 public:
  explicit PieceInterner(Program& program) : program_(program) {}
  PieceRange Intern(std::span<const Bytes> sizes);

 private:
  Program& program_;
  std::unordered_multimap<std::uint64_t, PieceRange> index_;
};

// Finds runs of at least kLeastRepeatCount equal consecutive stretches between layer marks, inside
// the stretches between micro-batch marks (positions in body.ops, ascending), and runs of those. A
// period is up to kLongestPeriod marks long; from the earliest mark on, the shortest one is taken.
// Two stretches of length p are equal when they have the same shapes; the same sizes, kinds and
// owners of memory points; and the same edge distances, except for far edges (further back than
// 2p), which must reach ever further back, as backward reaches into forward, and for carried ones,
// which may name any slots. The first of equal micro-batches may wait for other ops before itself
// than the second one does, since what is before it differs.
// O(ops * kLongestPeriod).
[[nodiscard]] std::vector<Repeat> FindRepeats(const Program& program, const Body& body,
                                              std::span<const std::uint32_t> micro_batch_marks,
                                              std::span<const std::uint32_t> layer_marks);
inline constexpr std::uint32_t kLongestPeriod = 8;
inline constexpr std::uint32_t kLeastRepeatCount = 3;

// Whether op `i` and its copy at `i + length` wait for the same. Edges that lead to before `free`
// and, of the copy, to before `free + length` may do so at any distance.
[[nodiscard]] bool SameEdges(const Body& body, std::uint32_t i, std::uint32_t length,
                             std::uint32_t free);

// Cuts a body at its marks and, where micro-batches part, before the last op that all of them share
// and the last op of each, but not inside the copies of innermost `repeats`, and finds out which
// segments are alike. The last micro-batch mark is the end of the last micro-batch. Carried edges
// count as alike: all lead to before the body. O(ops + edges) expected.
[[nodiscard]] std::vector<Segment> FindSegments(const Body& body, std::span<const Repeat> repeats,
                                                std::span<const std::uint32_t> micro_batch_marks,
                                                std::span<const std::uint32_t> layer_marks);

}  // namespace shardwright
