#pragma once

// How one software stack turns each model op into kernels: which kernels, what they read and
// write, and what they keep for backward. Times are not decided here (see simulator/costs).

#include <cstdint>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "core/units.h"
#include "models/kernel_set_fields.h"
#include "models/model.h"

namespace shardwright {

enum class KernelClass : std::uint8_t {
  kGemm,              // batch x (m, k) x (k, n)
  kGroupedGemm,       // the same with `batch` different weight matrices (MoE)
  kConv,              // implicit GEMM: m = output pixels, n = output channels, k = taps
  kAttentionForward,  // fused (flash) attention
  kAttentionBackward,
  kElementwise,    // priced by bytes
  kNorm,           // layer/rms/batch norm: rows of reductions, priced by bytes
  kSoftmax,        // softmax, log-softmax, cross-entropy: priced by bytes
  kGatherScatter,  // embedding lookups, MoE permutation: priced by bytes
  kOptimizer,      // multi-tensor updates: priced by bytes
  kCopy,           // device-to-device copies, casts: priced by bytes
  kQr,             // QR of (m, m), once in `batch` runs: `flops` and the price are a run's share
};

[[nodiscard]] constexpr bool IsAttention(KernelClass kind) {
  return kind == KernelClass::kAttentionForward || kind == KernelClass::kAttentionBackward;
}

inline constexpr std::size_t kAttentionImplCount = kAttentionImplNames.size();
[[nodiscard]] constexpr bool IsFused(AttentionImpl attention) {
  return attention != AttentionImpl::kMaterialized;
}

// One launch. `read`/`written` are the bytes that must cross the memory bus: every operand once,
// caches do the rest.
struct Kernel {
  KernelClass kind = KernelClass::kElementwise;
  DType dtype = DType::kBf16;  // of the multiplied operands for kGemm/kConv/kAttention*
  AttentionImpl attention = AttentionImpl::kFlash;  // kAttention*: whose kernel
  bool scaled_by_row = false;                       // kGemm in fp8
  bool is_own = false;                              // kGroupedGemm: ours; attention: where no cuDNN
  std::int64_t batch = 1, m = 0, n = 0, k = 0;      // m = seq_q, n = seq_k, k = head_dim
  Flops flops{0};  // as executed (causal attention: only the tiles that run)
  Bytes read{0};
  Bytes written{0};
  // A kernel that goes through one row after the other, of `row` bytes, comes back to `reread` of
  // what it read: free while the rows that are worked on at a time stay in the cache. 0: `read` is
  // all, at the rate of kernels that reduce. A lookup comes back to `reread`, at its own rate.
  Bytes row{0};
  Bytes reread{0};
  // Loads of which each waits for the one before, because one block does all: nothing hides them.
  std::int64_t waits = 0;
  // kGroupedGemm: products that the host asks for one by one; 0: one kernel for all.
  std::int64_t calls = 0;

  bool operator==(const Kernel&) const = default;
};

// Does FSDP2 gather the weights of these products in fp8?
[[nodiscard]] constexpr bool GathersFp8(Fp8Products fp8) {
  return fp8 >= Fp8Products::kGathered;
}

// The built-in stacks, see docs/kernel_sets.md:
// torch-{eager,compile,compile-2024,compile-2023,2024,2022}, megatron-{1.1,2021}, jax-xla,
// composer-{2023,2024}, deepspeed, internevo,
// hf-{eager,2026,trainer,foak,liger,liger-full,2021,2022,2023},
// shardwright-{host,cuda,cuda-plain,cuda-gelu,cuda-fused,cuda-chunked}.
[[nodiscard]] std::span<const KernelSetOptions> BuiltinKernelSets();
// Throws InputError naming `where` with the nearest match.
[[nodiscard]] const KernelSetOptions& FindKernelSet(std::string_view name, std::string_view where);

// What an op shares with other ranks in the middle of a pass: the statistics of a synchronised
// batch norm, or of logits whose vocabulary ranks share. 0 bytes: nothing.
struct Exchange {
  std::vector<Kernel> before;  // makes this rank's part; the pass's own kernels follow the exchange
  Bytes bytes{0};              // of each rank, fp32 numbers
};

// A moment of the backward pass of an op that autograd runs as several, each of which lets go of
// what it kept.
struct BackwardMoment {
  Bytes alive{0};    // of what it lets go of early, and scratch; gradients that leave it left out
  Bytes to_come{0};  // gradients of its inputs that are not there yet
  Bytes weights_to_come{0};  // and of its parameters, where each is a tensor of its own
};

// Attention that meets the keys and values of one rank after the other, its own first. Each has the
// kernels of a step; `forward` and `backward_data` follow the last one.
struct RingKernels {
  std::int64_t steps = 0;            // 0: no ring
  bool gathers = false;              // all keys and values come at once
  std::vector<Kernel> pack, add;     // what is sent; a gradient to those that came
  std::vector<Kernel> first, later;  // of forward
  std::vector<Kernel> back_first, back_later;
  Bytes sent{0}, sent_back{0};  // keys and values; their gradients, in fp32
};

// What one op becomes for a micro-batch of B samples.
struct OpKernels {
  std::vector<Kernel> forward;
  std::vector<Kernel> backward_data;    // gradients of the inputs
  std::vector<Kernel> backward_weight;  // gradients of the parameters (skipped when frozen)
  std::vector<Kernel> metrics;          // after the micro-batch's last pass; read the inputs
  Exchange forward_exchange;            // all-gathered, by a cut loss among those that cut it
  Exchange backward_exchange;           // summed over the ranks, where an input wants a gradient
  // In forward, one behind the other before `forward`: reduced over the ranks that cut the layer.
  std::vector<Exchange> tensor_sums;
  RingKernels ring;
  // Bit i set: input i (output i) must stay alive until this op's backward.
  std::uint32_t saves_input = 0;
  std::uint32_t saves_output = 0;
  // The subset of `saves_input` that only `backward_weight` reads: PyTorch does not keep these
  // inputs when every parameter of the op is frozen.
  std::uint32_t saves_input_for_weight = 0;
  // Bytes kept for backward that are no tensor of the graph: softmax statistics, dropout masks,
  // fp32 copies, norm statistics.
  Bytes extra_saved{0};
  // Bit i set: the gradient of input i is written over input i, where nobody else keeps that.
  std::uint32_t overwrites_input = 0;
  // Scratch alive only while the op runs: its peak beyond inputs, outputs (in backward: gradients
  // in and out) and what is saved.
  Bytes forward_workspace{0};
  Bytes backward_workspace{0};
  // The tensors of these bytes, if several. More in backward: gone when input gradients come.
  std::vector<Bytes> extra_saved_tensors;
  // Backward lets go of the first so many of these before the op's last moment. `moments` say what
  // is alive, and stand for the workspace of backward; both empty: nothing goes early.
  std::size_t early_tensors = 0;
  std::vector<BackwardMoment> moments;
  std::vector<Bytes> forward_workspace_tensors;
  std::vector<Bytes> backward_workspace_tensors;
  std::vector<Bytes> metrics_workspace_tensors;
  // Output i is a view of (or overwrites) input `output_aliases[i]`; -1 = own storage.
  std::vector<int> output_aliases;
  // True when recomputing this op costs a matmul (linear, router, attention, conv): the ops that
  // operator-level selective checkpointing may keep.
  bool compute_intensive = false;
  // A compiler keeps this op's inputs and statistics only, and computes its output again in
  // backward by one more pass of `forward`, instead of keeping the output for its consumers.
  bool output_recomputed = false;
};

// Kernels of `spec` for `batch` samples with activations in `compute` dtype. Requires batch >= 1.
// An op that RunsOnce is lowered with batch 1.
// Lists may be empty: views launch nothing, and fused ops run inside a neighbour's launch.
// O(1): no dependence on the model's size. Throws InputError when a size passes 2^56.
[[nodiscard]] OpKernels LowerOp(const OpSpec& spec, std::int64_t batch, DType compute,
                                const KernelSetOptions& options);

// The stack with its head and loss in so many chunks, as Liger runs them under any training loop:
// nobody gets, keeps or shifts whole logits then. Requires at least 1.
[[nodiscard]] KernelSetOptions WithLossChunks(KernelSetOptions options, std::int64_t chunks);
// Are op `i` a linear layer and the next one the cross-entropy of its output?
[[nodiscard]] bool IsLinearLoss(const Model& model, std::size_t i);

// Backward of a linear layer that runs the cross-entropy behind it, with its forward, in
// `options.loss_chunks` chunks; forward has nothing left.
[[nodiscard]] OpKernels LowerLinearLoss(const OpSpec& linear, const OpSpec& loss,
                                        std::int64_t batch, DType compute,
                                        const KernelSetOptions& options);

// Are all inputs of the op shared by the samples (a table of positions)? kOther says itself what
// depends on the batch.
[[nodiscard]] bool RunsOnce(const Model& model, const ModelOp& op);

// The sum of two gradients of one tensor of `bytes` bytes: autograd runs it once per further
// consumer of the tensor, in place.
[[nodiscard]] Kernel GradientSumKernel(Bytes bytes, DType compute);

// Bytes of a tensor for `batch` samples when activations are in `compute` dtype.
[[nodiscard]] Bytes TensorBytes(const Tensor& tensor, std::int64_t batch, DType compute);

}  // namespace shardwright
