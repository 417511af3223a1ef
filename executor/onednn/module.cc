// Convolutions by oneDNN: the shared object shardwright_onednn.so, loaded by the host's kernels.

#include <cstddef>
#include <cstdint>
#include <optional>
#include <string_view>
#include <unordered_map>

#include <omp.h>
#include <oneapi/dnnl/dnnl.hpp>

#include "core/units.h"
#include "executor/host/kernels/blocked_conv.h"

namespace shardwright {
namespace {

using Tag = dnnl::memory::format_tag;
using Desc = dnnl::memory::desc;
using Dims = dnnl::memory::dims;
constexpr auto kFp32 = dnnl::memory::data_type::f32;
constexpr auto kDirect = dnnl::algorithm::convolution_direct;

const dnnl::engine& Cpu() {
  static const dnnl::engine engine(dnnl::engine::kind::cpu, 0);
  return engine;
}

// The library shares work among OpenMP's threads; who calls here is one of a team that already
// does.
dnnl::stream& OwnStream() {
  thread_local dnnl::stream stream = [] {
    omp_set_num_threads(1);
    return dnnl::stream(Cpu());
  }();
  return stream;
}

dnnl::memory At(const Desc& desc, const float* data) {
  return {desc, Cpu(), const_cast<float*>(data)};
}

// A primitive that needs no memory but its operands and that is vector code.
template <class PrimitiveDesc>
bool IsGood(const PrimitiveDesc& desc) {
  return std::string_view(desc.impl_info_str()).starts_with("jit") &&
         desc.scratchpad_desc().get_size() == 0;
}

// What a pass is made of: the primitive, the layouts that it wants.
struct Pass {
  dnnl::primitive run;
  Desc input, weights, output;
};

class OneDnnConv final : public BlockedConv {
 public:
  explicit OneDnnConv(const BlockedConvShape& shape)
      : shape_(shape),
        x_({shape.images, shape.channels_in, shape.height, shape.width}, kFp32, Tag::nchw),
        w_({shape.channels_out, shape.channels_in, shape.kernel, shape.kernel}, kFp32, Tag::oihw),
        y_({shape.images, shape.channels_out, shape.height_out, shape.width_out}, kFp32,
           Tag::nchw) {
    OwnStream();  // the number of threads is part of a primitive
    for (const Tag blocks : {Tag::nChw16c, Tag::nChw8c}) {
      // Few channels are read as they are.
      Make(forward_, ConvPass::kForward, Tag::nchw, blocks);
      Make(forward_, ConvPass::kForward, blocks, blocks);
      Make(data_grad_, ConvPass::kDataGrad, blocks, blocks);
      Make(weight_grad_, ConvPass::kWeightGrad, Tag::nchw, blocks);
      Make(weight_grad_, ConvPass::kWeightGrad, blocks, blocks);
    }
  }

  [[nodiscard]] bool Runs(ConvPass pass) const override { return Of(pass).has_value(); }

  void PackWeights(ConvPass pass, const float* weights, float* packed) const override {
    Copy(w_, weights, Of(pass)->weights, packed);
  }

  void Forward(const float* x, const float* packed, const float* bias, float* y, float* input,
               float* output) const override {
    const Pass& pass = *forward_;
    const dnnl::memory from = In(x_, x, pass.input, input);
    const dnnl::memory to = At(pass.output, output);
    const dnnl::memory weights = At(pass.weights, packed);
    if (bias == nullptr) {
      Run(pass, {{DNNL_ARG_SRC, from}, {DNNL_ARG_WEIGHTS, weights}, {DNNL_ARG_DST, to}});
    } else {
      Run(pass, {{DNNL_ARG_SRC, from},
                 {DNNL_ARG_WEIGHTS, weights},
                 {DNNL_ARG_BIAS, At(Bias(), bias)},
                 {DNNL_ARG_DST, to}});
    }
    Copy(pass.output, output, y_, y);
  }

  void DataGrad(const float* dy, const float* packed, float* dx, float* input,
                float* output) const override {
    const Pass& pass = *data_grad_;
    Run(pass, {{DNNL_ARG_DIFF_DST, In(y_, dy, pass.output, output)},
               {DNNL_ARG_WEIGHTS, At(pass.weights, packed)},
               {DNNL_ARG_DIFF_SRC, At(pass.input, input)}});
    Copy(pass.input, input, x_, dx);
  }

  void WeightGrad(const float* x, const float* dy, std::int64_t dy_stride, float* packed,
                  float* input, float* output) const override {
    const Pass& pass = *weight_grad_;
    const Desc from(y_.dims(), kFp32,
                    Dims{dy_stride, shape_.height_out * shape_.width_out, shape_.width_out, 1});
    Run(pass, {{DNNL_ARG_SRC, In(x_, x, pass.input, input)},
               {DNNL_ARG_DIFF_DST, In(from, dy, pass.output, output)},
               {DNNL_ARG_DIFF_WEIGHTS, At(pass.weights, packed)}});
  }

  void UnpackWeights(const float* packed, float* weights) const override {
    Copy(weight_grad_->weights, packed, w_, weights);
  }

 private:
  [[nodiscard]] const std::optional<Pass>& Of(ConvPass pass) const {
    return pass == ConvPass::kForward    ? forward_
           : pass == ConvPass::kDataGrad ? data_grad_
                                         : weight_grad_;
  }
  [[nodiscard]] Desc Bias() const { return {{shape_.channels_out}, kFp32, Tag::x}; }

  static void Run(const Pass& pass, const std::unordered_map<int, dnnl::memory>& operands) {
    pass.run.execute(OwnStream(), operands);
  }
  static void Copy(const Desc& from, const float* data, const Desc& to, float* result) {
    dnnl::memory source = At(from, data);
    dnnl::memory target = At(to, result);
    dnnl::reorder(source, target).execute(OwnStream(), source, target);
  }
  // `data` in the layout that a pass wants: itself, or copied to `room`.
  static dnnl::memory In(const Desc& from, const float* data, const Desc& wanted, float* room) {
    if (from == wanted) {
      return At(wanted, data);
    }
    Copy(from, data, wanted, room);
    return At(wanted, room);
  }

  // In the room that callers have (models/kernels/host.h): channels in whole blocks of 16.
  [[nodiscard]] bool Fits(const Pass& pass) const {
    const auto holds = [](const Desc& desc, std::int64_t numbers) {
      return desc.get_size() <= static_cast<std::size_t>(numbers) * sizeof(float);
    };
    const std::int64_t in = RoundUp(shape_.channels_in, 16);
    const std::int64_t out = RoundUp(shape_.channels_out, 16);
    return holds(pass.input, shape_.images * in * shape_.height * shape_.width) &&
           holds(pass.output, shape_.images * out * shape_.height_out * shape_.width_out) &&
           holds(pass.weights, out * in * shape_.kernel * shape_.kernel);
  }

  // Keeps what was made before. What the library refuses stays empty.
  void Make(std::optional<Pass>& pass, ConvPass kind, Tag input_tag, Tag output_tag) const {
    if (!pass.has_value()) {
      try {
        pass = MakePass(kind, {x_.dims(), kFp32, input_tag}, {y_.dims(), kFp32, output_tag});
        if (pass.has_value() && !Fits(*pass)) {
          pass.reset();
        }
      } catch (const dnnl::error&) {
        pass.reset();
      }
    }
  }

  [[nodiscard]] std::optional<Pass> MakePass(ConvPass kind, const Desc& input,
                                             const Desc& output) const {
    const Desc weights(w_.dims(), kFp32, Tag::any);
    const Dims strides{shape_.stride, shape_.stride};
    const Dims padding{shape_.padding, shape_.padding};
    dnnl::primitive_attr attributes;
    attributes.set_scratchpad_mode(dnnl::scratchpad_mode::user);
    constexpr auto kTraining = dnnl::prop_kind::forward_training;
    const auto forward =
        shape_.has_bias ? dnnl::convolution_forward::desc(kTraining, kDirect, input, weights,
                                                          Bias(), output, strides, padding, padding)
                        : dnnl::convolution_forward::desc(kTraining, kDirect, input, weights,
                                                          output, strides, padding, padding);
    const dnnl::convolution_forward::primitive_desc hint(forward, attributes, Cpu());
    if (kind == ConvPass::kForward) {
      return IsGood(hint) ? std::optional(Pass{dnnl::convolution_forward(hint), hint.src_desc(),
                                               hint.weights_desc(), hint.dst_desc()})
                          : std::nullopt;
    }
    if (kind == ConvPass::kDataGrad) {
      const dnnl::convolution_backward_data::primitive_desc desc(
          {kDirect, input, weights, output, strides, padding, padding}, attributes, Cpu(), hint);
      return IsGood(desc)
                 ? std::optional(Pass{dnnl::convolution_backward_data(desc), desc.diff_src_desc(),
                                      desc.weights_desc(), desc.diff_dst_desc()})
                 : std::nullopt;
    }
    const dnnl::convolution_backward_weights::primitive_desc desc(
        {kDirect, input, weights, output, strides, padding, padding}, attributes, Cpu(), hint);
    return IsGood(desc)
               ? std::optional(Pass{dnnl::convolution_backward_weights(desc), desc.src_desc(),
                                    desc.diff_weights_desc(), desc.diff_dst_desc()})
               : std::nullopt;
  }

  BlockedConvShape shape_;
  Desc x_, w_, y_;
  std::optional<Pass> forward_, data_grad_, weight_grad_;
};

}  // namespace
}  // namespace shardwright

extern "C" __attribute__((visibility("default"))) shardwright::BlockedConv*
ShardwrightMakeBlockedConv(const shardwright::BlockedConvShape& shape) {
  return new shardwright::OneDnnConv(shape);
}
