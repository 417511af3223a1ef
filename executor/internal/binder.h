#pragma once

// The working state of Bind: walks the bodies in issue order and remembers what each buffer holds.

#include <map>
#include <optional>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "executor/binding.h"
#include "executor/internal/contents.h"

namespace shardwright {

// FSDP divides 16-bit gradients before and after the sum, pre * post = ranks: pre doubles while it
// divides the rank count and stays below the quotient. Source: torch, DefaultState. Being a power
// of two it costs no bit (short of underflow).
[[nodiscard]] double PreDivide(std::int64_t ranks);

class Binder {
 public:
  Binder(const ExecutorInput& input, Rank rank, const RankMemory& memory);
  [[nodiscard]] Binding Run();

 private:
  // The op at hand, with its accesses by role.
  struct OpView {
    const Op* op = nullptr;
    const OpShape* shape = nullptr;
    std::vector<Access> inputs, outputs;
    [[nodiscard]] UnitId unit() const { return UnitId(op->subject); }
  };
  using Shares = std::map<BufferId, std::int64_t>;  // byte offset inside a bucket, by gradient

  void BindBody(const Body& body, BoundBody& bound);
  void FindBuckets(const Body& body);
  void MarkFresh(std::span<const MemoryPoint> points);
  [[nodiscard]] std::vector<ByteRange> TakePoison(std::span<const Access> accesses);
  [[nodiscard]] Call BindOp(const Body& body, OpId id);

  // binder_copies.cc
  [[nodiscard]] Call BindCast(const Body& body, OpId op, const OpView& v);
  [[nodiscard]] Call BindGatherCopyIn(const OpView& v);
  [[nodiscard]] Call BindGatherCopyOut(const OpView& v);
  [[nodiscard]] Call BindReshardClone(const OpView& v);
  [[nodiscard]] Call BindGradientCopy(const OpView& v);
  [[nodiscard]] Call BindGradStore(const OpView& v);
  [[nodiscard]] Call BindBucketCopy(const OpView& v);
  // FairScale's bucket of several units: a row of chunks per rank.
  [[nodiscard]] Call BindRowBucket(const OpView& v);
  [[nodiscard]] Call BindRowsTogether(const OpView& v);
  [[nodiscard]] Call BindRowScatter(const OpView& v, CollectiveCall call);
  [[nodiscard]] Call BindTransfer(const OpView& v);
  [[nodiscard]] Call BindCollective(const OpView& v);
  [[nodiscard]] Call BindGradScale(const OpView& v);
  [[nodiscard]] Call BindAccumulate(const OpView& v);
  [[nodiscard]] Call RawSum(const OpView& v) const;
  [[nodiscard]] std::vector<ByteRange> NeverWritten(BufferId buffer) const;
  [[nodiscard]] Call Matched(std::span<const Access> from, BufferId to, bool accumulate) const;

  // binder_zero.cc: what the ZeRO dialects do otherwise; nothing for other ops.
  [[nodiscard]] std::optional<Call> BindZeroOp(const OpView& v);
  [[nodiscard]] Call BindZeroInitialize(const OpView& v);
  [[nodiscard]] Call BindZeroBucketCopy(const OpView& v);
  [[nodiscard]] Call BindZeroCast(const OpView& v);
  [[nodiscard]] Call BindZeroGatherCopyIn(const OpView& v);
  [[nodiscard]] Call BindZeroReduceCopyIn(const OpView& v);
  [[nodiscard]] Call BindZeroStore(const OpView& v);
  [[nodiscard]] Call BindZeroScatter(const OpView& v);
  [[nodiscard]] Call BindZeroScale(const OpView& v);
  [[nodiscard]] Call BindZeroWeightGather(const OpView& v);
  [[nodiscard]] Contents ZeroGradients(UnitId unit, BufferId buffer) const;
  [[nodiscard]] Contents InOrder(std::span<const Access> from, DType dtype) const;
  [[nodiscard]] double ZeroDivisor(OpCode code) const;

  // binder_compute.cc
  [[nodiscard]] Call BindModelOp(const Body& body, OpId id);
  [[nodiscard]] Call BindExchange(std::span<const Access> accesses, const OpShape& shape) const;
  void BindForwardAccess(const Access& access, const ModelOp& op, ModelCall& call);
  void BindBackwardAccess(const Access& access, const ModelOp& op, ModelCall& call);
  void BindParamGrads(const Access& access, const ModelOp& op, ModelCall& call);
  [[nodiscard]] ConstView ParameterView(ParamId param, BufferId buffer) const;
  [[nodiscard]] View GradientView(ParamId storage, BufferId buffer) const;
  [[nodiscard]] View TensorView(TensorId tensor, BufferId buffer) const;
  [[nodiscard]] DType DTypeOf(TensorRole role) const;

  // binder_update.cc
  [[nodiscard]] Call BindInitialize(const OpView& v);
  [[nodiscard]] Call BindNorm(std::span<const Access> accesses, const OpView& v);
  [[nodiscard]] Call BindClip(std::span<const Access> accesses, const OpView& v);
  [[nodiscard]] Call BindUpdate(std::span<const Access> accesses);
  struct ShardBuffers {
    BufferId shard;
    std::vector<BufferId> grads, states;
  };
  // Moments of trainable elements [begin, begin + count) of a unit's shard, which lie in `host` and
  // visit the device while they are updated: every state of these elements, one behind the other.
  struct StagedPiece {
    BufferId host;
    std::int64_t begin = 0, count = 0;
  };
  void StagePiece(UnitId unit, BufferId host, BufferId device);
  void AddStagedUpdate(const ShardBuffers& buffers, const StagedPiece& piece, UpdateCall& update);
  [[nodiscard]] OptimizerCall UpdateOf(const ShardBuffers& buffers, BufferId grad) const;
  [[nodiscard]] ShardBuffers BuffersOfIndex(std::span<const Access> accesses,
                                            std::uint16_t index) const;
  void RememberStates(const ShardBuffers& buffers);
  void CheckStatesHold(std::span<const BufferId> states, std::span<const OptimizerRange> ranges,
                       DType dtype) const;
  void AddShardUpdate(std::span<const Access> accesses, std::uint16_t index, UpdateCall& update);
  void AddCasts(std::span<const Access> accesses, CopyCall& casts);
  [[nodiscard]] std::vector<OptimizerRange> UpdateRanges(const Contents& params,
                                                         const Contents& grads) const;
  [[nodiscard]] std::vector<ElementRange> GradientRanges(std::span<const Access> accesses) const;
  // What gradients still have to be divided by when the optimizer's first op reads them.
  [[nodiscard]] double PendingDivisor() const;
  void FillUnits(Binding& binding) const;
  [[nodiscard]] std::vector<BoundStates> StatesOf(std::size_t unit, const Contents& shard) const;

  [[nodiscard]] std::byte* At(BufferId buffer) const;
  [[nodiscard]] const Buffer& BufferOf(BufferId b) const { return in_.program.buffers[b.value]; }
  [[nodiscard]] const Contents& ContentsOf(BufferId buffer) const;
  void Set(BufferId buffer, Contents contents) { contents_[buffer.value] = std::move(contents); }
  [[nodiscard]] bool IsKnown(BufferId b) const { return contents_[b.value].has_value(); }
  [[nodiscard]] std::int64_t ElementsOf(BufferId buffer, DType dtype) const {
    return BufferOf(buffer).size.value / SizeOf(dtype);
  }
  [[nodiscard]] Precision PrecisionOf(UnitId unit) const {
    return UnitPrecision(in_.job.precision, program_.units[unit.value].full_precision);
  }
  // The dtype in which `elements` elements fill the buffer: of master, reduction and compute.
  [[nodiscard]] DType WidthOf(BufferId buffer, std::int64_t elements) const;
  [[nodiscard]] UnitId UnitOf(ParamId param) const { return unit_of_param_[param.value]; }

  const ExecutorInput& in_;
  const Program& program_;
  Rank rank_;
  RankMemory memory_;
  std::int64_t shard_index_;
  std::int64_t ranks_;
  UnitLayouts layouts_;
  const bool is_zero12_, is_zero3_;
  bool scales_explicitly_ = false;  // the program divides gradients by ops of its own

  std::vector<std::optional<Contents>> contents_;  // by buffer
  std::vector<bool> fresh_;                        // by buffer: allocated and not yet used
  std::vector<UnitId> unit_of_param_;              // by storage
  std::set<BufferId> clones_;                      // 1/g of a unit's parameters
  std::set<BufferId> reduced_;                     // gradients that went through a reduction
  std::set<std::pair<std::uint32_t, std::uint16_t>> scaled_;  // (unit, micro-batch) divided before
  std::set<std::pair<BufferId, ParamId>> written_;  // gradients since the buffer's allocation
  std::map<BufferId, Shares> buckets_;              // of the body at hand
  std::map<BufferId, std::vector<UnitId>> rows_;    // units whose chunks are in a bucket's rows
  BufferId host_inputs_;
  BufferId model_buffers_;
  std::vector<std::int64_t> module_offset_;    // fp32 elements into the model buffers, by module
  std::vector<std::vector<BufferId>> states_;  // by unit
  std::map<BufferId, StagedPiece> staged_;     // by the device buffer that a piece visits
  std::vector<std::vector<StagedPiece>> moments_;  // by unit, in the body at hand
  std::vector<BufferId> masters_;                  // by unit: what the optimizer updates
  std::vector<BufferId> shards_;                   // by unit: what gathers read
  std::vector<BufferId> copies_;                   // by unit: see BoundCopy
  bool has_clipped_ = false;                       // the body at hand has a clip op
  struct ZeroState {
    std::set<BufferId> emptied;               // buckets whose gradients are no longer needed
    std::vector<UnitId> reduced;              // zero3: units of the last reduction, in order
    std::map<BufferId, BufferId> arrived;     // zero3: the host's partition behind a copy of it
    std::map<UnitId, std::int64_t> gathered;  // zero1, zero2: elements of the shard, in this body
  };
  ZeroState zero_;
};

}  // namespace shardwright
