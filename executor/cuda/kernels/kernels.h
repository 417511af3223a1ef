#pragma once

// All kernels, for the two places that give them entry points.

#include "executor/cuda/kernels/attention_forward.h"
#include "executor/cuda/kernels/attention_grad.h"
#include "executor/cuda/kernels/batch_norm.h"
#include "executor/cuda/kernels/convolution.h"
#include "executor/cuda/kernels/elementwise.h"
#include "executor/cuda/kernels/embedding.h"
#include "executor/cuda/kernels/experts.h"
#include "executor/cuda/kernels/fp8.h"
#include "executor/cuda/kernels/gemm.h"
#include "executor/cuda/kernels/loss.h"
#include "executor/cuda/kernels/norm.h"
#include "executor/cuda/kernels/pool.h"
#include "executor/cuda/kernels/position.h"
#include "executor/cuda/kernels/router.h"
#include "executor/cuda/kernels/sums.h"
#include "executor/cuda/kernels/update.h"
