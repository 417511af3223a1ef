#include "schedule/internal/check_structure.h"

#include <cstddef>
#include <cstdint>
#include <map>
#include <string>
#include <utility>

#include "core/ranges.h"
#include "core/threads.h"
#include "schedule/happens_before.h"
#include "schedule/internal/locate.h"
#include "schedule/print.h"

namespace shardwright {
namespace {

class StructureChecker {
 public:
  StructureChecker(const Program& program, std::vector<Finding>& findings)
      : program_(program), findings_(findings) {}

  void Run() {
    CheckTables();
    for (const NamedBody& named : BodiesOf(program_)) {
      body_ = &*named.body;
      name_ = named.name;
      CheckBody();
    }
    if (findings_.empty()) {
      CheckSlots();
    }
  }

 private:
  void Report(std::string second, std::string text) {
    if (findings_.size() < kMaxFindings) {
      findings_.push_back({1, kNoOp, std::move(second), "", std::move(text)});
    }
  }
  // Names by number: with ids out of range a proper name may not exist.
  [[nodiscard]] std::string Raw(std::size_t op) const {
    return std::string(name_) + ": op " + std::to_string(op);
  }
  void Expect(bool condition, std::size_t op, const char* what) {
    if (!condition) {
      Report(Raw(op), Raw(op) + ": " + what);
    }
  }

  // The first slice of a flat tensor says who owns it.
  [[nodiscard]] bool FlatIsUniform(const Buffer& buffer) {
    if (buffer.flat == 0) {
      return true;
    }
    const auto [owner, is_new] = flat_owners_.try_emplace(buffer.flat, buffer.owner);
    return buffer.pieces.count == 0 && !buffer.on_host && owner->second == buffer.owner;
  }

  [[nodiscard]] bool HoldsKnown(const Buffer& buffer) const {
    switch (buffer.holds) {
      case Holds::kOther:
      case Holds::kMixed:
      case Holds::kRows:
        return true;
      case Holds::kTensors:
        return buffer.subject < program_.model_op_names.size();
      case Holds::kUnit:
      case Holds::kShards:
      case Holds::kShard:
      case Holds::kSlice:
        return buffer.subject < program_.units.size();
      case Holds::kUses:
        return buffer.dtype == DType::kInt32 && buffer.subject == kNoSubject &&
               buffer.size.value % SizeOf(DType::kInt32) == 0;
    }
    return false;
  }

  // Counts are summed as counts, and nothing else is.
  [[nodiscard]] bool SumsWhatItSays(OpId op, const OpShape& shape) const {
    if (!InfoOf(shape.code).is_collective) {
      return true;
    }
    const auto accesses = body_->AccessesOf(op);
    return AllOf(accesses, [&](const Access& access) {
      const bool is_count = access.buffer.value < program_.buffers.size() &&
                            program_.buffers[access.buffer.value].holds == Holds::kUses;
      return is_count == (shape.dtype == DType::kInt32);
    });
  }

  [[nodiscard]] bool PiecesAddUp(const Buffer& buffer) const {
    const PieceRange& range = buffer.pieces;
    if (range.count == 0) {
      return true;
    }
    if (range.begin > program_.pieces.size() ||
        range.count > program_.pieces.size() - range.begin) {
      return false;
    }
    std::int64_t missing = buffer.size.value;
    for (const Bytes piece : program_.PiecesOf(buffer)) {
      if (piece.value < 0) {
        return false;
      }
      missing -= std::min(missing, piece.value);
    }
    return missing == 0;
  }

  void CheckTables() {
    name_ = "program";
    for (std::size_t i = 0; i < program_.shapes.size(); ++i) {
      const OpShape& s = program_.shapes[i];
      const bool is_known = static_cast<std::size_t>(s.code) < kOpCodeCount &&
                            static_cast<std::size_t>(s.stream) < kStreamCount;
      const bool kernels_fit = s.kernel_begin <= program_.kernels.size() &&
                               s.kernel_count <= program_.kernels.size() - s.kernel_begin;
      const bool has_group = s.group.value < program_.groups.size();
      const bool is_legal =
          is_known && kernels_fit && s.bytes.value >= 0 && s.divisor > 0 &&
          InfoOf(s.code).runs_on_host == (s.stream == Stream::kHost) &&
          (InfoOf(s.code).is_collective ? has_group : has_group || !s.group.valid());
      if (!is_legal) {
        Report(kNoOp, "shape " + std::to_string(i) +
                          " has an unknown code, stream, kernel or group, the wrong stream, or a "
                          "divisor that is not positive");
      }
    }
    for (std::size_t i = 0; i < program_.buffers.size(); ++i) {
      const Buffer& b = program_.buffers[i];
      if (b.size.value < 0 || static_cast<std::size_t>(b.owner) >= kStreamCount ||
          static_cast<std::size_t>(b.category) >= kCategoryCount) {
        Report(kNoOp, "buffer " + std::to_string(i) +
                          " has a negative size, or an unknown owner or category");
      } else if (!FlatIsUniform(b)) {
        Report(kNoOp, "buffer " + std::to_string(i) +
                          " lies in a flat tensor with pieces, on the host or with another owner");
      } else if (!HoldsKnown(b)) {
        Report(kNoOp, "buffer " + std::to_string(i) +
                          " holds parameters of a unit or model op out of range, or counts that "
                          "are not int32");
      } else if (!PiecesAddUp(b)) {
        Report(kNoOp, "buffer " + std::to_string(i) +
                          " has pieces out of range, of negative size, or of a smaller sum");
      }
    }
    for (const Group& group : program_.groups) {
      if (group.size < 1 || group.stride < 1) {
        Report(kNoOp, "group " + group.name + " has a size or stride below 1");
      }
    }
  }

  void CheckBody() {
    const Body& body = *body_;
    CheckOffsets();
    if (!findings_.empty()) {
      return;
    }
    for (std::size_t i = 0; i < body.size(); ++i) {
      ThrowIfStopped();
      CheckOp(i);
    }
    for (const Access& access : body.accesses) {
      Expect(access.buffer.value < program_.buffers.size() && access.bytes.value >= 0, body.size(),
             "an access names a buffer out of range or a negative size");
    }
    for (const MemoryPoint& point : body.points) {
      Expect(point.buffer.value < program_.buffers.size() && point.kind <= PointKind::kAllocOnce,
             body.size(), "a memory point names a buffer out of range or has an unknown kind");
    }
    Expect(body.carries.size() <= program_.carry_slot_count, body.size(),
           "more carries than carry slots");
    for (const OpId op : body.carries) {
      Expect(!op.valid() || op.value < body.size(), body.size(), "a carry names no op of the body");
    }
  }

  // The offset arrays begin at 0, ascend and stay inside.
  void CheckOffsets() {
    const Body& body = *body_;
    Op before;
    for (std::size_t i = 0; i < body.size(); ++i) {
      const Op& op = body.ops[i];
      const bool starts_well =
          i > 0 || (op.edge_begin == 0 && op.access_begin == 0 && op.point_begin == 0);
      Expect(starts_well && op.edge_begin >= before.edge_begin &&
                 op.access_begin >= before.access_begin && op.point_begin >= before.point_begin,
             i, "offsets of edges, accesses or points do not ascend from 0");
      before = op;
    }
    const bool has_ops = body.size() > 0;
    Expect(before.edge_begin <= body.edges.size() && (has_ops || body.edges.empty()) &&
               before.access_begin <= body.accesses.size() && (has_ops || body.accesses.empty()) &&
               before.point_begin <= body.end_point_begin &&
               (has_ops || body.end_point_begin == 0) && body.end_point_begin <= body.points.size(),
           body.size(), "offsets of edges, accesses or points lie outside their arrays");
  }

  void CheckOp(std::size_t i) {
    const Op& op = body_->ops[i];
    if (op.shape.value >= program_.shapes.size()) {
      Report(Raw(i), Raw(i) + ": shape out of range");
      return;
    }
    const OpCode code = program_.ShapeOf(op).code;
    const bool of_model_op = code == OpCode::kCompute || code == OpCode::kAccumulateGrad;
    const std::size_t subjects =
        of_model_op ? program_.model_op_names.size() : program_.units.size();
    Expect(op.subject == kNoSubject || op.subject < subjects, i, "subject out of range");
    Expect(op.phase <= Phase::kOptimizer, i, "unknown phase");
    Expect(SumsWhatItSays(OpId(i), program_.ShapeOf(op)), i,
           "sums int32 that no buffer says are counts, or counts as another dtype");
    for (const Edge edge : body_->EdgesOf(OpId(i))) {
      Expect(edge.is_carried() ? edge.slot() < program_.carry_slot_count : edge.value < i, i,
             edge.is_carried() ? "carry slot out of range" : "an edge does not point backwards");
    }
  }

  void CheckSlots() {
    std::vector<bool> is_set(program_.carry_slot_count);
    for (const NamedBody& named : BodiesOf(program_)) {
      for (std::size_t slot = 0; slot < named.body->carries.size(); ++slot) {
        is_set[slot] = is_set[slot] || named.body->carries[slot].valid();
      }
    }
    for (const NamedBody& named : BodiesOf(program_)) {
      body_ = named.body;
      name_ = named.name;
      for (std::size_t i = 0; i < body_->size(); ++i) {
        for (const Edge edge : body_->EdgesOf(OpId(i))) {
          Expect(!edge.is_carried() || is_set[edge.slot()], i,
                 "waits for a carry slot that no body sets");
        }
      }
    }
  }

  const Program& program_;
  std::vector<Finding>& findings_;
  const Body* body_ = nullptr;
  const char* name_ = "";
  std::map<std::uint32_t, Stream> flat_owners_;
};

// What the accesses of an op must add up to.
struct Needed {
  Bytes read{0};
  Bytes written{0};
};

// The host side of a copy may be memory that the program does not own, such as the data loader's.
Needed NeededBy(const Program& program, const OpShape& shape, bool reads_buffer,
                bool writes_buffer) {
  switch (shape.code) {
    case OpCode::kAllGather:
      return {Bytes(CeilDiv(shape.bytes.value, program.groups[shape.group.value].size)),
              shape.bytes};
    case OpCode::kReduceScatter:
      return {shape.bytes,
              Bytes(CeilDiv(shape.bytes.value, program.groups[shape.group.value].size))};
    case OpCode::kAllReduce:
    case OpCode::kBroadcast:
    case OpCode::kAllToAll:
    case OpCode::kPermute:
    case OpCode::kSendReceive:
      return {shape.bytes, shape.bytes};
    case OpCode::kSend:
      return {shape.bytes, Bytes(0)};
    case OpCode::kReceive:
      return {Bytes(0), shape.bytes};
    case OpCode::kCopyH2d:
      return {reads_buffer ? shape.bytes : Bytes(0), shape.bytes};
    case OpCode::kCopyD2h:
      return {shape.bytes, writes_buffer ? shape.bytes : Bytes(0)};
    default:
      return {};
  }
}

void CheckAccessSizes(const Program& program, const NamedBody& named, OpId op,
                      std::vector<Finding>& findings) {
  const Op& record = named.body->ops[op.value];
  const auto name = [&] { return std::string(named.name) + ": " + OpName(program, record); };
  Needed used;
  bool reads_buffer = false;
  bool writes_buffer = false;
  BufferId last;
  for (const Access& access : named.body->AccessesOf(op)) {
    const Bytes size = program.buffers[access.buffer.value].size;
    if (access.bytes > size && findings.size() < kMaxFindings) {
      const auto alloc = FindFirstAlloc(ConcatenatedPasses(program), access.buffer);
      const std::string first =
          alloc ? NameAt(program, ConcatenatedPasses(program), *alloc) : std::string(kNoOp);
      findings.push_back({7, first, name(), BufferName(program, access.buffer),
                          name() + " touches the first " + std::to_string(access.bytes.value) +
                              " B of " + BufferName(program, access.buffer) + ", which has " +
                              std::to_string(size.value) + " B"});
    }
    used.read += access.mode != AccessMode::kWrite ? access.bytes : Bytes(0);
    used.written += access.mode != AccessMode::kRead ? access.bytes : Bytes(0);
    reads_buffer = reads_buffer || access.mode != AccessMode::kWrite;
    writes_buffer = writes_buffer || access.mode != AccessMode::kRead;
    last = access.buffer;
  }
  const OpShape& shape = program.ShapeOf(record);
  const Needed needed = NeededBy(program, shape, reads_buffer, writes_buffer);
  if ((used.read < needed.read || used.written < needed.written) &&
      findings.size() < kMaxFindings) {
    const bool reads_short = used.read < needed.read;
    findings.push_back({7, kNoOp, name(), last.valid() ? BufferName(program, last) : "",
                        name() + (reads_short ? " reads " : " writes ") +
                            std::to_string(reads_short ? used.read.value : used.written.value) +
                            " B of its buffers, but moves " +
                            std::to_string(reads_short ? needed.read.value : needed.written.value) +
                            " B"});
  }
}

// Rule 9. A kernel that reads over the host link would be priced as if the bytes were the device's.
// Managed memory comes to the kernel: states of paged optimizers, which are on the host and owned
// by a stream of the device, and which updates alone touch.
bool MayTouch(OpCode code, const Buffer& buffer, AccessMode mode) {
  const bool on_host = buffer.on_host;
  const bool is_managed =
      on_host && buffer.owner != Stream::kHost && buffer.category == Category::kOptimizerState;
  switch (code) {
    case OpCode::kInitialize:
      return true;
    case OpCode::kCopyH2d:
      return on_host == (mode == AccessMode::kRead);
    case OpCode::kCopyD2h:
      return on_host == (mode == AccessMode::kWrite);
    default:
      return on_host == InfoOf(code).runs_on_host || (is_managed && code == OpCode::kOptimizerStep);
  }
}

void CheckSides(const Program& program, const NamedBody& named, OpId op,
                std::vector<Finding>& findings) {
  const Op& record = named.body->ops[op.value];
  const OpCode code = program.ShapeOf(record).code;
  for (const Access& access : named.body->AccessesOf(op)) {
    const bool on_host = program.buffers[access.buffer.value].on_host;
    if (MayTouch(code, program.buffers[access.buffer.value], access.mode) ||
        findings.size() >= kMaxFindings) {
      continue;
    }
    const std::vector<Pass> passes = ConcatenatedPasses(program);
    const auto alloc = FindFirstAlloc(passes, access.buffer);
    const std::string name = std::string(named.name) + ": " + OpName(program, record);
    const std::string side = on_host ? "host" : "device";
    findings.push_back({9, alloc ? NameAt(program, passes, *alloc) : std::string(kNoOp), name,
                        BufferName(program, access.buffer),
                        name + (access.mode == AccessMode::kRead ? " reads " : " writes ") +
                            BufferName(program, access.buffer) + " in " + side + " memory, where " +
                            std::string(InfoOf(code).name) + " cannot reach it"});
  }
}

}  // namespace

void CheckStructure(const Program& program, std::vector<Finding>& findings) {
  StructureChecker(program, findings).Run();
}

void CheckAccesses(const Program& program, std::vector<Finding>& findings) {
  for (const NamedBody& named : BodiesOf(program)) {
    for (std::size_t i = 0; i < named.body->size(); ++i) {
      ThrowIfStopped();
      CheckAccessSizes(program, named, OpId(i), findings);
      CheckSides(program, named, OpId(i), findings);
    }
  }
}

}  // namespace shardwright
