// The forward half of Walker, and what both halves share; walker_backward.cc has the other half.
//
// Example: a block "norm, linear, sum" as one unit. The walker writes and calls, in this order:
//
//   MarkLayer                      for FindRepeats: a period may begin here
//   rules.PreForward(unit)         the dialect gathers; compute may wait
//   norm: alloc output, op         then its input loses one reference
//   linear: alloc output, op       reads rules.ParameterStorage(unit)
//   sum: alloc output, op          forward's last read of the block's input
//   rules.PostForward(unit)        the dialect frees the parameters
//
// Tensors are counted, not owned: an instance begins with as many references as reads will follow,
// forward and backward, and its buffer is freed with the last of them. A buffer is allocated right
// before the op that writes it and freed right behind the op that reads it last. The allocator's
// model depends on this order, which is that of PyTorch's CPU thread.

#include "schedule/lower/walker.h"

#include "core/error.h"
#include "core/ranges.h"
#include "schedule/lower/layout.h"
#include "schedule/lower/products.h"

namespace shardwright {

Walker::Walker(Emitter& emitter, const UnitSpans& spans, DialectRules& rules)
    : e_(emitter), spans_(spans), rules_(rules) {
  const Model& model = e_.in.model;
  forward_mark_.assign(model.ops.size(), false);
  backward_mark_.assign(model.ops.size(), false);
  FindForwardEvents();
  FindBackwardEvents();
  const std::vector<std::uint32_t> region_begins = FindRegionStarts();
  MarkBlocks();
  if (e_.in.plan.offload.activations && e_.in.job.mode == JobMode::kTrain) {
    if (e_.in.plan.transfers == Transfers::kInTurn) {
      products_ = FindLargeProducts(model, e_.a, spans_).any;
    }
    offload_.emplace(e_, backward_mark_, region_begins, products_);
  }
  forward_instance_.resize(e_.a.storages.size());
  rerun_instance_.resize(e_.a.storages.size());
  extra_.resize(model.ops.size());
  early_.resize(model.ops.size());
  grad_of_tensor_.resize(model.tensors.size());
  forward_shape_.resize(e_.a.kernels.size());
  backward_shape_.resize(e_.a.kernels.size() * 8);
}

// Under PyTorch's dialects a region runs again when backward asks for the first tensor that it
// would have kept (torch.utils.checkpoint with use_reentrant=False). A sum keeps none, and the
// hooks of units that end there come first. With use_reentrant=True it runs again before all of its
// backward. Example: a block ends with "down, sum". The sum keeps no tensor, so its backward runs
// first and the region starts at `down`. Under use_reentrant=True it starts at the sum.
bool Walker::StartsRegion(std::uint32_t i) const {
  const ModelOpFacts& facts = e_.a.ops[i];
  if (!facts.has_backward || !StopsEarly()) {
    return facts.has_backward;
  }
  bool keeps = e_.a.KernelsOf(i).extra_saved > Bytes(0) ||
               (facts.input_grads != 0 && !e_.in.model.ops[i].params.empty());
  ForEachSaved(e_.a, e_.in.model, i, [&](std::uint32_t, Role, std::uint16_t) { keeps = true; });
  return keeps;
}

// For each region, from its end: the first op that starts it (above), and from its beginning the
// last op of its backward. The region's first op begins a layer of forward, its starting op one of
// backward.
std::vector<std::uint32_t> Walker::FindRegionStarts() {
  region_start_.assign(e_.in.model.ops.size(), kNoRegion);
  region_end_.assign(e_.in.model.ops.size(), kNoRegion);
  std::vector<std::uint32_t> begins(e_.a.regions.size(), 0);
  for (std::uint32_t r = 0; r < e_.a.regions.size(); ++r) {
    const Region& region = e_.a.regions[r];
    forward_mark_[region.first] = true;
    for (std::uint32_t i = region.last + 1; i-- > region.first;) {
      if (!IsPassed(e_.a, r, i) && StartsRegion(i)) {
        region_start_[i] = r;
        begins[r] = i;
        backward_mark_[i] = true;
        break;
      }
    }
    for (std::uint32_t i = region.first; i <= region.last; ++i) {
      if (e_.a.ops[i].has_backward) {
        region_end_[i] = r;
        break;
      }
    }
  }
  return begins;
}

// Layers of the repeated classes are periods even when they are no units.
void Walker::MarkBlocks() {
  const Model& model = e_.in.model;
  if (model.block_classes.empty()) {
    return;
  }
  ModuleId block;
  std::uint32_t last = 0;  // with a backward, so far
  for (std::uint32_t i = 0; i < model.ops.size(); ++i) {
    ModuleId m = model.ops[i].module;
    while (m.valid() && !IsBlock(model, m)) {
      m = model.modules[m.value].parent;
    }
    if (m != block) {
      forward_mark_[i] = true;
      backward_mark_[last] = true;
      block = m;
    }
    last = e_.a.ops[i].has_backward ? i : last;
  }
}

UnitId Walker::UnitOf(const ModelOp& op) const {
  return op.params.empty() ? UnitId() : spans_.unit_of_param[op.params.front().value];
}

// ZeRO-3 fetches and releases the parameters of every module in Python hooks around it, on one GPU,
// too.
static Issue IssueOf(Dialect dialect) {
  return dialect == Dialect::kZero3 ? Issue::kHook : Issue::kLoop;
}

// With one sample in a micro-batch, Transformers' call of flash-attn asks the device whether the
// positions are those of packed samples, and the host waits for the answer (_is_packed_sequence).
// Its Python has that call where it does not repeat k and v, as it does for PyTorch's attention.
static bool ChecksPacking(const LowerInput& in) {
  return in.plan.micro_batch == 1 && in.kernels.python_gelu_tanh && !in.kernels.repeat_kv &&
         IsFused(in.kernels.attention);
}

ShapeId Walker::ForwardShape(std::uint32_t i) {
  ShapeId& cached = forward_shape_[e_.a.variant[i]];
  if (!cached.valid()) {
    OpShape shape;
    shape.dtype = e_.in.job.precision.param;
    shape.issue = IssueOf(e_.in.plan.dialect);
    cached = e_.Intern(shape, e_.a.KernelsOf(i).forward);
  }
  return cached;
}

// `adds`: its data gradient is added to one that is there.
ShapeId Walker::BackwardShape(std::uint32_t i, bool adds) {
  const std::size_t variant =
      (MakesData(i) ? 1U : 0U) + (MakesWeights(i) ? 2U : 0U) + (adds ? 4U : 0U);
  ShapeId& cached = backward_shape_[std::size_t{8} * e_.a.variant[i] + variant];
  if (!cached.valid()) {
    const OpKernels& k = e_.a.KernelsOf(i);
    std::vector<Kernel> kernels;
    if (MakesData(i)) {
      kernels = k.backward_data;
    }
    if (adds) {
      kernels.back().read += e_.a.tensor_bytes[e_.in.model.ops[i].inputs.front().value];
    }
    if (MakesWeights(i)) {
      kernels.insert(kernels.end(), k.backward_weight.begin(), k.backward_weight.end());
    }
    OpShape shape;
    shape.dtype = e_.in.job.precision.param;
    shape.issue = IssueOf(e_.in.plan.dialect);
    cached = e_.Intern(shape, kernels);
  }
  return cached;
}

// Readers inside the producer's region take the recomputed instance, all others forward's.
bool Walker::ReadsRecomputed(std::uint32_t storage, std::uint32_t reader) const {
  const StorageFacts& s = e_.a.storages[storage];
  return s.recomputed && s.producer != kNoRegion &&
         e_.a.ops[s.producer].region == e_.a.ops[reader].region;
}

Walker::Instance& Walker::InstanceFor(std::uint32_t storage, std::uint32_t reader) {
  return ReadsRecomputed(storage, reader) ? rerun_instance_[storage] : forward_instance_[storage];
}

void Walker::Release(Instance& instance) {
  SW_CHECK(instance.refs > 0, "a tensor is released more often than it is read");
  if (--instance.refs == 0) {
    e_.body->Free(instance.buffer);
  }
}

void Walker::Init() {
  const Model& model = e_.in.model;
  Buffer inputs;
  inputs.category = Category::kInput;
  inputs.owner = Stream::kHost;
  inputs.on_host = true;
  inputs.zero_filled = true;
  const Model::Stage all = {0, static_cast<std::uint32_t>(model.ops.size())};
  for (std::size_t t = 0; t < model.tensors.size(); ++t) {
    if (IsLoaded(t, all)) {
      inputs.size += e_.a.storages[e_.a.storage_of[t]].bytes;
    }
  }
  host_inputs_ = e_.body->NewBuffer(inputs);
  e_.body->Alloc(host_inputs_);
  InitStage();
}

bool Walker::IsLoaded(std::size_t t, const Model::Stage& stage) const {
  const Model& model = e_.in.model;
  if (model.tensors[t].producer.valid() || e_.a.storage_of[t] == kNoRegion ||
      IsIn(model.stages, TensorId(t), &Model::Stage::received)) {
    return false;
  }
  return model.stages.size() < 2 ||
         std::any_of(model.ops.begin() + stage.begin, model.ops.begin() + stage.end,
                     [&](const ModelOp& op) { return IsIn(op.inputs, TensorId(t)); });
}

// Example: 256 tokens of 8 bytes and as many labels: two device buffers of 2,048 bytes and one copy
// of 4,096 bytes from the host, on the compute stream as `.to(device)` runs there. Where one stage
// of a rank reads tokens and another one labels, labels are output 1 of their copy, too.
void Walker::LoadInputs() {
  const Model& model = e_.in.model;
  const Model::Stage all = {0, static_cast<std::uint32_t>(model.ops.size())};
  std::vector<std::pair<BufferId, std::uint16_t>> buffers;  // with the input's place
  std::uint16_t count = 0;
  OpShape shape;
  for (std::size_t t = 0; t < model.tensors.size(); ++t) {
    if (!IsLoaded(t, all)) {
      continue;
    }
    const std::uint16_t place = count++;
    if (!IsLoaded(t, e_.Stage())) {
      continue;
    }
    const std::uint32_t s = e_.a.storage_of[t];
    const StorageFacts& facts = e_.a.storages[s];
    Instance& instance = forward_instance_[s];
    instance.buffer = e_.Alloc(facts.bytes, Category::kInput, Stream::kCompute);
    instance.refs = facts.forward_uses + facts.backward_uses;
    buffers.emplace_back(instance.buffer, place);
    shape.bytes += facts.bytes;
  }
  if (buffers.empty()) {
    return;
  }
  shape.code = OpCode::kCopyH2d;
  shape.stream = Stream::kCompute;  // .to(device) runs on the current stream
  e_.Add(shape, {}, Phase::kForward, kNoSubject, {{host_inputs_, AccessMode::kRead, Role::kInput}});
  for (const auto& [buffer, place] : buffers) {
    e_.body->Use(buffer, AccessMode::kWrite, Role::kOutput, place);
  }
}

// The region of the op, if the stretch lies inside of it: a unit that covers it has its hooks
// outside.
std::uint32_t Walker::RegionAround(std::uint32_t i, const UnitSpans::Span& span) const {
  const std::uint32_t r = e_.a.ops[i].region;
  const bool covers =
      r == kNoRegion || (span.first <= e_.a.regions[r].first && span.last >= e_.a.regions[r].last);
  return covers ? kNoRegion : r;
}

// Per op: the marks, the hooks of units that begin, the calls of their modules, the op, the hooks
// of units that end. InRegion comes before each hook, since torch's selective checkpoint counts
// only the operators of hooks that run inside of it.
void Walker::Forward() {
  std::fill(forward_instance_.begin(), forward_instance_.end(), Instance{});
  std::fill(rerun_instance_.begin(), rerun_instance_.end(), Instance{});
  LoadInputs();
  TakeReceived();
  if (offload_) {
    offload_->BeginForward();
  }
  for (std::uint32_t i = e_.Stage().begin; i < e_.Stage().end; ++i) {
    if (forward_mark_[i]) {
      e_.body->MarkLayer();
      if (offload_) {
        offload_->NextForwardLayer();
      }
    }
    for (const Event& event : enter_.At(i)) {
      rules_.InRegion(RegionAround(i, event.call), Phase::kForward);
      rules_.PreForward(event.unit, Phase::kForward);
    }
    for (const Event& event : called_.At(i)) {
      rules_.InRegion(RegionAround(i, event.call), Phase::kForward);
      rules_.ModuleCalled(event.unit, Phase::kForward);
    }
    ForwardOp(i, Phase::kForward);
    for (const Event& event : leave_.At(i)) {
      rules_.InRegion(RegionAround(i, event.call), Phase::kForward);
      rules_.PostForward(event.unit, Phase::kForward);
    }
  }
  if (offload_) {
    offload_->EndForward();
  }
  if (e_.in.job.mode == JobMode::kTrain) {
    SwapInFlight();
  }
}

// What forward has left goes to the micro-batch's place, or comes back from there.
void Walker::SwapInFlight() {
  InFlight& kept = in_flight_[Place()];
  kept.forward.resize(forward_instance_.size());
  kept.extra.resize(extra_.size());
  kept.early.resize(early_.size());
  kept.forward.swap(forward_instance_);
  kept.extra.swap(extra_);
  kept.early.swap(early_);
  kept.grads.swap(grads_);
  kept.grad_of_tensor.resize(grad_of_tensor_.size(), kNoGrad);
  kept.grad_of_tensor.swap(grad_of_tensor_);
}

void Walker::AddCompute(std::uint32_t i, Phase phase, ShapeId shape, std::uint16_t occurrence) {
  BodyBuilder::OpArgs args;
  args.shape = shape;
  args.phase = phase;
  args.subject = i;
  args.micro_batch = e_.micro_batch;
  args.occurrence = occurrence;
  e_.body->Add(args);
}

void Walker::UseInputs(std::uint32_t i, Phase phase) {
  for (std::size_t j = 0; j < e_.in.model.ops[e_.a.ReaderOf(i)].inputs.size(); ++j) {
    e_.body->Use(InputOf(i, j, phase), AccessMode::kRead, Role::kInput,
                 static_cast<std::uint16_t>(j));
  }
}

BufferId Walker::InputOf(std::uint32_t i, std::size_t input, Phase phase) {
  const TensorId tensor = e_.in.model.ops[e_.a.ReaderOf(i)].inputs[input];
  const std::uint32_t s = e_.a.storage_of[tensor.value];
  return (phase == Phase::kRecompute ? InstanceFor(s, i) : forward_instance_[s]).buffer;
}

void Walker::UseParameters(std::uint32_t i) {
  const ModelOp& op = e_.in.model.ops[i];
  for (std::size_t k = 0; k < op.params.size(); ++k) {
    const UnitId unit = spans_.unit_of_param[op.params[k].value];
    const bool is_whole = whole_.valid() && e_.a.quantized[op.params[k].value];
    const BufferId storage = is_whole ? whole_ : rules_.ParameterStorage(unit, i);
    e_.body->Use(storage, AccessMode::kRead, Role::kParameter, static_cast<std::uint16_t>(k));
  }
}

// Example: a frozen weight of 1,024 x 1,024 in nf4. A buffer of 2 MiB in bf16 lives while the op
// runs. A cast reads the 512 KiB of codes and the scales and writes it, in forward, recomputation
// and each backward that needs the weight.
void Walker::MakeWhole(std::uint32_t i, Phase phase) {
  const ModelOp& op = e_.in.model.ops[i];
  if (op.params.empty() || !e_.a.quantized[op.params[0].value] ||
      (phase == Phase::kBackward && !MakesData(i))) {
    return;
  }
  std::int64_t elements = 0;  // of all experts at once
  for (const ParamId p : op.params) {
    elements += e_.a.quantized[p.value] ? e_.in.model.params[p.value].Elements() : 0;
  }
  const UnitId unit = spans_.unit_of_param[op.params[0].value];
  const DType dtype = e_.in.job.precision.param;
  const Bytes size(elements * SizeOf(dtype));
  const QuantizedSize packed = SizeOfQuantized(e_.in.job.frozen_format, elements, 1);
  whole_ =
      e_.Hold(e_.Alloc(size, Category::kTemporary, Stream::kCompute), Holds::kTensors, i, dtype);
  e_.AddCopy(OpCode::kCast, Stream::kCompute, {phase, unit.value}, packed.packed + packed.scales,
             size,
             {{rules_.ParameterStorage(unit, i), AccessMode::kRead, Role::kInput},
              {whole_, AccessMode::kWrite, Role::kOutput}});
}

void Walker::DropWhole() {
  if (whole_.valid()) {
    e_.body->Free(std::exchange(whole_, BufferId()));
  }
}

// Storage for the outputs that are no views of inputs, those of a GELU or a sum that the op runs
// among them; those nobody will read get no references. Returns all but the sum.
std::vector<Walker::Instance*> Walker::AllocateOutputs(std::uint32_t i, bool rerun) {
  std::vector<Instance*> fresh;
  if (i > 0 && e_.a.ops[i - 1].runs_next) {
    return fresh;  // made there
  }
  const bool passing = rerun && IsPassed(e_.a, running_, i);
  const auto allocate = [&](std::uint32_t producer) {
    for (const TensorId t : e_.in.model.ops[producer].outputs) {
      const std::uint32_t s = e_.a.storage_of[t.value];
      const StorageFacts& storage = e_.a.storages[s];
      if (storage.producer != producer) {
        continue;
      }
      Instance& instance = rerun ? rerun_instance_[s] : forward_instance_[s];
      instance.refs = !rerun    ? storage.forward_uses + storage.backward_uses
                      : passing ? storage.passing_uses
                                : storage.rerun_uses;
      const bool kept = rerun || storage.backward_uses > 0;
      if (HandsOver() && s == e_.a.storage_of[e_.Stage().sent.value]) {
        instance.buffer = received_[PlaceBehind()];
        ++instance.refs;  // it stays
        continue;
      }
      instance.buffer = e_.Alloc(storage.bytes, kept ? Category::kActivation : Category::kTemporary,
                                 Stream::kCompute);
      fresh.push_back(&instance);
    }
  };
  if (const std::uint32_t reader = e_.a.ReaderOf(i); reader != i) {
    allocate(reader);
    fresh.clear();  // a sum, which this op reads
  }
  allocate(i);
  if (e_.a.ops[i].runs_next) {
    allocate(i + 1);
  }
  return fresh;
}

void Walker::AddForwardOp(std::uint32_t i, Phase phase, BufferId extra, BufferId workspace) {
  const ModelOp& op = e_.in.model.ops[i];
  const bool rerun = phase == Phase::kRecompute;
  if (rerun) {
    FetchBeside(i);
  }
  rules_.BeforeForwardOp(i, phase);
  MakeWhole(i, phase);
  if (ChecksPacking(e_.in) && e_.in.model.SpecOf(op).kind == OpKind::kAttention) {
    const OpId before = e_.LastCompute();
    e_.AddHostWait({&before, 1}, phase, kNoSubject);
  }
  AddTensorSums(i, phase);
  BufferId exchanged;
  if (e_.a.KernelsOf(i).forward_exchange.bytes > Bytes(0)) {
    exchanged = AddForwardExchange(i, phase);
  }
  (void)AddRing(i, phase, workspace);
  AddCompute(i, phase, ForwardShape(i), exchanged.valid() ? 1 : 0);
  UseInputs(i, phase);
  UseParameters(i);
  DropWhole();
  for (std::size_t j = 0; j < op.outputs.size(); ++j) {
    const std::uint32_t s = e_.a.storage_of[op.outputs[j].value];
    const bool own = e_.a.storages[s].producer == i;  // otherwise a view of an input
    const Instance& instance =
        !rerun ? forward_instance_[s] : (own ? rerun_instance_[s] : InstanceFor(s, i));
    e_.body->Use(instance.buffer, AccessMode::kWrite, Role::kOutput, static_cast<std::uint16_t>(j));
  }
  const std::uint32_t other = e_.a.ops[i].runs_next ? i + 1 : e_.a.ReaderOf(i);
  if (other != i) {
    const std::uint32_t s = e_.a.storage_of[e_.in.model.ops[other].outputs.front().value];
    e_.body->Use((rerun ? rerun_instance_ : forward_instance_)[s].buffer, AccessMode::kWrite,
                 Role::kOutput, static_cast<std::uint16_t>(op.outputs.size()));
  }
  if (extra.valid()) {
    e_.body->Use(extra, AccessMode::kWrite, Role::kSaved);
  }
  if (workspace.valid()) {
    e_.body->Use(workspace, AccessMode::kWrite, Role::kWorkspace);
  }
  if (exchanged.valid()) {
    e_.body->Use(exchanged, AccessMode::kRead, Role::kExchange);
    e_.body->Free(exchanged);
  }
}

// Takes one reference from each input that forward of the op has read, and tells the offload.
void Walker::ReleaseRead(std::uint32_t i, bool rerun) {
  for (const TensorId t : e_.in.model.ops[i].inputs) {
    const std::uint32_t s = e_.a.storage_of[t.value];
    const std::uint32_t producer = e_.a.storages[s].producer;
    if (producer != kNoRegion && e_.a.ops[producer].runs_loss) {
      continue;  // logits, which backward makes
    }
    Release(rerun ? InstanceFor(s, i) : forward_instance_[s]);
    if (offload_ && !rerun) {
      offload_->AfterForwardRead(s, forward_instance_[s].buffer);
    }
  }
}

// Order of allocations: outputs, private saved tensors, workspace. Then the op itself. Then the
// workspace goes, and saved tensors that this run does not keep, and each input loses a reference.
// Ops that a neighbour's kernel runs (fusion.h) write nothing here.
void Walker::ForwardOp(std::uint32_t i, Phase phase) {
  const ModelOpFacts& facts = e_.a.ops[i];
  if (facts.left_to_next) {
    return;
  }
  if (facts.runs_loss || (i > 0 && e_.a.ops[i - 1].runs_loss)) {
    ReleaseRead(i, false);
    return;
  }
  const OpKernels& k = e_.a.KernelsOf(i);
  const bool rerun = phase == Phase::kRecompute;
  if (!k.metrics.empty()) {
    DropResults();  // the model has handed out new ones
  }
  const std::vector<Instance*> fresh = AllocateOutputs(i, rerun);
  const bool keeps_extra =
      k.extra_saved > Bytes(0) &&
      (rerun ? facts.has_backward && !IsPassed(e_.a, running_, i) : facts.saves_in_forward);
  BufferId extra, early, workspace;
  const std::span<const Bytes> tensors = k.extra_saved_tensors;
  const Category category = keeps_extra ? Category::kActivation : Category::kTemporary;
  const Bytes goes_early = Summed<Bytes>(tensors.first(k.early_tensors));
  if (goes_early > Bytes(0)) {
    early = e_.AllocPieces(goes_early, e_.InternPieces(tensors.first(k.early_tensors)), category,
                           Stream::kCompute);
  }
  if (k.extra_saved > goes_early) {
    extra = e_.AllocPieces(k.extra_saved - goes_early,
                           e_.InternPieces(tensors.subspan(k.early_tensors)), category,
                           Stream::kCompute);
  }
  if (k.forward_workspace > Bytes(0)) {
    workspace = e_.AllocPieces(k.forward_workspace, e_.InternPieces(k.forward_workspace_tensors),
                               Category::kTemporary, Stream::kCompute);
  }
  if (IsExchange(i)) {
    AddExchangeOfRows(i, phase);
  } else if (!k.forward.empty()) {
    AddForwardOp(i, phase, extra, workspace);
    if (early.valid()) {
      e_.body->Use(early, AccessMode::kWrite, Role::kSaved);
    }
  }
  if (workspace.valid()) {
    e_.body->Free(workspace);
  }
  if (keeps_extra) {
    extra_[i] = extra;
    early_[i] = early;
  } else {
    for (const BufferId buffer : {extra, early}) {
      if (buffer.valid()) {
        e_.body->Free(buffer);
      }
    }
  }
  for (std::uint32_t reader = e_.a.ReaderOf(i); reader <= i; ++reader) {
    ReleaseRead(reader, rerun);
  }
  for (Instance* instance : fresh) {
    if (instance->refs == 0) {
      e_.body->Free(instance->buffer);
    }
  }
}

void Walker::Metrics() {
  for (std::uint32_t i = e_.Stage().begin; i < e_.Stage().end; ++i) {
    const OpKernels& k = e_.a.KernelsOf(i);
    if (k.metrics.empty()) {
      continue;
    }
    const Bytes size = Summed<Bytes>(k.metrics_workspace_tensors);
    const BufferId workspace = e_.AllocPieces(size, e_.InternPieces(k.metrics_workspace_tensors),
                                              Category::kTemporary, Stream::kCompute);
    OpShape shape;
    shape.dtype = e_.in.job.precision.param;
    const bool trains = e_.in.job.mode == JobMode::kTrain;
    AddCompute(i, trains ? Phase::kBackward : Phase::kForward, e_.Intern(shape, k.metrics), 2);
    UseInputs(i, Phase::kForward);
    e_.body->Use(workspace, AccessMode::kWrite, Role::kWorkspace);
    e_.body->Free(workspace);
    for (const TensorId t : e_.in.model.ops[i].inputs) {
      Instance& instance = forward_instance_[e_.a.storage_of[t.value]];
      if (--instance.refs == 0) {
        results_.push_back(instance.buffer);
      }
    }
  }
}

void Walker::DropResults() {
  for (const BufferId buffer : results_) {
    e_.body->Free(buffer);
  }
  results_.clear();
}

}  // namespace shardwright
