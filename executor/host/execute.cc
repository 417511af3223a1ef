#include "executor/host/execute.h"

#include <cmath>
#include <cstring>
#include <numeric>
#include <span>
#include <variant>
#include <vector>

#include "core/error.h"
#include "core/ranges.h"
#include "executor/host/arithmetic.h"

namespace shardwright {
namespace {

// Elements that a thread takes at a time.
constexpr std::int64_t kPiece = std::int64_t{1} << 16;

// Cuts ranges of counts[i] elements into pieces that the team's threads share: f(i, begin, count),
// and which piece it is.
template <class F>
void ForEachPiece(Team* team, std::span<const std::int64_t> counts, const F& f) {
  struct Piece {
    std::size_t range;
    std::int64_t begin, count;
  };
  std::vector<Piece> pieces;
  for (std::size_t i = 0; i < counts.size(); ++i) {
    for (std::int64_t begin = 0; begin < counts[i]; begin += kPiece) {
      pieces.push_back({i, begin, std::min(kPiece, counts[i] - begin)});
    }
  }
  const auto run = [&](std::size_t k, std::size_t /*worker*/) {
    f(pieces[k].range, pieces[k].begin, pieces[k].count, k);
  };
  if (team != nullptr) {
    team->For(pieces.size(), run);
    return;
  }
  for (std::size_t k = 0; k < pieces.size(); ++k) {
    run(k, 0);
  }
}

template <class Ranges>
std::vector<std::int64_t> CountsOf(const Ranges& ranges) {
  return Mapped<std::int64_t>(ranges, [&](const auto& range) { return range.count; });
}

// f(range) for pieces of the ranges.
template <class F>
void ForEachPiece(Team* team, std::span<const ElementRange> ranges, const F& f) {
  ForEachPiece(team, CountsOf(ranges),
               [&](std::size_t i, std::int64_t begin, std::int64_t count, std::size_t /*piece*/) {
                 const ElementRange& range = ranges[i];
                 f(ElementRange{range.data + begin * SizeOf(range.dtype), count, range.dtype});
               });
}

class Executor {
 public:
  Executor(StepContext& step, const ExecuteContext& context, Team* team)
      : step_(step), context_(context), team_(team) {}

  void operator()(std::monostate /*nothing*/) const {}
  void operator()(const CopyCall& call) const {
    ZeroFill(call.zeros);
    Copy(call.runs);
    DivideAll(call.divided, call.divisor);
  }
  void operator()(const CollectiveCall& /*call*/) const {
    SW_CHECK(false, "a collective needs its communicator");
  }
  void operator()(const DivideCall& call) const { DivideAll(call.ranges, call.divisor); }

  void operator()(ModelCall& call) const {
    call.call.dropout.step = step_.step;
    call.call.loss_scale = step_.LossScale();
    call.call.team = team_;
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
                    call.pieces, {call.data, call.dtype, call.elements}, 1, call.part);
  }

  void operator()(const NormCall& call) const {
    const double divisor = call.divisor * step_.LossScale();
    if (call.in_place) {
      DivideAll(call.gradients, divisor);
      DivideAll(call.copies, divisor);
    }
    const double sum = SumSquares(call.gradients);
    const auto norm = static_cast<float>(call.in_place ? sum : sum / divisor / divisor);
    std::memcpy(call.norm, &norm, sizeof norm);
  }

  void operator()(const ClipCall& call) const {
    float sum = 0.0F;
    std::memcpy(&sum, call.norm, sizeof sum);
    for (const std::byte* const other : call.other_norms) {
      float more = 0.0F;
      std::memcpy(&more, other, sizeof more);
      sum += more;
    }
    std::memcpy(call.norm, &sum, sizeof sum);
    if (call.decides) {
      step_.squared_norm = sum;
    }
    double scale = 1.0;
    if (ScalingState* scaling = step_.scaling; scaling != nullptr && scaling->is_on) {
      if (call.decides) {
        scaling->applied = step_.LossScale();
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
      ForEachPiece(team_, call.gradients, [&](const ElementRange& range) {
        ScaleInPlace(range.dtype, range.data, range.count, factor);
      });
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
      UpdatePieces(shard);
    }
  }

  void UpdatePieces(const OptimizerCall& shard) const {
    if (shard.spec.kind == OptimizerKind::kAdafactor) {  // takes parameters whole
      UpdateShard(shard, context_.input.training.optimizer);
      return;
    }
    ForEachPiece(team_, CountsOf(shard.ranges),
                 [&](std::size_t i, std::int64_t begin, std::int64_t count, std::size_t /*piece*/) {
                   OptimizerRange range = shard.ranges[i];
                   range.param_offset += begin;
                   range.grad_offset += begin;
                   range.state_offset += begin;
                   range.count = count;
                   OptimizerCall piece = shard;
                   piece.ranges = std::span(&range, 1);
                   UpdateShard(piece, context_.input.training.optimizer);
                 });
  }

  // Runs may follow one another at one place, so that only the elements of one are shared.
  void Copy(std::span<const CopyRun> runs) const {
    for (const CopyRun& run : runs) {
      if (run.count <= kPiece) {
        RunCopy(run);
        continue;
      }
      ForEachPiece(
          team_, std::span(&run.count, 1),
          [&](std::size_t /*run*/, std::int64_t begin, std::int64_t count, std::size_t /*piece*/) {
            CopyRun piece = run;
            piece.from += begin * SizeOf(run.from_dtype);
            piece.to += begin * SizeOf(run.to_dtype);
            piece.count = count;
            RunCopy(piece);
          });
    }
  }

  // Piece by piece, so that the sum does not depend on the number of threads.
  [[nodiscard]] double SumSquares(std::span<const ElementRange> ranges) const {
    std::vector<double> sums;
    for (const ElementRange& range : ranges) {
      sums.resize(sums.size() + static_cast<std::size_t>((range.count + kPiece - 1) / kPiece));
    }
    ForEachPiece(team_, CountsOf(ranges),
                 [&](std::size_t i, std::int64_t begin, std::int64_t count, std::size_t piece) {
                   const ElementRange& range = ranges[i];
                   sums[piece] =
                       SumOfSquares(range.dtype, range.data + begin * SizeOf(range.dtype), count);
                 });
    return std::accumulate(sums.begin(), sums.end(), 0.0);
  }

  void DivideAll(std::span<const ElementRange> ranges, double divisor) const {
    if (divisor != 1.0) {
      ForEachPiece(team_, ranges, [&](const ElementRange& range) { Divide(range, divisor); });
    }
  }

  StepContext& step_;
  const ExecuteContext& context_;
  Team* team_;
};

}  // namespace

void Execute(Call& call, StepContext& step, const ExecuteContext& context, Team* team) {
  std::visit(Executor(step, context, team), call);
}

}  // namespace shardwright
