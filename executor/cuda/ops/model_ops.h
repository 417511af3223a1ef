#pragma once

// Model ops as launches: which kernels one ModelOpCall becomes, with which sizes. The memory that a
// call names is device memory.

#include <cstdint>
#include <span>
#include <string>

#include "executor/call.h"
#include "executor/cuda/gpu.h"
#include "executor/cuda/kernels/array.h"
#include "executor/cuda/kernels/loss.h"
#include "executor/model_op.h"
#include "executor/optimizer.h"

namespace shardwright {

struct OpContext {
  Gpu& gpu;
  GpuStream stream;
  gpu::Fault* fault = nullptr;  // device memory; what the kernels found wrong with the data
};

// Submits forward or backward of one op. Workspace and what is saved are those of LowerOp with the
// kernel sets shardwright-cuda-plain, -gelu and -fused.
void SubmitModelOp(const ModelOpCall& call, bool is_backward, const OpContext& context);

// Submits, behind the forward of a loss, the count of its rows whose label has the largest score.
// `verdicts`: a byte of device memory for each of LossRowsOf.
[[nodiscard]] std::int64_t LossRowsOf(const ModelOpCall& call);
void SubmitLabelCount(const ModelOpCall& call, std::uint8_t* verdicts, gpu::LabelCounts* counts,
                      const OpContext& context);

// Submits the update of one shard (executor/optimizer.h), with the same bits as the host's.
void SubmitShardUpdate(const OptimizerCall& call, const OptimizerOptions& options,
                       const OpContext& context);

// Submits *norm = the sum of squares of all gradients, each over `divisor`. `partial`: device
// memory for NormPartials numbers.
[[nodiscard]] std::int64_t NormPartials(std::span<const ElementRange> gradients);
void SubmitGradientNorm(std::span<const ElementRange> gradients, double divisor, double* partial,
                        float* norm, const OpContext& context);

// Why no CUDA kernel runs this op, or an empty text.
[[nodiscard]] std::string CudaKernelProblem(const OpSpec& spec, DType compute,
                                            const KernelSetOptions& options);

// A fault of the kernels in the words of the host's kernels; empty: nothing is wrong.
[[nodiscard]] std::string DescribeFault(const gpu::Fault& fault);

}  // namespace shardwright
