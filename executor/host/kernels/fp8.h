#pragma once

// Products in fp8 on the host: operands are rounded on their way into sgemm's panels, where they
// are fp32 numbers that fp8 has, so that no copy of them lies in memory. Sums are fp32.

#include "executor/host/kernels/gemm.h"
#include "executor/host/kernels/rows.h"
#include "executor/model_op.h"
#include "models/kernels/fp8.h"

namespace shardwright {

// Gives both operands of the product their rounding and its scales, which take HostFp8Scales
// (models/kernels/host.h) bytes of `scratch`, where the call's layer multiplies in fp8.
void RoundOperands(const ModelOpCall& call, const GemmSize& size, const Fp8Formats& formats,
                   GemmOperand& a, GemmOperand& b, Scratch& scratch);

}  // namespace shardwright
