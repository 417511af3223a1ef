// What the walker of a pipeline's rank gets from its neighbours, and sends them.
//
// Example: the middle of three stages, one micro-batch. torch keeps a buffer for each micro-batch
// and direction from the first step on (_make_tensor_from_meta in stage.py); what it sends lives
// until its own backward is over, or until the send is waited for.
//
//   previous   receive x                     send dx
//   compute    wait, forward x -> y          wait, backward dy -> dx, wait, free dx
//   next       send y            receive dy

#include <utility>

#include "core/error.h"
#include "schedule/lower/unit_rules.h"
#include "schedule/lower/walker.h"

namespace shardwright {

void Walker::InitStage() {
  if (!e_.in.stage) {
    return;
  }
  const auto count = static_cast<std::size_t>(e_.in.plan.accumulation);
  const auto hold = [&](TensorId tensor, Category category, std::vector<BufferId>& buffers) {
    for (std::size_t m = 0; m < count && tensor.valid(); ++m) {
      buffers.push_back(e_.Alloc(e_.a.tensor_bytes[tensor.value], category, Stream::kCompute));
    }
  };
  hold(e_.in.model.received, Category::kActivation, received_);
  hold(e_.in.model.sent, Category::kActivationGradient, received_grads_);
  grads_to_send_.resize(count);
}

void Walker::TakeReceived() {
  const TensorId tensor = e_.in.model.received;
  if (tensor.valid()) {
    const std::uint32_t s = e_.a.storage_of[tensor.value];
    const StorageFacts& facts = e_.a.storages[s];
    forward_instance_[s] = {received_[e_.micro_batch],
                            facts.forward_uses + facts.backward_uses + 1};  // it stays
  }
}

void Walker::BeginStageBackward() {
  const TensorId tensor = e_.in.model.sent;
  if (tensor.valid()) {
    grad_of_tensor_[tensor.value] = NewGrad(received_grads_[e_.micro_batch]);
    ++grads_.back().refs;  // it stays
  }
}

void Walker::EndStageBackward() {
  if (const TensorId sent = e_.in.model.sent; sent.valid()) {
    Release(forward_instance_[e_.a.storage_of[sent.value]]);
  }
  if (const TensorId received = e_.in.model.received; received.valid()) {
    const std::uint32_t grad = std::exchange(grad_of_tensor_[received.value], kNoGrad);
    SW_CHECK(grad != kNoGrad, "nothing of a stage has a gradient for what it got");
    grads_to_send_[e_.micro_batch] = grads_[grad].buffer;
  }
}

// NCCL's stream waits for what the compute stream has been given so far.
void Walker::Transfer(const StageAction& action, const StageAction* joined) {
  using Kind = StageAction::Kind;
  const auto is_send = [](const StageAction& a) {
    return a.kind == Kind::kSendActivation || a.kind == Kind::kSendGradient;
  };
  const auto buffer_of = [&](const StageAction& a) {
    const auto m = static_cast<std::size_t>(a.micro_batch);
    switch (a.kind) {
      case Kind::kSendActivation:
        return in_flight_.at(static_cast<std::uint16_t>(m))
            .forward[e_.a.storage_of[e_.in.model.sent.value]]
            .buffer;
      case Kind::kSendGradient:
        return grads_to_send_[m];
      case Kind::kReceiveActivation:
        return received_[m];
      default:
        return received_grads_[m];
    }
  };
  e_.micro_batch = static_cast<std::uint16_t>(action.micro_batch);
  const bool sends = is_send(action), receives = !sends || joined != nullptr;
  const bool is_next =
      action.kind == Kind::kSendActivation || action.kind == Kind::kReceiveGradient;
  const bool is_forward =
      action.kind == Kind::kSendActivation || action.kind == Kind::kReceiveActivation;
  const Stream stream = is_next ? Stream::kNext : Stream::kPrevious;
  const Phase phase = is_forward ? Phase::kForward : Phase::kBackward;
  const TensorId tensor = is_next ? e_.in.model.sent : e_.in.model.received;
  const OpId before = e_.body->last().valid() ? e_.LastCompute() : OpId();
  if (!before.valid()) {
    e_.AddSlotWait(stream, kOptimizerSlot, phase, kNoSubject);
  }
  const BufferId out = sends ? buffer_of(action) : BufferId();
  const BufferId in = receives ? buffer_of(joined != nullptr ? *joined : action) : BufferId();
  const OpId moved = e_.AddCollective(
      Collective(sends && receives ? OpCode::kSendReceive
                 : sends           ? OpCode::kSend
                                   : OpCode::kReceive,
                 stream, e_.AddPipeline(is_next ? "pp.next" : "pp.previous"),
                 e_.a.tensor_bytes[tensor.value], e_.in.job.precision.param),
      {phase, kNoSubject},
      {{out, AccessMode::kRead, Role::kInput}, {in, AccessMode::kWrite, Role::kOutput}});
  if (before.valid()) {
    e_.After(before);
  }
  if (sends) {
    (is_next ? sent_next_ : sent_previous_) = moved;
    if (!is_forward) {
      sending_.push_back(out);
    }
  }
  if (receives) {
    sends ? WaitForSends() : e_.AddWait(Stream::kCompute, {moved}, phase, kNoSubject);
  }
}

void Walker::WaitForSends() {
  e_.AddWait(Stream::kCompute, {sent_next_, sent_previous_}, Phase::kBackward, kNoSubject);
  sent_next_ = sent_previous_ = OpId();
  for (const BufferId buffer : std::exchange(sending_, {})) {
    e_.body->Free(buffer);
  }
}

}  // namespace shardwright
