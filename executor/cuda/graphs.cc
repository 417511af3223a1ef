// Cuts a step into stretches that may be launched as graphs.
//
// Example, in the order of the program: compute ops A, B, C, D, E; C waits for the gather stream,
// and the reduce stream waits for D. C begins a stretch, D ends one: {A, B} and {C, D}. E is alone,
// so it is launched by itself. With a dropout in A, whose mask changes by step, A is outside, and B
// alone.

#include "executor/cuda/graphs.h"

#include <variant>

namespace shardwright {
namespace {

// Is the work that is launched for this call the same in every step?
struct IsConstant {
  bool scales_loss;

  bool operator()(const CopyCall& call) const { return !call.loads_inputs; }
  bool operator()(const DivideCall& /*call*/) const { return true; }
  bool operator()(const ModelCall& call) const {
    const OpSpec& spec = *call.call.spec;
    // The loss is read back, and its gradient scaled.
    const bool is_loss = spec.kind == OpKind::kCrossEntropy || spec.kind == OpKind::kNllLoss ||
                         call.call.loss_spec != nullptr;
    return !is_loss && (spec.dropout_p <= 0.0 || !call.call.is_training);
  }
  bool operator()(const NormCall& /*call*/) const { return !scales_loss; }
  bool operator()(const ClipCall& /*call*/) const { return !scales_loss; }
  // Updates take the learning rate and the number of the step; the others are none of the stream's.
  template <class Other>
  bool operator()(const Other& /*call*/) const {
    return false;
  }
};

// Ops that wait for, and that are waited for by, something beside their own stream.
struct Borders {
  std::vector<bool> begins, ends;
};
// Edges inside of one stream need no border, as the stream keeps its order. An edge to the step
// before makes its op a beginning, and the op that the next step waits for an end.
Borders FindBorders(const Body& body, std::span<const Work> works) {
  Borders borders{std::vector<bool>(body.size()), std::vector<bool>(body.size())};
  for (std::uint32_t op = 0; op < body.size(); ++op) {
    for (const Edge edge : body.EdgesOf(OpId(op))) {
      if (edge.is_carried()) {
        borders.begins[op] = true;
      } else if (works[edge.value].stream != works[op].stream) {
        borders.begins[op] = true;
        borders.ends[edge.value] = true;
      }
    }
  }
  for (const OpId carried : body.carries) {
    if (carried.valid()) {
      borders.ends[carried.value] = true;
    }
  }
  return borders;
}

}  // namespace

std::vector<std::vector<std::uint32_t>> FindStretches(const Body& body, std::span<const Work> works,
                                                      bool scales_loss) {
  const Borders borders = FindBorders(body, works);
  std::vector<std::vector<std::uint32_t>> stretches;
  std::vector<std::uint32_t> open;
  const auto close = [&] {
    if (open.size() > 1) {
      stretches.push_back(open);
    }
    open.clear();
  };
  for (std::uint32_t op = 0; op < body.size(); ++op) {
    const Work& work = works[op];
    const bool is_inside = work.stream == Stream::kCompute && work.call != nullptr &&
                           std::visit(IsConstant{scales_loss}, *work.call);
    if (borders.begins[op] || !is_inside) {
      // Ops of other streams come between without harm: who waits for whom is said by edges.
      if (work.stream == Stream::kCompute || work.stream == Stream::kHost) {
        close();
      }
    }
    if (is_inside) {
      open.push_back(op);
      if (borders.ends[op]) {
        close();
      }
    }
  }
  close();
  return stretches;
}

}  // namespace shardwright
