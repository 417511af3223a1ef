#pragma once

// The schedule of one rank class: what is issued, in which order, on which stream, after what, and
// which logical buffers live when. A Program says what, never how long. Both interpreters, the
// simulator and the executor, run it; docs/execution_model.md defines what running means.

#include <cstdint>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "core/units.h"
#include "models/kernel_set.h"

namespace shardwright {

// In-order queues of one device, and the host that feeds them.
enum class Stream : std::uint8_t {
  kHost,       // ops that block the host or run on it
  kCompute,    // model kernels, optimizer
  kCopyIn,     // work that prepares a gather: casts, copies into the gather buffer
  kGather,     // all-gathers
  kReduce,     // reduce-scatters and what follows them
  kReplicate,  // all-reduces over replicas
  kH2d,        // host to device copies
  kD2h,        // device to host copies
  kPrevious,   // transfers with the pipeline's rank before, and
  kNext,       // with the one behind
};
inline constexpr std::size_t kStreamCount = 10;

enum class Phase : std::uint8_t { kInit, kForward, kRecompute, kBackward, kOptimizer };

// What an op does. OpCodeTable below holds name, stream family and required fields of each.
enum class OpCode : std::uint8_t {
  kCompute,         // kernels of one model op in the op's phase
  kAccumulateGrad,  // adds a gradient into another that is already there
  kAllGather,
  kReduceScatter,
  kAllReduce,
  kBroadcast,
  kAllToAll,
  kPermute,  // each rank sends to the next
  // To or from the neighbour that the stream says; the last does both at once.
  kSend,
  kReceive,
  kSendReceive,
  kBarrier,
  kCast,           // parameter shard to the gather dtype
  kGatherCopyIn,   // shard into its slice of the gather buffer
  kGatherCopyOut,  // gather buffer into per-parameter storages
  kReshardClone,   // keeps 1/g of the gathered parameters (reshard to a smaller group)
  kConcatGrad,     // per-parameter gradients into one flat gradient (FSDP1)
  kReduceCopyIn,   // gradients into the reduce-scatter input, padding and casting
  kGradScale,      // division before or after a reduction
  kGradStore,      // casts a reduced shard to the master dtype, assigns or accumulates it
  kBucketCopy,     // gradients into or out of a DDP bucket
  kGradNorm,       // local norm of the sharded gradients
  kGradClip,       // multiplies the gradients by the clip coefficient
  kOptimizerStep,
  kHostOptimizerStep,  // the update of offloaded states, on the CPU
  kCopyH2d,
  kCopyD2h,
  kHostWait,    // blocks the host until its edges are done
  kStreamWait,  // makes a stream wait for its edges; takes no stream time
  kInitialize,  // gives persistent buffers their first value
};
inline constexpr std::size_t kOpCodeCount = 30;

struct OpCodeInfo {
  OpCode code;
  std::string_view name;  // used in op ids: "mb0.layers.3.bwd.reduce_scatter"
  bool is_collective;     // needs a group; starts when its last rank arrives
  bool runs_on_host;      // occupies the host, no stream work
};
[[nodiscard]] const OpCodeInfo& InfoOf(OpCode code);
[[nodiscard]] constexpr bool IsTransfer(OpCode code) {
  return code == OpCode::kSend || code == OpCode::kReceive || code == OpCode::kSendReceive;
}
[[nodiscard]] std::string_view NameOf(Stream stream);
[[nodiscard]] std::string_view NameOf(Phase phase);

// What a buffer holds; memory reports are split by it.
enum class Category : std::uint8_t {
  kParameterShard,  // resident shard in the master dtype
  kUnshardedParameter,
  kAllGather,  // gather outputs and cast shards that feed them
  kUnshardedGradient,
  kReduceScatter,  // reduce-scatter inputs and outputs, buckets
  kShardedGradient,
  kOptimizerState,
  kActivation,  // kept for backward
  kActivationGradient,
  kTemporary,    // workspaces, tensors that die inside the pass that made them
  kModelBuffer,  // running statistics and other non-parameters
  kInput,
};
inline constexpr std::size_t kCategoryCount = 12;
[[nodiscard]] std::string_view NameOf(Category category);

inline constexpr std::uint32_t kNoSubject = 0xffffffffu;

// Which parameters, or gradients of parameters, lie in a buffer.
enum class Holds : std::uint8_t {
  kOther,    // none
  kTensors,  // those of model op `subject`, back to back, and behind them what other ops that share
             // its weight have more
  kUnit,     // those of unit `subject`, at ParamSlot::unsharded_offset
  kShards,   // the unit's shards, one behind the other
  kShard,    // this rank's shard of the unit
  kSlice,    // an equal part of a kUnit buffer, cut without regard to parameters
  kMixed,    // what ops put there, one behind the other
  kRows,     // a row per rank: chunk after chunk, what ops put there
  kUses,     // no parameters: of each a count (int32) of the ranks that have a gradient of it
};

// A range of Program::pieces.
struct PieceRange {
  std::uint32_t begin = 0;
  std::uint32_t count = 0;

  bool operator==(const PieceRange&) const = default;
};

// A logical buffer. Sizes are per rank.
struct Buffer {
  Bytes size;
  Category category = Category::kTemporary;
  Stream owner = Stream::kCompute;  // stream whose pool a caching allocator takes it from
  bool on_host = false;             // lives in host memory (offload), not on the device
  bool zero_filled = false;         // holds zeros right after its alloc point
  // Parameters and gradients. Of these, shards and sums have the trainable parameters alone where
  // the buffer has no room for more.
  Holds holds = Holds::kOther;
  DType dtype = DType::kFp32;  // of what it holds; kOther: as the model and the job say
  std::uint32_t subject = kNoSubject;
  // The framework's allocations behind the buffer (one per parameter, say) for the caching reading.
  // More than `size`: given back before the buffers behind it come; on the host: of page-locked
  // blocks, rounded up. None: one request.
  PieceRange pieces = {};
  // Not 0: a slice of this flat tensor of the framework. For the caching reading all buffers of one
  // number, all on the device and of one owner, are one request, made with the first of them and
  // given back with the last.
  std::uint32_t flat = 0;
};

enum class AccessMode : std::uint8_t { kRead, kWrite, kReadWrite };

// Which argument of the op an access is. `index` counts within the role.
enum class Role : std::uint8_t {
  kInput,       // model op: input tensor `index`; others: source
  kOutput,      // model op: output tensor `index`; others: destination
  kSaved,       // extra bytes kept for backward
  kParameter,   // unit storage that holds the op's parameters
  kOutputGrad,  // gradient of output tensor `index`
  kInputGrad,   // gradient of input tensor `index`
  kParamGrad,   // gradient storage of the op's parameters
  kState,       // optimizer state
  kWorkspace,
  kExchange,  // model op: what it shares with other ranks, which a collective moves; written before
              // it is exchanged, read afterwards
  kLabels,    // a linear layer that runs the loss behind it: the labels
  kLoss,      // and the loss
};

struct Access {
  BufferId buffer;
  AccessMode mode = AccessMode::kRead;
  Role role = Role::kInput;
  std::uint16_t index = 0;
  Bytes bytes{0};  // the access lies within the first `bytes` bytes of the buffer

  bool operator==(const Access&) const = default;
};

// Who issues an op.
enum class Issue : std::uint8_t {
  kLoop,  // the host's walk over the model
  kHook,  // a hook of a unit, which takes the host longer
};

// What a price or a kernel depends on, stored once for all ops that share it.
struct OpShape {
  OpCode code = OpCode::kCompute;
  Stream stream = Stream::kCompute;
  DType dtype = DType::kBf16;  // of moved or reduced elements
  Issue issue = Issue::kLoop;
  GroupId group;   // collectives only
  Bytes bytes{0};  // collectives: the full array; copies: bytes copied
  // Range of Program::kernels; one launch each. Collectives: the products that they run beside.
  std::uint32_t kernel_begin = 0;
  std::uint32_t kernel_count = 0;
  // What gradients are divided by: behind the sum of a reduction; by kGradScale; before kGradNorm
  // takes their norm, which changes them where it updates them; by kGradClip and updates.
  double divisor = 1.0;
};

struct Op {
  ShapeId shape;
  std::uint32_t edge_begin = 0;    // CSR: edges [edge_begin, next op's edge_begin)
  std::uint32_t access_begin = 0;  // likewise
  std::uint32_t point_begin = 0;   // likewise: memory points before this op is issued
  std::uint32_t subject = 0;       // kCompute, kAccumulateGrad: model op; otherwise a unit, or
                                   // kNoSubject
  std::uint16_t micro_batch = 0;
  std::uint16_t occurrence = 0;  // tells apart ops that agree in all else
  Phase phase = Phase::kForward;
};

// A dependency: an earlier op of the same body, or what a carry slot held when the body began.
struct Edge {
  std::uint32_t value = 0;
  static constexpr std::uint32_t kCarried = 0x80000000u;

  [[nodiscard]] static constexpr Edge FromOp(OpId op) { return Edge{op.value}; }
  [[nodiscard]] static constexpr Edge FromSlot(std::uint32_t slot) { return Edge{slot | kCarried}; }
  [[nodiscard]] constexpr bool is_carried() const { return (value & kCarried) != 0; }
  [[nodiscard]] constexpr std::uint32_t slot() const { return value & ~kCarried; }
  [[nodiscard]] constexpr OpId op() const { return OpId(value); }
  bool operator==(const Edge&) const = default;
};

// A moment in host order, just before an op is issued, where a buffer begins or ends.
enum class PointKind : std::uint8_t {
  kAlloc,
  kFree,
  kAllocOnce,  // allocated the first time it is reached, lives to the end (lazy optimizer states)
};
struct MemoryPoint {
  BufferId buffer;
  PointKind kind = PointKind::kAlloc;
  // kFree: streams (bit = Stream) whose queued use the allocator waits for before it reuses the
  // block, PyTorch's recordStream. Without it every use must already be ordered before what the
  // owner stream is given next.
  std::uint16_t recorded_streams = 0;
};

// A straight-line list of ops in host issue order.
struct Body {
  std::vector<Op> ops;
  std::vector<Edge> edges;
  std::vector<Access> accesses;
  std::vector<MemoryPoint> points;    // those from the last op's range on stand at the body's end
  std::uint32_t end_point_begin = 0;  // points [end_point_begin, points.size()) follow the last op
  std::vector<OpId> carries;          // carries[s]: the op that sets slot s; none = slot unchanged
  // Where micro-batches and layers may begin (op positions, ascending); schedule/repetition.h.
  std::vector<std::uint32_t> micro_batch_marks;
  std::vector<std::uint32_t> layer_marks;

  [[nodiscard]] std::size_t size() const { return ops.size(); }
  [[nodiscard]] std::span<const Edge> EdgesOf(OpId op) const;
  [[nodiscard]] std::span<const Access> AccessesOf(OpId op) const;
  [[nodiscard]] std::span<const MemoryPoint> PointsBefore(OpId op) const;
  [[nodiscard]] std::span<const MemoryPoint> PointsAtEnd() const;
};

// A process group: `size` ranks, `stride` apart. Collectives of one
// group run one at a time, in issue order. Two groups may hold the same ranks (the native dialect
// gathers and reduces on separate communicators).
struct Group {
  std::string name;  // "shard", "replicate", "world", "shard.reduce", "reshard"
  std::int64_t size = 1;
  std::int64_t stride = 1;

  bool operator==(const Group&) const = default;
};

// Where one parameter lies inside its unit, in elements.
struct ParamSlot {
  ParamId param;
  std::int64_t shard_offset = 0;      // inside the shard buffer
  std::int64_t unsharded_offset = 0;  // inside the unsharded buffer
  std::int64_t padded_elements = 0;   // unsharded elements with this parameter's own padding
};

// How the parameters of a unit become W shards.
enum class ShardLayout : std::uint8_t {
  kRows,  // each parameter is cut into chunks of padded_elements / W (FSDP2: whole rows; zero3)
  kFlat,  // the unit's concatenation is cut into W equal parts (FSDP1, native, zero1 and zero2,
          // DDP with W = 1)
};

struct UnitInfo {
  std::string name;                  // "layers.3", "root"
  std::vector<ParamSlot> params;     // in communication order
  std::int64_t elements = 0;         // true elements (n_i)
  std::int64_t padded_elements = 0;  // unsharded elements with padding (N_i)
  std::int64_t shard_elements = 0;   // N_i / W_i
  std::int64_t shards = 1;           // W_i: W, but for experts that ranks share fewer
  bool full_precision = false;       // gathered and reduced in the master dtype
  ShardLayout layout = ShardLayout::kFlat;
};

// Where buffers of the device get their bytes.
enum class MemoryRegime : std::uint8_t {
  kCaching,  // from PyTorch's allocator: a request may wait, or fail for want of one stretch
  kArena,    // from one arena, at offsets fixed before the first step
};

struct Program {
  std::string dialect;  // a label: no rule hangs on it
  MemoryRegime memory = MemoryRegime::kCaching;
  std::int64_t shard_size = 1;         // W
  std::int64_t replicate_size = 1;     // R
  std::int64_t expert_size = 1;        // ranks that share the experts of each mixture
  std::int64_t tensor_size = 1;        // ranks that cut every layer
  std::int64_t context_size = 1;       // ranks that have tokens of the same samples
  std::int64_t pipeline_size = 1;      // classes of ranks, each with stages of its own
  std::int64_t pipeline_rank = 0;      // which of these the program is of
  std::int64_t micro_batch = 1;        // samples
  std::int64_t micro_batch_count = 1;  // accumulation steps

  std::vector<OpShape> shapes;
  std::vector<Kernel> kernels;
  std::vector<Buffer> buffers;
  std::vector<Bytes> pieces;  // sizes; those of a buffer add up to its own, or to more: see Buffer
  std::vector<Group> groups;
  std::vector<UnitInfo> units;
  std::vector<std::uint32_t> expert_ops;  // model ops that have rows of all those ranks, ascending
  // Model ops whose parameters' gradients lack those of the other ranks that cut the layer.
  std::vector<std::uint32_t> partial_ops;
  std::vector<std::string> model_op_names;  // subject names of compute ops: "layers.3.mlp.up_proj"
  std::uint32_t carry_slot_count = 0;

  Body init;    // run once: persistent buffers and their first values
  Body warmup;  // first step, where it differs from the others; empty = the first step is `step`
  Body step;    // repeated

  [[nodiscard]] const OpShape& ShapeOf(const Op& op) const { return shapes[op.shape.value]; }
  [[nodiscard]] std::span<const Kernel> KernelsOf(const OpShape& shape) const;
  [[nodiscard]] std::span<const Bytes> PiecesOf(const Buffer& buffer) const;
};

// The text form of an op id: "mb1.layers.12.bwd.reduce_scatter", "mb0.layers.3.mlp.up_proj.fwd".
// Stable across plans that differ elsewhere; equal on all ranks.
[[nodiscard]] std::string OpName(const Program& program, const Op& op);

}  // namespace shardwright
