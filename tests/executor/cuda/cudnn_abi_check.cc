// Compared at compile time where the header is installed: what executor/cuda/cudnn.h says about
// cuDNN without it.

#include <type_traits>

#include <cudnn.h>

#include "executor/cuda/cudnn.h"

namespace shardwright {

static_assert(CudnnNumbers::kSuccess == CUDNN_STATUS_SUCCESS);
static_assert(CudnnNumbers::kExecutionFailed == CUDNN_STATUS_EXECUTION_FAILED);
static_assert(CudnnNumbers::kFp32 == CUDNN_DATA_FLOAT);
static_assert(CudnnNumbers::kFp16 == CUDNN_DATA_HALF);
static_assert(CudnnNumbers::kInt32 == CUDNN_DATA_INT32);
static_assert(CudnnNumbers::kBf16 == CUDNN_DATA_BFLOAT16);
static_assert(CudnnNumbers::kBoolean == CUDNN_DATA_BOOLEAN);
static_assert(CudnnNumbers::kTypeHandle == CUDNN_TYPE_HANDLE);
static_assert(CudnnNumbers::kTypeDType == CUDNN_TYPE_DATA_TYPE);
static_assert(CudnnNumbers::kTypeBool == CUDNN_TYPE_BOOLEAN);
static_assert(CudnnNumbers::kTypeInt64 == CUDNN_TYPE_INT64);
static_assert(CudnnNumbers::kTypeFloat == CUDNN_TYPE_FLOAT);
static_assert(CudnnNumbers::kTypePointer == CUDNN_TYPE_VOID_PTR);
static_assert(CudnnNumbers::kTypeConvolution == CUDNN_TYPE_CONVOLUTION_MODE);
static_assert(CudnnNumbers::kTypeHeuristic == CUDNN_TYPE_HEUR_MODE);
static_assert(CudnnNumbers::kTypeNote == CUDNN_TYPE_NUMERICAL_NOTE);
static_assert(CudnnNumbers::kTypePointwise == CUDNN_TYPE_POINTWISE_MODE);
static_assert(CudnnNumbers::kTypeDescriptor == CUDNN_TYPE_BACKEND_DESCRIPTOR);
static_assert(CudnnNumbers::kTypeReduction == CUDNN_TYPE_REDUCTION_OPERATOR_TYPE);
static_assert(CudnnNumbers::kTypeChar == CUDNN_TYPE_CHAR);
static_assert(CudnnNumbers::kPointwise == CUDNN_BACKEND_POINTWISE_DESCRIPTOR);
static_assert(CudnnNumbers::kConvolution == CUDNN_BACKEND_CONVOLUTION_DESCRIPTOR);
static_assert(CudnnNumbers::kEngine == CUDNN_BACKEND_ENGINE_DESCRIPTOR);
static_assert(CudnnNumbers::kEngineConfig == CUDNN_BACKEND_ENGINECFG_DESCRIPTOR);
static_assert(CudnnNumbers::kHeuristics == CUDNN_BACKEND_ENGINEHEUR_DESCRIPTOR);
static_assert(CudnnNumbers::kPlan == CUDNN_BACKEND_EXECUTION_PLAN_DESCRIPTOR);
static_assert(CudnnNumbers::kConvForward == CUDNN_BACKEND_OPERATION_CONVOLUTION_FORWARD_DESCRIPTOR);
static_assert(CudnnNumbers::kConvWeightGrad ==
              CUDNN_BACKEND_OPERATION_CONVOLUTION_BACKWARD_FILTER_DESCRIPTOR);
static_assert(CudnnNumbers::kConvDataGrad ==
              CUDNN_BACKEND_OPERATION_CONVOLUTION_BACKWARD_DATA_DESCRIPTOR);
static_assert(CudnnNumbers::kPointwiseOp == CUDNN_BACKEND_OPERATION_POINTWISE_DESCRIPTOR);
static_assert(CudnnNumbers::kGraph == CUDNN_BACKEND_OPERATIONGRAPH_DESCRIPTOR);
static_assert(CudnnNumbers::kPack == CUDNN_BACKEND_VARIANT_PACK_DESCRIPTOR);
static_assert(CudnnNumbers::kTensor == CUDNN_BACKEND_TENSOR_DESCRIPTOR);
static_assert(CudnnNumbers::kMatmul == CUDNN_BACKEND_MATMUL_DESCRIPTOR);
static_assert(CudnnNumbers::kMatmulOp == CUDNN_BACKEND_OPERATION_MATMUL_DESCRIPTOR);
static_assert(CudnnNumbers::kReduction == CUDNN_BACKEND_REDUCTION_DESCRIPTOR);
static_assert(CudnnNumbers::kReductionOp == CUDNN_BACKEND_OPERATION_REDUCTION_DESCRIPTOR);
static_assert(CudnnNumbers::kReshapeOp == CUDNN_BACKEND_OPERATION_RESHAPE_DESCRIPTOR);
static_assert(CudnnNumbers::kDevice == CUDNN_BACKEND_DEVICEPROP_DESCRIPTOR);
static_assert(CudnnNumbers::kPointwiseMode == CUDNN_ATTR_POINTWISE_MODE);
static_assert(CudnnNumbers::kPointwiseMath == CUDNN_ATTR_POINTWISE_MATH_PREC);
static_assert(CudnnNumbers::kPointwiseAxis == CUDNN_ATTR_POINTWISE_AXIS);
static_assert(CudnnNumbers::kConvMath == CUDNN_ATTR_CONVOLUTION_COMP_TYPE);
static_assert(CudnnNumbers::kConvMode == CUDNN_ATTR_CONVOLUTION_CONV_MODE);
static_assert(CudnnNumbers::kConvDilations == CUDNN_ATTR_CONVOLUTION_DILATIONS);
static_assert(CudnnNumbers::kConvStrides == CUDNN_ATTR_CONVOLUTION_FILTER_STRIDES);
static_assert(CudnnNumbers::kConvPaddingAfter == CUDNN_ATTR_CONVOLUTION_POST_PADDINGS);
static_assert(CudnnNumbers::kConvPaddingBefore == CUDNN_ATTR_CONVOLUTION_PRE_PADDINGS);
static_assert(CudnnNumbers::kConvDims == CUDNN_ATTR_CONVOLUTION_SPATIAL_DIMS);
static_assert(CudnnNumbers::kHeuristicsMode == CUDNN_ATTR_ENGINEHEUR_MODE);
static_assert(CudnnNumbers::kHeuristicsGraph == CUDNN_ATTR_ENGINEHEUR_OPERATION_GRAPH);
static_assert(CudnnNumbers::kHeuristicsResults == CUDNN_ATTR_ENGINEHEUR_RESULTS);
static_assert(CudnnNumbers::kHeuristicsDevice == CUDNN_ATTR_ENGINEHEUR_DEVICEPROP);
static_assert(CudnnNumbers::kConfigEngine == CUDNN_ATTR_ENGINECFG_ENGINE);
static_assert(CudnnNumbers::kPlanConfig == CUDNN_ATTR_EXECUTION_PLAN_ENGINE_CONFIG);
static_assert(CudnnNumbers::kPlanWorkspace == CUDNN_ATTR_EXECUTION_PLAN_WORKSPACE_SIZE);
static_assert(CudnnNumbers::kPlanDevice == CUDNN_ATTR_EXECUTION_PLAN_DEVICEPROP);
static_assert(CudnnNumbers::kConvForwardFirst == CUDNN_ATTR_OPERATION_CONVOLUTION_FORWARD_ALPHA);
static_assert(CudnnNumbers::kConvDataGradFirst == CUDNN_ATTR_OPERATION_CONVOLUTION_BWD_DATA_ALPHA);
static_assert(CudnnNumbers::kConvWeightGradFirst ==
              CUDNN_ATTR_OPERATION_CONVOLUTION_BWD_FILTER_ALPHA);
static_assert(CudnnNumbers::kPointwiseOpDesc == CUDNN_ATTR_OPERATION_POINTWISE_PW_DESCRIPTOR);
static_assert(CudnnNumbers::kPointwiseOpX == CUDNN_ATTR_OPERATION_POINTWISE_XDESC);
static_assert(CudnnNumbers::kPointwiseOpB == CUDNN_ATTR_OPERATION_POINTWISE_BDESC);
static_assert(CudnnNumbers::kPointwiseOpY == CUDNN_ATTR_OPERATION_POINTWISE_YDESC);
static_assert(CudnnNumbers::kPointwiseOpT == CUDNN_ATTR_OPERATION_POINTWISE_TDESC);
static_assert(CudnnNumbers::kGraphOps == CUDNN_ATTR_OPERATIONGRAPH_OPS);
static_assert(CudnnNumbers::kTensorAlignment == CUDNN_ATTR_TENSOR_BYTE_ALIGNMENT);
static_assert(CudnnNumbers::kTensorType == CUDNN_ATTR_TENSOR_DATA_TYPE);
static_assert(CudnnNumbers::kTensorDims == CUDNN_ATTR_TENSOR_DIMENSIONS);
static_assert(CudnnNumbers::kTensorStrides == CUDNN_ATTR_TENSOR_STRIDES);
static_assert(CudnnNumbers::kTensorUid == CUDNN_ATTR_TENSOR_UNIQUE_ID);
static_assert(CudnnNumbers::kTensorIsVirtual == CUDNN_ATTR_TENSOR_IS_VIRTUAL);
static_assert(CudnnNumbers::kTensorIsNumber == CUDNN_ATTR_TENSOR_IS_BY_VALUE);
static_assert(CudnnNumbers::kPackUids == CUDNN_ATTR_VARIANT_PACK_UNIQUE_IDS);
static_assert(CudnnNumbers::kPackPointers == CUDNN_ATTR_VARIANT_PACK_DATA_POINTERS);
static_assert(CudnnNumbers::kPackWorkspace == CUDNN_ATTR_VARIANT_PACK_WORKSPACE);
static_assert(CudnnNumbers::kEngineNotes == CUDNN_ATTR_ENGINE_NUMERICAL_NOTE);
static_assert(CudnnNumbers::kMatmulMath == CUDNN_ATTR_MATMUL_COMP_TYPE);
static_assert(CudnnNumbers::kMatmulA == CUDNN_ATTR_OPERATION_MATMUL_ADESC);
static_assert(CudnnNumbers::kMatmulB == CUDNN_ATTR_OPERATION_MATMUL_BDESC);
static_assert(CudnnNumbers::kMatmulC == CUDNN_ATTR_OPERATION_MATMUL_CDESC);
static_assert(CudnnNumbers::kMatmulDesc == CUDNN_ATTR_OPERATION_MATMUL_DESC);
static_assert(CudnnNumbers::kReductionOperator == CUDNN_ATTR_REDUCTION_OPERATOR);
static_assert(CudnnNumbers::kReductionMath == CUDNN_ATTR_REDUCTION_COMP_TYPE);
static_assert(CudnnNumbers::kReductionX == CUDNN_ATTR_OPERATION_REDUCTION_XDESC);
static_assert(CudnnNumbers::kReductionY == CUDNN_ATTR_OPERATION_REDUCTION_YDESC);
static_assert(CudnnNumbers::kReductionDesc == CUDNN_ATTR_OPERATION_REDUCTION_DESC);
static_assert(CudnnNumbers::kReshapeX == CUDNN_ATTR_OPERATION_RESHAPE_XDESC);
static_assert(CudnnNumbers::kReshapeY == CUDNN_ATTR_OPERATION_RESHAPE_YDESC);
static_assert(CudnnNumbers::kDeviceHandle == CUDNN_ATTR_DEVICEPROP_HANDLE);
static_assert(CudnnNumbers::kDeviceJson == CUDNN_ATTR_DEVICEPROP_JSON_REPRESENTATION);
static_assert(CudnnNumbers::kAdd == CUDNN_POINTWISE_ADD);
static_assert(CudnnNumbers::kMultiply == CUDNN_POINTWISE_MUL);
static_assert(CudnnNumbers::kDivide == CUDNN_POINTWISE_DIV);
static_assert(CudnnNumbers::kSubtract == CUDNN_POINTWISE_SUB);
static_assert(CudnnNumbers::kExp == CUDNN_POINTWISE_EXP);
static_assert(CudnnNumbers::kLog == CUDNN_POINTWISE_LOG);
static_assert(CudnnNumbers::kGreaterEqual == CUDNN_POINTWISE_CMP_GE);
static_assert(CudnnNumbers::kIndex == CUDNN_POINTWISE_GEN_INDEX);
static_assert(CudnnNumbers::kSelect == CUDNN_POINTWISE_BINARY_SELECT);
static_assert(CudnnNumbers::kSum == CUDNN_REDUCE_TENSOR_ADD);
static_assert(CudnnNumbers::kLargest == CUDNN_REDUCE_TENSOR_MAX);
static_assert(CudnnNumbers::kHeuristicFallback == CUDNN_HEUR_MODE_FALLBACK);
static_assert(CudnnNumbers::kHeuristicA == CUDNN_HEUR_MODE_A);
static_assert(CudnnNumbers::kCrossCorrelation == CUDNN_CROSS_CORRELATION);
static_assert(CudnnNumbers::kNoteTensorCore == CUDNN_NUMERICAL_NOTE_TENSOR_CORE);
static_assert(CudnnNumbers::kNoteStrictNan == CUDNN_NUMERICAL_NOTE_STRICT_NAN_PROP);
static_assert(CudnnNumbers::kConvForwardFirst + 1 == CUDNN_ATTR_OPERATION_CONVOLUTION_FORWARD_BETA);
static_assert(CudnnNumbers::kConvForwardFirst + 2 ==
              CUDNN_ATTR_OPERATION_CONVOLUTION_FORWARD_CONV_DESC);
static_assert(CudnnNumbers::kConvForwardFirst + 3 == CUDNN_ATTR_OPERATION_CONVOLUTION_FORWARD_W);
static_assert(CudnnNumbers::kConvForwardFirst + 4 == CUDNN_ATTR_OPERATION_CONVOLUTION_FORWARD_X);
static_assert(CudnnNumbers::kConvForwardFirst + 5 == CUDNN_ATTR_OPERATION_CONVOLUTION_FORWARD_Y);
static_assert(CudnnNumbers::kConvDataGradFirst + 1 ==
              CUDNN_ATTR_OPERATION_CONVOLUTION_BWD_DATA_BETA);
static_assert(CudnnNumbers::kConvDataGradFirst + 2 ==
              CUDNN_ATTR_OPERATION_CONVOLUTION_BWD_DATA_CONV_DESC);
static_assert(CudnnNumbers::kConvDataGradFirst + 3 == CUDNN_ATTR_OPERATION_CONVOLUTION_BWD_DATA_W);
static_assert(CudnnNumbers::kConvDataGradFirst + 4 == CUDNN_ATTR_OPERATION_CONVOLUTION_BWD_DATA_DX);
static_assert(CudnnNumbers::kConvDataGradFirst + 5 == CUDNN_ATTR_OPERATION_CONVOLUTION_BWD_DATA_DY);
static_assert(CudnnNumbers::kConvWeightGradFirst + 1 ==
              CUDNN_ATTR_OPERATION_CONVOLUTION_BWD_FILTER_BETA);
static_assert(CudnnNumbers::kConvWeightGradFirst + 2 ==
              CUDNN_ATTR_OPERATION_CONVOLUTION_BWD_FILTER_CONV_DESC);
static_assert(CudnnNumbers::kConvWeightGradFirst + 3 ==
              CUDNN_ATTR_OPERATION_CONVOLUTION_BWD_FILTER_DW);
static_assert(CudnnNumbers::kConvWeightGradFirst + 4 ==
              CUDNN_ATTR_OPERATION_CONVOLUTION_BWD_FILTER_X);
static_assert(CudnnNumbers::kConvWeightGradFirst + 5 ==
              CUDNN_ATTR_OPERATION_CONVOLUTION_BWD_FILTER_DY);
static_assert(sizeof(cudnnStatus_t) == sizeof(int) && sizeof(cudnnDataType_t) == sizeof(int) &&
              sizeof(cudnnBackendDescriptorType_t) == sizeof(int) &&
              sizeof(cudnnBackendAttributeName_t) == sizeof(int) &&
              sizeof(cudnnBackendAttributeType_t) == sizeof(int) &&
              sizeof(cudnnBackendNumericalNote_t) == sizeof(int) &&
              sizeof(cudnnHandle_t) == sizeof(void*) &&
              sizeof(cudnnBackendDescriptor_t) == sizeof(void*));
// The order and types of arguments.
static_assert(
    std::is_same_v<decltype(&cudnnBackendSetAttribute),
                   cudnnStatus_t (*)(cudnnBackendDescriptor_t, cudnnBackendAttributeName_t,
                                     cudnnBackendAttributeType_t, std::int64_t, const void*)>);
static_assert(std::is_same_v<
              decltype(&cudnnBackendGetAttribute),
              cudnnStatus_t (*)(const cudnnBackendDescriptor_t, cudnnBackendAttributeName_t,
                                cudnnBackendAttributeType_t, std::int64_t, std::int64_t*, void*)>);
static_assert(std::is_same_v<decltype(&cudnnBackendExecute),
                             cudnnStatus_t (*)(cudnnHandle_t, cudnnBackendDescriptor_t,
                                               cudnnBackendDescriptor_t)>);

}  // namespace shardwright
