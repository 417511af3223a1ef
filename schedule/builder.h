#pragma once

// Writes one Body op by op, in host issue order, the way a framework's CPU thread would.

#include <cstdint>
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
  void Free(BufferId buffer, std::uint16_t recorded_streams = 0);

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
  // Marks that a layer, a micro-batch may begin before the next op.
  void MarkLayer() { body_.layer_marks.push_back(Position()); }
  void MarkMicroBatch() { body_.micro_batch_marks.push_back(Position()); }
  // Closes the body: what stands behind the last op are its end points. Call once.
  void Finish();

  [[nodiscard]] OpId last() const;

 private:
  [[nodiscard]] std::uint32_t Position() const { return static_cast<std::uint32_t>(body_.size()); }

  Program& program_;
  Body& body_;
  std::uint32_t next_point_begin_ = 0;  // first point that belongs to the next op
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

// How often each key was met. One block of memory: programs have an op per key, nearly.
class KeyCounter {
 public:
  // Before this time. O(1) expected.
  std::uint32_t Next(std::uint64_t key);
  void Clear();

 private:
  struct Slot {
    std::uint64_t key = 0;
    std::uint32_t count = 0;  // 0: free
  };
  [[nodiscard]] Slot& Find(std::uint64_t key);

  std::vector<Slot> slots_;  // a power of two of them, at most half in use
  std::size_t used_ = 0;
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

}  // namespace shardwright
