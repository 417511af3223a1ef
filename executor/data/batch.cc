#include "executor/data/batch.h"

#include <algorithm>
#include <cstring>
#include <set>

#include "core/error.h"

namespace shardwright {
namespace {

// Of a sequence this rank's tokens, where ranks have parts of it.
void WriteTokens(const Dataset& data, std::int64_t sample, InputKind input, const CutPlace& cut,
                 const View& out) {
  if (cut.context_ranks == 1) {
    return data.Write(sample, input, out);
  }
  std::vector<std::byte> sequence(
      static_cast<std::size_t>(out.elements * cut.context_ranks * SizeOf(out.dtype)));
  data.Write(sample, input, {sequence.data(), out.dtype, out.elements * cut.context_ranks});
  const std::int64_t size = SizeOf(out.dtype);
  for (std::int64_t t = 0; t < out.elements; ++t) {
    std::memcpy(static_cast<std::byte*>(out.data) + t * size,
                sequence.data() + cut.PositionHere(t, out.elements) * size,
                static_cast<std::size_t>(size));
  }
}

void WriteEmpty(InputKind kind, const View& out) {
  if (kind == InputKind::kLabels) {
    auto* labels = static_cast<std::int64_t*>(out.data);
    std::fill(labels, labels + out.elements, kNoLabel);
    return;
  }
  std::memset(out.data, 0, static_cast<std::size_t>(out.elements * SizeOf(out.dtype)));
}

}  // namespace

std::vector<TensorId> InputTensors(const Model& model) {
  std::set<TensorId> inputs;
  for (const ModelOp& op : model.ops) {
    for (const TensorId t : op.inputs) {
      if (!model.tensors[t.value].producer.valid()) {
        inputs.insert(t);
      }
    }
  }
  for (const Model::Stage& stage : model.stages) {
    inputs.erase(stage.received);
  }
  return {inputs.begin(), inputs.end()};
}

void WriteBatch(const Model& model, const Dataset& data, const Sampler& sampler,
                const BatchRange& range, std::span<const View> views) {
  const std::vector<TensorId> inputs = InputTensors(model);
  SW_CHECK(inputs.size() == views.size(), std::to_string(views.size()));
  std::vector<std::int64_t> samples;
  for (std::int64_t i = 0; i < range.count; ++i) {
    samples.push_back(SampleAt(sampler, range.step, range.first + i).sample);
  }
  for (std::size_t t = 0; t < inputs.size(); ++t) {
    const Tensor& tensor = model.tensors[inputs[t].value];
    const View& view = views[t];
    const std::int64_t copies = tensor.per_sample ? range.count : 1;
    SW_CHECK(view.elements == copies * tensor.elements, std::to_string(view.elements));
    for (std::int64_t i = 0; i < copies; ++i) {
      View one = view;
      one.elements = tensor.elements;
      one.data = static_cast<std::byte*>(view.data) + i * tensor.elements * SizeOf(view.dtype);
      const std::int64_t sample = tensor.per_sample ? samples[static_cast<std::size_t>(i)] : 0;
      if (sample < 0) {
        WriteEmpty(tensor.input, one);
      } else {
        WriteTokens(data, sample, tensor.input, range.cut, one);
      }
    }
  }
}

}  // namespace shardwright
