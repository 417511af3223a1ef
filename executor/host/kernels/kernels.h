#pragma once

// The host kernels, one pair per op kind. All compute in fp32 whatever the dtype of memory, sum in
// an order that depends on shapes only, and use nothing but what the call names.

#include "executor/model_op.h"

namespace shardwright {

void LinearForward(const ModelOpCall& call);
void LinearBackward(const ModelOpCall& call);
void LinearLossBackward(const ModelOpCall& call);  // ModelOpCall::loss_spec
void EmbeddingForward(const ModelOpCall& call);
void EmbeddingBackward(const ModelOpCall& call);
void PositionBiasForward(const ModelOpCall& call);
void PositionBiasBackward(const ModelOpCall& call);
void LayerNormForward(const ModelOpCall& call);
void LayerNormBackward(const ModelOpCall& call);
void RmsNormForward(const ModelOpCall& call);
void RmsNormBackward(const ModelOpCall& call);
void RopeForward(const ModelOpCall& call);
void RopeBackward(const ModelOpCall& call);
void AttentionForward(const ModelOpCall& call);
void AttentionBackward(const ModelOpCall& call);
void ActivationForward(const ModelOpCall& call);
void ActivationBackward(const ModelOpCall& call);
void GatedActivationForward(const ModelOpCall& call);
void GatedActivationBackward(const ModelOpCall& call);
void AddForward(const ModelOpCall& call);
void AddBackward(const ModelOpCall& call);
void MulForward(const ModelOpCall& call);
void MulBackward(const ModelOpCall& call);
void ScaleForward(const ModelOpCall& call);
void ScaleBackward(const ModelOpCall& call);
void DropoutForward(const ModelOpCall& call);
void DropoutBackward(const ModelOpCall& call);
void ConcatForward(const ModelOpCall& call);
void ConcatBackward(const ModelOpCall& call);
void SelectForward(const ModelOpCall& call);
void SelectBackward(const ModelOpCall& call);
void Conv2dForward(const ModelOpCall& call);
void Conv2dBackward(const ModelOpCall& call);
void BatchNormForward(const ModelOpCall& call);
void BatchNormBackward(const ModelOpCall& call);
void MaxPoolForward(const ModelOpCall& call);
void MaxPoolBackward(const ModelOpCall& call);
void AvgPoolForward(const ModelOpCall& call);
void AvgPoolBackward(const ModelOpCall& call);
void RouterForward(const ModelOpCall& call);
void RouterBackward(const ModelOpCall& call);
void ExpertsForward(const ModelOpCall& call);
void ExpertsBackward(const ModelOpCall& call);
void DispatchForward(const ModelOpCall& call);
void DispatchBackward(const ModelOpCall& call);
void MoveTokensForward(const ModelOpCall& call);
void MoveTokensBackward(const ModelOpCall& call);
void CombineForward(const ModelOpCall& call);
void CombineBackward(const ModelOpCall& call);
void LogSoftmaxForward(const ModelOpCall& call);
void LogSoftmaxBackward(const ModelOpCall& call);
void NllLossForward(const ModelOpCall& call);
void NllLossBackward(const ModelOpCall& call);
void CrossEntropyForward(const ModelOpCall& call);
void CrossEntropyBackward(const ModelOpCall& call);

}  // namespace shardwright
