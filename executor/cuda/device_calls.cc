// The work that a CudaDevice gives to the GPU for each kind of call, and the calls that run on the
// host.
//
//   CopyCall         a memcpy where dtypes agree and nothing is added, else one MapKernel per run
//   CollectiveCall   the group's Submit: NCCL or loopback
//   DivideCall       one MapKernel per range, x / divisor; none where the divisor is 1
//   ModelCall        the kernels of ops/, and behind a loss the copy of loss and faults to the host
//   InitializeCall   values made on the host, then one copy
//   NormCall         partial sums of squares, then their sum, in device memory
//   ClipCall         adds the norms of other parts, decides about the step, scales the gradients
//   UpdateCall       one UpdateKernel per 16 ranges (ops/update.cc)
//
// Nothing here waits for the GPU, but first values and, with a loss scale, the decision about a
// step.

#include <algorithm>
#include <cmath>
#include <thread>
#include <vector>

#include "executor/cuda/device.h"
#include "executor/cuda/kernels/sums.h"
#include "executor/cuda/ops/launch.h"
#include "topologies/mesh.h"

namespace shardwright {

void CudaDevice::SubmitCall(const Work& work, Queue& queue, Pending& pending) {
  const GpuStream stream = queue.stream;
  StepContext& step = *work.step;
  if (const auto* copy = std::get_if<CopyCall>(work.call)) {
    SubmitCopy(*copy, stream);
  } else if (const auto* collective = std::get_if<CollectiveCall>(work.call)) {
    SubmitCollective(*collective, work, stream, pending);
  } else if (const auto* divide = std::get_if<DivideCall>(work.call)) {
    DivideAll(divide->ranges, divide->divisor, stream);
  } else if (auto* model = std::get_if<ModelCall>(work.call)) {
    SubmitModel(*model, work, stream, pending);
  } else if (const auto* initialize = std::get_if<InitializeCall>(work.call)) {
    SubmitInitialize(*initialize, stream);
  } else if (const auto* norm = std::get_if<NormCall>(work.call)) {
    SubmitNorm(*norm, step, stream);
  } else if (const auto* clip = std::get_if<ClipCall>(work.call)) {
    SubmitClip(*clip, step, stream);
  } else if (auto* update = std::get_if<UpdateCall>(work.call)) {
    SubmitUpdate(*update, step, stream);
  }
}

// Example: fp32 gradients of 1,000 elements become bf16: one MapKernel, 1 block. bf16 to bf16: a
// memcpy of 2,000 bytes. With `accumulate` the target is read, too: z = z + a.
void CudaDevice::SubmitCopy(const CopyCall& call, GpuStream stream) {
  for (const ByteRange& zeros : call.zeros) {
    gpu_.Fill(zeros.data, 0, zeros.bytes, stream);
  }
  const OpContext context{gpu_, stream, fault_};
  for (const CopyRun& run : call.runs) {
    if (run.from_dtype == run.to_dtype && !run.accumulate) {
      gpu_.Copy(run.to, run.from, run.count * SizeOf(run.to_dtype), stream);
      continue;
    }
    gpu::MapArgs args;
    args.adds = run.accumulate;
    args.n = run.count;
    args.a = {const_cast<std::byte*>(run.from), run.from_dtype};
    args.z = {run.to, run.to_dtype};
    ops::Map(context, args);
  }
}

// Events of a group are made once and recorded again for each of its collectives, which take turns.
void CudaDevice::SubmitCollective(const CollectiveCall& call, const Work& work, GpuStream stream,
                                  const Pending& pending) {
  GroupState& state = group_states_[call.group];
  for (GpuEvent* const event : {&state.ready, &state.summed, &state.done}) {
    if (event->value == nullptr) {
      *event = gpu_.NewEvent(false);
    }
  }
  const CollectivePlace place{gpu_, stream, state.ready, state.summed, state.done, pending.start};
  world_.GroupOf(call.group, rank_)
      .Submit(world_.MemberOf(call.group, rank_), call, *work.name, place);
}

void CudaDevice::DivideAll(std::span<const ElementRange> ranges, double divisor, GpuStream stream) {
  if (divisor == 1.0) {
    return;
  }
  for (const ElementRange& range : ranges) {
    gpu::MapArgs args;
    args.op = gpu::MapOp::kDivide;
    args.factor = static_cast<float>(divisor);
    args.n = range.count;
    args.a = args.z = {range.data, range.dtype};
    ops::Map({gpu_, stream, fault_}, args);
  }
}

// Step number and loss scale are those of now; all else of the call was bound before the first
// step. So a call costs the host no memory and no search.
void CudaDevice::SubmitModel(ModelCall& call, const Work& work, GpuStream stream,
                             Pending& pending) {
  call.call.dropout.step = work.step->step;
  call.call.loss_scale = work.step->LossScale();
  SubmitModelOp(call.call, call.is_backward, {gpu_, stream, fault_});
  if (call.loss != nullptr) {
    pending.readback = TakeReadback();
    pending.loss_to = &work.step->losses[call.micro_batch];
    gpu_.Copy(&pending.readback->number, call.loss, sizeof(float), stream);
    gpu_.Copy(&pending.readback->fault, fault_, sizeof(gpu::Fault), stream);
    if (world_.options.counter != nullptr) {
      CountLabels(call.call, pending, stream);
    }
  }
}

// Evaluation: verdicts per row, then two counts, which come back with the loss.
void CudaDevice::CountLabels(const ModelOpCall& call, Pending& pending, GpuStream stream) {
  const std::int64_t rows = LossRowsOf(call);
  if (rows > label_rows_) {
    constexpr auto kCounts = static_cast<std::int64_t>(sizeof(gpu::LabelCounts));
    label_counts_ = reinterpret_cast<gpu::LabelCounts*>(NewMemory(Bytes(kCounts + rows)));
    label_rows_ = rows;
  }
  SubmitLabelCount(call, reinterpret_cast<std::uint8_t*>(label_counts_ + 1), label_counts_,
                   {gpu_, stream, fault_});
  gpu_.Copy(&pending.readback->labels, label_counts_, sizeof(gpu::LabelCounts), stream);
  pending.loss = &call;
  pending.key = call.dropout;
}

// First values are made on the host, so that they are the host device's bits.
void CudaDevice::SubmitInitialize(const InitializeCall& call, GpuStream stream) {
  const Model& model = world_.context.input.model;
  std::vector<std::byte> values(static_cast<std::size_t>(call.elements * SizeOf(call.dtype)));
  // Thirty nanoseconds each, which are minutes of one core for billions. All ranks do it at once.
  const Program& program = world_.context.input.program;
  const auto ranks = static_cast<int>(MeshOf(program).RankCount());
  if (!call.unit.valid()) {
    InitializeModelBuffers(
        model, {reinterpret_cast<float*>(values.data()), static_cast<std::size_t>(call.elements)});
  } else {
    InitializeShard(model, world_.context.init_rules, world_.context.input.training.seed,
                    call.pieces, {values.data(), call.dtype, call.elements},
                    std::max(1, static_cast<int>(std::thread::hardware_concurrency()) / ranks));
  }
  gpu_.Copy(call.data, values.data(), static_cast<std::int64_t>(values.size()), stream);
  const GpuEvent event = TakeEvent(false);
  gpu_.Record(event, stream);
  try {
    Await(event, "first values");
  } catch (...) {
    gpu_.Synchronize(event);  // the copy reads `values`, which die here
    throw;
  }
  free_events_.push_back(event);
}

// *norm = sum of (g / divisor)^2 over this rank's gradients. The divisor holds the loss scale: with
// scale 1,024 and divisor 4, gradients are 4,096 times too large. Either they are divided first
// (`in_place`), or their squares' sum is, by 4,096^2.
void CudaDevice::SubmitNorm(const NormCall& call, const StepContext& step, GpuStream stream) {
  const double divisor = call.divisor * step.LossScale();
  if (call.in_place) {
    DivideAll(call.gradients, divisor, stream);
  }
  const std::int64_t count = NormPartials(call.gradients);
  if (count > squares_count_) {
    squares_ = reinterpret_cast<double*>(
        NewMemory(Bytes(count * static_cast<std::int64_t>(sizeof(double)))));
    squares_count_ = count;
  }
  SubmitGradientNorm(call.gradients, call.in_place ? 1.0 : divisor, squares_,
                     reinterpret_cast<float*>(call.norm), {gpu_, stream, fault_});
}

// Whether the step is skipped decides what the host issues next, so it waits for the norm.
// A norm that is infinite or NaN says that the scaled gradients overflowed in fp16: the step is
// skipped, and the scaler told. The rule is that of torch.amp.GradScaler.
void CudaDevice::DecideStep(const ClipCall& call, const StepContext& step, GpuStream stream) {
  ScalingState& scaling = *step.scaling;
  Readback* const norm = TakeReadback();
  const GpuEvent event = TakeEvent(false);
  gpu_.Copy(&norm->number, call.norm, sizeof(float), stream);
  gpu_.Record(event, stream);
  Await(event, "the norm of the gradients");
  scaling.applied = step.LossScale();
  scaling.skips = !std::isfinite(norm->number);
  scaling.skipped += scaling.skips ? 1 : 0;
  scaling.scaler.Update(scaling.skips, world_.context.input.training.loss_scale);
  free_readbacks_.push_back(norm);
  free_events_.push_back(event);
}

// The norms of the parts of a model are added on the GPU, and ClipKernel reads the sum there:
// clipping makes no rank wait for its host.
void CudaDevice::SubmitClip(const ClipCall& call, StepContext& step, GpuStream stream) {
  for (const std::byte* const other : call.other_norms) {
    const gpu::Array sum{call.norm, DType::kFp32};
    ops::Map({gpu_, stream, fault_}, {.op = gpu::MapOp::kAdd,
                                      .n = 1,
                                      .a = sum,
                                      .b = {const_cast<std::byte*>(other), DType::kFp32},
                                      .z = sum});
  }
  double scale = 1.0;
  if (ScalingState* const scaling = step.scaling; scaling != nullptr && scaling->is_on) {
    if (call.decides) {
      DecideStep(call, step, stream);
    }
    if (scaling->skips) {
      return;
    }
    scale = scaling->applied;
  }
  if (call.divides) {
    DivideAll(call.gradients, call.divisor * scale, stream);
  }
  if (!world_.context.input.job.clip_gradients) {  // the norm was taken for the loss scale alone
    return;
  }
  for (const ElementRange& range : call.gradients) {
    LaunchKernel<gpu::ClipKernel>(
        gpu_, stream, CeilDiv(range.count, gpu::ClipKernel::kPerBlock), 0,
        {.x = {range.data, range.dtype},
         .n = range.count,
         .squares = reinterpret_cast<const float*>(call.norm),
         .max_norm = static_cast<float>(world_.context.input.training.clip_norm)});
  }
}

// Skipped steps do not count: update 10 of a run that skipped two is step 8 of AdamW's corrections.
void CudaDevice::SubmitUpdate(UpdateCall& call, const StepContext& step, GpuStream stream) {
  const ScalingState* const scaling = step.scaling;
  if (scaling != nullptr && scaling->skips) {
    return;
  }
  DivideAll(call.gradients, call.divisor, stream);
  for (std::size_t i = 0; i < call.shards.size(); ++i) {
    OptimizerCall& shard = call.shards[i];
    shard.ranges = call.ranges[i];
    shard.learning_rate = step.learning_rate;
    shard.step = step.update - (scaling != nullptr ? scaling->skipped : 0);
    SubmitShardUpdate(shard, world_.context.input.training.optimizer, {gpu_, stream, fault_});
  }
}

// Divides and clips the gradients of an update in host memory, together with the other ranks.
void CudaDevice::ClipOnHost(UpdateCall& update, const Work& work) {
  auto* const memory = reinterpret_cast<std::byte*>(&norm_);
  Call squares = NormCall{update.gradients, update.divisor, memory};
  Execute(squares, *work.step, world_.context);
  if (update.clip_group.valid()) {
    norm_sum_.code = OpCode::kAllReduce;
    norm_sum_.group = update.clip_group;
    norm_sum_.elements = 1;
    norm_sum_.send = norm_sum_.receive = memory;
    (void)world_.HostGroupOf(update.clip_group, rank_)
        .Run(world_.MemberOf(update.clip_group, rank_), norm_sum_, *work.name, Now(), SimTime(0));
  }
  Call clip = ClipCall{update.gradients, memory};
  Execute(clip, *work.step, world_.context);
}

// An op of the host, such as an update of offloaded parameters. It waits for its inputs itself, so
// its span is ready, begins and arrives at one time.
void CudaDevice::RunOnHost(const Work& work) {
  ring_.Issue(*work.name);
  Span unused;
  Span& span = work.span != nullptr ? *work.span : unused;
  span.issued = span.issue_end = Now();
  for (const Ticket& ticket : work.waits) {
    Wait(ticket);
  }
  span.ready = span.arrival = span.start = Now();
  try {
    if (auto* const update = work.call == nullptr ? nullptr : std::get_if<UpdateCall>(work.call);
        update != nullptr && update->clips) {
      ClipOnHost(*update, work);
    }
    if (work.call != nullptr) {
      Execute(*work.call, *work.step, world_.context);
    }
  } catch (const std::exception& error) {
    world_.faults.Report("rank " + std::to_string(rank_.value) + ", op " + *work.name + ": ",
                         error);
    world_.faults.ThrowIfFailed();
  }
  span.end = Now();
  if (work.end != nullptr) {
    *work.end = span.end;
  }
}

}  // namespace shardwright
