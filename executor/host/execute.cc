#include "executor/host/execute.h"

#include <cmath>
#include <cstring>
#include <span>
#include <type_traits>
#include <variant>

#include "core/error.h"
#include "executor/host/arithmetic.h"

namespace shardwright {
namespace {

class Executor {
 public:
  Executor(StepContext& step, const ExecuteContext& context) : step_(step), context_(context) {}

  void operator()(std::monostate /*nothing*/) const {}
  void operator()(const CopyCall& call) const {
    ZeroFill(call.zeros);
    for (const CopyRun& run : call.runs) {
      RunCopy(run);
    }
  }
  void operator()(const CollectiveCall& /*call*/) const {
    SW_CHECK(false, "a collective needs its communicator");
  }
  void operator()(const DivideCall& call) const { DivideAll(call.ranges, call.divisor); }

  void operator()(ModelCall& call) const {
    call.call.dropout.step = step_.step;
    call.call.loss_scale = LossScale();
    context_.kernel(call.call, call.is_backward);
    if (call.loss != nullptr) {
      step_.losses[call.micro_batch] = *call.loss;
    }
  }

  void operator()(const InitializeCall& call) const {
    if (!call.unit.valid()) {
      InitializeModelBuffers(context_.input.model, {reinterpret_cast<float*>(call.data),
                                                    static_cast<std::size_t>(call.elements)});
      return;
    }
    InitializeShard(context_.input.model, context_.init_rules, context_.input.training.seed,
                    call.pieces, {call.data, call.dtype, call.elements});
  }

  void operator()(const NormCall& call) const {
    const double divisor = call.divisor * LossScale();
    if (call.in_place) {
      DivideAll(call.gradients, divisor);
    }
    double sum = 0.0;
    for (const ElementRange& range : call.gradients) {
      sum += SumOfSquares(range.dtype, range.data, range.count);
    }
    const auto norm = static_cast<float>(call.in_place ? sum : sum / divisor / divisor);
    std::memcpy(call.norm, &norm, sizeof norm);
  }

  void operator()(const ClipCall& call) const {
    float sum = 0.0F;
    std::memcpy(&sum, call.norm, sizeof sum);
    if (call.decides) {
      step_.squared_norm = sum;
    }
    double scale = 1.0;
    if (ScalingState* scaling = step_.scaling; scaling != nullptr && scaling->is_on) {
      if (call.decides) {
        scaling->applied = scaling->scaler.scale;
        scaling->skips = !std::isfinite(sum);
        scaling->skipped += scaling->skips ? 1 : 0;
        scaling->scaler.Update(scaling->skips, context_.input.training.loss_scale);
      }
      if (scaling->skips) {
        return;
      }
      scale = scaling->applied;
    }
    if (call.divides) {
      DivideAll(call.gradients, call.divisor * scale);
    }
    if (!context_.input.job.clip_gradients) {
      return;
    }
    const float factor =
        ClipCoefficient(std::sqrt(static_cast<double>(sum)), context_.input.training.clip_norm);
    if (factor != 1.0F) {
      for (const ElementRange& range : call.gradients) {
        ScaleInPlace(range.dtype, range.data, range.count, factor);
      }
    }
  }

  void operator()(UpdateCall& call) const {
    if (step_.scaling == nullptr || !step_.scaling->skips) {
      Update(call);
    }
    (*this)(call.casts);
  }

 private:
  void Update(UpdateCall& call) const {
    if (!call.clips) {  // otherwise they were divided for their norm
      DivideAll(call.gradients, call.divisor);
    }
    for (std::size_t i = 0; i < call.shards.size(); ++i) {
      OptimizerCall& shard = call.shards[i];
      shard.ranges = call.ranges[i];
      shard.learning_rate = step_.learning_rate;
      shard.step = step_.update - (step_.scaling != nullptr ? step_.scaling->skipped : 0);
      UpdateShard(shard, context_.input.training.optimizer);
    }
  }

  [[nodiscard]] double LossScale() const {
    const ScalingState* scaling = step_.scaling;
    return scaling != nullptr && scaling->is_on ? scaling->scaler.scale : 1.0;
  }
  static void DivideAll(std::span<const ElementRange> ranges, double divisor) {
    for (const ElementRange& range : ranges) {
      Divide(range, divisor);
    }
  }

  StepContext& step_;
  const ExecuteContext& context_;
};

}  // namespace

void Execute(Call& call, StepContext& step, const ExecuteContext& context) {
  std::visit(Executor(step, context), call);
}

}  // namespace shardwright
