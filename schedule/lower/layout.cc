#include "schedule/lower/layout.h"

#include <algorithm>
#include <array>
#include <map>

#include "core/error.h"

namespace shardwright {
namespace {

constexpr std::int64_t kNativeAlignBytes = 256;  // what vector loads and NCCL windows ask for

// A flat parameter whose members start at multiples of `align` elements.
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
  std::int64_t sum = 0;
  for (const ParamSlot& s : unit.params) {
    sum += model.params[s.param.value].trainable ? s.padded_elements : 0;
  }
  return sum;
}

}  // namespace shardwright
