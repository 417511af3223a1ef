#include "tests/executor/kernels/model_runner.h"

#include <algorithm>
#include <cstddef>
#include <new>

#include "core/error.h"
#include "executor/host/kernels/table.h"
#include "executor/model_op.h"
#include "models/kernel_set.h"

namespace shardwright::testing {
namespace {

// 64-byte aligned bytes that begin as NaNs.
class Memory {
 public:
  Memory() = default;
  explicit Memory(std::int64_t bytes)
      : lines_(static_cast<std::size_t>((bytes + 63) / 64)),
        bytes_(static_cast<std::size_t>(bytes)) {
    for (Line& line : lines_) {
      std::fill(std::begin(line.bytes), std::end(line.bytes), std::byte{0xFF});
    }
  }
  [[nodiscard]] std::span<std::byte> span() {
    return {reinterpret_cast<std::byte*>(lines_.data()), bytes_};
  }
  [[nodiscard]] void* data() { return lines_.data(); }

 private:
  struct alignas(64) Line {
    std::byte bytes[64];
  };
  std::vector<Line> lines_;
  std::size_t bytes_ = 0;
};

class Runner {
 public:
  Runner(const Model& model, const ModelInputs& inputs)
      : model_(model),
        inputs_(inputs),
        options_(FindKernelSet("shardwright-host", "test")),
        tensors_(model.tensors.size()),
        grads_(model.tensors.size()),
        saved_(model.ops.size()),
        buffers_(model.modules.size()),
        params_(model.params.size()) {
    run_.param_grads.resize(model.params.size());
    MakeParams();
    MakeInputs();
  }

  ModelRun Run() {
    for (std::size_t i = 0; i < model_.ops.size(); ++i) {
      Forward(i);
    }
    const TensorId last = model_.ops.back().outputs[0];
    const auto* const values = static_cast<const float*>(tensors_[last.value].data());
    run_.result.assign(values, values + ElementsOf(last));
    run_.loss = static_cast<double>(values[0]);
    if (model_.tensors[last.value].role != TensorRole::kLoss) {
      grads_[last.value].assign(static_cast<std::size_t>(ElementsOf(last)), 1.0F);
    }
    for (std::size_t i = model_.ops.size(); i-- > 0;) {
      Backward(i);
    }
    return run_;
  }

 private:
  [[nodiscard]] std::int64_t ElementsOf(TensorId t) const {
    const Tensor& tensor = model_.tensors[t.value];
    return tensor.elements * (tensor.per_sample ? inputs_.batch : 1);
  }

  [[nodiscard]] std::size_t StorageOf(ParamId p) const {
    const ParamId tied = model_.params[p.value].tied_to;
    return tied.valid() ? tied.value : p.value;
  }

  [[nodiscard]] std::int64_t BatchOf(const ModelOp& op) const {
    const bool is_shared =
        !op.inputs.empty() && std::none_of(op.inputs.begin(), op.inputs.end(), [&](TensorId t) {
          return model_.tensors[t.value].per_sample;
        });
    return is_shared ? 1 : inputs_.batch;
  }

  void MakeParams() {
    for (std::size_t p = 0; p < model_.params.size(); ++p) {
      const Parameter& param = model_.params[p];
      if (param.tied_to.valid()) {
        continue;
      }
      for (std::int64_t i = 0; i < param.Elements(); ++i) {
        params_[p].push_back(inputs_.weight(param.fqn, i));
      }
    }
  }

  void MakeInputs() {
    for (std::size_t t = 0; t < model_.tensors.size(); ++t) {
      const Tensor& tensor = model_.tensors[t];
      if (tensor.producer.valid()) {
        continue;
      }
      const bool is_index = tensor.role == TensorRole::kIndex;
      const std::int64_t n = ElementsOf(TensorId(t));
      tensors_[t] = Memory(n * (is_index ? 8 : 4));
      for (std::int64_t i = 0; i < n; ++i) {
        if (is_index) {
          static_cast<std::int64_t*>(tensors_[t].data())[i] = inputs_.index(tensor.input, i);
        } else {
          static_cast<float*>(tensors_[t].data())[i] = inputs_.feature(i);
        }
      }
    }
  }

  ModelOpCall BaseCall(const ModelOp& op) {
    ModelOpCall call;
    call.spec = &model_.SpecOf(op);
    call.options = &options_;
    call.batch = BatchOf(op);
    for (const TensorId t : op.inputs) {
      const bool is_index = model_.tensors[t.value].role == TensorRole::kIndex;
      call.inputs.push_back(
          {tensors_[t.value].data(), is_index ? DType::kInt64 : DType::kFp32, ElementsOf(t)});
    }
    for (const ParamId p : op.params) {
      const std::vector<float>& values = params_[StorageOf(p)];
      call.params.push_back(
          {values.data(), DType::kFp32, static_cast<std::int64_t>(values.size())});
    }
    for (const TensorId t : op.outputs) {
      call.outputs.push_back({tensors_[t.value].data(), DType::kFp32, ElementsOf(t)});
    }
    std::vector<float>& buffers = buffers_[op.module.value];
    buffers.resize(static_cast<std::size_t>(model_.modules[op.module.value].buffer_elements), 0.0F);
    call.buffers = buffers.empty() ? nullptr : buffers.data();
    return call;
  }

  void Forward(std::size_t i) {
    const ModelOp& op = model_.ops[i];
    const OpSpec& spec = model_.SpecOf(op);
    const std::string problem = HostKernelProblem(spec, DType::kFp32, options_);
    SW_CHECK(problem.empty(), problem);
    const OpKernels kernels = LowerOp(spec, BatchOf(op), DType::kFp32, options_);
    SW_CHECK(kernels.output_aliases[0] == -1, "views are not part of these models");
    for (const TensorId t : op.outputs) {
      tensors_[t.value] = Memory(ElementsOf(t) * 4);
    }
    saved_[i] = Memory(kernels.extra_saved.value);
    Memory workspace(kernels.forward_workspace.value);
    ModelOpCall call = BaseCall(op);
    call.saved = saved_[i].span();
    call.workspace = workspace.span();
    ForwardOnHost(call);
  }

  void Backward(std::size_t i) {
    const ModelOp& op = model_.ops[i];
    const OpKernels kernels = LowerOp(model_.SpecOf(op), BatchOf(op), DType::kFp32, options_);
    ModelOpCall call = BaseCall(op);
    for (const TensorId t : op.outputs) {
      if (model_.tensors[t.value].role != TensorRole::kLoss) {
        const std::vector<float>& grad = grads_[t.value];
        SW_CHECK(!grad.empty(), "an output without a gradient");
        call.output_grads.push_back({grad.data(), DType::kFp32, ElementsOf(t)});
      }
    }
    std::vector<std::vector<float>> input_grads(op.inputs.size());
    for (std::size_t k = 0; k < op.inputs.size(); ++k) {
      const TensorId t = op.inputs[k];
      const bool wanted = model_.tensors[t.value].producer.valid();
      input_grads[k].resize(wanted ? static_cast<std::size_t>(ElementsOf(t)) : 0);
      call.input_grads.push_back(
          {wanted ? input_grads[k].data() : nullptr, DType::kFp32, ElementsOf(t)});
    }
    for (const ParamId p : op.params) {
      const std::size_t storage = StorageOf(p);
      std::vector<float>& grad = run_.param_grads[storage];
      const bool accumulate = !grad.empty();
      grad.resize(params_[storage].size());
      call.param_grads.push_back(
          {{grad.data(), DType::kFp32, static_cast<std::int64_t>(grad.size())}, accumulate});
    }
    Memory workspace(kernels.backward_workspace.value);
    call.saved = saved_[i].span();
    call.workspace = workspace.span();
    BackwardOnHost(call);
    for (std::size_t k = 0; k < op.inputs.size(); ++k) {
      AddGrad(op.inputs[k], input_grads[k]);
    }
  }

  void AddGrad(TensorId t, const std::vector<float>& grad) {
    std::vector<float>& sum = grads_[t.value];
    if (sum.empty()) {
      sum = grad;
      return;
    }
    for (std::size_t i = 0; i < grad.size(); ++i) {
      sum[i] += grad[i];
    }
  }

  const Model& model_;
  const ModelInputs& inputs_;
  KernelSetOptions options_;
  std::vector<Memory> tensors_;
  std::vector<std::vector<float>> grads_;
  std::vector<Memory> saved_;
  std::vector<std::vector<float>> buffers_;  // per module
  std::vector<std::vector<float>> params_;
  ModelRun run_;
};

}  // namespace

ModelRun RunModel(const Model& model, const ModelInputs& inputs) {
  return Runner(model, inputs).Run();
}

}  // namespace shardwright::testing
