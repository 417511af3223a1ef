#include "executor/checkpoint/state.h"

#include <cstring>
#include <string_view>

#include "executor/checkpoint/checkpoint.h"
#include "executor/initialize.h"
#include "executor/optimizer.h"
#include "models/cut_experts.h"

namespace shardwright {
namespace {

std::string StateName(std::string_view state, const std::string& fqn) {
  return kStatePrefix + std::string(state) + "." + fqn;
}

std::string FqnOf(const Model& model, const ShardPiece& piece, std::int64_t part) {
  return FqnOfPart(model, piece.param, part);
}

// One tensor among the model's buffers: elements [offset, offset + count).
struct BufferTensor {
  std::string name;
  std::int64_t offset = 0;
  std::int64_t count = 0;
};

// PyTorch's names for the buffers of a batch norm; anything else is saved as one tensor.
std::vector<BufferTensor> BufferTensors(const Model& model) {
  std::vector<BufferTensor> tensors;
  std::int64_t offset = 0;
  for (std::size_t m = 0; m < model.modules.size(); ++m) {
    const Module& module = model.modules[m];
    const std::int64_t elements = module.buffer_elements;
    if (elements == 0) {
      continue;
    }
    const std::string prefix = module.fqn.empty() ? "" : module.fqn + ".";
    const std::int64_t channels = BatchNormChannels(model, ModuleId(m));
    if (channels > 0 && elements >= 2 * channels) {
      tensors.push_back({prefix + "running_mean", offset, channels});
      tensors.push_back({prefix + "running_var", offset + channels, channels});
      if (elements == 2 * channels + 1) {
        tensors.push_back({prefix + "num_batches_tracked", offset + 2 * channels, 1});
      }
    } else {
      tensors.push_back({prefix + "buffers", offset, elements});
    }
    offset += elements;
  }
  return tensors;
}

const std::byte* At(const std::byte* memory, std::int64_t element, DType dtype) {
  return memory + element * SizeOf(dtype);
}

// Calls `f` with every stretch of the k-th state, state by state; those of one tensor follow one
// another, by ascending elements. Only trainable parameters have states.
template <class F>
void ForEachState(const Model& model, std::int64_t part, const BoundUnit& unit, F f) {
  const std::size_t count = unit.states.empty() ? 0 : unit.states.front().data.size();
  for (std::size_t k = 0; k < count; ++k) {
    for (const BoundStates& states : unit.states) {
      for (const ShardPiece& piece : InWhole(model, states.pieces, part)) {
        f(k, piece, states.data[k] + piece.shard_offset * SizeOf(unit.dtype));
      }
    }
  }
}

// Elements of a tensor, into the rank's memory.
void LoadStretch(const TensorReader& read, const SavedStretch& from, DType dtype, void* to,
                 const MemoryCopy& copy) {
  std::vector<std::byte> elements(static_cast<std::size_t>(from.count * SizeOf(dtype)));
  if (read(from.tensor, from.begin, from.count, dtype, elements.data())) {
    copy(to, elements.data(), static_cast<std::int64_t>(elements.size()));
  }
}

void LoadParameters(const TensorReader& read, const Model& model, std::int64_t part,
                    const BoundCopy& to, const MemoryCopy& copy) {
  std::vector<std::byte> shard(static_cast<std::size_t>(to.elements * SizeOf(to.dtype)));
  const std::vector<ShardPiece> pieces = InWhole(model, to.pieces, part);
  std::vector<const ShardPiece*> absent;
  for (const ShardPiece& piece : pieces) {
    if (!read(FqnOf(model, piece, part), piece.param_begin, piece.count, to.dtype,
              shard.data() + piece.shard_offset * SizeOf(to.dtype))) {
      absent.push_back(&piece);
    }
  }
  if (!absent.empty()) {
    std::vector<std::byte> present(shard.size());
    copy(present.data(), to.data, static_cast<std::int64_t>(shard.size()));
    for (const ShardPiece* const piece : absent) {
      const std::int64_t at = piece->shard_offset * SizeOf(to.dtype);
      std::memcpy(shard.data() + at, present.data() + at,
                  static_cast<std::size_t>(piece->count * SizeOf(to.dtype)));
    }
  }
  copy(to.data, shard.data(), static_cast<std::int64_t>(shard.size()));
}

}  // namespace

void DescribeState(const Model& model, const Job& job, Manifest& manifest) {
  manifest.model = model.name;
  manifest.optimizer = job.optimizer.kind;
  manifest.tensors.clear();
  manifest.aliases.clear();
  for (const auto& [id, part] : AllParts(model)) {
    const Parameter& param = model.params[id.value];
    const std::string fqn = FqnOfPart(model, id, part);
    if (param.tied_to.valid()) {
      manifest.aliases.push_back({fqn, model.params[param.tied_to.value].fqn});
      continue;
    }
    manifest.tensors.push_back(
        {fqn, TensorKind::kParameter, job.precision.master, param.WholeShape()});
    for (const std::string_view state : OptimizerStateNames(job.optimizer.kind)) {
      if (param.trainable && job.mode == JobMode::kTrain) {
        manifest.tensors.push_back(
            {StateName(state, fqn), TensorKind::kState, job.precision.master, param.WholeShape()});
      }
    }
  }
  for (const BufferTensor& tensor : BufferTensors(model)) {
    manifest.tensors.push_back({tensor.name, TensorKind::kBuffer, DType::kFp32, {tensor.count}});
  }
}

std::vector<StretchData> StretchesOf(OptimizerKind optimizer, const RankState& rank) {
  const Model& model = rank.model;
  std::vector<StretchData> stretches;
  const auto names = OptimizerStateNames(optimizer);
  const std::int64_t part = rank.part;
  for (const BoundUnit& unit : rank.units) {
    for (const ShardPiece& piece : InWhole(model, unit.pieces, part)) {
      stretches.push_back({{FqnOf(model, piece, part), piece.param_begin, piece.count},
                           unit.dtype,
                           At(unit.parameters, piece.shard_offset, unit.dtype)});
    }
    for (const ShardPiece& piece : InWhole(model, unit.copy_only, part)) {
      stretches.push_back({{FqnOf(model, piece, part), piece.param_begin, piece.count},
                           unit.copy->dtype,
                           At(unit.copy->data, piece.shard_offset, unit.copy->dtype),
                           unit.dtype});
    }
    ForEachState(model, part, unit, [&](std::size_t k, const ShardPiece& piece, std::byte* data) {
      stretches.push_back(
          {{StateName(names[k], FqnOf(model, piece, part)), piece.param_begin, piece.count},
           unit.dtype,
           data});
    });
  }
  if (rank.model_buffers != nullptr) {
    for (const BufferTensor& tensor : BufferTensors(model)) {
      stretches.push_back(
          {{tensor.name, 0, tensor.count}, DType::kFp32, rank.model_buffers + tensor.offset});
    }
  }
  return stretches;
}

TensorReader ReaderOf(const Checkpoint& checkpoint) {
  return [&checkpoint](const std::string& name, std::int64_t begin, std::int64_t count, DType dtype,
                       void* out) {
    checkpoint.Read(name, begin, count, dtype, out);
    return true;
  };
}

void LoadState(const TensorReader& read, OptimizerKind optimizer, const RankState& rank,
               bool with_states) {
  const Model& model = rank.model;
  const auto names = OptimizerStateNames(optimizer);
  const std::int64_t part = rank.part;
  for (const BoundUnit& unit : rank.units) {
    if (unit.parameters == nullptr) {
      continue;
    }
    const BoundCopy masters{unit.pieces, unit.elements, unit.dtype, unit.parameters};
    LoadParameters(read, model, part, masters, rank.copy);
    if (unit.host_copy != nullptr) {
      rank.copy(unit.host_copy, unit.parameters, unit.elements * SizeOf(unit.dtype));
    }
    if (unit.copy.has_value()) {
      LoadParameters(read, model, part, *unit.copy, rank.copy);
    }
    if (with_states) {
      ForEachState(model, part, unit, [&](std::size_t k, const ShardPiece& piece, std::byte* data) {
        LoadStretch(
            read, {StateName(names[k], FqnOf(model, piece, part)), piece.param_begin, piece.count},
            unit.dtype, data, rank.copy);
      });
    }
  }
  if (rank.model_buffers != nullptr) {
    for (const BufferTensor& tensor : BufferTensors(model)) {
      LoadStretch(read, {tensor.name, 0, tensor.count}, DType::kFp32,
                  rank.model_buffers + tensor.offset, rank.copy);
    }
  }
}

}  // namespace shardwright
