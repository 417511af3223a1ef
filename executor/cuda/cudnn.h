#pragma once

// cuDNN's backend interface, as far as it is used. Its functions come from a table, which is filled
// with dlsym, so that nothing links the library and tests put their own functions there.
// tests/executor/cuda/cudnn_abi_check.cc compares these declarations with cuDNN's header where it
// is installed.

#include <cstddef>
#include <cstdint>
#include <string>

#include "core/units.h"

namespace shardwright {

// The numbers of cudnn_graph.h that are used; the same in all of cuDNN 9.
struct CudnnNumbers {
  static constexpr int kSuccess = 0, kExecutionFailed = 5000;
  static constexpr int kFp32 = 0, kFp16 = 2, kInt32 = 4, kBf16 = 9, kBoolean = 11;
  // Types of attributes.
  static constexpr int kTypeHandle = 0, kTypeDType = 1, kTypeBool = 2, kTypeInt64 = 3,
                       kTypeFloat = 4, kTypePointer = 6, kTypeConvolution = 7, kTypeHeuristic = 8,
                       kTypeNote = 11, kTypePointwise = 14, kTypeDescriptor = 15,
                       kTypeReduction = 18, kTypeChar = 24;
  // Kinds of descriptors.
  static constexpr int kPointwise = 0, kConvolution = 1, kEngine = 2, kEngineConfig = 3,
                       kHeuristics = 4, kPlan = 5, kConvForward = 10, kConvWeightGrad = 11,
                       kConvDataGrad = 12, kPointwiseOp = 13, kGraph = 15, kPack = 16, kTensor = 17,
                       kMatmul = 18, kMatmulOp = 19, kReduction = 21, kReductionOp = 22,
                       kReshapeOp = 31, kDevice = 38;
  // Attributes.
  static constexpr int kPointwiseMode = 0, kPointwiseMath = 1, kPointwiseAxis = 9;
  static constexpr int kConvMath = 100, kConvMode = 101, kConvDilations = 102, kConvStrides = 103,
                       kConvPaddingAfter = 104, kConvPaddingBefore = 105, kConvDims = 106;
  static constexpr int kHeuristicsMode = 200, kHeuristicsGraph = 201, kHeuristicsResults = 202,
                       kHeuristicsDevice = 204;
  static constexpr int kConfigEngine = 300;
  static constexpr int kPlanConfig = 401, kPlanWorkspace = 402, kPlanDevice = 407;
  // Of the three convolutions: the first of alpha, beta, descriptor, weight, input, output.
  static constexpr int kConvForwardFirst = 700, kConvDataGradFirst = 706,
                       kConvWeightGradFirst = 712;
  static constexpr int kPointwiseOpDesc = 750, kPointwiseOpX = 751, kPointwiseOpB = 752,
                       kPointwiseOpY = 753, kPointwiseOpT = 758;
  static constexpr int kGraphOps = 801;
  static constexpr int kTensorAlignment = 900, kTensorType = 901, kTensorDims = 902,
                       kTensorStrides = 903, kTensorUid = 906, kTensorIsVirtual = 907,
                       kTensorIsNumber = 908;
  static constexpr int kPackUids = 1000, kPackPointers = 1001, kPackWorkspace = 1003;
  static constexpr int kEngineNotes = 1303;
  static constexpr int kMatmulMath = 1500, kMatmulA = 1520, kMatmulB = 1521, kMatmulC = 1522,
                       kMatmulDesc = 1523;
  static constexpr int kReductionOperator = 1600, kReductionMath = 1601, kReductionX = 1610,
                       kReductionY = 1611, kReductionDesc = 1612;
  static constexpr int kReshapeX = 2200, kReshapeY = 2201;
  static constexpr int kDeviceHandle = 2701, kDeviceJson = 2702;
  // Values.
  static constexpr int kAdd = 0, kMultiply = 1, kDivide = 6, kSubtract = 9, kExp = 13, kLog = 15,
                       kGreaterEqual = 303, kIndex = 501, kSelect = 601;
  static constexpr int kSum = 0, kLargest = 3;
  static constexpr int kHeuristicFallback = 2, kHeuristicA = 3;
  static constexpr int kCrossCorrelation = 1;
  static constexpr int kNoteTensorCore = 0, kNoteStrictNan = 9;
};

// Handles and descriptors are opaque; functions return 0 or cudnnStatus_t.
struct CudnnTable {
  std::size_t (*get_version)();  // 91900 for 9.19.0
  int (*create)(void** handle);
  int (*destroy)(void* handle);
  int (*set_stream)(void* handle, void* stream);
  const char* (*error_string)(int status);
  void (*last_error)(char* text, std::size_t size);
  int (*desc_create)(int kind, void** desc);
  int (*desc_destroy)(void* desc);
  int (*desc_set)(void* desc, int attribute, int type, std::int64_t count, const void* values);
  int (*desc_get)(void* desc, int attribute, int type, std::int64_t room, std::int64_t* count,
                  void* values);
  int (*desc_finalize)(void* desc);
  int (*execute)(void* handle, void* plan, void* pack);
};

// Fills the table from SHARDWRIGHT_CUDNN (a path), libcudnn.so.9 where the loader looks, or where
// it was when this program was built. Returns what is missing, or an empty text.
[[nodiscard]] std::string LoadCudnn(CudnnTable* table);

// Why a version, as cuDNN numbers it, will not do, or an empty text.
[[nodiscard]] std::string DescribeCudnnVersion(std::size_t version);

// cuDNN's number for numbers that it multiplies for us; -1: our own kernels do.
[[nodiscard]] int CudnnTypeOf(DType dtype);

}  // namespace shardwright
