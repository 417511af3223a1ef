#pragma once

// Autocast on parameters in fp32 (dialect ddp): which ops run in fp32, and what the others cast.
//
// Example: a Llama of h features by Hugging Face, t tokens, computing in bf16. The embedding's
// output is in fp32, so the residual stream is, and a norm's output, since its weight is. A layer
// keeps 4 t h bytes for each norm twice (its input and the normalized input), and a copy of 2 t h
// for each of q, k, v, gate and up, whose inputs are cast one by one; in bf16 parameters it would
// keep 4 + 2 + 2 for each norm and no copies.
//
// Compilers fuse casts, and Megatron (tokens_first) has weights in 16 bits: with their kernel sets
// activations keep the dtype of compute.
//
// Source: torch 2.13, aten/src/ATen/autocast_mode.h (lists of ops); weights' casts are cached for
// a forward, activations' are not. tests/schedule/torch_autocast.py counts what autograd keeps.

#include "schedule/lower/analysis.h"

namespace shardwright {

// Sets `wide_tensors` and `wide_ops` of `a`. Needs `a.masters`. O(ops + tensors).
void FindAutocast(const LowerInput& in, ModelAnalysis& a);

// The op's kernels with casts of those inputs (bits of `inputs`) that are in fp32, and of their
// gradients. `trains`: its parameters learn, so that the copies are kept.
[[nodiscard]] OpKernels WithCasts(const LowerInput& in, const ModelOp& op, std::uint32_t inputs,
                                  bool trains, OpKernels kernels);

}  // namespace shardwright
