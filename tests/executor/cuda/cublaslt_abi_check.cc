// Compared at compile time where the header is installed: what executor/cuda/cublaslt.h says about
// cuBLASLt without it.

#include <cstddef>

#include <cublasLt.h>

#include "executor/cuda/cublaslt.h"

namespace shardwright {

static_assert(LtNumbers::kSuccess == CUBLAS_STATUS_SUCCESS);
static_assert(LtNumbers::kInvalidValue == CUBLAS_STATUS_INVALID_VALUE);
static_assert(LtNumbers::kArchMismatch == CUBLAS_STATUS_ARCH_MISMATCH);
static_assert(LtNumbers::kNotSupported == CUBLAS_STATUS_NOT_SUPPORTED);
static_assert(LtNumbers::kRealFp32 == CUDA_R_32F);
static_assert(LtNumbers::kRealFp16 == CUDA_R_16F);
static_assert(LtNumbers::kRealBf16 == CUDA_R_16BF);
static_assert(LtNumbers::kRealE4m3 == CUDA_R_8F_E4M3);
static_assert(LtNumbers::kRealE5m2 == CUDA_R_8F_E5M2);
static_assert(LtNumbers::kComputeFp32 == CUBLAS_COMPUTE_32F);
static_assert(LtNumbers::kTransposeNo == CUBLAS_OP_N);
static_assert(LtNumbers::kTransposeYes == CUBLAS_OP_T);
static_assert(LtNumbers::kDescTransA == CUBLASLT_MATMUL_DESC_TRANSA);
static_assert(LtNumbers::kDescTransB == CUBLASLT_MATMUL_DESC_TRANSB);
static_assert(LtNumbers::kDescEpilogue == CUBLASLT_MATMUL_DESC_EPILOGUE);
static_assert(LtNumbers::kDescBiasPointer == CUBLASLT_MATMUL_DESC_BIAS_POINTER);
static_assert(LtNumbers::kDescAuxPointer == CUBLASLT_MATMUL_DESC_EPILOGUE_AUX_POINTER);
static_assert(LtNumbers::kDescAuxLeading == CUBLASLT_MATMUL_DESC_EPILOGUE_AUX_LD);
static_assert(LtNumbers::kDescBiasType == CUBLASLT_MATMUL_DESC_BIAS_DATA_TYPE);
static_assert(LtNumbers::kDescScaleA == CUBLASLT_MATMUL_DESC_A_SCALE_POINTER);
static_assert(LtNumbers::kDescScaleB == CUBLASLT_MATMUL_DESC_B_SCALE_POINTER);
#if CUBLAS_VERSION >= 120900
static_assert(LtNumbers::kDescScaleModeA == CUBLASLT_MATMUL_DESC_A_SCALE_MODE);
static_assert(LtNumbers::kDescScaleModeB == CUBLASLT_MATMUL_DESC_B_SCALE_MODE);
static_assert(LtNumbers::kScalePerLine == CUBLASLT_MATMUL_MATRIX_SCALE_OUTER_VEC_32F);
#endif
static_assert(LtNumbers::kEpilogueBias == CUBLASLT_EPILOGUE_BIAS);
static_assert(LtNumbers::kEpilogueSumsOfA == CUBLASLT_EPILOGUE_BGRADA);
static_assert(LtNumbers::kEpilogueSumsOfB == CUBLASLT_EPILOGUE_BGRADB);
static_assert(LtNumbers::kEpilogueGelu == CUBLASLT_EPILOGUE_GELU_AUX);
static_assert(LtNumbers::kEpilogueGeluBias == CUBLASLT_EPILOGUE_GELU_AUX_BIAS);
static_assert(LtNumbers::kEpilogueGeluGrad == CUBLASLT_EPILOGUE_DGELU);
static_assert(LtNumbers::kPreferenceWorkspace == CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES);
static_assert(LtNumbers::kPreferenceAlignmentA == CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_A_BYTES);
static_assert(LtNumbers::kPreferenceAlignmentA + 3 == CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_D_BYTES);
static_assert(sizeof(LtAlgorithm) == sizeof(cublasLtMatmulAlgo_t));
static_assert(sizeof(LtHeuristic) == sizeof(cublasLtMatmulHeuristicResult_t));
static_assert(offsetof(LtHeuristic, workspace_bytes) ==
              offsetof(cublasLtMatmulHeuristicResult_t, workspaceSize));
static_assert(offsetof(LtHeuristic, state) == offsetof(cublasLtMatmulHeuristicResult_t, state));
static_assert(sizeof(cublasStatus_t) == sizeof(int) && sizeof(cudaDataType_t) == sizeof(int) &&
              sizeof(cublasLtEpilogue_t) == sizeof(int) &&
              sizeof(cublasOperation_t) == sizeof(int));

}  // namespace shardwright
