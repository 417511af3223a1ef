#include "analysis/step_breakdown.h"

#include <algorithm>
#include <array>
#include <numeric>
#include <span>
#include <utility>

#include "core/error.h"
#include "core/lookup.h"

namespace shardwright {
namespace {

// Kernels with FLOPs outweigh those without; among equals the one that moves most bytes counts.
OpClass ClassOfKernels(std::span<const Kernel> kernels) {
  const auto less = [](const Kernel& a, const Kernel& b) {
    return a.flops.value != b.flops.value ? a.flops.value < b.flops.value
                                          : (a.read + a.written).value < (b.read + b.written).value;
  };
  const auto largest = std::max_element(kernels.begin(), kernels.end(), less);
  return largest == kernels.end() ? OpClass::kElementwise : shardwright::ClassOf(largest->kind);
}

// Follows the compute stream through one step.
class Walk {
 public:
  Walk(const Program& program, const Trace& trace, const RecordedStep& step,
       const RecordedStep* previous)
      : program_(program),
        body_(program.step),
        spans_(std::span(trace.spans).subspan(step.first, body_.size())) {
    if (previous != nullptr) {
      previous_ = std::span(trace.spans).subspan(previous->first, body_.size());
    }
  }

  StepBreakdown Run(std::optional<SimTime> period) {
    const std::optional<SimTime> last = LastComputeEnd(spans_);
    SW_CHECK(last.has_value(), "a step without compute ops");
    SimTime end = spans_.front().issue_begin;
    if (!previous_.empty()) {
      end = LastComputeEnd(previous_).value_or(end);
    } else if (period) {
      end = *last - *period;
    }
    for (std::size_t i = 0; i < body_.size(); ++i) {
      const OpShape& shape = program_.ShapeOf(body_.ops[i]);
      if (spans_[i].stream != Stream::kCompute) {
        continue;
      }
      Wait(OpId(i), end);
      const OpClass op_class = shardwright::ClassOf(program_, shape);
      const SimTime begin = std::max(end, spans_[i].start);
      if (spans_[i].end > begin) {
        result_.run[static_cast<std::size_t>(op_class)] += ToSeconds(spans_[i].end - begin).value;
      }
      end = std::max(end, spans_[i].end);
    }
    result_.period = result_.Sum();
    return result_;
  }

  [[nodiscard]] std::vector<ComputeWait> TakeWaits() { return std::move(waits_); }

 private:
  static std::optional<SimTime> LastComputeEnd(std::span<const Span> spans) {
    std::optional<SimTime> end;
    for (const Span& span : spans) {
      if (span.stream == Stream::kCompute && (!end || span.end > *end)) {
        end = span.end;
      }
    }
    return end;
  }

  // Charges the idle time from `from` to the start of `op`.
  void Wait(OpId op, SimTime from) {
    const Span& span = spans_[op.value];
    const auto until = [&](SimTime moment, WaitKind kind, double& account) {
      const SimTime to = std::min(moment, span.start);
      if (to > from) {
        account += ToSeconds(to - from).value;
        waits_.push_back({op, kind, Stream::kHost, OpId(), from, to});
        from = to;
        return true;
      }
      return false;
    };
    until(span.issued, WaitKind::kHostIssue, result_.host_issue);
    const LastEdge edge = LatestEdge(op);
    if (until(span.ready, WaitKind::kEdge, result_.wait[static_cast<std::size_t>(edge.stream)])) {
      waits_.back().stream = edge.stream;
      waits_.back().cause = edge.op;
    }
    until(span.arrival, WaitKind::kCommunicator, result_.communicator);
    if (InfoOf(program_.ShapeOf(body_.ops[op.value]).code).is_collective) {
      until(span.start, WaitKind::kPeers, result_.peers);
    }
    until(span.start, WaitKind::kOther, result_.other);
  }

  struct LastEdge {
    Stream stream = Stream::kHost;
    OpId op;
  };
  // The edge that was done last.
  [[nodiscard]] LastEdge LatestEdge(OpId op) const {
    LastEdge last;
    std::optional<SimTime> latest;
    for (const Edge& edge : body_.EdgesOf(op)) {
      std::span<const Span> where = spans_;
      OpId from;
      if (!edge.is_carried()) {
        from = edge.op();
      } else if (!previous_.empty() && edge.slot() < body_.carries.size()) {
        from = body_.carries[edge.slot()];
        where = previous_;
      }
      if (from.valid() && (!latest || where[from.value].end > *latest)) {
        latest = where[from.value].end;
        last = {where[from.value].stream, from};
      }
    }
    return last;
  }

  const Program& program_;
  const Body& body_;
  std::span<const Span> spans_, previous_;
  StepBreakdown result_;
  std::vector<ComputeWait> waits_;
};

}  // namespace

std::string_view NameOf(OpClass op_class) {
  static constexpr std::array<std::string_view, kOpClassCount> kNames = {"gemm",
                                                                         "attention",
                                                                         "conv",
                                                                         "elementwise",
                                                                         "norm",
                                                                         "softmax",
                                                                         "gather_scatter",
                                                                         "all_gather",
                                                                         "reduce_scatter",
                                                                         "all_reduce",
                                                                         "other_collective",
                                                                         "device_copy",
                                                                         "host_copy",
                                                                         "optimizer",
                                                                         "host_optimizer",
                                                                         "control"};
  return kNames[static_cast<std::size_t>(op_class)];
}

OpClass ClassOf(KernelClass kernel) {
  using enum OpClass;
  // In the order of KernelClass.
  static constexpr std::array kClasses = {kGemm,          kGemm,        kConv,        kAttention,
                                          kAttention,     kElementwise, kNorm,        kSoftmax,
                                          kGatherScatter, kOptimizer,   kElementwise, kOptimizer};
  static_assert(kClasses.size() == static_cast<std::size_t>(KernelClass::kQr) + 1);
  return kClasses[static_cast<std::size_t>(kernel)];
}

OpClass ClassOf(const Program& program, const OpShape& shape) {
  using enum OpCode;
  static constexpr std::array<std::pair<OpCode, OpClass>, 13> kClasses = {{
      {kAllGather, OpClass::kAllGather},
      {kReduceScatter, OpClass::kReduceScatter},
      {kAllReduce, OpClass::kAllReduce},
      {kCopyH2d, OpClass::kHostCopy},
      {kCopyD2h, OpClass::kHostCopy},
      {kGradNorm, OpClass::kOptimizer},
      {kGradClip, OpClass::kOptimizer},
      {kOptimizerStep, OpClass::kOptimizer},
      {kHostOptimizerStep, OpClass::kHostOptimizer},
      {kBarrier, OpClass::kControl},
      {kHostWait, OpClass::kControl},
      {kStreamWait, OpClass::kControl},
      {kInitialize, OpClass::kControl},
  }};
  if (shape.code == kCompute) {
    return ClassOfKernels(program.KernelsOf(shape));
  }
  const bool is_collective = InfoOf(shape.code).is_collective;
  return ValueOf(kClasses, shape.code,
                 is_collective ? OpClass::kOtherCollective : OpClass::kDeviceCopy);
}

double StepBreakdown::Sum() const {
  return std::accumulate(run.begin(), run.end(), 0.0) +
         std::accumulate(wait.begin(), wait.end(), 0.0) + host_issue + communicator + peers + other;
}

void Add(const StepBreakdown& from, StepBreakdown& to) {
  for (std::size_t i = 0; i < to.run.size(); ++i) {
    to.run[i] += from.run[i];
  }
  for (std::size_t i = 0; i < to.wait.size(); ++i) {
    to.wait[i] += from.wait[i];
  }
  to.host_issue += from.host_issue;
  to.communicator += from.communicator;
  to.peers += from.peers;
  to.other += from.other;
  to.period += from.period;
}

void Divide(StepBreakdown& parts, double by) {
  for (double& seconds : parts.run) {
    seconds /= by;
  }
  for (double& seconds : parts.wait) {
    seconds /= by;
  }
  for (double* seconds :
       {&parts.host_issue, &parts.communicator, &parts.peers, &parts.other, &parts.period}) {
    *seconds /= by;
  }
}

std::vector<RecordedStep> FindRecordedSteps(const Program& program, const Trace& trace) {
  const std::size_t size = program.step.size();
  std::vector<RecordedStep> steps;
  std::size_t i = 0;
  while (i < trace.spans.size()) {
    const Span& head = trace.spans[i];
    std::size_t end = i;
    bool in_order = true;
    while (end < trace.spans.size() && trace.spans[end].rank == head.rank &&
           trace.spans[end].step == head.step && trace.spans[end].body == head.body) {
      in_order = in_order && trace.spans[end].op == OpId(end - i);
      ++end;
    }
    if (head.body == BodyKind::kStep && in_order && end - i == size) {
      RecordedStep step{head.rank, head.step, i};
      if (!steps.empty() && steps.back().rank == head.rank && steps.back().step + 1 == head.step) {
        step.previous = steps.size() - 1;
      }
      steps.push_back(step);
    }
    i = end;
  }
  return steps;
}

StepBreakdown BreakDown(const Program& program, const Trace& trace,
                        const std::vector<RecordedStep>& steps, std::size_t index,
                        std::optional<SimTime> period) {
  const std::size_t previous = steps[index].previous;
  const RecordedStep* before = previous == RecordedStep::kNoStep ? nullptr : &steps[previous];
  return Walk(program, trace, steps[index], before).Run(period);
}

std::vector<ComputeWait> FindComputeWaits(const Program& program, const Trace& trace,
                                          const std::vector<RecordedStep>& steps, std::size_t index,
                                          std::optional<SimTime> period) {
  const std::size_t previous = steps[index].previous;
  const RecordedStep* before = previous == RecordedStep::kNoStep ? nullptr : &steps[previous];
  Walk walk(program, trace, steps[index], before);
  (void)walk.Run(period);
  return walk.TakeWaits();
}

}  // namespace shardwright
