// What the walker of a pipeline's rank gets from its neighbours, and sends them.
//
// Example: the middle of three stages, one micro-batch. torch keeps a buffer for each micro-batch
// and direction from the first step on (_make_tensor_from_meta in stage.py); what it sends lives
// until its own backward is over, or until the send is waited for.
//
//   previous   receive x                     send dx
//   compute    wait, forward x -> y          wait, backward dy -> dx, wait, free dx
//   next       send y            receive dy
//
// Where a rank's second stage follows its first (zbv, dualpipev) torch hands tensors over: y takes
// the buffer's place, and dy is read where the second stage has left it.

#include <utility>

#include "core/error.h"
#include "schedule/lower/unit_rules.h"
#include "schedule/lower/walker.h"

namespace shardwright {

void Walker::InitStage() {
  const auto count = static_cast<std::size_t>(e_.in.plan.accumulation);
  const auto hold = [&](TensorId tensor, Category category, std::vector<BufferId>& buffers) {
    for (std::size_t m = 0; m < count; ++m) {
      buffers.push_back(tensor.valid()
                            ? e_.Alloc(e_.a.tensor_bytes[tensor.value], category, Stream::kCompute)
                            : BufferId());
    }
  };
  for (const Model::Stage& stage : e_.in.model.stages) {
    hold(stage.received, Category::kActivation, received_);
    hold(stage.sent, Category::kActivationGradient, received_grads_);
  }
  grads_to_send_.resize(received_.size());
}

// Where the transfer was issued early, compute waits for it now.
void Walker::AwaitReceive(std::map<std::size_t, OpId>& coming, Phase phase) {
  if (const auto found = coming.find(Place()); found != coming.end()) {
    e_.AddWait(Stream::kCompute, {found->second}, phase, kNoSubject);
    FreeSent(found->second);
    coming.erase(found);
  }
}

// What was sent before it on its stream has left.
void Walker::FreeSent(OpId awaited) {
  std::erase_if(sending_, [&](const std::pair<BufferId, OpId>& sent) {
    const bool is_gone = sent.second <= awaited && e_.StreamOf(sent.second) == e_.StreamOf(awaited);
    if (is_gone) {
      e_.body->Free(sent.first);
    }
    return is_gone;
  });
}

void Walker::TakeReceived() {
  const TensorId tensor = e_.Stage().received;
  if (tensor.valid()) {
    AwaitReceive(coming_, Phase::kForward);
    const std::uint32_t s = e_.a.storage_of[tensor.value];
    const StorageFacts& facts = e_.a.storages[s];
    forward_instance_[s] = {received_[Place()],
                            facts.forward_uses + facts.backward_uses + 1};  // it stays
  }
}

bool Walker::HandsOver() const {
  return e_.in.stage && e_.stage == 0 && IsVShaped(e_.in.stage->pipeline.schedule) &&
         e_.in.stage->rank + 1 == e_.in.stage->pipeline.ranks;
}

void Walker::BeginStageBackward() {
  const TensorId tensor = e_.Stage().sent;
  if (HandsOver()) {
    grad_of_tensor_[tensor.value] = NewGrad(grads_to_send_[PlaceBehind()]);
  } else if (tensor.valid()) {
    AwaitReceive(coming_grads_, Phase::kBackward);
    grad_of_tensor_[tensor.value] = NewGrad(received_grads_[Place()]);
    ++grads_.back().refs;  // it stays
  }
}

void Walker::ReleaseSent() {
  if (const TensorId sent = e_.Stage().sent; sent.valid()) {
    Release(forward_instance_[e_.a.storage_of[sent.value]]);
  }
}

void Walker::EndStageBackward() {
  if (const TensorId received = e_.Stage().received; received.valid()) {
    const std::uint32_t grad = std::exchange(grad_of_tensor_[received.value], kNoGrad);
    SW_CHECK(grad != kNoGrad, "nothing of a stage has a gradient for what it got");
    grads_to_send_[Place()] = grads_[grad].buffer;
  }
}

// NCCL's stream waits for what the compute stream has been given so far. Compute waits for what
// comes at once, or, where receives are issued early, before the pass that reads it. With several
// stages on each of two ranks both neighbours of a rank are the other one, and share a stream.
void Walker::Transfer(const StageAction& action, const StageAction* joined) {
  using Kind = StageAction::Kind;
  const Pipeline& pipeline = e_.in.stage->pipeline;
  const auto buffer_of = [&](Kind kind) {
    switch (kind) {
      case Kind::kSendActivation:
        return in_flight_.at(Place()).forward[e_.a.storage_of[e_.Stage().sent.value]].buffer;
      case Kind::kSendGradient:
        return grads_to_send_[Place()];
      case Kind::kReceiveActivation:
        return received_[Place()];
      default:
        return received_grads_[Place()];
    }
  };
  e_.micro_batch = static_cast<std::uint16_t>(action.micro_batch);
  const bool sends = action.kind == Kind::kSendActivation || action.kind == Kind::kSendGradient;
  const bool receives = !sends || joined != nullptr;
  const bool is_next =
      action.kind == Kind::kSendActivation || action.kind == Kind::kReceiveGradient;
  const bool is_forward =
      action.kind == Kind::kSendActivation || action.kind == Kind::kReceiveActivation;
  const bool is_pair = pipeline.ranks == 2 && pipeline.stages_per_rank > 1;
  const bool goes_up = IsVShaped(pipeline.schedule) && e_.stage == 1;
  const bool has_next = is_pair ? e_.in.stage->rank == 0 : is_next != goes_up;
  const Stream stream = has_next ? Stream::kNext : Stream::kPrevious;
  const Phase phase = is_forward ? Phase::kForward : Phase::kBackward;
  const TensorId tensor = is_next ? e_.Stage().sent : e_.Stage().received;
  const OpId before = e_.LastCompute();
  if (!before.valid()) {
    e_.AddSlotWait(stream, kOptimizerSlot, phase, kNoSubject);
  }
  const BufferId out = sends ? buffer_of(action.kind) : BufferId();
  if (joined != nullptr) {
    e_.micro_batch = static_cast<std::uint16_t>(joined->micro_batch);
  }
  const BufferId in =
      receives ? buffer_of(joined != nullptr ? joined->kind : action.kind) : BufferId();
  e_.micro_batch = static_cast<std::uint16_t>(action.micro_batch);
  const OpId moved = e_.AddCollective(
      Collective(sends && receives ? OpCode::kSendReceive
                 : sends           ? OpCode::kSend
                                   : OpCode::kReceive,
                 stream, e_.AddPipeline(has_next ? "pp.next" : "pp.previous"),
                 e_.a.tensor_bytes[tensor.value], e_.in.job.precision.param),
      {phase, kNoSubject},
      {{out, AccessMode::kRead, Role::kInput}, {in, AccessMode::kWrite, Role::kOutput}});
  if (before.valid()) {
    e_.After(before);
  }
  if (sends) {
    (has_next ? sent_next_ : sent_previous_) = moved;
    if (!is_forward) {
      sending_.emplace_back(out, moved);
    }
  }
  if (receives && pipeline.schedule > PipelineSchedule::k1F1B) {
    (is_forward ? coming_ : coming_grads_)[Place()] = moved;
  } else if (receives) {
    sends ? WaitForSends() : e_.AddWait(Stream::kCompute, {moved}, phase, kNoSubject);
  }
}

void Walker::WaitForSends() {
  e_.AddWait(Stream::kCompute, {sent_next_, sent_previous_}, Phase::kBackward, kNoSubject);
  sent_next_ = sent_previous_ = OpId();
  for (const auto& [buffer, sent] : std::exchange(sending_, {})) {
    e_.body->Free(buffer);
  }
}

}  // namespace shardwright
