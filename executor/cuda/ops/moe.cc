// Mixture of experts: the router and the experts.
//
// Example: 8 experts with 2 per token, 4,096 rows, 1,024 features, hidden 3,584. Routed rows
// (slots) are 8,192. Workspace of forward: offsets, the list, 4,096 x 8 slots, hidden as fp32 8,192
// x 3,584 x 4 = 112 MiB, and the experts' outputs 8,192 x 1,024 x 4 = 32 MiB. Saved: up and gate of
// all slots in bf16, 56 MiB each.
//
// The lists are made again in backward from the routing weights, so forward keeps none of them.

#include <algorithm>
#include <cstdint>

#include "executor/cuda/kernels/experts.h"
#include "executor/cuda/kernels/router.h"
#include "executor/cuda/ops/launch.h"
#include "executor/op_layout.h"

namespace shardwright::ops {
namespace {

// Saved by forward: scores of all experts in fp32, then the chosen experts as 32-bit numbers.
gpu::RouteArgs RouteOf(const ModelOpCall& call) {
  const OpSpec& spec = *call.spec;
  gpu::RouteArgs args;
  args.rows = RowsOf(call);
  args.experts = spec.experts;
  args.per_token = spec.experts_per_token;
  args.groups = spec.groups;
  args.groups_per_token = spec.groups_per_token;
  args.by_sigmoid = spec.scores_by_sigmoid;
  args.normalizes = spec.normalizes_top_k;
  args.factor = spec.factor > 0.0 ? static_cast<float>(spec.factor) : 1.0F;
  args.scores = reinterpret_cast<float*>(call.saved.data());
  args.chosen = reinterpret_cast<std::int32_t*>(args.scores + args.rows * spec.experts);
  args.correction = call.buffers;
  return args;
}

// From the gradients of the weights to those of the logits, then two narrow products in fp32.
void RouterBackward(const ModelOpCall& call, const OpContext& context) {
  const OpSpec& spec = *call.spec;
  gpu::RouteArgs args = RouteOf(call);
  Scratch scratch(call.workspace);
  args.logit_grads = scratch.Take<float>(args.rows * spec.experts);
  args.weights = ArrayOf(call.output_grads[0]);
  LaunchItems<gpu::RouteGradKernel>(context, args.rows, args);
  gpu::RouterGradArgs grads{.logit_grads = args.logit_grads,
                            .x = ArrayOf(call.inputs[0]),
                            .w = ArrayOf(call.params[0]),
                            .rows = args.rows,
                            .experts = spec.experts,
                            .in = spec.in};
  if (Wants(call.input_grads, 0)) {
    using Kernel = gpu::RouterInputGradKernel;
    grads.grad = ArrayOf(call.input_grads[0]);
    LaunchKernel<Kernel>(
        context.gpu, context.stream,
        CeilDiv(grads.rows, Kernel::kBlockRows) * CeilDiv(spec.in, Kernel::kColumns), 0, grads);
  }
  if (Wants(call.param_grads, 0)) {
    using Kernel = gpu::RouterWeightGradKernel;
    grads.grad = ArrayOf(call.param_grads[0].view);
    grads.adds = call.param_grads[0].accumulate;
    LaunchKernel<Kernel>(
        context.gpu, context.stream,
        CeilDiv(spec.experts, Kernel::kExperts) * CeilDiv(spec.in, Kernel::kColumns),
        gpu::SharedSize<float>(Kernel::kShared), grads);
  }
}

}  // namespace

// Logits are a product into fp32 memory; RouteKernel makes scores and weights of them.
void SubmitRouter(const ModelOpCall& call, bool is_backward, const OpContext& context) {
  if (is_backward) {
    return RouterBackward(call, context);
  }
  const OpSpec& spec = *call.spec;
  gpu::RouteArgs args = RouteOf(call);
  Scratch scratch(call.workspace);
  args.choice = scratch.Take<float>(args.rows * spec.experts);
  args.group_scores = scratch.Take<float>(args.rows * spec.groups);
  args.weights = ArrayOf(call.outputs[0]);
  Multiply(context,
           {.m = args.rows,
            .n = spec.experts,
            .k = spec.in,
            .a = {ArrayOf(call.inputs[0]), spec.in, 1},
            .b = {ArrayOf(call.params[0]), 1, spec.in},
            .c = {{args.scores, DType::kFp32}, spec.experts, 1}},
           {});
  LaunchItems<gpu::RouteKernel>(context, args.rows, args);
}

namespace {

enum class Projection : std::uint8_t { kGate, kUp, kDown };
std::size_t ParamOf(const OpSpec& spec, std::int64_t expert, Projection projection) {
  const ExpertParams params = ParamsOf(spec, expert);
  return projection == Projection::kGate ? params.gate
         : projection == Projection::kUp ? params.up
                                         : params.down;
}

// All experts of one op, in launches of up to kMostExperts.
class Experts {
 public:
  Experts(const ModelOpCall& call, const OpContext& context)
      : call_(call),
        spec_(*call.spec),
        context_(context),
        rows_(RowsOf(call)),
        is_dense_(call.options->moe_dispatch == MoeDispatch::kDense),
        slots_count_(RoutedRows(spec_, rows_, is_dense_)),
        scratch_(call.workspace) {
    offsets_ = scratch_.Take<std::int64_t>(spec_.experts + 1);
    list_ = scratch_.Take<std::int64_t>(slots_count_);
    slots_ = scratch_.Take<std::int64_t>(rows_ * spec_.experts);
    hidden_ = scratch_.Take<float>(slots_count_ * spec_.out);
    y_ = scratch_.Take<float>(slots_count_ * spec_.in);
    DispatchRows(context_, {.weights = ArrayOf(call_.inputs[1]),
                            .rows = rows_,
                            .experts = spec_.experts,
                            .is_dense = is_dense_,
                            .offsets = offsets_,
                            .list = list_,
                            .slots = slots_});
  }

  // Up, gate, hidden, down, combine; a row's result is the weighted sum over its experts.
  void Forward() {
    const gpu::Array x = ArrayOf(call_.inputs[0]);
    for (const Projection projection : {Projection::kUp, Projection::kGate}) {
      if (projection == Projection::kUp || spec_.gated) {
        Project(projection, false, x, list_, Kept(projection), false);
      }
    }
    LaunchBlocks<gpu::ExpertHiddenKernel>(context_, slots_count_, Hidden());
    Project(Projection::kDown, false, {hidden_, DType::kFp32}, nullptr, {y_, DType::kFp32}, false);
    Combine(ArrayOf(call_.inputs[1]), ArrayOf(call_.outputs[0]));
  }

  // Steps, each over all experts:
  //
  //   hidden again     it was not kept
  //   up_grads         dy W_down, by slot: the gradient of hidden, not yet weighted
  //   hidden grad      gradients of the routing weight, of up (in place) and of gate
  //   weight grads     of down, where dy is multiplied with the routing weight, then up, then gate
  //   sums             up_grads W_up + gate_grads W_gate, by slot
  //   combine          the gradient of x: sums over each row's slots
  void Backward() {
    auto* const hidden_grad = scratch_.Take<float>(slots_count_ * spec_.out);
    auto* const gate_grad = scratch_.Take<float>(slots_count_ * spec_.out);
    auto* const slot_weights = scratch_.Take<float>(slots_count_);
    const gpu::Array x = ArrayOf(call_.inputs[0]);
    const gpu::Array dy = ArrayOf(call_.output_grads[0]);
    const gpu::Array up_grads{hidden_grad, DType::kFp32};
    const gpu::Array gate_grads{gate_grad, DType::kFp32};
    const gpu::Array sums{y_, DType::kFp32};
    if (Wants(call_.input_grads, 1)) {
      ZeroFill(context_, call_.input_grads[1]);
    }
    LaunchBlocks<gpu::ExpertHiddenKernel>(context_, slots_count_, Hidden());
    Project(Projection::kDown, true, dy, list_, up_grads, false);
    gpu::ExpertHiddenArgs args = Hidden();
    args.hidden_grad = hidden_grad;
    args.gate_grad = gate_grad;
    args.list = list_;
    args.weights = ArrayOf(call_.inputs[1]);
    args.weights_grad = Wants(call_.input_grads, 1) ? ArrayOf(call_.input_grads[1]) : gpu::Array{};
    args.slot_weights = slot_weights;
    LaunchBlocks<gpu::ExpertHiddenGradKernel>(context_, slots_count_, args);
    WeightGrad(Projection::kDown, {.list = nullptr,
                                   .left_list = list_,
                                   .left_factor = slot_weights,
                                   .left = dy,
                                   .right = {hidden_, DType::kFp32}});
    WeightGrad(Projection::kUp, {.list = list_, .left = up_grads, .right = x});
    Project(Projection::kUp, true, up_grads, nullptr, sums, false);
    if (spec_.gated) {
      WeightGrad(Projection::kGate, {.list = list_, .left = gate_grads, .right = x});
      Project(Projection::kGate, true, gate_grads, nullptr, sums, true);
    }
    if (Wants(call_.input_grads, 0)) {
      Combine({}, ArrayOf(call_.input_grads[0]));
    }
  }

 private:
  // Memory that forward keeps: up projections of all slots, then gate projections.
  [[nodiscard]] gpu::Array Kept(Projection projection) const {
    const std::int64_t first = projection == Projection::kGate ? slots_count_ * spec_.out : 0;
    return {call_.saved.data() + first * SizeOf(call_.compute), call_.compute};
  }

  [[nodiscard]] gpu::ExpertHiddenArgs Hidden() const {
    gpu::ExpertHiddenArgs args;
    args.activation = spec_.activation;
    args.gated = spec_.gated;
    args.experts = spec_.experts;
    args.out = spec_.out;
    args.most_slots = slots_count_;
    args.offsets = offsets_;
    args.up = Kept(Projection::kUp);
    args.gate = spec_.gated ? Kept(Projection::kGate) : gpu::Array{};
    args.hidden = hidden_;
    return args;
  }

  // c by slot = a times the experts' matrices, or their transposes (the gradient's way back).
  void Project(Projection projection, bool goes_back, const gpu::Array& a, const std::int64_t* list,
               const gpu::Array& c, bool adds) {
    // Matrices are (out of the projection, into it).
    const std::int64_t out = projection == Projection::kDown ? spec_.in : spec_.out;
    const std::int64_t into = projection == Projection::kDown ? spec_.out : spec_.in;
    gpu::ExpertGemmArgs args;
    args.most_rows = rows_;
    args.n = goes_back ? into : out;
    args.k = goes_back ? out : into;
    args.offsets = offsets_;
    args.list = list;
    args.a = a;
    args.c = c;
    args.weight_row = goes_back ? into : 1;
    args.weight_column = goes_back ? 1 : into;
    args.adds = adds;
    args.multiply_as = MultiplyAs(call_.compute, call_.compute);
    const std::int64_t tiles = gpu::ExpertTiles(args.multiply_as, rows_, args.n);
    for (std::int64_t first = 0; first < spec_.experts; first += gpu::kMostExperts) {
      args.first_expert = first;
      args.experts = std::min<std::int64_t>(gpu::kMostExperts, spec_.experts - first);
      for (std::int64_t e = 0; e < args.experts; ++e) {
        const ConstView& weight = call_.params[ParamOf(spec_, first + e, projection)];
        args.weights[e] = weight.data;
        args.weight_dtype = weight.dtype;
      }
      LaunchKernel<gpu::ExpertGemmKernel>(context_.gpu, context_.stream, args.experts * tiles,
                                          gpu::ExpertShared(args.multiply_as), args);
    }
  }

  // Gradients that nobody wants have a null address, at which the kernel's blocks end.
  void WeightGrad(Projection projection, gpu::ExpertWeightGemmArgs args) {
    args.n = projection == Projection::kDown ? spec_.in : spec_.out;
    args.k = projection == Projection::kDown ? spec_.out : spec_.in;
    args.offsets = offsets_;
    args.multiply_as = MultiplyAs(call_.compute, call_.compute);
    const std::int64_t tiles = gpu::ExpertTiles(args.multiply_as, args.n, args.k);
    for (std::int64_t first = 0; first < spec_.experts; first += gpu::kMostExperts) {
      args.first_expert = first;
      args.experts = std::min<std::int64_t>(gpu::kMostExperts, spec_.experts - first);
      for (std::int64_t e = 0; e < args.experts; ++e) {
        const std::size_t param = ParamOf(spec_, first + e, projection);
        const bool is_wanted = Wants(call_.param_grads, param);
        args.grads[e] = is_wanted ? call_.param_grads[param].view.data : nullptr;
        args.adds[e] = is_wanted && call_.param_grads[param].accumulate;
        args.grad_dtype = is_wanted ? call_.param_grads[param].view.dtype : args.grad_dtype;
      }
      LaunchKernel<gpu::ExpertWeightGemmKernel>(context_.gpu, context_.stream, args.experts * tiles,
                                                gpu::ExpertShared(args.multiply_as), args);
    }
  }

  void Combine(const gpu::Array& weights, const gpu::Array& to) {
    LaunchBlocks<gpu::ExpertCombineKernel>(context_, rows_,
                                           {.y = y_,
                                            .slots = slots_,
                                            .weights = weights,
                                            .to = to,
                                            .rows = rows_,
                                            .experts = spec_.experts,
                                            .in = spec_.in});
  }

  const ModelOpCall& call_;
  const OpSpec& spec_;
  const OpContext& context_;
  std::int64_t rows_;
  bool is_dense_;
  std::int64_t slots_count_;
  Scratch scratch_;
  std::int64_t* offsets_;
  std::int64_t* list_;
  std::int64_t* slots_;
  float* hidden_;
  float* y_;
};

}  // namespace

// Counts, offsets, lists: three kernels, since each needs all blocks of the one before.
void DispatchRows(const OpContext& context, const gpu::DispatchArgs& args) {
  LaunchBlocks<gpu::DispatchCountKernel, std::int64_t>(context, args.experts, args);
  LaunchBlocks<gpu::DispatchOffsetsKernel, std::int64_t>(context, 1, args);
  LaunchBlocks<gpu::DispatchKernel, std::int64_t>(context, args.experts, args);
}

void SubmitExperts(const ModelOpCall& call, bool is_backward, const OpContext& context) {
  Experts experts(call, context);
  if (is_backward) {
    experts.Backward();
  } else {
    experts.Forward();
  }
}

}  // namespace shardwright::ops
