// How many elements of a unit each rank stores, and where each parameter lies in the gathered
// buffer. The result is a UnitInfo: `elements` (true), `shard_elements` (per rank),
// `padded_elements` (all ranks) and one slot per parameter.
//
// Example: a unit with a weight of 10 x 5 and a bias of 10, in bf16, over W = 4 ranks. It has 60
// true elements.
//
//   layout                     per rank  gathered  why
//   FSDP2 (rows)                     18        72  ceil(10 / 4) = 3 rows per rank: 15 + 3 elements
//   FSDP1, use_orig_params           17        68  bias at 56 (a multiple of 8); ceil(66 / 4)
//   FSDP1, one flat tensor           15        60  no gaps; ceil(60 / 4)
//   native                          128       512  bias at 128 (256 bytes); shards likewise
//   ZeRO-1, ZeRO-2                   16        64  60 rounded up to a multiple of 2 W = 8
//   ZeRO-3                           16        64  ceil(50 / 4) = 13 and ceil(10 / 4) = 3
//   DDP                              60        60  every rank has all
//
// Every rank counts with the same shard size, the one with padding. So all ranks run one program,
// and collectives have equal sizes on all of them. Each layout costs O(parameters of the unit).

#include "schedule/lower/layout.h"

#include <array>
#include <map>

#include "core/ranges.h"

namespace shardwright {
namespace {

constexpr std::int64_t kNativeAlignBytes = 256;  // what vector loads and NCCL windows ask for

// Lays the unit's parameters one behind the other, each at a multiple of `align` elements. With
// align 8, a weight of 50 elements begins at 0 and a bias of 10 at 56; `elements` is 60,
// `padded_elements` is 66. The caller pads the end.
UnitInfo Flatten(const Model& model, const ResolvedUnit& unit, std::int64_t align) {
  UnitInfo info;
  info.name = unit.name;
  std::int64_t offset = 0;
  for (const ParamId p : unit.params) {
    const std::int64_t n = model.params[p.value].Elements();
    offset = RoundUp(offset, align);
    info.params.push_back({p, 0, offset, n});
    info.elements += n;
    offset += n;
  }
  info.padded_elements = offset;  // the caller adds the padding at the end
  return info;
}

}  // namespace

// An op of experts with one parameter per matrix becomes two stacks, as Transformers 5 stores them:
// gates and ups in the first, downs in the second. Example: 8 gated experts whose three matrices
// have 64 x 32 elements each. The first stack has 8 rows and 8 x 2 x 2,048 = 32,768 elements, the
// second 8 rows and 16,384. Over 4 ranks FSDP2 then gives each rank two whole experts. Ops whose
// parameters are stacked already are left alone.
ParamStacks StackExperts(const Model& model) {
  ParamStacks result;
  for (const ModelOp& op : model.ops) {
    const OpSpec& spec = model.SpecOf(op);
    const std::size_t matrices = spec.gated ? 3 : 2;
    if (spec.kind != OpKind::kExperts ||
        op.params.size() != matrices * static_cast<std::size_t>(spec.experts)) {
      continue;
    }
    result.stack_of.resize(model.params.size(), ParamStacks::kNone);
    // The order of kExperts' parameters; see OpSpec::up_last.
    const std::size_t down = spec.up_last ? 1 : matrices - 1;
    const auto first = static_cast<std::uint32_t>(result.stacks.size());
    result.stacks.push_back({op.params[0], spec.experts, 0});
    result.stacks.push_back({op.params[down], spec.experts, 0});
    for (std::size_t k = 0; k < op.params.size(); ++k) {
      const ParamId p = op.params[k];
      const std::uint32_t stack = first + (k % matrices == down ? 1 : 0);
      result.stack_of[p.value] = stack;
      result.stacks[stack].elements += model.params[p.value].Elements();
    }
  }
  return result;
}

UnitInfo LayoutPerParameter(const Model& model, const ResolvedUnit& unit, std::int64_t shard_size,
                            const ParamStacks& stacks) {
  UnitInfo info;
  info.name = unit.name;
  info.layout = ShardLayout::kRows;
  for (const ParamId p : unit.params) {
    const ParamStacks::Stack* stack = stacks.Of(p);
    if (stack != nullptr && stack->first != p) {
      continue;
    }
    const Parameter& param = model.params[p.value];
    const std::int64_t n = stack != nullptr ? stack->elements : param.Elements();
    std::int64_t rows = stack != nullptr      ? stack->rows
                        : param.shape.empty() ? 1
                                              : param.shape.front();
    // Of more ranks than experts each has a part of every expert (shard_placement_fn of torchtitan,
    // distributed/fsdp.py).
    if (param.parts > 1 && rows < shard_size) {
      rows = param.shape[param.shape.size() - 2];
    }
    const std::int64_t row_elements = rows == 0 ? 0 : n / rows;
    const std::int64_t chunk = CeilDiv(rows, shard_size) * row_elements;
    info.params.push_back({p, info.shard_elements, info.padded_elements, chunk * shard_size});
    info.elements += n;
    info.shard_elements += chunk;
    info.padded_elements += chunk * shard_size;
  }
  return info;
}

UnitInfo LayoutFlat(const Model& model, const ResolvedUnit& unit, std::int64_t shard_size,
                    bool use_orig_params, DType compute) {
  const std::int64_t align = use_orig_params ? 16 / SizeOf(compute) : 1;
  UnitInfo info = Flatten(model, unit, align);
  info.shard_elements = CeilDiv(info.padded_elements, shard_size);
  info.padded_elements = info.shard_elements * shard_size;
  return info;
}

std::int64_t NativeShardElements(std::int64_t elements, std::int64_t shard_size, DType compute) {
  return RoundUp(CeilDiv(elements, shard_size), kNativeAlignBytes / SizeOf(compute));
}

UnitInfo LayoutNative(const Model& model, const ResolvedUnit& unit, std::int64_t shard_size,
                      DType compute) {
  UnitInfo info = Flatten(model, unit, kNativeAlignBytes / SizeOf(compute));
  info.shard_elements = NativeShardElements(info.padded_elements, shard_size, compute);
  info.padded_elements = info.shard_elements * shard_size;
  return info;
}

UnitInfo LayoutPartitioned(const Model& model, const ResolvedUnit& unit, std::int64_t shard_size) {
  UnitInfo info;
  info.name = unit.name;
  std::int64_t offset = 0;
  for (const bool trainable : {true, false}) {
    for (const ParamId p : unit.params) {
      const Parameter& param = model.params[p.value];
      if (param.trainable == trainable) {
        info.params.push_back({p, 0, offset, param.Elements()});
        info.elements += param.Elements();
        offset += param.Elements();
      }
    }
    if (trainable) {
      offset = RoundUp(offset, 2 * shard_size);
      info.shard_elements = offset / shard_size;
    }
  }
  info.padded_elements = offset;
  return info;
}

UnitInfo LayoutPerParameterFlat(const Model& model, const ResolvedUnit& unit,
                                std::int64_t shard_size) {
  UnitInfo info;
  info.name = unit.name;
  info.layout = ShardLayout::kRows;
  for (const ParamId p : unit.params) {
    const std::int64_t n = model.params[p.value].Elements();
    const std::int64_t chunk = CeilDiv(n, shard_size);
    info.params.push_back({p, info.shard_elements, info.padded_elements, chunk * shard_size});
    info.elements += n;
    info.shard_elements += chunk;
    info.padded_elements += chunk * shard_size;
  }
  return info;
}

UnitInfo LayoutWhole(const Model& model, const ResolvedUnit& unit) {
  UnitInfo info = Flatten(model, unit, 1);
  info.shard_elements = info.padded_elements;
  return info;
}

// Returns the parts of the parameters in the fullest shard: the optimizer keeps one state tensor
// for each part. Example: the FSDP1 layout above with shards of 17 elements. Shards 0 and 1 hold 17
// elements of the weight, shard 2 holds 16, and shard 3 holds the bias. The result is {17}, of
// shard 0.
//
// Of the shards that one parameter fills, only the first, the second and the last are looked at:
// the shards between have the second's content. Without that rule the cost would grow with the
// ranks.
std::vector<std::int64_t> FullestFlatShard(const Model& model, const UnitInfo& unit) {
  const std::int64_t shard = unit.shard_elements;
  // Elements of the parameter in shard `s`.
  const auto overlap = [&](const ParamSlot& slot, std::int64_t s) {
    const std::int64_t end = slot.unsharded_offset + model.params[slot.param.value].Elements();
    return std::max<std::int64_t>(
        0, std::min(end, (s + 1) * shard) - std::max(slot.unsharded_offset, s * shard));
  };
  // Shards that a parameter fills as a whole are all alike: one of them stands for them.
  std::map<std::int64_t, std::int64_t> filled;  // trainable elements by shard
  for (const ParamSlot& slot : unit.params) {
    const std::int64_t n = model.params[slot.param.value].Elements();
    if (!model.params[slot.param.value].trainable || n == 0) {
      continue;
    }
    const std::int64_t first = slot.unsharded_offset / shard;
    const std::int64_t last = (slot.unsharded_offset + n - 1) / shard;
    const std::array shards = {first, std::min(first + 1, last), last};  // ascending
    for (std::size_t i = 0; i < shards.size(); ++i) {
      if (i == 0 || shards[i] != shards[i - 1]) {
        filled[shards[i]] += overlap(slot, shards[i]);
      }
    }
  }
  std::int64_t fullest = 0, most = 0;
  for (const auto& [s, elements] : filled) {
    if (elements > most) {
      fullest = s;
      most = elements;
    }
  }
  std::vector<std::int64_t> tensors;
  for (const ParamSlot& slot : unit.params) {
    if (model.params[slot.param.value].trainable && overlap(slot, fullest) > 0) {
      tensors.push_back(overlap(slot, fullest));
    }
  }
  return tensors;
}

// bitsandbytes 0.50: functional.py (quantize_4bit: a table of 16 values per weight; double
// quantisation keeps an offset, too, and shares its own table), nn/modules.py (Int8Params: SCB, one
// scale per row).
// Example: 1,024 weights in 16 rows of 64.
//   int8         1,024 bytes packed, 16 x 4 = 64 bytes of scales
//   nf4            512 bytes packed, (16 blocks + 16 table entries) x 4 = 128
//   nf4, double    512 bytes packed, 16 + (1 + 1 + 16) x 4 = 88
QuantizedSize SizeOfQuantized(FrozenFormat format, std::int64_t elements,
                              std::int64_t row_elements) {
  constexpr std::int64_t kBlock = 64, kScaleBlock = 256, kFp32 = 4, kTable = 16;
  const std::int64_t blocks = CeilDiv(elements, kBlock);
  switch (format) {
    case FrozenFormat::kInt8:
      return {Bytes(elements), Bytes(elements / row_elements * kFp32)};
    case FrozenFormat::kNf4:
      return {Bytes(CeilDiv(elements, 2)), Bytes((blocks + kTable) * kFp32)};
    case FrozenFormat::kNf4Double:
      return {Bytes(CeilDiv(elements, 2)),
              Bytes(blocks + (CeilDiv(blocks, kScaleBlock) + 1 + kTable) * kFp32)};
    default:
      return {};
  }
}

std::int64_t TrainablePaddedElements(const Model& model, const UnitInfo& unit) {
  const std::int64_t sum = Summed<std::int64_t>(unit.params, [&](const ParamSlot& s) {
    return model.params[s.param.value].trainable ? s.padded_elements : 0;
  });
  return sum;
}

}  // namespace shardwright
