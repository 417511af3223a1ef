#pragma once

// Writes single ops of the common kinds into the body at hand. Shared by the walker, the dialects
// and the optimizer pass.

#include <initializer_list>
#include <optional>
#include <span>
#include <string>

#include "schedule/builder.h"
#include "schedule/lower.h"
#include "schedule/lower/analysis.h"
#include "topologies/mesh.h"

namespace shardwright {

// Ops that agree in code, phase, subject and micro-batch: Op::occurrence has 16 bits.
inline constexpr std::uint32_t kMostAlike = 65536;

// A buffer an op touches; shorthand for BodyBuilder::Use.
struct Touch {
  BufferId buffer;
  AccessMode mode = AccessMode::kRead;
  Role role = Role::kInput;
  std::uint16_t index = 0;
};

class Emitter {
 public:
  Emitter(const LowerInput& input, ModelAnalysis analysis, Program& target)
      : in(input), a(std::move(analysis)), program(target), shapes_(target), pieces_(target) {}

  // Ops go to `body` from now on.
  void Begin(Body& target);
  // Closes the body begun last.
  void End();

  // Adds the op and its accesses; edges are added by the caller through After().
  OpId Add(const OpShape& shape, std::span<const Kernel> kernels, Phase phase,
           std::uint32_t subject, std::initializer_list<Touch> touches);
  // Phase and subject (a unit, a model op or kNoSubject) of an op.
  struct Where {
    Phase phase = Phase::kForward;
    std::uint32_t subject = kNoSubject;
  };
  // A device-side copy, cast or element-wise pass as one kernel that reads and writes this much,
  // and divides gradients by `divisor`.
  OpId AddCopy(OpCode code, Stream stream, Where where, Bytes read, Bytes written,
               std::initializer_list<Touch> touches, double divisor = 1.0);
  // A copy between host and device memory on `stream`.
  OpId AddTransfer(OpCode code, Stream stream, Where where, Bytes bytes, BufferId from,
                   BufferId to);
  OpId AddCollective(OpShape shape, Where where, std::initializer_list<Touch> touches);
  // `stream` waits for `ops`; none if all of them are none or on that stream.
  void AddWait(Stream stream, std::initializer_list<OpId> ops, Phase phase, std::uint32_t subject);
  // `stream` waits for what a carry slot holds.
  void AddSlotWait(Stream stream, std::uint32_t slot, Phase phase, std::uint32_t subject);
  // The host waits for `ops`.
  OpId AddHostWait(std::span<const OpId> ops, Phase phase, std::uint32_t subject);
  void After(OpId op) { body->After(op); }

  // The group of ranks that differ on these axes. Several groups of one shape need several names;
  // by default it is "shard", "replicate" or, over both axes, "world".
  [[nodiscard]] GroupId AddGroup(std::initializer_list<Axis> axes, const std::string& name = {});
  // Parts of `size` neighbours of the shard group: "reshard4".
  [[nodiscard]] GroupId AddShardPart(std::int64_t size);
  // "ep", "efsdp" and "cp": Mesh::Experts, SameExperts and Context; "tp": of the tensor axis.
  [[nodiscard]] GroupId AddExperts();
  [[nodiscard]] GroupId AddSameExperts();
  [[nodiscard]] GroupId AddContext();
  // All ranks of the pipeline; "pp.next" and "pp.previous": neighbours there.
  [[nodiscard]] GroupId AddPipeline(const std::string& name = "pp");
  [[nodiscard]] GroupId AddTensor() { return AddGroup({Axis::kTensor}, "tp"); }
  [[nodiscard]] BufferId Alloc(Bytes size, Category category, Stream owner,
                               bool zero_filled = false);
  // A buffer that stands for several allocations, whose sizes (from InternPieces) add up to `size`.
  [[nodiscard]] BufferId AllocPieces(Bytes size, PieceRange pieces, Category category,
                                     Stream owner);
  // In page-locked memory PyTorch takes `blocks` for it (Pinned), which add up to more.
  [[nodiscard]] BufferId AllocOnHost(Bytes size, Category category,
                                     std::span<const Bytes> blocks = {});
  // The bytes that PyTorch's allocator of page-locked memory takes for a block: the next power of
  // two (ATen/core/CachingHostAllocator.h, allocate). `block` itself for native, which locks one
  // arena.
  [[nodiscard]] Bytes Pinned(Bytes block) const;
  // Says what `buffer` holds, and returns it.
  BufferId Hold(BufferId buffer, Holds holds, std::uint32_t subject, DType dtype);
  [[nodiscard]] Stream StreamOf(OpId op) const;
  // The op last issued to the compute stream; what an event recorded there now would stand for.
  // None where the body has no such op so far.
  [[nodiscard]] OpId LastCompute() const;
  [[nodiscard]] ShapeId Intern(const OpShape& shape, std::span<const Kernel> kernels) {
    return shapes_.Intern(shape, kernels);
  }
  [[nodiscard]] PieceRange InternPieces(std::span<const Bytes> sizes) {
    return pieces_.Intern(sizes);
  }

  const LowerInput& in;
  const ModelAnalysis a;
  Program& program;
  const Mesh mesh = MeshOf(in.plan);
  BodyBuilder* body = nullptr;
  std::uint16_t micro_batch = 0;
  std::size_t stage = 0;  // of those of the rank
  // Its ops; without a pipeline all.
  [[nodiscard]] Model::Stage Stage() const {
    return in.model.stages.empty()
               ? Model::Stage{0, static_cast<std::uint32_t>(in.model.ops.size())}
               : in.model.stages[stage];
  }

 private:
  // The group of this name, which is added once.
  GroupId Find(Group group);
  // How often an op id without its occurrence was used in this body. Throws InputError for one more
  // than kMostAlike.
  std::uint16_t NextOccurrence(OpCode code, Phase phase, std::uint32_t subject);

  ShapeInterner shapes_;
  PieceInterner pieces_;
  std::optional<BodyBuilder> builder_;
  Body* current_ = nullptr;
  KeyCounter occurrences_;
};

// A collective over the full array of `bytes`. A reduction divides by `divisor` behind the sum.
[[nodiscard]] inline OpShape Collective(OpCode code, Stream stream, GroupId group, Bytes bytes,
                                        DType dtype, double divisor = 1.0) {
  OpShape shape;
  shape.code = code;
  shape.stream = stream;
  shape.dtype = dtype;
  shape.group = group;
  shape.bytes = bytes;
  shape.divisor = divisor;
  return shape;
}

// Gradients are averaged over `ranks` in two steps, pre * post = ranks, so that 16-bit sums neither
// overflow nor underflow: pre doubles while it divides the rank count and stays below the quotient.
// Source: torch, DefaultState. Being a power of two it costs no bit (short of underflow).
struct DivideFactors {
  double pre = 1, post = 1;
};
[[nodiscard]] DivideFactors FactorsFor(std::int64_t ranks);

inline constexpr std::uint16_t StreamBit(Stream s) {
  return static_cast<std::uint16_t>(1U << static_cast<unsigned>(s));
}

}  // namespace shardwright
