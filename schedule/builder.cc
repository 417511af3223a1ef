#include "schedule/builder.h"

#include <algorithm>

#include "core/portable.h"
#include "core/threads.h"

namespace shardwright {
namespace {

// Mixes a value into a 64-bit hash (the finaliser of splitmix64, Steele et al. 2014).
std::uint64_t Mix(std::uint64_t hash, std::uint64_t value) {
  std::uint64_t x = hash + 0x9e3779b97f4a7c15ULL + value;
  x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9ULL;
  x = (x ^ (x >> 27)) * 0x94d049bb133111ebULL;
  return x ^ (x >> 31);
}

// The same for many values, which are compared afterwards: cheaper and weaker.
std::uint64_t Fold(std::uint64_t hash, std::uint64_t value) {
  const std::uint64_t x = (hash ^ value) * 0x9e3779b97f4a7c15ULL;
  return x ^ (x >> 32);
}

std::uint64_t HashOf(const OpShape& s, std::span<const Kernel> kernels) {
  std::uint64_t h = Fold(static_cast<std::uint64_t>(s.code), static_cast<std::uint64_t>(s.stream));
  h = Fold(h, static_cast<std::uint64_t>(s.dtype));
  h = Fold(h, static_cast<std::uint64_t>(s.issue));
  h = Fold(h, BitCast<std::uint64_t>(s.divisor));
  h = Fold(h, s.group.value);
  h = Fold(h, static_cast<std::uint64_t>(s.bytes.value));
  for (const Kernel& k : kernels) {
    h = Fold(h, static_cast<std::uint64_t>(k.kind));
    h = Fold(h, static_cast<std::uint64_t>(k.m));
    h = Fold(h, static_cast<std::uint64_t>(k.n));
    h = Fold(h, static_cast<std::uint64_t>(k.k));
    h = Fold(h, static_cast<std::uint64_t>(k.read.value));
    h = Fold(h, static_cast<std::uint64_t>(k.written.value));
  }
  return h;
}

}  // namespace

BufferId BodyBuilder::NewBuffer(const Buffer& buffer) {
  program_.buffers.push_back(buffer);
  return BufferId(program_.buffers.size() - 1);
}

void BodyBuilder::Alloc(BufferId buffer, PointKind kind) {
  body_.points.push_back({buffer, kind, 0});
}

void BodyBuilder::Free(BufferId buffer, std::uint16_t recorded_streams) {
  body_.points.push_back({buffer, PointKind::kFree, recorded_streams});
}

OpId BodyBuilder::Add(const OpArgs& args) {
  ThrowIfStopped();
  Op op;
  op.shape = args.shape;
  op.edge_begin = static_cast<std::uint32_t>(body_.edges.size());
  op.access_begin = static_cast<std::uint32_t>(body_.accesses.size());
  op.point_begin = next_point_begin_;
  op.subject = args.subject;
  op.micro_batch = args.micro_batch;
  op.phase = args.phase;
  op.occurrence = args.occurrence;
  body_.ops.push_back(op);
  next_point_begin_ = static_cast<std::uint32_t>(body_.points.size());
  return last();
}

OpId BodyBuilder::last() const {
  return OpId(body_.ops.size() - 1);
}

void BodyBuilder::After(OpId op) {
  if (!op.valid()) {
    return;
  }
  const OpShape& mine = program_.ShapeOf(body_.ops.back());
  const OpShape& other = program_.ShapeOf(body_.ops[op.value]);
  if (mine.stream == other.stream && !InfoOf(mine.code).runs_on_host) {
    return;
  }
  const Edge edge = Edge::FromOp(op);
  const auto begin = body_.edges.begin() + body_.ops.back().edge_begin;
  if (std::find(begin, body_.edges.end(), edge) == body_.edges.end()) {
    body_.edges.push_back(edge);
  }
}

void BodyBuilder::AfterSlot(std::uint32_t slot) {
  body_.edges.push_back(Edge::FromSlot(slot));
  program_.carry_slot_count = std::max(program_.carry_slot_count, slot + 1);
}

void BodyBuilder::Use(BufferId buffer, AccessMode mode, Role role, std::uint16_t index) {
  UseFirst(buffer, program_.buffers[buffer.value].size, mode, role, index);
}

void BodyBuilder::UseFirst(BufferId buffer, Bytes bytes, AccessMode mode, Role role,
                           std::uint16_t index) {
  body_.accesses.push_back({buffer, mode, role, index, bytes});
}

void BodyBuilder::SetCarry(std::uint32_t slot, OpId op) {
  program_.carry_slot_count = std::max(program_.carry_slot_count, slot + 1);
  if (body_.carries.size() <= slot) {
    body_.carries.resize(slot + 1);
  }
  body_.carries[slot] = op;
}

void BodyBuilder::Finish() {
  body_.end_point_begin = next_point_begin_;
}

ShapeId ShapeInterner::Intern(OpShape shape, std::span<const Kernel> kernels) {
  const std::uint64_t hash = HashOf(shape, kernels);
  const auto [begin, end] = index_.equal_range(hash);
  for (auto it = begin; it != end; ++it) {
    const OpShape& s = program_.shapes[it->second];
    const auto theirs = program_.KernelsOf(s);
    if (s.code == shape.code && s.stream == shape.stream && s.dtype == shape.dtype &&
        s.group == shape.group && s.bytes == shape.bytes && s.issue == shape.issue &&
        s.divisor == shape.divisor &&
        std::equal(theirs.begin(), theirs.end(), kernels.begin(), kernels.end())) {
      return ShapeId(it->second);
    }
  }
  shape.kernel_begin = static_cast<std::uint32_t>(program_.kernels.size());
  shape.kernel_count = static_cast<std::uint32_t>(kernels.size());
  program_.kernels.insert(program_.kernels.end(), kernels.begin(), kernels.end());
  program_.shapes.push_back(shape);
  const ShapeId id(program_.shapes.size() - 1);
  index_.emplace(hash, id.value);
  return id;
}

KeyCounter::Slot& KeyCounter::Find(std::uint64_t key) {
  const std::size_t mask = slots_.size() - 1;
  std::size_t at = static_cast<std::size_t>(Mix(0, key)) & mask;
  while (slots_[at].count != 0 && slots_[at].key != key) {
    at = (at + 1) & mask;
  }
  return slots_[at];
}

std::uint32_t KeyCounter::Next(std::uint64_t key) {
  constexpr std::size_t kFirstSlots = 1024;
  if (2 * used_ >= slots_.size()) {
    std::vector<Slot> fewer(std::max(kFirstSlots, 2 * slots_.size()));
    fewer.swap(slots_);
    for (const Slot& slot : fewer) {
      if (slot.count != 0) {
        Find(slot.key) = slot;
      }
    }
  }
  Slot& slot = Find(key);
  used_ += slot.count == 0 ? 1 : 0;
  slot.key = key;
  return slot.count++;
}

void KeyCounter::Clear() {
  std::fill(slots_.begin(), slots_.end(), Slot());
  used_ = 0;
}

PieceRange PieceInterner::Intern(std::span<const Bytes> sizes) {
  if (sizes.size() < 2) {
    return {};
  }
  std::uint64_t hash = sizes.size();
  for (const Bytes size : sizes) {
    hash = Mix(hash, static_cast<std::uint64_t>(size.value));
  }
  const auto [begin, end] = index_.equal_range(hash);
  for (auto it = begin; it != end; ++it) {
    const auto known =
        std::span<const Bytes>(program_.pieces).subspan(it->second.begin, it->second.count);
    if (std::equal(known.begin(), known.end(), sizes.begin(), sizes.end())) {
      return it->second;
    }
  }
  const PieceRange range{static_cast<std::uint32_t>(program_.pieces.size()),
                         static_cast<std::uint32_t>(sizes.size())};
  program_.pieces.insert(program_.pieces.end(), sizes.begin(), sizes.end());
  index_.emplace(hash, range);
  return range;
}

}  // namespace shardwright
