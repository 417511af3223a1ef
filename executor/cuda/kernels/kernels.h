#pragma once

// All kernels, for the two places that give them entry points.

#include "executor/cuda/kernels/attention_forward.h"
#include "executor/cuda/kernels/attention_grad.h"
#include "executor/cuda/kernels/elementwise.h"
#include "executor/cuda/kernels/embedding.h"
#include "executor/cuda/kernels/gemm.h"
#include "executor/cuda/kernels/image.h"
#include "executor/cuda/kernels/loss.h"
#include "executor/cuda/kernels/moe.h"
#include "executor/cuda/kernels/norm.h"
#include "executor/cuda/kernels/position.h"
#include "executor/cuda/kernels/sums.h"
#include "executor/cuda/kernels/update.h"
