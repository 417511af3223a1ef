// Mixture of experts. A router writes one weight per expert for each row, 0 for the experts it did
// not choose; the experts read that, so a chosen weight that underflows to 0 chooses nothing.

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <span>

#include "executor/host/kernels/dispatch.h"
#include "executor/host/kernels/gemm.h"
#include "executor/host/kernels/kernels.h"
#include "executor/host/kernels/rows.h"
#include "executor/host/kernels/vector.h"
#include "executor/op_layout.h"
#include "models/kernels/host.h"

namespace shardwright {
namespace {

// What Transformers adds to the sum of sigmoid scores before it divides.
constexpr float kScoreSumFloor = 1e-20F;

float RoutingFactor(const OpSpec& spec) {
  return spec.factor > 0.0 ? static_cast<float>(spec.factor) : 1.0F;
}

// The largest element of values[begin, end) that is above minus infinity; ties: the first.
std::int64_t LargestOf(const float* values, std::int64_t begin, std::int64_t end) {
  return std::max_element(values + begin, values + end) - values;
}

// DeepSeek's groups: only experts of the groups with the largest sums of their two best scores
// remain; the others become minus infinity.
void KeepBestGroups(const OpSpec& spec, float* choice, float* group_scores) {
  const std::int64_t size = spec.experts / spec.groups;
  for (std::int64_t g = 0; g < spec.groups; ++g) {
    const std::int64_t begin = g * size;
    const std::int64_t best = LargestOf(choice, begin, begin + size);
    float second = -INFINITY;
    for (std::int64_t e = begin; e < begin + size; ++e) {
      second = e != best ? std::max(second, choice[e]) : second;
    }
    group_scores[g] = choice[best] + (size > 1 ? second : 0.0F);
  }
  for (std::int64_t dropped = spec.groups - spec.groups_per_token; dropped > 0; --dropped) {
    // The last of the smallest goes first, so that ties keep the first.
    std::int64_t worst = -1;
    for (std::int64_t g = 0; g < spec.groups; ++g) {
      if (!std::isnan(group_scores[g]) && (worst < 0 || group_scores[g] <= group_scores[worst])) {
        worst = g;
      }
    }
    group_scores[worst] = NAN;
    std::fill_n(choice + worst * size, size, -INFINITY);
  }
}

// The experts of one row, best first.
void ChooseExperts(const ModelOpCall& call, const float* scores, float* choice, float* group_scores,
                   std::int32_t* chosen) {
  const OpSpec& spec = *call.spec;
  std::copy_n(scores, spec.experts, choice);
  if (call.buffers != nullptr) {  // a correction that steers the choice only
    VectorAdd(1.0F, call.buffers, choice, spec.experts);
  }
  if (spec.groups_per_token > 0 && spec.groups_per_token < spec.groups) {
    KeepBestGroups(spec, choice, group_scores);
  }
  for (std::int64_t i = 0; i < spec.experts_per_token; ++i) {
    const std::int64_t best = LargestOf(choice, 0, spec.experts);
    chosen[i] = static_cast<std::int32_t>(best);
    choice[best] = -INFINITY;
  }
}

// The sum that the chosen scores are divided by, or 1.
float ScoreSum(const OpSpec& spec, const float* scores, const std::int32_t* chosen) {
  if (!spec.normalizes_top_k) {
    return 1.0F;
  }
  float sum = spec.scores_by_sigmoid ? kScoreSumFloor : 0.0F;
  for (std::int64_t i = 0; i < spec.experts_per_token; ++i) {
    sum += scores[chosen[i]];
  }
  return sum;
}

// What a router keeps: scores in fp32, then the chosen experts.
struct RouterState {
  float* scores;
  std::int32_t* chosen;
};
RouterState StateOf(const ModelOpCall& call) {
  auto* const scores = reinterpret_cast<float*>(call.saved.data());
  return {scores, reinterpret_cast<std::int32_t*>(scores + RowsOf(call) * call.spec->experts)};
}

}  // namespace

void RouterForward(const ModelOpCall& call) {
  const OpSpec& spec = *call.spec;
  const std::int64_t rows = RowsOf(call);
  const std::int64_t experts = spec.experts;
  const ConstView& x = call.inputs[0];
  const ConstView& w = call.params[0];
  const RouterState state = StateOf(call);
  Scratch scratch(call.workspace);
  float* const choice = scratch.Floats(experts);
  float* const group_scores = scratch.Floats(spec.groups);
  float* const weights = scratch.Floats(experts);
  HostGemm({rows, experts, spec.in}, {x.data, x.dtype, spec.in, 1}, {w.data, w.dtype, 1, spec.in},
           {state.scores, DType::kFp32, experts}, nullptr,
           scratch.Take(HostGemmWorkspace(rows, experts, spec.in, DType::kFp32)), call.team);
  for (std::int64_t row = 0; row < rows; ++row) {
    float* const scores = state.scores + row * experts;
    std::int32_t* const chosen = state.chosen + row * spec.experts_per_token;
    if (spec.scores_by_sigmoid) {
      VectorActivate(Activation::kSigmoid, scores, scores, experts);
    } else {
      const float sum = VectorExp(scores, VectorMax(scores, experts), scores, experts);
      VectorScale(1.0F / sum, scores, scores, experts);
    }
    ChooseExperts(call, scores, choice, group_scores, chosen);
    const float factor = RoutingFactor(spec) / ScoreSum(spec, scores, chosen);
    std::fill_n(weights, experts, 0.0F);
    for (std::int64_t i = 0; i < spec.experts_per_token; ++i) {
      weights[chosen[i]] = scores[chosen[i]] * factor;
    }
    StoreFloats(weights, experts, call.outputs[0], row * experts);
  }
}

void RouterBackward(const ModelOpCall& call) {
  const OpSpec& spec = *call.spec;
  const std::int64_t rows = RowsOf(call);
  const std::int64_t experts = spec.experts;
  const RouterState state = StateOf(call);
  Scratch scratch(call.workspace);
  float* const logit_grads = scratch.Floats(rows * experts);
  float* const grads = scratch.Floats(experts);
  for (std::int64_t row = 0; row < rows; ++row) {
    const float* const scores = state.scores + row * experts;
    const std::int32_t* const chosen = state.chosen + row * spec.experts_per_token;
    const float* const dy = ReadFloats(call.output_grads[0], row * experts, experts, grads);
    const float sum = ScoreSum(spec, scores, chosen);
    const float factor = RoutingFactor(spec) / sum;
    // weight = factor score / sum: d score = factor (dy - [normalized] dot(dy, score) / sum).
    float mean = 0.0F;
    for (std::int64_t i = 0; i < spec.experts_per_token && spec.normalizes_top_k; ++i) {
      mean += dy[chosen[i]] * scores[chosen[i]] / sum;
    }
    float* const result = logit_grads + row * experts;
    std::fill_n(result, experts, 0.0F);
    for (std::int64_t i = 0; i < spec.experts_per_token; ++i) {
      result[chosen[i]] = factor * (dy[chosen[i]] - mean);
    }
    const float dot = spec.scores_by_sigmoid ? 0.0F : VectorDot(result, scores, experts);
    for (std::int64_t e = 0; e < experts; ++e) {
      result[e] = spec.scores_by_sigmoid ? result[e] * scores[e] * (1.0F - scores[e])
                                         : scores[e] * (result[e] - dot);
    }
  }
  const auto gemm = scratch.Take(std::max(HostGemmWorkspace(rows, spec.in, experts, DType::kBf16),
                                          HostGemmWorkspace(experts, spec.in, rows, DType::kBf16)));
  const View& dx = call.input_grads[0];
  if (dx.data != nullptr) {
    const ConstView& w = call.params[0];
    HostGemm({rows, spec.in, experts}, {logit_grads, DType::kFp32, experts, 1},
             {w.data, w.dtype, spec.in, 1}, {dx.data, dx.dtype, spec.in}, nullptr, gemm, call.team);
  }
  if (Wants(call.param_grads, 0)) {
    const ParamGrad& dw = call.param_grads[0];
    const ConstView& x = call.inputs[0];
    HostGemm({experts, spec.in, rows}, {logit_grads, DType::kFp32, 1, experts},
             {x.data, x.dtype, spec.in, 1},
             {dw.view.data, dw.view.dtype, spec.in, dw.accumulate, /*finish_first=*/true}, nullptr,
             gemm, call.team);
  }
}

namespace {

// Everything that experts run in, for one expert at a time; sized for all rows at one expert.
class Experts {
 public:
  Experts(const ModelOpCall& call, bool is_backward)
      : call_(call),
        spec_(*call.spec),
        rows_(spec_.routed ? CameRows(call) : RowsOf(call)),
        is_dense_(call.options->moe_dispatch == MoeDispatch::kDense && !spec_.routed),
        scratch_(call.workspace),
        dispatch_(spec_.routed ? DispatchOfCame(call, scratch_)
                               : MakeDispatch(call, is_dense_, scratch_)) {
    x_ = scratch_.Floats(rows_ * spec_.in);
    sums_ = scratch_.Floats(rows_ * spec_.in);
    y_ = scratch_.Floats(rows_ * spec_.in);
    hidden_ = scratch_.Floats(rows_ * spec_.out);
    if (is_backward) {
      dy_ = scratch_.Floats(rows_ * spec_.in);
      hidden_grad_ = scratch_.Floats(rows_ * spec_.out);
      gate_grad_ = scratch_.Floats(rows_ * spec_.out);
    }
    gemm_ = scratch_.Take(ExpertsGemmWorkspace(spec_, rows_));
  }

  void Forward() {
    std::fill_n(sums_, rows_ * spec_.in, 0.0F);
    for (std::int64_t e = 0; e < spec_.experts; ++e) {
      if (CountOf(e) > 0) {
        ForwardExpert(e);
      }
    }
    StoreFloats(sums_, rows_ * spec_.in, call_.outputs[0], 0);
  }

  void Backward() {
    std::fill_n(sums_, rows_ * spec_.in, 0.0F);
    if (Wants(call_.input_grads, 1)) {
      ZeroFill(call_.input_grads[1]);
    }
    for (std::int64_t e = 0; e < spec_.experts; ++e) {
      if (CountOf(e) > 0) {
        BackwardExpert(e);
      } else {
        ClearParamGrads(e);
      }
    }
    if (call_.input_grads[0].data != nullptr) {
      StoreFloats(sums_, rows_ * spec_.in, call_.input_grads[0], 0);
    }
  }

 private:
  [[nodiscard]] std::int64_t CountOf(std::int64_t e) const {
    return dispatch_.offsets[e + 1] - dispatch_.offsets[e];
  }

  [[nodiscard]] std::int64_t RowAt(std::int64_t e, std::int64_t i) const {
    return dispatch_.rows[dispatch_.offsets[e] + i];
  }

  // Routed rows are weighted where they came from.
  [[nodiscard]] float WeightAt(std::int64_t e, std::int64_t i) const {
    return spec_.routed ? 1.0F : ReadOne(call_.inputs[1], RowAt(e, i) * spec_.experts + e);
  }

  // What forward keeps for backward of the rows of expert e: up projections, then gate projections.
  [[nodiscard]] View Kept(std::int64_t e, bool is_gate) const {
    const std::int64_t capacity = RoutedRows(spec_, rows_, is_dense_);
    const std::int64_t row = dispatch_.offsets[e] + (is_gate ? capacity : 0);
    return {call_.saved.data() + row * spec_.out * SizeOf(call_.compute), call_.compute,
            CountOf(e) * spec_.out};
  }

  void Gather(const ConstView& from, std::int64_t e, float* to) const {
    for (std::int64_t i = 0; i < CountOf(e); ++i) {
      LoadFloats(from, RowAt(e, i) * spec_.in, spec_.in, to + i * spec_.in);
    }
  }

  [[nodiscard]] GemmOperand Param(std::size_t param, std::int64_t columns, bool transposed) const {
    const ConstView& w = call_.params[param];
    return {w.data, w.dtype, transposed ? 1 : columns, transposed ? columns : 1};
  }

  // result (count, n) = a (count, k) times a parameter.
  void Multiply(std::int64_t count, std::int64_t n, std::int64_t k, const float* a,
                const GemmOperand& param, const GemmResult& result) {
    HostGemm({count, n, k}, {a, DType::kFp32, k, 1}, param, result, nullptr, gemm_, call_.team);
  }

  // hidden = act(gate) * up, or act(up) without a gate, from what forward keeps.
  void Activate(std::int64_t e) {
    const View up = Kept(e, false);
    ForEachChunk(up.elements, [&](std::int64_t begin, std::int64_t n) {
      ChunkBuffer up_values;
      ChunkBuffer gate_values;
      LoadFloats(AsConst(up), begin, n, up_values.values.data());
      if (spec_.gated) {
        LoadFloats(AsConst(Kept(e, true)), begin, n, gate_values.values.data());
        VectorActivate(spec_.activation, gate_values.values.data(), gate_values.values.data(), n);
        VectorProduct(gate_values.values.data(), up_values.values.data(), hidden_ + begin, n);
      } else {
        VectorActivate(spec_.activation, up_values.values.data(), hidden_ + begin, n);
      }
    });
  }

  void ForwardExpert(std::int64_t e) {
    const std::int64_t count = CountOf(e);
    const ExpertParams params = ParamsOf(spec_, e);
    Gather(call_.inputs[0], e, x_);
    for (const bool is_gate : {false, true}) {
      if (is_gate && !spec_.gated) {
        continue;
      }
      Multiply(count, spec_.out, spec_.in, x_,
               Param(is_gate ? params.gate : params.up, spec_.in, true),
               {Kept(e, is_gate).data, call_.compute, spec_.out});
    }
    Activate(e);
    Multiply(count, spec_.in, spec_.out, hidden_, Param(params.down, spec_.out, true),
             {y_, DType::kFp32, spec_.in});
    for (std::int64_t i = 0; i < count; ++i) {
      VectorAdd(WeightAt(e, i), y_ + i * spec_.in, sums_ + RowAt(e, i) * spec_.in, spec_.in);
    }
  }

  // hidden_grad_ holds the gradient of hidden; turns it into that of up, and makes the gate's.
  void ActivateGrad(std::int64_t e) {
    const View up = Kept(e, false);
    const bool keeps_result = ActivationKeepsResult(spec_.activation);
    ForEachChunk(up.elements, [&](std::int64_t begin, std::int64_t n) {
      ChunkBuffer up_values;
      ChunkBuffer gate_values;
      ChunkBuffer activated;
      float* const grad = hidden_grad_ + begin;
      LoadFloats(AsConst(up), begin, n, up_values.values.data());
      if (!spec_.gated) {
        const float* const kept = keeps_result ? hidden_ + begin : up_values.values.data();
        VectorActivateGrad(spec_.activation, kept, grad, grad, n);
        return;
      }
      LoadFloats(AsConst(Kept(e, true)), begin, n, gate_values.values.data());
      VectorActivate(spec_.activation, gate_values.values.data(), activated.values.data(), n);
      VectorProduct(grad, up_values.values.data(), gate_grad_ + begin, n);
      const float* const kept = keeps_result ? activated.values.data() : gate_values.values.data();
      VectorActivateGrad(spec_.activation, kept, gate_grad_ + begin, gate_grad_ + begin, n);
      VectorProduct(grad, activated.values.data(), grad, n);
    });
  }

  // The gradient (n, k) of a parameter from the gradients of its product's rows and its input rows.
  void ParamGradOf(std::size_t param, std::int64_t n, std::int64_t k, std::int64_t count,
                   const float* result_grad, const float* input) {
    if (!Wants(call_.param_grads, param)) {
      return;
    }
    const ParamGrad& grad = call_.param_grads[param];
    HostGemm({n, k, count}, {result_grad, DType::kFp32, 1, n}, {input, DType::kFp32, k, 1},
             {grad.view.data, grad.view.dtype, k, grad.accumulate, /*finish_first=*/true}, nullptr,
             gemm_, call_.team);
  }

  void BackwardExpert(std::int64_t e) {
    const std::int64_t count = CountOf(e);
    const ExpertParams params = ParamsOf(spec_, e);
    Gather(call_.inputs[0], e, x_);
    Gather(call_.output_grads[0], e, dy_);
    Activate(e);
    // The gradient of hidden, and of the routing weight, which multiplies what hidden gives.
    Multiply(count, spec_.out, spec_.in, dy_, Param(params.down, spec_.out, false),
             {hidden_grad_, DType::kFp32, spec_.out});
    for (std::int64_t i = 0; i < count; ++i) {
      float* const row = hidden_grad_ + i * spec_.out;
      const float weight = WeightAt(e, i);
      if (Wants(call_.input_grads, 1)) {
        const float grad = VectorDot(row, hidden_ + i * spec_.out, spec_.out);
        StoreFloats(&grad, 1, call_.input_grads[1], RowAt(e, i) * spec_.experts + e);
      }
      VectorScale(weight, row, row, spec_.out);
      VectorScale(weight, dy_ + i * spec_.in, dy_ + i * spec_.in, spec_.in);
    }
    ParamGradOf(params.down, spec_.in, spec_.out, count, dy_, hidden_);
    ActivateGrad(e);
    ParamGradOf(params.up, spec_.out, spec_.in, count, hidden_grad_, x_);
    if (spec_.gated) {
      ParamGradOf(params.gate, spec_.out, spec_.in, count, gate_grad_, x_);
    }
    if (!Wants(call_.input_grads, 0)) {
      return;
    }
    Multiply(count, spec_.in, spec_.out, hidden_grad_, Param(params.up, spec_.in, false),
             {y_, DType::kFp32, spec_.in});
    if (spec_.gated) {
      Multiply(count, spec_.in, spec_.out, gate_grad_, Param(params.gate, spec_.in, false),
               {y_, DType::kFp32, spec_.in, true});
    }
    for (std::int64_t i = 0; i < count; ++i) {
      VectorAdd(1.0F, y_ + i * spec_.in, sums_ + RowAt(e, i) * spec_.in, spec_.in);
    }
  }

  // An expert without rows.
  void ClearParamGrads(std::int64_t e) const {
    const ExpertParams params = ParamsOf(spec_, e);
    for (const std::size_t param : {params.gate, params.up, params.down}) {
      if (Wants(call_.param_grads, param) && !call_.param_grads[param].accumulate) {
        ZeroFill(call_.param_grads[param].view);
      }
    }
  }

  const ModelOpCall& call_;
  const OpSpec& spec_;
  std::int64_t rows_;
  bool is_dense_;
  Scratch scratch_;
  Dispatch dispatch_;
  float* x_ = nullptr;       // gathered rows
  float* sums_ = nullptr;    // the result, or the gradient of x
  float* y_ = nullptr;       // of the expert's rows
  float* hidden_ = nullptr;  // between the projections
  float* dy_ = nullptr;
  float* hidden_grad_ = nullptr;
  float* gate_grad_ = nullptr;
  std::span<std::byte> gemm_;
};

}  // namespace

void ExpertsForward(const ModelOpCall& call) {
  Experts(call, /*is_backward=*/false).Forward();
}

void ExpertsBackward(const ModelOpCall& call) {
  Experts(call, /*is_backward=*/true).Backward();
}

}  // namespace shardwright
