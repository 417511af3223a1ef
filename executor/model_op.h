#pragma once

// One call of a model op with all memory resolved. A device's kernels are functions of it: they
// read and write nothing but what it names, and keep no state between calls.

#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "core/parallel.h"
#include "core/units.h"
#include "models/kernel_set.h"
#include "models/model.h"

namespace shardwright {

// Typed memory. A null `data` means that there is none: an input that forward did not keep, a
// gradient that nobody wants. `elements` and `dtype` are set all the same.
struct ConstView {
  const void* data = nullptr;
  DType dtype = DType::kFp32;
  std::int64_t elements = 0;
};
struct View {
  void* data = nullptr;
  DType dtype = DType::kFp32;
  std::int64_t elements = 0;
};

// Where the gradient of one parameter goes. Its dtype may differ from the parameter's (gradients
// that are reduced in fp32).
struct ParamGrad {
  View view;
  bool accumulate = false;  // add to what is there instead of replacing it
};

// What a dropout mask depends on, beside the element's position in its sample: neither sharding
// nor micro-batching changes it, and recomputation draws it again.
struct DropoutKey {
  std::uint64_t seed = 0;
  std::uint64_t step = 0;
  std::uint32_t op = 0;           // index of the model op
  std::int64_t first_sample = 0;  // of this call, counted over all ranks' samples of the step
};

// An op that exchanges something with other ranks in the middle of a pass runs in two parts.
enum class OpPart : std::uint8_t {
  kWhole,
  kBeforeExchange,  // writes `exchange`; in backward also the gradients of the parameters
  kAfterExchange,   // reads it, and writes the rest
};

// What an op of attention by a ring does; see RingKernels. kFinish: the op itself, behind the
// steps.
enum class RingPart : std::uint8_t { kNone, kPack, kAttend, kAdd, kFinish };
struct RingStep {
  RingPart part = RingPart::kNone;
  std::int64_t source = 0;  // the rank whose keys and values are here
  bool is_first = false;
  // What came: keys, then values; kAdd: their gradients, in fp32. Empty: nothing did.
  std::span<const std::byte> came = {};
};

enum class LossReduction : std::uint8_t { kMean, kSum };

// This rank among those that cut layers and among those that cut tokens.
struct CutPlace {
  std::int64_t part = 0;           // of heads, features and words
  std::int64_t index = 0;          // of `context_ranks`
  std::int64_t context_ranks = 1;  // that have tokens of the same samples

  // The place in its sample of token `token` of the `count` that rank `rank` has. Of ranks that cut
  // tokens each has a piece of the head and, as far from the end, a piece of the tail.
  [[nodiscard]] std::int64_t PositionOf(std::int64_t rank, std::int64_t token,
                                        std::int64_t count) const {
    const std::int64_t piece = count / 2;
    return token >= piece ? (2 * context_ranks - 1 - rank) * piece + token - piece
                          : rank * piece + token;
  }
  // The same for this rank. Ranks that cut layers compute on all tokens.
  [[nodiscard]] std::int64_t PositionHere(std::int64_t token, std::int64_t count) const {
    return context_ranks > 1 ? PositionOf(index, token, count) : token;
  }
};

// Labels below zero take no part in a loss.
inline constexpr std::int64_t kNoLabel = -100;  // PyTorch's ignore_index

// Shapes are those of OpKind's comments for `batch` samples, samples outermost, rows of features
// contiguous, images as (channels, height, width); ids and labels are int64, a loss is one fp32.
// Activations have the dtype `compute`.
struct ModelOpCall {
  const OpSpec* spec = nullptr;
  const KernelSetOptions* options = nullptr;
  std::int64_t batch = 1;  // as passed to LowerOp: 1 for ops on tensors that the samples share
  DType compute = DType::kFp32;
  bool is_training = true;  // false: no dropout, running statistics instead of the batch's

  // Backward: those that OpKernels::saves_input names. A linear layer with one input more ends its
  // data gradient with the derivative of GELU (tanh form) there, KernelSetOptions::fused_gelu.
  std::vector<ConstView> inputs;
  std::vector<ConstView> params;
  // Forward writes all: a linear layer with one output more also GELU of the first. A norm with one
  // input and one output more first writes the sum of both inputs to the second output, which it
  // then normalizes, KernelSetOptions::fused_residual. Backward reads those that
  // OpKernels::saves_output names.
  std::vector<View> outputs;
  // Backward only. output_grads[i] may hold several times the output's elements: then the gradient
  // is their sum (a table of positions that is added to every sample).
  std::vector<ConstView> output_grads;
  std::vector<View> input_grads;  // null: not wanted
  bool adds_input_grads = false;  // norms, linear: to what is there, instead of replacing it
  std::vector<ParamGrad> param_grads;

  // Backward of a linear layer that runs its forward and the loss behind it,
  // KernelSetOptions::loss_chunks: inputs are x and the labels, the output is the loss, and there
  // is no gradient of an output. Null: it does not.
  const OpSpec* loss_spec = nullptr;

  // OpKernels::extra_saved bytes: forward writes them, backward reads them. 64-byte aligned.
  std::span<std::byte> saved;
  // OpKernels::{forward,backward}_workspace bytes with arbitrary content. 64-byte aligned.
  std::span<std::byte> workspace;
  // Non-parameter state of the module, Module::buffer_elements fp32 numbers (batch norm: running
  // mean, running variance). Null: there is none.
  float* buffers = nullptr;

  // Exchange::bytes of this rank before it; after it those of all ranks one behind the other
  // (forward) or their sum (backward). Experts of routed rows: int64 rows per rank and expert here.
  // Moved tokens: part after part, those of each rank. A part of the words: three numbers a row.
  OpPart part = OpPart::kWhole;
  std::span<std::byte> exchange;
  CutPlace cut;
  RingStep ring;

  DropoutKey dropout;
  LossReduction reduction = LossReduction::kMean;
  // The gradient of the loss itself: 1, times what the trainer scales with.
  double loss_scale = 1.0;

  // Threads that a host kernel may share its work with; null: it has the calling one only.
  Team* team = nullptr;
};
[[nodiscard]] inline std::int64_t RowsOf(const ModelOpCall& call) {
  return call.batch * call.spec->rows;
}
// Is there a gradient `i`, and does somebody want it?
[[nodiscard]] inline bool Wants(const std::vector<View>& views, std::size_t i) {
  return i < views.size() && views[i].data != nullptr;
}
[[nodiscard]] inline bool Wants(const std::vector<ParamGrad>& grads, std::size_t i) {
  return i < grads.size() && grads[i].view.data != nullptr;
}

// Why no kernel of ours does this op on `device`, such as "the host"; empty: one does.
[[nodiscard]] std::string KernelProblem(const OpSpec& spec, DType compute,
                                        const KernelSetOptions& options, const std::string& device);

}  // namespace shardwright
