// Weights that FSDP2 gathers in fp8 for torchao's Float8Linear (torchao 0.18, fsdp_utils.py).
//
// Example: a layer of 2,622,464 parameters on 4 ranks, masters in fp32. 2,621,440 of them are in 7
// linear layers, 1,024 in norms.
//
//   copy_in   per linear layer: the largest magnitude of its shard, an all-reduce of 4 bytes
//             cast the shards: 655,360 bytes of fp8 and 512 of bf16
//   gather    2,623,488 bytes as uint8, in place of 5,244,928 in bf16
//   update    "precomputed": the magnitudes of all layers by one all-reduce, from which the gathers
//             of the next step take their scales; those of the first step find none

#include "core/error.h"
#include "core/ranges.h"
#include "models/kernels/fp8.h"
#include "models/trainable.h"
#include "schedule/lower/fsdp2_rules.h"

namespace shardwright {
namespace {

// Element-wise kernels, by the bytes that each reads and writes.
std::vector<Kernel> Passes(std::initializer_list<std::pair<std::int64_t, std::int64_t>> bytes) {
  return Mapped<Kernel>(bytes, [](const auto& pass) {
    return Kernel{.kind = KernelClass::kElementwise,
                  .read = Bytes(pass.first),
                  .written = Bytes(pass.second)};
  });
}

}  // namespace

std::vector<bool> Fp8Weights(const LowerInput& in) {
  std::vector<bool> result(in.model.params.size(), false);
  const std::vector<bool> convertible = ConvertibleWeights(in.model);
  for (const ModelOp& op : in.model.ops) {
    if (GathersFp8(in.kernels.fp8) && !op.params.empty() && convertible[op.params[0].value] &&
        MultipliesFp8(in.model.SpecOf(op), in.job.precision.param, in.kernels)) {
      result[op.params[0].value] = true;
    }
  }
  return result;
}

// Storages that are gathered in fp8 are as large as they have elements. A shard of another size
// than the others' has no padding in torchao, and the gather fails.
void Fsdp2Rules::InitUnit(UnitId u) {
  StepRules::InitUnit(u);
  std::vector<Bytes> sizes = StoredBytes(u, PrecisionOf(u).param, false);
  for (std::size_t i = 0; i < sizes.size(); ++i) {
    const ParamSlot& slot = Info(u).params[i];
    const Parameter& param = e_.in.model.params[slot.param.value];
    if (is_fp8_[slot.param.value] && slot.padded_elements != param.Elements()) {
      throw InputError("kernel set: fp8", '"' + param.fqn + "\" in uneven parts",
                       "a shard size that divides its rows", "torchao gathers no padding in fp8");
    }
    if (is_fp8_[slot.param.value]) {
      sizes[i] = Bytes(slot.padded_elements);
      fp8_elements_[u.value] += slot.padded_elements;
    }
  }
  At(u).unsharded_pieces = e_.InternPieces(sizes);
}

// Bytes, where a unit has both kinds (_get_all_gather_input_metadatas of _fsdp_collectives.py).
DType Fsdp2Rules::GatherDType(UnitId u) const {
  return Fp8Shard(u) == 0                        ? PrecisionOf(u).param
         : Fp8Shard(u) == Info(u).shard_elements ? DType::kFp8
                                                 : DType::kUint8;
}

// Sums the largest magnitudes, where no update has left them, and makes the kernels that cast. Of
// one weight at a time two copies in fp32 live in the buffer that is returned.
BufferId Fsdp2Rules::CastToFp8(UnitId u, BufferId source, Phase phase, std::vector<Kernel>& casts) {
  const DType o = job_.precision.master;
  const Bytes number(SizeOf(o));
  std::vector<std::int64_t> shards;
  for (const ParamSlot& slot : Info(u).params) {
    if (is_fp8_[slot.param.value]) {
      shards.push_back(slot.padded_elements / Info(u).shards);
    }
  }
  if (shards.empty()) {
    return {};
  }
  const BufferId scratch = e_.Alloc(Bytes(8 * *std::max_element(shards.begin(), shards.end())),
                                    Category::kAllGather, Stream::kCopyIn);
  for (const std::int64_t n : shards) {
    const std::int64_t bytes = n * SizeOf(o), wide = 4 * n;
    // To fp32 and times the scale, clamped, and cast.
    const auto passes = Passes({{bytes, wide}, {wide, wide}, {wide, n}});
    casts.insert(casts.end(), passes.begin(), passes.end());
    if (Precomputes() && !first_step_) {
      continue;
    }
    // The magnitudes, the largest one, and its scale: in fp64, clamped, inverted, scaled, in fp32.
    e_.Add(
        Collective(OpCode::kCast, Stream::kCopyIn, {}, number, o),
        Passes({{bytes, bytes}, {bytes, 4}, {4, 8}, {8, 8}, {8, 8}, {8, 8}, {8, 4}}), phase,
        u.value,
        {{source, AccessMode::kRead, Role::kInput}, {scratch, AccessMode::kWrite, Role::kOutput}});
    e_.AddCollective(Collective(OpCode::kAllReduce, Stream::kCopyIn, ShardGroup(u), number, o),
                     {phase, u.value}, {});
    e_.body->UseFirst(scratch, number, AccessMode::kReadWrite, Role::kInput);
  }
  return scratch;
}

void Fsdp2Rules::EndStep() {
  StepRules::EndStep();
  const std::int64_t elements = Summed<std::int64_t>(fp8_elements_) / plan_.shard_size;
  if (!Precomputes() || elements == 0) {
    return;
  }
  const DType o = job_.precision.master;
  const std::int64_t weights = CountIf(is_fp8_, std::identity());
  const Bytes size(weights * SizeOf(o));
  const BufferId scales = e_.Alloc(size, Category::kTemporary, Stream::kCompute);
  e_.Add(Collective(OpCode::kCast, Stream::kCompute, {}, size, o),
         MultiTensorKernels(elements, weights, Bytes(elements * SizeOf(o)), size, o),
         Phase::kOptimizer, kNoSubject, {{scales, AccessMode::kWrite, Role::kOutput}});
  for (std::uint32_t u = 0; u < unit_count(); ++u) {
    if (Fp8Shard(UnitId(u)) > 0) {
      e_.body->Use(At(UnitId(u)).shard, AccessMode::kRead, Role::kParameter,
                   static_cast<std::uint16_t>(u));
    }
  }
  SumNorm(scales, Stream::kCompute, shard_group_);
  e_.body->Free(scales);
}

}  // namespace shardwright
