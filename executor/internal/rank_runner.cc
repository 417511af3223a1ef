#include "executor/internal/rank_runner.h"

#include <algorithm>
#include <utility>

#include "topologies/mesh.h"

namespace shardwright {
namespace {

BoundBody& BoundOf(Binding& binding, BodyKind kind) {
  return kind == BodyKind::kInit     ? binding.init
         : kind == BodyKind::kWarmup ? binding.warmup
                                     : binding.step;
}

SimTime DurationOf(const DurationTable& table, BodyKind kind, std::uint32_t op) {
  const std::vector<SimTime>& durations = kind == BodyKind::kInit     ? table.init
                                          : kind == BodyKind::kWarmup ? table.warmup
                                                                      : table.step;
  return op < durations.size() ? durations[op] : SimTime(0);
}

}  // namespace

Runtime::RankRunner::RankRunner(const ExecutorInput& input, const RunOptions& options, Rank rank,
                                std::unique_ptr<Device> device, LossBook& losses)
    : input_(input),
      options_(options),
      rank_(rank),
      device_(std::move(device)),
      losses_(losses),
      slots_(input.program.carry_slot_count),
      memory_(input.program) {
  scaling_.is_on = input.job.precision.param == DType::kFp16;
  scaling_.scaler.scale = input.training.loss_scale.initial;
  RankMemory memory;
  memory.device = device_->Allocate(input.placement.device_size, false);
  memory.host = device_->Allocate(input.placement.host_size, true);
  binding_ = Bind(input, rank, memory);
  for (const BodyKind kind : {BodyKind::kInit, BodyKind::kWarmup, BodyKind::kStep}) {
    const Body& body = BodyOf(input.program, kind);
    const auto k = static_cast<std::size_t>(kind);
    for (std::uint32_t op = 0; op < body.size(); ++op) {
      names_[k].push_back(OpName(input.program, body.ops[op]));
      last_ops_[k][static_cast<std::size_t>(StreamOf(body.ops[op]))] = OpId(op);
    }
  }
  PrepareStep();
}

Work Runtime::RankRunner::WorkOf(BodyKind kind, std::uint32_t op) {
  BoundBody& bound = BoundOf(binding_, kind);
  Work work;
  work.name = &NamesOf(kind)[op];
  work.stream = input_.program.ShapeOf(BodyOf(input_.program, kind).ops[op]).stream;
  work.call = &bound.calls[op];
  if (options_.poison) {
    work.poison = bound.poison[op];
  }
  return work;
}

Stream Runtime::RankRunner::StreamOf(const Op& op) const {
  const OpShape& shape = input_.program.ShapeOf(op);
  return InfoOf(shape.code).runs_on_host ? Stream::kHost : shape.stream;
}

void Runtime::RankRunner::PrepareStep() {
  const Body& body = input_.program.step;
  std::vector<Work> works;
  for (std::uint32_t op = 0; op < body.size(); ++op) {
    works.push_back(WorkOf(BodyKind::kStep, op));
    works.back().stream = StreamOf(body.ops[op]);
  }
  device_->Prepare(body, works);
}

// A context stays in open_ also when the run fails: streams may still use it.
StepContext& Runtime::RankRunner::OpenContext() {
  open_.emplace_back();
  open_.back().context = std::make_unique<StepContext>();
  open_.back().context->scaling = &scaling_;
  return *open_.back().context;
}

void Runtime::RankRunner::RunInit() {
  RunBody(BodyKind::kInit, OpenContext());
  device_->Finish();
  open_.clear();
}

void Runtime::RankRunner::RunSteps(std::int64_t first, std::int64_t count) {
  const TrainingOptions& training = input_.training;
  for (std::int64_t step = first; step < first + count && losses_.Begin(step); ++step) {
    StepContext& context = OpenContext();
    context.step = static_cast<std::uint32_t>(step);
    context.update = step + 1;
    context.learning_rate = LearningRateAt(training.schedule, training.optimizer.learning_rate,
                                           step, options_.epoch_of ? options_.epoch_of(step) : 0);
    context.losses.resize(static_cast<std::size_t>(input_.program.micro_batch_count));
    const bool warmup = !ran_warmup_ && !input_.program.warmup.ops.empty();
    ran_warmup_ = true;
    RunBody(warmup ? BodyKind::kWarmup : BodyKind::kStep, context);
    open_.back().last = last_;
    if (open_.size() > 1) {  // one step is under way while the next one is issued
      CloseStep();
    }
  }
  while (!open_.empty()) {
    CloseStep();
  }
  device_->Finish();
}

void Runtime::RankRunner::CloseStep() {
  for (const Ticket& ticket : open_.front().last) {
    device_->Wait(ticket);
  }
  const auto& ends = open_.front().ends;
  const StepContext& context = *open_.front().context;
  const RankReport mine{context.losses, *std::max_element(ends.begin(), ends.end()),
                        context.squared_norm, options_.asks_to_stop && options_.asks_to_stop()};
  if (options_.share_reports) {
    const std::vector<RankReport> all = options_.share_reports(context.step, mine);
    for (std::size_t r = 0; r < all.size(); ++r) {
      losses_.Enter(context.step, Rank(r), all[r]);
    }
  } else {
    losses_.Enter(context.step, rank_, mine);
  }
  open_.pop_front();
}

Span* Runtime::RankRunner::NewSpans(std::size_t count) {
  if (!options_.trace) {
    return nullptr;
  }
  spans_.emplace_back(count);
  return spans_.back().data();
}

void Runtime::RankRunner::RunBody(BodyKind kind, StepContext& context) {
  const Body& body = BodyOf(input_.program, kind);
  kind_ = kind;
  spans_of_body_ = NewSpans(body.size());
  tickets_.assign(body.size(), Ticket());
  for (std::uint32_t op = 0; op < body.size(); ++op) {
    const auto points = body.PointsBefore(OpId(op));
    if (options_.trace && !points.empty()) {
      memory_.Apply(points);
      samples_.push_back(memory_.Sample(context.step, rank_, device_->Now()));
    }
    RunOp(body, op, context);
  }
  if (options_.trace && !body.PointsAtEnd().empty()) {
    memory_.Apply(body.PointsAtEnd());
    samples_.push_back(memory_.Sample(context.step, rank_, device_->Now()));
  }
  SetCarries(body);
}

void Runtime::RankRunner::FindWaits(const Body& body, OpId op) {
  waits_.clear();
  for (const Edge edge : body.EdgesOf(op)) {
    const Ticket ticket = edge.is_carried() ? slots_[edge.slot()] : tickets_[edge.value];
    if (ticket.sequence > 0) {
      waits_.push_back(ticket);
    }
  }
}

void Runtime::RankRunner::RunOp(const Body& body, std::uint32_t op, StepContext& context) {
  const Op& program_op = body.ops[op];
  const OpShape& shape = input_.program.ShapeOf(program_op);
  FindWaits(body, OpId(op));
  Work work = WorkOf(kind_, op);
  work.waits = waits_;
  work.step = &context;
  work.least_duration = DurationOf(options_.durations, kind_, op);
  const auto stream = static_cast<std::size_t>(StreamOf(program_op));
  if (last_ops_[static_cast<std::size_t>(kind_)][stream] == OpId(op)) {
    work.end = &open_.back().ends[stream];
  }
  if (spans_of_body_ != nullptr) {
    Span& span = spans_of_body_[op];
    span.step = context.step;
    span.rank = rank_;
    span.body = kind_;
    span.op = OpId(op);
    span.stream = StreamOf(program_op);
    span.issue_begin = device_->Now();
    work.span = &span;
  }
  if (InfoOf(shape.code).runs_on_host) {
    device_->RunOnHost(work);
    return;
  }
  const auto* copy = std::get_if<CopyCall>(work.call);
  const bool loads = copy != nullptr && copy->loads_inputs;
  if (loads) {
    LoadInputs(program_op, context);
  }
  tickets_[op] = device_->Submit(work);
  if (loads) {
    inputs_read_ = tickets_[op];
  }
  last_[static_cast<std::size_t>(shape.stream)] = tickets_[op];
}

// The host's input buffer is one: the copy before must have read it.
void Runtime::RankRunner::LoadInputs(const Op& op, const StepContext& context) {
  device_->Wait(inputs_read_);
  if (binding_.inputs.empty()) {
    return;
  }
  const Program& program = input_.program;
  BatchKey key;
  key.step = context.step;
  key.count = program.micro_batch;
  key.first_sample = MeshOf(program).FirstSample(rank_, op.micro_batch, program.micro_batch);
  key.cut = {0, PlaceInGroup(MeshOf(program).Context(), rank_).index, program.context_size};
  key.model = &input_.model;
  options_.inputs(key, binding_.inputs);
}

void Runtime::RankRunner::SetCarries(const Body& body) {
  for (std::size_t s = 0; s < body.carries.size(); ++s) {
    if (body.carries[s].valid()) {
      slots_[s] = tickets_[body.carries[s].value];
    }
  }
}

void Runtime::RankRunner::MoveTraceTo(Trace& trace) {
  for (const std::vector<Span>& spans : spans_) {
    trace.spans.insert(trace.spans.end(), spans.begin(), spans.end());
  }
  trace.memory.insert(trace.memory.end(), samples_.begin(), samples_.end());
  spans_.clear();
  samples_.clear();
}

}  // namespace shardwright
