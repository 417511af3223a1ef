// A libcublasLt.so.13 that multiplies nothing: cuDNN ends the process where it does not find the
// library with all of these, and needs none of them for plans of its own kernels.

#include <cstddef>

extern "C" {

std::size_t cublasLtGetVersion() {
  return 130100;
}
std::size_t cublasLtGetCudartVersion() {
  return 13000;
}

#define SW_REFUSED(name) \
  int name() {           \
    return 15;           \
  }  // CUBLAS_STATUS_NOT_SUPPORTED
SW_REFUSED(cublasLtCreate)
SW_REFUSED(cublasLtDestroy)
SW_REFUSED(cublasLtGetProperty)
SW_REFUSED(cublasLtMatmul)
SW_REFUSED(cublasLtMatmulAlgoGetHeuristic)
SW_REFUSED(cublasLtMatmulDescCreate)
SW_REFUSED(cublasLtMatmulDescDestroy)
SW_REFUSED(cublasLtMatmulDescGetAttribute)
SW_REFUSED(cublasLtMatmulDescSetAttribute)
SW_REFUSED(cublasLtMatmulPreferenceCreate)
SW_REFUSED(cublasLtMatmulPreferenceDestroy)
SW_REFUSED(cublasLtMatmulPreferenceSetAttribute)
SW_REFUSED(cublasLtMatrixLayoutCreate)
SW_REFUSED(cublasLtMatrixLayoutDestroy)
SW_REFUSED(cublasLtMatrixLayoutGetAttribute)
SW_REFUSED(cublasLtMatrixLayoutSetAttribute)
SW_REFUSED(cublasLtMatrixTransform)
SW_REFUSED(cublasLtMatrixTransformDescCreate)
SW_REFUSED(cublasLtMatrixTransformDescDestroy)
SW_REFUSED(cublasLtMatrixTransformDescGetAttribute)
SW_REFUSED(cublasLtMatrixTransformDescSetAttribute)
#undef SW_REFUSED
}
