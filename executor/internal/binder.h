#pragma once

// The working state of Bind: walks the bodies in issue order and remembers what each buffer holds.

#include <deque>
#include <map>
#include <optional>
#include <set>
#include <utility>
#include <vector>

#include "executor/binding.h"
#include "executor/internal/contents.h"

namespace shardwright {

// Bytes as they are.
[[nodiscard]] CopyRun RawRun(const std::byte* from, std::byte* to, std::int64_t bytes);

void AppendCopy(const CopyCall& more, CopyCall& copy);

// What a collective is, without its buffers and its divisor.
[[nodiscard]] CollectiveCall CollectiveOf(const OpShape& shape);

// The pieces of `more`, `offset` elements further on.
void AppendMoved(const Contents& more, std::int64_t offset, Contents& contents);

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
  [[nodiscard]] std::optional<Contents> Declared(const Buffer& buffer) const;

  void BindBody(const Body& body, BoundBody& bound);
  void MarkFresh(std::span<const MemoryPoint> points);
  [[nodiscard]] std::vector<ByteRange> TakePoison(std::span<const Access> accesses);
  [[nodiscard]] Call BindOp(const Body& body, OpId id);

  // binder_copies.cc
  [[nodiscard]] CopyCall Matched(std::span<const Access> from, BufferId to, bool accumulate) const;
  [[nodiscard]] CopyCall MatchedAll(const OpView& v);
  [[nodiscard]] CopyCall Divided(CopyCall copy, const OpView& v) const;
  [[nodiscard]] CopyCall SliceCopy(BufferId whole, BufferId slice, bool into) const;
  [[nodiscard]] Call BindGatherCopyIn(const OpView& v);
  void GatherUnits(std::span<const Access> shards, std::int64_t slice, BufferId to);
  [[nodiscard]] Call BindReshardClone(const OpView& v);
  [[nodiscard]] Call BindGradientCopy(const OpView& v);
  [[nodiscard]] Call BindTransfer(const OpView& v);
  [[nodiscard]] Call BindCollective(const OpView& v);
  void GatherInPlace(const OpView& v, CollectiveCall& call);
  [[nodiscard]] Call BindGradScale(const OpView& v);
  [[nodiscard]] Call BindAccumulate(const OpView& v);
  [[nodiscard]] Call RawSum(const OpView& v) const;
  [[nodiscard]] std::vector<ByteRange> NeverWritten(BufferId buffer) const;

  // binder_experts.cc
  [[nodiscard]] Call BindAllToAll(const OpView& v);
  [[nodiscard]] Call BindCounts(const OpView& v);
  void FindExperts(std::deque<std::vector<std::int64_t>>& row_counts);
  struct SharedExperts;
  [[nodiscard]] std::span<std::int64_t> CountsOf(const SharedExperts& experts,
                                                 std::int64_t micro_batch) const;
  [[nodiscard]] std::span<std::byte> CameFor(const ModelOp& op, std::int64_t micro_batch) const;

  // binder_buckets.cc
  [[nodiscard]] Contents InOrder(std::span<const Access> from, DType dtype) const;
  [[nodiscard]] Call BindBucketCopy(const OpView& v);
  [[nodiscard]] Call BindRowsOfChunks(const OpView& v);

  // binder_compute.cc
  [[nodiscard]] Call BindModelOp(const Body& body, OpId id);
  [[nodiscard]] Call BindExchange(std::span<const Access> accesses, const OpShape& shape) const;
  void BindRing(const Op& op, std::span<const Access> accesses, ModelOpCall& call) const;
  void BindForwardAccess(const Access& access, const ModelOp& op, ModelCall& call);
  void BindBackwardAccess(const Access& access, const ModelOp& op, ModelCall& call);
  void BindParamGrads(const Access& access, const ModelOp& op, ModelCall& call);
  void BindLossInside(const Access& access, const ModelOp& loss, ModelCall& call) const;
  [[nodiscard]] ConstView ParameterView(ParamId param, BufferId buffer) const;
  [[nodiscard]] View ViewOf(ParamId storage, BufferId buffer) const;
  [[nodiscard]] View TensorView(TensorId tensor, BufferId buffer) const;
  [[nodiscard]] DType DTypeOf(TensorRole role) const;
  [[nodiscard]] std::vector<View> InputViews() const;

  // binder_update.cc
  [[nodiscard]] Call BindInitialize(const OpView& v);
  [[nodiscard]] Call BindNorm(std::span<const Access> accesses, const OpView& v);
  [[nodiscard]] Call BindClip(std::span<const Access> accesses, const OpView& v);
  [[nodiscard]] Call BindUpdate(std::span<const Access> accesses, const OpView& v);
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
  // What lives as long as the run.
  struct UnitBuffers {
    BufferId shard;                    // what gathers read
    BufferId copy;                     // see BoundCopy
    BufferId master;                   // what the optimizer updates
    std::vector<BufferId> states;      // on the device
    std::vector<StagedPiece> moments;  // in the body at hand
  };
  void StagePiece(UnitId unit, BufferId host, BufferId device);
  [[nodiscard]] static std::vector<OptimizerRange> InPiece(
      const std::vector<OptimizerRange>& ranges, const StagedPiece& piece);
  [[nodiscard]] ShardBuffers BuffersOfIndex(std::span<const Access> accesses,
                                            std::uint16_t index) const;
  void AddShardUpdate(std::span<const Access> accesses, std::uint16_t index, UpdateCall& update);
  void AddCasts(std::span<const Access> accesses, CopyCall& casts);
  [[nodiscard]] std::vector<OptimizerRange> UpdateRanges(const Contents& params,
                                                         const Contents& grads) const;
  // Of Adafactor, whose states are a row and a column of each whole matrix.
  [[nodiscard]] std::vector<OptimizerRange> FactoredRanges(const Contents& params,
                                                           std::vector<OptimizerRange> ranges,
                                                           Bytes state) const;
  // `copies`: only those that IsCopy says so of, or only the others.
  [[nodiscard]] std::vector<ElementRange> GradientRanges(std::span<const Access> accesses,
                                                         std::optional<bool> copies = {}) const;
  [[nodiscard]] bool IsCopy(ParamId param) const;
  void FillUnits(Binding& binding) const;
  [[nodiscard]] std::vector<BoundStates> StatesOf(const UnitBuffers& unit,
                                                  const Contents& shard) const;

  // This rank's place among those that cut the unit.
  [[nodiscard]] std::int64_t ShardOf(UnitId unit) const;
  [[nodiscard]] std::byte* At(BufferId buffer) const;
  [[nodiscard]] const Buffer& BufferOf(BufferId b) const { return in_.program.buffers[b.value]; }
  [[nodiscard]] const Contents& ContentsOf(BufferId buffer) const;
  void Set(BufferId buffer, Contents contents) { contents_[buffer.value] = std::move(contents); }
  [[nodiscard]] bool IsKnown(BufferId b) const { return contents_[b.value].has_value(); }
  [[nodiscard]] std::int64_t ElementsOf(BufferId buffer, DType dtype) const {
    return BufferOf(buffer).size.value / SizeOf(dtype);
  }
  [[nodiscard]] std::int64_t ElementsOf(BufferId buffer) const {
    return ElementsOf(buffer, BufferOf(buffer).dtype);
  }

  const ExecutorInput& in_;
  const Program& program_;
  Rank rank_;
  RankMemory memory_;
  std::int64_t shard_index_;
  // Of a unit of experts that ranks share out.
  struct SharedExperts {
    const ModelOp* op = nullptr;
    std::vector<std::int64_t>* counts = nullptr;  // in Binding::row_counts
  };
  std::vector<SharedExperts> experts_;  // by unit
  UnitLayouts layouts_;

  std::vector<std::optional<Contents>> contents_;   // by buffer
  std::vector<bool> fresh_;                         // by buffer: allocated and not yet used
  std::set<std::pair<BufferId, ParamId>> written_;  // gradients since the buffer's allocation
  std::set<BufferId> emptied_;                      // buckets whose gradients are reduced
  BufferId host_inputs_;
  BufferId model_buffers_;
  std::vector<std::int64_t> module_offset_;  // fp32 elements into the model buffers, by module
  std::map<BufferId, StagedPiece> staged_;   // by the device buffer that a piece visits
  std::vector<UnitBuffers> units_;
  bool has_clipped_ = false;                 // the body at hand has a clip op
  bool norm_divides_ = false;                // its norm op divides the gradients
  std::map<UnitId, std::int64_t> gathered_;  // in this body: elements of the shard so far
};

}  // namespace shardwright
