#pragma once

// Entry points of the host kernels.

#include <string>

#include "core/units.h"
#include "executor/model_op.h"
#include "models/kernel_set.h"
#include "models/model.h"

namespace shardwright {

// Runs the op on the calling thread and those of the call's team. The workspace, what is saved and
// what is aliased must be those of LowerOp with the kernel set shardwright-host, or one that
// differs in moe_dispatch only. Throws InputError for ids and labels out of range.
void ForwardOnHost(const ModelOpCall& call);
void BackwardOnHost(const ModelOpCall& call);

// Why no host kernel runs this op, or an empty text.
[[nodiscard]] std::string HostKernelProblem(const OpSpec& spec, DType compute,
                                            const KernelSetOptions& options);

}  // namespace shardwright
