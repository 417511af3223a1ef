#include "schedule/program.h"

#include <array>

#include "schedule/plan_names.h"

namespace shardwright {
namespace {

constexpr std::array<OpCodeInfo, kOpCodeCount> kOpCodes = {{
    {OpCode::kCompute, "compute", false, false},
    {OpCode::kAccumulateGrad, "accumulate_grad", false, false},
    {OpCode::kAllGather, "all_gather", true, false},
    {OpCode::kReduceScatter, "reduce_scatter", true, false},
    {OpCode::kAllReduce, "all_reduce", true, false},
    {OpCode::kBroadcast, "broadcast", true, false},
    {OpCode::kAllToAll, "all_to_all", true, false},
    {OpCode::kPermute, "permute", true, false},
    {OpCode::kSend, "send", true, false},
    {OpCode::kReceive, "receive", true, false},
    {OpCode::kSendReceive, "send_receive", true, false},
    {OpCode::kBarrier, "barrier", true, false},
    {OpCode::kCast, "cast", false, false},
    {OpCode::kGatherCopyIn, "gather_copy_in", false, false},
    {OpCode::kGatherCopyOut, "gather_copy_out", false, false},
    {OpCode::kReshardClone, "reshard_clone", false, false},
    {OpCode::kConcatGrad, "concat_grad", false, false},
    {OpCode::kReduceCopyIn, "reduce_copy_in", false, false},
    {OpCode::kGradScale, "grad_scale", false, false},
    {OpCode::kGradStore, "grad_store", false, false},
    {OpCode::kBucketCopy, "bucket_copy", false, false},
    {OpCode::kGradNorm, "grad_norm", false, false},
    {OpCode::kGradClip, "grad_clip", false, false},
    {OpCode::kOptimizerStep, "optimizer_step", false, false},
    {OpCode::kHostOptimizerStep, "host_optimizer_step", false, true},
    {OpCode::kCopyH2d, "copy_h2d", false, false},
    {OpCode::kCopyD2h, "copy_d2h", false, false},
    {OpCode::kHostWait, "host_wait", false, true},
    {OpCode::kStreamWait, "stream_wait", false, false},
    {OpCode::kInitialize, "initialize", false, false},
}};

constexpr bool TableFollowsEnum() {
  for (std::size_t i = 0; i < kOpCodes.size(); ++i) {
    if (static_cast<std::size_t>(kOpCodes[i].code) != i) {
      return false;
    }
  }
  return true;
}
static_assert(TableFollowsEnum());

// Each in the order of its enumerators.
constexpr std::array<std::string_view, kStreamCount> kStreamNames = {
    "host",      "compute", "copy_in", "gather",   "reduce",
    "replicate", "h2d",     "d2h",     "previous", "next"};
constexpr std::array<std::string_view, 5> kPhaseNames = {"init", "fwd", "rec", "bwd", "opt"};
static_assert(kPhaseNames.size() == static_cast<std::size_t>(Phase::kOptimizer) + 1);
constexpr std::array<std::string_view, kCategoryCount> kCategoryNames = {
    "parameter_shard",     "unsharded_parameter", "all_gather",      "unsharded_gradient",
    "reduce_scatter",      "sharded_gradient",    "optimizer_state", "activation",
    "activation_gradient", "temporary",           "model_buffer",    "input"};

// [begin of `op`, begin of the op after it) of one CSR array of the body.
template <class T>
std::span<const T> Slice(const Body& body, OpId op, const std::vector<T>& all,
                         std::uint32_t Op::*begin, std::size_t end_of_last) {
  const std::size_t first = body.ops[op.value].*begin;
  const std::size_t next = op.value + 1U;
  const std::size_t last = next < body.ops.size() ? body.ops[next].*begin : end_of_last;
  return std::span<const T>(all).subspan(first, last - first);
}

}  // namespace

const OpCodeInfo& InfoOf(OpCode code) {
  return kOpCodes[static_cast<std::size_t>(code)];
}

std::string_view NameOf(Stream stream) {
  return NameIn(kStreamNames, stream);
}

std::string_view NameOf(Phase phase) {
  return NameIn(kPhaseNames, phase);
}

std::string_view NameOf(Category category) {
  return NameIn(kCategoryNames, category);
}

std::span<const Edge> Body::EdgesOf(OpId op) const {
  return Slice(*this, op, edges, &Op::edge_begin, edges.size());
}
std::span<const Access> Body::AccessesOf(OpId op) const {
  return Slice(*this, op, accesses, &Op::access_begin, accesses.size());
}
std::span<const MemoryPoint> Body::PointsBefore(OpId op) const {
  return Slice(*this, op, points, &Op::point_begin, end_point_begin);
}
std::span<const MemoryPoint> Body::PointsAtEnd() const {
  return std::span<const MemoryPoint>(points).subspan(end_point_begin);
}

std::span<const Kernel> Program::KernelsOf(const OpShape& shape) const {
  return std::span<const Kernel>(kernels).subspan(shape.kernel_begin, shape.kernel_count);
}

std::span<const Bytes> Program::PiecesOf(const Buffer& buffer) const {
  return std::span<const Bytes>(pieces).subspan(buffer.pieces.begin, buffer.pieces.count);
}

std::string OpName(const Program& program, const Op& op) {
  const OpShape& shape = program.ShapeOf(op);
  const bool of_model_op = shape.code == OpCode::kCompute || shape.code == OpCode::kAccumulateGrad;
  std::string text;
  if (op.phase != Phase::kInit && op.phase != Phase::kOptimizer) {
    text = "mb" + std::to_string(op.micro_batch) + '.';
  }
  if (op.subject != kNoSubject) {
    text += of_model_op ? program.model_op_names[op.subject] : program.units[op.subject].name;
    text += '.';
  }
  text += NameOf(op.phase);
  if (shape.code != OpCode::kCompute) {
    text += '.';
    text += InfoOf(shape.code).name;
  }
  if (op.occurrence != 0) {
    text += '#' + std::to_string(op.occurrence);
  }
  return text;
}

}  // namespace shardwright
