#pragma once

// Walks the model forward and backward once per micro-batch, writes the compute ops with their
// activations and gradients, and calls the dialect at unit boundaries. It is the part of lowering
// that all dialects share.
//
// walker.cc has an example of one block. A dialect writes no op of the model. The walker writes no
// collective but the model's own, such as SyncBatchNorm's (walker_exchange.cc).

#include <cstdint>
#include <map>
#include <optional>
#include <span>
#include <vector>

#include "schedule/lower/activation_offload.h"
#include "schedule/lower/emitter.h"

namespace shardwright {

// The actions of a dialect at the moments where a framework's hooks fire. Units are those of
// Program::units. Called in host order.
class DialectRules {
 public:
  virtual ~DialectRules() = default;

  virtual void PreForward(UnitId unit, Phase phase) = 0;
  virtual void PostForward(UnitId unit, Phase phase) = 0;
  // Before the first backward op (or recomputation) of a stretch of the unit.
  virtual void PreBackward(UnitId unit) = 0;
  // After the last backward op of a stretch of the unit; `done` after its last stretch (a unit that
  // gathers again over gaps has several).
  virtual void BackwardLeft(UnitId unit, bool done) = 0;
  // In the place of PreBackward, where nothing of the unit's call runs in backward, but what it
  // returned, as it was given, has its gradient. Calls that end together, the outer ones first.
  virtual void GivenBack(std::span<const UnitId> /*units*/) {}
  // After the last backward op that uses the unit's parameters; not for units without gradients.
  virtual void GradientsFinal(UnitId /*unit*/) {}
  // Before each backward op, when PreBackward was called for all units that begin there.
  virtual void BackwardBegins(std::uint32_t /*model_op*/) {}
  // After each backward op, when all that it read is released.
  virtual void BackwardDone(std::uint32_t /*model_op*/) {}
  // The hooks that follow run inside of this region of the analysis, or in none: kNoRegion.
  virtual void InRegion(std::uint32_t /*region*/, Phase /*phase*/) {}
  // A module that the unit names is called, by whatever name.
  virtual void ModuleCalled(UnitId /*unit*/, Phase /*phase*/) {}
  // Right before the forward op (or its recomputation) is written.
  virtual void BeforeForwardOp(std::uint32_t /*model_op*/, Phase /*phase*/) {}
  // The buffer that `model_op` reads the unit's parameters from; they are there at this point.
  [[nodiscard]] virtual BufferId ParameterStorage(UnitId unit, std::uint32_t model_op) = 0;
  // Where the weight gradient of `model_op` goes; may allocate. Read-write accumulates.
  struct GradTarget {
    BufferId buffer;
    AccessMode mode = AccessMode::kWrite;
  };
  [[nodiscard]] virtual GradTarget WeightGradTarget(std::uint32_t model_op, UnitId unit) = 0;
  // Right after that backward op was written.
  virtual void WeightGradWritten(std::uint32_t model_op, UnitId unit) = 0;
  // Right before a backward op with kernels is written.
  virtual void BeforeBackwardOp(std::uint32_t /*model_op*/) {}
  // Right after any backward op was written, with or without a weight gradient.
  virtual void AfterBackwardOp(std::uint32_t /*model_op*/) {}
};

// Where each unit begins and ends in the model's op order.
struct UnitSpans {
  struct Span {
    std::uint32_t first = 0, last = 0;  // model ops, both included
  };
  std::vector<std::vector<Span>> spans;       // per unit; one span when the unit holds over gaps
  std::vector<std::uint32_t> backward_first;  // per unit: highest op with a backward, or kNoRegion
  std::vector<std::vector<Span>> backward_spans;  // per unit: the spans cut down to ops with a
                                                  // backward; empty ones left out
  // Per unit and stretch of backward_spans: the stretch that it was cut from, and whether some
  // input of the call that begins it needs a gradient (only for dialects that ask per call).
  std::vector<std::vector<Span>> backward_from;
  std::vector<std::vector<bool>> backward_hooked;
  // Does a gradient reach what the call that ends the stretch returns?
  std::vector<std::vector<bool>> backward_reached;
  // Nothing of the stretch runs in backward, but what it returns, which it was given, has a
  // gradient; the stretch of backward_spans is the op before whose backward that is complete.
  std::vector<std::vector<bool>> backward_given;
  std::vector<std::uint32_t> first_module;  // per unit, in pre-order
  std::vector<std::uint32_t> grads_final;   // per unit: lowest op of backward that uses it
  std::vector<bool> input_grads;            // per unit: some input of the unit needs a gradient
  std::vector<UnitId> unit_of_param;        // per parameter; ties map to the storage's unit
  // The calls that begin and end a stretch: calls of the unit's modules for dialects that have
  // hooks on them, for the other dialects the stretch itself.
  struct Call {
    Span span;
    std::uint32_t module = 0;  // in pre-order
  };
  struct Ends {
    Call first, last;
    bool by_model = false;  // no call ends it, but the end of the model
    bool is_open = false;   // nor does that: no hook runs there, and none in backward
  };
  std::vector<std::vector<Ends>> ends, backward_ends;  // of spans and backward_spans
  std::vector<std::vector<Span>> calls;  // per unit: of each module, for dialects with hooks
  std::vector<std::uint32_t> like;       // per unit: the first that agrees in all above but calls
};
[[nodiscard]] UnitSpans FindUnitSpans(const LowerInput& input, const ModelAnalysis& analysis,
                                      const std::vector<ResolvedUnit>& units);

// Units gather by hooks on their outputs, which come before what they cover runs again.
[[nodiscard]] constexpr bool RecomputesLate(Dialect dialect) {
  return dialect == Dialect::kFsdp2 || dialect == Dialect::kFsdp1 || dialect == Dialect::kZero3;
}

class Walker {
 public:
  Walker(Emitter& emitter, const UnitSpans& spans, DialectRules& rules);

  // Allocates the host memory that inputs come from; with the init body open.
  void Init();
  // Allocates and copies the inputs of the micro-batch, runs forward.
  void Forward();
  // Runs backward of Emitter::micro_batch, whose forward has run: all of it, or the gradients of
  // activations, which leave those of weights to WeightGrads.
  void Backward(bool leaves_weights = false);
  void WeightGrads();
  // Compute waits for the gradient that the next stage sends.
  void AwaitGradient() { AwaitReceive(coming_grads_, Phase::kBackward); }
  // walker_stages.cc: what goes from stage to stage. With `joined` both are one op.
  void Transfer(const StageAction& action, const StageAction* joined);
  void WaitForSends();
  // Runs the metrics of the micro-batch, after its last pass.
  void Metrics();
  // Frees what the metrics read: the training loop keeps the model's results until it has the next
  // ones. To be called at the end of the step, too, where the next ones are the next step's.
  void DropResults();

 private:
  struct Instance {
    BufferId buffer;
    std::uint32_t refs = 0;
  };
  // What lives between the passes of one micro-batch.
  struct InFlight {
    std::vector<Instance> forward;
    std::vector<BufferId> extra, early;
    // What WeightGrads reads.
    std::vector<Instance> grads;
    std::vector<std::uint32_t> grad_of_tensor;
  };
  // A unit begins or ends at an op, with the stretch of forward that this is about.
  struct Event {
    std::uint32_t op = 0;
    UnitId unit;
    UnitSpans::Span span;
    UnitSpans::Span call;   // of the module by whose call it does
    bool is_given = false;  // not an end: what the call returned, as it was given, has its gradient
  };
  struct Events {  // CSR over model ops
    std::vector<std::uint32_t> begin;
    std::vector<Event> events;

    [[nodiscard]] std::span<const Event> At(std::uint32_t op) const {
      return std::span(events).subspan(begin[op], begin[op + 1] - begin[op]);
    }
  };

  // walker_events.cc: fill the events below.
  void FindForwardEvents();
  void FindBackwardEvents();
  [[nodiscard]] static bool ComesFirst(const Event& x, const Event& y);
  [[nodiscard]] std::uint32_t RegionAround(std::uint32_t i, const UnitSpans::Span& span) const;
  // Fills region_start_, region_end_; returns per region the op before whose backward it runs.
  [[nodiscard]] std::vector<std::uint32_t> FindRegionStarts();
  void MarkBlocks();
  void LoadInputs();
  // From the host, for each micro-batch, by a stage.
  [[nodiscard]] bool IsLoaded(std::size_t tensor, const Model::Stage& stage) const;
  void InitStage();
  void TakeReceived();
  void BeginStageBackward();
  void EndStageBackward();
  void ReleaseSent();
  // The stage behind this one is the rank's next: what both hand over stays where it is.
  [[nodiscard]] bool HandsOver() const;
  void AwaitReceive(std::map<std::size_t, OpId>& coming, Phase phase);
  void FreeSent(OpId awaited);
  // Of the stage and micro-batch at hand among those of the rank.
  [[nodiscard]] std::size_t Place() const {
    return e_.stage * static_cast<std::size_t>(e_.in.plan.accumulation) + e_.micro_batch;
  }
  [[nodiscard]] std::size_t PlaceBehind() const {
    return Place() + static_cast<std::size_t>(e_.in.plan.accumulation);
  }
  // Swaps what lives of the present micro-batch with what was kept of it.
  void SwapInFlight();
  void ForwardOp(std::uint32_t i, Phase phase);
  [[nodiscard]] std::vector<Instance*> AllocateOutputs(std::uint32_t i, bool rerun);
  void AddForwardOp(std::uint32_t i, Phase phase, BufferId extra, BufferId workspace);
  void BackwardOp(std::uint32_t i);
  void AddBackwardOp(std::uint32_t i);
  void UseForBackward(std::uint32_t i);
  // torch.utils.checkpoint with use_reentrant=False, under the hooks of units.
  [[nodiscard]] bool StopsEarly() const {
    return RecomputesLate(e_.in.plan.dialect) && !e_.in.kernels.whole_recompute;
  }
  void Recompute(const Region& region, std::uint32_t stop);
  // `occurrence` 1: what follows the op's exchange; 2: its metrics, or its weights' gradients where
  // they are apart.
  void AddCompute(std::uint32_t i, Phase phase, ShapeId shape, std::uint16_t occurrence = 0);
  // walker_exchange.cc: the part of an op before its exchange, and the exchange, whose result they
  // return.
  [[nodiscard]] BufferId AddForwardExchange(std::uint32_t i, Phase phase);
  [[nodiscard]] BufferId AddBackwardExchange(std::uint32_t i, DialectRules::GradTarget weight);
  [[nodiscard]] GroupId DataParallelGroup();
  void AddTensorSums(std::uint32_t i, Phase phase);
  // What comes from another rank, what was sent for it, and the transfer.
  struct Arrival {
    BufferId buffer, sent;
    OpId by;
  };
  // The steps of a ring, if the op has one. Returns the gradients of this rank's keys and values,
  // in backward.
  BufferId AddRing(std::uint32_t i, Phase phase, BufferId workspace);
  // Ops that are nothing but an exchange: rows on their way to experts of other ranks, and back;
  // tokens of ranks that cut the layer.
  [[nodiscard]] bool IsExchange(std::uint32_t i) const {
    const OpSpec& spec = e_.in.model.SpecOf(e_.in.model.ops[i]);
    return spec.kind == OpKind::kExchange || MovesTokens(spec);
  }
  [[nodiscard]] static bool MovesTokens(const OpSpec& spec) {
    return spec.kind == OpKind::kGatherTokens || spec.kind == OpKind::kScatterTokens ||
           (spec.kind == OpKind::kExchange && spec.context_ranks > 0);
  }
  [[nodiscard]] std::vector<Kernel> ProductsBeside(std::uint32_t i, bool is_backward) const;
  void MoveTokens(std::uint32_t i, Phase phase, BufferId from, BufferId to);
  [[nodiscard]] BufferId InputOf(std::uint32_t i, std::size_t input, Phase phase);
  void AddExchangeOfRows(std::uint32_t i, Phase phase);
  void AddExchangeOfGrads(std::uint32_t i);
  void SendCounts(std::uint32_t i, Phase phase, UnitId unit);
  OpId AddRowCollective(std::uint32_t i, Phase phase);
  void UseInputs(std::uint32_t i, Phase phase);
  void UseParameters(std::uint32_t i);
  // Makes the op's quantized weight whole, in the dtype of compute; no buffer where it is none.
  // UseParameters reads it; DropWhole frees it behind the op.
  void MakeWhole(std::uint32_t i, Phase phase);
  void DropWhole();
  [[nodiscard]] ShapeId ForwardShape(std::uint32_t i);
  [[nodiscard]] ShapeId BackwardShape(std::uint32_t i, bool adds);
  [[nodiscard]] bool ReadsRecomputed(std::uint32_t storage, std::uint32_t reader) const;
  [[nodiscard]] Instance& InstanceFor(std::uint32_t storage, std::uint32_t reader);
  void Release(Instance& instance);
  void ReleaseRead(std::uint32_t i, bool rerun);
  void ReleaseSaved(std::uint32_t i);
  [[nodiscard]] std::vector<std::uint32_t> OpsWithWeights() const;
  void EndWeights(std::uint32_t last);
  // What the pass at hand computes of the op's backward.
  [[nodiscard]] bool MakesData(std::uint32_t i) const {
    return e_.a.ops[i].input_grads != 0 && part_ != Part::kWeights;
  }
  [[nodiscard]] bool MakesWeights(std::uint32_t i) const {
    return e_.a.ops[i].weight_grad && part_ != Part::kData;
  }
  void ReleaseHeld(std::uint32_t region);
  void TakeFetched(const ActivationOffload::Fetched& fetched);
  void FetchBeside(std::uint32_t i);
  // Gradients of tensors.
  static constexpr std::uint32_t kNoGrad = 0xffffffffu;
  [[nodiscard]] std::uint32_t NewGrad(BufferId buffer);
  void ReleaseGrad(std::uint32_t grad);
  void Contribute(std::uint32_t i, TensorId tensor, std::uint32_t grad);
  [[nodiscard]] bool AddsItsGradient(std::uint32_t i) const;
  [[nodiscard]] BufferId NewBackwardWorkspace(const OpKernels& kernels);
  [[nodiscard]] std::vector<std::uint32_t> NewInputGrads(std::uint32_t i, bool adds);
  void PassGradThrough(std::uint32_t i);
  [[nodiscard]] UnitId UnitOf(const ModelOp& op) const;
  [[nodiscard]] bool Covers(const Event& event, const Region& region) const;
  void FireBackwardEntries(std::uint32_t i, bool covering, const Region* region);
  void FireEnds(std::span<const Event> events, std::uint32_t i);
  [[nodiscard]] static Events ToEvents(std::vector<Event> events, std::size_t op_count);
  [[nodiscard]] bool StartsRegion(std::uint32_t i) const;

  Emitter& e_;
  const UnitSpans& spans_;
  DialectRules& rules_;

  Events called_, enter_, leave_;  // forward
  Events back_enter_, back_leave_, back_final_, back_given_;
  std::vector<bool> forward_mark_, backward_mark_;
  std::vector<std::uint32_t> region_start_;  // per op: region whose backward begins there
  std::vector<std::uint32_t> region_end_;    // per op: region whose backward ends there

  enum class Part : std::uint8_t { kAll, kData, kWeights };
  Part part_ = Part::kAll;             // of backward
  std::uint32_t running_ = kNoRegion;  // the region that runs again
  BufferId host_inputs_;               // where the data loader puts one micro-batch
  std::optional<ActivationOffload> offload_;
  std::vector<bool> products_;  // beside which offloaded activations come back; or empty
  std::vector<Instance> forward_instance_, rerun_instance_;  // per storage
  BufferId whole_;                                           // of MakeWhole
  std::vector<BufferId> results_;                            // kept for DropResults
  std::vector<Instance*> logits_;                            // held until backward ends
  std::vector<BufferId> extra_;                              // per op: private saved bytes
  std::vector<BufferId> early_;                              // those that backward frees early
  std::vector<Instance> grads_;
  std::vector<std::uint32_t> grad_of_tensor_;
  std::vector<ShapeId> forward_shape_, backward_shape_;  // caches, by kernel variant
  std::map<std::size_t, InFlight> in_flight_;            // by Place, where backward is to come
  // Per stage and micro-batch: what the stage before sent, gradients of what this one sent, and of
  // what it got; and the receives that the pass at hand has to wait for.
  std::vector<BufferId> received_, received_grads_, grads_to_send_;
  std::map<std::size_t, OpId> coming_, coming_grads_;
  OpId sent_next_, sent_previous_;  // the last ones, where they are not waited for yet
  std::vector<std::pair<BufferId, OpId>> sending_;  // freed when compute has waited for the send
};

}  // namespace shardwright
